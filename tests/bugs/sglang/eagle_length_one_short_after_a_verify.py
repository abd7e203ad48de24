"""After a verify the sequence counts one token fewer than were accepted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TOKENS
from bugs.museum import Bug, Missed, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The relay of the lengths loses one token, where more than one was accepted."""
    from sglang.srt.speculative import eagle_worker_common

    def eagle_sample(usual: Any, *args: Any, **kwargs: Any) -> Any:
        predict, accept_lens, accept_index = usual(*args, **kwargs)
        if bool((accept_lens > 1).any()):
            stage.strike()
            accept_lens = accept_lens - (accept_lens > 1).to(accept_lens.dtype)
        return predict, accept_lens, accept_index

    with patched(eagle_worker_common, "eagle_sample", eagle_sample):
        yield


BUG = Bug(
    title="A length is one short after a verify",
    cause="One accepted draft too few is counted, so that the next token is computed from the wrong one.",
    row=TOKENS,
    issues=("sglang#26329", "sglang#22819"),
    setup="eagle",
    broken=broken,
    traffic=together,
    default=Missed(
        "all that the engine has agrees: one draft fewer counts as accepted and is computed again; answers stay right. "
        "A length that is short while the token was given out is found: canary-sglang's test_sampled, cut short"
    ),
)
