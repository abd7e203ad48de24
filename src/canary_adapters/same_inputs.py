"""Inputs of an internal request that are no tokens."""

from typing import Any

import torch


def embedded_prompt(target: Any, tokens: int) -> dict[str, Any]:
    """Arguments of a request like vLLM's with the first ``tokens`` inputs of ``target``, beside the token ids: the
    prompt's embeddings, and a mask for the positions of tokens. None for a prompt without embeddings."""
    embeds = getattr(target, "prompt_embeds", None)
    if embeds is None:
        return {}
    given, decoded = embeds[:tokens], max(0, tokens - len(embeds))
    mask = (target.prompt_is_token_ids or [False] * len(embeds))[:tokens]
    rows = torch.cat([given, given.new_zeros(decoded, given.shape[1])]) if decoded else given
    return {"prompt_embeds": rows, "prompt_is_token_ids": [*mask, *[True] * decoded]}
