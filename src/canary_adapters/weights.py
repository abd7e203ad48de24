"""`WatchedWeights`: whether a model's weights have another content than before."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from hashlib import blake2b
from math import ceil
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from canary_core import Canary, Patches

SAMPLED = 4096
"""Most elements of a parameter that are compared, on a grid over all dimensions."""

FRUITLESS = 16
"""Looks in a row that found parameters moved, and none changed, after which `WatchedWeights.look` gives up."""

HEAD = "lm_head"
"""Name of the module behind the last layer: no KV depends on it."""

ROTARY, GROWING = ("inv_freq", "cos_sin_cache"), ("dynamic", "longrope")
"""Ends of the names of buffers that count, since keys depend on them; and types of rotary embedding that change these
with a sequence's length, so that theirs don't."""

ROTARY_ROWS = 64
"""Rows of such a buffer that are compared: it may grow, and be converted."""

UNCOUNTED = -1
"""In the place of the version of an inference tensor."""

_Tags = tuple[list[int], list[int], list[int]]

_pointer: Any = Tensor.data_ptr
_version: Any = vars(torch._C.TensorBase)["_version"].__get__


class WatchedWeights:
    """The parameters of ``model``, seen by object, address and version counter, and a digest of sampled elements where
    one of these is another than before. So a difference is certain, and a model that was reloaded with the same
    weights, or moved, has none; a change of elements beside the grid is not seen. Of buffers only those of a rotary
    embedding count; the head does not.

    Not for engines that move weights about while they serve, as offloading does and the balancing of experts. A
    parameter of an inference tensor has no version counter, and that of others does not count what is written to
    ``parameter.data``: `look` does not see such changes, `compare` does. A parameter on the meta device, or without
    memory of its own, is not compared. A sharded one is compared by the local shard.

    ``unwatched``: number of parameters without either. ``gave_up``: too often, parameters had moved for nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        # An engine's model may go before this does.
        self._model = ref(model)
        self._names: list[str] = []
        self._places: list[tuple[ref[nn.Module], str]] = []
        self._tags: _Tags = [], [], []
        self._digests: dict[str, bytes] = {}
        self._fruitless = 0
        self.gave_up = False
        self.unwatched = 0
        self._compare(everything=True)

    def look(self) -> bool:
        """Whether the weights have changed since the last look, as far as 0.2 µs a parameter tell; only what
        has moved is read, for which the host waits for the device. For each forward in which a request begins."""
        if self.gave_up or self._read() == self._tags:
            return False
        changed = self._compare(everything=False)
        self._fruitless = 0 if changed else self._fruitless + 1
        self.gave_up = self._fruitless == FRUITLESS
        return changed

    def compare(self) -> bool:
        """As `look`, after something has loaded weights: every parameter is read."""
        return self._compare(everything=True)

    def _read(self) -> _Tags:
        """Object, version and address of each parameter."""
        now = [
            None if (m := module()) is None else (m._buffers if name.endswith(ROTARY) else m._parameters).get(name)
            for module, name in self._places
        ]
        try:
            # A third of what a loop takes.
            return list(map(id, now)), list(map(_version, now)), list(map(_pointer, now))
        except (RuntimeError, TypeError):
            return list(map(id, now)), list(map(counter, now)), list(map(_address, now))

    def _compare(self, everything: bool) -> bool:
        model = self._model()
        if model is None:
            return False
        before = dict(zip(self._names, zip(*self._tags, strict=True), strict=True))
        found = list(_parameters(model))
        self._names = [f"{path}.{name}" for path, _, name, _ in found]
        self._places = [(ref(module), name) for _, module, name, _ in found]
        self._tags = self._read()
        tags = dict(zip(self._names, zip(*self._tags, strict=True), strict=True))
        parameters = {name: _compared(*one[2:]) for name, one in zip(self._names, found, strict=True)}
        names = [name for name in self._names if everything or before.get(name) != tags[name]]
        changed = False
        for name, digest in zip(names, _digests([parameters[name] for name in names]), strict=True):
            if digest is not None:
                changed |= self._digests.get(name, digest) != digest
                self._digests[name] = digest
        self.unwatched = sum(
            name not in self._digests or tag[1] == UNCOUNTED for name, tag in tags.items() if not name.endswith(ROTARY)
        )
        return changed


class WeightLoads:
    """Tells ``canary`` where a load of the engine has changed the weights of ``model``, by `WatchedWeights.compare`."""

    def __init__(self, canary: Canary, model: nn.Module) -> None:
        self._canary = canary
        self._weights = WatchedWeights(model)
        self._model = ref(model)
        self._inside = False
        canary.guard_weights(model)

    def follow(self, patches: Patches, owner: Any, *names: str) -> None:
        """Follows the functions ``names`` of ``owner``, as far as there are such."""
        for name in names:
            if hasattr(owner, name):
                patches.wrap(owner, name, self._wrapped)

    @contextmanager
    def load(self, how: str) -> Iterator[None]:
        """Context: the engine's function ``how`` loads weights, maybe the same ones; or tries to. One load within
        another is part of it."""
        if self._inside or not self._canary.enabled:
            yield
            return
        self._inside = True
        try:
            with self._canary.guard("weights"):
                # Somebody may have changed the weights before, untold.
                self._weights.look()
            yield
        finally:
            self._inside = False
            with self._canary.guard("weights"):
                if self._weights.compare():
                    self._canary.step.weights_changed(how)
                model = self._model()
                if model is not None:
                    # Elements beside the grid may have changed, too.
                    self._canary.guard_weights(model)

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            with self.load(original.__name__):
                return original(*args, **kwargs)

        return load


class AdapterContents:
    """Contents of adapters by name: a digest of sampled elements, of the last ``capacity`` names."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[str, bytes] = OrderedDict()

    def loaded(self, name: str, tensors: Iterable[Tensor]) -> bool:
        """Notes the content of the adapter ``name``. Whether another one was loaded under this name before."""
        made = blake2b(digest_size=16)
        for digest in _digests(list(tensors)):
            made.update(digest or b"")
        before, self._digests[name] = self._digests.get(name), made.digest()
        self._digests.move_to_end(name)
        if len(self._digests) > self._capacity:
            self._digests.popitem(last=False)
        return before is not None and before != self._digests[name]


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The path of each module with parameters, itself, and each parameter with its name; not of `HEAD`. Buffers of
    `ROTARY` are among them."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] != HEAD:
            held = dict(module._parameters)
            if not any(word in str(getattr(module, "rope_type", type(module).__name__)).lower() for word in GROWING):
                held |= {name: buffer for name, buffer in module._buffers.items() if name.endswith(ROTARY)}
            for name, parameter in held.items():
                if parameter is not None:
                    yield path, module, name, parameter


def _compared(name: str, parameter: Tensor) -> Tensor:
    """The part of a parameter, or of a rotary buffer, that stays as it is unless somebody changes the content."""
    return parameter[:ROTARY_ROWS].to(torch.bfloat16) if name.endswith(ROTARY) and not parameter.is_meta else parameter


def counter(parameter: Tensor | None) -> int:
    """The version counter of a parameter, `UNCOUNTED` without one."""
    return UNCOUNTED if parameter is None or parameter.is_inference() else int(_version(parameter))


def _address(parameter: Tensor | None) -> int:
    try:
        return 0 if parameter is None else parameter.data_ptr()
    except RuntimeError:
        # Of a tensor that is made of others.
        return 0


def _digests(parameters: Sequence[Tensor]) -> list[bytes | None]:
    """Of a sample of each one's elements; None where these can't be read. One wait for each device."""
    samples = [_sample(parameter) for parameter in parameters]
    found: list[bytes | None] = [None] * len(samples)
    for device in dict.fromkeys(sample.device for sample in samples if sample is not None):
        there = [(i, sample) for i, sample in enumerate(samples) if sample is not None and sample.device == device]
        if there:
            read = torch.cat([sample for _, sample in there]).cpu()
            for (i, _), own in zip(there, read.split([len(sample) for _, sample in there]), strict=True):
                found[i] = blake2b(own.numpy(), digest_size=16).digest()
    return found


def _sample(parameter: Tensor) -> Tensor | None:
    """Bytes of elements on a grid, on the parameter's device; None where they can't be read."""
    try:
        tensor: Any = parameter.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
            return None
        if tensor.numel() > SAMPLED:
            # As many in each dimension, as far as there are.
            step = ceil((tensor.numel() / SAMPLED) ** (1 / max(sum(size > 1 for size in tensor.shape), 1)))
            tensor = tensor[tuple(slice(None, None, step) for _ in tensor.shape)]
        sample: Tensor = tensor.reshape(-1).contiguous().view(torch.uint8)
    except Exception:
        return None
    return sample
