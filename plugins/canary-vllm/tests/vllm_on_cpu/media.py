"""Tiny models whose decoders have media in the place of tokens: `Listener`, a Qwen2-Audio with sounds, and `Viewer`, an
Idefics3 with images. Of such models they are some that need no torchvision."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_on_cpu.engine import SmallEngine

BEHIND = 10
"""Tokens of a prompt's text in front of its sound or image."""
PLACE = 254
"""The placeholder of a sound or an image."""
TEXT: dict[str, Any] = dict(
    vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
"""Of the decoder's configuration."""
SIDE = 56
"""Pixels of an image: 64 patches."""


def tokenizer(before: str, place: str, after: str, *others: str) -> Any:
    """One of whole words: those around a placeholder have the numbers around its own, and others those in front."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = [*others, before, place, after]
    words = [*(f"w{number}" for number in range(256 - len(special))), *special]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="w0", eos_token="w2", pad_token="w2",
        additional_special_tokens=special,
    )  # fmt: skip


class MediaEngine(SmallEngine):
    """Driven by vLLM's front end, which makes the features of sounds or images. Weights are large enough to matter."""

    kind: str
    """vLLM's word for the media."""
    at: int
    """Position of a prompt's first token of a sound or image."""
    asked: tuple[int, ...]
    """What a user gives in the place of a sound or image."""

    def __init__(self) -> None:
        import torch

        root = Path(tempfile.mkdtemp(prefix="vllm-on-cpu-"))
        self.config(root).save_pretrained(root)
        options = dict(skip_tokenizer_init=False, num_gpu_blocks_override=64, limit_mm_per_prompt={self.kind: 1})
        super().__init__(str(root), skip_mm_profiling=True, **options)
        # From the next `renew` on; with less room second computations evict what the encoder gave for others.
        self.core.vllm_config.scheduler_config.encoder_cache_size = 512
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.runner.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=draw)

    def config(self, root: Path) -> Any:
        """The model's configuration; its processor goes to ``root``."""
        raise NotImplementedError

    def noise(self, seed: int) -> Any:
        """A sound or an image, as vLLM takes it."""
        raise NotImplementedError

    def ask(self, name: str, seed: int, text: Sequence[int], new_tokens: int) -> str:
        """Queues a request with noise from a seed behind the first tokens of the text; gives its name in the
        scheduler."""
        from vllm import SamplingParams

        tokens = [*text[:BEHIND], *self.asked, *text[BEHIND:]]
        prompt: Any = {"prompt_token_ids": tokens, "multi_modal_data": {self.kind: self.noise(seed)}}
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        before = set(self.scheduler.requests)
        self.llm.llm_engine.add_request(name, prompt, params)
        (made,) = set(self.scheduler.requests) - before
        return made

    def run(self, steps: int = 0) -> dict[str, list[int]]:
        """So many steps, or all; the answers that were finished."""
        done, left = {}, steps or -1
        while left and self.llm.llm_engine.has_unfinished_requests():
            left -= 1
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        return done


class Listener(MediaEngine):
    """A second of sound is 25 tokens."""

    kind, at, asked = "audio", BEHIND + 1, (PLACE - 1, PLACE, PLACE + 1)

    def config(self, root: Path) -> Any:
        from transformers import Qwen2AudioConfig, Qwen2AudioProcessor, WhisperFeatureExtractor

        words = tokenizer("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
        Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=30), words).save_pretrained(root)
        sounds = dict(
            d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8,
            max_source_positions=1500,
        )  # fmt: skip
        text = {"model_type": "qwen2", **TEXT}
        config = Qwen2AudioConfig(audio_config=sounds, text_config=text, audio_token_index=PLACE)
        config.architectures = ["Qwen2AudioForConditionalGeneration"]
        return config

    def noise(self, seed: int) -> Any:
        import numpy as np

        return np.random.default_rng(seed).standard_normal(16000).astype("float32"), 16000


class Viewer(MediaEngine):
    """An image is 16 tokens, each of four patches. vLLM puts two tokens in front that are the same for all."""

    kind, at, asked = "image", BEHIND + 2, (PLACE,)

    def config(self, root: Path) -> Any:
        from transformers import Idefics3Config, Idefics3ImageProcessorPil, Idefics3Processor

        size = {"longest_edge": SIDE}
        pixels = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        words = tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
        Idefics3Processor(pixels, words, image_seq_len=16).save_pretrained(root)
        images = dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE,
            patch_size=SIDE // 8,
        )  # fmt: skip
        text = {"model_type": "llama", **TEXT}
        config = Idefics3Config(vision_config=images, text_config=text, image_token_id=PLACE, pad_token_id=2)
        config.architectures = ["Idefics3ForConditionalGeneration"]
        return config

    def noise(self, seed: int) -> Any:
        import numpy as np
        from PIL import Image

        return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
