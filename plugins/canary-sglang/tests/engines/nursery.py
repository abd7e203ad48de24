"""Forks engine drivers off a process that has imported SGLang already: ``python -m engines.nursery SOCKET``.

Reads orders from the socket of that number: ``{"options": ..., "environment": ...}`` of a driver, and its stdin, stdout
and stderr; ``driver`` among the options is the module of this package whose ``main`` runs. Answers each with the
driver's process id. What modules read from the environment when they are imported is from the nursery's own.
"""

import contextlib
import importlib
import json
import os
import random
import socket
import sys

from support.interpreter import hasten


def main() -> None:
    """Forks until the socket is closed."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module("sglang.srt.managers.scheduler")
    hasten()
    while True:
        order, streams, _, _ = socket.recv_fds(orders, 1 << 18, 3)
        if not order:
            return
        # A driver's number stays its own until the next one is wanted, so that whoever asked can take hold of it.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        driver = os.fork()
        if driver == 0:
            orders.close()
            drive(json.loads(order), streams)
            return
        for stream in streams:
            os.close(stream)
        orders.send(str(driver).encode())


def drive(order: dict[str, dict[str, str]], streams: list[int]) -> None:
    """Makes this process the driver."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    # Engines take ports at random.
    random.seed()
    options = order["options"]
    driver = options.pop("driver")
    sys.argv[1:] = [json.dumps(options)]
    importlib.import_module(f"engines.{driver}").main()


if __name__ == "__main__":
    main()
