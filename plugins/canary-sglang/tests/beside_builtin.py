"""SGLang's own ``--kv-canary`` and canary-sglang in one engine, on the same bits: ``beside_builtin.py [SETUP ...]``.

Prints one JSON line for each source of each region: which of the two found one bit that was flipped in what a running
request was about to read. The built-in has all of it switched on: real data ``all``, a sweep at each step, and V, which
is off by default and with ``SETUP:default``.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conftest import SETUPS, TRITON, EngineProcess, Setup

BUILT_IN = {"kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 1}


def with_builtin(setup: Setup, v: bool = True) -> Setup:
    """The setup with SGLang's own canary beside ours; ``v``: it looks at V, too, which is off by default."""
    environment = {**setup.environment, **TRITON, "CANARY_BACKEND": "torch"}
    if v:
        environment["SGLANG_KV_CANARY_ENABLE_MHA_V"] = "1"
    return replace(setup, options={**setup.options, **BUILT_IN}, environment=environment)


def compare(engine: EngineProcess) -> Iterator[dict[str, Any]]:
    """A row for each source: what was flipped, how many findings each of the two had, and ours in short."""
    seed = 0
    for region, about in engine.regions().items():
        for source in about["sources"]:
            seed += 1
            prompt = engine.setup.traffic(seed, 2)[0]
            done = engine.flip_running(prompt=prompt, region=region, source=source, seed=seed)
            ours = [(v["kind"], v["region"], v["slot"], v["source"]) for v in done["violations"]]
            yield {
                "region": region,
                "source": source,
                "built_in": done["built_in"],
                "ours": len(ours),
                "exact": ours == [("bytes", region, done["slot"], source)],
            }


def main() -> None:
    """Prints the rows; an engine that does not start says why."""
    for name in sys.argv[1:] or ("mha:default", "mha", "fp8", "pages", "swa", "mla", "deepseek_v4"):
        common = {"sglang": version("sglang"), "setup": name}
        setup, _, default = name.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            try:
                engine = EngineProcess(with_builtin(SETUPS[setup], v=not default), Path(folder))
            except RuntimeError as error:
                reason = [line for line in str(error).splitlines() if "Error" in line]
                sys.stdout.write(json.dumps({**common, "refused": reason[-1:]}) + "\n")
                continue
            for row in compare(engine):
                sys.stdout.write(json.dumps({**common, **row}) + "\n")
                sys.stdout.flush()
            engine.close()


if __name__ == "__main__":
    main()
