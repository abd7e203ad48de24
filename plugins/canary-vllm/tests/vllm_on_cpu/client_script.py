"""vLLM's server, as a client sees it: answers streamed over HTTP to the `openai` package, while bits flip in KV that
nobody reads. Prints one line of JSON.

    CANARY_PLUGINS=vllm CANARY_ON_VIOLATION=protect python -m vllm_on_cpu.client_script [ROUNDS [WORKERS]]

``WORKERS``: ``1``; ``2``: tensor-parallel ranks, of which bits of the last one flip; ``stages`` of a pipeline, or
data-parallel ``replicas``, two of which bits of either flip, by chance.
"""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPTS, TOKENS, NEW = 6, 100, 16
START_S, ANSWER_S = 300, 60
POINTS = "[vllm.general_plugins]\nflipper = vllm_on_cpu.flipper:start\n"
PARALLEL: dict[str, dict[str, Any]] = {
    "1": dict(enforce_eager=True),
    "2": dict(enforce_eager=True, tensor_parallel_size=2),
    # Chunks, so that both stages compute at once. vLLM 0.32 on a CPU makes a stage's buffers while it compiles the
    # model: with --enforce-eager the first request fails, `assert self.intermediate_tensors is not None`.
    "stages": dict(
        pipeline_parallel_size=2, max_num_batched_tokens=64, compilation_config='{"mode": 2, "backend": "eager"}'
    ),
    "replicas": dict(enforce_eager=True, data_parallel_size=2),
}
OURS = "canary = canary_vllm.plugin:start\n[canary]\nvllm = canary_vllm.plugin\n"
"""For an environment in which canary-vllm is on the path, and not installed."""


def folder() -> str:
    """The model's: random weights, so that answers depend on what attention reads, and a tokenizer of whole words."""
    from bugs.live.sglang_weights_kept import checkpoint
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from vllm_on_cpu import models

    made = Path(models.folder("llama", Path(tempfile.mkdtemp(prefix="canary-client-"))))
    save_file(checkpoint(SimpleNamespace(**models.COMMON, **models.LLAMA), seed=1), made / "model.safetensors")
    words = Tokenizer(WordLevel({f"t{number}": number for number in range(models.COMMON["vocab_size"])}, "t0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(made)
    return str(made)


class Server:
    """vLLM's server in processes of its own, as of `vllm serve`. ``flips``: the folder that `flipper` looks into."""

    def __init__(self, workers: str) -> None:
        from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

        self.flips = Path(tempfile.mkdtemp(prefix="canary-flips-"))
        info = self.flips / "flipper-0.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: flipper\nVersion: 0\n")
        installed = entry_points(group="canary", name="vllm")
        info.joinpath("entry_points.txt").write_text(POINTS + ("" if installed else OURS))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "FLIPS": str(self.flips)}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.flips), *filter(None, sys.path)])
        sizes = dict(max_model_len=OPTIONS["max_model_len"], max_num_seqs=8, block_size=OPTIONS["block_size"])
        sizes |= dict(num_gpu_blocks_override=64, port=self.port, dtype="float32", served_model_name="tiny")
        given = {**sizes, **PARALLEL[workers]}.items()
        options = [
            word for name, size in given for word in (f"--{name.replace('_', '-')}", str(size)) if word != "True"
        ]
        self._draw = None if workers in ("1", "2") else random.Random(workers)
        self._last = int(workers != "1")
        self.log = self.flips / "log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder(), *options],
            env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.number = 0

    def wait(self) -> None:
        """Until it serves. Raises `RuntimeError` where it ends first."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(self.log.read_text()[-3000:])

    def flip(self) -> int:
        """Flips a bit in every block of one worker's pool, and says how many."""
        self.number += 1
        worker = self._last if self._draw is None else self._draw.randrange(2)
        partial = self.flips / "next"
        partial.write_text(str(worker))
        partial.rename(self.flips / f"flip-{self.number}")
        done = self.flips / f"done-{self.number}"
        end = time.monotonic() + ANSWER_S
        while not done.exists():
            if time.monotonic() > end:
                raise RuntimeError("nobody flips bits")
            time.sleep(0.05)
        return int(done.read_text())

    def end(self) -> None:
        """Ends it, with all of its processes."""
        if self._process.poll() is not None:
            return
        os.killpg(self._process.pid, 15)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)


async def ask(client: Any, prompt: list[int]) -> tuple[str, list[str], str]:
    """An answer: what became of it, its parts as they came, and what the client is told if it is an error."""
    parts: list[str] = []
    try:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=NEW, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        ended = None
        async for chunk in stream:
            for choice in chunk.choices:
                parts.append(choice.text)
                ended = choice.finish_reason or ended
    except Exception as error:
        return "error", parts, f"{type(error).__name__}: {error}"
    return ("answered", parts, "") if ended == "length" else ("error", parts, f"finish_reason {ended}")


async def serve(server: Server, rounds: int) -> dict[str, Any]:
    """Asks each prompt in each round, and flips bits in between."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="-", max_retries=0, timeout=ANSWER_S)
    draw = random.Random("client")
    prompts = [[draw.randrange(3, 500) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    first = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
    right = ["".join(parts) for _, parts, _ in first]
    told: dict[str, Any] = {"right": 0, "wrong": 0, "error": 0, "flips": 0, "errors": []}
    told["clean"] = [ended for ended, _, _ in first]
    for _ in range(rounds):
        told["flips"] += server.flip()
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        for (ended, parts, error), wanted in zip(answers, right, strict=True):
            if ended == "error":
                told["error"] += 1
                told["errors"] = sorted({*told["errors"], error})
                told["wrong"] += not wanted.startswith("".join(parts))
            else:
                told["right" if "".join(parts) == wanted else "wrong"] += 1
        told["said"] = {"right": first[0][1], "now": answers[0][1], "error": answers[0][2]}
    return told


def main() -> None:
    """Serves, and tells what clients got."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    server = Server(sys.argv[2] if len(sys.argv) > 2 else "1")
    try:
        server.wait()
        told = asyncio.run(serve(server, rounds))
    finally:
        server.end()
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("{")]
    every = [json.loads(line) for line in lines if '"event": ' in line]
    events = [event["event"] for event in every]
    told["events"] = {name: events.count(name) for name in ("recomputed", "aborted", "quarantined", "incident")}
    for name, event in (("found", "incident"), ("acted", "recomputed")):
        told[name] = sorted({one.get("replica", 0) for one in every if one["event"] == event})
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
