"""Who takes slots and gives them back, from made-up batches."""

from types import SimpleNamespace

import pytest
import torch
from canary_sglang.allocator.owners import Owners
from canary_sglang.batches.writers import RequestWriters

from canary_core import Writers

pytestmark = pytest.mark.without_engine


def test_slots_that_are_taken_ahead_are_those_of_who_has_more_afterwards():
    """A batch that drafts ahead takes slots for all its requests at once; where the lengths do not tell whose they are,
    nobody is named."""
    requests = [SimpleNamespace(rid=name, kv=SimpleNamespace(kv_allocated_len=n)) for name, n in (("a", 4), ("b", 7))]
    batch = SimpleNamespace(reqs=requests, spec_algorithm=SimpleNamespace(is_none=lambda: False), extend_lens=[1, 1])
    writers = RequestWriters(Writers(), torch.device("cpu"))
    owners = Owners(writers)

    def prepare():
        taken = owners.taker(3, None), owners.taker(2, None)
        requests[0].kv.kv_allocated_len += 1
        requests[1].kv.kv_allocated_len += 2
        return taken

    taker, other = owners.preparing(batch, prepare, decode=True)
    requests[0].kv.kv_allocated_len = 0
    assert taker().tolist() == [writers.id("a"), writers.id("b"), writers.id("b")]
    assert other() == -1
