"""A tiny Whisper: a program of its own, since its model needs files of a processor. Prints one line of JSON.

python -m vllm_on_cpu.encoder_script [v2]
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if "v2" in sys.argv:
    import vllm_on_cpu.v2_script  # noqa: F401  (what must be done before Triton is imported)
from vllm_on_cpu import guarded
from vllm_on_cpu.engine import SmallEngine

STATES = 50
"""Of the encoder, for a second of sound."""


def folder(root: Path) -> str:
    """The model's, with a tokenizer of single bytes."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = "endoftext startoftranscript en translate transcribe startoflm startofprev nospeech notimestamps 0.00"
    words = [*bytes_to_unicode().values(), *(f"<|{word}|>" for word in special.split())]
    (root / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (root / "merges.txt").write_text("#version: 0.2\n")
    files = {"vocab_file": str(root / "vocab.json"), "merges_file": str(root / "merges.txt")}
    tokenizer = WhisperTokenizerFast(**files)
    tokenizer.add_special_tokens({"additional_special_tokens": words[256:]})
    WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer).save_pretrained(root)
    config = WhisperConfig(
        vocab_size=320, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=STATES, max_target_positions=128, pad_token_id=256, bos_token_id=256, eos_token_id=256,
        decoder_start_token_id=257, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(root)
    return str(root)


def sound(seed: int) -> dict[str, Any]:
    """A request's prompt: a second of noise, and three tokens of the decoder's."""
    import numpy as np

    noise = np.random.default_rng(seed).standard_normal(16000).astype("float32")
    audio = {"prompt": "", "multi_modal_data": {"audio": (noise, 16000)}}
    return {"encoder_prompt": audio, "decoder_prompt": {"prompt_token_ids": [257, 258, 260][: 2 + seed % 2]}}


class Whisper(SmallEngine):
    """Driven by vLLM's front end, which makes the features of the sound."""

    def __init__(self) -> None:
        root = tempfile.mkdtemp(prefix="vllm-on-cpu-")
        options = {"skip_tokenizer_init": False, "max_model_len": 96, "max_num_batched_tokens": 256}
        super().__init__(folder(Path(root)), enable_prefix_caching=False, **options)
        import torch

        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.runner.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3, generator=draw)

    def ask(self, seeds: Sequence[int], new_tokens: int) -> list[str]:
        """Queues requests, and gives their names in the scheduler."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        before = set(self.scheduler.requests)
        for seed in seeds:
            self.llm.llm_engine.add_request(f"sound-{seed}", sound(seed), params)
        return [name for name in self.scheduler.requests if name not in before]

    def run(self, steps: int = 0) -> dict[str, list[int]]:
        """So many steps, or all; the answers that were finished."""
        done = {}
        left = steps or -1
        while left and self.llm.llm_engine.has_unfinished_requests():
            left -= 1
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id.partition("#")[0]] = list(output.outputs[0].token_ids)
        return done

    def serve_sounds(self) -> list[dict[str, list[int]]]:
        """Waves of requests, so that blocks come round, of states after tokens and of tokens after states."""
        answers = []
        for wave in range(4):
            self.ask(range(10 * wave, 10 * wave + 3 + wave), 8 + 6 * wave)
            answers.append(self.run())
        return answers


@contextmanager
def exchanged(engine: Whisper) -> Iterator[None]:
    """The bug of a table of cross-attention whose first two rows have changed places."""
    runner = engine.runner
    v2 = hasattr(runner, "req_states")
    owner, name = (runner.block_tables, "gather_block_tables") if v2 else (runner, "_model_forward")
    right = getattr(owner, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        table = runner.block_tables.input_block_tables[1] if v2 else runner.input_batch.block_table[1].block_table.gpu
        given = right(*args, **kwargs) if v2 else None
        table[[0, 1]] = table[[1, 0]]
        return given if v2 else right(*args, **kwargs)

    setattr(owner, name, wrong)
    try:
        yield
    finally:
        delattr(owner, name)


def main() -> None:
    """Serves without and with Canary; then flips bits of each layer of cross-attention, and exchanges two rows."""
    engine = Whisper()
    engine.renew()
    plain = engine.serve_sounds()
    told: dict[str, Any] = {"v2": hasattr(engine.runner, "req_states")}
    with guarded.guard(engine, audit=24, read_check=128, scrub_budget="64KiB") as guard:
        told |= {"same": engine.serve_sounds() == plain, "answers": sum(map(len, plain)), "trouble": guard.trouble()}
        (audit,), (coverage,) = guard.findings.told("audit"), guard.findings.told("coverage")
        told |= {"unclaimed": audit.fields["unclaimed_bytes"], "coverage": coverage.fields["coverage_ratio"]}
        stats = guard.canary.stats()
        told |= {name: stats[name] for name in ("sampled_tokens", "answered_tokens", "answers_unknown")}
        told["regions"] = {name: len(region.sources) for name, region in guard.canary.regions.items()}
    with guarded.guard(engine) as guard:
        names = engine.runner.kv_cache_config.kv_cache_groups[1].layer_names
        poked, found = [], []
        for number, (name, half) in enumerate((name, half) for name in names for half in "kv"):
            (request,) = engine.ask([number], 12)
            engine.run(3)
            engine.poke_layer(name, half, request, 2 + number)
            poked.append([name.split(".")[3], half, 2 + number, request])
            engine.run()
            guard.canary.drain()
        for v in guard.findings.violations:
            found.append([str(v.layer), v.half, v.stored_position, v.stored_request])
        told |= {"poked": poked, "found": found, "flipped": sorted({v.region for v in guard.findings.violations})}
    with guarded.guard(engine) as guard:
        one, other = engine.ask([1, 2], 12)
        engine.run(3)
        told["clean"] = guard.trouble()
        with exchanged(engine):
            engine.run(1)
        guard.canary.drain()
        told["exchanged"] = sorted({(v.kind.name, v.region, v.request or "") for v in guard.findings.violations})
        told["asked"] = sorted([one, other])
        told["said"] = guard.findings.violations[0].explanation if guard.findings.violations else ""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
