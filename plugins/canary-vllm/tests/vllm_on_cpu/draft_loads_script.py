"""A draft model beside a KV connector, which brings its layers, too, and then leaves them out: a program of its own, as
`drafts_script`. Prints one line of JSON.

    python -m vllm_on_cpu.draft_loads_script
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Serves prompts twice without and with Canary, then others, whose draft layers do not come back."""
    from vllm_on_cpu import guarded, host_store, models
    from vllm_on_cpu.drafts_script import own_weights
    from vllm_on_cpu.engine import SmallEngine

    connector = dict(
        kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )  # fmt: skip
    drafter = models.folder("llama_1", Path(tempfile.mkdtemp()))
    config = dict(method="eagle", model=drafter, num_speculative_tokens=3, draft_tensor_parallel_size=1)
    engine = SmallEngine(
        "llama", num_gpu_blocks_override=26, speculative_config=config, kv_transfer_config=connector,
        enable_prefix_caching=False,
    )  # fmt: skip
    own_weights(engine.runner)
    drafts = sorted(engine.runner.drafter._draft_attn_layer_names)
    draw = random.Random("draft loads")

    def serve(name: str, wait_steps: int) -> list[Any]:
        host_store.STORE.wait_steps = wait_steps
        answers = []
        for turn in range(6):
            prompts = [[random.Random(f"{turn % 3} {i}").randrange(3, 500) for _ in range(110)] for i in range(3)]
            answers.append(engine.serve(prompts, 8, f"{name}-{turn}"))
            # Blocks are handed out in another order, so that loads go to what others have left.
            engine.serve([[draw.randrange(3, 500) for _ in range(70)]], 4, f"{name}-other-{turn}")
        return answers

    told: dict[str, Any] = {"trouble": [], "same": [], "found": []}
    for wait_steps in (0, 2):
        engine.renew()
        host_store.STORE.__init__()
        plain = serve("plain", wait_steps)
        engine.renew()
        host_store.STORE.__init__()
        with guarded.guard(engine, read_check=-1) as guard:
            told["same"].append(serve("clean", wait_steps) == plain)
            told["trouble"] += guard.trouble()
            told["regions"] = sorted(guard.canary.regions)
            told["loads"] = host_store.STORE.loads
            host_store.STORE.fault = lambda prefix, name, data: None if name in drafts else data
            serve("left-out", wait_steps)
            guard.canary.drain()
            found = sorted({(v.kind.name, v.region, v.rule or "", v.origin or "") for v in guard.findings.violations})
            told["found"].append(found)
            told["said"] = guard.findings.violations[0].explanation if found else ""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
