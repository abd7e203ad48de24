"""SGLang's own ``--kv-canary`` and canary-sglang in one engine, on the same bits: ``beside_builtin.py [CELL ...]``.

Prints a JSON line for each thing that was tried: what was broken, how many findings each of the two had since, and
whether ours say what it was (``exact``). A cell is ``WHAT:SETUP``: a key of `CELLS`, and one of the tests' engines;
without any, `ON_CPU`. The built-in has all of it switched on: real data ``all``, a sweep at each step, tokens
against the requests' own, and V; the last two are off by default and in ``default``.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines.process import EngineProcess
from engines.setups import SETUPS, SPECULATIVE, TRITON, Setup

BUILT_IN = {"kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 1}
BEST = {"SGLANG_KV_CANARY_ENABLE_MHA_V": "1", "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1"}
PERTURB = "SGLANG_KV_CANARY_PERTURB_"
WARMUP = 10
"""Forwards before the built-in's own faults begin."""

OF_BYTES = ("real_kv_used", "real_kv_unused_cache", "real_kv_post_forward", "lost_write", "stray_write", "swap_pages")
FAULTS = ("req_to_token", *OF_BYTES, "next_token_swap")
PERTURBATIONS = ("req_to_token", "real_kv_used", "real_kv_unused_cache", "real_kv_post_forward")
MISUSES = ("double_free", "free_in_use", "hand_out_held")
CACHE_FAULTS = ("swap", "twice", "free", "lock", "key", "parent", "sizes", "unmap", "remap")
PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}

Row = dict[str, Any]
Start = Callable[..., EngineProcess]


def with_builtin(setup: Setup, best: bool = True, **options: Any) -> Setup:
    """The setup with SGLang's own canary beside ours; ``best``: with what is off by default, too."""
    environment = {**setup.environment, **(BEST if best else {})}
    if setup.options.get("device") != "cuda":
        environment |= {**TRITON, "CANARY_BACKEND": "torch"}
    return replace(setup, options={**setup.options, **BUILT_IN, **options}, environment=environment)


def flips(start: Start, best: bool = True) -> Iterator[Row]:
    """Clean traffic, then one bit of what a running request is about to read, in each source of each region."""
    engine = start(best=best)
    yield {"what": "clean", **both(engine.beside(method="serve", **traffic(engine, 0))), "ours": len(found(engine))}
    engine.flush()
    seed = 0
    for region, about in engine.regions().items():
        for source in about["sources"]:
            seed += 1
            prompt = engine.setup.traffic(seed, 2)[0]
            told = engine.beside(method="flip_running", prompt=prompt, region=region, source=source, seed=seed)
            ours = [(v["kind"], v["region"], v["slot"], v["source"]) for v in told["done"]["violations"]]
            yield {
                "what": "flip",
                "region": region,
                "source": source,
                **both(told),
                "ours": len(ours),
                "exact": ours == [("bytes", region, told["done"]["slot"], source)],
            }


def faults(start: Start) -> Iterator[Row]:
    """Our own faults in each region; those of bytes in the K that the built-in reads, and in the last V."""
    engine = start()
    aims = [(name, source) for name in FAULTS for source in ("first", "last" if name in OF_BYTES else "first")]
    regions = {name: about["sources"] for name, about in engine.regions().items() if name in engine.setup.served}
    for region, sources in regions.items():
        ends = {"first": next(s for s in sources if s[0] == "k"), "last": sources[-1]}
        for seed, (name, end) in enumerate(dict.fromkeys(aims)):
            engine.flush()
            aim = f",source={ends[end]}" if name in OF_BYTES else ""
            text = f"{name}:warmup=3,region={region}{aim}"
            told = engine.beside(method="inject", text=text, **traffic(engine, seed))
            done = told["done"]
            yield {"what": text, **both(told), "ours": len(done["violations"]), "exact": done["explained"] == [True],
                   "rewritten": done["rewritten"]}  # fmt: skip


def perturbations(start: Start) -> Iterator[Row]:
    """The built-in's own faults, at every step from a certain one on; each in an engine of its own."""
    for name in PERTURBATIONS:
        aim = {f"{PERTURB}TARGET_GROUP": "full"} if name.startswith("real_kv") else {}
        yield perturb(start, name, aim)


def stores(start: Start) -> Iterator[Row]:
    """The built-in's fault that comes between a layer's store and our record, where we look at stores, too; and the
    same clean."""
    looks = {"CANARY_STORE_CHECK": "true"}
    engine = start(canary=looks)
    yield {"what": "clean", **both(engine.beside(method="serve", **traffic(engine, 0))), "ours": len(found(engine))}
    aim = {f"{PERTURB}TARGET_GROUP": "full"}
    yield perturb(start, "real_kv_post_forward", aim, canary=looks)


def oracle(start: Start) -> Iterator[Row]:
    """The built-in's swapped tokens, which it looks for in a test mode only: its sampler says tokens that are known
    beforehand. Not on a CPU, where SGLang chooses the sampler itself."""
    mode = {"SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE": "1", "SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT": "1"}
    yield perturb(start, "next_token_swap", mode, sampling_backend="token_oracle")


def perturb(start: Start, name: str, environment: dict[str, str], **options: Any) -> Row:
    """One of the built-in's faults, in an engine with these options."""
    fault = {f"{PERTURB}{name.upper()}_PROB": "1", f"{PERTURB}WARMUP_STEPS": str(WARMUP)}
    engine = start(environment={**fault, **environment}, **options)
    told: Row = {"built_in": None}
    crashed = None
    try:
        told = engine.beside(method="serve", **traffic(engine, 1))
    except RuntimeError as error:
        crashed = str(error).splitlines()[0]
    kinds = sorted({v["kind"] for v in found(engine)})
    return {"what": f"built-in's {name}", **both(told), "ours": kinds, "crashed": crashed}


def misuses(start: Start) -> Iterator[Row]:
    """The engine's own allocator is misused; each in an engine of its own."""
    for what in MISUSES:
        engine = start()
        # A page that never was handed out can't be freed again.
        engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=2)
        told = engine.beside(method="misuse", what=what, prompts=engine.setup.traffic(1, 4)[2:])
        kinds = sorted({v["kind"] for v in told["done"]["violations"]})
        row = {"what": what, **both(told), "ours": kinds}
        try:
            # By then others write to the slots.
            prompts = [engine.setup.traffic(seed, 2)[0] for seed in range(2, 9)]
            row["built_in_later"] = engine.beside(method="serve", prompts=prompts, new_tokens=2)["built_in"]
        except RuntimeError as error:
            row["later"] = str(error).splitlines()[0]
        yield row


def sweeps(start: Start) -> Iterator[Row]:
    """What is broken in the prefix cache, swept by both while nothing runs."""
    environment = {**PYTHON_CORE, "TORCHDYNAMO_DISABLE": "1"}
    engine = start(environment=environment, canary={"CANARY_SWEEP_INTERVAL": "1"})
    engine.serve(**traffic(engine, 0))
    yield {"what": "clean", **both(engine.beside(method="sweep")), "ours": len(found(engine))}
    for how in CACHE_FAULTS:
        which = "passed" if how == "remap" else "any"
        try:
            told = engine.beside(method="break_cache", how=how, which=which)
        except RuntimeError as error:
            yield {"what": how, "error": str(error).splitlines()[0]}
            continue
        ours = sorted({v.get("rule") or v["kind"] for v in told["done"]["violations"]})
        yield {"what": how, **both(told), "ours": ours}


def reloads(start: Start) -> Iterator[Row]:
    """KV that was evicted to host memory comes back: as it was, and with a flipped bit."""
    engine = start(canary={"CANARY_READ_CHECK": "0"})
    turns = [[[3 + (seed * 97 + 31 * i + j * j) % 240 for j in range(40)] for i in range(8)] for seed in range(1, 5)]
    told = [engine.beside(method="serve", prompts=turns[n], new_tokens=4) for n in (0, 1, 0, 1)]
    yield {"what": "clean reload", "built_in": sum(t["built_in"] for t in told), "ours": len(found(engine)),
           "loaded": engine.arrivals()["loaded_slots"]}  # fmt: skip
    for seed, source in enumerate(("k.0", "v.1")):
        for n in (2, 3):
            engine.serve(prompts=turns[n], new_tokens=2)
        engine.flip_in_host_memory(source=source, seed=seed)
        told = [engine.beside(method="serve", prompts=turns[n], new_tokens=2) for n in (2, 3, 0, 1) * 2]
        ours = {(v["kind"], v["source"]) for v in found(engine)}
        yield {"what": f"flip of {source} in host memory", "built_in": sum(t["built_in"] for t in told),
               "ours": len(ours), "exact": ours == {("bytes", source)}}  # fmt: skip
        engine.flush()


def raises(start: Start) -> Iterator[Row]:
    """What the built-in does about a finding where it does something."""
    engine = start(kv_canary="raise")
    region, source = engine.setup.regions[0], "k.0"
    try:
        engine.flip_running(prompt=engine.setup.traffic(1, 2)[0], region=region, source=source, seed=1)
        yield {"what": "raise", "built_in": "goes on"}
    except RuntimeError as error:
        yield {"what": "raise", "built_in": str(error).splitlines()[0]}


def default(start: Start) -> Iterator[Row]:
    """`flips` with the built-in's V and tokens off."""
    return flips(start, best=False)


CELLS: dict[str, Callable[[Start], Iterator[Row]]] = {
    function.__name__: function
    for function in (flips, default, faults, perturbations, stores, oracle, misuses, sweeps, reloads, raises)
}
ON_CPU = (
    *("default:mha", "flips:mha", "flips:fp8", "flips:pages", "flips:swa", "flips:mla", "flips:deepseek_v4"),
    *("flips:eagle", "flips:radix_off", "flips:pressure", "flips:short_conv", "faults:mha", "faults:swa"),
    *("perturbations:mha", "stores:mha", "misuses:mha", "sweeps:mha", "sweeps:swa", "reloads:hicache", "raises:mha"),
)


def traffic(engine: EngineProcess, seed: int) -> dict[str, Any]:
    """Arguments of ``serve``."""
    return {"prompts": engine.setup.traffic(seed), "new_tokens": engine.setup.new_tokens}


def found(engine: EngineProcess) -> list[dict[str, Any]]:
    """Ours, since the last call."""
    return list(engine.findings()["violations"])


def both(told: dict[str, Any]) -> dict[str, Any]:
    """The built-in's part of a row."""
    return {"built_in": told["built_in"]}


def run(cell: str, setups: dict[str, Setup], settings: dict[str, str]) -> Iterator[Row]:
    """A cell's rows, with our ``settings``; an engine that does not start says why."""
    what, _, name = cell.partition(":")
    engines: list[EngineProcess] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(
            best: bool = True,
            environment: dict[str, str] | None = None,
            canary: dict[str, str] | None = None,
            **options: Any,
        ) -> EngineProcess:
            setup = with_builtin(setups[name], best, **options)
            setup = replace(setup, environment={**setup.environment, **(environment or {})})
            place = Path(tempfile.mkdtemp(dir=folder))
            while engines:
                engines.pop().close()
            engines.append(EngineProcess(setup, place, **{**settings, **(canary or {})}))
            return engines[-1]

        try:
            yield from CELLS[what](start)
        except RuntimeError as error:
            reason = [line for line in str(error).splitlines() if "Error" in line]
            yield {"refused": reason[-1] if reason else str(error)[-300:]}
        finally:
            for engine in engines:
                engine.close()


def main() -> None:
    """Prints the rows."""
    for cell in sys.argv[1:] or ON_CPU:
        for row in run(cell, {**SETUPS, **SPECULATIVE}, {}):
            sys.stdout.write(json.dumps({"sglang": version("sglang"), "cell": cell, **row}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
