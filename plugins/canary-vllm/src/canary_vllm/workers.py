"""Whether all workers of an engine are guarded: answers, and the way to the scheduler's process."""

from collections.abc import Callable
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import canary_core
from canary_adapters import RollCall, error_text
from canary_core import CanaryConfig
from canary_vllm.compat import runners, targets
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
            place = {"host": socket.gethostname(), "process": os.getpid()}
            return {**place, "missing": f"canary-vllm does not answer there: {error_text(error)}"}

    return ask


def await_all(core: Any) -> bool:
    """The engine ``core`` takes the output of a step when every rank has sent an output, after a wait for tokens or
    forward, and a look at the rank's findings. vLLM does so to aggregate outputs of connectors, by a function of its
    own. Returns whether each pipeline stage is asked; vLLM's older Ray executor asks only the last."""
    executor, stages = core.model_executor, core.vllm_config.parallel_config.pipeline_parallel_size
    executor.kv_output_aggregator = SimpleNamespace(aggregate=lambda outputs, output_rank=0: outputs[output_rank])
    # Looked at by that executor.
    executor.has_connector = True
    return stages == 1 or (hasattr(executor, "response_mqs") and not targets.problems(targets.STAGES))


def answer_later(process: Any) -> None:
    """``process``, a `WorkerProc` of vLLM's, gives answers to vLLM's own thread for outputs made later, as with
    asynchronous scheduling, and goes on with the next batch."""
    if not process.use_async_scheduling:
        process.async_output_queue, process.use_async_scheduling = Queue(), True
        Thread(target=process.async_output_busy_loop, daemon=True, name="WorkerAsyncOutputCopy").start()


def call(core: Any, config: CanaryConfig, verdicts: str = "") -> tuple[RollCall, list[int]]:
    """Asks all workers of the engine ``core``, warm and with KV caches. ``verdicts``: see `question`. Returns the ranks
    that can't open it, too."""
    executor = core.model_executor
    roll_call = RollCall(config, VERSION, runners.replica(core.vllm_config), ADVICE)
    answers = executor.collective_rpc(question(verdicts))
    roll_call.take(answers, int(core.vllm_config.parallel_config.world_size))
    return roll_call, [rank for rank, given in enumerate(answers) if (given or {}).get("verdicts") is False]
