"""Attention that SGLang computes wrongly in all of its forwards: broken by nothing but SGLang and torch."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tools.inspection import events, findings
from tools.recomputes import begin, finish, prompt, scaled_store, verify

DECODED = 20


def attention_verified(engine: Any, fault: str = "", tokens: int = 90) -> dict[str, Any]:
    """A request that is computed under a fault of `FAULTS` (none for an empty name) beside another one, and verified as
    often as there are layers. Gives the answers, findings, and what was told meanwhile; and whether anything of a look
    is left."""
    findings(engine)
    told = len(engine.told.events)
    name = fault or "clean"
    with contextlib.nullcontext() if not fault else FAULTS[fault](engine):
        begin(engine, {"beside": prompt("beside", 40), name: prompt(name, tokens)}, DECODED)
        answers = [verify(engine, name)[0] for _ in range(engine.runner.model_config.num_hidden_layers)]
        finish(engine, name, "beside")
    done = findings(engine)
    left = "forward" in vars(engine.runner.attn_backend)
    return {"answers": answers, "events": events(engine)[told:], "left": left, **done}


def layers(engine: Any) -> list[Any]:
    """SGLang's own, in order."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in engine.runner.model.modules() if isinstance(module, RadixAttention)]


def _second(engine: Any) -> list[Any]:
    return [layer for layer in layers(engine) if layer.layer_id == 1]


@contextlib.contextmanager
def _scale(engine: Any) -> Iterator[None]:
    """Two per cent too large, in layer 1."""
    # Of MLA there are two, for its two forms.
    wrong = _second(engine)
    for layer in wrong:
        layer.scaling *= 1.02
    try:
        yield
    finally:
        for layer in wrong:
            layer.scaling /= 1.02


@contextlib.contextmanager
def _all_scales(engine: Any) -> Iterator[None]:
    """Two per cent too large, in all layers."""
    with _replaced(engine.runner.attn_backend, forward=_rescaled(engine.runner.attn_backend)):
        yield


def _rescaled(backend: Any) -> Callable[..., Any]:
    def forward(q: Any, *args: Any, **kwargs: Any) -> Any:
        return type(backend).forward(backend, q * 1.02, *args, **kwargs)

    return forward


@contextlib.contextmanager
def _window(engine: Any) -> Iterator[None]:
    """One token shorter than the configuration says."""
    windowed = [layer for layer in layers(engine) if layer.sliding_window_size > 0]
    for layer in windowed:
        layer.sliding_window_size -= 1
    try:
        yield
    finally:
        for layer in windowed:
            layer.sliding_window_size += 1


@contextlib.contextmanager
def _replaced(owner: Any, **wrong: Callable[..., Any]) -> Iterator[None]:
    for name, function in wrong.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name in wrong:
            delattr(owner, name)


def _head(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Each group of heads reads the other group's keys and values."""
    pool = engine.runner.token_to_kv_pool
    keys, values = pool.get_key_buffer, pool.get_value_buffer
    return _replaced(
        pool,
        get_key_buffer=lambda layer: keys(layer).flip(1),
        get_value_buffer=lambda layer: values(layer).flip(1),
    )


def _values(engine: Any) -> contextlib.AbstractContextManager[None]:
    """K and V are exchanged when they are stored."""
    pool = engine.runner.token_to_kv_pool
    right = pool.set_kv_buffer
    return _replaced(pool, set_kv_buffer=lambda layer, loc, k, v, *rest: right(layer, loc, v, k, *rest))


def _stored_scale(engine: Any) -> contextlib.AbstractContextManager[None]:
    """K of layer 1 is divided by another scale before it is stored."""
    return _replaced(engine.runner.token_to_kv_pool, set_kv_buffer=scaled_store(engine))


@contextlib.contextmanager
def _layers_forward(engine: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """``forward`` takes the place of each layer's own, with layer and backend before its arguments."""
    with contextlib.ExitStack() as stack:
        for layer in layers(engine):
            stack.enter_context(_replaced(layer, forward=partial(forward, layer, engine.runner.attn_backend)))
        yield


def _graph(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Attention is computed without a call of the backend's own method, as where a graph is replayed."""

    def forward(layer: Any, backend: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        return type(backend).forward(backend, q, *_by_heads(layer, k, v), layer, *rest, **more)

    return _layers_forward(engine, forward)


def _stored_before(engine: Any) -> contextlib.AbstractContextManager[None]:
    """A kernel of the rotation stores K and V, and attention does not."""

    def forward(layer: Any, backend: Any, q: Any, k: Any, v: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        backend.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, *_by_heads(layer, k, v))
        return type(layer).forward(layer, q, k, v, batch, save_kv_cache=False)

    return _layers_forward(engine, forward)


def _by_heads(layer: Any, *projected: Any) -> list[Any]:
    return [tensor.view(-1, layer.tp_k_head_num, layer.head_dim) for tensor in projected]


@contextlib.contextmanager
def _turned(engine: Any) -> Iterator[None]:
    """Each head of layer 1 reads the keys and values of the head beside it, once MLA has computed them."""
    backend = engine.runner.attn_backend

    def forward(q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any) -> Any:
        if layer.layer_id == 1 and layer.tp_k_head_num > 1:
            k, v = k.roll(1, 1), v.roll(1, 1)
        return type(backend).forward(backend, q, k, v, layer, *rest, **more)

    with _replaced(backend, forward=forward):
        yield


@contextlib.contextmanager
def _turned_before(engine: Any) -> Iterator[None]:
    """Each head of layer 1 is given the values of the head beside it."""
    (layer,) = [layer for layer in _second(engine) if layer.tp_k_head_num > 1]

    def forward(q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        return type(layer).forward(layer, q, k, v.roll(1, 1), *rest, **more)

    with _replaced(layer, forward=forward):
        yield


def _stored_otherwise(engine: Any) -> contextlib.AbstractContextManager[None]:
    """One number of the compressed KV of layer 1 is stored half as large again."""
    pool = engine.runner.token_to_kv_pool
    right = pool.set_kv_buffer

    def store(layer: Any, loc: Any, k: Any, *rest: Any) -> None:
        if layer.layer_id == 1:
            k = k.clone()
            k[..., 3] *= 1.5
        right(layer, loc, k, *rest)

    return _replaced(pool, set_kv_buffer=store)


FAULTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "scale": _scale,
    "window": _window,
    "head": _head,
    "values": _values,
    "stored_scale": _stored_scale,
    "all_scales": _all_scales,
    "turned": _turned,
    "turned_before": _turned_before,
    "stored_otherwise": _stored_otherwise,
    "graph": _graph,
    "stored_before": _stored_before,
}
"""By the name of the deviation; the last ones break nothing, and leave nothing to look at."""
