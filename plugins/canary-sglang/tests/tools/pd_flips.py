"""Bits that flip in the KV of a prefill and a decode engine (PD disaggregation), and what the decode engine answers.

python -m tools.pd_flips COUNT [MODE ...] [CASE ...] [plain] [tp2] [kill] [gpu], in the folder of the tests: a line of
JSON for each mode of ``CANARY_ON_VIOLATION`` and each case, with the overlap scheduler unless ``plain``. Cases:
``sent``: a bit of the prefill engine's slots, after their forward and before they are sent. ``arrived``: of the decode
engine's, when all has come. ``parked``: of what the prefill engine's prefix cache has. ``decoding``: of what running
requests read in the decode engine. ``clean``: none. With ``kill``, the prefill engine ends at last, while requests
wait.

Engines, schedulers, bootstrap and transfer manager are SGLang's own; on a CPU `cpu/nixl` stands in for NIXL. With
``gpu`` both engines share a GPU, with CUDA graphs and the real NIXL. What flips the bits is a plugin of SGLang's that
knows nothing of Canary.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from engines import TESTS, python_path
from engines.gpu_models import GPU_DEFAULTS
from engines.models import write_model
from engines.user_script import on_cpu
from gpu.pd import free_port, late

FOLDER, SIDE = Path(os.environ.get("PD_FOLDER", ".")), os.environ.get("PD_SIDE", "")
SIDES = ("prefill", "decode")
CASES = ("sent", "arrived", "parked", "decoding", "clean")
DRAW = random.Random("pd")
BITS = (29, 30)
"""The highest of the exponent of a 32-bit float, or of a word's second bfloat16: only a few tokens are computed from
each."""

LENGTH, PROMPTS = 40, 6
PATIENCE_S = 500


def install() -> None:
    """The plugin, which each of SGLang's processes runs before anything else."""
    from engines.models import randomize
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    sends = "_send_kv_chunk" if hasattr(Scheduler, "_send_kv_chunk") else "send_kv_chunk"
    load, run = ModelRunner.load_model, Scheduler.run_batch
    send, commit = getattr(Scheduler, sends), DecodeTransferQueue._commit_transfer_to_req

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        done = load(runner, *args, **kwargs)
        randomize(runner.model)
        return done

    def send_chunk(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if control() == "sent":
            flip(scheduler, [request])
        return send(scheduler, request, *args, **kwargs)

    def commit_transfer(queue: Any, request: Any) -> Any:
        done = commit(queue, request)
        if control() == "arrived":
            flip(queue.scheduler, [request.req])
        return done

    def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = control()
        if (wanted, SIDE) == ("decoding", "decode") and batch.forward_mode.is_decode():
            flip(scheduler, batch.reqs if DRAW.random() < 0.15 else [])
        if (wanted, SIDE) == ("parked", "prefill"):
            flip(scheduler, [r for r in batch.reqs if prefix_tokens(r)], hit=True)
        return run(scheduler, batch, *args, **kwargs)

    ModelRunner.load_model, Scheduler.run_batch = load_model, run_batch
    setattr(Scheduler, sends, send_chunk)
    DecodeTransferQueue._commit_transfer_to_req = commit_transfer


def control() -> str:
    """Of the present phase."""
    file = FOLDER / "control"
    return file.read_text() if file.exists() else ""


def prefix_tokens(request: Any) -> int:
    """Number of a request's tokens before those of its batch."""
    slots = getattr(request, "prefix_indices", None)
    return int(request.prefix_len) if slots is None else len(slots)


def flip(scheduler: Any, requests: list[Any], hit: bool = False) -> None:
    """Flips a bit in the slot of one of the last rank's prompt tokens, ``hit``: of the prefix, of each request."""
    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for request in requests:
        end = prefix_tokens(request) if hit else len(request.origin_input_ids)
        holder = request if hasattr(request, "req_pool_idx") else request.kv
        row = scheduler.req_to_token_pool.req_to_token[holder.req_pool_idx, :end]
        words = DRAW.choice((pool.k_buffer, pool.v_buffer))[DRAW.randrange(pool.layer_num)]
        words = words[DRAW.choice(row.tolist())].view(torch.int32)
        words[tuple(DRAW.randrange(size) for size in words.shape)] ^= 1 << DRAW.choice(BITS)
        with FOLDER.joinpath("flips").open("a") as file:
            file.write(f"{request.rid}\n")


class Engine:
    """One side, in processes of its own."""

    def __init__(self, folder: Path, side: str, options: dict[str, Any], settings: dict[str, str]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        bind = f"{cores[0]}|{cores[-1]}" if options.get("tp_size") == 2 else str(cores[SIDES.index(side) % len(cores)])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_")}
        nixl = [] if "device" in options else [TESTS / "cpu"]
        own = {
            "PYTHONPATH": python_path(folder, *nixl), "PD_FOLDER": str(folder), "PD_SIDE": side,
            "SGLANG_CPU_OMP_THREADS_BIND": bind, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
            # It needs a CUDA event.
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        }  # fmt: skip
        self.log = folder / f"{side}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.pd_flips", "--engine", json.dumps(options)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**inherited, **own, **settings}, start_new_session=True,
            )  # fmt: skip

    def ask(self, job: list[dict[str, Any]]) -> None:
        """Sends requests."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answers. Raises `TimeoutError` with the end of the log."""
        signal.alarm(PATIENCE_S)
        try:
            for line in self._process.stdout:
                if line.startswith("ANSWER "):
                    return json.loads(line[7:])
        finally:
            signal.alarm(0)
        raise TimeoutError(f"{self.log.name}\n{self.log.read_text(errors='replace')[-3000:]}")

    def events(self) -> Counter[str]:
        """How often each event was told."""
        return Counter(re.findall(r"\] (\w+) +\[canary\]", self.log.read_text(errors="replace")))

    def kill(self) -> None:
        """The engine and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._process.stdin.close()
        self._process.stdout.close()


class Pair:
    """A prefill and a decode engine. ``options``: more `ServerArgs`; ``settings``: Canary's."""

    def __init__(self, folder: Path, options: dict[str, Any], **settings: str) -> None:
        signal.signal(signal.SIGALRM, late)
        self.folder, self._room = folder, 1
        folder.mkdir()
        info = folder / "pd_flips-1.0.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: pd-flips\nVersion: 1.0\n")
        info.joinpath("entry_points.txt").write_text("[sglang.srt.plugins]\nflips = tools.pd_flips:install\n")
        write_model(folder / "model", "llama")
        self._bootstrap = free_port()
        own = {"model_path": str(folder / "model"), "disaggregation_bootstrap_port": self._bootstrap, **options}
        self.prefill, self.decode = (
            Engine(folder, side, {**own, "disaggregation_mode": side, "port": free_port()}, settings) for side in SIDES
        )
        for engine in (self.prefill, self.decode):
            engine.answer()

    def serve(self, control: str, prompts: list[list[int]], new_tokens: int, kill: bool = False) -> list[Any]:
        """The decode engine's answers, and the prefill engine's; ``kill``: the latter has ended in between."""
        fresh = self.folder / "control.new"
        fresh.write_text(control)
        fresh.replace(self.folder / "control")
        jobs = [{"input_ids": prompt, "bootstrap_room": self._room + i} for i, prompt in enumerate(prompts)]
        for job in jobs:
            job |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._bootstrap, "new_tokens": new_tokens}
        self._room += len(prompts)
        self.decode.ask(jobs)
        if kill:
            self.prefill.kill()
            return [self.decode.answer()]
        self.prefill.ask(jobs)
        return [self.decode.answer(), self.prefill.answer()]

    def close(self) -> None:
        """Ends both."""
        for engine in (self.prefill, self.decode):
            engine.kill()


def serve_flipped(pair: Pair, count: int, control: str, together: int = 2, seed: int = 0) -> dict[str, Any]:
    """``count`` requests for a few prompts, ``together`` at a time, while bits flip. Counts the decode engine's answers
    as `tools.parked_flips` does; an erring request's status must be 503, and the error names no token."""
    draw = random.Random(f"pd {seed}")
    prompts = [[draw.randrange(3, 250) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    new = 24 if control == "decoding" else 6
    right = [pair.serve("nothing", [prompt], new)[0][0]["tokens"] for prompt in prompts]
    before = pair.prefill.events(), pair.decode.events()
    flips = pair.folder / "flips"
    flips.unlink(missing_ok=True)
    served = Counter[str]()
    for first in range(0, count, together):
        numbers = [draw.randrange(PROMPTS) for _ in range(min(together, count - first))]
        decoded, prefilled = pair.serve(control, [prompts[number] for number in numbers], new)
        for number, answer, other in zip(numbers, decoded, prefilled, strict=True):
            served[f"prefill {other['status']}"] += 1
            if answer["status"] == 200:
                served["right" if answer["tokens"] == right[number] else "wrong"] += 1
            else:
                served[f"error {answer['status']}"] += 1
                served["given"] += len(answer["tokens"])
                served["kept"] += bool(answer["tokens"]) and answer["tokens"] != right[number][: len(answer["tokens"])]
                assert "the KV cache of this request is corrupted" in answer["error"], answer
    again = [pair.serve("nothing", [prompt], new)[0][0] for prompt in prompts]
    names = ("aborted", "quarantined", "quarantine_failed", "disabled", "reporting_failed")
    events = [side.events() - old for side, old in zip((pair.prefill, pair.decode), before, strict=True)]
    return {
        "asked": count,
        "flipped": len(flips.read_text().splitlines()) if flips.exists() else 0,
        **dict(sorted(served.items())),
        "right_again": sum(answer.get("tokens") == tokens for answer, tokens in zip(again, right, strict=True)),
        **{name: [side[name] for side in events] for name in names},
    }


def lose_the_peer(pair: Pair) -> dict[str, Any]:
    """The prefill engine is killed while requests wait for it: how they end, and whether the decode engine lives."""
    prompts = [[3 + i + j for j in range(LENGTH)] for i in range(3)]
    (decoded,) = pair.serve("nothing", prompts, 6, kill=True)
    return {"killed": [answer["status"] for answer in decoded], "lives": pair.decode._process.poll() is None}


def engine_main(options: dict[str, Any]) -> None:
    """One engine: serves what comes on stdin."""
    import sglang

    base, beside = GPU_DEFAULTS, {}
    if "device" not in options:
        base = {**on_cpu()[1], "dtype": "float32"}
        beside = dict(hicache_io_backend="direct", hicache_mem_layout="layer_first")
        if options["disaggregation_mode"] == "decode":
            beside["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    engine = sglang.Engine(
        **{**base, "disaggregation_transfer_backend": "nixl", "host": "127.0.0.1",
           "num_reserved_decode_tokens": 64, "max_total_tokens": 1024, "disable_radix_cache": True,
           "disable_overlap_schedule": False, **beside, **options}
    )  # fmt: skip
    _say([])
    for line in sys.stdin:
        _say(engine.loop.run_until_complete(_generate(engine, json.loads(line))))


async def _generate(engine: Any, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def one(new_tokens: int, **job: Any) -> dict[str, Any]:
        sampling, tokens = dict(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True), []
        try:
            async for part in await engine.async_generate(sampling_params=sampling, stream=True, **job):
                tokens = part.get("output_ids", tokens)
                reason = part["meta_info"]["finish_reason"]
        except Exception as error:
            return {"tokens": tokens, "status": getattr(error, "status_code", None), "error": str(error)}
        if reason and reason["type"] == "abort":
            return {"tokens": tokens, "status": reason.get("status_code"), "error": reason["message"]}
        return {"tokens": tokens, "status": 200}

    return await asyncio.gather(*(one(**job) for job in jobs))


def _say(value: Any) -> None:
    sys.stdout.write(f"\nANSWER {json.dumps(value)}\n")
    sys.stdout.flush()


def main() -> None:
    """A pair of engines for each mode."""
    if sys.argv[1] == "--engine":
        engine_main(json.loads(sys.argv[2]))
        return
    words = sys.argv[2:]
    cases = [word for word in words if word in CASES] or ["arrived"]
    options: dict[str, Any] = {"disable_overlap_schedule": "plain" in words, "disable_radix_cache": cases != ["parked"]}
    if "tp2" in words:
        options["tp_size"] = 2
    if "gpu" in words:
        options |= {"device": "cuda", "mem_fraction_static": 0.1}
    quiet = {"CANARY_SCRUB_BUDGET": "0", "CANARY_READ_CHECK": "-1" if "decoding" in cases else "0"}
    beside = (*CASES, "plain", "tp2", "kill", "gpu")
    for mode in [word for word in words if word not in beside] or ["report", "protect"]:
        guard = {"CANARY_PLUGINS": "sglang", "CANARY_ON_VIOLATION": mode, **quiet}
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair(Path(folder) / "e", options, **guard)
            try:
                for case in cases:
                    # On a GPU a batch rounds otherwise than a request alone.
                    together = 1 if "gpu" in words else 2
                    served = serve_flipped(pair, int(sys.argv[1]), case if case != "clean" else "nothing", together)
                    _print({"mode": mode, "case": case, **served})
                if "kill" in words:
                    _print({"mode": mode, **lose_the_peer(pair)})
            except BaseException:
                sys.stderr.writelines(engine.log.read_text()[-4000:] for engine in (pair.prefill, pair.decode))
                raise
            finally:
                pair.close()


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
