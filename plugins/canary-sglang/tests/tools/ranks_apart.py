"""For `engines.ranks_script`: rank 1 computes or samples something else than rank 0, once in a phase whose ``control``
says so: ``tokens``, ``sampled`` or ``kv``. Nothing of Canary is used for it. As a plugin of Canary's: writes down what
was compared."""

from typing import Any

import torch

from canary_core.plugins.hookspecs import hookimpl
from tools.ranks_witness import BROKEN_RANK, FOLDER, rank_here, tell

AT = 22
"""The forward of a phase."""
_seen: dict[str, int] = {}
_slots: list[torch.Tensor] = []


def install() -> None:
    """A plugin of SGLang's own."""
    if rank_here() != BROKEN_RANK:
        return
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    made, sampled = ForwardBatch.init_new.__func__, Sampler.forward

    def init_new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        batch = made(cls, *args, **kwargs)
        wanted = FOLDER.joinpath("control").read_text()
        _seen[wanted] = _seen.get(wanted, 0) + 1
        _slots[:] = [batch.out_cache_loc]
        if now("tokens"):
            batch.input_ids = batch.input_ids + 1
        return batch

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = sampled(self, *args, **kwargs)
        if now("sampled"):
            tokens[0] = (tokens[0] + 1) % 200
        return tokens

    def store(right: Any, buffer: str) -> Any:
        def set_buffer(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
            right(self, layer, *args, **kwargs)
            if layer.layer_id == 1 and now("kv"):
                getattr(self, buffer)[1].view(torch.int16)[_slots[0][0], 0, 5] ^= 1

        return set_buffer

    ForwardBatch.init_new = classmethod(init_new)
    Sampler.forward = forward
    MHATokenToKVPool.set_kv_buffer = store(MHATokenToKVPool.set_kv_buffer, "k_buffer")
    MLATokenToKVPool.set_kv_buffer = store(MLATokenToKVPool.set_kv_buffer, "kv_buffer")


def now(what: str) -> bool:
    """Whether ``what`` is to be broken in this forward."""
    return FOLDER.joinpath("control").read_text() == what and _seen.get(what) == AT


@hookimpl
def canary_event(event: Any) -> None:
    """What was compared so far."""
    if event.name == "stats":
        tell({"stats": {name: number for name, number in event.fields.items() if name.startswith("ranks_")}})
