"""Draft models, of which some tokens are accepted and some are not: a program of its own, since vLLM can't make another
engine in a process in which it drafted. Prints one line of JSON.

    python -m vllm_on_cpu.drafts_script METHOD
"""

import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

DRAFTERS = {
    "eagle": ("llama", "llama_1"),
    "eagle3": ("llama", "llama_eagle3"),
    "draft_model": ("llama", "llama"),
    "mtp": ("glm4_moe", None),
}
"""Of each method, the model that is served and the one that drafts; None where the served one's folder has both."""


def own_weights(runner: Any) -> None:
    """Each matrix has weights of its own, and a draft model nearly those of the served one."""
    import torch

    # A drafter may have the served model's own embedding.
    seen: set[int] = set()
    for model, noise in ((runner.model, 0.0), (runner.drafter.model, 0.01)):
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                maker = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                with torch.no_grad():
                    parameter.normal_(0.0, 0.3, generator=maker)
                    parameter.add_(torch.empty_like(parameter).normal_(0.0, 1.0, generator=maker) * noise)


def recomputed(engine: Any) -> dict[str, Any]:
    """Fresh requests, one at a time, computed again: verdicts, findings, and regions that are left out."""
    from canary_vllm.hooks import HOOKS

    from vllm_on_cpu import guarded, verified

    with guarded.guard(engine, read_check=0, scrub_budget="0", bytes="off") as guard:
        verdicts: list[str] = []
        for name in ("first", "second", "third"):
            verified.begin(engine, verified.DECODED, {name: verified.prompt(name, 30)})
            verdicts += [one.verdict for one in verified.verify(engine, name)]
            engine.core.abort_requests([name])
            verified.finish(engine)
        (left_out,) = guard.findings.told("recompute_left_out")
        guard.canary.drain()
        (session,) = HOOKS.sessions
        compared = {one.region for answer in session.recomputed.answers for one in answer.layers}
        return {
            "verdicts": verdicts, "found": len(guard.findings.violations), "compared": sorted(compared),
            "left_out": sorted({one.split()[0] for one in left_out.fields["sources"]}),
        }  # fmt: skip


def main() -> None:
    """Serves without and with Canary, preempting, and up to the longest length, where nothing is drafted; then flips
    bits of the draft model's layers."""
    from vllm_on_cpu import guarded, models
    from vllm_on_cpu.engine import SmallEngine

    method = sys.argv[1]
    served, drafter = DRAFTERS[method]
    config: dict[str, Any] = dict(method=method, num_speculative_tokens=3, draft_tensor_parallel_size=1)
    if drafter is not None:
        config["model"] = models.folder(drafter, Path(tempfile.mkdtemp()))
    engine = SmallEngine(served, num_gpu_blocks_override=14, speculative_config=config)
    own_weights(engine.runner)
    steps: list[int] = []

    def serve() -> Any:
        answers = [guarded.traffic(engine, 2), engine.serve([list(range(5, 205)), list(range(5, 60))], 50, "long")]
        # Tokens that one step of one request has answered.
        engine.submit("alone", list(range(70, 90)), 40)
        before = 0
        while engine.step():
            steps.append(len(engine.answers["alone"]) - before)
            before += steps[-1]
        return answers

    engine.renew()
    plain = serve()
    with guarded.guard(engine, audit=16, read_check=128, scrub_budget="64KiB", store_check=True) as guard:
        told: dict[str, Any] = {"same": serve() == plain, "trouble": guard.trouble()}
        (audit,), (coverage,) = guard.findings.told("audit"), guard.findings.told("coverage")
        told |= {"audit": audit.fields["unclaimed_bytes"], "coverage": coverage.fields["coverage_ratio"]}
        told |= {"regions": sorted(guard.canary.regions), "steps": sorted(set(steps))}
        told["stores"] = guard.canary.stats()["noted_stores"]
    drafts = sorted(engine.runner.drafter._draft_attn_layer_names)
    found, poked = [], []
    with guarded.guard(engine) as guard:
        for number, (name, half) in enumerate((name, half) for name in drafts for half in "kv"):
            request = f"flip {number}"
            engine.submit(request, guarded.prompts(request)[0], 12)
            while len(engine.answers[request]) < 3:
                engine.step()
            engine.poke_layer(name, half, request, 2 + number)
            poked.append([half, 2 + number, request])
            while engine.step():
                pass
            guard.canary.drain()
        for v in guard.findings.violations:
            found.append([v.half, v.stored_position if v.position is None else v.position, v.stored_request])
        told["flipped"] = sorted({v.region for v in guard.findings.violations})
    told |= {"poked": poked, "found": found, "again": recomputed(engine)}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
