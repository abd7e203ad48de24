"""Embeddings and media in the place of tokens: requests with the same placeholders share nothing but the same content;
where they do, it is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_vllm.batches import contents
from vllm_on_cpu import guarded, parked

from canary_adapters import embedding_numbers, media_number
from canary_core import Kind, Writers

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("contents")]
LENGTH = 100


@pytest.fixture(scope="module")
def small():
    """An engine that takes embeddings."""
    from vllm_on_cpu.engine import SmallEngine

    return SmallEngine("llama", enable_prompt_embeds=True)


def rows(small: Any, seed: int) -> torch.Tensor:
    """A prompt of embeddings. The first half is the same for all."""
    hidden = small.runner.model_config.get_hidden_size()
    first = torch.randn(LENGTH // 2, hidden, generator=torch.Generator().manual_seed(1))
    return torch.cat([first, torch.randn(LENGTH // 2, hidden, generator=torch.Generator().manual_seed(seed))])


def submit(small: Any, name: str, embeds: torch.Tensor, **more: Any) -> None:
    """As vLLM's front end gives the engine core a prompt of embeddings."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    small.answers[name] = []
    about = dict(sampling_params=params, pooling_params=None, block_hasher=small.core.request_block_hasher)
    small.core.add_request(
        Request(request_id=name, **about, prompt_embeds=embeds, **{"prompt_token_ids": None, **more})
    )


def serve(small: Any) -> None:
    """All that is queued."""
    while small.step():
        pass


def test_prompts_of_embeddings_are_guarded_and_silent(small):
    """Alone and beside tokens, with prefix hits on the same embeddings, in chunks: nothing is found or unknown."""
    with guarded.guard(small) as guard:
        for turn, seed in enumerate((2, 3, 2)):
            submit(small, f"given-{turn}", rows(small, seed))
            small.submit(f"text-{turn}", [*range(5, 90)], 4)
            serve(small)
        assert small.answers["given-0"] == small.answers["given-2"]
        assert guard.trouble() == []
        stats = guard.canary.stats()
        assert stats["unknown_slots"] == 0
        assert "contents_untold" not in stats


def test_a_prefix_hit_across_embeddings_is_told(small, monkeypatch):
    """vLLM's own hash of blocks forgets the embeddings: the second request is given the first one's blocks. Findings
    begin where the embeddings differ."""
    from vllm.v1.core import kv_cache_utils

    with guarded.guard(small) as guard:
        monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda _, __, ___, index: (None, index))
        for name, seed in (("alice", 2), ("bob", 3)):
            submit(small, name, rows(small, seed))
            serve(small)
        guard.canary.drain()
        found = guard.findings.violations
        assert {(v.kind, v.request, v.stored_request) for v in found} == {(Kind.PREFIX, "bob", "alice")}
        assert [v.position for v in found] == list(range(LENGTH // 2, 96))
        assert found[0].identity.startswith("at positions 0 to 99 embeddings #")
        assert found[0].stored_identity.startswith("embeddings #")


def test_a_mask_says_where_the_embeddings_are(small, monkeypatch):
    """A prompt that mixes tokens and embeddings: where other embeddings are hit, only their positions are told."""
    from vllm.v1.core import kv_cache_utils

    mask = [not 10 <= i < 14 for i in range(LENGTH)]
    tokens = [i + 5 if own else 0 for i, own in enumerate(mask)]
    with guarded.guard(small) as guard:
        for turn in range(2):
            submit(small, f"mixed-{turn}", rows(small, 2), prompt_token_ids=tokens, prompt_is_token_ids=mask)
            serve(small)
        assert guard.trouble() == []
        monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda _, __, ___, index: (None, index))
        for name, by in (("alice", 1), ("bob", 2)):
            submit(small, name, rows(small, 2) * by, prompt_token_ids=tokens, prompt_is_token_ids=mask)
            serve(small)
        guard.canary.drain()
        found = [v for v in guard.findings.violations if v.request == "bob"]
        assert [v.position for v in found] == [10, 11, 12, 13]
        assert found[0].identity.startswith("at positions 10 to 13 embeddings #")


@pytest.mark.without_engine
def test_media_are_known_by_vllms_own_identifier():
    """At their placeholders, as in the scheduler's process; those of a separate encoder are nowhere in the prompt."""

    def feature(identifier: str, offset: int, length: int) -> Any:
        position = SimpleNamespace(offset=offset, length=length)
        return SimpleNamespace(identifier=identifier, modality="image", mm_position=position, data=None)

    about = SimpleNamespace(prompt_token_ids=[*range(10)], prompt_embeds=None, num_prompt_tokens=10, request_id="a")
    about.mm_features = [feature("cat", 2, 3), feature("dog", 6, 1), feature("speech", 0, 1500)]
    cat, dog = media_number("cat"), media_number("dog")
    seen = [0, 1, cat, cat, cat, 5, dog, 7, 8, 9]
    assert contents.prompt(Writers(), "a", about).tolist() == seen
    assert contents.loaded(about, [*range(10), 11]) == [*seen, 11]
    about.mm_features = []
    assert contents.loaded(about, [1, 2]) == [1, 2]


@pytest.mark.without_engine
def test_a_prompt_of_embeddings_alone_has_numbers_for_tokens():
    """Whatever vLLM has in the place of tokens."""
    embeds = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    about = SimpleNamespace(prompt_token_ids=None, prompt_embeds=embeds)
    assert contents.prompt(Writers(), "a", about).tolist() == embedding_numbers(embeds).tolist()
    about.prompt_embeds = None
    assert contents.prompt(Writers(), "a", about) is None


def test_what_a_request_of_embeddings_left_is_not_computed_again(small):
    """Left out of what is remembered of ended requests, with the reason, which is the answer, too."""
    with guarded.guard(small, control="write") as guard:
        for name in ("one", "other"):
            submit(small, name, rows(small, 2))
            serve(small)
        assert parked.remembered(small).names() == ["one", "other"]
        (answer,) = parked.verify(small, "one")
        assert (answer.verdict, answer.reason) == (
            "unjudged",
            "media or embeddings in the place of tokens end with a request",
        )
        parked.serve(small, "text", [*range(3, 70)])
        (told,) = guard.findings.told("parked_left_out")
        assert told.fields["reason"] == answer.reason
        stats = guard.canary.stats()
        assert (stats["parked_left_out"], stats["parked_remembered"]) == (2, 3)
