"""`SideStream`: what waits for what between the forwards' stream and Canary's own. A sleep of the device holds one of
them back; what must not wait for it is done meanwhile, what must wait sees what came after it."""

from collections.abc import Iterator

import pytest
import torch

from canary_core.runtime.side_stream import SideStream

pytestmark = pytest.mark.gpu

SLEEP = 400_000_000
"""Cycles, a fifth of a second: far more than the host needs for what it issues meanwhile."""


class Streams:
    """A side stream, and a word that one stream writes and another one reads; all memory is there before."""

    def __init__(self) -> None:
        self.side = SideStream(torch.device("cuda"))
        self.word = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.seen = torch.zeros(1, dtype=torch.int64, device="cuda")

    def write(self, value: int) -> None:
        """On the current stream."""
        self.word.fill_(value)

    def read(self) -> None:
        """On the current stream."""
        self.seen.copy_(self.word)

    def sleep(self) -> None:
        """The current stream is busy."""
        torch.cuda._sleep(SLEEP)


@pytest.fixture
def streams() -> Iterator[Streams]:
    """Every kernel was loaded before: to load one may wait for the device."""
    made = Streams()
    for _ in range(2):
        torch.cuda._sleep(1)
        made.write(0)
        with made.side:
            torch.cuda._sleep(1)
            made.write(0)
            made.read()
        made.side.join(for_good=True)
        made.seen.clone()
    torch.cuda.synchronize()
    yield made
    torch.cuda.synchronize()


def done() -> torch.cuda.Event:
    """After all that the current stream has to do by now."""
    event = torch.cuda.Event()
    event.record()
    return event


def test_what_runs_beside_comes_after_what_was_issued_before(streams):
    """It reads what the forwards' stream wrote last, however late that was."""
    streams.sleep()
    streams.write(1)
    with streams.side:
        streams.read()
        read = done()
    read.synchronize()
    assert int(streams.seen) == 1


def test_what_runs_beside_does_not_hold_the_engine_up(streams):
    """Until somebody joins: the engine's next work is done while the side stream still sleeps."""
    with streams.side:
        streams.sleep()
        slept = done()
    streams.write(2)
    wrote = done()
    wrote.synchronize()
    assert not slept.query()
    assert streams.side.open


def test_whoever_joins_comes_after_what_runs_beside(streams):
    """The engine may write to what is read there."""
    streams.write(1)
    with streams.side:
        streams.sleep()
        streams.read()
    streams.side.join()
    streams.write(2)
    torch.cuda.synchronize()
    assert int(streams.seen) == 1
    assert int(streams.word) == 2


def test_after_a_mark_what_runs_beside_waits_for_nothing_later(streams):
    """A forward is issued after the mark and sleeps; the check that is issued after it is done meanwhile, and has seen
    what the forward's stream had written before the mark."""
    streams.write(1)
    streams.side.mark()
    streams.sleep()
    slept = done()
    with streams.side:
        streams.read()
        read = done()
    read.synchronize()
    assert not slept.query()
    torch.cuda.synchronize()
    assert int(streams.seen) == 1


def test_a_mark_serves_once(streams):
    """What runs beside after that waits for all that was issued before it, as without a mark."""
    streams.side.mark()
    streams.sleep()
    streams.write(1)
    with streams.side:
        pass
    with streams.side:
        streams.read()
        read = done()
    read.synchronize()
    assert int(streams.seen) == 1


def test_a_mark_may_be_taken_back(streams):
    """Where the forward that it was for was not checked."""
    streams.side.mark()
    streams.sleep()
    streams.write(1)
    streams.side.unmark()
    with streams.side:
        streams.read()
        read = done()
    read.synchronize()
    assert int(streams.seen) == 1


def test_within_itself_it_is_one_context(streams):
    """The inner one neither waits again nor leaves: what the current stream is comes back with the outer one."""
    main = torch.cuda.current_stream()
    with streams.side:
        beside = torch.cuda.current_stream()
        with streams.side:
            assert torch.cuda.current_stream() == beside
        assert torch.cuda.current_stream() == beside
        assert not streams.side.open
    assert beside != main
    assert torch.cuda.current_stream() == main
    assert streams.side.open


def test_an_exception_gives_the_stream_back(streams):
    """And what was issued till then is waited for."""
    main = torch.cuda.current_stream()
    with pytest.raises(ValueError, match="broken"), streams.side:
        raise ValueError("broken")
    assert torch.cuda.current_stream() == main
    assert streams.side.open


def test_within_itself_nobody_waits_for_it(streams):
    """A join there joins nothing, and is still to come for the stream of the forwards."""
    with streams.side:
        streams.read()
        streams.side.join(for_good=True)
    assert streams.side.open


def test_it_is_open_until_somebody_joins_for_good(streams):
    """Others that join before make their own stream wait only."""
    assert not streams.side.open
    with streams.side:
        streams.read()
    streams.side.join()
    assert streams.side.open
    streams.side.join(for_good=True)
    assert not streams.side.open
    streams.side.join(for_good=True)
    assert not streams.side.open


def test_another_stream_follows_what_was_joined(streams):
    """An engine's second stream comes after the check without a join of its own, whoever joined; not after what was
    issued there since."""
    streams.write(1)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with streams.side:
        streams.sleep()
        streams.read()
    streams.side.join(for_good=True)
    with streams.side:
        streams.sleep()
        later = done()
    with torch.cuda.stream(other):
        streams.side.follow()
        streams.write(2)
        wrote = done()
    wrote.synchronize()
    assert not later.query()
    torch.cuda.synchronize()
    assert int(streams.seen) == 1


def test_memory_that_is_read_beside_is_not_handed_out_before(streams):
    """The engine gives up a tensor that the side stream has still to read."""
    size = 1 << 20
    given_up, read = (torch.full((size,), value, device="cuda") for value in (5, 0))
    torch.cuda.synchronize()
    with streams.side:
        streams.sleep()
        read.copy_(given_up)
    streams.side.reads(given_up, None)
    del given_up
    others = [torch.full((size,), -1, device="cuda") for _ in range(3)]
    streams.side.join(for_good=True)
    torch.cuda.synchronize()
    assert bool((read == 5).all())
    assert all(bool((other == -1).all()) for other in others)


def test_a_capture_waits_for_nothing_outside_of_it(streams):
    """Whoever captures has waited for the device before: a join within the capture leaves the graph alone, and is still
    to come for the stream of the forwards."""
    with streams.side:
        streams.read()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        streams.word.add_(1)
        streams.side.join()
    assert streams.side.open
    before = int(streams.word)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert int(streams.word) == before + 3
    streams.side.join(for_good=True)
    assert not streams.side.open


def test_what_is_postponed_is_issued_by_whoever_needs_it(streams):
    """Not when it is postponed; then it comes after what was issued before, and whoever joins comes after it."""
    streams.write(1)
    streams.side.postpone(streams.read)
    streams.write(2)
    torch.cuda.synchronize()
    assert int(streams.seen) == 0
    assert streams.side.open
    streams.side.join()
    streams.write(3)
    torch.cuda.synchronize()
    assert int(streams.seen) == 2
    streams.side.join()
    torch.cuda.synchronize()
    assert int(streams.seen) == 2


def test_what_is_postponed_waits_for_the_stream_that_postponed_it(streams):
    """Another one may issue it, and be far ahead."""
    other = torch.cuda.Stream()
    streams.sleep()
    streams.write(1)
    streams.side.postpone(streams.read)
    with torch.cuda.stream(other):
        streams.side.issue_postponed()
    streams.side.join()
    torch.cuda.synchronize()
    assert int(streams.seen) == 1
