"""Prompts of embeddings, computed again on a real vLLM: clean ones are well, and KV of other embeddings is told."""

from typing import Any

import pytest
import torch
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, verified
from vllm_on_cpu.engine import SmallEngine

from canary_core import Kind

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("contents")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
LENGTH, ALIKE = 100, 50


@pytest.fixture(scope="module")
def small() -> SmallEngine:
    """An engine that takes embeddings, with weights that matter."""
    options = dict(load_format="auto", num_gpu_blocks_override=64, max_num_seqs=12)
    return SmallEngine(verified.weighty(), **options, enable_prompt_embeds=True)


KINDS = ("given", "mixed", "text")


def rows(small: SmallEngine, seed: int) -> torch.Tensor:
    """A prompt of embeddings. The first half is the same for all."""
    hidden = small.runner.model_config.get_hidden_size()
    first = torch.randn(ALIKE, hidden, generator=torch.Generator().manual_seed(1))
    return torch.cat([first, torch.randn(LENGTH - ALIKE, hidden, generator=torch.Generator().manual_seed(seed))])


def submit(small: SmallEngine, name: str, embeds: torch.Tensor, **more: Any) -> None:
    """As vLLM's front end gives the engine core a prompt of embeddings."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
    small.answers[name] = []
    about = dict(sampling_params=params, pooling_params=None, block_hasher=small.core.request_block_hasher)
    small.core.add_request(
        Request(request_id=name, **about, prompt_embeds=embeds, **{"prompt_token_ids": None, **more})
    )


def mixed() -> dict[str, Any]:
    """Of a prompt with embeddings at four positions, and tokens at the others."""
    mask = [not 10 <= i < 14 for i in range(LENGTH)]
    return {"prompt_token_ids": [i + 5 if own else 0 for i, own in enumerate(mask)], "prompt_is_token_ids": mask}


def traffic(small: SmallEngine) -> dict[str, list[int]]:
    """Embeddings alone, beside tokens and mixed with them, with hits."""
    for turn, seed in enumerate((2, 3, 2, 3)):
        submit(small, f"given-{turn}", rows(small, seed))
        submit(small, f"mixed-{turn}", rows(small, seed), **mixed())
        small.submit(f"text-{turn}", [*range(5, 90)], 40)
        verified.finish(small)
    return dict(small.answers)


def test_clean_traffic_is_well_and_answers_stay_the_same(small):
    """Each verdict is the same, in the prompt and in decoded tokens, once the noise is known."""
    small.renew()
    plain = traffic(small)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        verified.teach(small)
        assert {name: answer for name, answer in traffic(small).items() if name in plain} == plain
        (session,) = HOOKS.sessions
        answers = [one for one in session.recomputed.answers if one.request.partition("-")[0] in KINDS]
        assert {answer.verdict for answer in answers} == {"same"}
        assert {answer.request.partition("-")[0] for answer in answers} == {*KINDS}
        assert [one for one in guard.trouble() if not one.startswith("unjudged ")] == []


@pytest.mark.parametrize(("kind", "layer", "position"), [("given", 0, ALIKE), ("mixed", 1, 10)])
def test_kv_of_other_embeddings_is_told(small, kind, layer, position, monkeypatch):
    """vLLM's hash of blocks forgets the embeddings: the second request is given the first one's blocks. Told is the
    first position at which the embeddings differ; of four such tokens alone, layer 0 says too little."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda _, __, ___, index: (None, index))
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        for name, seed in (("alice", 2), ("bob", 3)):
            embeds, more = (rows(small, seed), {}) if kind == "given" else (rows(small, seed).flip(0), mixed())
            submit(small, name, embeds, **more)
            while len(small.answers[name]) < 2:
                assert small.step()
            (answer,) = verified.verify(small, name)
            verified.finish(small)
            assert answer.verdict == ("same" if name == "alice" else "differs"), answer.table()
        guard.canary.drain()
        # The records say so, too: these know the embeddings of each prompt.
        found = [v for v in guard.findings.violations if v.kind is not Kind.PREFIX]
        assert [(v.kind, v.request, v.rule) for v in found] == [(Kind.RECOMPUTE, "bob", "brought")]
        assert (found[0].layer, found[0].position) == (layer, position)
