"""Two tensor-parallel ranks, each with half of the embedding, in processes of their own. Prints one line of JSON.

    python -m vllm_on_cpu.ranks_script

Each request writes all slots there are, so its tokens take the place of those of the request before.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = dict(
    tensor_parallel_size=2, enable_prefix_caching=False, num_gpu_blocks_override=2, max_model_len=32, max_num_seqs=1
)
FIRST_RANK, SECOND_RANK = 20, 300
"""Tokens whose rows of the embedding are on rank 0 and on rank 1, which has those from 256 on."""
LIKE = 10
"""So many tokens from each of them on have the rows of the other's, on the other rank."""
TOKENS = 30


def give_rows(worker: Any) -> None:
    """In a worker: rows of its own, of which some are those of other tokens on the other rank."""
    import torch

    rows = worker.model_runner.model.model.embed_tokens
    first = rows.shard_indices.org_vocab_start_index
    with torch.no_grad():
        rows.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(first))
        alike = torch.empty(LIKE, rows.weight.shape[1]).normal_(0.0, 0.3, generator=torch.Generator().manual_seed(7))
        begin = (FIRST_RANK if first == 0 else SECOND_RANK) - first
        rows.weight[begin : begin + LIKE] = alike


def follow(worker: Any) -> None:
    """In a worker: keeps what Canary finds from now on."""
    from canary_vllm.hooks import HOOKS

    from canary_core import hook_manager
    from canary_core.testing import Findings

    (session,) = HOOKS.sessions
    worker.findings = Findings()
    hook_manager().register(worker.findings)
    session.canary.drain()


def lose(worker: Any) -> None:
    """In a worker: the next forward loses a write."""
    from canary_core import hook_manager
    from canary_core.testing import FaultInjector

    worker.injector = FaultInjector.parse("lost_write", 3)
    hook_manager().register(worker.injector)


def told(worker: Any) -> dict[str, Any]:
    """In a worker: what was found since this was asked last, how many findings were dismissed until now, and whether
    the write that was lost, if any was, is among what was found."""
    import torch
    from canary_vllm.hooks import HOOKS

    from canary_core import hook_manager

    (session,) = HOOKS.sessions
    with torch.inference_mode():
        session.canary.drain()
    found = [[v.kind.name, v.stored_token, v.token] for v in worker.findings.violations]
    injector = worker.__dict__.pop("injector", None)
    named = None
    if injector is not None:
        hook_manager().unregister(injector)
        named = [any(one.explains(v) for v in worker.findings.violations) for one in injector.injections]
    worker.findings.violations.clear()
    return {"found": found, "dismissed": session.canary.stats()["dismissed"], "named": named}


def main() -> None:
    """Tokens of one rank take the place of those of the other: alike, then with a write that is lost."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import ENVIRONMENT
    from vllm_on_cpu.engine import OPTIONS as COMMON

    cores = sorted(os.sched_getaffinity(0))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update({**ENVIRONMENT, **own})
    from vllm import LLM, SamplingParams

    llm = LLM(model=models.folder("llama", Path(tempfile.mkdtemp())), **{**COMMON, **OPTIONS})
    llm.collective_rpc(give_rows)
    llm.collective_rpc(follow)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    def serve(first: int, spread: int) -> None:
        tokens = [first + i % spread for i in range(TOKENS)]
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)

    answers: dict[str, Any] = {}
    serve(FIRST_RANK, LIKE)
    answers["clean"] = llm.collective_rpc(told)
    serve(SECOND_RANK, LIKE)
    answers["alike"] = llm.collective_rpc(told)
    for name, first in (("lost", FIRST_RANK), ("lost back", SECOND_RANK)):
        llm.collective_rpc(lose)
        serve(first + LIKE, 2 * LIKE)
        answers[name] = llm.collective_rpc(told)
    sys.stdout.write(json.dumps(answers) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
