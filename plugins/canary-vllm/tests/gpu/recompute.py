"""Breaks a real vLLM on a GPU from outside, and shows that a second computation, and the reference of attention beside
it, tell it, with layer and position; and nothing before.

    python3 recompute.py llama gemma3 deepseek expanded fp8 int8      # SETUPs; each in a process of its own, some 40 s

Three layers with random weights that matter, bfloat16, CUDA graphs for decodes. All checks of bytes are off. The
noise is learnt first. One line for each fault goes to stdout; raw results to ``$OUT/recompute-SETUP.json``. Exits with
1 if anything is not as it should.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("OUT", "/tmp/canary-recompute"))
GRAPHS: dict[str, Any] = dict(
    enforce_eager=False,
    compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
)
OPTIONS: dict[str, Any] = dict(
    load_format="auto", dtype="bfloat16", max_model_len=512, num_gpu_blocks_override=200, block_size=16,
    max_num_batched_tokens=256, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 29,
)  # fmt: skip
SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    num_hidden_layers=3, initializer_range=0.1, max_position_embeddings=1024,
)  # fmt: skip
MLA = dict(num_attention_heads=16, num_key_value_heads=16, qk_nope_head_dim=128, v_head_dim=128, initializer_range=0.05)
SETUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, {}),
    "deepseek": ("deepseek_v2", MLA, {"block_size": 64, "max_model_len": 256}),
    "expanded": (
        "deepseek_v2",
        MLA,
        # In vLLM 0.26 later chunks may be computed wrongly (`late_context.py`): here is none, but for `Shown.late`.
        {"block_size": 64, "max_model_len": 256, "attention_backend": "TRITON_MLA", "max_num_batched_tokens": 1024},
    ),
    "fp8": ("llama", {}, {"kv_cache_dtype": "fp8"}),
    "int8": ("llama", {}, {"kv_cache_dtype": "int8_per_token_head"}),
}
"""Setup: the model's type, more of its configuration, and more of what `vllm.LLM` is given."""
CLEAN = 24
"""Requests computed again before anything is broken, once the noise is known."""
STALE_STEPS = 40


@contextmanager
def stale(small: Any, name: str) -> Iterator[None]:
    """Graphs read the buffer ``name`` of the forward before: lengths and positions are one too small."""
    import torch

    buffers = getattr(small.runner, "input_buffers", small.runner)
    buffer = getattr(buffers, name)
    buffer = getattr(buffer, "gpu", buffer)
    right = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        buffer.sub_(1)
        right(graph)
        buffer.add_(1)

    torch.cuda.CUDAGraph.replay = replay
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.cuda.CUDAGraph.replay = right


@contextmanager
def exchanged(small: Any) -> Iterator[None]:
    """K and V of layer 1 are exchanged where they are stored, in all that is not a graph; of compressed KV one number
    is stored half as large again."""
    from vllm_on_cpu import verified

    impl = verified.layers(small)[1].impl
    right = impl.do_kv_cache_update

    def store(*args: Any, **more: Any) -> None:
        if hasattr(impl, "forward_mha"):
            rows = args[0].clone()
            rows[:, 3] *= 1.5
            return right(rows, *args[1:], **more)
        layer, k, v, *rest = args
        return right(layer, v, k, *rest, **more)

    impl.do_kv_cache_update = store
    try:
        yield
    finally:
        del impl.do_kv_cache_update


class Shown:
    """One setup's engine under guard."""

    def __init__(self, setup: str) -> None:
        from canary_vllm.hooks import HOOKS
        from vllm_on_cpu.attention_types import checkpoint
        from vllm_on_cpu.engine import SmallEngine

        from canary_core import CanaryConfig, hook_manager
        from canary_core.testing import Findings

        kind, more, options = SETUPS[setup]
        self.findings = Findings()
        hook_manager().register(self.findings)
        settings = dict(read_check=0, scrub_budget="0", bytes="off", stats_interval=0)
        HOOKS.start(CanaryConfig.load(**settings))
        self.small = SmallEngine(checkpoint(kind, **{**SIZES, **more}), **{**OPTIONS, **GRAPHS, **options})
        (self.session,) = HOOKS.sessions
        self.rows: list[dict[str, Any]] = []

    def every_layer(self, name: str, tokens: int = 150) -> list[Any]:
        """Verifications of one request, as many as there are layers."""
        from vllm_on_cpu import verified

        verified.begin(self.small, 20, {name: verified.prompt(name, tokens)})
        answers = [verified.verify(self.small, name)[0] for _ in verified.layers(self.small)]
        verified.finish(self.small)
        return answers

    def clean(self) -> None:
        """Learns the noise, then verifies requests of batches of all sizes."""
        from vllm_on_cpu import verified

        began = time.time()
        verified.teach(self.small)
        answers, number = [], 0
        while len(answers) < CLEAN:
            names = [f"clean {number}-{i}" for i in range(1 + number % 6)]
            number += 1
            tokens = 40 + 30 * (number % 5)
            verified.begin(self.small, 12 * (number % 4), {one: verified.prompt(one, tokens) for one in names})
            answers += verified.verify(self.small, *names)
            verified.finish(self.small)
        looks = [answer.attention for answer in answers if answer.attention is not None]
        bounded = [(layer.worst, layer.bound) for answer in answers for layer in answer.layers if layer.bound]
        last = answers[-1].layers[-1]
        self.row(
            "nothing",
            "differs" not in {answer.verdict for answer in answers} and not any(one.differs for one in looks),
            verdicts=count(answer.verdict for answer in answers),
            looks=len(looks),
            most_of_bound=round(max(worst / bound for worst, bound in bounded), 2),
            attention_of_bound=round(max((one.worst / one.bound for one in looks), default=0.0), 2),
            last=f"{last.worst:.2g} of {last.bound}",
            seconds=round(time.time() - began),
        )

    def hit(self) -> None:
        """Weights that changed under a kept cache."""
        from vllm_on_cpu import verified

        hits, fresh = verified.hit_under_other_weights(self.small)
        well = (hits.verdict, fresh.verdict) == ("differs", "same")
        self.row("a norm's weight 5 % larger, a hit", well, **first(hits))

    def broken(self, what: str, fault: AbstractContextManager[None], judged: Callable[[list[Any]], bool]) -> None:
        """All layers' looks at one request while ``fault`` lasts."""
        with fault:
            answers = self.every_layer(what)
        self.row(what, judged(answers), **first(*answers))

    def stale(self, name: str) -> None:
        """Forty decodes whose graphs read a stale buffer."""
        from vllm_on_cpu import verified

        request = f"stale {name}"
        with stale(self.small, name):
            verified.begin(self.small, STALE_STEPS, {request: verified.prompt(request, 60)})
        (answer,) = verified.verify(self.small, request)
        verified.finish(self.small)
        self.row(f"graphs read stale {name}", answer.verdict == "differs", **first(answer))

    def late(self) -> None:
        """A later chunk of a prompt, in whose step a shorter prompt begins: vLLM 0.26 forgets the first chunk."""
        from vllm_on_cpu import verified

        lengths = {**{f"before {number}": 240 for number in range(4)}, "late": 160, "short": 40}
        verified.begin(self.small, 1, {name: verified.prompt(name, tokens) for name, tokens in lengths.items()})
        late, short = verified.verify(self.small, "late", "short")
        verified.finish(self.small)
        self.row("a later chunk", (late.verdict, short.verdict) == ("differs", "same"), **first(late))

    def row(self, what: str, well: bool, **more: Any) -> None:
        """One line of the table."""
        self.session.canary.drain()
        told = [str(violation) for violation in self.findings.violations]
        self.findings.violations.clear()
        self.rows.append({"what": what, "well": well, **more, "told": told[:4]})
        print(f"  {'ok  ' if well else 'FAIL'} {what}: {more} {told[:1]}", flush=True)


def count(names: Any) -> dict[str, int]:
    """How often each one is there."""
    every = list(names)
    return {name: every.count(name) for name in dict.fromkeys(every)}


def first(*answers: Any) -> dict[str, Any]:
    """Verdicts, and the deviations of attention by layer."""
    looks = [answer.attention for answer in answers if answer.attention is not None]
    return {
        "verdicts": count(answer.verdict for answer in answers),
        "attention": {one.layer: one.deviation for one in looks if one.differs},
        "reasons": list(dict.fromkeys(answer.reason for answer in answers if answer.reason))[:2],
    }


def one_layer(*deviations: str) -> Callable[[list[Any]], bool]:
    """Whether layer 1 alone is told, by one of these deviations."""

    def judged(answers: list[Any]) -> bool:
        looks = [answer.attention for answer in answers if answer.attention is not None]
        return [(one.layer, one.deviation in deviations) for one in looks if one.differs] == [(1, True)]

    return judged


def show(setup: str) -> int:
    """All of one setup, in this process."""
    import torch
    from vllm_on_cpu import verified

    shown = Shown(setup)
    steps: dict[str, Callable[[], None]] = {"nothing": shown.clean, "hit": shown.hit}
    if setup in ("gemma3", "fp8"):
        # Gemma's norms multiply by one more than their weights, which are zeros; 5 % is less than a step of fp8.
        del steps["hit"]
    steps |= {f"stale {name}": partial(shown.stale, name) for name in ("positions", "seq_lens")}
    if setup not in ("fp8", "int8"):
        # Attention over such KV has no reference on a GPU.
        steps |= {
            "scale": lambda: shown.broken("scale", verified.rescaled(shown.small), one_layer("scale")),
            "exchanged": lambda: shown.broken("exchanged", exchanged(shown.small), one_layer("keys", "values")),
            "mended": lambda: shown.broken("mended", nullcontext(), no_layer),
        }
    if setup == "expanded":
        steps["late"] = shown.late
    with torch.inference_mode():
        for name, step in steps.items():
            try:
                step()
            except Exception as error:
                shown.row(name, False, error=f"{type(error).__name__}: {error}"[:300])
    stats = {k: v for k, v in shown.session.canary.stats().items() if k.startswith(("recompute", "attention"))}
    OUT.mkdir(parents=True, exist_ok=True)
    found = {"rows": shown.rows, "stats": stats}
    (OUT / f"recompute-{setup}.json").write_text(json.dumps(found, indent=1, default=str))
    print(f"  {stats}", flush=True)
    return int(not all(row["well"] for row in shown.rows))


def no_layer(answers: list[Any]) -> bool:
    """Whether nothing is told."""
    return not any(answer.attention is not None and answer.attention.differs for answer in answers)


def main(setups: list[str]) -> int:
    """A process for each."""
    failed = 0
    for setup in setups:
        print(setup, flush=True)
        failed += subprocess.run([sys.executable, __file__, "--show", setup], check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent)]
    sys.exit(show(sys.argv[2]) if sys.argv[1] == "--show" else main(sys.argv[1:] or [*SETUPS]))
