"""PD disaggregation on a real SGLang: a prefill and a decode engine, KV over NIXL, clean and corrupted.

    python3 pd.py [--device cuda|cpu] [--model llama|swa] [--guard both|prefill|decode] [--stress]

One JSON line for each case: what was broken, what each side found, and whether that is as it must be. The exit status
says whether all are. The last two cases misuse the engines' own allocators. With ``--stress`` there are other cases:
one transfer of each fails, SGLang retracts requests every third step, and nothing may be found. With ``cpu``, tests/cpu
must be on PYTHONPATH for a stand-in of NIXL; the rest is SGLang's own.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE = dict(
    vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=10000.0,
    hidden_act="silu", bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16", tie_word_embeddings=False,
)  # fmt: skip
MODELS = {
    "llama": dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama"),
    "swa": dict(
        BASE, architectures=["Cohere2ForCausalLM"], model_type="cohere2", sliding_window=64, sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention"] * 2, layer_norm_eps=1e-5, logit_scale=1.0,
        is_hybrid_swa=True, hybrid_layer_pattern=[1, 0, 1, 0], pad_token_id=0,
    ),
}  # fmt: skip
SMALL = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16, vocab_size=512)
ENGINES = {
    "cuda": dict(
        attention_backend="triton", sampling_backend="pytorch", cuda_graph_max_bs_decode=8,
        cuda_graph_backend_prefill="disabled", mem_fraction_static=0.1, max_total_tokens=8000,
        disable_custom_all_reduce=True,
    ),
    "cpu": dict(
        device="cpu", attention_backend="torch_native", disable_cuda_graph=True, mem_fraction_static=0.7,
        max_total_tokens=1024, max_running_requests=4, swa_full_tokens_ratio=1.0, num_reserved_decode_tokens=64,
    ),
}  # fmt: skip
CASES = {
    "llama": ("clean", "clean", "corrupt full k.1", "corrupt full v.3", "truncate", "swap", "clean"),
    "swa": ("clean", "clean", "corrupt full k.1", "corrupt swa v.2", "truncate", "swap", "clean"),
}
MISUSES = ("misuse prefill", "misuse decode")
"""The engines are of no use afterwards."""
STRESS = ("stress",) * 4
STRESSED = {"SGLANG_TEST_RETRACT": "1"}
"""SGLang's own setting for tests: every third step retracts."""
PATIENCE_S = {"cuda": (400, 30, 3), "cpu": (500, 100, 8)}
"""Seconds for the engines to start, for the requests of a case, and for findings to be told after them."""


BAD = ("disabled", "start_failed", "lifetime_off")
"""Events that must not be."""
TOLD = (*BAD, "silence", "records_travel", "records_left_out")


class Side:
    """One engine in a process of its own, and those that it starts."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path, ports: tuple[int, int]) -> None:
        guarded = options.guard in ("both", name)
        site = Path(__file__).parent
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("CANARY_")},
            "PD_FOLDER": str(folder),
            "PD_SIDE": name,
            "PYTHONPATH": os.pathsep.join([str(folder), str(site), os.environ.get("PYTHONPATH", "")]),
            "CANARY_PLUGINS": "sglang,pd_witness" if guarded else "",
            # What the prefill side would find by itself is not what this is about.
            "CANARY_SCRUB_BUDGET": "0" if name == "prefill" else "64MiB",
            # What is misused on purpose mustn't end the engine.
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
            **(STRESSED if options.stress and name == "decode" else {}),
            **({"CANARY_KEY_FILE": write_secret(folder)} if options.secret else {}),
            "OMP_NUM_THREADS": "1",
            **({"TORCHDYNAMO_DISABLE": "1"} if options.device == "cpu" else {}),
        }
        self.name = name
        self._log = folder.joinpath(f"{name}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, sys.argv[0], "--side", name, "--device", options.device, "--model", options.model,
                 "--ports", f"{ports[0]},{ports[1]}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def ask(self, job: dict[str, Any]) -> None:
        """Sends a job."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def answer(self, patience_s: float) -> Any:
        """The next answer. Raises `TimeoutError`, with the end of the log."""
        signal.alarm(int(patience_s))
        try:
            for line in self._process.stdout:
                if line.startswith("ANSWER "):
                    return json.loads(line[7:])
        finally:
            signal.alarm(0)
        raise TimeoutError(f"{self.name} ended\n{self.log[-3000:]}")

    @property
    def log(self) -> str:
        """What it said."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """The engine and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


def run(options: argparse.Namespace) -> bool:
    """All cases; whether each is as it must be."""
    folder = Path(tempfile.mkdtemp(prefix="canary-pd-"))
    write_witness(folder)
    write_model(folder, options)
    folder.joinpath("control").write_text("start clean")
    signal.signal(signal.SIGALRM, late)
    bootstrap = free_port()
    sides = [Side(name, options, folder, (bootstrap, free_port())) for name in ("prefill", "decode")]
    good = True
    try:
        started = time.monotonic()
        for side in sides:
            side.answer(PATIENCE_S[options.device][0])
        say({"case": "up", "seconds": round(time.monotonic() - started)})
        cases = STRESS if options.stress else CASES[options.model] + (MISUSES if options.guard == "both" else ())
        for number, case in enumerate(cases):
            told = options.guard == "both" and case not in ("clean", "stress")
            seen = serve(sides, folder, (number, case), (bootstrap, options.device), told)
            if not judge(options, number, case, seen):
                good = False
                say({"case": case, "logs": {side.name: side.log[-3000:] for side in sides}})
        for side in sides:
            for line in lines(folder, side.name):
                if line.get("event") in TOLD:
                    say({"side": side.name, **line})
                    good = good and line["event"] not in BAD
        if options.stress:
            retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", sides[1].log)))
            say({"case": "stress", "good": retracted > 0, "retracted": retracted})
            good = good and retracted > 0
    except Exception as error:
        say({"case": "failed", "error": repr(error), "logs": {side.name: side.log[-3000:] for side in sides}})
        good = False
    finally:
        for side in sides:
            side.kill()
    return good


def serve(
    sides: list[Side], folder: Path, numbered: tuple[int, str], place: tuple[int, str], expected: bool
) -> dict[str, Any]:
    """Requests to both engines; their outputs and what each side wrote down. Where findings are ``expected``, they have
    as long as the requests: told after this case they would count as the next one's, on a machine that is busy."""
    (number, case), (bootstrap, device) = numbered, place
    _, case_s, settle_s = PATIENCE_S[device]
    folder.joinpath("control").write_text(f"{number} {case}")
    rng = random.Random(number)
    n = 4 if case == "stress" else 3
    job = dict(
        input_ids=[[rng.randrange(3, 500) for _ in range(90 + i)] for i in range(n)],
        sampling_params=dict(max_new_tokens=24 if case == "stress" else 8, temperature=0, ignore_eos=True),
        bootstrap_host=["127.0.0.1"] * n, bootstrap_port=[bootstrap] * n,
        bootstrap_room=[100 * number + 101 + i for i in range(n)],
    )  # fmt: skip
    for side in sides:
        side.ask(job)
    # An engine that frees what it uses may end itself before it answers.
    lasts = case != "misuse decode"
    outputs = {side.name: side.answer(case_s) if lasts else [] for side in sides}
    end = time.monotonic() + (case_s if expected else settle_s)
    seen = 0
    while time.monotonic() < end:
        found = {side.name: [x for x in lines(folder, side.name) if x["case"] == str(number)] for side in sides}
        told = sum("violation" in x for side in found.values() for x in side)
        if expected and told and told == seen:
            break
        seen = told
        time.sleep(0.5)
    return {"outputs": outputs, "found": found}


def judge(options: argparse.Namespace, number: int, case: str, seen: dict[str, Any]) -> bool:
    """Prints a case; whether it is as it must be."""
    found = {name: [x["violation"] for x in told if "violation" in x] for name, told in seen["found"].items()}
    broken = [x for x in seen["found"]["prefill"] if "broken" in x]
    decode = found["decode"]
    first = [[o and o[0] for o in seen["outputs"][side]] for side in ("prefill", "decode")]
    if options.guard != "both":
        good = not decode and not found["prefill"]
    elif case == "stress":
        good = not decode and not found["prefill"] and [tokens.count(None) for tokens in first] == [0, 1]
    elif case == "clean":
        good = not decode and not found["prefill"] and first[0] == first[1]
    elif case == "truncate":
        good = bool(broken) and {v["kind"] for v in decode} == {"unwritten"} and not found["prefill"]
    elif case == "misuse prefill":
        # The page that is listed twice may be handed out twice after that.
        good = bool(broken) and [v["kind"] for v in found["prefill"]][:1] == ["double_free"]
    elif case == "misuse decode":
        broken = [x for x in seen["found"]["decode"] if "broken" in x]
        good = bool(broken) and [v["kind"] for v in decode][:1] == ["freed"]
    elif case == "swap":
        good = bool(broken) and "position" in {v["kind"] for v in decode} and not found["prefill"]
    else:
        _, region, source = case.split()
        half, layer = source.split(".")
        told = {(v["kind"], v["region"], v["half"], v["layer"]) for v in decode}
        good = bool(broken) and told == {("bytes", region, half, int(layer))} and not found["prefill"]
    keys = ("kind", "region", "slot", "position", "layer", "half", "phase", "request", "stored_request")
    say(
        {
            "case": case,
            "good": good,
            "broken": [{k: v for k, v in x.items() if k != "case"} for x in broken],
            "prefill_found": [v["kind"] for v in found["prefill"]],
            "decode_found": [{k: v.get(k) for k in keys} for v in decode[:3]],
            "decode_findings": len(decode),
            "first_tokens_agree": first[0] == first[1],
            "failed": [sum(token is None for token in side) for side in first],
        }
    )
    return good


def lines(folder: Path, side: str) -> list[dict[str, Any]]:
    """What a side wrote down so far."""
    file = folder / f"{side}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_witness(folder: Path) -> None:
    """An installed distribution whose entry point is `pd_witness`."""
    info = folder / "pd_witness-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: pd-witness\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text("[canary]\npd_witness = pd_witness\n")


def write_secret(folder: Path) -> str:
    """A file with what both engines make the keys of their fingerprints from."""
    file = folder / "secret"
    file.touch(0o600)
    file.write_text("known to these two engines")
    return str(file)


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """A folder with a configuration; weights are random."""
    config = {**MODELS[options.model], **(SMALL if options.device == "cpu" else {})}
    folder.joinpath("config.json").write_text(json.dumps(config))


def side_main(options: argparse.Namespace) -> None:
    """One engine: serves the jobs that come on stdin."""
    import sglang
    from packaging.version import Version

    bootstrap, port = (int(p) for p in options.ports.split(","))
    kept = {}
    if options.device == "cpu" and Version(sglang.__version__) >= Version("0.5.21"):
        kept = dict(hicache_io_backend="direct", hicache_mem_layout="layer_first")
        if not os.environ["CANARY_PLUGINS"]:
            # Host pools pin their memory, for which only `pd_witness` has a stand-in.
            kept = dict(disaggregation_decode_retraction_backup="cpu_tensor")
    engine = sglang.Engine(
        model_path=os.environ["PD_FOLDER"], load_format="dummy", skip_tokenizer_init=True, grammar_backend="none",
        log_level="warning", random_seed=1, disaggregation_mode=options.side, disaggregation_transfer_backend="nixl",
        disaggregation_bootstrap_port=bootstrap, host="127.0.0.1", port=port, **ENGINES[options.device], **kept,
    )  # fmt: skip
    answer("up")
    for line in sys.stdin:
        answer(engine.loop.run_until_complete(generate(engine, json.loads(line))))


async def generate(engine: Any, job: dict[str, Any]) -> list[list[int] | None]:
    """Outputs of the job's requests, None for one that failed."""

    async def one(**request: Any) -> list[int] | None:
        try:
            done = await engine.async_generate(sampling_params=dict(sampling), **request)
        except Exception as error:
            sys.stderr.write(f"a request failed: {error!r}\n")
            return None
        reason = done["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            sys.stderr.write(f"a request failed: {reason}\n")
            return None
        return done["output_ids"]

    sampling = job.pop("sampling_params")
    requests = [dict(zip(job, values, strict=True)) for values in zip(*job.values(), strict=True)]
    return await asyncio.gather(*(one(**request) for request in requests))


def answer(value: Any) -> None:
    """To the parent."""
    sys.stdout.write(f"\nANSWER {json.dumps(value)}\n")
    sys.stdout.flush()


def say(line: dict[str, Any]) -> None:
    """One JSON line of the report."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def late(*args: Any) -> None:
    """An alarm has come."""
    raise TimeoutError("no answer in time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=list(ENGINES), default="cuda")
    parser.add_argument("--model", choices=list(MODELS), default="llama")
    parser.add_argument("--guard", choices=["both", "prefill", "decode"], default="both")
    parser.add_argument("--stress", action="store_true")
    parser.add_argument("--secret", action="store_true")
    parser.add_argument("--side")
    parser.add_argument("--ports")
    given = parser.parse_args()
    if given.side:
        side_main(given)
    else:
        sys.exit(0 if run(given) else 1)
