"""Two guarded vLLM on a CPU, one for prefill and one for decode, with NIXL between them, all as they are installed.
Prints one line of JSON.

python -m vllm_on_cpu.nixl_script decode

The process of decode starts that of prefill (``nixl_script prefill``), asks it by lines of JSON on its standard input,
and gets one line for each. What stands for the proxy between real engines hands over what vLLM says of a request, and
the ledger's entries of its blocks.
"""

import base64
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONNECTOR = "NixlConnector"
BLOCKS = 4
"""Complete blocks of each prompt; one token more is computed again by who decodes."""
ROUNDS = 12


class Side:
    """One of the two engines, guarded."""

    def __init__(self, port: int) -> None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        from canary_vllm.hooks import HOOKS

        from canary_core import CanaryConfig, hook_manager
        from canary_core.testing import Findings
        from vllm_on_cpu.engine import SmallEngine
        from vllm_on_cpu.guarded import Guarded

        self.findings = Findings()
        hook_manager().register(self.findings)
        # Nobody but these two store there, and their entries are exchanged.
        HOOKS.start(CanaryConfig.load(read_check=-1, scrub_budget="0", stats_interval=0, ledger_private=CONNECTOR))
        # Each of them has a folder of its own with the same model, by whose name vLLM would tell them apart.
        extra = {"enforce_handshake_compat": False}
        connector = {
            "kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_buffer_device": "cpu",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
        self.engine = SmallEngine(
            "llama", num_gpu_blocks_override=96, kv_transfer_config=connector, enable_prefix_caching=False
        )
        self.guard = Guarded(self.engine, self.findings)

    def serve(self, name: str, prompt: Sequence[int], new: int, transfer: dict[str, Any]) -> dict[str, Any]:
        """Serves ``prompt``; ``transfer`` is what a proxy tells vLLM of it. Its tokens, what vLLM says for the next
        engine, and its complete blocks while it ran: bytes by layer, from vLLM's own tensors."""
        import torch
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=new, temperature=0, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": transfer},
        )  # fmt: skip
        self.engine.core.add_request(
            Request(request_id=name, prompt_token_ids=list(prompt), sampling_params=params, pooling_params=None)
        )
        tokens: list[int] = []
        handed: dict[str, Any] | None = None
        held: list[dict[str, bytes]] = []
        blocks: list[int] = []
        finished = False
        while not finished:
            if self.engine.running(name):
                blocks = self.engine.blocks(name)[0][:BLOCKS]
            outputs, ran = getattr(self.engine.core, "step_fn", self.engine.core.step)()
            self.engine.core.post_step(ran)
            for output in (o for one in (outputs or {}).values() for o in one.outputs):
                tokens += list(output.new_token_ids)
                handed = output.kv_transfer_params or handed
                finished = output.finished
            if tokens and not held:
                held = [
                    {n: t[block].contiguous().view(torch.uint8).numpy().tobytes() for n, t in self.layers()}
                    for block in blocks
                ]
        return {"tokens": tokens, "transfer": handed, "held": held, "blocks": blocks}

    def layers(self) -> list[tuple[str, Any]]:
        """Those that have KV, in order."""
        return sorted((name, cache) for name, cache in self.engine.tensors() if cache is not None)


def prefill(port: int) -> None:
    """Serves what it is asked for, to its end of input."""
    import torch

    from canary_core import block_hashes
    from vllm_on_cpu.engine import BLOCK

    answers, sys.stdout = sys.stdout, sys.stderr
    side = Side(port)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = asked["prompt"]
        told = side.serve(asked["name"], prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        entries = side.guard.canary.ledger.export("full", BLOCK, block_hashes(prompt[: BLOCKS * BLOCK], BLOCK))
        if asked["flip"] is not None:
            # After the entries were made, before the other side reads: nobody writes here any more.
            layer, half, block = asked["flip"]
            cache = side.layers()[layer][1][told["blocks"][block]].view(-1)
            # In vLLM's CPU attention K of a head's block comes before its V.
            place = cache.numel() // 4 * (half == "v") + 5
            cache.view(torch.int32)[place] ^= 1 << 21
        answer = {
            "tokens": told["tokens"],
            "transfer": told["transfer"],
            "held": [{n: base64.b64encode(b).decode() for n, b in block.items()} for block in told["held"]],
            "entries": base64.b64encode(entries).decode(),
            "trouble": side.guard.trouble(),
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def decode() -> None:
    """Clean hand-overs; then bits that are flipped before they are read, and a transfer that leaves blocks out."""
    ports = [free_port(), free_port()]
    secret = Path(tempfile.mkdtemp(), "secret")
    secret.touch(0o600)
    secret.write_text(secrets.token_hex())
    # Without it each of the two has keys of its own, and can't read the other's entries.
    os.environ["CANARY_KEY_FILE"] = str(secret)
    other = subprocess.Popen(
        [sys.executable, "-m", "vllm_on_cpu.nixl_script", "prefill", str(ports[0])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    side = Side(ports[1])
    from canary_vllm.compat import connectors

    from vllm_on_cpu.engine import BLOCK

    asks, answers = other.stdin, other.stdout
    assert asks is not None
    assert answers is not None
    assert json.loads(answers.readline())["ready"]
    draw = random.Random(8)

    def hand_over(number: int, flip: tuple[int, str, int] | None = None) -> dict[str, Any]:
        prompt = [draw.randrange(3, 500) for _ in range(BLOCKS * BLOCK + 1)]
        asks.write(json.dumps({"name": f"p{number}", "prompt": prompt, "flip": flip}) + "\n")
        asks.flush()
        there = json.loads(answers.readline())
        before = len(side.findings.violations)
        side.guard.canary.ledger.import_entries("full", BLOCK, base64.b64decode(there["entries"]))
        here = side.serve(f"d{number}", prompt, 4, {**there["transfer"], "do_remote_prefill": True})
        side.guard.canary.drain()
        sent = [{n: base64.b64decode(b) for n, b in block.items()} for block in there["held"]]
        return {
            "first": [here["tokens"][0], there["tokens"][0]],
            "different": [
                [block, name]
                for block, (a, b) in enumerate(zip(sent, here["held"], strict=True))
                for name in a
                if a[name] != b[name]
            ],
            "found": [
                [v.kind.name, v.layer, v.half, v.position, v.origin, v.detail]
                for v in side.findings.violations[before:]
            ],
            "said": [v.explanation for v in side.findings.violations[before:]],
            "prefill_trouble": there["trouble"],
        }

    told: dict[str, Any] = {"layers": [name for name, _ in side.layers()]}
    told["clean"] = [hand_over(number) for number in range(ROUNDS)]
    told["trouble"] = side.guard.trouble()
    told["ledger"] = {k: v for k, v in side.guard.canary.stats().items() if k.startswith("ledger_")}
    places = [(layer, half, block) for layer in range(2) for half in "kv" for block in (0, 2)]
    told["flips"] = [{"flipped": place, **hand_over(100 + number, place)} for number, place in enumerate(places)]
    wrapper = connectors.instance().connector_worker.nixl_wrapper
    whole = wrapper.make_prepped_xfer

    def cut_short(way: str, local: Any, locals_: Any, remote: Any, remotes: Any, **kwargs: Any) -> Any:
        """NIXL's own, but the last two rows of the list: those of the last layer's last two blocks."""
        return whole(way, local, locals_[:-2], remote, remotes[:-2], **kwargs)

    wrapper.make_prepped_xfer = cut_short
    told["short"] = hand_over(200)
    wrapper.make_prepped_xfer = whole
    told["after"] = hand_over(201)
    print(json.dumps(told))
    sys.stdout.flush()
    asks.close()
    other.wait(60)
    # NIXL's threads keep the process alive.
    os._exit(0)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        prefill(int(sys.argv[2]))
    else:
        decode()
