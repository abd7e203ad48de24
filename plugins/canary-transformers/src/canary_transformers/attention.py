"""Attention of Transformers' models: rules, and a look while a forward runs."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from canary_adapters import attention_rule
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
    thread, values, seen = threading.get_ident(), _Values(), 0

    def attend(of: Any, *given: Any, **more: Any) -> Any:
        nonlocal seen
        compute = original or sys.modules[type(of).__module__].eager_attention_forward
        answer = compute(of, *given, **more)
        if of is module and threading.get_ident() == thread:
            named = {**dict(zip(_GIVEN, given, strict=False)), **more}
            query, key, value = (named[name][0].transpose(0, 1) for name in _GIVEN)
            observer.see(Attended(observer.layer, seen, query, key, value, answer[0][0], values.of(named["value"])))
            seen += len(query)
        return answer

    hook = module.v_proj.register_forward_hook(values) if hasattr(module, "v_proj") else None
    functions[name] = attend
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        if before is missing:
            del functions[name]
        else:
            functions[name] = before


_GIVEN = ("query", "key", "value")


class _Values:
    """Hook of a projection, which keeps what it gave last."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def __call__(self, module: Any, given: Any, output: Tensor) -> None:
        self._last = output

    def of(self, value: Tensor) -> Tensor | None:
        """Of one sequence, in the shape of attention's ``value``, ``[1, heads, m, dim]``."""
        last, self._last = self._last, None
        return None if last is None else last[0].view(-1, value.shape[1], value.shape[3])


def _modules(model: Any) -> dict[int, Any]:
    """Attention of a decoder, by layer."""
    found = ((getattr(m, "layer_idx", None), m) for m in model.modules() if hasattr(m, "q_proj"))
    return {layer: module for layer, module in found if layer is not None}
