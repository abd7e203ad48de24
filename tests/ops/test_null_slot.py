"""The null slot, where padding is written: NaN and infinity that get there are found, whatever else is there is not."""

import math
from dataclasses import replace

import pytest
import torch
from ops.scenario import differences, disturb, history, ring_rows, scenario, twin, write
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Kind, Phase
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.records import Row


def engine(nulls: int = 1, **settings: object) -> Guarded:
    """One whose first ``nulls`` slots are padding, after two forwards."""
    toy = ToyEngine()
    toy.null_slots, toy.free = nulls, list(range(nulls, 64))
    guarded = Guarded(toy, **settings)
    guarded.submit()
    guarded.step()
    guarded.decode()
    return guarded


def nulls_found(guarded: Guarded) -> list[tuple[int | None, str | None]]:
    """Slots and sources of what was found; nothing but null slots that hold no numbers may be."""
    guarded.canary.drain()
    for v in guarded.violations:
        assert (v.kind, v.phase, v.position, v.request) == (Kind.NON_FINITE, Phase.POST_FORWARD, None, None)
        assert v.explanation.startswith(f"NaN or infinite values got into the null slot {v.slot}")
    return [(v.slot, v.source) for v in guarded.violations]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_found_where_it_got_to(value):
    """With its layer and half, in the forward after which it is there; once, until there were numbers again."""
    guarded = engine()
    guarded.decode()
    assert nulls_found(guarded) == []
    guarded.engine.v[1][0, 5] = value
    for _ in range(3):
        guarded.decode()
    assert nulls_found(guarded) == [(0, "v.1")]
    assert guarded.violations[0].step == 4
    assert guarded.canary.stats()["repeated"] == 0
    guarded.engine.v[1][0, 5] = 0
    guarded.decode()
    guarded.engine.k[0][0] = value
    guarded.decode()
    assert nulls_found(guarded) == [(0, "v.1"), (0, "k.0")]


def test_garbage_of_padding_is_no_finding():
    """Padded rows write whatever they compute."""
    guarded = engine()
    for _ in range(5):
        guarded.engine.k[0][0] = torch.randn(24) * 1e4
        guarded.decode()
    assert nulls_found(guarded) == []
    assert guarded.canary.stats()["unsure"] == 0


def test_what_was_there_from_the_start_is_only_counted():
    """Memory that nobody cleared: it may be there rightly."""
    toy = ToyEngine()
    toy.k[1][0] = math.nan
    guarded = Guarded(toy)
    guarded.submit()
    for _ in range(3):
        guarded.decode()
    assert nulls_found(guarded) == []
    assert guarded.canary.stats()["unsure"] == 1


def test_what_is_there_after_a_flush_is_only_counted():
    """An engine that sleeps gives its memory back, and wakes with other memory."""
    guarded = engine()
    guarded.canary.step.flushed()
    guarded.engine.requests.clear()
    guarded.engine.k[0][0] = math.nan
    guarded.submit("b")
    guarded.step()
    assert nulls_found(guarded) == []


def test_a_null_block_is_looked_at_in_turn():
    """One of its slots in each forward."""
    guarded = engine(nulls=4)
    for _ in range(4):
        guarded.decode()
    guarded.engine.k[1][2, 0] = math.nan
    for _ in range(4):
        guarded.decode()
    assert nulls_found(guarded) == [(2, "k.1")]


def test_null_slots_that_nobody_reads_may_hold_anything():
    """An engine that writes padding to other slots than it reads it from: only the latter are looked at."""

    class Trash(ToyEngine):
        def region(self, name="full"):
            return replace(super().region(name), null_reads=2)

    toy = Trash()
    toy.null_slots, toy.free = 4, list(range(4, 64))
    guarded = Guarded(toy)
    guarded.submit()
    for _ in range(3):
        guarded.decode()
    for tensor in toy.k:
        tensor[1:4] = math.nan
    for _ in range(5):
        guarded.decode()
    assert nulls_found(guarded) == [(1, "k.0"), (1, "k.1")]


def test_without_the_check_of_numbers_nothing_is_looked_at():
    """CANARY_NON_FINITE=false is for null slots, too."""
    guarded = engine(non_finite=False)
    guarded.engine.k[1][0] = math.nan
    guarded.decode()
    assert nulls_found(guarded) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_find_what_the_reference_finds(device):
    """In regions of several kinds with one null slot and with four: of a state and of a ring nothing."""
    found = 0
    for seed in (0, 2, 4, 8, 13, 16):
        s = scenario(seed, device)
        state = s.state(read_check=0)
        for batch, table in history(s, steps=3):
            state.require_capacity(batch)
            disturb(s, state)
            for op in ("check", "fingerprint", "record"):
                if op == "fingerprint":
                    write(s)
                other = twin(state)
                getattr(torch_backend(), op)(state, batch, table)
                getattr(triton_backend(), op)(other, batch, table)
                assert differences(state, other, batch.tokens) == [], f"seed {seed}, op {op}"
        # Without the number of the row.
        rows = [row for row in ring_rows(state) if row[Row.KIND - 1] == Kind.NON_FINITE and row[Row.POSITION - 1] < 0]
        found += len(rows)
        assert all(row[Row.SLOT - 1] in s.region.null_range for row in rows)
    assert found > 3
