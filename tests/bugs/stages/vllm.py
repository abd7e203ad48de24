"""vLLM's stage, and a process that runs bugs on it: ``python -m bugs.stages.vllm`` reads lines of ``NAME PROFILE
broken``, or ``sound`` in place of that, and answers each with one of JSON: see `museum.run`. ``python -m
bugs.stages.vllm v2`` does so under vLLM's V2 model runner.

A process of its own, since vLLM can't be loaded again in one in which it once decoded speculatively.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bugs import museum
from bugs.museum import PROFILES, Stage

CONNECTOR = dict(
    kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both",
    kv_load_failure_policy="recompute",
)  # fmt: skip
CONNECTED = dict(kv_transfer_config=CONNECTOR, enable_prefix_caching=False)
"""The engine ``connector``: it alone brings KV back, and nobody has told Canary whose it is."""
V2 = "connector_v2"
"""The same under the V2 model runner, whose kernels Triton's interpreter runs."""
LORA = dict(enable_lora=True, max_loras=2, max_lora_rank=8)
LMCACHE: dict[str, dict[str, Any]] = {"lmcache": dict(enable_prompt_embeds=True), "lmcache_lora": LORA}
"""Engines beside LMCache with its server."""


class VLLMStage(Stage):
    """``small``: a `vllm_on_cpu.engine.SmallEngine` whose KV cache is new. What belongs to vLLM has its names.
    ``lmcache``: the server beside it, None without one."""

    def __init__(self, small: Any, told: Any, lmcache: Any = None) -> None:
        super().__init__()
        self.small = small
        self.lmcache = lmcache
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
        if setup in ("connector", V2):
            from vllm_on_cpu import host_store

            host_store.STORE.__init__()  # type: ignore[misc]
        lmcache = _lmcache() if setup in LMCACHE else None
        if lmcache is not None:
            lmcache.clear()
        HOOKS.start(CanaryConfig.load(profile=PROFILES[profile], log_level="error"))
        small.renew()
        yield VLLMStage(small, told, lmcache)
    finally:
        HOOKS.stop()
        hook_manager().unregister(told)
        # vLLM has one connector a process, and the next engine may have none.
        ensure_kv_transfer_shutdown()


@cache
def _loaded(setup: str) -> Any:
    from vllm_on_cpu.engine import SmallEngine
    from vllm_on_cpu.setups import SETUPS, Setup

    if setup == V2:
        return SmallEngine(_trained(), load_format="auto", **CONNECTED)
    if setup in LMCACHE:
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": _lmcache().port}
        connector = dict(
            kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_extra_config=extra,
            kv_connector_module_path="lmcache.integration.vllm.lmcache_mp_connector",
        )  # fmt: skip
        more = dict(kv_transfer_config=connector, num_gpu_blocks_override=64)
        return SmallEngine(_trained(), load_format="auto", **LMCACHE[setup], **more)
    of = {**SETUPS, "lora": Setup(options=LORA), "connector": Setup(options=CONNECTED)}[setup]
    return SmallEngine(of.model, **of.options)


@cache
def _lmcache() -> Any:
    """LMCache's server, which ends with this process."""
    from vllm_on_cpu.lmcache_server import beside

    return beside(Path(tempfile.mkdtemp(prefix="canary-museum-"), "server.log"))


def _trained() -> str:
    """The folder of a llama with weights: its answers depend on what attention reads. Those that vLLM makes up are so
    small that the answers of ``llama`` do not."""
    from safetensors.torch import save_file
    from vllm_on_cpu import models

    from bugs.live.sglang_weights_kept import checkpoint

    folder = Path(models.folder("llama", Path(tempfile.mkdtemp(prefix="canary-museum-"))))
    config = SimpleNamespace(**models.COMMON, **models.LLAMA)
    save_file(checkpoint(config, seed=1), folder / "model.safetensors")
    return str(folder)


class Bugs:
    """The processes that run bugs, from outside: one for each model runner that is asked for."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def outcome(self, name: str, profile: str, sound: bool = False) -> museum.Outcome:
        """What came of a bug; see `museum.run`. Raises `RuntimeError` if it could not be run."""
        process = self._process("v2" if museum.bug("vllm", name).setup == V2 else "")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{name} {profile} {'sound' if sound else 'broken'}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the bugs has ended")
        told: museum.Outcome = json.loads(line)
        if "failed" in told:
            raise RuntimeError(told["failed"])
        return told

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _process(self, runner: str) -> "subprocess.Popen[str]":
        if runner not in self._processes:
            self._processes[runner] = subprocess.Popen(
                [sys.executable, "-m", "bugs.stages.vllm", *filter(None, [runner])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        return self._processes[runner]


def main() -> None:
    """Runs bugs until stdin ends."""
    if "v2" in sys.argv:
        import vllm_on_cpu.v2_script  # noqa: F401  (sets what must be set before Triton is imported)
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
