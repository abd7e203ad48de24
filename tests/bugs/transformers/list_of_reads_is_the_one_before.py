"""The list of slots that a forward reads is still the one of the forward before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Found, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The copy of the list to the device runs after the forward has read it."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    def prepare_batch_tensors(usual: Any, io: Any, *args: Any, **kwargs: Any) -> None:
        before = io.read_index_storage.clone()
        counts = list(getattr(io, "true_read_sizes", []))
        usual(io, *args, **kwargs)
        if (
            len(io.requests_in_batch) > 1
            and counts
            and counts[0]
            and io.true_read_sizes[0] == counts[0] + len(io.requests_in_batch)
        ):
            stage.strike()
            io.read_index_storage[:, : counts[0]] = before[:, : counts[0]]

    with patched(ContinuousBatchingIOs, "prepare_batch_tensors", prepare_batch_tensors):
        yield


BUG = Bug(
    title="The list of reads is overwritten before its copy ran",
    cause="The host's list of slots goes to the device too late, and the forward reads the one of the forward before.",
    row=TABLE,
    issues=("trtllm#15546", "vllm#42273"),
    setup="continuous",
    broken=broken,
    traffic=joining,
    default=Found(
        "position", 1, "bob will read position 0 from slot ..., but bob wrote position 29 there ...: wrong slot mapping"
    ),
)
