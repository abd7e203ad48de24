"""The control socket: who may open it, what it answers, and that nobody can harm the engine with it."""

import errno
import json
import os
import random
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.guarded import Guarded

import canary_core
from canary_core.errors import ControlError
from canary_desk.control import client, server
from canary_desk.control.commands import Commands
from canary_desk.control.messages import MOST_REQUEST_BYTES, Reply, Request
from canary_desk.control.server import MOST_CLIENTS, Server
from canary_desk.metrics.readings import Readings

FUZZED = 100_000
"""Messages that are no requests, or nearly none."""


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of short name, since a socket's path is; only its user may look into it."""
    made = tmp_path / "c"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def guarded() -> Guarded:
    """A guarded engine that has run."""
    engine = Guarded()
    engine.submit(tokens=6)
    engine.step()
    return engine


@pytest.fixture
def listening(guarded, folder):
    """Its control socket, which may change things."""
    readings = Readings()
    readings.add(guarded.canary)
    made = Server(folder / "1.sock", Commands(readings, writable=True).answer)
    yield made
    made.close()


def connect(to: Server) -> socket.socket:
    """A client that has said nothing yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(to.path))
    return connection


def say(connection: socket.socket, line: bytes) -> Reply:
    """What comes back for one line."""
    connection.sendall(line + b"\n")
    return Reply.model_validate_json(connection.makefile("rb").readline())


def test_only_its_user_can_open_it(listening, folder):
    """Its mode is 0600, and so it is from the start: nobody can connect before."""
    assert stat.S_IMODE(listening.path.stat().st_mode) == 0o600
    assert client.found(folder) == [listening.path]


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED is Linux's")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_shown_the_door(guarded):
    """Also where the file's mode lets them in, as a careless chmod would: the kernel says who they are."""
    # pytest's own folders are closed to others already.
    open_to_all = Path(tempfile.mkdtemp())
    open_to_all.chmod(0o755)
    listening = Server(open_to_all / "1.sock", Commands(Readings(), writable=True).answer)
    listening.path.chmod(0o666)
    script = (
        "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
        "s.settimeout(10)\n"
        'try:\n    s.sendall(b\'{"command":"status"}\\n\')\n    print(len(s.recv(100)))\n'
        "except (BrokenPipeError, ConnectionResetError):\n    print(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(listening.path)], capture_output=True, text=True, check=False
    )
    listening.close()
    open_to_all.rmdir()
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_status_says_what_is_guarded(listening, guarded):
    """As of the last host read; a finding is there by kind and region."""
    found = client.ask(listening.path, Request(command="status"))
    (canary,) = found["canaries"]
    assert found["pid"] == os.getpid()
    assert (canary["state"], canary["mode"], canary["forwards"], canary["findings"]) == ("on", "log", 1, {})
    assert canary["regions"]["full"]["slots"] == 64


def test_changes_reach_the_engine(listening, guarded):
    """Mode, budget, pause and resume, each told with an event."""
    for command, value in (("mode", "raise"), ("budget", "64MiB"), ("pause", None), ("resume", None)):
        assert client.ask(listening.path, Request(command=command, value=value)) == {"changed": 1}
    assert guarded.canary.mode == "raise"
    assert str(guarded.canary.step.scrub.budget) == "64MiB"
    told = [e.name for e in guarded.findings.events]
    assert [n for n in told if n in ("mode_changed", "budget_changed", "paused", "resumed")] == [
        "mode_changed", "budget_changed", "paused", "resumed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(command="mode", value="off"), "mode must be log or raise, got 'off'"),
        (Request(command="mode"), "mode must be log or raise, got None"),
        (Request(command="budget", value="101%"), "CANARY_SCRUB_BUDGET must be at most 100%"),
        (Request(command="budget", value="much"), "got 'much'"),
    ],
)
def test_what_can_not_be_is_refused_in_a_sentence(request_, sentence, listening, guarded):
    """And changes nothing."""
    with pytest.raises(ControlError, match=sentence):
        client.ask(listening.path, request_)
    assert (guarded.canary.mode, str(guarded.canary.step.scrub.budget)) == ("log", "0.1%")


def test_it_only_answers_unless_it_may_write(guarded, folder):
    """CANARY_CONTROL=read: status and dump work, changes are refused with what to do."""
    readings = Readings()
    readings.add(guarded.canary)
    made = Server(folder / "1.sock", Commands(readings, writable=False).answer)
    try:
        assert client.ask(made.path, Request(command="dump"))["settings"]["CANARY_MODE"] == "log"
        for command in ("mode", "budget", "pause", "resume"):
            with pytest.raises(ControlError, match="CANARY_CONTROL=write"):
                client.ask(made.path, Request(command=command, value="log"))
    finally:
        made.close()
    assert not guarded.canary.step.paused


def test_a_dump_has_no_tokens(guarded, folder):
    """Events of findings are in it without what somebody wrote."""
    readings = Readings()
    readings.add(guarded.canary)
    guarded.engine.requests[0].tokens.append(8)
    guarded.step(fault=lambda: guarded.engine.table[0, 1].fill_(5))
    text = json.dumps(Commands(readings, writable=False).answer(Request(command="dump")).result, default=str)
    assert '"event": "incident"' in text
    assert '"token"' not in text
    assert '"stored_token"' not in text


def test_a_hundred_thousand_bad_messages(listening, guarded):
    """None is carried out, each has an answer or ends its connection, and the engine serves on."""
    some = random.Random(7)
    connection, sent, answered = connect(listening), 0, 0
    while sent < FUZZED:
        lines = [_nonsense(some) for _ in range(50)]
        sent += len(lines)
        try:
            connection.sendall(b"\n".join(lines) + b"\n")
            reader = connection.makefile("rb")
            for _ in range(sum(line.count(b"\n") + 1 for line in lines)):
                reply = Reply.model_validate_json(reader.readline())
                answered += 1
                assert reply.error is not None or "canaries" in reply.result, reply
        except (OSError, ValueError):
            connection.close()
            connection = connect(listening)
    connection.close()
    assert answered > FUZZED / 2
    assert (guarded.canary.mode, guarded.canary.step.paused) == ("log", False)
    guarded.decode()
    assert client.ask(listening.path, Request(command="status"))["canaries"][0]["forwards"] == 2


def _nonsense(some: random.Random) -> bytes:
    """Random bytes, random JSON, and requests with something wrong, none longer than some kilobytes."""
    sort = some.randrange(6)
    if sort == 0:
        return some.randbytes(some.randrange(200)).replace(b"\n", b" ")
    if sort == 1:
        return json.dumps({"command": some.choice(["mode", "budget", "quit", "", "STATUS", "__class__"]),
                           "value": some.choice([None, 1, [], {}, "x" * 65, "off", "-1%"])}).encode()  # fmt: skip
    if sort == 2:
        return b"[" * some.randrange(3000)
    if sort == 3:
        return json.dumps({"command": "status", "extra": some.random()}).encode()
    if sort == 4:
        line = bytearray(b'{"command":"status"}')
        line[some.randrange(len(line))] = some.randrange(1, 256)
        return bytes(line).replace(b"\n", b" ")
    return json.dumps(some.choice([None, 1, "status", ["status"], {"command": ["status"]}, 1e300])).encode()


def test_a_line_that_is_too_long_is_refused(listening):
    """However it comes, and the next line of the same client has its answer."""
    connection = connect(listening)
    reply = say(connection, b"x" * (2 * MOST_REQUEST_BYTES))
    assert f"at most {MOST_REQUEST_BYTES} bytes" in (reply.error or "")
    connection.close()
    assert client.ask(listening.path, Request(command="status"))["canaries"]


def test_clients_that_hang_keep_nobody_waiting(listening, guarded, monkeypatch):
    """One that sends half a line, one that never takes its answers, and as many as there may be: they are cut off, and
    the engine and others never wait for them."""
    monkeypatch.setattr(server, "PATIENCE_S", 0.5)
    hanging = [connect(listening) for _ in range(MOST_CLIENTS)]
    hanging[0].sendall(b'{"comm')
    hanging[1].setblocking(False)
    try:
        while True:
            hanging[1].send(b'{"command":"dump"}\n' * 50)
    except BlockingIOError:
        pass
    began = time.monotonic()
    guarded.decode()
    assert time.monotonic() - began < 5
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            assert client.ask(listening.path, Request(command="status"))["canaries"][0]["forwards"] == 2
            break
        except ControlError:
            time.sleep(0.2)
    else:
        pytest.fail("nobody else was served")
    for connection in hanging:
        connection.close()


def test_two_processes_do_not_share_a_socket(listening):
    """The second one is told so; the first one answers as before."""
    with pytest.raises(ControlError, match=r"another process listens at .*CANARY_CONTROL_DIR"):
        Server(listening.path, lambda request: Reply())
    assert client.ask(listening.path, Request(command="status"))["canaries"]


def test_a_socket_left_behind_is_taken_over(folder):
    """Of a process that was killed."""
    path = folder / "1.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    made = Server(path, lambda request: Reply(result={"who": "new"}))
    assert client.ask(path, Request(command="status")) == {"who": "new"}
    made.close()
    assert not path.exists()


def test_sockets_of_the_dead_are_swept(listening, folder):
    """By the next process that opens one; not what lives, what is new, or what is no socket."""
    for name in ("2", "3"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / f"{name}.sock"))
    folder.joinpath("4.sock").write_text("mine")
    for name in ("1", "2", "4"):
        os.utime(folder / f"{name}.sock", (0, 0))
    made = Server(folder / "5.sock", lambda request: Reply())
    assert sorted(path.stem for path in folder.glob("*.sock")) == ["1", "3", "4", "5"]
    made.close()
    assert client.ask(listening.path, Request(command="status"))["canaries"]


@pytest.mark.parametrize("trouble", ["a file", "a link", "too long", "no folder", "anybody's folder"])
def test_where_no_socket_can_be_it_is_one_sentence(trouble, folder):
    """Nothing that was there is touched."""
    path = folder / "1.sock"
    if trouble == "a file":
        path.write_text("mine")
    elif trouble == "a link":
        folder.joinpath("other").write_text("mine")
        path.symlink_to(folder / "other")
    elif trouble == "too long":
        path = folder / ("x" * 120)
    elif trouble == "no folder":
        folder.joinpath("file").write_text("")
        path = folder / "file" / "1.sock"
    else:
        folder.chmod(0o777)
    with pytest.raises(ControlError, match="CANARY_CONTROL_DIR"):
        Server(path, lambda request: Reply())
    if trouble in ("a file", "a link"):
        assert path.read_text() == "mine"


def test_nobody_there_is_one_sentence(folder):
    """Whoever asks is told what to set."""
    with pytest.raises(ControlError, match="CANARY_PLUGINS"):
        client.found(folder)
    with pytest.raises(ControlError, match="process 7 listens"):
        client.found(folder, pid=7)


ENGINE = """
import os, sys, time
from support.guarded import Guarded
guarded = Guarded(control="write")
(event,) = guarded.findings.told("control")
print(event.fields["socket"], event.fields["allows"], flush=True)
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    print(os.path.exists(event.fields["socket"]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_guarded_process_opens_one_and_takes_it_away(how, folder):
    """By itself, with its pid for a name; a forked child's end does not take its parent's away."""
    paths = os.pathsep.join(map(str, [Path(__file__).parents[1], Path(canary_core.__file__).parents[1]]))
    environment = {**os.environ, "CANARY_CONTROL_DIR": str(folder), "PYTHONPATH": paths}
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, how],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert engine.stdout is not None
        path = folder / f"{engine.pid}.sock"
        assert engine.stdout.readline() == f"{path} write\n"
        if how == "fork":
            assert engine.stdout.readline() == "True\n"
        assert client.ask(path, Request(command="status"))["pid"] == engine.pid
    finally:
        engine.communicate(timeout=60)
    assert not path.exists()


def test_only_a_folder_of_its_own_user_is_asked(folder, listening, monkeypatch):
    """Whoever else can make a socket there could answer in the engine's place: others may write, it is a link, or it
    belongs to somebody else."""
    folder.chmod(0o777)
    with pytest.raises(ControlError, match="does not belong to this user"):
        client.found(folder)
    folder.chmod(0o700)
    assert client.found(folder) == [listening.path]
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(ControlError, match="does not belong to this user"):
        client.found(link)
    monkeypatch.setattr(server.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ControlError, match="does not belong to this user"):
        client.found(folder)


def test_an_answer_moves_no_cursor(folder):
    """Texts of the answer are printed by whoever asked."""
    answers = [Reply(result={"model": "a\x1b[2J\u202e", "canaries": [{"x\n": "y\r"}]}), Reply(error="no\x1b[2J")]
    made = Server(folder / "1.sock", lambda request: answers.pop(0))
    try:
        told = client.ask(made.path, Request(command="status"))
        assert told == {"model": "a\\x1b[2J\\u202e", "canaries": [{"x\\n": "y\\r"}]}
        with pytest.raises(ControlError, match=r"no.x1b") as refused:
            client.ask(made.path, Request(command="status"))
        assert str(refused.value).isprintable()
    finally:
        made.close()


def test_without_files_left_it_waits_between_two_tries(folder, monkeypatch):
    """The connection stays in the queue and would be offered again at once, so that the thread would take a core."""
    waits, accept = [], socket.socket.accept

    def poor(listener):
        if len(waits) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", poor)
    monkeypatch.setattr(server.time, "sleep", waits.append)
    made = Server(folder / "1.sock", lambda request: Reply(result={"well": True}))
    try:
        assert client.ask(made.path, Request(command="status")) == {"well": True}
        assert waits == [server.AGAIN_S] * 3
    finally:
        made.close()


PARENT = """
import os, signal, sys
from pathlib import Path
from canary_desk.control.messages import Reply
from canary_desk.control.server import Server
from canary_desk.metrics import prometheus
from canary_desk.metrics.readings import Readings
server = Server(Path(sys.argv[1]), lambda request: Reply(result={"pid": os.getpid()}))
metrics = prometheus.listen(Readings(), "127.0.0.1", 0)
port = metrics.server_address[1]
if os.fork() == 0:
    print(port, flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


def test_a_child_that_outlives_its_parent_holds_nothing_of_it(folder):
    """Neither the socket, where whoever connects would wait for an answer of nobody, nor the port of the metrics. The
    parent has both until it ends."""
    path = folder / "1.sock"
    paths = str(Path(canary_core.__file__).parents[1])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(path)],
        env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        assert client.ask(path, Request(command="status"))["pid"] == parent.pid
        # The child alone reads the pipe: a line for the parent might be the child's.
        parent.kill()
        parent.wait(60)
        with pytest.raises(ControlError, match="nobody answers"):
            client.ask(path, Request(command="status"))
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
    finally:
        parent.communicate(timeout=60)
