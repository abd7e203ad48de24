"""The rule of `position`, `token` and `prefix`: a forward reads another position, token or sequence than its own."""

from collections import Counter
from collections.abc import Iterator, Sequence

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.double_alloc import DOUBLE_ALLOCATION
from canary_core.kinds.facts import NAMELESS, counted, named
from canary_core.kinds.freed import USE_AFTER_FREE
from canary_core.records import Kind

STALE_TABLE = Class(
    "stale_table",
    "a table entry that names another request's slot",
    ("trtllm#15546", "vllm#42273", "sglang#27586"),
    ("Look who wrote this row of the table last, and whether the copy to the device was done.",),
)

WRONG_POSITION = Class(
    "wrong_position",
    "a table that names the request's own slots in a wrong order",
    ("vllm#9730", "sglang#26329", "vllm#54498"),
    ("Look how positions become slots: an offset of the page, of a draft token, of a chunk.",),
)

FOREIGN_PREFIX = Class(
    "foreign_prefix",
    "a prefix of another request",
    ("LMCache#4385", "LMCache#4086", "vllm#54342", "local-inference-lab/vllm#480"),
    ("Look at the match in the prefix cache: a collision of hashes, a key without image, LoRA or salt.",),
)

ROLLED_BACK = Class(
    "rolled_back",
    "a rejected draft that was left behind",
    ("mlx-vlm#1155", "transformers#48280"),
    ("Look at the roll-back after the last verification: rows of different lengths, one layer left out.",),
)

READ_WRONGLY = (FOREIGN_PREFIX, WRONG_POSITION, STALE_TABLE, ROLLED_BACK, DOUBLE_ALLOCATION, USE_AFTER_FREE)


def read_wrongly(case: Case) -> Iterator[Diagnosis]:
    """Diagnoses where the root's slot holds another position, token or sequence than the request's."""
    root, right = case.root, case.right_slot
    here = f"{case.slot} at {counted('position', root.position)} of {case.reader}"
    own = root.request is not None and root.stored_request == root.request
    writer = named(root.stored_request) or NAMELESS
    told = [f"{here} holds {counted('position', root.stored_position, 'another')} of {writer}"]
    if root.identity:
        other = root.stored_identity or "another identity"
        told = [f"{told[0]}, which was computed for {other}; {case.reader} has {root.identity}"]
        yield Diagnosis(FOREIGN_PREFIX, "certain", tuple(told))
        return
    found = case.of(Kind.POSITION, Kind.TOKEN, Kind.PREFIX)
    moved = Counter(
        v.stored_position - v.position for v in found if v.position is not None and v.stored_position is not None
    )
    if right is not None and right != root.slot:
        told.append(f"what it should read is intact in slot {right}")
        if own and root.stored_position != root.position and moved:
            ((off, count),) = moved.most_common(1)
            told.append(f"{count} of {len(found)} findings are {off:+d} positions off")
            yield Diagnosis(WRONG_POSITION, "likely", tuple(told))
        else:
            yield Diagnosis(STALE_TABLE, "likely", tuple(told))
        return
    if own and root.stored_position == root.position:
        when = "" if root.step_written is None else f" at step {root.step_written}"
        told.append(f"the request itself wrote another token there{when}")
        yield Diagnosis(ROLLED_BACK, "likely", tuple(told))
        return
    if own:
        yield Diagnosis(WRONG_POSITION, "likely", tuple(told))
        return
    yield from changed_hands(case, told)
    if case.held_before is not None:
        return
    # Where nobody looked at records, the right slot may be anywhere.
    sure = "possible" if case.reader_last is None else "likely"
    if (root.position is not None and root.stored_position == root.position) or root.kind is Kind.PREFIX:
        told.append("the position is right, the sequence is another one; the request has never written it itself")
        if case.only_a_hit:
            told.append("the request has written nothing yet, so a prefix hit brought it")
        yield Diagnosis(FOREIGN_PREFIX, sure, tuple(told))
        yield Diagnosis(STALE_TABLE, "possible", tuple(told))
        return
    # One entry is a table's; several, where a request has just begun, are a match's that was out of date.
    hit = case.only_a_hit and len({v.position for v in found}) > 1
    if case.only_a_hit:
        told.append("the request has written nothing yet, so a prefix hit may have brought it")
    if hit:
        yield Diagnosis(FOREIGN_PREFIX, sure, tuple(told))
    yield Diagnosis(STALE_TABLE, "possible" if hit else sure, tuple(told))
    if case.only_a_hit and not hit:
        yield Diagnosis(FOREIGN_PREFIX, "possible", tuple(told))


def changed_hands(case: Case, told: Sequence[str]) -> Iterator[Diagnosis]:
    """Diagnoses where the root's slot was its reader's, and somebody else got it: none else. ``told``: evidence."""
    held = case.held_before
    if held is None:
        return
    had = f"{case.reader} had it at step {held.step}"
    if held.given_back is None:
        text = f"{had}; it was handed out again at step {held.again}, and nobody gave it back in between"
        yield Diagnosis(DOUBLE_ALLOCATION, "likely", (*told, text))
    else:
        text = f"{had}; it was given back at step {held.given_back} and handed out again at step {held.again}"
        yield Diagnosis(USE_AFTER_FREE, "likely", (*told, text))
    yield Diagnosis(STALE_TABLE, "possible", (*told, text))
