"""``lmcache server``, as it is installed, for an engine of this machine.

python -m vllm_on_cpu.lmcache_server LOG

writes its two ports and serves until stdin ends, also where whoever holds the other end was killed.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOST = "localhost"
CHUNK = 64
"""Tokens that it stores together."""
START_S = 120


@dataclass(frozen=True)
class Server:
    """``port``: for connectors. ``http_port``: of its API. ``memory``: the file in which it has what it stores."""

    port: int
    http_port: int
    memory: Path | None = None

    def clear(self) -> None:
        """Gives up all that is stored, as operators have it do."""
        with urllib.request.urlopen(f"http://{HOST}:{self.http_port}/cache/clear", data=b"", timeout=60):
            pass


@contextmanager
def serving(log: Path) -> Iterator[Server]:
    """The server, with 256 MiB of memory of the host, once it answers."""
    name = f"canary_{os.getpid()}"
    server = Server(_free_port(), _free_port(), Path("/dev/shm", f"lmcache_l1_pool_{name}"))
    command = [
        Path(sys.executable).with_name("lmcache"), "server", "--host", HOST, "--port", str(server.port),
        "--http-host", HOST, "--http-port", str(server.http_port), "--chunk-size", str(CHUNK), "--l1-size-gb", "0.25",
        "--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-observability", "--shm-name", name,
    ]  # fmt: skip
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    with log.open("w") as out:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    try:
        until = time.monotonic() + START_S
        while "cache server is running" not in log.read_text():
            if running.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"lmcache server does not start: {log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield server
    finally:
        running.terminate()
        running.wait(60)
        assert server.memory is not None
        server.memory.unlink(missing_ok=True)


def beside(log: Path) -> Server:
    """A server that ends when this process does, however it ends."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", __name__, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    if not line:
        raise RuntimeError("lmcache server does not start")
    _KEEPERS.append(keeper)
    return Server(*map(int, line.split()))


_KEEPERS: list["subprocess.Popen[str]"] = []


def main() -> None:
    """Serves until stdin ends, then takes away what the engine's connector has left in shared memory."""
    engine = os.getppid()
    with serving(Path(sys.argv[1])) as server:
        sys.stdout.write(f"{server.port} {server.http_port}\n")
        sys.stdout.flush()
        sys.stdin.read()
    for left in Path("/dev/shm").glob(f"lmcache_kv_{engine}_*"):
        left.unlink()


def _free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        port: int = one.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
