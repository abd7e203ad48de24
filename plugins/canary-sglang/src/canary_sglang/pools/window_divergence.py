"""`WindowDivergence`: now and then compares the slots of a sliding window with those of the full pool, as an event."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_core import BatchView, Canary, Event, HostCopy, Level, Region, RegionKind, StepListener

MOST_ENTRIES = 1 << 20
"""Most entries of the request table counted at once; more are counted in several turns."""

FIELDS = ("full_entries", "window_entries", "live_entries", "diverged", "out_of_window", "evicted_inside")
"""Counted numbers; see `WindowDivergence`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Counts on their way to the host."""

    region: str
    step: int
    counts: HostCopy


class WindowDivergence(StepListener):
    """Counts, on the device, every ``CANARY_DIVERGENCE_INTERVAL`` forwards, over the requests of that forward:

    | field          | what                                                                                      |
    |----------------|-------------------------------------------------------------------------------------------|
    | full_entries   | entries that the check of a full pool reads before this forward                           |
    | window_entries | entries that the check of the window reads                                                |
    | live_entries   | valid entries of the requests' tables, including the new tokens                           |
    | diverged       | live entries whose window slot has another number than their slot of the full pool        |
    | out_of_window  | live entries without a window slot, since the window has passed them                      |
    | evicted_inside | of these, entries that the forward still reads: a bug, which the check reports as well    |

    The counts are read some forwards later, without waiting for the device.
    """

    def __init__(self, canary: Canary, entries: Tensor) -> None:
        self._canary = canary
        self._entries = entries
        self._interval = canary.config.divergence_interval
        self._forwards = 0
        self._samples: list[_Sample] = []
        windows = [r for r in canary.regions.values() if r.kind is RegionKind.WINDOW and r.slot_map is not None]
        self._windows = windows if self._interval and canary.enabled else []

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """Counts, when due; reports arrived counts. ``view`` is returned unchanged."""
        if self._windows and view is not None and batch is not None:
            self.close()
            self._forwards += 1
            if self._forwards % self._interval == 0:
                self._samples += [self._sample(region, batch, view) for region in self._windows]
        return view

    def close(self) -> None:
        """Reports arrived counts."""
        while self._samples and self._samples[0].counts.arrived():
            sample = self._samples.pop(0)
            (counts,) = sample.counts.tensors
            fields: dict[str, object] = dict(zip(FIELDS, counts.tolist(), strict=True))
            level: Level = "error" if fields["evicted_inside"] else "info"
            told = {"region": sample.region, "step": sample.step, **fields}
            self._canary.tell(Event("window_divergence", level, told))
            self._canary.count("divergence_reports")

    def _sample(self, region: Region, batch: Any, view: BatchView) -> _Sample:
        prefix, new = view.prefix_lens.long(), view.new_lens.long()
        width = self._entries.shape[1]
        if getattr(batch, "seq_lens_cpu", None) is not None:
            # Tokens that are being verified are not in these lengths.
            width = min(width, max(batch.seq_lens_cpu.tolist(), default=0) + view.tokens)
        rows = max(MOST_ENTRIES // max(width, 1), 1)
        counts = torch.zeros(len(FIELDS), dtype=torch.int64, device=prefix.device)
        for first in range(0, view.rows, rows):
            part = slice(first, first + rows)
            table = self._entries[batch.req_pool_indices[part].long(), :width]
            counts += _count(region, table, prefix[part], new[part])
        return _Sample(region.name, self._canary.forwards + 1, HostCopy(counts))


def _count(region: Region, table: Tensor, prefix: Tensor, new: Tensor) -> Tensor:
    """`FIELDS` for requests with ``prefix`` tokens in the cache and ``new`` tokens to write, both int64 ``[rows]``.
    ``table``, integer ``[rows, width]``: their slots of the full pool."""
    slot_map = table.new_zeros(1) if region.slot_map is None else region.slot_map
    number = table.long()
    mapped = slot_map[number.clamp(0, slot_map.shape[0] - 1)].long()
    null = region.null_range
    gone = (mapped < 0) | ((mapped >= null.start) & (mapped < null.stop))
    position = torch.arange(table.shape[1], device=table.device)
    live = position < (prefix + new)[:, None]
    read = (position < prefix[:, None]) & (position >= (prefix - (region.attention_window - 1))[:, None])
    full, window = prefix.sum(), prefix.clamp(max=region.attention_window - 1).sum()
    shown = (live, live & ~gone & (mapped != number), live & gone, read & gone)
    return torch.stack([full, window, *(mask.sum() for mask in shown)])
