"""Whether all workers of an engine are guarded: answers, and the way to the scheduler's process."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import canary_core
from canary_adapters import RollCall, error_text
from canary_core import CanaryConfig
from canary_vllm.compat import runners
from canary_vllm.version import __version__

VERSION = f"{canary_core.__version__} with canary-vllm {__version__}"
ADVICE = (
    "vLLM's older Ray executor gives settings to workers only with VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=CANARY_, "
    "and a CANARY_* that Ray was started with wins over that of vllm serve"
)


def question(verdicts: str) -> Callable[[Any], dict[str, Any]]:
    """A function sent to each worker, which returns its answer. Pickled by value, and never raises: vLLM would take the
    other workers' answers for those to its next question. ``verdicts``: path of the scheduler's `VerdictPipe`, empty
    for none."""

    def ask(worker: Any) -> dict[str, Any]:
        import os
        import socket

        try:
            from canary_vllm.hooks import HOOKS

            return HOOKS.answer(worker, verdicts)
        except Exception as error:
            missing = f"canary-vllm does not answer there: {error_text(error)}"
            return {"host": socket.gethostname(), "process": os.getpid(), "missing": missing}

    return ask


def await_all(executor: Any) -> None:
    """``executor`` takes the output of a step when every rank has sent its own, for which a rank waits for its tokens,
    and looks at what it has found. vLLM does so to aggregate what connectors say; with one it replaces this later."""
    executor.kv_output_aggregator = SimpleNamespace(aggregate=lambda outputs, output_rank=0: outputs[output_rank])
    # Looked at by vLLM's older Ray executor.
    executor.has_connector = True


def call(core: Any, config: CanaryConfig, verdicts: str = "") -> tuple[RollCall, list[int]]:
    """Asks all workers of the engine ``core``, warm and with KV caches. ``verdicts``: see `question`. Returns the ranks
    that can't open it, too."""
    executor = core.model_executor
    roll_call = RollCall(config, VERSION, runners.replica(core.vllm_config), ADVICE)
    answers = executor.collective_rpc(question(verdicts))
    roll_call.take(answers, int(core.vllm_config.parallel_config.world_size))
    return roll_call, [rank for rank, given in enumerate(answers) if (given or {}).get("verdicts") is False]
