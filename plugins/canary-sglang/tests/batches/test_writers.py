"""Writer ids of a batch's requests, from made-up ones."""

import pytest
import torch
from canary_sglang.batches.writers import RequestWriters

from canary_core import Writers

pytestmark = pytest.mark.without_engine


class Request:
    """All that is looked at of SGLang's `Req`."""

    def __init__(self, rid: str) -> None:
        self.rid = rid


def test_a_known_name_under_a_new_object_is_another_request():
    """Its writer id is a new one, even in the same place of the same batch; requests that stay keep theirs."""
    writers = RequestWriters(Writers(), torch.device("cpu"))
    stays, first = Request("a"), Request("b")
    writers.notice([stays, first])
    ids = writers.ids(["a", "b"]).tolist()
    writers.notice([stays, first])
    assert writers.ids(["a", "b"]).tolist() == ids
    second = Request("b")
    writers.notice([stays, second])
    assert writers.request("b") is second
    kept, new = writers.ids(["a", "b"]).tolist()
    assert kept == ids[0]
    assert new not in ids


def test_a_request_that_is_gone_is_not_kept():
    """Noticing keeps no request alive; the name of one that is gone is free for another."""
    writers = RequestWriters(Writers(), torch.device("cpu"))
    gone = Request("a")
    writers.notice([gone])
    old = writers.id("a")
    del gone
    assert writers.request("a") is None
    again = Request("a")
    writers.notice([again])
    assert writers.request("a") is again
    assert writers.id("a") != old
