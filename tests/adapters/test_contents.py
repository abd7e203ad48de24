"""Content in the place of tokens: numbers of embeddings and media, and how long these hold."""

import pytest
import torch

from canary_adapters import FIRST_CONTENT, contents, embedding_numbers, media_number, put_embeddings, put_media
from canary_core import Kind, Phase, Violation, Writers
from canary_core.runtime import contents as core
from canary_core.runtime.contents import UNTOLD

ROWS = torch.randn(6, 63, generator=torch.Generator().manual_seed(3))


def token(request="bob", stored_request="alice", position=3, **more):
    """A finding of the check before a forward."""
    about = dict(kind=Kind.TOKEN, region="full", phase=Phase.PRE_FORWARD, step=2, slot=3)
    return Violation(**about, request=request, stored_request=stored_request, position=position, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_embeddings_have_the_same_numbers_and_others_have_others(dtype):
    """Whatever the dtype and the stride; each is a number of content."""
    rows = ROWS.to(dtype)
    numbers = embedding_numbers(rows)
    assert len(set(numbers.tolist())) == 6
    assert numbers.min() > UNTOLD >= FIRST_CONTENT
    assert torch.equal(embedding_numbers(rows.repeat_interleave(2, 0)[::2]), numbers)
    rows[2, 0] += 1
    assert (embedding_numbers(rows) != numbers).tolist() == [False, False, True, False, False, False]


def test_rows_beyond_the_bound_on_a_device_or_odd_have_no_number(monkeypatch):
    """Then there is no digest, and nobody waits for a device."""
    monkeypatch.setattr(contents, "MOST_EMBEDDINGS", 4)
    assert (embedding_numbers(ROWS) == UNTOLD).tolist() == [False] * 4 + [True] * 2
    assert set(embedding_numbers(ROWS.to("meta")).tolist()) == {UNTOLD}
    assert set(embedding_numbers(ROWS.view(3, 2, 63)).tolist()) == {UNTOLD}
    assert embedding_numbers(ROWS[:0]).tolist() == []


def test_a_wide_embedding_is_read_in_part():
    """All over it: what a trainer or another text changes, changes that."""
    wide = torch.randn(2, 8192, generator=torch.Generator().manual_seed(5))
    numbers = embedding_numbers(wide)
    assert (embedding_numbers(wide + 1e-3) != numbers).all()


def test_media_have_numbers_of_their_keys():
    """None of them is that of content without a digest."""
    assert media_number("cat") == media_number("cat") != media_number("dog")
    assert media_number("\ud800") > UNTOLD


def test_tokens_of_forwards_and_of_requests_have_numbers_in_their_place():
    """Of the positions that are computed; others are as they were, and so is what was given."""
    writers, tokens = Writers(), torch.arange(20, 32, dtype=torch.int32)
    put_embeddings(writers, "alice", [2, 3, 4, 9], ROWS[:4])
    put_media(writers, "bob", 0, 3, ("image", "cat"))
    numbers, cat = embedding_numbers(ROWS[:4]).tolist(), media_number("cat")
    given = writers.contents.given(["carol", "alice", "bob"], [0, 3, 2], [4, 5, 3], tokens)
    assert given.tolist() == [20, 21, 22, 23, *numbers[1:3], 26, 27, 28, cat, 30, 31]
    assert tokens.tolist() == list(range(20, 32))
    assert writers.contents.given(["carol"], [0], [12], tokens) is tokens
    assert writers.contents.given(["alice"], [10], [12], tokens) is tokens
    own = torch.arange(8)
    assert writers.contents.over("alice", own).tolist() == [0, 1, *numbers[:3], 5, 6, 7]
    assert writers.contents.over("carol", own) is own
    assert own.tolist() == list(range(8))


def test_content_without_a_digest_is_never_expected_and_never_compared():
    """It is counted; a reader with tokens there has other content for certain."""
    writers = Writers()
    put_media(writers, "bob", 2, 3, ("image", None))
    assert writers.contents.over("bob", torch.arange(6)).tolist() == [0, 1, -1, -1, -1, 5]
    assert writers.contents.untold == 3
    assert writers.contents.undecided(token(token=media_number("cat"), stored_token=UNTOLD))
    assert not writers.contents.undecided(token(token=7, stored_token=UNTOLD))
    assert not writers.contents.undecided(token(token=media_number("cat"), stored_token=media_number("dog")))


def test_findings_name_both_contents_and_where_these_are():
    """As far as they are known; where nothing but tokens is concerned a finding stays as it is."""
    writers = Writers()
    put_media(writers, "alice", 2, 3, ("image", "cat"))
    put_media(writers, "bob", 2, 3, ("image", "dog"))
    cat, dog = media_number("cat"), media_number("dog")
    tell = writers.contents.tell
    found = tell(token(token=dog, stored_token=cat))
    assert found.kind is Kind.PREFIX
    assert found.identity.startswith("at positions 2 to 4 image #")
    assert found.stored_identity.startswith("image #")
    assert found.stored_identity not in found.identity
    assert found.explanation.startswith("bob has at positions 2 to 4 image #")
    assert tell(token(token=7, stored_token=cat)).identity == "at positions 2 to 4 tokens"
    assert tell(token(token=dog, stored_token=7)).stored_identity == "tokens"
    forgotten = tell(token(stored_request=None, token=dog, stored_token=cat)).stored_identity
    assert forgotten == "content that is not known any more"
    plain = token(token=7, stored_token=8)
    assert tell(plain) is plain
    late = Violation(Kind.TOKEN, "full", Phase.EVENT, 2, request="bob", position=3, token=dog, stored_token=7)
    assert tell(late) is late


def test_a_name_that_comes_again_has_no_content():
    """What was told of the earlier request is forgotten with it."""
    writers = Writers()
    put_media(writers, "bob", 2, 3, ("image", "cat"))
    writers.forget("bob")
    assert writers.contents.over("bob", torch.arange(6)).tolist() == list(range(6))


def test_numbers_are_kept_for_so_many_positions(monkeypatch):
    """The oldest requests go first, and are counted; one number for many positions costs little."""
    monkeypatch.setattr(core, "MOST_NUMBERS", 3 * core.ONE_NUMBER)
    writers = Writers()
    for name in ("a", "b", "c"):
        put_media(writers, name, 0, 1000, ("image", name))
    kept = [name for name in "abc" if writers.contents.over(name, torch.zeros(1, dtype=torch.int64))[0]]
    assert kept == ["b", "c"]
    assert writers.contents.forgotten == 1
