"""Content of vLLM's requests in the place of tokens: ``prompt_embeds``, images and other media."""

from array import array
from typing import Any

import torch
from torch import Tensor

from canary_adapters import number_array, put_embeddings, put_media, upload
from canary_core import Writers


def put(writers: Writers, name: str, request: Any, length: int) -> None:
    """Tells ``writers`` the content of ``request``, by vLLM's object or message, with a prompt of ``length`` tokens.
    Media count by vLLM's own identifier, by which the prefix cache keeps them apart. Media of a separate encoder have
    no positions here."""
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is not None:
        mask = getattr(request, "prompt_is_token_ids", None)
        at = range(len(embeds)) if mask is None else [i for i, is_token in enumerate(mask) if not is_token]
        put_embeddings(writers, name, at, embeds if mask is None else embeds[at])
    for feature in getattr(request, "mm_features", None) or ():
        first, count = int(feature.mm_position.offset), int(feature.mm_position.length)
        if first + count <= length:
            put_media(writers, name, first, count, (str(feature.modality), feature.identifier))


def prompt(writers: Writers, name: str, request: Any) -> "Tensor | array[int] | None":
    """The prompt in vLLM's message about a new request, int32 ``[n]`` on the host, with numbers in the place of tokens
    where ``writers`` knows of content; -1 for unknown tokens. None without a prompt."""
    # V2 sends all that is computed again after a preemption; V1 the prompt.
    tokens = getattr(request, "prefill_token_ids", None) or request.prompt_token_ids
    embeds: Any = getattr(request, "prompt_embeds", None)
    if tokens is None and embeds is None:
        return None
    if embeds is None and not getattr(request, "mm_features", None):
        return number_array(tokens, "i")
    own = upload([-1] * len(embeds) if tokens is None else tokens, torch.device("cpu"), torch.int32)
    put(writers, name, request, len(own))
    return writers.contents.over(name, own)


def loaded(request: Any, tokens: list[int]) -> list[int]:
    """The first tokens of vLLM's `Request`, with numbers in the place of media."""
    if not getattr(request, "mm_features", None):
        return tokens
    writers = Writers()
    put(writers, request.request_id, request, int(request.num_prompt_tokens))
    return writers.contents.over(request.request_id, upload(tokens, torch.device("cpu"))).tolist()
