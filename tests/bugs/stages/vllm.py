"""vLLM's stage, and a process that runs bugs on it: ``python -m bugs.stages.vllm`` reads lines of ``NAME PROFILE
broken``, or ``sound`` in place of that, and answers each with one of JSON: see `museum.run`.

A process of its own, since vLLM can't be loaded again in one in which it once decoded speculatively.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from bugs import museum
from bugs.museum import PROFILES, Stage

CONNECTOR = dict(
    kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both",
    kv_load_failure_policy="recompute",
)  # fmt: skip
CONNECTED = dict(kv_transfer_config=CONNECTOR, enable_prefix_caching=False)
"""The engine ``connector``: it alone brings KV back, and nobody has told Canary whose it is."""


class VLLMStage(Stage):
    """``small``: a `vllm_on_cpu.engine.SmallEngine` whose KV cache is new. What belongs to vLLM has its names."""

    def __init__(self, small: Any, told: Any) -> None:
        super().__init__()
        self.small = small
        self.scheduler = small.scheduler
        self.runner = small.runner
        self.pool = small.pool
        self._told = told

    @property
    def canary(self) -> Any:
        """That of the runner."""
        from canary_vllm.hooks import HOOKS

        (session,) = HOOKS.sessions
        return session.canary

    @property
    def forwards(self) -> int:
        return int(self.canary.forwards)

    def findings(self) -> list[Any]:
        self.canary.drain()
        found, self._told.violations = self._told.violations, []
        return list(found)

    def submit(self, name: str, tokens: Sequence[int], new_tokens: int, salt: str | None = None) -> None:
        """Queues a request. ``salt``: vLLM's ``cache_salt``."""
        if salt is None:
            self.small.submit(self.phase + name, tokens, new_tokens)
            return
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        request = Request(
            request_id=self.phase + name,
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.small.core.request_block_hasher,
            cache_salt=salt,
        )
        self.small.answers[self.phase + name] = []
        self.small.core.add_request(request)

    def step(self) -> bool:
        return bool(self.small.step())

    def answered(self, name: str) -> int:
        return len(self.small.answers[self.phase + name])

    def answers(self) -> dict[str, list[int]]:
        return {name: told for name, told in self.small.answers.items() if not name.startswith("clean-")}


@contextmanager
def stage(setup: str, profile: str) -> Iterator[VLLMStage]:
    """The engine of that name of `vllm_on_cpu.setups`, guarded as a user has it who sets nothing but the profile."""
    from canary_vllm.hooks import HOOKS
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    from canary_core import CanaryConfig, hook_manager
    from canary_core.testing import Findings

    small, told = _loaded(setup), Findings()
    hook_manager().register(told)
    try:
        if setup == "connector":
            from vllm_on_cpu import host_store

            host_store.STORE.__init__()  # type: ignore[misc]
        HOOKS.start(CanaryConfig.load(profile=PROFILES[profile], log_level="error"))
        small.renew()
        yield VLLMStage(small, told)
    finally:
        HOOKS.stop()
        hook_manager().unregister(told)
        # vLLM has one connector a process, and the next engine may have none.
        ensure_kv_transfer_shutdown()


@cache
def _loaded(setup: str) -> Any:
    from vllm_on_cpu.engine import SmallEngine
    from vllm_on_cpu.setups import SETUPS, Setup

    lora = Setup(options={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8})
    of = {**SETUPS, "lora": lora, "connector": Setup(options=CONNECTED)}[setup]
    return SmallEngine(of.model, **of.options)


class Bugs:
    """The process that runs bugs, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bugs.stages.vllm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def outcome(self, name: str, profile: str, sound: bool = False) -> museum.Outcome:
        """What came of a bug; see `museum.run`. Raises `RuntimeError` if it could not be run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {profile} {'sound' if sound else 'broken'}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the bugs has ended")
        told: museum.Outcome = json.loads(line)
        if "failed" in told:
            raise RuntimeError(told["failed"])
        return told

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Runs bugs until stdin ends."""
    import torch

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        name, profile, sound = line.split()
        try:
            bug = museum.bug("vllm", name)
            with torch.inference_mode(), stage(bug.setup, profile) as engine:
                outcome = museum.run(bug, engine, sound == "sound")
        except Exception as error:
            traceback.print_exc()
            outcome = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(outcome, default=str) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
