"""Changes of slots' contents without a forward: records and histories follow. In torch on every device, but for the
note in the histories; never waits for the device."""

import torch
from torch import Tensor

from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState
from canary_core.ops.torch.histories import note_all
from canary_core.records import CONTENT, POSITION, STATES, Happened, State


def copy(backend: Backend, state: RegionState, source: Tensor, destination: Tensor) -> None:
    """Copies the records of slots ``source`` to ``destination``; both integer ``[n]``."""
    from canary_core.ops import payload

    payload.import_records(state, destination, payload.export_records(state, source))
    backend.note(state, destination, Happened.COPY, source)


def import_records(backend: Backend, state: RegionState, slots: Tensor, rows: Tensor, writer: int) -> None:
    """As `payload.import_records`."""
    from canary_core.ops import payload

    payload.import_records(state, slots, rows, writer)
    backend.note(state, slots, Happened.ARRIVE, writer)


def mark(backend: Backend, state: RegionState, slots: Tensor, new: State) -> None:
    """Marks ``slots`` (integer ``[n]``) as empty or unknown: ``new`` is UNWRITTEN or UNKNOWN."""
    if not len(slots):
        return
    _, slot, anything = state.entries(slots.long())
    word = state.records[slot, POSITION]
    marked = word // STATES * STATES + int(new)
    # The state first: a scrub in flight looks at it once more before it reports.
    state.records[slot, POSITION] = torch.where(anything, marked, word)
    if new is State.UNKNOWN:
        # What the bytes were is no longer known, so the next write can't be judged to have left them as they were.
        state.fingerprints[slot] = torch.where(anything, 0, state.fingerprints[slot])
    backend.note(state, slots, _marks(new), -1)


def mark_all(state: RegionState, new: State) -> None:
    """`mark` for all slots, in place: a list of all slots of a large pool would take gigabytes."""
    state.records[:, POSITION].bitwise_and_(-STATES).bitwise_or_(int(new))
    if new is State.UNKNOWN:
        state.fingerprints.zero_()
    note_all(state, _marks(new))


def expect(state: RegionState, slots: Tensor) -> None:
    """Turns written ``slots`` into unknown ones, while another stream may work on the same records: the bits for freed
    and parked stay as the other stream sets them, and a reader sees either the old or the new state. No note in the
    histories, in use by the other stream, too."""
    if len(slots):
        _, slot, anything = state.entries(slots.long())
        words = state.records[:, POSITION]
        word = words[slot]
        written = (word & CONTENT == State.WRITTEN) & anything
        # An atomic maximum per slot. The state first: a scrub in flight looks at it once more before it reports.
        unknown = torch.where(written, word + int(State.UNKNOWN - State.WRITTEN), 0)
        words.scatter_reduce_(0, slot, unknown, reduce="amax")
        state.fingerprints[slot] = torch.where(anything, 0, state.fingerprints[slot])


def forget_releases(state: RegionState) -> None:
    """No slot counts as freed or parked any more."""
    state.records[:, POSITION] &= ~int(State.FREED | State.PARKED)


def carry_over(state: RegionState, old: RegionState, source: Tensor, destination: Tensor) -> None:
    """Copies the records of slots ``source`` of ``old`` to ``destination``; step and sequences go on."""
    state.records[destination] = old.records[source]
    state.fingerprints[destination] = old.fingerprints[source]
    if state.histories is not None and old.histories is not None:
        state.histories[destination] = old.histories[source]
        state.histories[-1] = old.histories[-1]
    state.chains.copy_(old.chains)
    state.shared.clock.copy_(old.shared.clock)


def _marks(new: State) -> Happened:
    return Happened.FORGET if new is State.UNKNOWN else Happened.CLEAR
