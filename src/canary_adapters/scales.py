"""Scales by which layers quantize KV: `WatchedScales` tells of changes, `kv_scales` gives those of one layer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from canary_adapters.layer_numbers import layer_numbers
from canary_adapters.weights import UNCOUNTED, counter
from canary_core import Canary, Event

_Place = tuple[str, str, dict[str, Any]]


class WatchedScales:
    """Scales ``names`` of ``layers``, such as ``_k_scale``: numbers and tensors, as far as a layer has such. KV in the
    pool means something else under another scale. So a change counts as one of the weights: a later request
    that hits a prefix from before is a `prefix` finding with layer, old and new scale; and the event ``scales_changed``
    says that running requests read KV by another scale than KV was written with.

    Numbers are compared, tensors by object and version counter; only what has moved is read, for which the host waits
    for the device. A tensor without a version counter is compared by object only.
    """

    def __init__(self, canary: Canary, layers: Mapping[str, nn.Module], names: Sequence[str]) -> None:
        self._canary = canary
        self._places = [
            (layer, name, held)
            for layer, module in layers.items()
            for name in names
            for held in (vars(module), module._buffers, module._parameters)
            if isinstance(held.get(name), (float, int, Tensor))
        ]
        self._seen = self._look()
        self._values = [_value(held.get(name)) for _, name, held in self._places]
        self._layers = list(layers.values())
        self._pending = self._to_be_computed()
        self._same = canary.forwards

    def look(self) -> None:
        """For each forward in which a request begins, before the request is identified: tells of changes since the
        last look, at 0.3 µs a scale. Never captured."""
        seen = self._look()
        if seen != self._seen:
            self._seen, before = seen, self._values
            self._values = [_value(held.get(name)) for _, name, held in self._places]
            changed = list(self._changed(before))
            # What the first forward computes is no change: nothing was written before.
            if changed and not self._pending:
                self._tell(changed)
            self._pending = self._to_be_computed()
        self._same = self._canary.forwards

    def _look(self) -> list[Any]:
        return [_seen(held.get(name)) for _, name, held in self._places]

    def _to_be_computed(self) -> bool:
        return any(vars(layer).get("calculate_kv_scales") for layer in self._layers)

    def _changed(self, before: list[Any]) -> Iterator[tuple[str, str, Any, Any]]:
        told = set()
        for (layer, name, _), old, new in zip(self._places, before, self._values, strict=True):
            scale = name.strip("_").removesuffix("_float")
            if old != new and (layer, scale) not in told:
                told.add((layer, scale))
                yield layer, scale, old, new

    def _tell(self, changed: list[tuple[str, str, Any, Any]]) -> None:
        layer, scale, old, new = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        said = f"{scale} of {layer}{more}: {_said(old)} to {_said(new)}"
        fields = {"layer": layer, "scale": scale, "old": _said(old), "new": _said(new), "scales": len(changed)}
        if self._same:
            # Something may have been written with the old ones.
            self._canary.tell(Event("scales_changed", "warning", fields))
            self._canary.step.weights_changed(said, since=self._same)


def kv_scales(layers: Mapping[str, Any], shown: Sequence[str], number: int) -> tuple[float, float] | str:
    """Factors by which attention of the layer of this ``number`` reads keys and values: ``_k_scale_float`` and
    ``_v_scale_float``. Or the reason for which nobody knows, unless the type of the layer's ``impl`` is one of those
    ``shown`` to compute attention from nothing but queries and stored numbers times these."""
    layer = next((layers[name] for name, of in layer_numbers([*layers]).items() if of == number), None)
    backend = type(getattr(layer, "impl", None)).__name__
    if layer is None or backend not in shown:
        return f"nobody has shown how {backend} reads it"
    return float(layer._k_scale_float), float(layer._v_scale_float)


def _seen(scale: Any) -> Any:
    return (id(scale), UNCOUNTED if scale.is_inference() else counter(scale)) if isinstance(scale, Tensor) else scale


def _value(scale: Any) -> Any:
    return scale.detach().flatten().tolist() if isinstance(scale, Tensor) and not scale.is_meta else scale


def _said(value: Any) -> str:
    numbers = value if isinstance(value, list) else [value]
    return ", ".join(f"{number:g}" if isinstance(number, (int, float)) else "none" for number in numbers[:4])
