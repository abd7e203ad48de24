"""`TableCheck`: what attention was given, against what the engine keeps."""

import time
from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_adapters import ragged_table
from canary_core import AttachError, BatchView, Kind, ReadLens, ReadTable
from canary_core.ops.state import RegionState


def kv_indices(batch: BatchView, region: str = "full", window: int = 0) -> ReadTable:
    """A list as a paged backend makes it: the slots of all requests one after the other, new tokens included."""
    kept = batch.tables[region]
    ends = batch.prefix_lens + batch.new_lens
    first = (batch.prefix_lens - window + 1).clamp(min=0) if window else torch.zeros_like(ends)
    rows = [kept.entries[row, int(a) : int(b)] for row, (a, b) in enumerate(zip(first, ends, strict=True))]
    counts = ends - first
    given = ragged_table(torch.cat(rows).clone(), counts.cumsum(0) - counts - first)
    return ReadTable("kv_indices", region, given, kept, first, ends, batch.writers)


def run(g: Guarded, *tables: ReadTable, batch: BatchView) -> None:
    """A forward in which the backend has made ``tables``."""
    g.canary.step.tables.compare(tables)
    g.canary.step.before(batch)
    g.engine.forward(batch)
    g.canary.step.after()
    g.canary.step.end()


def test_a_stale_entry_is_told_with_request_position_and_both_slots():
    """The engine's own table is right, so nothing else is found."""
    g = Guarded(table_interval=1)
    g.submit("a", 3)
    g.submit("b", 4)
    g.step()
    for request in g.engine.requests:
        request.tokens.append(8)
    batch = g.engine.batch()
    table = kv_indices(batch)
    right = int(batch.tables["full"].entries[1, 2])
    wrong = int(batch.tables["full"].entries[0, 1])
    # Row b begins behind the four slots of row a.
    table.given.entries[0, 4 + 2] = wrong
    run(g, table, batch=batch)
    g.canary.drain()
    (found,) = g.violations
    assert (found.kind, found.region, found.request, found.position) == (Kind.READ_TABLE, "full", "b", 2)
    assert (found.slot, found.stored_value, found.detail) == (wrong, right, "kv_indices")
    assert (found.stored_request, found.stored_position, found.step) == ("a", 1, 2)
    (incident,) = g.canary.incidents
    assert incident.root is not None
    assert incident.root.kind is Kind.READ_TABLE
    diagnoses = [event.fields["diagnosis"] for event in g.findings.told("diagnosis")]
    assert diagnoses == ["wrong_table_copy"]


def test_a_list_that_is_right_is_silent():
    """Over prefills and decodes of several requests."""
    g = Guarded(table_interval=1)
    g.submit("a", 3)
    g.submit("b", 11)
    for _ in range(5):
        batch = g.engine.batch()
        run(g, kv_indices(batch), batch=batch)
        for request in g.engine.requests:
            request.tokens.append(8)
    g.canary.drain()
    assert g.violations == []
    assert g.canary.stats()["tables_compared"] == 5


def test_the_last_step_s_list_is_found():
    """A list that was not made anew: the newest positions of all requests but the first are wrong in it."""
    g = Guarded(table_interval=1)
    g.submit("a", 3)
    g.submit("b", 3)
    batch = g.engine.batch()
    old = kv_indices(batch)
    run(g, old, batch=batch)
    for request in g.engine.requests:
        request.tokens.append(8)
    batch = g.engine.batch()
    new = kv_indices(batch)
    run(g, replace(new, given=replace(old.given, rows=new.given.rows)), batch=batch)
    g.canary.drain()
    assert {(v.kind, v.request, v.position) for v in g.violations} == {
        (Kind.READ_TABLE, "a", 3),
        (Kind.READ_TABLE, "b", 0),
        (Kind.READ_TABLE, "b", 1),
        (Kind.READ_TABLE, "b", 2),
        (Kind.READ_TABLE, "b", 3),
    }
    # Row b's last two lie beyond the old list.
    assert [v.slot for v in g.violations if v.request == "b" and v.position in (2, 3)] == [-1, -1]


@pytest.mark.parametrize("translated", [False, True])
def test_a_window_s_list_is_compared_in_the_region_s_own_slots(translated):
    """Whether the backend has translated the full pool's slots or not; what the window has evicted is not judged."""
    g = Guarded(ToyEngine(window=4), table_interval=1)
    g.submit("a", 6)
    g.step(chunk=3)
    g.step(chunk=3)
    for broken in (False, True):
        g.engine.requests[0].tokens.append(8)
        batch = g.engine.batch()
        table = kv_indices(batch, "window", window=4)
        if broken:
            table.given.entries[0, 0] = table.given.entries[0, 1]
        if translated:
            own = g.canary.regions["window"].slots_of(table.given.entries[0])
            table = replace(table, given=ragged_table(own, table.given.rows), own_slots=True)
        # The list begins with the window; before it nothing is kept any more, and so nothing compared.
        run(g, replace(table, first=torch.zeros_like(table.first)), batch=batch)
        g.canary.drain()
        found = [(v.kind, v.region, v.position) for v in g.violations]
        assert found == ([(Kind.READ_TABLE, "window", int(table.first[0]))] if broken else [])
        # Its slots have the same numbers as those of the full pool.
        assert all(v.window and "in the window pool window" in v.explanation for v in g.violations)


def test_tables_take_turns_every_few_forwards_and_a_scrub_gives_way():
    """One table each time, and no forward has both a comparison and a scrub."""
    g = Guarded(table_interval=2, scrub_budget="64KiB")
    g.submit("a", 3)
    scrubs, compared = [], []
    original = g.canary.step.scrub.run
    g.canary.step.scrub.run = lambda captured: (scrubs.append(g.canary.forwards), original(captured))
    for _ in range(6):
        batch = g.engine.batch()
        table = kv_indices(batch)
        if g.canary.step.tables.due:
            compared.append(g.canary.forwards + 1)
        run(g, table, replace(table, name="page_table"), batch=batch)
        g.engine.requests[0].tokens.append(8)
    assert compared == [1, 3, 5]
    assert scrubs == [2, 4, 6]
    assert g.canary.step.tables.names == ["kv_indices", "page_table"]


def test_what_can_t_be_judged_is_counted_and_stays_due():
    """No table is no finding, and no interval is lost by it."""
    g = Guarded(table_interval=4)
    g.submit("a", 3)
    batch = g.engine.batch()
    run(g, batch=batch)
    assert g.canary.step.tables.due
    assert g.canary.stats()["tables_skipped"] == 1
    assert "tables_compared" not in g.canary.stats()


def test_a_backend_that_is_left_out_is_told_once():
    """With the reason."""
    g = Guarded()
    for _ in range(3):
        g.canary.step.tables.leave_out("torch_native", "it reads req_to_token itself")
    told = [event for event in g.findings.events if event.name == "tables_left_out"]
    fields = {"backend": "torch_native", "reason": "it reads req_to_token itself"}
    assert [(event.level, fields.items() <= event.fields.items()) for event in told] == [("info", True)]


def test_nothing_is_due_while_canary_is_paused():
    """And as soon as it goes on, it is."""
    g = Guarded(table_interval=1)
    assert g.canary.step.tables.due
    g.canary.step.pause()
    assert not g.canary.step.tables.due
    g.canary.step.resume()
    assert g.canary.step.tables.due


def with_lens(batch: BatchView, begins: bool = False) -> ReadTable:
    """The list, with the lengths that the backend made for it, padded, or where each row begins."""
    table = kv_indices(batch)
    given = torch.cat((table.end, table.end.new_full((3,), 99)))
    if begins:
        given = torch.cat((given.new_zeros(1), given)).cumsum(0).to(given.dtype)
    return replace(table, lens=(ReadLens("kv_lens", given, table.end, begins),))


@pytest.mark.parametrize("begins", [False, True])
def test_a_length_that_is_one_short_is_told_once_with_request_and_both_lengths(begins):
    """Table and bytes are right. A persistent mistake is one finding, though lengths grow; padding is not looked at."""
    g = Guarded(table_interval=1)
    g.submit("a", 3)
    g.submit("b", 4)
    for forward in range(5):
        batch = g.engine.batch()
        table = with_lens(batch, begins)
        if forward > 1:
            # Of a list all rows behind begin one earlier, and so b only is shorter.
            table.lens[0].given[2 if begins else 1 :] -= 1
        run(g, table, batch=batch)
        for request in g.engine.requests:
            request.tokens.append(8)
    g.canary.drain()
    (found,) = g.violations
    assert (found.kind, found.region, found.request) == (Kind.READ_LENGTH, "full", "b")
    assert (found.found_value, found.stored_value, found.detail, found.step) == (5, 6, "kv_lens", 3)
    assert (found.slot, found.position, found.stored_token) == (None, None, None)
    assert "kv_lens has 5 tokens for b, and 6 are right (1 too few)" in found.explanation
    assert found.fields()["found_value"] == 5
    assert g.canary.stats()["lengths_compared"] == 5
    diagnoses = [event.fields["diagnosis"] for event in g.findings.told("diagnosis")]
    assert diagnoses == ["wrong_length"]


def test_lengths_without_a_table_are_compared_row_by_row():
    """Where a backend reads the engine's own table. Rows whose length can't be known are left out."""
    g = Guarded(table_interval=1)
    g.submit("a", 3)
    g.submit("b", 4)
    batch = g.engine.batch()
    ends = batch.prefix_lens + batch.new_lens
    first = ReadLens("seq_lens", ends + 2, torch.tensor([-1, ends[1]], dtype=ends.dtype))
    other = ReadLens("cu_seqlens_q", torch.tensor([0, 3, 7]), batch.new_lens, begins=True)
    run(g, ReadTable.of_lens("full", batch.tables["full"], batch.writers, first, other), batch=batch)
    g.canary.drain()
    assert [(v.kind, v.request, v.detail) for v in g.violations] == [(Kind.READ_LENGTH, "b", "seq_lens")]
    assert g.canary.step.tables.names == ["seq_lens", "cu_seqlens_q"]


def test_a_common_prefix_that_not_all_rows_have_is_told():
    """A cascade reads the first positions of every row by the entries of row 0."""
    for common, kinds in ((0, []), (2, [("b", 0), ("b", 1)])):
        g = Guarded(table_interval=1)
        g.submit("a", 3)
        g.submit("b", 4)
        batch = g.engine.batch()
        run(g, replace(kv_indices(batch), common=common), batch=batch)
        g.canary.drain()
        assert [(v.request, v.position) for v in g.violations] == kinds
        assert {v.kind for v in g.violations} <= {Kind.READ_TABLE}


def test_lengths_that_do_not_fit_are_refused():
    """A number for each row, one more where rows begin, and no more lengths than a launch takes."""
    lens = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(AttachError, match="2 numbers are given, for 2 rows must be 3"):
        ReadLens("kv_indptr", lens, lens, begins=True)
    g = Guarded()
    g.submit("a", 3)
    table = kv_indices(g.engine.batch())
    with pytest.raises(AttachError, match="give a length for each"):
        replace(table, lens=(ReadLens("lens", lens, lens),))
    with pytest.raises(AttachError, match="at most 2 lens"):
        replace(table, lens=(ReadLens("lens", table.end, table.end),) * 3)


def test_interval_0_compares_nothing():
    """Then nothing is ever due."""
    g = Guarded(table_interval=0)
    g.submit("a", 3)
    batch = g.engine.batch()
    table = kv_indices(batch)
    table.given.entries[0, 0] = 9
    run(g, table, batch=batch)
    g.canary.drain()
    assert g.violations == []
    assert not g.canary.step.tables.due


def test_a_table_of_an_unknown_region_is_the_adapter_s_mistake():
    """In raise mode it is raised; in log mode Canary switches itself off and says why, and the engine goes on."""
    g = Guarded(table_interval=1)
    g.submit("a", 3)
    batch = g.engine.batch()
    run(g, replace(kv_indices(batch), region="other"), batch=batch)
    assert not g.canary.enabled
    (disabled,) = g.findings.told("disabled")
    assert "got 'other'" in str(disabled.fields["reason"])


def test_tables_that_do_not_fit_are_refused():
    """One number a row for each of them."""
    g = Guarded()
    g.submit("a", 3)
    table = kv_indices(g.engine.batch())
    with pytest.raises(AttachError, match="one number a row"):
        replace(table, end=torch.zeros(2, dtype=torch.int32))
    many = torch.zeros(99, dtype=torch.int32)
    with pytest.raises(AttachError, match="given has 1 rows"):
        replace(table, first=many, end=many, writers=many)


@pytest.mark.parametrize(("interval", "compared"), [(1, 2), (2, 1)])
def test_a_comparison_that_has_to_be_compiled_is_left_out_meanwhile(interval, compared):
    """The engine does not wait for a compiler, but where every forward is to be compared. The compiler is a stand-in
    that has done its work when it is asked again."""
    g = Guarded(table_interval=interval)
    answers = iter([False, True])
    workspace = g.canary.step.tables._workspace
    compare = workspace.backend.compare_tables

    def compared_if_ready(state: RegionState, table: ReadTable, name: int, wait: bool) -> bool:
        return (wait or next(answers)) and compare(state, table, name, wait)

    object.__setattr__(workspace, "backend", replace(workspace.backend, compare_tables=compared_if_ready))
    g.submit("a", 3)
    for _ in range(2 * interval):
        batch = g.engine.batch()
        run(g, kv_indices(batch), batch=batch)
        g.engine.requests[0].tokens.append(8)
    g.canary.drain()
    stats = g.canary.stats()
    assert (stats["tables_compared"], stats.get("tables_skipped", 0)) == (compared, 2 - compared)
    assert g.violations == []


def test_where_nothing_can_be_judged_it_is_tried_less_and_less():
    """To try costs an engine's host something in each forward; what can be judged again has its usual turn."""
    g = Guarded(table_interval=8)
    g.submit("a", 3)
    tried = []
    for forward in range(40):
        if g.canary.step.tables.due:
            tried.append(forward)
        batch = g.engine.batch()
        run(g, batch=batch)
        g.engine.requests[0].tokens.append(8)
    assert tried == [0, 1, 3, 7, 15, 23, 31, 39]
    for _ in range(8):
        batch = g.engine.batch()
        run(g, kv_indices(batch), batch=batch)
        g.engine.requests[0].tokens.append(8)
    assert g.canary.stats()["tables_compared"] == 1
    assert g.canary.stats()["tables_skipped"] == len(tried)
    assert g.violations == []


@pytest.mark.gpu
def test_on_a_gpu_the_compiler_works_beside_the_engine(tmp_path, monkeypatch):
    """Tables of a kind that nothing was compiled for, here and in earlier runs: left out, then compared."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    g = Guarded(ToyEngine(device="cuda"), table_interval=2)
    g.submit("a", 3)
    deadline = time.monotonic() + 120
    while not g.canary.stats().get("tables_compared"):
        assert time.monotonic() < deadline
        batch = g.engine.batch(chunk=1)
        run(g, kv_indices(batch), batch=batch)
        if len(g.engine.requests[0].tokens) < 30:
            g.engine.requests[0].tokens.append(8)
        time.sleep(0.01)
    g.canary.drain()
    assert g.canary.stats()["tables_skipped"] > 0
    assert g.violations == []
