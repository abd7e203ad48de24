"""Attention of Transformers' models: rules, and a look while a forward runs."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from canary_adapters import Projection, attention_rule
from canary_core import Attended, AttentionObserver, AttentionRule


def rules(model: Any) -> Mapping[int, AttentionRule | str]:
    """By layer, see `Recomputer.attention`."""
    config = model.config.get_text_config()
    return {
        layer: attention_rule(config, layer, getattr(module, "sinks", None), stray_windows=True)
        for layer, module in _modules(model).items()
    }


@contextmanager
def observed(model: Any, observer: AttentionObserver | None) -> Iterator[None]:
    """The observer sees the attention of its layer in forwards of this thread meanwhile."""
    module = None if observer is None else _modules(model).get(observer.layer)
    if observer is None or module is None:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    name = module.config._attn_implementation
    missing = object()
    before = functions._local_mapping.get(name, missing)
    original = functions.get(name)
    thread, projections, seen = threading.get_ident(), _Projections(module), 0

    def attend(of: Any, *given: Any, **more: Any) -> Any:
        nonlocal seen
        compute = original or sys.modules[type(of).__module__].eager_attention_forward
        answer = compute(of, *given, **more)
        if of is module and threading.get_ident() == thread:
            named = {**dict(zip(_GIVEN, given, strict=False)), **more}
            query, key, value = (named[name][0].transpose(0, 1) for name in _GIVEN)
            known = projections.of(len(query), key, value)
            observer.see(Attended(observer.layer, seen, query, key, value, answer[0][0], **known))
            seen += len(query)
        return answer

    functions[name] = attend
    try:
        yield
    finally:
        projections.remove()
        if before is missing:
            del functions[name]
        else:
            functions[name] = before


_GIVEN = ("query", "key", "value")


class _Projections:
    """Hooks of one layer, which keep what it has computed itself."""

    def __init__(self, module: Any) -> None:
        self._expanded = Projection()
        self._last: Tensor | None = None
        """Values, or compressed KV where keys and values are computed from it."""
        hooked = ((module, "v_proj", self._keep), (module, "kv_a_layernorm", self._keep))
        more = (module, "kv_b_proj", self._expanded)
        self._hooks = [getattr(m, at).register_forward_hook(do) for m, at, do in (*hooked, more) if hasattr(m, at)]

    def _keep(self, module: Any, given: Any, output: Tensor) -> None:
        self._last = output

    def of(self, count: int, keys: Tensor, values: Tensor) -> dict[str, Any]:
        """As of `Attended`, of one sequence: what was computed of the last ``count`` of attention's ``keys`` and
        ``values``, ``[m, heads, dim]``."""
        last, self._last = self._last, None
        expanded = self._expanded.take(keys[-count:], values[-count:])
        if last is None:
            return {}
        if expanded is None:
            return {"computed": last[0].view(-1, *values.shape[1:])}
        compressed = expanded.rows[:, : last.shape[-1]], last[0]
        return {"computed": expanded.values, "computed_keys": expanded.keys, "compressed": compressed}

    def remove(self) -> None:
        """All hooks."""
        for hook in self._hooks:
            hook.remove()


def _modules(model: Any) -> dict[int, Any]:
    """Attention of a decoder, by layer."""
    found = (
        (getattr(m, "layer_idx", None), m) for m in model.modules() if hasattr(m, "q_proj") or hasattr(m, "kv_b_proj")
    )
    return {layer: module for layer, module in found if layer is not None}
