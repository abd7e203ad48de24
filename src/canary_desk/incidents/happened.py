"""Events of slots before an incident: by the device's notes of each slot, else by the host's journal of calls, where
slots are not always sure."""

from collections.abc import Iterator, Sequence

from canary_core.kinds.case import Held
from canary_core.kinds.facts import Facts
from canary_desk.incidents.evidence import Evidence


def last_of_all(evidence: Evidence, slots: Sequence[int], event: str, noted: str) -> int | None:
    """The last step at which ``event`` happened to one of ``slots``; None unless the event happened to all. By the
    device's notes, as ``noted``, where every slot has notes; else by the host's journal."""
    lives = [evidence.life(slot) for slot in slots]
    if not all(lives):
        return _last_call(evidence, slots, event)
    steps = [[h.step for h in life if h.event == noted] for life in lives]
    return max(max(s) for s in steps) if slots and all(steps) else None


def _last_call(evidence: Evidence, slots: Sequence[int], event: str) -> int | None:
    calls = [e for e in evidence.history if e.event == event and e.slots is not None]
    untold = set(slots)
    for call in calls:
        pages = set(call.slots.tolist()) if call.slots is not None else set()
        untold -= {slot for slot in untold if slot // call.page_slots in pages}
    return calls[-1].step if calls and slots and not untold else None


def held_before(evidence: Evidence, root: Facts) -> Held | None:
    """The time before the last hand-out, if the slot was the root's request's then; by the device's notes where the
    slot has any, else by the host's calls. None where somebody else had it, or where that is not known."""
    reader = evidence.writer(root.request)
    if reader is None or root.slot is None:
        return None
    events = _events(evidence, root.slot)
    begun = [i for i, (_, event, _) in enumerate(events) if event == "alloc"]
    if not begun or events[begun[-1]][2] == reader:
        return None
    before, (again, _, _) = events[: begun[-1]], events[begun[-1]]
    had = [i for i, (_, event, who) in enumerate(before) if event in ("alloc", "share", "write") and who == reader]
    if not had:
        return None
    gone = [step for step, event, _ in before[had[-1] :] if event in ("free", "evict", "park")]
    return Held(before[had[-1]][0], gone[0] if gone else None, again)


def had_it(evidence: Evidence, root: Facts) -> bool | None:
    """Whether the root's request ever had the slot. None where neither notes nor calls say who had it last."""
    reader = evidence.writer(root.request)
    if root.request is None or root.slot is None:
        return None
    # The write of the finding may be among the notes.
    events = [e for e in _events(evidence, root.slot) if e[1] != "write" or e[0] < root.step]
    who = [who for _, event, who in events if event in ("alloc", "share", "write", "free")]
    if reader is not None and reader in who:
        return True
    return False if who and min(who) >= 0 else None


def handed_to(evidence: Evidence, slot: int | None) -> str | None:
    """The request that the slot was handed out to for the last time, None if unknown."""
    given = [] if slot is None else [who for _, event, who in _events(evidence, slot) if event == "alloc"]
    return evidence.names.get(given[-1]) if given else None


def was_cached(evidence: Evidence, slot: int | None) -> bool:
    """Whether the prefix cache has, or had, the slot's content, that is, since the slot was handed out or cleared."""
    if slot is None:
        return False
    life = evidence.life(slot)
    events = [h.event for h in life] if life else [event for _, event, _ in _calls(evidence, slot)]
    ends = [i for i, event in enumerate(events) if event in ("alloc", "clear", "free", "evict")]
    return any(event in ("share", "park") for event in events[ends[-1] if ends else 0 :])


def cleared(evidence: Evidence, slot: int | None) -> int | None:
    """The step at which the slot was cleared, if nobody has written or been handed it since; None if not, or if that is
    not known."""
    life = [] if slot is None else evidence.life(slot)
    return life[0].step if life and life[0].event == "clear" and all(h.event != "write" for h in life) else None


def _events(evidence: Evidence, slot: int) -> list[tuple[int, str, int]]:
    """All known events of the slot, oldest first: step, event, writer."""
    noted = evidence.lives.get(slot)
    return [(h.step, h.event, h.who) for h in noted] if noted else list(_calls(evidence, slot))


def _calls(evidence: Evidence, slot: int) -> Iterator[tuple[int, str, int]]:
    """Calls about the slot seen by the host, oldest first: step, event, writer."""
    for entry in evidence.history:
        if entry.slots is not None and slot // entry.page_slots in entry.slots.tolist():
            yield entry.step, entry.event, entry.writer
