"""``canary fleet``: bundles of many engines, and as many groups as there are causes."""

import http.server
import json
import random
import threading

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine
from typer.testing import CliRunner

from canary_core import Kind, Violation
from canary_core.records import Phase
from canary_desk.cli.app import app
from canary_desk.fleet.groups import groups
from canary_desk.fleet.sightings import of_bundles
from canary_desk.incidents import bundle_writer

ENGINES, LAYERS = 24, 6


class Fleet:
    """Simulated engines, each on a machine and a GPU of its own; two thirds run the newer release."""

    def __init__(self, folder, monkeypatch) -> None:
        self.folder = folder
        self.random = random.Random(4)
        self._patch = monkeypatch

    def engine(self, number: int) -> Guarded:
        """Engine ``number``, begun anew."""
        self._patch.setattr("canary_core.place.socket.gethostname", lambda: f"node-{number}")
        self._patch.setattr("canary_core.place._gpu", lambda device: (f"GPU-{number:02}", f"0000:{number:02}:00.0"))
        release = "0.33.0" if number % 3 else "0.32.0"
        self._patch.setattr(bundle_writer, "versions", lambda: {"vllm": release})
        folder = self.folder / f"engine-{number}"
        return Guarded(
            ToyEngine(slots=24, layers=LAYERS),
            read_check=-1,
            scrub_budget="0",
            incident_dir=str(folder),
            incident_most=500,
            replica=number,
        )

    def flip(self, requests: int = 1) -> None:
        """GPU 7 flips a bit of each of so many requests, somewhere."""
        guarded = self.engine(7)
        running = [guarded.submit(f"r{self.random.randrange(10**6)}", 6) for _ in range(requests)]
        guarded.step(5)
        for request in running:
            tensor = self.random.choice([*guarded.engine.k, *guarded.engine.v]).view(torch.int32)
            tensor[request.slots[self.random.randrange(5)], self.random.randrange(12)] ^= 1 << self.random.randrange(30)
        guarded.step(1)
        guarded.canary.close()

    def lose(self, number: int) -> None:
        """The newer release does not store V of layer 5 at times, on any of its engines."""
        newer = [n for n in range(ENGINES) if n % 3]
        guarded = self.engine(newer[number % len(newer)])
        guarded.submit("a", 9)
        guarded.step(6)
        kept, forward = guarded.engine.v[5].clone(), guarded.engine.forward

        def loses(batch):
            forward(batch)
            guarded.engine.v[5].copy_(kept)

        guarded.engine.forward = loses
        guarded.step(3)
        guarded.canary.close()

    def load(self, number: int) -> None:
        """A store brings other KV than was kept, to four requests of any engine."""
        guarded = self.engine(number % ENGINES)
        for place in range(4):
            wrong = Violation(
                Kind.ARRIVAL, "full", Phase.EVENT, 100 * place, slot=1 + 5 * place, position=0, request=f"r{place}",
                stored_value=1, found_value=self.random.getrandbits(60), origin="HiCacheFile", sources=("k.0",),
            )  # fmt: skip
            guarded.canary.report([wrong])
        guarded.canary.close()


def test_three_causes_are_three_groups(tmp_path, monkeypatch):
    """200 bundles of 24 engines: a GPU, a layer of a release, and a store, each with its verdict and its numbers."""
    fleet = Fleet(tmp_path, monkeypatch)
    for number in range(24):
        fleet.flip(3)
        fleet.load(number)
    for number in range(32):
        fleet.lose(number)
    found, wrong = of_bundles([tmp_path])
    assert (len(found), wrong) == (200, [])
    by_kind = {group.name.split(",")[0]: group for group in groups(found)}
    assert len(groups(found)) == len(by_kind) == 3
    flips, losses, loads = by_kind["bytes"], by_kind["lost_write"], by_kind["arrival"]
    assert (flips.count, losses.count, loads.count) == (72, 32, 96)
    assert flips.common["GPU"] == ("GPU-07", 1.0)
    assert "one GPU again and again, in any layer" in flips.verdict
    assert losses.common["layer"][0] == "5"
    assert losses.verdict == "the same layer on 16 GPUs, with vllm 0.33.0 only: look at that release"
    assert loads.common["peer or store"][0] == "HiCacheFile"
    assert "what HiCacheFile brings is wrong" in loads.verdict
    html = tmp_path / "fleet.html"
    told = CliRunner().invoke(app, ["fleet", str(tmp_path), "--html", str(html)], env={"COLUMNS": "80"})
    assert told.exit_code == 0
    assert "200 incidents on 24 engines: 3 causes" in told.output
    assert max(map(len, told.output.splitlines())) <= max(80, len(str(html)) + 15)
    assert "GPU-07 (all)" in html.read_text()


def test_what_cannot_be_read_is_told_and_self_tests_are_left_out(tmp_path, monkeypatch):
    """The rest is grouped all the same; nothing at all is exit code 2."""
    fleet = Fleet(tmp_path, monkeypatch)
    fleet.flip()
    (tmp_path / "engine-7" / "incident-broken").mkdir()
    guarded = Guarded(ToyEngine(), read_check=-1, incident_dir=str(tmp_path / "test"), faults="real_kv_used:warmup=1")
    guarded.submit("a", 12)
    for _ in range(3):
        guarded.step(4)
    guarded.canary.close()
    told = CliRunner().invoke(app, ["fleet", str(tmp_path)], env={"COLUMNS": "200"})
    assert "1 incident on " in told.output
    assert "of self-tests left out" in told.output
    assert "incident-broken" in told.output
    for arguments in ([], [str(tmp_path / "none")], ["--prometheus", "file:///etc/passwd"]):
        assert CliRunner().invoke(app, ["fleet", *arguments]).exit_code == 2


@pytest.fixture
def server():
    """A server that answers as Prometheus does."""
    own = {"instance": "a:8000", "job": "j", "replica": "0", "rank": "1", "model": ""}
    answers = {
        "kv_canary_info": [{"metric": {**own, "host": "n7", "gpu": "GPU-1f", "version": "0.1"}, "value": [0, "1"]}],
        "kv_canary_self_test == 1": [],
        "kv_canary_incidents_total > 0": [{"metric": {**own, "kind": "bytes", "region": "full"}, "value": [0, "5"]}],
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            query = __import__("urllib.parse", fromlist=["x"]).parse_qs(self.path.partition("?")[2])["query"][0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"status": "success", "data": {"result": answers[query]}}).encode())

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


def test_prometheus_is_asked_by_machine_and_gpu(server):
    """Where there are no bundles: kinds, machines and numbers."""
    told = CliRunner().invoke(app, ["fleet", "--prometheus", server], env={"COLUMNS": "80"})
    assert told.exit_code == 0
    assert "5 x bytes" in told.output
    assert "GPU-1f (all)" in told.output
