"""What of canary-sglang holds on the SGLang that is installed: ``try_version.py [SETUP ...]``.

For each setup of `engines.setups.SETUPS` one JSON line: forwards of clean traffic, slots checked, what was found in it,
flipped bits (one in each source of each region) and faults that were found as what they are, and whether outputs are
those without Canary. A short round of what the tests do in full, for releases that CI does not run.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines.process import EngineProcess
from engines.setups import SETUPS

FAULTS = ("req_to_token", "real_kv_used", "lost_write")


def main() -> None:
    """Prints the lines; ends with 1 if anything is not as it should be."""
    good = True
    for name in sys.argv[1:] or ("mha", "pages", "swa", "mla", "pressure"):
        try:
            row = try_setup(name)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[-600:]}
        good = good and row.get("ok", False)
        sys.stdout.write(json.dumps({"sglang": version("sglang"), "setup": name, **row}) + "\n")
        sys.stdout.flush()
    sys.exit(not good)


def try_setup(name: str) -> dict[str, Any]:
    """One engine, from its start to the end."""
    with tempfile.TemporaryDirectory() as folder:
        engine = EngineProcess(SETUPS[name], Path(folder))
        try:
            return _try_engine(engine)
        finally:
            engine.close()


def _try_engine(engine: EngineProcess) -> dict[str, Any]:
    setup = engine.setup
    for seed in (0, 0, 1):
        engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)
    clean = engine.findings()
    names = ("forwards", "checked_slots", "recorded_slots", "scrubbed_slots", "unknown_slots")
    row = {key: clean["stats"][key] for key in names if key in clean["stats"]}
    row["false_alarms"] = len(clean["violations"])
    row["retracted"] = engine.serve(prompts=setup.traffic(2), new_tokens=setup.new_tokens)["retracted"]
    flips = [_flip(engine, region, s) for region, about in engine.regions().items() for s in about["sources"]]
    engine.flush()
    faults = [_inject(engine, fault, region) for region in setup.regions for fault in FAULTS]
    outputs = []
    for _ in range(2):
        engine.flush()
        outputs.append(engine.serve(prompts=setup.traffic(7), new_tokens=setup.new_tokens)["outputs"])
        engine.uninstall()
    row |= {"flips": len(flips), "flips_found": sum(flips), "faults": len(faults), "faults_found": sum(faults)}
    row["same_outputs"] = outputs[0] == outputs[1]
    row["ok"] = row["false_alarms"] == 0 and all(flips) and all(faults) and row["same_outputs"]
    return row


def _flip(engine: EngineProcess, region: str, source: str) -> bool:
    slot = engine.flip_and_scrub(region=region, source=source, seed=len(source))
    half, layer = source.split(".")
    found = [(v["kind"], v["region"], v["slot"], v["layer"], v["half"]) for v in engine.findings()["violations"]]
    return found == [("bytes", region, slot, int(layer), half)]


def _inject(engine: EngineProcess, fault: str, region: str) -> bool:
    """Once more where the bytes were freed and written again before anybody looked."""
    for attempt in range(3):
        prompts = engine.setup.traffic(4 + FAULTS.index(fault) + 10 * attempt, 6)
        text = f"{fault}:warmup=3,region={region}"
        done = engine.inject(text=text, prompts=prompts, new_tokens=engine.setup.new_tokens)
        if done["explained"] == [True]:
            return True
        if done["rewritten"] != [True]:
            return False
    return False


if __name__ == "__main__":
    main()
