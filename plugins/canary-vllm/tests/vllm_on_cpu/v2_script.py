"""The V2 model runner on a CPU, where Triton's interpreter runs its kernels: a program of its own, since the
interpreter is chosen when Triton is imported. Prints one line of JSON: what was told, what was answered, what was found
of a flip.

    python -m vllm_on_cpu.v2_script MODEL [eagle]
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from support.interpreter import hasten

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

import triton.backends


class _NoDriver:
    """vLLM asks which of Triton's drivers is there."""

    @staticmethod
    def is_active() -> bool:
        return False


triton.backends.backends["cpu"] = types.SimpleNamespace(driver=_NoDriver, compiler=None)
hasten()


def flip_a_cached_state(engine: Any) -> None:
    """Flips a bit of the state of a prefix that nobody has, which another request then goes on from."""
    import torch

    prompt = list(range(5, 80))
    (number,) = [
        i
        for i, group in enumerate(engine.runner.kv_cache_config.kv_cache_groups)
        if type(group.kv_cache_spec).__name__ == "MambaSpec"
    ]
    engine.submit("first", prompt, 4)
    while not engine.answers["first"]:
        engine.step()
    block = engine.blocks("first")[number][1]
    while engine.step():
        pass
    name = engine.runner.kv_cache_config.kv_cache_groups[number].layer_names[0]
    conv = engine.runner.compilation_config.static_forward_context[name].kv_cache[0]
    conv[block].view(torch.int32)[0, 3] ^= 1 << 3
    engine.submit("second", [*prompt[:70], 9, 9, 9], 4)
    while engine.step():
        pass


def main() -> None:
    """Serves without and with Canary, then flips a bit."""
    from vllm_on_cpu import guarded, models, verified
    from vllm_on_cpu.engine import SmallEngine

    options = {}
    if "eagle" in sys.argv:
        folder = models.folder("llama_1", Path(tempfile.mkdtemp()))
        drafts = dict(method="eagle", model=folder, num_speculative_tokens=2, draft_tensor_parallel_size=1)
        options = dict(speculative_config=drafts)
    engine = SmallEngine(sys.argv[1], num_gpu_blocks_override=9 + 3 * (sys.argv[1] == "lfm2"), **options)
    plain = guarded.traffic(engine, 2, new_tokens=6)
    with guarded.guard(engine, audit=8, read_check=128, table_interval=1) as guard:
        answers = guarded.traffic(engine, 2, new_tokens=6)
        trouble = guard.trouble()
        audits = [event.fields["unclaimed_bytes"] for event in guard.findings.told("audit")]
        stats, tables = guard.canary.stats(), guard.canary.step.tables.names
        regions = list(guard.canary.regions)
    with guarded.guard(engine) as guard:
        engine.submit("flip", guarded.prompts("flip")[0], 12)
        while len(engine.answers["flip"]) < 3:
            engine.step()
        engine.poke(1, "v", "flip", 0)
        while engine.step():
            pass
        guard.canary.drain()
        found = [[v.kind.name, v.layer, v.half, v.position, v.stored_request] for v in guard.findings.violations]
    with guarded.guard(engine, store_check=True, read_check=0) as guard:
        same = guarded.traffic(engine, 1, new_tokens=6) == plain[:1]
        stores = {"same": same, "trouble": guard.trouble(), "noted": guard.canary.stats()["noted_stores"]}
        engine.submit("flip", guarded.prompts("flip")[0], 12)
        while len(engine.answers["flip"]) < 3:
            engine.step()
        with guarded.flip_behind_a_store(engine, 1, "v", "flip") as done:
            engine.step()
        guard.canary.drain()
        found_there = [[v.kind.name, v.phase.name, v.layer, v.half, v.position] for v in guard.findings.violations]
        stores |= {"found": found_there, "position": done[0]}
    with guarded.guard(engine) as guard:
        for name in "ab":
            engine.submit(name, guarded.prompts(name)[0], 12)
        while len(engine.answers["b"]) < 3:
            engine.step()
        # The tokens that the next forward begins with change places.
        last = engine.runner.req_states.last_sampled_tokens
        rows = [engine.runner.req_states.req_id_to_index[name] for name in "ab"]
        last[rows] = last[rows[::-1]].clone()
        engine.step()
        guard.canary.drain()
        exchanged = sorted([v.kind.name, v.request] for v in guard.findings.violations)
    with guarded.guard(engine, state_interval=1) as guard:
        if "state" in regions:
            flip_a_cached_state(engine)
        guard.canary.drain()
        states = [[v.kind.name, v.layer, v.half, v.stored_request] for v in guard.findings.violations]
    recomputed = None
    if regions == ["full"]:
        # The pool has no room for a second computation of what others hold.
        with guarded.guard(engine) as guard:
            verified.begin(engine, 2, {"asked": verified.prompt("asked", 60)})
            verdicts = [verified.verify(engine, "asked")[0] for _ in range(2)]
            verified.finish(engine)
            looked = [(one.verdict, one.attention.layer, one.attention.differs) for one in verdicts if one.attention]
            recomputed = {"looked": looked, "trouble": guard.trouble()}
    told = {"runner": type(engine.runner).__mro__[1].__module__, "same": answers == plain, "trouble": trouble}
    told |= {"audits": audits, "forwards": stats["checked_forwards"], "found": found, "tables": tables}
    told |= {"compared": stats["tables_compared"], "exchanged": exchanged, "regions": regions, "states": states}
    told |= {"stores": stores, "recomputed": recomputed}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
