"""Clean answers of `generate()` for docs/verify.md, all rows computed again:
``PYTHONPATH=plugins/canary-transformers/tests python3 plugins/canary-transformers/benchmarks/recompute_generate.py 20``
prints a row for each setup, of 20 answers; more arguments name setups, such as ``falcon_h1-bfloat16``. Batches of 1 to
8 with left padding, greedy and sampled, in chunks and whole, growing and static caches; each answer is compared with
that of the model without Canary."""

import copy
import statistics
import sys
from typing import Any

import canary_transformers
import torch
from tiny.answers import Answers
from tiny.models import HYBRID

from canary_core import testing

KINDS = ("llama", "gemma3", "mistral", "qwen3", *HYBRID)
SETUPS = [(kind, floats) for floats in ("float32", "bfloat16") for kind in KINDS]


def guard(model: Any, **settings: Any) -> Any:
    """As in the tests."""
    return canary_transformers.guard(model, scrub_budget="64KiB", **settings)


def settings_of(answers: Answers, ids: torch.Tensor) -> dict[str, Any]:
    """Of a random answer."""
    pick = answers.random.choice
    hybrid = answers.kind in HYBRID
    # Of static caches of models with states masks are no longer seen: such rows are unjudged.
    static = {"cache_implementation": "static"} if pick((True, *7 * (False,)) if hybrid else (True, False)) else {}
    chunks = {"prefill_chunk_size": pick((7, 16))} if (static or hybrid) and pick((True, False)) else {}
    return {"do_sample": pick((True, False)), "max_new_tokens": answers.random.randrange(10, 60), **static, **chunks}


def clean(kind: str, floats: str, count: int) -> None:
    """Prints a row: verdicts, tokens, `differs`, other answers, and errors and bounds of the last layer."""
    answers = Answers(guard, kind, floats)
    answers.taught()
    plain = copy.deepcopy(answers.model)
    judged, others = [], 0
    for n in range(count):
        ids = answers.prompts(answers.random.randrange(1, 9), answers.random.randrange(20, 70))
        for row in range(len(ids) - 1):
            ids[row, : answers.random.randrange(15)] = 0
        settings = settings_of(answers, ids)
        torch.manual_seed(n)
        kept = answers.generate(ids, **settings)
        judged += answers.verdicts()
        guarded, answers.model = answers.model, plain
        torch.manual_seed(n)
        others += not torch.equal(answers.generate(ids, **settings).sequences, kept.sequences)
        answers.model = guarded
        del kept
    layers = [one for answer in judged for one in answer.layers]
    deepest = max(one.layer for one in layers)
    last = [one for one in layers if one.layer == deepest]
    told = [
        f"{kind}, {floats}",
        *(str(sum(a.verdict == verdict for a in judged)) for verdict in ("same", "differs", "unjudged")),
        f"{sum(a.tokens for a in judged):,}",
        str(others),
        f"{statistics.median(one.worst for one in last):.2g}; {max(one.worst for one in last):.2g}",
        f"{max(one.bound or 0 for one in last):.2g}",
    ]
    print("|", " | ".join(told), "|", flush=True)
    for reason in {a.reason for a in judged if a.verdict == "unjudged"}:
        print("unjudged:", reason)
    answers.guard.close()


if __name__ == "__main__":
    with testing.one_thread():
        print("| setup | `same` | `differs` | `unjudged` | tokens | other answers | last layer: median; most | bound |")
        print("|---|---|---|---|---|---|---|---|")
        named = [tuple(name.rsplit("-", 1)) for name in sys.argv[2:]]
        for setup in named or SETUPS:
            clean(*setup, int(sys.argv[1]) if len(sys.argv) > 1 else 20)
