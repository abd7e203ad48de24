"""`Listener`: a tiny Qwen2-Audio, whose decoder has sounds in the place of tokens. Of models with media it is one that
needs no torchvision."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_on_cpu.engine import SmallEngine

BEGIN, SOUND, END = 253, 254, 255
"""Tokens around a sound, and its placeholder."""
AT, LENGTH = 11, 25
"""Position of a prompt's sound, and number of its tokens: a second."""


def folder(root: Path) -> str:
    """The model's, with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2AudioConfig, Qwen2AudioProcessor, WhisperFeatureExtractor

    special = ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"]
    words = [*(f"w{number}" for number in range(BEGIN)), *special]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="w0", eos_token="w2", pad_token="w2",
        additional_special_tokens=special,
    )  # fmt: skip
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=30), tokenizer).save_pretrained(root)
    sounds = dict(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=1500,
    )  # fmt: skip
    text = dict(
        model_type="qwen2", vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    config = Qwen2AudioConfig(audio_config=sounds, text_config=text, audio_token_index=SOUND)
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    config.save_pretrained(root)
    return str(root)


class Listener(SmallEngine):
    """Driven by vLLM's front end, which makes the features of a sound. Weights are large enough to matter."""

    def __init__(self) -> None:
        import torch

        root = Path(tempfile.mkdtemp(prefix="vllm-on-cpu-"))
        options = dict(skip_tokenizer_init=False, num_gpu_blocks_override=64, limit_mm_per_prompt={"audio": 1})
        super().__init__(folder(root), skip_mm_profiling=True, **options)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.runner.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=draw)

    def ask(self, name: str, sound: int, text: Sequence[int], new_tokens: int) -> str:
        """Queues a request with a second of noise from a seed behind the first tokens of the text; gives its name in
        the scheduler."""
        import numpy as np
        from vllm import SamplingParams

        noise = np.random.default_rng(sound).standard_normal(16000).astype("float32")
        tokens = [*text[: AT - 1], BEGIN, SOUND, END, *text[AT - 1 :]]
        prompt: Any = {"prompt_token_ids": tokens, "multi_modal_data": {"audio": (noise, 16000)}}
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
