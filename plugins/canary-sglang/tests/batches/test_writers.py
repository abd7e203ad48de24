"""Writer ids of a batch's requests, from made-up ones."""

import pytest
import torch
from canary_sglang.batches.writers import RequestWriters

from canary_core import Writers

pytestmark = pytest.mark.without_engine


class Request:
    """All that is looked at of SGLang's `Req`."""

    def __init__(self, rid: str, **more: object) -> None:
        self.rid = rid
        self.__dict__.update(more)


class Session:
    """The same of a session."""

    streaming = True


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


def test_anchors_are_of_adapter_key_and_salt():
    """SGLang joins the adapter's id to the key: whoever has the same of each has the same anchor. Without adapters,
    where another engine has other ids, key and salt are left. Requests without any of them have the common one."""
    plain, a = Request("plain"), Request("a", lora_id="id1", extra_key="tid1", cache_salt=None)
    same, other = Request("same", lora_id="id1", extra_key="tid1"), Request("other", lora_id="id2", extra_key="tid2")
    salted = Request("salted", lora_id=None, extra_key="t", cache_salt="s")
    for adapters in (True, False):
        writers = RequestWriters(Writers(), torch.device("cpu"), adapters)
        writers.notice([plain])
        assert writers.anchors(["plain"]).tolist() == [writers.writers.identities.anchor()]
        writers.notice([plain, a, same, other, salted])
        assert writers.anchors(["plain"]).tolist() == [writers.writers.identities.anchor()]
        common, first, second, third, fourth = writers.anchors(["plain", "a", "same", "other", "salted"]).tolist()
        assert (common, first) == (writers.writers.identities.anchor(), second)
        assert (third == first) == (not adapters)
        assert len({common, first, fourth}) == 3
    assert writers.writers.anchor("a") == writers.writers.identities.anchor(extra_key="t")


def test_a_streaming_session_has_the_key_and_salt_with_which_it_began():
    """Its requests go on from each other's slots without a look at the prefix cache; of another adapter is another."""
    writers, session = RequestWriters(Writers(), torch.device("cpu")), Session()
    first = Request("first", session=session, cache_salt="s")
    second = Request("second", session=session, cache_salt=None)
    third = Request("third", session=session, lora_id="id1", extra_key="id1")
    writers.notice([first, second, third])
    one, two, three = writers.anchors(["first", "second", "third"]).tolist()
    assert one == two != writers.writers.identities.anchor()
    assert three == writers.writers.identities.anchor(lora="id1", cache_salt="s")
