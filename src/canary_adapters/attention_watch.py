"""`AttentionWatch`: attention of one layer, in turns, in the forwards that compute a request again."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canary_adapters.attention_calls import AttentionCalls, Operands
from canary_adapters.attention_rules import AttentionLayer
from canary_adapters.compressed_kv import Expanded
from canary_adapters.internal_requests import is_internal
from canary_core import Attended, AttentionRule, Canary, KVSource, Patches

if TYPE_CHECKING:
    from canary_core import RecomputeJudge
    from canary_core.watchers.recompute.attention import AttentionLook
    from canary_core.watchers.recompute.attention_turns import AttentionTurns

MOST_TOKENS = 16_384
"""Longest request whose keys and values of one layer are kept until it is computed."""
MOST_QUERIES = 1024
"""Its last tokens, of which queries and outputs are kept, too; as many again where these come in several forwards."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
COMPRESSED_HALF = "kv"
"""Name of compressed KV in a pool."""
COARSE = (torch.float8_e4m3fn, torch.float8_e5m2)

NO_MEMORY = "the device has no memory for a second computation of its attention"
OTHER_CALLS = "not all of its tokens came through the engine's function of attention, as where a graph is replayed"


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """The last queries of one forward, with the output. own: fields of `Attended` that do not come from the pool."""

    first: int
    queries: Tensor
    output: Tensor
    own: Mapping[str, Tensor]


@dataclass(slots=True, eq=False)
class _Watched:
    """An internal request. tokens: number of seen ones, from the first on. keys, values: as computed for the pool;
    compressed KV is in ``keys`` alone. doubt: why there will be no verdict."""

    request: str
    look: "AttentionLook"
    tokens: int = 0
    parts: list[_Queries] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    doubt: str | None = None


class AttentionWatch:
    """Keeps copies of what one layer's attention was given and gave in the forwards of one internal request; once all
    is computed, it is computed once more by the configuration's rule, after the forward, from the KV in the pool.

    ``judge``: see `RecomputePairs`.
    """

    def __init__(self, canary: Canary, calls: AttentionCalls, judge: Callable[[], "RecomputeJudge"]) -> None:
        self._canary = canary
        self._calls = calls
        self._judge = judge
        self._layers: Mapping[int, AttentionLayer] = {}
        self._turns: AttentionTurns | None = None
        self._watched: _Watched | None = None

    @property
    def turns(self) -> "AttentionTurns":
        """Made on first use."""
        if self._turns is None:
            from canary_core.watchers.recompute.attention_turns import AttentionTurns

            self._turns = AttentionTurns(self._canary, self._judge(), self._rules)
        return self._turns

    def forward(
        self, begun: Iterable[str], counts: Mapping[str, int], order: Callable[[], Sequence[str]]
    ) -> AbstractContextManager[None]:
        """Around a forward. ``begun``: requests that begin with it. ``counts``: new tokens of each one. ``order``: the
        rows, known once the layers are called."""
        for name in begun:
            if is_internal(name):
                self._watched = None
                with self._canary.guard("attention"):
                    look = self.turns.next()
                    self._watched = None if look is None else _Watched(name, look)
        watched = self._watched
        if watched is None or watched.doubt is not None or watched.request not in counts:
            return nullcontext()
        return self._observed(watched, counts, order)

    def forget(self, request: str) -> _Watched | None:
        """An internal request has ended; gives the last one watched, if it is that."""
        watched = self._watched
        if watched is None or watched.request != request:
            return None
        self._watched = None
        return watched

    def finish(self, request: str, slots: Callable[[str, int], Tensor]) -> "AttentionLook | None":
        """After the last forward of an internal ``request``, on its stream: None where nothing is watched. ``slots``:
        those of a region for so many first tokens, -1 for none. Never waits."""
        watched = self.forget(request)
        if watched is None:
            return None
        look = watched.look
        look.doubt = watched.doubt
        if look.doubt is None and watched.keys:
            try:
                self._compute(watched, slots(self._layers[look.layer].region, watched.tokens))
            except torch.OutOfMemoryError:
                look.doubt = NO_MEMORY
        return look

    @contextmanager
    def _observed(
        self, watched: _Watched, counts: Mapping[str, int], order: Callable[[], Sequence[str]]
    ) -> Iterator[None]:
        layer, before = self._layers[watched.look.layer], watched.tokens
        patches = Patches()
        patches.wrap(layer.owner, self._calls.method, functools.partial(self._watches, watched, counts, order))
        try:
            with self._calls.around(watched.look.layer):
                yield
        finally:
            patches.undo()
            if watched.tokens != before + counts[watched.request] and watched.doubt is None:
                watched.doubt = OTHER_CALLS

    def _watches(
        self,
        watched: _Watched,
        counts: Mapping[str, int],
        order: Callable[[], Sequence[str]],
        attend: Callable[..., Any],
    ) -> Callable[..., Any]:
        @functools.wraps(attend)
        def watching(*args: Any, **kwargs: Any) -> Any:
            rows: slice | None = None
            given: Operands | None = None
            with self._canary.guard("attention"):
                found = self._calls.operands(watched.look.layer, *args, **kwargs)
                rows, given = self._take(watched, counts, order(), found)
            result = attend(*args, **kwargs)
            if rows is not None and given is not None:
                with self._canary.guard("attention"):
                    self._keep(watched, rows, given, result if given.output is None else given.output)
            return result

        return watching

    def _take(
        self, watched: _Watched, counts: Mapping[str, int], names: Sequence[str], found: Sequence[Any] | str | None
    ) -> tuple[slice | None, Operands | None]:
        """Keeps keys and values, which the store may change. Gives the request's rows, whose output comes next, None
        for none; and the operands."""
        if found is None:
            return None, None
        if isinstance(found, str):
            watched.doubt = found
            return None, None
        given = Operands(*found)
        watched.doubt = _doubt(watched, given, names, counts)
        if watched.doubt is not None:
            return None, None
        new = counts[watched.request]
        first = sum(counts.get(name, 0) for name in names[: names.index(watched.request)])
        rows = slice(first, first + new)
        try:
            if given.expanded is None:
                watched.keys.append(given.keys[rows].clone())
                watched.values.append(given.values[rows].clone())
            else:
                watched.keys.append(given.expanded.rows[rows, None].clone())
        except torch.OutOfMemoryError:
            watched.doubt = NO_MEMORY
            return None, None
        watched.tokens += new
        return rows, given

    def _keep(self, watched: _Watched, rows: slice, given: Operands, output: Any) -> None:
        if not isinstance(output, Tensor) or output.dtype not in FLOATS:
            watched.doubt = f"its attention gives {getattr(output, 'dtype', type(output).__name__)}"
            return
        last = slice(max(rows.start, rows.stop - MOST_QUERIES), rows.stop)
        at = watched.tokens - (last.stop - last.start)
        kept = {} if given.expanded is None else _own(given, given.expanded, rows, last)
        try:
            own = {name: tensor.clone() for name, tensor in kept.items()}
            watched.parts.append(_Queries(at, given.queries[last].clone(), output[last].clone(), own))
        except torch.OutOfMemoryError:
            watched.doubt = NO_MEMORY
        if len(watched.parts) > 1 and watched.tokens - watched.parts[1].first >= MOST_QUERIES:
            del watched.parts[0]

    def _rules(self) -> dict[int, AttentionRule | str]:
        self._layers = self._calls.layers()
        return {number: self._refusal(number) or layer.rule for number, layer in self._layers.items()}

    def _refusal(self, number: int) -> str | None:
        for half in self._halves(number):
            sources = self._sources(number, half)
            if not sources:
                return "its keys and values are not stored by themselves"
            scales = self._calls.scales(number) if sources[0].dtype in COARSE else ""
            if half == COMPRESSED_HALF and sources[0].dtype in COARSE:
                scales = "nobody has shown how compressed KV is read"
            if sources[0].dtype not in FLOATS and isinstance(scales, str):
                return f"its KV is stored as {sources[0].dtype}{scales and ', and '}{scales}"
        return None

    def _halves(self, number: int) -> Sequence[str]:
        """Names of the layer's halves in the pool."""
        compressed = self._layers[number].compressed and self._sources(number, COMPRESSED_HALF)
        return (COMPRESSED_HALF,) if compressed else ("k", "v")

    def _sources(self, number: int, half: str) -> list[KVSource]:
        """All parts, in the order of heads."""
        region = self._canary.regions[self._layers[number].region]
        return [source for source in region.sources if source.layer == number and source.half == half]

    def _compute(self, watched: _Watched, slots: Tensor) -> None:
        from canary_core.ops.torch.compare_kv import elements, numbers

        look, read, made = watched.look, [], []
        halves = self._halves(look.layer)
        for half, parts in zip(halves, (watched.keys, watched.values), strict=False):
            sources, computed = self._sources(look.layer, half), torch.cat(parts)
            kind = sources[0].dtype
            scales = self._calls.scales(look.layer) if kind in COARSE else (1.0, 1.0)
            alike = kind in (computed.dtype, *COARSE) and sum(map(elements, sources)) == computed[0].numel()
            if kind is None or not alike or isinstance(scales, str):
                look.doubt = f"its KV is computed as {computed.dtype} and stored in another form"
                return
            found = [numbers(source, slots.long()) for source in sources]
            held, (_, there) = torch.cat([part for part, _ in found], 1).view(computed.shape), found[0]
            stored = computed
            if kind in COARSE:
                held, stored = _coarse(held, computed, scales[halves.index(half)], kind)
            # A window may have passed the first ones.
            read.append(torch.where(there[:, None, None], held, stored))
            made.append(stored)
        compressed = halves == (COMPRESSED_HALF,)
        for part in watched.parts:
            count, heads, _ = part.queries.shape
            end, output = part.first + count, part.output.view(count, heads, -1)
            new = slice(part.first, end)
            # Compressed KV is the key where it is not expanded, and its first numbers are the value.
            own: dict[str, Any] = {"keys": read[0][:end], "values": read[-1][:end, :, : output.shape[2]], **part.own}
            if compressed:
                own["compressed"] = read[0][new], made[0][new]
            else:
                own["computed_keys"], own["computed"] = (tensor[new] for tensor in made)
            look.see(Attended(look.layer, part.first, part.queries, output=output, **own))
        look.arrived()


def _own(given: Operands, expanded: Expanded, rows: slice, last: slice) -> dict[str, Tensor]:
    """Keys and values of a request's ``rows``, and of the ``last`` ones as computed by the layer."""
    return {
        "keys": given.keys[rows],
        "values": given.values[rows],
        "computed_keys": expanded.keys[last],
        "computed": expanded.values[last],
    }


def _coarse(held: Tensor, computed: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stored numbers as attention reads them, and as the store should have left them: the same where ``computed`` may
    have been rounded, or cut off by up to a step, to ``dtype``, after a rounding of the division by ``scale``."""
    kind, small = torch.finfo(dtype), torch.finfo(computed.dtype).eps
    read, right = held * scale, computed.float().clamp(-kind.max * scale, kind.max * scale)
    steps = torch.where(read.abs() > right.abs(), 0.5, 1.0) * kind.eps + small
    near = (read - right).abs() <= steps * right.abs() + kind.smallest_normal * kind.eps * scale
    return read, torch.where(near, read, (right / scale).to(dtype).float() * scale)


def _doubt(watched: _Watched, given: Operands, names: Sequence[str], counts: Mapping[str, int]) -> str | None:
    """Why a call of a layer's attention can't be looked at, None if it can. ``given``: see `AttentionCalls`."""
    if watched.request not in names:
        return "its rows in the batch are not known"
    if len(given.queries) < sum(counts.values()):
        return "its batch is computed in parts"
    if not {tensor.dtype for tensor in (given.queries, given.keys, given.values)} <= {*FLOATS}:
        return f"its attention computes in {given.queries.dtype}"
    if given.expanded is not None and (watched.tokens or len(given.keys) != len(given.queries)):
        return "its keys and values are computed from compressed KV in parts"
    if watched.tokens + counts[watched.request] > MOST_TOKENS:
        return f"requests of more than {MOST_TOKENS} tokens are not looked at"
    return None
