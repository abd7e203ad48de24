"""A connector under the V2 model runner, on a CPU with Triton's interpreter; see `v2_script`. Prints one line of JSON.

python -m vllm_on_cpu.v2_loads_script
"""

import json
import os
import sys
from typing import Any

import vllm_on_cpu.v2_script  # noqa: F401  (sets what must be set before Triton is imported)


def main() -> None:
    """Clean reloads, while the forward runs and steps before; then one with a flipped bit in the last layer's V; then
    the same with all signs flipped, where what is found is not served."""
    import torch

    from vllm_on_cpu import guarded, host_store
    from vllm_on_cpu.engine import BLOCK, SmallEngine

    connector = {"kv_connector": "HostStore", "kv_connector_module_path": host_store.__name__, "kv_role": "kv_both"}
    engine = SmallEngine("llama", num_gpu_blocks_override=12, kv_transfer_config=connector, enable_prefix_caching=False)
    asked = [list(range(start, start + 2 * BLOCK + 5)) for start in (3, 103)]
    told: dict[str, Any] = {"runner": type(engine.runner).__mro__[1].__module__, "same": []}
    with guarded.guard(engine, ledger_private="HostStore", read_check=128) as guard:
        first = engine.serve(asked, 4, "first")
        for turn, steps in enumerate((0, 2, 0, 2)):
            host_store.STORE.wait_steps = steps
            told["same"].append(engine.serve(asked, 4, f"again{turn}") == first)
        told["trouble"], loads = guard.trouble(), host_store.STORE.loads
        layer = [*host_store.STORE.blocks[tuple(asked[0][:BLOCK])]][-1]

        def flipped(prefix: Any, name: str, data: Any) -> Any:
            if (len(prefix), name) == (BLOCK, layer):
                data.view(-1).view(torch.int32)[-3] ^= 4
            return data

        host_store.STORE.fault = flipped
        for steps in (0, 2):
            host_store.STORE.wait_steps = steps
            engine.serve(asked[:1], 4, f"flip{steps}")
        guard.canary.drain()
        stats = guard.canary.stats()
        told["found"] = [[v.kind.name, v.layer, v.half, v.position, v.origin] for v in guard.findings.violations]
    told["matched"], told["loads"] = stats["ledger_matched"], loads
    for layer_of_model in engine.runner.get_model().model.layers:
        # Answers depend on all of the prompt.
        layer_of_model.input_layernorm.weight.data.fill_(1000)
    engine.core.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    told["wrong"], told["right"] = [], []
    for value, answers in (("report", told["wrong"]), ("protect", told["right"])):
        host_store.STORE.__init__()
        with guarded.guard(engine, ledger_private="HostStore", read_check=0, on_violation=value) as guard:
            first = engine.serve(asked, 4, "first")
            host_store.STORE.fault = lambda prefix, name, data: -data if name == layer else data
            for steps in (0, 2):
                host_store.STORE.wait_steps = steps
                answers.append(engine.serve(asked, 4, f"ill{steps}") == first)
    told["recomputed"] = sorted(event.fields["request"] for event in guard.findings.told("recomputed"))
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
