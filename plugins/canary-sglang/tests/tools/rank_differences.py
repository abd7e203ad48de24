"""A plugin of SGLang's own for `engines.ranks_script`: rank 1 computes something else, whether or not Canary is there.

``RANKS_FOLDER`` has ``control``: ``sampled``, another token from the sampler, once; ``kv``, a bit in what was just
stored in the last layer, once; ``weight``, another weight of that layer's latents, until ``control`` is another.
"""

from typing import Any

import torch

from tools.rank_flips import BROKEN_RANK, control

DECODES = 5
"""Decodes of a phase before the fault."""


class Faults:
    """Of one rank. ``layer``: the last one."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.layer = runner.model.model.layers[-1]
        self._phase, self._decodes = "", 0
        self._kept: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """Of the projection to latents, which each rank has whole."""
        found: torch.Tensor = self.layer.self_attn.kv_a_proj_with_mqa.weight
        return found

    def decodes(self, now: str) -> bool:
        """Whether ``now`` is wanted in this decode, the next one of its place in the engine."""
        wanted = control()
        if wanted != self._phase:
            self._phase, self._decodes = wanted, 0
        self._decodes += wanted == now
        return wanted == now and self._decodes == DECODES

    def begin(self, layer: Any, args: Any, kwargs: Any) -> None:
        """Before the layer."""
        if self.decodes("weight"):
            self._kept = self.weight.clone()
            self.weight[0, 0] += 1
        elif self._kept is not None and control() != "weight":
            self.weight.copy_(self._kept)
            self._kept = None

    def end(self, layer: Any, args: Any, kwargs: Any, done: Any) -> None:
        """After the layer."""
        (batch,) = [value for value in (*args, *kwargs.values()) if hasattr(value, "out_cache_loc")]
        if batch.forward_mode.is_decode() and self.decodes("kv"):
            stored = self.runner.token_to_kv_pool.kv_buffer[-1][int(batch.out_cache_loc[0])]
            stored.view(torch.int32)[0, 5] ^= 4


def install() -> None:
    """The plugin, which each of SGLang's processes runs before anything else."""
    from engines.models import randomize
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.model_executor.model_runner import ModelRunner

    load, sample = ModelRunner.load_model, Sampler.forward
    faults: list[Faults] = []

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        done = load(runner, *args, **kwargs)
        randomize(runner.model)
        if torch.distributed.get_rank() == BROKEN_RANK:
            faults.append(Faults(runner))
            faults[0].layer.register_forward_pre_hook(faults[0].begin, with_kwargs=True)
            faults[0].layer.register_forward_hook(faults[0].end, with_kwargs=True)
        return done

    def forward(sampler: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = sample(sampler, *args, **kwargs)
        if faults and faults[0].decodes("sampled"):
            tokens[0] = (tokens[0] + 1) % 200
        return tokens

    ModelRunner.load_model, Sampler.forward = load_model, forward
