"""Speculative decoding: draft models and n-grams."""

from collections.abc import Sequence
from typing import Any

from canary_sglang.compat.switches import switched_on
from canary_sglang.compat.targets import DRAFT_MODEL_TARGETS, MOVE_ACCEPTED, NGRAM, existing

FOLLOWED_SPECULATION = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"})
"""Algorithms that allocate slots for drafted tokens in preparation of a decode, and free those of rejected tokens at
the end of the request."""


def draft_refusal(runner: Any) -> str | None:
    """Why a draft model's pool can't be guarded without false alarms. None if it can: then `DRAFT_WORKER` runs the
    model, and its written slots are known."""
    args = runner.server_args
    algorithm = str(args.speculative_algorithm)
    if algorithm.upper() not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        return f"a draft model of {algorithm}; not covered yet"
    if getattr(args, "enable_multi_layer_eagle", False):
        return "draft models of multi-layer EAGLE write each other's positions ahead; not covered yet"
    if switched_on("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"):
        return "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND leaves verified tokens out of the draft model's pool"
    missing = [name for name in DRAFT_MODEL_TARGETS if name not in existing(DRAFT_MODEL_TARGETS)]
    return f"this SGLang has no {', '.join(missing)}" if missing else None


def draft_targets(runner: Any) -> Sequence[str]:
    """Functions of draft workers to hook if the runner's model is guarded. Imports their modules."""
    if runner.is_draft_worker:
        return (*DRAFT_MODEL_TARGETS, *existing((MOVE_ACCEPTED,)))
    ngram = str(getattr(runner.server_args, "speculative_algorithm", None)).upper() == "NGRAM"
    return (NGRAM, MOVE_ACCEPTED) if ngram and len(existing((NGRAM, MOVE_ACCEPTED))) == 2 else ()


def shared_with_next_token(runner: Any) -> bool:
    """Whether requests that share a cached slot always have the same next token, too. A draft model's slot holds that
    token. With EAGLE the keys of the cache are pairs of tokens, so the answer is yes. Not with STANDALONE, with
    recurrent states, or with the cache in C++: there the last slot of a shared prefix may hold the next token of
    another request."""
    if not runner.is_draft_worker or getattr(runner.server_args, "disable_radix_cache", False):
        return True
    by_pairs = runner.spec_algorithm.is_eagle() and not hasattr(runner.req_to_token_pool, "mamba_pool")
    return bool(by_pairs) and not switched_on("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE")
