"""`AnswerLists`: which tokens of a scheduler's lists go to its workers, and when."""

from types import SimpleNamespace

import canary_adapters.answer_lists
from canary_adapters import AnswerLists


def request(name: str, prompt: int, *output: int) -> SimpleNamespace:
    """A request with so many tokens of a prompt."""
    return SimpleNamespace(request_id=name, num_prompt_tokens=prompt, _all_token_ids=[0] * prompt + [*output])


def lists_of(*running: SimpleNamespace, drafted: int = 0) -> tuple[AnswerLists, list[SimpleNamespace]]:
    """Lists of a scheduler with ``running``, which may change."""
    present = list(running)
    return AnswerLists(lambda: present, lambda: {r.request_id for r in present}, drafted), present


def sent(lists: AnswerLists, tokens: int = 1) -> dict[str, tuple[int, list[int]]] | None:
    """By request, the first position and the tokens that go with the next batch."""
    parts = lists.next(tokens)
    if parts is None:
        return None
    ends = [sum(parts.counts[: i + 1]) for i in range(len(parts.counts))]
    each = [parts.tokens[end - count : end] for end, count in zip(ends, parts.counts, strict=True)]
    return dict(zip(parts.requests, zip(parts.firsts, each, strict=True), strict=True))


def test_what_was_sent_is_not_sent_again():
    """Every eighth batch, or one that is the last for a while, has what came since, prompts left out; a request that
    ended goes along once."""
    one = request("one", 3, 7, 8)
    lists, present = lists_of(one)
    assert [sent(lists) for _ in range(7)] == [None] * 7
    assert sent(lists) == {"one": (3, [7, 8])}
    one._all_token_ids += [9]
    assert sent(lists, tokens=0) == {"one": (5, [9])}
    assert sent(lists, tokens=0) == {}
    one._all_token_ids += [1]
    lists.ended(one)
    present.clear()
    assert sent(lists, tokens=0) == {"one": (6, [1])}
    assert sent(lists, tokens=0) == {}


def test_no_more_goes_than_workers_know():
    """The last 8 tokens of a request: as many as come until the next lists, which with three drafts are in every other
    batch."""
    lists, _ = lists_of(request("plain", 2, *range(40)))
    assert sent(lists, tokens=0) == {"plain": (34, list(range(32, 40)))}
    lists, _ = lists_of(request("long", 2, *range(40)), drafted=3)
    assert sent(lists) is None
    assert sent(lists) == {"long": (34, list(range(32, 40)))}


def test_a_list_that_became_shorter_goes_on_from_there():
    """As that of a session, whose next turn makes its answer part of the prompt."""
    one = request("one", 2, 5, 6, 7)
    lists, _ = lists_of(one)
    assert sent(lists, tokens=0) == {"one": (2, [5, 6, 7])}
    one._all_token_ids[4:] = [30]
    one.num_prompt_tokens = 5
    assert sent(lists, tokens=0) == {}
    one._all_token_ids += [8]
    assert sent(lists, tokens=0) == {"one": (5, [8])}


def test_very_many_requests_take_turns(monkeypatch):
    """So many at most with one batch, and each comes at last; requests whose end was not seen are not remembered."""
    monkeypatch.setattr(canary_adapters.answer_lists, "MOST_REQUESTS", 4)
    lists, present = lists_of(*(request(f"r{i}", 1, 5) for i in range(10)))
    turns = [sorted(sent(lists, tokens=0) or {}) for _ in range(3)]
    assert turns == [["r0", "r1", "r2", "r3"], ["r4", "r5", "r6", "r7"], ["r8", "r9"]]
    for number in range(20):
        present[:] = [request(f"g{number}", 1, 5)]
        sent(lists, tokens=0)
    assert len(lists._given) < 8
    for number in range(20):
        lists.ended(request(f"e{number}", 1, 5))
    assert len(sent(lists, tokens=0) or {}) == 4


def test_with_very_many_requests_messages_are_rarer(monkeypatch):
    """Every 16th batch in the place of every 8th."""
    monkeypatch.setattr(canary_adapters.answer_lists, "MOST_REQUESTS", 2)
    lists, present = lists_of(*(request(f"r{i}", 1, 5) for i in range(3)))
    assert [number for number in range(1, 33) if sent(lists) is not None] == [16, 32]
    present.pop()
    assert [number for number in range(1, 33) if sent(lists) is not None] == [8, 16, 24, 32]
