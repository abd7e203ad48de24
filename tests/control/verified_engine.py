"""A guarded toy engine in a process of its own, whose loop turns until its input says otherwise: ``stop`` (the loop
stands still), ``go``, ``close`` (its Canary), ``break`` (wrong KV in request "b"), anything else: it ends.

    python verified_engine.py CONTROL RECOMPUTER
"""

import queue
import sys
import threading
import time

from support.guarded import Guarded
from support.recomputed import ToyRecomputer
from support.toy import ToyEngine

from canary_core import Recompute


def main() -> None:
    """Requests "a" and "b" run; the noise is known."""
    guarded = Guarded(ToyEngine(slots=512), control=sys.argv[1], bytes="off", read_check=0)
    recompute = Recompute(guarded.canary, ToyRecomputer(guarded.engine)) if sys.argv[2] == "able" else None
    for turn in range(4):
        guarded.submit(f"fresh {turn}", tokens=64)
        guarded.step(chunk=64)
        if recompute is not None:
            recompute.now()
        guarded.engine.finish(guarded.engine.requests[0])
    guarded.submit("a", tokens=40)
    guarded.submit("b", tokens=48)
    guarded.step(chunk=64)
    told: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            told.put(line.strip())
        told.put("")

    threading.Thread(target=listen, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    turns = True
    while True:
        if turns and recompute is not None:
            recompute.serve()
        time.sleep(0.005)
        if told.empty():
            continue
        said = told.get()
        if said in ("stop", "go"):
            turns = said == "go"
        elif said == "break":
            guarded.engine.k[1][guarded.engine.requests[1].slots] *= 1.5
        elif said == "close":
            guarded.canary.close()
        else:
            return
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
