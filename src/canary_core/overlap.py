"""`Overlap`: how much of Canary's work may run beside the engine's own."""

from enum import Enum


class Overlap(Enum):
    """Degrees to which Canary's work may run beside the engine's own, on a stream of Canary's. Each includes the one
    before. Always `NONE` on a CPU, with plugins that hook forwards, or after a graph was captured."""

    NONE = 0
    """No overlap: all work runs on the engine's stream, before and after the forward. Always right."""
    CHECK = 1
    """The check runs beside the forward: until the end of the forward nothing writes to tensors of the view, neither a
    kernel of the forward, nor work that does not wait for the check."""
    ALL = 2
    """Also the record and the scrub, beside work after the forward; and the forward may be issued before the host makes
    the view. Nothing but forwards writes to guarded slots."""
    NEXT = 3
    """Also the record and the scrub of a forward with few writes, such as a decode, beside the next forward, unless
    slots were given back since. Both are issued after the sampler (`SampledTokens.give`), or with the next forward.
    Every event of slots is reported before the next forward is issued, and no slot is rewritten without an event: no
    rejected drafts. Until the end of the next forward, nobody writes to the lengths, tokens and writers of a view;
    `StepListener.begin` writes to no tensor of a view, and reads no records before `Step.join`."""

    def __init__(self, degree: int) -> None:
        # Asked several times a forward, so they are no functions.
        self.beside_next = degree >= 3
        """Whether everything under `NEXT` is allowed."""
        self.after_forward = degree >= 2
        """Whether everything under `ALL` is allowed."""
