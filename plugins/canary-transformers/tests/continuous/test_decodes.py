"""Decodes of the same requests: one view whose numbers change, against one that is made anew."""

from collections import Counter
from typing import Any

import pytest
import torch
from canary_transformers.continuous.batch import ContinuousBatch, ContinuousForward
from canary_transformers.continuous.session import Session
from canary_transformers.continuous.tokens import TokenBook
from tiny.batching import Traffic, serve
from tiny.models import batching
from torch.utils._python_dispatch import TorchDispatchMode

from canary_core import Writers

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LOADS = {
    "plain": {"new_tokens": 20},
    "tight": {"pages": 12, "batch_tokens": 24, "requests": 9, "new_tokens": 14},
    "samples": {"samples": 2, "requests": 4, "new_tokens": 20},
}


class Views:
    """Compares each view with one of another `ContinuousBatch`, which remembers nothing. ``again``: how many were that
    of the forward before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.views = self.again = 0
        self._last: Any = None
        self._view = ContinuousBatch.view
        self._writers = Writers()
        monkeypatch.setattr(ContinuousBatch, "view", self._compared(ContinuousBatch.view))

    def _compared(self, original: Any) -> Any:
        def view(batch: ContinuousBatch, forward: ContinuousForward) -> Any:
            found = original(batch, forward)
            anew = ContinuousBatch(batch._groups, self._writers, CPU, TokenBook(CPU, 1 << 22))
            self._same(original(anew, forward), found)
            self.views += 1
            self.again += found is self._last
            self._last = found
            return found

        return view

    def _same(self, want: Any, found: Any) -> None:
        for name in ("prefix_lens", "new_lens", "token_ids", "positions"):
            assert torch.equal(getattr(want, name), getattr(found, name)), name
        ends = (want.prefix_lens + want.new_lens).tolist()
        for row, end in enumerate(ends):
            assert found.expected_tokens[row, :end].tolist() == want.expected_tokens[row, :end].tolist()
            assert found.expected_tokens[row, end:].tolist() in ([], [-1] * (found.expected_tokens.shape[1] - end)) or (
                want.expected_tokens[row, end:].max() >= 0
            )
        for name, table in want.tables.items():
            other = found.tables[name]
            assert torch.equal(table.rows, other.rows)
            assert torch.equal(table.write_slots, other.write_slots)
            assert torch.equal(table.entries[0], other.entries[0, : table.entries.shape[1]])
            same = [t.stored_tokens for t in (table, other)]
            assert (same[0], table.pool_page) == (same[1], other.pool_page)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("load", LOADS)
def test_the_view_of_the_next_decode_says_what_a_new_one_would(
    kind: str, load: str, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While windows fill up and pass on, requests come and go, are preempted and forked."""
    views = Views(monkeypatch)
    guarded = guard(batching(kind), read_check=0)
    serve(batching(kind), Traffic(seed=3, **LOADS[load]))
    assert guarded.violations == []
    assert guarded.stats()["forwards"] == views.views
    assert views.again > (3 if load == "plain" else 0)


class Counted(TorchDispatchMode):
    """Operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_decode_issues_few_operations_and_waits_for_none(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of numbers to the device, one of tokens to the book, and one of what was sampled."""
    counted: list[dict[str, int]] = []
    given = Session._give_sampled

    def in_mode(function: Any, first: bool) -> Any:
        def call(*args: Any) -> Any:
            with Counted() as mode:
                result = function(*args)
            if first:
                counted.append(mode.ops)
            else:
                counted[-1].update(mode.ops)
            return result

        return call

    monkeypatch.setattr(ContinuousBatch, "view", in_mode(ContinuousBatch.view, first=True))
    monkeypatch.setattr(Session, "_give_sampled", in_mode(given, first=False))
    guard(batching("llama"), read_check=0)
    serve(batching("llama"), Traffic(requests=4, new_tokens=24))
    most, times = Counter(frozenset(ops.items()) for ops in counted).most_common(1)[0]
    assert times > 12
    assert dict(most) == {"aten.copy_.default": 2, "aten.index_copy_.default": 1}
