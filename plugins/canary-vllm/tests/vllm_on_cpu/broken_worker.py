"""A worker class of vLLM's, in which the second rank's process is made like one on a machine that was set up wrongly.
vLLM resolves it right after it has called plugins, so what it breaks is what the plugin has done there."""

import os
import sys
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Breaks what ``BROKEN_WORKER`` says, on rank 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        broken = os.environ["BROKEN_WORKER"]
        if self.rank != 1 or broken == "nothing":
            return
        if broken == "version":
            from canary_vllm import workers

            workers.VERSION = "0.0.9 with canary-vllm 0.0.9"
            return
        from canary_vllm.plugin import start

        from canary_core.plugins import uninstall

        uninstall()
        if broken == "settings":
            os.environ["CANARY_READ_CHECK"] = "64"
            start()
        elif broken == "package":
            sys.modules["canary_vllm.hooks"] = None  # type: ignore[assignment]
        else:
            os.environ["CANARY_PLUGINS"] = ""
