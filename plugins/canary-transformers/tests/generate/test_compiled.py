"""What `generate()` has to compile of Canary's: once for all lengths of prompts, and by another process where the first
token does not need it."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny.generation import expect_clean, forwards, generate, listening, new_cache, prompts
from tiny.models import generating

import canary_core
from canary_core.guard import start_up
from canary_core.ops.backends import torch_backend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.timeout(600)
def test_prompts_of_any_length_need_the_same_kernels() -> None:
    """For a GPU that is not there. A static cache is as long as prompt and answer, which is rounded up, so that few
    lengths make a difference. What is first launched after the first token was given to another process; but for
    static caches, each with tensors of another length."""
    here = Path(__file__)
    folders = here.parents[1], here.parents[4] / "tests", Path(canary_core.__file__).parents[1]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tiny.compiled_script"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    for way, most in (("dynamic", 5), ("window", 13)):
        assert len(set(told[way]["counts"])) == 1, told
        assert told[way]["counts"][0] <= most, told
        assert told[way]["late"] > 0, told
        assert told[way]["left"] == [], told
    assert told["static"]["counts"][-1] <= told["static"]["counts"][0] + 3 * 3, told


class Compiling:
    """Stands for a process that compiles until it is let go."""

    keys = frozenset({"fingerprint_record"})
    seconds, code = 7.0, 0

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.remembered = False

    def runs(self) -> bool:
        return not self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait(60)

    def remember(self) -> None:
        self.remembered = True

    def same_cache(self) -> AbstractContextManager[None]:
        return nullcontext()


class Beside:
    """The processes that were begun, each with the number of tokens that the cache's model had computed by then."""

    def __init__(self, model: Any) -> None:
        self.begun: list[Compiling] = []
        self.after: list[int] = []
        self.error: OSError | None = None
        self.forwards = 0
        self._hook = model.register_forward_hook(lambda *_: setattr(self, "forwards", self.forwards + 1))

    def begin(self, launches: Callable[[], None], running: object) -> Compiling:
        if self.error is not None:
            raise self.error
        self.begun.append(Compiling())
        self.after.append(self.forwards)
        return self.begun[-1]

    def end(self) -> None:
        """All processes end."""
        for process in self.begun:
            process.ended.set()
        deadline = time.monotonic() + 60
        while any(thread.name == "canary alone" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self._hook.remove()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the place of processes that compile, for a llama."""
    made = Beside(generating("llama"))
    backend = replace(torch_backend(), row_steps=(16,), compile_beside=made.begin)
    monkeypatch.setattr("canary_core.ops.backends.torch_backend", lambda: backend)
    monkeypatch.setattr("canary_core.guard.warm_up._compiles", lambda states: True)
    monkeypatch.setattr(start_up, "ALONE", start_up.Alone())
    yield made
    made.end()


def test_the_first_token_waits_for_no_other_process(beside: Any) -> None:
    """One begins with the second forward, and nobody waits for it: the answer is the same, all is guarded, and the end
    is told although the cache is gone. The next cache of the sort needs none, one of another sort does."""
    model = generating("llama")
    with listening(model, mode="off")[0]:
        expected = generate(model, prompts(), max_new_tokens=30)
    watch, findings = listening(model)
    before = beside.forwards
    with watch:
        assert torch.equal(generate(model, prompts(), max_new_tokens=30), expected)
        assert [number - before for number in beside.after] == [2]
        assert findings.told("warmed_up") == []
        beside.begun[0].ended.set()
        generate(model, prompts(2, 14), max_new_tokens=30)
        assert len(beside.begun) == 1
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 90), prompts(2, 1))
        assert len(beside.begun) == 2
        beside.end()
        expect_clean(watch)
    assert [event.fields["beside_s"] for event in findings.told("warmed_up")] == [7.0, 7.0]
    assert [process.remembered for process in beside.begun] == [True, True]


def test_where_no_process_can_start_it_is_told(beside: Any) -> None:
    """Once, with the reason; the answer is the same, and guarded."""
    model = generating("llama")
    beside.error = OSError("sys.executable is '/opt/app', which is no Python interpreter")
    watch, findings = listening(model)
    with watch:
        first = generate(model, prompts())
        assert torch.equal(generate(model, prompts()), first)
        expect_clean(watch)
    (event,) = findings.told("warmed_up")
    assert "/opt/app" in event.fields["reason"]
