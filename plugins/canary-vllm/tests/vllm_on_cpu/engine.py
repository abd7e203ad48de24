"""`SmallEngine`: vLLM's own engine core, scheduler, worker and model runner, all in this process, step by step."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_on_cpu import models

BLOCK = 32
"""Slots of a block: CPU attention takes multiples of this."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
OPTIONS: dict[str, Any] = dict(
    load_format="dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=8,
    enforce_eager=True, block_size=BLOCK, num_gpu_blocks_override=24, max_num_batched_tokens=64,
    enable_prefix_caching=True, seed=1, disable_log_stats=True, async_scheduling=False,
)  # fmt: skip


@contextmanager
def without_llvmlite() -> Iterator[None]:
    """Hides llvmlite, where it was imported before. vLLM 0.32 looks through all modules when an engine starts. Once
    n-grams were drafted in this process, it fails at an object of llvmlite's that has any attribute it is asked for."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "llvmlite"}
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def as_asked_for() -> Iterator[None]:
    """Asynchronous scheduling is what the options say. vLLM's platform of CPUs switches it off ("not required on CPU"),
    with all that it changes in scheduler and runner."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    owner = type(current_platform)
    raw = vars(owner)["check_and_update_config"]

    def check(cls: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        raw.__func__(cls, config)
        config.scheduler_config.async_scheduling = asked

    owner.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        owner.check_and_update_config = raw


def group_of_experts() -> None:
    """Models of experts can be loaded after others: vLLM makes the group of their ranks when a process loads its first
    model, if that one has experts, and never later."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        world = parallel_state.get_world_group()
        ranks = [list(range(world.world_size))]
        parallel_state._EP = parallel_state.init_model_parallel_group(ranks, world.local_rank, "gloo", group_name="ep")


KEPT: list[Any] = []
"""Every engine of the process without a connector: vLLM gives up what all of them share with the first one that is
collected. One with a connector is ended by its tests, since others would be asked for its messages."""


class SmallEngine:
    """``model``: one of `models.MODELS`, or a folder. ``options``: what `vllm.LLM` is given beside `OPTIONS`.

    To load vLLM and the model takes seconds, a new KV cache milliseconds: `renew` makes one, with a new scheduler, by
    vLLM's own functions, so that a plugin that was installed since attaches to it.
    """

    def __init__(self, model: str, **options: Any) -> None:
        os.environ.update(ENVIRONMENT)
        from vllm import LLM

        group_of_experts()
        root = Path(tempfile.mkdtemp(prefix="vllm-on-cpu-"))
        with without_llvmlite(), as_asked_for():
            self.llm = LLM(
                model=model if os.path.isdir(model) else models.folder(model, root), **{**OPTIONS, **options}
            )
        if "kv_transfer_config" not in options:
            KEPT.append(self.llm)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        """Why each request ended, in vLLM's word."""

    def end(self) -> None:
        """Gives up the engine, and what vLLM's engines of the process share."""
        self.llm.llm_engine.engine_core.shutdown()

    @property
    def scheduler(self) -> Any:
        """vLLM's."""
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        """vLLM's."""
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def renew(self) -> None:
        """An empty engine: as after a start, but for the weights."""
        from vllm.v1.core.sched.output import SchedulerOutput

        over = SchedulerOutput.make_empty()
        over.finished_req_ids = {*self.scheduler.requests, *self.scheduler.finished_req_ids, *self.runner_requests()}
        if self.scheduler.connector is not None:
            over.kv_connector_metadata = self.scheduler.connector.build_connector_meta(over)
        self.core.model_executor.execute_model(over)
        # vLLM's own runner wants to be initialized only once.
        self.runner.attn_groups.clear()
        self.runner.kv_caches.clear()
        old = self.scheduler
        self.core.model_executor.initialize_from_config([old.kv_cache_config])
        self.core.scheduler = type(old)(
            vllm_config=self.core.vllm_config,
            kv_cache_config=old.kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            log_stats=False,
            block_size=old.block_size,
            hash_block_size=self.pool.hash_block_size,
        )
        self.answers.clear()
        self.ends.clear()

    def runner_requests(self) -> Sequence[str]:
        """Names of the requests that the runner still has."""
        runner = self.runner
        return [*(runner.req_states.req_id_to_index if hasattr(runner, "req_states") else runner.requests)]

    def submit(self, name: str, tokens: Sequence[int], new_tokens: int, **more: Any) -> None:
        """Queues a request. ``more``: of vLLM's `Request`."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.answers[name] = []
        hasher = self.core.request_block_hasher
        self.core.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(tokens),
                sampling_params=params,
                pooling_params=None,
                block_hasher=hasher,
                **more,
            )
        )

    def step(self) -> bool:
        """One step of the engine core; False if there was nothing to run."""
        while self.scheduler.has_requests():
            step = getattr(self.core, "step_fn", self.core.step)
            outputs, ran = step()
            self.core.post_step(ran)
            for one in (outputs or {}).values():
                for output in one.outputs:
                    self.answers[output.request_id] += list(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.ends[output.request_id] = str(output.finish_reason)
            if ran:
                return True
        return False

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int, name: str = "r", **more: Any) -> list[list[int]]:
        """Answers to ``prompts``, all at once. ``more``: as of `submit`."""
        names = [f"{name}-{i}" for i in range(len(prompts))]
        for one, prompt in zip(names, prompts, strict=True):
            self.submit(one, prompt, new_tokens, **more)
        while self.step():
            pass
        return [self.answers[one] for one in names]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Every tensor that vLLM has bound to a layer, by vLLM's name."""
        for name, layer in self.runner.compilation_config.static_forward_context.items():
            bound = getattr(layer, "kv_cache", None)
            for i, tensor in enumerate(bound if isinstance(bound, (list, tuple)) else [bound]):
                yield (f"{name}[{i}]" if i else name), tensor

    def running(self, request: str) -> bool:
        """Whether it has blocks."""
        return request in self.scheduler.requests and any(self.blocks(request))

    def blocks(self, request: str) -> tuple[list[int], ...]:
        """The blocks of a running request, for each group of layers."""
        held: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(request)
        return held

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips one bit of that KV, by vLLM's own tables and CPU attention's own order of bytes: K is transposed in a
        block."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        (name,) = [name for group in groups for name in group.layer_names if f".{layer}." in name]
        self.poke_layer(name, half, request, position)

    def poke_layer(self, name: str, half: str, request: str, position: int) -> None:
        """As `poke`, of the layer that vLLM calls ``name``."""
        import torch

        groups = self.runner.kv_cache_config.kv_cache_groups
        number, group = next((i, group) for i, group in enumerate(groups) if name in group.layer_names)
        cache = self.runner.compilation_config.static_forward_context[name].kv_cache
        # Not always `BLOCK`: MLA on a CPU without AMX has its own.
        size = group.kv_cache_spec.block_size
        slot = self.blocks(request)[number][position // size] * size + position % size
        bits = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])
        if half == "kv":
            bits.view(-1, bits.shape[-1])[slot, 5] ^= 1 << 3
            return
        blocks, heads, page, size = bits.shape[0], bits.shape[1], bits.shape[2], bits.shape[3] // 2
        both = bits.view(blocks, heads, 2, page * size)[slot // page, 1]
        place = (3, slot % page) if half == "k" else (slot % page, 3)
        (both[0].view(size, page) if half == "k" else both[1].view(page, size))[place] ^= 1 << 3

    def poke_state(self, layer: int, half: str, request: str) -> None:
        """Flips one bit of a request's recurrent state, by vLLM's own tables. ``half``: ``conv`` or ``ssm``."""
        import torch

        for number, group in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                if type(group.kv_cache_spec).__name__ == "MambaSpec" and f".{layer}." in name:
                    states = self.runner.compilation_config.static_forward_context[name].kv_cache
                    state = states[("conv", "ssm").index(half)][self.blocks(request)[number][0]]
        bits = state.view({2: torch.int16, 4: torch.int32}[state.element_size()])
        bits[(*(0 for _ in bits.shape[:-1]), 3)] ^= 1 << 3
