"""HiCache on a real SGLang engine, with its processes and the overlap scheduler: clean, then a bit flipped on the host.

    python3 hicache.py [--device cuda|cpu] [--storage]

One JSON line for each case, as `pd.py` prints them. Prompts are served in turns that together are more than the
device's pool holds and less than the host's, so that each turn loads what the one before evicted. With ``--storage``
they are more than the host's holds, too, and come back from files; the bit is flipped in one of these.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pd

ENGINES = {
    "cuda": dict(
        pd.ENGINES["cuda"], page_size=64, hicache_io_backend="kernel", hicache_ratio=3.0, max_total_tokens=2048
    ),
    "cpu": dict(pd.ENGINES["cpu"], hicache_io_backend="direct", hicache_ratio=3.0, max_total_tokens=1024),
}
PROMPT_TOKENS = {"cuda": 330, "cpu": 160}
CASES = ("clean", "clean", "flip_host k.1", "flip_host v.3", "clean")
STORED_CASES = ("clean", "clean", "flip_file k.1", "flip_file v.3", "clean")
LAYERS = pd.BASE["num_hidden_layers"]
STORAGE = dict(
    hicache_ratio=1.2, hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete",
    hicache_storage_backend_extra_config='{"prefetch_threshold": 32}',
)  # fmt: skip
FILES = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""SGLang's own variable for where the files are."""


def run(options: argparse.Namespace) -> bool:
    """All cases; whether each is as it must be."""
    folder = Path(tempfile.mkdtemp(prefix="canary-hicache-"))
    pd.write_witness(folder)
    pd.write_model(folder, options)
    folder.joinpath("control").write_text("start clean")
    os.environ.pop(FILES, None)
    if options.storage:
        os.environ[FILES] = str(folder / "store")
    signal.signal(signal.SIGALRM, pd.late)
    side = pd.Side("hicache", options, folder, (0, pd.free_port()))
    good = True
    try:
        started = time.monotonic()
        side.answer(pd.PATIENCE_S[options.device][0])
        pd.say({"case": "up", "seconds": round(time.monotonic() - started)})
        known: set[int] = set()
        outputs = None
        for number, case in enumerate(STORED_CASES if options.storage else CASES):
            folder.joinpath("control").write_text(f"{number} {case}")
            with flipped_file(folder, case):
                side.ask({"turns": 4, "count": 5, "tokens": PROMPT_TOKENS[options.device]})
                answer = side.answer(2 * pd.PATIENCE_S[options.device][1])
            outputs = outputs or answer["outputs"]
            time.sleep(2)
            told = [x for x in pd.lines(folder, "hicache") if x["case"] == str(number)]
            # A flip stays where it is, and is found again whenever it is loaded.
            found = [x["violation"] for x in told if "violation" in x and x["violation"]["found_value"] not in known]
            known |= {v["found_value"] for v in found}
            right = judge(case, found, told, answer["outputs"] == outputs)
            pd.say({"case": case, "good": right, "cached": answer["cached"], "found": found[:2], "findings": len(found),
                    "broken": [x for x in told if "broken" in x]})  # fmt: skip
            good = good and right
        for line in pd.lines(folder, "hicache"):
            if line.get("event") in (*pd.TOLD, "stats", "coverage"):
                pd.say(line)
                good = good and line["event"] not in pd.BAD
    except Exception as error:
        pd.say({"case": "failed", "error": repr(error), "log": side.log[-3000:]})
        good = False
    finally:
        side.kill()
    return good


def judge(case: str, found: list[dict[str, Any]], told: list[dict[str, Any]], same_outputs: bool) -> bool:
    """Whether a case is as it must be."""
    if case == "clean":
        return not found
    how, source = case.split()
    half, layer = source.split(".")
    kind = "arrival" if how == "flip_file" else "bytes"
    broken = how == "flip_file" or any("broken" in x for x in told)
    return broken and {(v["kind"], v["layer"], v["half"]) for v in found} == {(kind, int(layer), half)}


@contextlib.contextmanager
def flipped_file(folder: Path, case: str) -> Iterator[None]:
    """Within it, in the case ``flip_file SOURCE`` every third page's file has a flipped bit: which of them are loaded
    depends on what stayed in memory. All of a page's layers' K is before all V."""
    how, _, source = case.partition(" ")
    if how != "flip_file":
        yield
        return
    pages = sorted((folder / "store").glob("*.bin"))[int(source[-1]) % 3 :: 3]
    contents = {page: page.read_bytes() for page in pages}
    half, layer = source.split(".")
    for page, content in contents.items():
        flipped = bytearray(content)
        flipped[("kv".index(half) * LAYERS + int(layer)) * len(content) // (2 * LAYERS) + 1] ^= 1
        page.write_bytes(flipped)
    yield
    for page, content in contents.items():
        page.write_bytes(content)


def side_main(options: argparse.Namespace) -> None:
    """The engine: serves the turns that are asked for on stdin."""
    import sglang

    if options.device == "cpu":
        import host_copies

        host_copies.install()
    stored = STORAGE if FILES in os.environ else {}
    if stored:
        # Before the engine's processes start. Nobody else stores in this folder.
        os.environ["CANARY_LEDGER_PRIVATE"] = "HiCacheFile"
    engine = sglang.Engine(
        model_path=os.environ["PD_FOLDER"], load_format="dummy", skip_tokenizer_init=True, grammar_backend="none",
        log_level="warning", random_seed=1, enable_hierarchical_cache=True, hicache_write_policy="write_through",
        hicache_mem_layout="layer_first", **{**ENGINES[options.device], **stored},
    )  # fmt: skip
    pd.answer("up")
    for line in sys.stdin:
        job = json.loads(line)
        outputs, cached = [], 0
        for turn in range(job["turns"]):
            rng = random.Random(turn % 2)
            prompts = [[rng.randrange(3, 500) for _ in range(job["tokens"])] for _ in range(job["count"])]
            sampling = dict(max_new_tokens=8, temperature=0, ignore_eos=True)
            served = engine.generate(input_ids=prompts, sampling_params=sampling)
            outputs.append([o["output_ids"] for o in served])
            cached += sum(o["meta_info"].get("cached_tokens") or 0 for o in served)
        pd.answer({"outputs": outputs, "cached": cached})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=list(ENGINES), default="cuda")
    parser.add_argument("--side")
    parser.add_argument("--ports")
    parser.add_argument("--storage", action="store_true")
    parser.add_argument("--model", default="llama")
    parser.set_defaults(guard="both", stress=False, secret=False)
    given = parser.parse_args()
    if given.side:
        side_main(given)
    else:
        sys.exit(0 if run(given) else 1)
