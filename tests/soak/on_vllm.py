"""vLLM: its engine core, scheduler, worker and runner in this process, through `vllm.LLM`'s own engine."""

import random
from pathlib import Path
from typing import Any

import torch
from vllm_on_cpu import encoder_script, models

from canary_core import Violation
from soak import gpu_models
from soak.plan import Asked
from soak.served import Stepwise
from soak.setups import Setup


class VLLM(Stepwise):
    """``folder``: where the model's configuration is written."""

    def __init__(self, setup: Setup, device: str, folder: Path) -> None:
        super().__init__()
        if device == "cpu" and setup.environment.get("VLLM_USE_V2_MODEL_RUNNER"):
            import vllm_on_cpu.v2_script  # noqa: F401  (what must be done before Triton is imported)
        from vllm import LLM

        made = gpu_models if device == "cuda" else models
        self._sound = setup.model == "whisper"
        options = dict(setup.options)
        drafter = options.pop("drafter", None)
        if drafter is not None:
            beside = folder / "drafter"
            beside.mkdir(exist_ok=True)
            options["speculative_config"] = {**drafter, "model": made.folder(drafter["model"], beside)}
        model = encoder_script.folder(folder) if self._sound else made.folder(setup.model, folder)
        self._llm = LLM(model=model, **options)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._ended: dict[str, list[int]] = {}
        randomize(self._runner.get_model())
        self._count_preemptions()

    @property
    def version(self) -> str:
        """Of the engine."""
        import vllm

        return str(vllm.__version__)

    @property
    def _runner(self) -> Any:
        return self._core.model_executor.driver_worker.worker.model_runner

    def submit(self, name: str, asked: Asked) -> None:
        """Queues a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=asked.new, temperature=0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompt = {"prompt_token_ids": list(asked.tokens), **({"cache_salt": asked.salt} if asked.salt else {})}
        if self._sound:
            prompt = encoder_script.sound(asked.tokens[0])
        self._engine.add_request(name, prompt, params)

    def abort(self, name: str) -> None:
        """Gives it up."""
        self._engine.abort_request([name])

    def turn(self) -> bool:
        """One step of vLLM's engine."""
        if not (self._core.scheduler.has_requests() or getattr(self._core, "batch_queue", None)):
            return False
        for output in self._engine.step():
            if output.finished:
                self._ended[output.request_id] = list(output.outputs[0].token_ids)
                self.counts["cached"] += output.num_cached_tokens or 0
        return True

    def ended(self) -> dict[str, list[int]]:
        """Answers since the last call."""
        ended, self._ended = self._ended, {}
        return ended

    def flush(self) -> bool:
        """As a client may ask for."""
        return bool(self._engine.reset_prefix_cache())

    def violations(self) -> list[Violation]:
        """As `Served.violations`; what vLLM made in its inference mode can be read only there."""
        with torch.inference_mode():
            return super().violations()

    def flip(self, draw: random.Random) -> bool:
        """A bit in a block that holds the end of a prompt. In each of vLLM's layouts all bytes of a block lie under one
        index of the first dimension."""
        config = self._runner.kv_cache_config
        for request in self._core.scheduler.running:
            if len(request.output_token_ids) < 1 or request.max_tokens - len(request.output_token_ids) < 6:
                continue
            held = self._core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            group = draw.randrange(len(held))
            spec = config.kv_cache_groups[group]
            last = request.num_prompt_tokens // spec.kv_cache_spec.block_size - 1
            if last < 0:
                continue
            layer = self._runner.compilation_config.static_forward_context[draw.choice(spec.layer_names)]
            cache = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
            with torch.inference_mode():
                bits = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])
                place = tuple(draw.randrange(size) for size in bits.shape[1:])
                bits[(held[group][last], *place)] ^= 1 << 3
            return True
        return False

    def _count_preemptions(self) -> None:
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts["preempted"] += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted


def randomize(model: torch.nn.Module) -> None:
    """Weights with which answers depend on the whole prompt; those that vLLM makes up are so small that every prompt
    has the same answer. Graphs that were captured before see them."""
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and weight.is_floating_point() and weight.element_size() > 1:
                weight.normal_(0, 0.15)
            elif "norm" in name:
                weight.fill_(1.0)


def make(setup: Setup, device: str, folder: Path) -> VLLM:
    """The engine of the setup."""
    return VLLM(setup, device, folder)
