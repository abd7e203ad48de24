"""Events of slots before an incident: by the device's notes of each slot, else by the host's journal of calls, where
slots are not always sure."""

from collections.abc import Sequence

from canary_core.desk.incidents.evidence import Evidence
from canary_core.kinds.facts import Facts


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
    told: set[int] = set()
    for call in calls:
        for number in call.slots.tolist() if call.slots is not None else ():
            told.update(range(number * call.page_slots, (number + 1) * call.page_slots))
    return calls[-1].step if calls and slots and told.issuperset(slots) else None


def handed_out_late(evidence: Evidence, root: Facts) -> str:
    """Whether the slot was handed out again shortly before."""
    life = evidence.life(root.slot)
    if life:
        begun = life[0]
        late = begun.event == "alloc" and begun.step >= (root.step_written or 0) - 1
        return f"it was handed out at step {begun.step}, before that position was written" if late else ""
    for entry in reversed(evidence.history):
        late = entry.event == "alloc" and entry.step >= (root.step_written or 0) - 1
        if not late or entry.slots is None or root.slot is None:
            continue
        if root.slot // entry.page_slots in entry.slots.tolist():
            return f"it was handed out at step {entry.step}, before that position was written"
    return ""


def was_cached(evidence: Evidence, slot: int | None) -> bool:
    """Whether the prefix cache has, or had, the slot's content."""
    life = evidence.life(slot)
    if life or slot is None:
        return any(h.event in ("share", "park") for h in life)
    return any(
        e.event in ("share", "park") and e.slots is not None and slot // e.page_slots in e.slots.tolist()
        for e in evidence.history
    )
