"""Notifications: who is told, signed, again where it failed, and never at the engine's cost."""

import hashlib
import hmac
import http.server
import json
import sys
import threading
import time

import pytest
from support.flipped import flipped

from canary_core import CanaryConfig
from canary_core.errors import ConfigError
from canary_desk.notify import sender
from canary_desk.notify.sender import MOST_WAITING, Sender, Target

KEY = b"sixteen bytes or more"


@pytest.fixture
def receiver():
    """A server of this machine that answers with the next of ``codes``; ``got``: heads and bodies."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            server.got.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(server.codes.pop(0) if server.codes else 204)
            self.send_header("Location", f"{server.address}/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.codes, server.address = [], [], f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def is_signed(head: dict, body: bytes) -> bool:
    """As a receiver would check it."""
    made = hmac.new(KEY, f"{head['X-Canary-Timestamp']}.".encode() + body, hashlib.sha256).hexdigest()
    return head["X-Canary-Signature"] == f"sha256={made}"


def test_an_incident_is_posted_and_signed(receiver, tmp_path):
    """One message an incident, with verdict, signature and place, without tokens."""
    key = tmp_path / "key"
    key.write_bytes(KEY + b"\n")
    flipped(notify=receiver.address, notify_key_file=str(key), replica=3)
    ((head, body),) = receiver.got
    told = json.loads(body)
    assert (told["event"], told["diagnosis"], told["replica"]) == ("diagnosis", "flipped_bit", 3)
    assert told["signature"] == "bytes:flipped_bit:1:bit:-"
    assert "explanation" not in told
    assert is_signed(head, body)


def test_a_program_gets_it_on_its_standard_input(tmp_path):
    """Head, an empty line, body; no shell reads the command."""
    file = tmp_path / "got; touch x"
    flipped(notify=f"exec:{sys.executable} -c \"import sys; open(sys.argv[1], 'w').write(sys.stdin.read())\" '{file}'")
    head, _, body = file.read_text().partition("\n\n")
    assert head.startswith("X-Canary-Timestamp: ")
    assert json.loads(body)["diagnosis"] == "flipped_bit"


def test_a_suppressed_incident_notifies_nobody(receiver, tmp_path):
    """It is told in the log."""
    known = tmp_path / "known"
    known.write_text("bytes:flipped_bit:*")
    flipped(notify=receiver.address, suppressions=str(known))
    assert receiver.got == []


def test_a_failing_receiver_is_tried_again(receiver, monkeypatch):
    """Until it takes the message; a redirection is a failure, so that nothing goes elsewhere."""
    receiver.codes = [503, 307]
    failed = []
    sent = Sender(Target(url=receiver.address), lambda *why: failed.append(why), first_pause_s=0.01)
    sent.send({"event": "x"})
    sent.finish(10)
    assert (sent.sent, sent.lost, len(receiver.got), failed) == (1, 0, 3, [])


def test_what_cannot_be_delivered_is_told_and_not_waited_for(monkeypatch):
    """After the last try, with the reason; the engine's thread waits for nothing, whoever the receiver is."""
    monkeypatch.setattr(sender, "FIRST_PAUSE_S", 0.0)
    findings = flipped(notify="exec:/nonexistent/program")
    (event,) = findings.told("notify_failed")
    assert "FileNotFoundError" in event.fields["reason"]
    assert event.fields["lost"] == 1


def test_a_receiver_that_hangs_holds_nothing_up():
    """A full queue loses messages and counts them; sending takes no time."""
    held = threading.Event()

    class Hangs(Target):
        def deliver(self, body):
            held.wait(20)

    sent = Sender(Hangs(), lambda *_: None)
    began = time.monotonic()
    for number in range(MOST_WAITING + 40):
        sent.send({"event": number})
    assert time.monotonic() - began < 2
    assert 38 <= sent.lost <= 40
    held.set()
    sent.finish(10)
    assert sent.sent == MOST_WAITING + 40 - sent.lost


def test_a_key_that_cannot_be_read_sends_nothing(receiver, tmp_path):
    """Nor does one too short: whoever relies on the signature must not get messages without."""
    short = tmp_path / "short"
    short.write_bytes(b"short")
    for file in (short, tmp_path / "missing"):
        findings = flipped(notify=receiver.address, notify_key_file=str(file))
        assert "CANARY_NOTIFY_KEY_FILE" in findings.told("notify_failed")[0].fields["reason"]
    assert receiver.got == []


@pytest.mark.parametrize(
    "text", ["slack", "http://example.org/x", "file:///etc/passwd", "exec:", "http://127.0.0.1.evil/"]
)
def test_another_target_is_refused(text):
    """Without a secret that an address may hold in the sentence."""
    with pytest.raises(ConfigError, match="CANARY_NOTIFY must be"):
        CanaryConfig.load(notify=text)
