"""Full names of vLLM's functions to hook, in groups that stand and fall together."""

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from canary_core import HookTarget

V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
CONNECTORS = "vllm.v1.worker.gpu.kv_connector"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
POOL = "vllm.v1.core.block_pool.BlockPool"
WORKER = "vllm.v1.worker.worker_base.WorkerWrapperBase"
WORKER_END = HookTarget(f"{WORKER}.shutdown")
"""If unfit, guarded memory is not released at the end of its engine."""

PROCESS = "vllm.v1.executor.multiproc_executor.WorkerProc"
STAGES = (HookTarget(f"{PROCESS}.worker_busy_loop"), HookTarget(f"{PROCESS}.async_output_busy_loop"))
LATER = "vllm.v1.outputs.AsyncModelRunnerOutput"
"""If one is unfit, an output does not wait for findings of pipeline stages before the last."""

CORE = "vllm.v1.engine.core.EngineCoreProc"
IDLE = (HookTarget(f"{CORE}.has_work"), HookTarget(f"{CORE}.is_running"))
"""If one is unfit, nothing is computed again by an engine that serves nobody."""

WEIGHTS_END = HookTarget("vllm.v1.worker.gpu_worker.Worker.finish_weight_update")
"""Ends an update of the weights, of which parts may have been written without the model's own function. Older releases
have none."""

RUNNERS: Mapping[str, Sequence[HookTarget]] = {
    V1: (
        HookTarget(f"{V1}.initialize_kv_cache", ("kv_cache_config",)),
        HookTarget(f"{V1}.execute_model", ("scheduler_output",)),
        HookTarget(f"{V1}.sample_tokens"),
        HookTarget(f"{V1}._model_forward"),
    ),
    V2: (
        HookTarget(f"{V2}.initialize_kv_cache", ("kv_cache_config",)),
        HookTarget(f"{V2}.execute_model", ("scheduler_output", None, "dummy_run")),
        HookTarget(f"{V2}.sample_tokens"),
        HookTarget(f"{V2}.prepare_attn", ("input_batch",)),
        HookTarget(f"{CONNECTORS}.KVConnector.pre_forward", ("scheduler_output",)),
        HookTarget(f"{CONNECTORS}.ActiveKVConnector.pre_forward", ("scheduler_output",)),
    ),
}
"""The two model runners. An unfit one is left alone, and the other is hooked."""

SAMPLERS: Mapping[str, HookTarget] = {
    V1: HookTarget(f"{V1}._sample", (None, "spec_decode_metadata")),
    V2: HookTarget(f"{V2}.sample", (None, "input_batch")),
}
"""If unfit, sampled tokens are not compared with the next forward."""

LIFETIME: Sequence[HookTarget] = (
    HookTarget(f"{SCHEDULER}.__init__"),
    HookTarget(f"{SCHEDULER}.schedule"),
    HookTarget(f"{SCHEDULER}.shutdown"),
    HookTarget(f"{MANAGER}.allocate_slots", ("request",)),
    HookTarget(f"{MANAGER}.free", ("request",)),
    HookTarget(f"{POOL}.get_new_blocks"),
    HookTarget(f"{POOL}.touch", ("blocks",)),
    HookTarget(f"{POOL}.cache_full_blocks", (None, "blocks", "num_cached_blocks", "num_full_blocks")),
    HookTarget(f"{POOL}.free_blocks", ("ordered_blocks",)),
    HookTarget(f"{POOL}._maybe_evict_cached_block", ("block",)),
    HookTarget(f"{POOL}.reset_prefix_cache"),
)
"""The scheduler and its block pool. Where one does not fit, no block counts as freed, and the forwards are guarded all
the same."""

ENGINE = "vllm.v1.engine.core.EngineCore"
ROLL_CALL: Sequence[HookTarget] = (
    HookTarget(f"{ENGINE}._initialize_kv_caches"),
    HookTarget(f"{SCHEDULER}.update_from_output", ("scheduler_output", "model_runner_output")),
    HookTarget(f"{WORKER}.execute_model", ("scheduler_output",)),
)
"""If one is unfit, nobody looks whether all workers are guarded, and vLLM's computed tokens are not counted."""


def problems(group: Sequence[HookTarget]) -> list[str]:
    """Why functions of ``group`` can't be hooked in the installed vLLM; empty for none. Imports the modules."""
    return [problem for target in group if (problem := target.problem()) is not None]


def runners() -> list[str]:
    """The runners of the installed vLLM fit to be hooked."""
    return [name for name, group in RUNNERS.items() if not problems(group)]


def hook_targets() -> Sequence[HookTarget]:
    """Targets checked by the core before anything is hooked: the fit runners. Without any, all runners, so that
    each missing function is named, and vLLM is left unchanged."""
    return [target for name in runners() or RUNNERS for target in RUNNERS[name]]


def owner(name: str) -> tuple[Any, str]:
    """The class with the method ``name``, and the method's own name. Imports its module."""
    path, _, method = name.rpartition(".")
    return pkgutil.resolve_name(path), method
