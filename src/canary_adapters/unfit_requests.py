"""Requests of a scheduler like vLLM's that can't be computed again."""

from collections.abc import Callable
from typing import Any

from canary_core import Origin

FOREIGN = ("DecodeBenchConnector", "ExampleHiddenStatesConnector", "HiSparseConnector")
"""vLLM's connectors that make up KV, keep other numbers than KV, or must know each request's blocks."""


EMBEDDED = "media or embeddings in the place of tokens end with a request"


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


def refusals(scheduler: Any, origin: Origin | None) -> Callable[[Any], str | None]:
    """A function that gives the reason for which a request of ``scheduler`` can't be computed again, None for no
    reason. ``origin``: of what the connector brings."""
    connector = unfit_connector(origin)
    return lambda request: connector or unfit_request(request) or _unfit_media(scheduler, request)


def unfit_request(request: Any) -> str | None:
    """Why ``request`` can't be computed again, None for no reason in the request itself."""
    if getattr(request, "kv_transfer_params", None):
        return "its KV goes to another engine, or comes from one"
    if request.sampling_params is None or getattr(request, "resumable", False):
        return "it is a pooling request, or a session that goes on"
    return None


def _unfit_media(scheduler: Any, request: Any) -> str | None:
    """Why images and other media can't be handed to a second request."""
    if not request.mm_features:
        return None
    model = scheduler.vllm_config.model_config
    if model.is_encoder_decoder:
        return "its media are read by an encoder beside the tokens"
    if getattr(model, "is_mm_prefix_lm", False):
        return "attention to its media depends on the chunks"
    if getattr(scheduler, "ec_connector", None) is not None:
        return "what an encoder makes of its media comes from another engine"
    return "its media are gone" if any(one.data is None for one in request.mm_features) else None


def unfit_prefix(request: Any) -> str | None:
    """Why content of ``request`` in the prefix cache is not remembered, beside `refusals`."""
    embedded = getattr(request, "prompt_embeds", None) is not None or request.mm_features
    return EMBEDDED if embedded else None
