"""Requests that a server may get and that are not what others are."""

from typing import Any

import torch

from tools.inspection import findings


def _served(engine: Any) -> dict[str, Any]:
    """Serves what was submitted. Gives what was found, whether Canary is on, and the answers."""
    while engine.step():
        pass
    (canary,) = engine.canaries
    on = bool(canary.enabled)
    answers = {request.rid: list(request.output_ids) for request in engine.requests}
    return {**findings(engine), "on": on, "answers": answers}


def serve_embeddings(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """The same prompt as tokens and, with an empty cache, as their embeddings, then as tokens again."""
    weight = engine.runner.model.model.embed_tokens.weight.detach()
    for name, embedded in (("text", False), ("given", True), ("again", False)):
        more = {"input_embeds": weight[torch.tensor(prompt)].float().tolist()} if embedded else {}
        engine.submit([] if embedded else prompt, 4, name, **more)
        done = _served(engine)
        engine.scheduler.flush_cache()
    return done


def serve_twins(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """All of them at once, under one name: the scheduler takes them."""
    for prompt in prompts:
        engine.submit(prompt, 6, "twin")
    return _served(engine)


def serve_beams(engine: Any, prompt: list[int], other: list[int]) -> dict[str, Any]:
    """A request with two beams while another one decodes. Empty where this SGLang has no beams."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    try:
        sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, beam_width=2)
    except TypeError:
        return {}
    sampling.normalize(None)
    engine.submit(other, 12, "other")
    for _ in range(3):
        engine.step()
    engine.submit(prompt, 8, "beams", sampling_params=sampling)
    return _served(engine)
