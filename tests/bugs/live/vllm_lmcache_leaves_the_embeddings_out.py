"""LMCache's own connector beside vLLM's own prompts of embeddings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Missed
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine or of LMCache is replaced: nobody gives requests a salt for their embeddings."""
    stage.salted = False
    yield


def traffic(stage: Any) -> None:
    """Alice and Bob ask with embeddings, each with others, and as many. Where the engine is sound each has a
    `cache_salt`."""
    import torch

    salted = getattr(stage, "salted", True)
    hidden = stage.runner.model_config.get_hidden_size()
    for name in ("alice", "bob"):
        draw = torch.Generator().manual_seed(stage.tokens(name, 1)[0])
        if not salted and name == "bob":
            stage.strike()
        submit(stage, name, torch.randn(140, hidden, generator=draw), f"of-{stage.phase}{name}" if salted else None)
        finish(stage)


def submit(stage: Any, name: str, embeddings: Any, salt: str | None) -> None:
    """As vLLM's front end gives the engine core a prompt of embeddings."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    name = stage.phase + name
    stage.small.answers[name] = []
    stage.small.core.add_request(
        Request(
            request_id=name,
            prompt_token_ids=None,
            prompt_embeds=embeddings,
            sampling_params=SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False),
            pooling_params=None,
            block_hasher=stage.small.core.request_block_hasher,
            cache_salt=salt,
        )
    )


BUG = Bug(
    title="LMCache gives the KV of other embeddings",
    cause="LMCache's key has a prompt's tokens, and a prompt of embeddings has zeros there.",
    row=IDENTITY,
    issues=("vllm#42119",),
    setup="lmcache",
    broken=broken,
    traffic=traffic,
    default=Missed(
        "what a connector brings for a prompt of embeddings is not judged, since the embeddings of a text rightly have "
        "the text's KV"
    ),
    releases=">=0.28,<0.29",
    beside="lmcache>=0.5.2,<0.5.3",
)
