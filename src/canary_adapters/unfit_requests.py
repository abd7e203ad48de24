"""Requests of a scheduler like vLLM's that can't be computed again."""

from typing import Any

from canary_core import Origin

FOREIGN = ("DecodeBenchConnector", "ExampleHiddenStatesConnector", "HiSparseConnector")
"""vLLM's connectors that make up KV, keep other numbers than KV, or must know each request's blocks."""


EMBEDDED = "embeddings or media stand in the place of tokens"


def unfit_connector(origin: Origin | None) -> str | None:
    """Why no request is computed again beside the engine's connector, None for no connector or no reason."""
    if origin is None:
        return None
    if origin.name in FOREIGN:
        return f"{origin.name} makes up KV, or must know of each request"
    if origin.lossy:
        return f"{origin.name} brings KV back with changed bytes"
    if origin.shared:
        return f"others may store with {origin.name}, and round otherwise, unless CANARY_LEDGER_PRIVATE names it"
    return None


def unfit_request(request: Any) -> str | None:
    """Why ``request`` can't be computed again, None for no reason."""
    if getattr(request, "kv_transfer_params", None):
        return "its KV goes to another engine, or comes from one"
    if request.mm_features:
        return EMBEDDED
    if request.sampling_params is None or getattr(request, "resumable", False):
        return "it is a pooling request, or a session that goes on"
    return None


def unfit_prefix(request: Any) -> str | None:
    """Why content of ``request`` in the prefix cache is not remembered, beside `unfit_request`."""
    return EMBEDDED if getattr(request, "prompt_embeds", None) is not None else None
