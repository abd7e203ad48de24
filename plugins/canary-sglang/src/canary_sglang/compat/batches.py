"""`ForwardBatch`: checkable forwards, and their way of speculating."""

from typing import Any

CHECKED_MODES = frozenset({"DECODE", "EXTEND", "MIXED", "TARGET_VERIFY"})
"""Names of `ForwardMode` values whose batch alone tells the forward's reads and writes."""

NO_KV_MODES = frozenset({"IDLE", "PREBUILT"})
"""Names of `ForwardMode` values without writes of KV."""


def writes_kv(batch: Any) -> bool:
    """Whether the forward of a `ForwardBatch` writes slots of its requests. False for None."""
    return batch is not None and bool(
        batch.rids and batch.out_cache_loc is not None and batch.forward_mode.name not in NO_KV_MODES
    )


def has_beams(batch: Any) -> bool:
    """Whether a beam search has appended rows without a request of their own to ``batch``."""
    return batch.rids is not None and batch.seq_lens.shape[0] > len(batch.rids)


def is_checked(batch: Any) -> bool:
    """Whether the forward of a `ForwardBatch` can be checked: its mode is one of `CHECKED_MODES`, without a mix of
    extends and speculating decodes, whose lengths are set by the overlap scheduler later than the host's copy."""
    mode = batch.forward_mode.name
    return mode in CHECKED_MODES and not (mode == "MIXED" and speculates(batch))


def has_images(batch: Any) -> bool:
    """Whether a `ForwardBatch` computes prompts of requests with images or other media. Their tokens are hashes, until
    the model's forward cuts them to the vocabulary, in place."""
    if batch.mm_inputs is None or batch.forward_mode.name not in ("EXTEND", "MIXED"):
        return False
    return any(item is not None for item in batch.mm_inputs)


def strips_media(batch: Any) -> bool:
    """Whether the tokens of media are missing in the batch's tokens: a separate encoder has them."""
    return getattr(batch, "encoder_lens", None) is not None


def speculates(batch: Any) -> bool:
    """Whether the decodes of a `ForwardBatch` or `ScheduleBatch` are speculative."""
    algorithm = getattr(batch, "spec_algorithm", None)
    return algorithm is not None and not algorithm.is_none()


def is_tree(batch: Any) -> bool:
    """Whether a `ForwardBatch` verifies a tree, whose tokens share positions. N-grams may form one."""
    if batch.forward_mode.name != "TARGET_VERIFY":
        return False
    drafted = batch.spec_info
    if type(drafted).__name__ == "NgramVerifyInput":
        return True
    return bool(type(drafted).__name__ == "EagleVerifyInput" and drafted.topk > 1 and drafted.draft_token_num > 1)


def verified_tokens(batch: Any) -> int | None:
    """Number of drafted tokens written by a ``TARGET_VERIFY`` for each request; None if unknown."""
    drafted = batch.spec_info
    known = type(drafted).__name__ in ("EagleVerifyInput", "NgramVerifyInput")
    return int(drafted.draft_token_num) if known else None
