"""`SampledTokens`: the sampler's tokens, to compare with the tokens of the next forward.

An engine samples a token, keeps it somewhere (a buffer on the device, a list, the draft of a verification) and feeds it
to the next forward. Feeding another token leaves no other trace: the forward writes a token in order by itself, and the
request goes on with a wrong one. Three such bugs of engines: the next tokens of two requests changed places, a rejected
draft was kept, a sequence length was one short after a verification.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.ops.state import RegionState, token_region
from canary_core.runtime.host_copy import HostCopy
from canary_core.runtime.streams import capturing
from canary_core.runtime.workspace import Switch, Workspace


class SampledTokens:
    """Keeps on the device the token sampled for each request, and its position. The next forward that computes the
    position must compute the same token, else there is a ``write_input`` finding; and a forward that reads one of a
    request's last slots must find the token there, else there is a ``token`` finding.

    A plugin calls `follow` once, before `Canary.warm_up` and the first forward, and `give` after each forward with
    sampled tokens. Other tokens are not compared. Nor is a token compared where a batch has the request's own tokens
    (`BatchView.expected_tokens`) and the computed token is among them: engines may replace a sampled token, as a
    grammar does.

    No launch is added: `give` is a copy of a few bytes, and kernels that run anyway do the rest. Nothing waits for the
    device. In log mode nothing raises into the engine.
    """

    def __init__(self, workspace: Workspace, switch: Switch) -> None:
        self._workspace = workspace
        self._switch = switch
        self._view: BatchView | None = None
        self._state: RegionState | None = None
        self.left_out = 0
        """Number of calls of `give` without anything to compare."""
        self.heard: Callable[[BatchView, Tensor, Sequence[int]], object] | None = None
        """Told of what is given, and for which forward."""

    @property
    def followed(self) -> bool:
        """Whether `follow` was called, and there is a region to compare."""
        return self._state is not None

    def follow(self) -> bool:
        """Compares forwards with the sampler from now on; returns whether there is a region of one token a slot.
        Allocates device memory. Never captured."""
        if not self._switch.enabled:
            return False
        with self._switch.guard("sampled.follow"):
            state = token_region(self._workspace.states)
            if state is not None and not capturing(self._workspace.device):
                state.follow_sampler()
                self._state = state
        return self.followed

    def give(self, tokens: Tensor, without: Sequence[int] = ()) -> None:
        """Takes the sampled tokens of the last recorded forward, before the next one is checked; on the stream of the
        forwards. May be captured.

        tokens: int32 or int64 ``[rows]``, on the pool's device, in the order of the view's rows: the token after each
        row's last new one. Or ``[rows, n]``, where a verification gives several: the last is the token after the row's
        last new one, the one before follows the last but one, and so on; so column ``i`` of as many columns as the row
        has new tokens follows its new token ``i``. -1 where no token was sampled, or the token was rejected. Of more
        than 16 the last 16 count.
        without: rows without a sampled token, such as a prompt in the middle.

        Tensors that don't fit the last view, and calls without a recorded forward, are counted in ``left_out``.
        """
        if not self._switch.enabled:
            return
        with self._switch.guard("sampled.give"):
            if self._workspace.side is not None:
                # The sampler is issued; what comes next is small.
                self._workspace.side.issue_postponed()
            state, view = self._state, self._view
            # What follows is of another forward.
            self._view = None
            if state is None or state.samples is None:
                return
            if view is None or not _fits(tokens, view):
                self.left_out += 1
                return
            state.samples.give(tokens, tuple(without))
            if self.heard is not None:
                self.heard(view, tokens, without)

    def of(self, writers: Sequence[int]) -> Callable[[], list[list[int]] | None] | None:
        """Looks up what was sampled for ``writers``, as of what the last check took over; on the stream of the
        forwards, never captured. The host waits for nothing: the result gives a row of `ops.samples.Samples.of` for
        each writer once it has come, and None until then. None where no sampler is followed."""
        samples = None if self._state is None else self._state.samples
        if samples is None:
            return None
        copy = HostCopy(samples.of(writers))
        return lambda: copy.tensors[0].tolist() if copy.arrived() else None

    def begin(self, view: BatchView) -> None:
        """The forward of ``view`` is checked next: tokens given later do not belong to the one before. A forward of
        other regions alone, as of cross-attention, samples nothing."""
        if self._samples(view):
            self._view = None

    def recorded(self, view: BatchView) -> None:
        """The forward of ``view`` was recorded."""
        if self._samples(view):
            self._view = view

    def _samples(self, view: BatchView) -> bool:
        return self._state is not None and self._state.region.name in view.tables

    def forget(self) -> None:
        """An unrecorded forward ran: earlier sampled tokens may be out of date."""
        self._view = None
        state = self._state
        if state is not None and state.samples is not None:
            # A record beside the forward may still read it.
            self._workspace.join()
            state.samples.forget()


def _fits(tokens: Tensor, view: BatchView) -> bool:
    """Whether ``tokens`` may belong to the rows of ``view``."""
    return (
        tokens.dtype in (torch.int32, torch.int64)
        and tokens.dim() in (1, 2)
        and tokens.shape[0] <= view.rows
        and tokens.device == view.device
    )
