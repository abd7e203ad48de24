"""Requests that are alike but for what their KV depends on beside the tokens, and a prefix cache that forgets it."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from tools.inspection import findings
from tools.recomputes import DECODED, NEVER, finish, teach, verify


def serve_in_turn(
    engine: Any, prompt: list[int], identities: list[dict[str, str]], new_tokens: int = 4
) -> dict[str, Any]:
    """Serves the prompt once for each of the identities, fields of SGLang's message, one after the other; gives the
    names, how many tokens each found in the prefix cache, and the prefix hash that is recorded for its first token."""
    from canary_sglang.compat.schedulers import table_row

    names, cached, hashes = [], [], []
    for identity in identities:
        request = engine.submit(prompt, new_tokens, **identity)
        while not request.output_ids:
            engine.step()
        engine.session.canary.slots.settle()
        row, _ = table_row(engine.scheduler, request)
        names.append(request.rid)
        hashes.append(engine.states["full"].records[int(row[0]), 2:4].tolist())
        while not request.finished():
            engine.step()
        cached.append(int(request.cached_tokens))
    while engine.step():
        pass
    return {"names": names, "cached": cached, "hashes": hashes}


def forget_in_keys(engine: Any, field: str) -> None:
    """From now on the keys of the prefix cache lack ``field``, as where a new sort of request was not thought of."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    original = RadixKey.__init__

    def make(key: Any, *args: Any, **kwargs: Any) -> None:
        original(key, *args, **kwargs)
        setattr(key, field, None)

    RadixKey.__init__ = make


def serve_images(
    engine: Any, prompt: list[int], images: Sequence[int], at: int, length: int, new_tokens: int = 4
) -> dict[str, Any]:
    """Serves the prompt once for each of the images (a seed of its embeddings each), whose ``length`` tokens begin
    ``at`` a position of it, one after the other; gives names and how many tokens each found in the prefix cache."""
    names, cached = [], []
    for seed in images:
        request = engine.submit(prompt, new_tokens, mm_inputs=_image(seed, len(prompt), at, length))
        while not request.finished():
            engine.step()
        names.append(request.rid)
        cached.append(int(request.cached_tokens))
    while engine.step():
        pass
    return {"names": names, "cached": cached, "tokens": [list(r.origin_input_ids) for r in engine.requests]}


def _image(seed: int, prompt: int, at: int, length: int) -> Any:
    """What SGLang's processor makes of an image, but for the embeddings, which are given."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputFormat

    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(at, at + length - 1)])
    item.format = MultimodalInputFormat.PRECOMPUTED_EMBEDDING
    item.precomputed_embeddings = torch.randn(length, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    positions = torch.arange(prompt).expand(3, -1).contiguous()
    return schedule_batch.MultimodalProcessorOutput(
        mm_items=[item], im_token_id=255, mrope_positions=positions, mrope_position_delta=torch.zeros(1, 1).long()
    )


def verify_images(
    engine: Any, prompts: dict[str, list[int]], images: dict[str, int], at: int, length: int
) -> dict[str, Any]:
    """Once the noise is known: requests with an image each, as of `serve_images`, one after the other; each one runs,
    is verified, and ends. Gives verdicts, findings, outputs and the images whose media are still there."""
    teach(engine)
    findings(engine)
    answers, cached, kept = [], [], []
    for name, prompt in prompts.items():
        request = engine.submit(prompt, NEVER, name, mm_inputs=_image(images[name], len(prompt), at, length))
        while len(request.output_ids) < DECODED:
            engine.step()
        answers += verify(engine, name)
        cached.append(int(request.cached_tokens))
        kept.append(request.multimodal_inputs.mm_items[0].precomputed_embeddings is not None)
        finish(engine, name)
    outputs = [list(request.output_ids)[:DECODED] for request in engine.requests[-len(prompts) :]]
    return {"answers": answers, "cached": cached, "kept": kept, "outputs": outputs, **findings(engine)}


def verify_overrides(engine: Any, prompt: list[int], at: list[int], seeds: Sequence[int]) -> dict[str, Any]:
    """The same for requests with embeddings of their own ``at`` some positions."""
    from sglang.srt.managers.embed_types import PositionalEmbeds

    teach(engine)
    findings(engine)
    answers = []
    for seed in seeds:
        hidden = engine.runner.model_config.hf_config.hidden_size
        rows = torch.randn(len(at), hidden, generator=torch.Generator().manual_seed(seed))
        given = PositionalEmbeds(embeds=rows, positions=at)
        request = engine.submit(prompt, NEVER, f"given {seed}", positional_embed_overrides=given)
        while len(request.output_ids) < DECODED:
            engine.step()
        answers += verify(engine, request.rid)
        finish(engine, request.rid)
    return {"answers": answers, **findings(engine)}


def match_any_image(engine: Any) -> None:
    """From now on the keys of the prefix cache have the image's placeholder where its hash should be."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    original = RadixKey.__init__

    def make(key: Any, token_ids: Any, *args: Any, **kwargs: Any) -> None:
        original(key, array("q", [min(token, 255) for token in token_ids]), *args, **kwargs)

    RadixKey.__init__ = make


def serve_overrides(
    engine: Any, prompt: list[int], at: list[int], seeds: Sequence[int | None], new_tokens: int = 4
) -> dict[str, Any]:
    """Serves the prompt once for each of the ``seeds``, in turn, with embeddings from the seed in the place of the
    tokens ``at`` some positions, None for the plain tokens; gives how many tokens each found in the prefix cache."""
    from sglang.srt.managers.embed_types import PositionalEmbeds

    cached = []
    for seed in seeds:
        more = {}
        if seed is not None:
            hidden = engine.runner.model_config.hf_config.hidden_size
            rows = torch.randn(len(at), hidden, generator=torch.Generator().manual_seed(seed))
            more = {"positional_embed_overrides": PositionalEmbeds(embeds=rows, positions=at)}
        request = engine.submit(prompt, new_tokens, **more)
        while not request.finished():
            engine.step()
        cached.append(int(request.cached_tokens))
    while engine.step():
        pass
    return {"cached": cached}
