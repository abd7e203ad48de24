"""compare_weights: the bytes of some chunks of parameters, against their fingerprints."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from canary_core.ops.state import RegionState
from canary_core.ops.weights import ROOM, RangeWord, WeightTable


def compare_weights(state: RegionState, table: WeightTable, first: int, count: int) -> None:
    """Compares the chunks ``first`` to ``first + count`` of ``table``, takes the fingerprints that are 0, and notes
    each difference in `WeightTable.found`, in any order, as far as there is room. ``state``: any region of the device.
    Reads nothing but these chunks."""
    places, owners = table.places.tolist(), table.owners[first : first + count].tolist()
    for chunk, owner in enumerate(owners, first):
        place = places[owner]
        begin = (chunk - place[RangeWord.FIRST]) * place[RangeWord.CHUNK_BYTES]
        size = max(min(place[RangeWord.BYTES] - begin, place[RangeWord.CHUNK_BYTES]), 0)
        now = fingerprint(table, table.ranges[owner].read()[begin : begin + size] if size else table.keys.new_empty(0))
        stored = int(table.fingerprints[chunk])
        if stored == 0:
            table.fingerprints[chunk] = now
        elif stored != now:
            row = int(table.found[0, 0])
            table.found[0, 0] = row + 1
            if row < ROOM:
                table.found[1 + row] = torch.tensor([chunk, now], device=table.found.device)


def fingerprint(table: WeightTable, data: Tensor) -> int:
    """The fingerprint of a chunk's bytes, uint8 ``[n]``, on any device."""
    keys = table.keys.to(data.device)
    words = words_of(data)
    return int((words * keys[: len(words)]).sum() + keys[-1])


def words_of(data: Tensor) -> Tensor:
    """The 32-bit words of ``data``, uint8 ``[n]``, zeros behind the end, as int64."""
    data = pad(data.view(torch.uint8), (0, -len(data) % 4))
    if data.data_ptr() % 4 or data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32).long() & 0xFFFFFFFF
