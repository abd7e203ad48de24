"""Batches of a draft model, from made-up ones of the target's."""

from types import SimpleNamespace

import pytest
import torch
from canary_sglang.batches.draft import DraftBatches
from canary_sglang.batches.writers import RequestWriters

from canary_core import Writers

pytestmark = pytest.mark.without_engine


@pytest.fixture
def drafts():
    """Two requests with rows 1 and 2 of a table whose entry at position ``p`` of row ``r`` is ``100 * r + p``."""
    entries = torch.arange(3)[:, None] * 100 + torch.arange(40)
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=entries), is_draft_worker=False)
    batch = SimpleNamespace(
        seq_lens=torch.tensor([5, 8]),
        req_pool_indices=torch.tensor([1, 2]),
        out_cache_loc=None,
        reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")],
    )
    return DraftBatches(runner, ["draft/full"], RequestWriters(Writers(), entries.device)), batch


@pytest.mark.parametrize(("page", "ends"), [(1, (11, 14)), (4, (12, 16))])
def test_all_that_a_trees_branches_may_write_is_forgotten(drafts, page, ends):
    """Behind the prefix: every slot of a branch, or all its pages (one of four slots each, which begins with a copy of
    the prefix's last ones); nothing of the requests beside it."""
    batches, batch = drafts
    worker = SimpleNamespace(draft_runner=SimpleNamespace(page_size=page), speculative_num_steps=3, topk=2)
    slots = batches.branch_slots(batch, worker)
    known = {100 * row + p for row, begin, end in ((1, 5, ends[0]), (2, 8, ends[1])) for p in range(begin, end)}
    assert set(slots[slots > 0].tolist()) == known


def test_an_accepted_path_is_recorded_at_the_front(drafts):
    """Root and accepted tokens are recorded from the prefix on; the slots of the rest are forgotten."""
    batches, batch = drafts
    result = SimpleNamespace(
        next_token_ids=torch.tensor([21, 22, 0, 0, 31, 0, 0, 0], dtype=torch.int32), accept_lens=torch.tensor([2, 1])
    )
    view = batches.accepted(batch, torch.tensor([20, 30]), result, carried=True)
    assert view.tables["draft/full"].carried
    assert view.token_ids.tolist() == [20, 21, 22, 0, 30, 31, 0, 0]
    assert view.prefix_lens.tolist() == [5, 8]
    assert view.new_lens.tolist() == [4, 4]
    slots = batches.rejected_slots(batch, result)
    assert slots[slots > 0].tolist() == [107, 108, 209, 210, 211]


def test_an_accepted_path_moves_to_the_front(drafts):
    """From where its tokens lie in the tree to the slots that follow the prefix, whatever gaps the path has."""
    batches, batch = drafts
    batch.out_cache_loc = torch.tensor([105, 106, 107, 108, 208, 209, 210, 211], dtype=torch.int64)
    source, destination = batches.moved(batch, torch.tensor([[0, 2, 3], [4, -1, -1]], dtype=torch.int32))
    assert source.tolist() == [105, 107, 108, 208, -1, -1]
    assert destination.tolist() == [105, 106, 107, 208, -1, -1]


def test_guesses_are_known_after_the_steps(drafts):
    """Three steps write two guesses a request: the first is what the last extend proposed, the last proposal is never
    read by the draft model itself."""
    batches, batch = drafts
    view = batches.steps(batch, 2)
    batches.guessed(view, SimpleNamespace(draft_token=torch.tensor([20, 1, 2, 3, 30, 4, 5, 6])))
    assert view.token_ids.tolist() == [1, 2, 4, 5]
    assert view.new_lens.tolist() == [2, 2]


def test_what_is_compiled_at_start_is_what_the_draft_model_runs(drafts):
    """Padding views leave out what real ones leave out, in the same types."""
    batches, batch = drafts
    batch.out_cache_loc = torch.zeros(8, dtype=torch.int64)
    steps, extend = batches.steps(batch, 2), batches.extend(batch, torch.zeros(8, dtype=torch.int32))
    for real, padding in zip((steps, extend), batches.padding(2), strict=True):
        assert padding.token_ids.dtype == real.token_ids.dtype
        assert padding.new_lens.dtype == real.new_lens.dtype
        assert padding.positions is real.positions is None
        tables = [view.tables["draft/full"] for view in (real, padding)]
        assert len({table.write_slots is None for table in tables}) == 1
