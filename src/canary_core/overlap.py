"""`Overlap`: how much of Canary's work may run beside the engine's own."""

from enum import Enum


class Overlap(Enum):
    """What of Canary's work may run beside the engine's own, on a stream of ours. Each allows what the one before it
    does. On a CPU, with plugins that hook forwards, or once a graph was captured, nothing runs beside."""

    NONE = 0
    """Nothing: all of it runs on the engine's stream, before and after the forward. Always right."""
    CHECK = 1
    """The check, beside the forward: until the forward has ended nothing writes to tensors of its view, neither a
    kernel of the forward, nor anybody who does not wait for them."""
    ALL = 2
    """Also the record and the scrub, beside what comes after the forward; and the forward may be issued before the
    host makes the view. Nothing but forwards writes to guarded slots."""
    NEXT = 3
    """Also the record and the scrub of a forward that wrote little, such as a decode, beside the forward that comes
    next, unless slots were given back since. They are issued once the sampler was (`SampledTokens.give`), or with the
    next forward. Every event of slots is told before the next forward is issued, and without one none is written again:
    no rejected drafts. Until the next forward has ended, nobody writes to the lengths, tokens and writers of a view;
    `StepListener.begin` writes to none, and reads no records before `Step.join`."""

    def __init__(self, degree: int) -> None:
        # Asked several times a forward, so they are no functions.
        self.beside_next = degree >= 3
        """Whether it allows all that `NEXT` does."""
        self.after_forward = degree >= 2
        """Whether it allows all that `ALL` does."""
