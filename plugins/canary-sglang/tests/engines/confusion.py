"""Every injury on SGLang with several seeds: ``python -m engines.confusion`` prints what was told, a JSON line each."""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from support.injuries import INJURIES, SEEDS, summed_up
from tools.injured import CANNOT

from engines.process import EngineProcess
from engines.setups import SETUPS


def main() -> None:
    """One engine for what leaves it as it was, an engine each for the rest."""
    folder = Path(tempfile.mkdtemp())
    engines = []

    def start() -> EngineProcess:
        home = folder / str(len(engines))
        home.mkdir()
        engines.append(EngineProcess(SETUPS["mha"], home, CANARY_INCIDENT_LIMIT="0"))
        return engines[-1]

    shared = start()
    for name, injury in INJURIES.items():
        for seed in SEEDS if name not in CANNOT else ():
            engine = start() if injury.alone else shared
            told = engine.injure(name=name, seed=seed, last=injury.alone)
            if injury.alone:
                engine.close()
            sys.stdout.write(json.dumps({"engine": f"SGLang {version('sglang')}", **summed_up(told)}) + "\n")
            sys.stdout.flush()
    shared.close()


if __name__ == "__main__":
    main()
