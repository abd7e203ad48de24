"""SGLang's own copies of KV and of states, made wrong where SGLang makes them."""

from collections.abc import Callable
from typing import Any

from tools.inspection import findings
from tools.traffic import serve


def break_copies(engine: Any, how: str) -> None:
    """Breaks a copy of the engine for good. ``how``: a function below."""
    HOW[how](engine)


def move_only_keys(engine: Any) -> None:
    """The accepted path of a tree is moved without its V: each slot keeps the V of the token that was drafted there."""

    def move(destination: Any, source: Any) -> None:
        for buffer in pool.k_buffer:
            buffer[destination] = buffer[source]

    pool = engine.runner.token_to_kv_pool
    pool.move_kv_cache = move


def move_from_the_next_slot(engine: Any) -> None:
    """The accepted path of a tree is moved from one slot further, K and V alike."""
    pool = engine.runner.token_to_kv_pool

    def move(destination: Any, source: Any) -> None:
        type(pool).move_kv_cache(pool, destination, (source + 1).clamp(max=pool.size))

    pool.move_kv_cache = move


def move_nothing(engine: Any) -> None:
    """The accepted path of a tree stays where it was drafted: who verifies calls nothing that moves it."""
    from sglang.srt.speculative import eagle_worker_common

    eagle_worker_common.move_accept_tokens_to_target_kvcache = lambda *args: None


def clone_nothing(engine: Any) -> None:
    """A cached state that is reused is not copied to the request's own slot."""
    engine.runner.req_to_token_pool.mamba_pool.copy_from = lambda source, destination: None


def clone_convolutions_only(engine: Any) -> None:
    """A cached state that is reused is copied without its recurrent part."""
    pool = engine.runner.req_to_token_pool.mamba_pool

    def copy(source: Any, destination: Any) -> None:
        for state in pool.mamba_cache.conv:
            state[:, destination] = state[:, source]

    pool.copy_from = copy


def never_clone(engine: Any) -> None:
    """SGLang never gets to where it copies a cached state that is reused."""
    engine.runner._maybe_execute_deferred_mamba_cow_and_clear = lambda batch: None


def checkpoint_another(engine: Any) -> None:
    """A decode's checkpoints are copies of the states of the row before."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase

    track = MambaAttnBackendBase._track_mamba_state_decode

    def copy(self: Any, batch: Any, conv: Any, ssm: Any, slots: Any, *args: Any, **kwargs: Any) -> None:
        track(self, batch, conv, ssm, slots.roll(1), *args, **kwargs)

    MambaAttnBackendBase._track_mamba_state_decode = copy


def park_only_keys(engine: Any) -> None:
    """What HiCache copies to host memory is copied without V."""
    _transfer_only_keys(lambda layers: layers > 2)


def load_only_keys(engine: Any) -> None:
    """What HiCache loads from host memory, layer by layer, is loaded without V."""
    _transfer_only_keys(lambda layers: layers == 2)


def _transfer_only_keys(breaks: Callable[[int], bool]) -> None:
    """``breaks``: whether a copy between so many buffers does that; K of all layers comes before V."""
    from sglang.srt.mem_cache.pool_host import mha

    transfer = mha.transfer_kv_direct

    def copy(src_layers: Any, dst_layers: Any, **more: Any) -> None:
        kept = len(src_layers) // 2 if breaks(len(src_layers)) else len(src_layers)
        transfer(src_layers=src_layers[:kept], dst_layers=dst_layers[:kept], **more)

    mha.transfer_kv_direct = copy


HOW = {
    function.__name__: function
    for function in (
        move_only_keys,
        move_from_the_next_slot,
        move_nothing,
        clone_nothing,
        clone_convolutions_only,
        never_clone,
        checkpoint_another,
        park_only_keys,
        load_only_keys,
    )
}


def serve_until_found(engine: Any, prompts: list[list[int]], new_tokens: int, most: int = 8) -> dict[str, Any]:
    """Serves the prompts again and again, until something was found; gives that, and how often they were served."""
    for times in range(1, most + 1):
        serve(engine, prompts, new_tokens)
        found = findings(engine)["violations"]
        if found:
            return {"violations": found, "times": times}
    return {"violations": [], "times": most}
