"""The driver of the museum's engines (tests/bugs): each bug runs in a fork of this process, so that whatever it breaks,
the engine is sound for the next one."""

import importlib
import json
import os
import select
import signal
import traceback
from pathlib import Path
from typing import Any

from tools.traffic import serve

from engines.driver import Engine, begin, converse

PATIENCE_S = 120
"""Most time for one bug."""


def exhibit(engine: Engine, name: str, sound: bool = False) -> dict[str, Any]:
    """What came of the bug of this name; see `bugs.museum.run`."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            museum = importlib.import_module("bugs.museum")
            stage = importlib.import_module("bugs.stages.sglang").SGLangStage(engine)
            outcome = {"outcome": museum.run(museum.bug("sglang", name), stage, sound)}
        except BaseException as error:
            traceback.print_exc()
            outcome = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(theirs, "w") as answer:
            json.dump(outcome, answer, default=str)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        ready, _, _ = select.select([answer], [], [], PATIENCE_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
        told = answer.read()
    os.waitpid(child, 0)
    if not told:
        raise RuntimeError(f"{name} took more than {PATIENCE_S} s, or ended its process")
    outcome = json.loads(told)
    if "error" in outcome:
        raise RuntimeError(f"{name}: {outcome['error']}")
    result: dict[str, Any] = outcome["outcome"]
    return result


def main() -> None:
    """Serves commands until stdin ends, after some requests: every bug finds an engine that has been in use. The option
    ``environment`` is what SGLang reads when the engine is made."""
    options, answers = begin()
    os.environ.update(options.pop("environment"))
    engine = Engine(Path(options.pop("folder")), options)
    with engine.loop():
        serve(engine, [[(7 * i + 11 * n) % 200 + 3 for i in range(20 + n)] for n in range(3)], 4)
        converse(answers, lambda do, **arguments: exhibit(engine, **arguments))


if __name__ == "__main__":
    main()
