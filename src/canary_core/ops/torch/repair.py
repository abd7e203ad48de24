"""repair: puts the old word back where one word of a parked slot was flipped, and proves it by the fingerprint."""

import torch
from torch import Tensor

from canary_core.ops import hashing
from canary_core.ops.repair_rows import RepairOutcome, RepairWord, is_flip
from canary_core.ops.state import RegionState
from canary_core.ops.torch.stack import Stack, stacks
from canary_core.records import CONTENT, POSITION, STATES, STEP_WRITTEN, Clock, State

BITS_32 = (1 << 32) - 1


def repair(state: RegionState, asked: Tensor) -> None:
    """Between forwards, on their stream: for each row of ``asked`` (int64 ``[n, REPAIR_WORDS]``, see `RepairWord`)
    writes the old word, if all of this holds now: the slot is parked, its record and its fingerprint are those of the
    finding, its bytes have the fingerprint that the finding saw, and one word alone explains the difference by few
    flipped bits. Writes where the damaged word still is, and nowhere else. Then the slot is fingerprinted again; if it
    has not the recorded fingerprint, the damaged word is put back. Sets the outcome. Sources must be aligned to words.
    """
    for row in asked:
        outcome, word, old, damaged = _repaired(state, row.tolist())
        about = [outcome, word, old, damaged, int(state.shared.clock[Clock.NEXT])]
        row[RepairWord.OUTCOME : RepairWord.STEP + 1] = torch.tensor(about, device=asked.device)


def _repaired(state: RegionState, row: list[int]) -> tuple[int, int, int, int]:
    """Outcome, index of the word, the word as written and as found."""
    slot, column, stored = row[RepairWord.SLOT], row[RepairWord.SOURCE], row[RepairWord.STORED]
    record = state.records[slot].tolist()
    place = record[POSITION]
    same = place & (CONTENT | State.FREED) == State.WRITTEN and place // STATES == row[RepairWord.POSITION]
    same = same and record[STEP_WRITTEN] == row[RepairWord.WRITTEN]
    if not same or int(state.fingerprints[slot, column]) != stored:
        return RepairOutcome.MOVED_ON, -1, 0, 0
    if not place & State.PARKED:
        return RepairOutcome.LIVE, -1, 0, 0
    stack, words = _read(state, slot, column)
    keys, salt = state.sources.keys[: len(words)], int(state.sources.salts[column])
    if _fingerprint(words, keys, salt) != row[RepairWord.FOUND]:
        return RepairOutcome.CHANGED, -1, 0, 0
    found = hashing.only_word(words, keys, stored - row[RepairWord.FOUND])
    if found is None or not is_flip(found[1] ^ int(words[found[0]])):
        return RepairOutcome.UNCLEAR, -1, 0, 0
    word, before = found
    damaged = int(words[word])
    place_of_word = _at(state, stack, slot, column, word)
    if not _exchange(place_of_word, damaged, before):
        return RepairOutcome.CHANGED, -1, 0, 0
    if _fingerprint(_read(state, slot, column)[1], keys, salt) == stored:
        return RepairOutcome.REPAIRED, word, before, damaged
    _exchange(place_of_word, before, damaged)
    return RepairOutcome.FAILED, word, before, damaged


def _read(state: RegionState, slot: int, column: int) -> tuple[Stack, Tensor]:
    """The stack of the source, and the slot's words there: int64 ``[words]``."""
    stack = next(stack for stack in stacks(state) if column in stack.indices)
    words = stack.words(torch.tensor([slot], device=state.records.device))
    return stack, words[stack.indices.index(column), 0]


def _fingerprint(words: Tensor, keys: Tensor, salt: int) -> int:
    return hashing.signed(salt + int((words * keys).sum()))


def _at(state: RegionState, stack: Stack, slot: int, column: int, word: int) -> Tensor:
    """One word of the slot, where it lies: int32 ``[1]``."""
    source, storage = stack.like, state.sources[column].tensor.untyped_storage()
    page, inside = divmod(slot, source.page_size)
    chunk, rest = divmod(word, source.words_per_chunk)
    first = int(stack.starts[stack.indices.index(column)]) + page * source.page_stride_bytes
    first += inside * source.slot_stride_bytes + chunk * source.chunk_stride_bytes
    flat = torch.empty(0, dtype=torch.int32, device=state.records.device)
    return flat.set_(storage, first // 4 + rest, (1,), (1,))


def _exchange(place: Tensor, expected: int, new: int) -> bool:
    """Writes ``new`` where ``expected`` is; returns whether it was."""
    if int(place) & BITS_32 != expected:
        return False
    place.fill_(new - (1 << 32) if new >> 31 else new)
    return True
