"""`SlotArguments`: whether the arguments of a plugin's slot events are possible at all."""

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from canary_core.ops.state import RegionState
from canary_core.runtime.workspace import Switch


class SlotArguments:
    """Checks the arguments of `SlotEvents`, and reports misuse, once for each sort. Looks only at facts known to the
    host."""

    def __init__(self, states: Mapping[str, RegionState], device: torch.device, switch: Switch) -> None:
        self._states = states
        self._device = device
        self._switch = switch

    def region(self, event: str, region: str) -> RegionState | None:
        """The region's state; None in off mode, and for an unknown region, which is reported."""
        state = self._states.get(region) if isinstance(region, str) else None
        if state is None and self._states:
            self._refuse(
                (event, "region", str(region)),
                f"no region {region!r} is guarded; there are {', '.join(self._states)}. Correct the name, or ask "
                "`region in canary.regions` first",
            )
        return state

    def fit(self, event: str, region: str, **slots: Tensor) -> bool:
        """Whether each of ``slots`` is an integer tensor ``[n]`` on the pool's device, all of one length. Tells the
        first that is not."""
        lengths = []
        for name, tensor in slots.items():
            got = _misfit(tensor, self._device)
            if got:
                wanted = f"an integer tensor [n] on {self._device}"
                self._refuse((event, region, name, got), f"{name} must be {wanted}, got {got}; convert it there")
                return False
            lengths.append(tensor.shape[0])
        if lengths and lengths.count(lengths[0]) != len(lengths):
            told = ", ".join(f"{name} {length}" for name, length in zip(slots, lengths, strict=True))
            self._refuse(
                (event, region, "length"), f"{' and '.join(slots)} must have the same length, got {told}; pair them"
            )
            return False
        return True

    def pages(self, event: str, region: str, page_slots: int) -> bool:
        """Whether ``page_slots`` may be how many slots a page has. Tells if not."""
        # The second one takes ten times as long to see.
        if isinstance(page_slots, (int, Integral)) and page_slots >= 1:
            return True
        self._refuse(
            (event, region, "page_slots"),
            f"page_slots must be an integer of at least 1, got {page_slots!r}; give how many slots a page has",
        )
        return False

    def owner(self, event: str, region: str, writer: object) -> bool:
        """Whether ``writer`` may be the owner of slots. Reports misuse."""
        if isinstance(writer, int) or callable(writer) or isinstance(writer, Integral):
            return True
        self._refuse(
            (event, region, "writer"),
            f"writer must be a number of canary.writers.id(name), or a function that gives it, got a "
            f"{type(writer).__name__}; -1 is for nobody",
        )
        return False

    def payload_fits(self, region: str, slots: Tensor, rows: Tensor) -> bool:
        """Whether ``rows`` may be a payload of ``slots``, and ``slots`` slots. Reports misuse."""
        if not self.fit("import_records", region, slots=slots):
            return False
        if isinstance(rows, Tensor) and rows.dtype == torch.int64 and rows.dim() == 2 and len(rows) == len(slots):
            return True
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        self._refuse(
            ("import_records", region, "rows"),
            f"rows must be an int64 tensor [{len(slots)}, words], one row for each slot, got {got}; give what "
            "export_records gave, or call forget",
        )
        return False

    def _refuse(self, sort: tuple[str, ...], what: str) -> None:
        """``sort`` begins with the event's name."""
        room = "" if "." in sort[0] else "slots."
        self._switch.misuse(f"{room}{sort[0]}: {what}", sort)


def _misfit(slots: object, device: torch.device) -> str:
    """The reason why ``slots`` is no integer tensor ``[n]`` on ``device``; empty: none."""
    if not isinstance(slots, Tensor):
        return f"a {type(slots).__name__}"
    if slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool:
        return str(slots.dtype)
    if slots.dim() != 1:
        return f"{slots.dim()} dimensions"
    return "" if slots.device == device else f"one on {slots.device}"
