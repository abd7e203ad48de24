"""`verdict_pipe`: what a worker finds is known in the scheduler's process when it gives its output out."""

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from canary_adapters import BlockGroup, BlockVerdict, Telling, VerdictPipe, VerdictPost, VerdictWay
from canary_core import Kind, Phase, Verdict, Violation

BAD = BlockVerdict("bytes", "full", 70, 2, None, True, False)
GROUPS = [BlockGroup("full", 0, 32), BlockGroup("window", 1, 16)]


@pytest.fixture
def pipe():
    """In the scheduler's process."""
    made = VerdictPipe()
    yield made
    made.close()


def test_verdicts_of_another_process_are_there_at_once(pipe):
    """Of several ranks, in the order of each, as they were sent; the pipe's name is gone once all have it open."""
    code = (
        "import sys; from canary_adapters import BlockVerdict, VerdictPost\n"
        "post = VerdictPost(sys.argv[1]); sys.stdin.readline()\n"
        "post.put(BlockVerdict('bytes', 'full', 70, 2)); print('sent', flush=True); sys.stdin.readline()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, pipe.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    post = VerdictPost(pipe.path)
    assert pipe.take() == []
    post.put(BlockVerdict("prefix", "full", 3, 0, "request 7", False, True))
    assert [v.request for v in pipe.take()] == ["request 7"]
    worker.stdin.write("go\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "sent\n"
    pipe.opened()
    assert not Path(pipe.path).parent.exists()
    assert pipe.take() == [BAD]
    worker.communicate("end\n", timeout=60)
    assert pipe.take() == []
    post.put(BAD)
    assert pipe.take() == [BAD]
    post.close()


def test_a_pipe_that_nobody_can_write_to_is_not_read_again(pipe, monkeypatch):
    """All workers are in the scheduler's process: no look costs anything. Until the name is gone one may still come."""
    assert pipe.take() == []
    post = VerdictPost(pipe.path)
    post.put(BAD)
    assert pipe.take() == [BAD]
    post.close()
    pipe.opened()
    assert pipe.take() == []
    monkeypatch.setattr(os, "read", lambda *_: pytest.fail("read again"))
    assert pipe.take() == []


@pytest.mark.parametrize("name", ["request 7", "r" * 1800, "r" * 3000])
@pytest.mark.parametrize("size", [None, 1 << 16, 1 << 13])
def test_a_full_pipe_makes_nobody_wait_and_puts_all_kv_in_doubt(pipe, size, name):
    """A storm of several workers that the scheduler does not take: what has no room becomes one verdict for everything,
    told at once, whatever the lengths of the lines and the pipe's size. After that verdicts are told as before."""
    if size is not None:
        fcntl.fcntl(pipe._end, fcntl.F_SETPIPE_SZ, size)
    posts, bad = [VerdictPost(pipe.path) for _ in range(8)], replace(BAD, request=name)
    for _ in range(1500):
        for post in posts:
            post.put(bad)
    *first, lost = pipe.take()
    assert 0 < len(first) < 12000
    assert set(first) == {bad}
    assert lost.everything
    posts[0].put(BAD)
    assert pipe.take() == [BAD]
    for post in posts:
        post.close()


def test_a_pipe_with_room_loses_nothing(pipe):
    """A thousand verdicts are what they are."""
    post = VerdictPost(pipe.path)
    for _ in range(1000):
        post.put(BAD)
    assert pipe.take() == [BAD] * 1000
    post.close()


def test_no_pipe_is_an_error_of_the_system():
    """As on another machine: the worker's answer says so."""
    with pytest.raises(FileNotFoundError):
        VerdictPost("/nonexistent/pipe")


def test_a_scheduler_that_is_gone_is_no_wait(pipe):
    """The engine is ending; the worker's plugin tells the error."""
    post = VerdictPost(pipe.path)
    pipe.close()
    with pytest.raises(BrokenPipeError):
        post.put(BAD)
    post.close()


def test_a_verdict_names_the_block_of_its_own_group():
    """The slot's block, by the group's size; a request alone where no slot is to blame; nothing of other regions."""

    def told(kind=Kind.BYTES, region="window", slot=70, request="a", phase=Phase.SCRUB):
        finding = Violation(kind, region, phase, step=3, slot=slot, request=request)
        return BlockVerdict.of(Verdict(finding, spoiled=kind is Kind.BYTES, stands=True), GROUPS)

    assert told() == BlockVerdict("bytes", "window", 70, 4, "a", True, True, 3)
    # Between two forwards: the next one reads it.
    assert told(phase=Phase.EVENT).step == 4
    assert told(region="full").block == 2
    assert told(region="draft") is None
    assert told(Kind.WRITE_INPUT).block == -1
    assert told(Kind.WRITE_INPUT, request=None) is None
    assert not told(Kind.PREFIX).of_all
    assert told(Kind.PREFIX, request=None).of_all
    everything = BlockVerdict.of(Verdict(None), GROUPS)
    assert everything is not None
    assert everything.everything


def test_a_newer_worker_may_say_more(pipe):
    """Fields that this release does not know are left out."""
    end = os.open(pipe.path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(end, b'{"kind": "bytes", "block": 4, "since": 7}\n{"kind": "by')
    assert pipe.take() == [BlockVerdict("bytes", block=4)]
    os.write(end, b'tes", "block": 5}\n')
    assert [verdict.block for verdict in pipe.take()] == [5]
    os.close(end)


def test_each_engine_of_a_process_gets_its_own_verdicts(pipe):
    """Of two engines whose schedulers are in the worker's process; a third one's is nowhere to be reached, and then in
    another process."""
    first, second, third = object(), object(), object()
    way = VerdictWay()
    way.joined(first)
    way.joined(second)
    assert way.put(BAD, second)
    assert not way.put(BAD, third)
    assert (way.take(first), way.take(second), way.take(second)) == ([], [BAD], [])
    way.left(second)
    assert not way.put(BAD, second)
    assert way.open(pipe.path)
    assert way.put(BAD, third)
    assert way.put(replace(BAD, block=7), first)
    assert (pipe.take(), way.take(first)) == ([BAD], [replace(BAD, block=7)])
    way.close()


def test_findings_are_of_the_engine_that_works():
    """Of all engines where that is not known, and of none while one ends; each thread by itself."""
    telling = Telling()
    assert telling.among(["a", "b"]) == ["a", "b"]
    with telling.only("b"):
        assert telling.among(["a", "b"]) == ("b",)
        with telling.only():
            assert telling.among(["a", "b"]) == ()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(telling.among, ["a"]).result() == ["a"]
    with pytest.raises(KeyError), telling.only("a"):
        raise KeyError
    assert telling.among(["a", "b"]) == ["a", "b"]
