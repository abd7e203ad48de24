"""``canary ctl verify``, as a user types it: each way that it can go ends with a verdict or a sentence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import canary_core
from canary_desk.cli.app import app
from canary_desk.control import client, verifications
from canary_desk.control.messages import MOST_VALUE, Request

HERE = Path(__file__).parent
LONG = ("--timeout", "600")
"""Of clients that wait for others: on a busy machine each takes many seconds to start."""
PATHS = os.pathsep.join(map(str, [HERE.parent, Path(canary_core.__file__).parents[1]]))


class Engine:
    """`verified_engine` in a process, with its socket in ``folder``."""

    def __init__(self, folder: Path, control: str = "write", recomputer: str = "able") -> None:
        self.environment = {**os.environ, "CANARY_CONTROL_DIR": str(folder), "PYTHONPATH": PATHS, "COLUMNS": "120"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "verified_engine.py"), control, recomputer],
            env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self.process.pid
        self.clients: list[subprocess.Popen[str]] = []
        self.socket = folder / f"{self.pid}.sock"

    def hears(self, said: str) -> None:
        """Waits until it has taken up a line."""
        assert self.process.stdout is not None
        while self.process.stdout.readline().strip() != said:
            assert self.process.poll() is None

    def say(self, said: str) -> None:
        """Tells it something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{said}\n")
        self.process.stdin.flush()
        self.hears(said)

    def begins(self, *arguments: str) -> "subprocess.Popen[str]":
        """A ``canary ctl verify`` in a process of its own."""
        begun = subprocess.Popen(
            [sys.executable, "-m", "canary_core", "ctl", "verify", *arguments],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # Where tests run in the background of a shell, it has SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        self.clients.append(begun)
        return begun

    def verify(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, output and errors of a ``canary ctl verify``."""
        return ended(self.begins(*arguments))

    def asked(self, least: int, most: int = 99) -> None:
        """Waits until so many clients have asked and were not answered."""
        ticket = client.ask(self.socket, Request(command="verify", value="a"))["ticket"]
        while not least < client.ask(self.socket, Request(command="verified", value=ticket))["asks"] <= most + 1:
            time.sleep(0.05)
        client.ask(self.socket, Request(command="forget", value=ticket))

    def end(self) -> None:
        """Ends it, stopped or not, and clients that are left."""
        for process in (self.process, *(one for one in self.clients if one.returncode is None)):
            process.kill()
            process.communicate(timeout=60)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, output and errors."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of sockets."""
    made = tmp_path / "c"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def start(folder):
    """Starts engines, ready to be asked, and ends them after the test."""
    made: list[Engine] = []

    def one(*arguments: str) -> Engine:
        made.append(Engine(folder, *arguments))
        made[-1].hears("ready")
        return made[-1]

    yield one
    for engine in made:
        engine.end()


def test_verdicts_as_text_and_as_json(start):
    """The same as those of the Python call; exit code 0 where all is well, 1 where the KV of a request differs."""
    engine = start()
    code, out, err = engine.verify("--all")
    assert (code, err) == (0, "")
    head = f"process {engine.pid}, replica 0, rank 0"
    first = "  full k.0: median 0, worst 0, noise up to 0.0039"
    assert out.splitlines()[:4] == [head, "a: same, 40 tokens", "  bytes: not compared", first]
    assert "b: same, 48 tokens" in out
    code, out, err = engine.verify("--request", "b", "--json")
    (answered,) = json.loads(out)
    (answer,) = answered["answers"]
    assert (code, err, answered["socket"]) == (0, "", str(engine.socket))
    assert (answer["request"], answer["tokens"], answer["verdict"], answer["rank"]) == ("b", 48, "same", 0)
    assert [layer["source"] for layer in answer["layers"]] == ["k.0", "v.0", "k.1", "v.1"]
    assert answer["bytes"] is None
    engine.say("break")
    code, out, err = engine.verify("--all")
    assert (code, err) == (1, "")
    assert "a: same, 40 tokens" in out
    assert "b: differs, 48 tokens\nthe KV of b is nowhere what the model computes" in out
    (wrong,) = [line for line in out.splitlines() if "<-- differs" in line]
    assert wrong.startswith("  full k.1: median 0.5, worst 0.5")


def test_status_and_dump_say_what_was_computed_again(start, folder, monkeypatch):
    """Of the four requests that ran first all have taught the noise."""
    monkeypatch.setenv("CANARY_CONTROL_DIR", str(folder))
    engine = start()
    told = client.ask(engine.socket, Request(command="dump"))
    assert (told["stats"][0]["recompute_taught"], told["stats"][0]["recompute_same"]) == (4, 4)
    text = CliRunner().invoke(app, ["ctl", "status"]).stdout
    assert "4 same, 4 taught the noise" in text


def test_what_can_not_be_asked_is_one_sentence(start):
    """With exit code 2."""
    name = f"canary: the name of a request has 1 to {MOST_VALUE} characters, got"
    engine = start()
    for arguments, sentence in [
        ([], "canary: name a request with --request ID, or have all that run verified with --all"),
        (["--all", "--request", "a"], "canary: name a request with --request ID, or have all"),
        (["--all", "--all-parked"], "canary: name a request with --request ID, or have all"),
        (["--prefix-of", "a", "--all-parked"], "canary: name a request with --request ID, or have all"),
        (["--request", ""], f"{name} 0"),
        (["--request", "x" * 600], f"{name} 600"),
        (["--prefix-of", "x" * 600], f"{name} 600"),
        (["--all", "--pid", "1"], "canary: process 1 listens in"),
    ]:
        result = CliRunner().invoke(app, ["ctl", "verify", *arguments], env=engine.environment)
        (line,) = result.stderr.splitlines()
        assert (result.exit_code, result.stdout) == (2, "")
        assert line.startswith(sentence)


def test_an_engine_that_remembers_no_prefixes_says_so(start):
    """As an error of the process, with exit code 2."""
    engine = start()
    for arguments in (["--prefix-of", "a"], ["--all-parked"]):
        code, out, err = engine.verify(*arguments)
        assert (code, out) == (2, "")
        assert "what requests left in the prefix cache of this engine is not remembered" in err
        assert err.endswith("verify a request while it runs\n")


def test_an_unknown_request_has_its_reason(start):
    """And no verdict, so exit code 2."""
    engine = start()
    code, out, err = engine.verify("--request", "nobody")
    assert "nobody: unjudged, 0 tokens (request 'nobody' is not running: verify it before it ends)" in out
    assert (code, err) == (2, "canary: there is no verdict on request 'nobody'; the reason stands beside it\n")


def test_it_acts_on_the_engine_and_needs_the_permission(start):
    """As pause and budget do."""
    code, out, err = start("read").verify("--all")
    assert (code, out) == (2, "")
    assert err == (
        "canary: verify acts on the engine, and this socket only answers questions; start the engine with "
        "CANARY_CONTROL=write\n"
    )


def test_an_engine_without_a_recomputer_says_so_and_one_with_one_answers(start):
    """Of several processes those are asked that can do it."""
    unable = start("write", "unable")
    code, out, err = unable.verify("--all")
    assert (code, out) == (2, "")
    assert err.startswith(f"canary: nothing can be verified in process {unable.pid}: no engine in it can compute a ")
    able = start()
    code, out, err = able.verify("--request", "a")
    assert (code, err, out.count("process")) == (0, "", 1)
    assert f"process {able.pid}, " in out
    # Of two that can, the one that has the request.
    code, out, err = start().verify("--all", "--json")
    assert [len(one["answers"]) for one in json.loads(out)] == [2, 2]
    assert (code, err) == (0, "")


def test_a_loop_that_does_not_turn_is_told_of_and_nothing_is_left_behind(start):
    """Within the time given; once the loop turns again, whoever waits gets the verdict."""
    engine = start()
    engine.say("stop")
    code, out, err = engine.verify("--request", "a", "--timeout", "0.3")
    assert (code, out) == (2, "")
    assert err == (
        f"canary: process {engine.pid} has not verified request 'a' within 0.3 s: it ran no forward meanwhile, and "
        "work is done between two; ask while the request runs\n"
    )
    waits = engine.begins("--request", "b")
    engine.asked(1)
    engine.say("go")
    code, out, err = ended(waits)
    assert (code, err) == (0, "")
    assert "b: same, 48 tokens" in out
    engine.asked(0, most=0)


def test_several_clients_at_once_and_those_that_go_away(start):
    """Each gets its own answer; one that was interrupted takes its ask along, one that was killed is forgotten once it
    has not looked for a while, and neither keeps the others waiting."""
    engine = start()
    engine.say("stop")
    waiting = [
        engine.begins(*arguments, *LONG) for arguments in (["--all"], ["--request", "a"], ["--request", "b"], ["--all"])
    ]
    interrupted, killed = engine.begins("--all", *LONG), engine.begins("--all", *LONG)
    engine.asked(6)
    interrupted.send_signal(signal.SIGINT)
    killed.kill()
    assert ended(interrupted)[0] != 0
    ended(killed)
    # The killed one may be forgotten by now, too.
    engine.asked(4, most=5)
    engine.say("go")
    answers = [ended(one) for one in waiting]
    assert [(code, out.count("same"), err) for code, out, err in answers] == [(0, n, "") for n in (2, 1, 1, 2)]
    engine.asked(0, most=1)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_an_engine_that_ends_meanwhile(how, start):
    """The process is killed, or its Canary is closed: a sentence, and no endless wait."""
    engine = start()
    engine.say("stop")
    waits = engine.begins("--all")
    engine.asked(1)
    if how == "killed":
        engine.process.kill()
    else:
        engine.say("close")
    code, out, err = ended(waits)
    assert (code, out) == (2, "")
    assert f"process {engine.pid}" in err
    assert ("has the engine ended?" if how == "killed" else "the engine ended, or Canary was switched off") in err


def test_one_that_is_stopped_hides_nobody(start):
    """The other's verdicts are printed, then a sentence says how the stopped one goes on."""
    stopped, engine = start(), start()
    stopped.process.send_signal(signal.SIGSTOP)
    code, out, err = engine.verify("--all", "--timeout", "20")
    assert code == 2
    assert f"process {engine.pid}, replica 0, rank 0\na: same" in out
    assert f"it is stopped; kill -CONT {stopped.pid} lets it go on" in err


def test_clients_that_have_gone_are_forgotten(monkeypatch):
    """Their asks are cancelled, so that no engine computes for them; more than a bounded number are not taken."""
    from concurrent.futures import Future

    from support.guarded import Guarded

    from canary_core import CanaryError

    asked: list[Future[list[object]]] = []

    class Never:
        def ask(self, request=None):
            asked.append(Future())
            return asked[-1]

    guarded = Guarded()
    guarded.canary.verifier = Never()
    known = verifications.Verifications()
    for _ in range(verifications.MOST_OPEN):
        known.begin([guarded.canary], None)
    with pytest.raises(CanaryError, match=r"64 verifications are asked for .* try again"):
        known.begin([guarded.canary], None)
    known.sweep()
    assert not any(one.cancelled() for one in asked)
    now = time.monotonic()
    monkeypatch.setattr(verifications.time, "monotonic", lambda: now + 31)
    known.sweep()
    assert all(one.cancelled() for one in asked)
    assert known.begin([guarded.canary], "a")["asked"] == 1
