"""The tables of docs/verify.md, measured anew: ``PYTHONPATH=plugins/canary-transformers/tests python3
plugins/canary-transformers/benchmarks/recompute.py [ROUNDS] [DEVICE]`` prints them. One round of clean traffic has
three requests, a fork and a preemption, and some seven verdicts; then the same where all requests have a hit. What is
broken is broken in the model's Python, which CUDA graphs don't run, so that table is measured on a CPU."""

import copy
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import canary_transformers
import pytest
import torch
from canary_transformers.tiny_models import tiny_model
from tiny import verified as engines
from tiny.verified import HIT, NEW, Verified, tokens

from canary_core import testing
from canary_core.watchers.recompute.noise import Noise

SETUPS = [
    ("llama", torch.float32),
    ("gemma3", torch.float32),
    ("llama", torch.bfloat16),
    ("gemma3", torch.bfloat16),
    ("llama", torch.float16),
]
FAULTS: list[tuple[str, str, Callable[..., None]]] = [
    ("positions behind a hit one too many", "llama", engines.rope_after_a_hit),
    ("decodes don't see the last token", "llama", engines.one_short),
    ("a window one token short in decodes", "gemma3", engines.window_off_by_one),
    ("layer 1 skipped for one request", "llama", engines.skipped_layer),
    ("5 % noise in one head of layer 0, in decodes", "llama", engines.noisy_head),
    ("v_proj of layer 1 scaled by 1.01 under a kept cache", "llama", engines.weights_change),
]


DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"


def verified_by(name: str, dtype: torch.dtype) -> Verified:
    """An engine on ``DEVICE``."""
    return Verified(guard, name, dtype=dtype, make=lambda *args: copy.deepcopy(tiny_model(*args)).to(DEVICE))


def guard(model: Any, **settings: Any) -> Any:
    """As in the tests."""
    return canary_transformers.guard(model, scrub_budget="64KiB", **settings)


def name_of(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def clean(rounds: int, hits: bool = False) -> None:
    """A row for each setup: largest medians of 32 tokens in layer 0 and the last one, and their bounds. ``hits``: each
    request has one, and noise is learnt from such requests alone."""
    print("| setup | verdicts | tokens | `differs` | layer 0: most; bound | last layer: median; most; bound |")
    print("|---|---|---|---|---|---|")
    for name, dtype in SETUPS:
        if hits and name == "gemma3":
            # With windows Transformers keeps no prefixes.
            continue
        verified = verified_by(name, dtype)
        prefixes = [verified.prefix() for _ in range(3 * hits)]
        verified.taught(*prefixes[:1])
        answers = verified.traffic(rounds, prefixes)
        first = [one for answer in answers for one in answer.layers if one.layer == 0]
        last = [one for answer in answers for one in answer.layers if one.layer == 2]
        told = [
            f"{name}, {name_of(dtype)}",
            str(len(answers)),
            f"{sum(answer.tokens for answer in answers):,}",
            str(sum(answer.verdict == "differs" for answer in answers)),
            f"{max(one.worst for one in first):.2g}; {max(one.bound for one in first):.2g}",
            f"{statistics.median(one.worst for one in last):.2g}; {max(one.worst for one in last):.2g}; "
            f"{max(one.bound for one in last):.2g}",
        ]
        print("|", " | ".join(told), "|", flush=True)
        verified.guard.close()
        verified.engine.close()


def broken(dtype: torch.dtype) -> None:
    """A row for each fault, found or not."""
    for what, name, fault in FAULTS:
        verified = verified_by(name, dtype)
        verified.taught()
        shared = tokens(verified.random)
        verified.submit("right", shared)
        weights = fault is engines.weights_change
        if not weights:
            verified.finish()
        hits = fault is engines.rope_after_a_hit
        with pytest.MonkeyPatch.context() as patch:
            kept = {key: value.clone() for key, value in verified.model.state_dict().items()}
            if weights:
                verified.step(48)
            fault(verified, patch)
            if not weights:
                verified.submit("broken", [*shared[:HIT], *tokens(verified.random, 8)] if hits else None, NEW)
                verified.broken = True
                verified.step(48)
            answer = verified.answer("right" if weights else "broken")
            wrong = [one for one in answer.layers if one.differs]
            found, where = "not found", ("", "")
            if wrong:
                finding = verified.guard.violations[-1]
                first = next(one for one in wrong if one.source == finding.source)
                found = f"{finding.source} from position {finding.position}, `{finding.rule}`"
                error, bound = (first.quarter, first.quarter_bound) if first.by_quarter else (first.worst, first.bound)
                where = f"{error:.2g}", f"{bound:.2g}"
            print("|", " | ".join((what, name_of(dtype), found, *where)), "|", flush=True)
        verified.model.load_state_dict(kept)
        verified.guard.close()
        verified.engine.close()


if __name__ == "__main__":
    with testing.one_thread():
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
        clean(count)
        with mock.patch.object(Noise, "settled", Noise.known):
            clean(count, hits=True)
        if DEVICE != "cpu":
            sys.exit()
        print("\n| what was broken | floats | first found in | error there | bound there |\n|---|---|---|---|---|")
        for floats in (torch.float32, torch.bfloat16):
            broken(floats)
