"""The real LMCache beside the real vLLM: its server in a process of its own, and its connector, none of it changed."""

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_on_cpu.scripts import told_by

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache is not installed; see docs/evidence.md"),
]
HOST = "localhost"


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


@pytest.fixture
def server(tmp_path):
    """``lmcache server``, with 256 MiB of memory of the host: its port, and the file that this memory is."""
    port, name = free_port(), f"canary_{os.getpid()}"
    command = [
        Path(sys.executable).with_name("lmcache"), "server", "--host", HOST, "--port", str(port),
        "--http-host", HOST, "--http-port", str(free_port()), "--chunk-size", "64", "--l1-size-gb", "0.25",
        "--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-observability", "--shm-name", name,
    ]  # fmt: skip
    memory = Path("/dev/shm", f"lmcache_l1_pool_{name}")
    log = tmp_path / "server.log"
    with log.open("w") as out:
        running = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"})
    try:
        until = time.monotonic() + 120
        while "cache server is running" not in log.read_text():
            assert running.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.2)
        yield port, memory
    finally:
        running.terminate()
        running.wait(60)
        memory.unlink(missing_ok=True)


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_lmcache_is_compared(server, mode):
    """Hundreds of blocks that LMCache stores and brings back are the same bytes, by our own comparison of vLLM's
    tensors, and Canary is silent. A bit that is flipped in LMCache's memory is told at the next reload, with connector,
    layer, half and block, and nothing else is."""
    port, memory = server
    told = told_by("lmcache_script", str(port), str(memory), mode, timeout_s=300)
    assert told["at_first"] == 0
    assert told["trouble"] == []
    assert all(told["same"])
    assert told["other"] == 0
    clean = told["clean"]
    assert clean["ledger_matched"] == clean["ledger_compared"] == told["blocks"] > 200
    assert not {"ledger_unknown", "ledger_unclear", "ledger_differing"} & {*clean}
    assert len(told["flips"]) == 4
    for one in told["flips"]:
        layer, half, position = one["flipped"]
        assert one["places"] == 1
        assert one["other"] == [[position // 32, one["layer"]]]
        assert one["found"] == [["ARRIVAL", layer, half, position, "LMCacheMPConnector"]]
