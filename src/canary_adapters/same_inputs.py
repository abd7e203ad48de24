"""Inputs of an internal request that are no tokens."""

import copy
from typing import Any

import torch


def same_inputs(name: str, target: Any, tokens: int) -> dict[str, Any]:
    """Arguments of a request ``name`` like vLLM's with the first ``tokens`` inputs of ``target``, beside the token ids:
    the prompt's embeddings, a mask for the positions of tokens, and media. The media have identifiers of their own, so
    that no cache has the encoder's output: it is computed again, too."""
    features = getattr(target, "mm_features", ())
    media = [_other(f"{name}/{i}", one) for i, one in enumerate(features) if one.mm_position.offset < tokens]
    embeds = getattr(target, "prompt_embeds", None)
    given: dict[str, Any] = {"mm_features": media} if media else {}
    if embeds is None:
        return given
    kept, decoded = embeds[:tokens], max(0, tokens - len(embeds))
    mask = (target.prompt_is_token_ids or [False] * len(embeds))[:tokens]
    rows = torch.cat([kept, kept.new_zeros(decoded, kept.shape[1])]) if decoded else kept
    return {**given, "prompt_embeds": rows, "prompt_is_token_ids": [*mask, *[True] * decoded]}


def _other(identifier: str, feature: Any) -> Any:
    other = copy.copy(feature)
    other.identifier = identifier
    return other
