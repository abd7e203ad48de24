"""Rows of `generate()` and direct calls computed again: what no comparison of bytes sees is found, clean answers are
not blamed, and none changes. The model is broken from outside, in forwards of its user only."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from canary_transformers.generate.forward import ModelCall
from canary_transformers.generate.given import Given
from tiny.answers import NEW, PROMPT, one_short, shifted_positions, weights_change
from tiny.generation import CACHE
from tiny.verified import skipped_layer
from transformers import StoppingCriteria, StoppingCriteriaList

from canary_core import CanaryError, Kind
from canary_core.watchers.recompute import sampler

pytestmark = pytest.mark.usefixtures("one_thread")
BESIDE = pytest.mark.takes_turns("the same of Llama in float32")


class After(StoppingCriteria):
    """Does something once so many tokens are there."""

    def __init__(self, tokens: int, act: Callable[[], None]) -> None:
        self.tokens, self.act = tokens, act

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.tokens:
            self.act()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def after(tokens: int, act: Callable[[], None]) -> dict[str, Any]:
    """As an argument of `Answers.generate`."""
    return {"stopping_criteria": StoppingCriteriaList([After(tokens, act)])}


@pytest.mark.parametrize(
    ("kind", "floats"),
    [
        ("llama", "float32"),
        pytest.param("llama", "bfloat16", marks=BESIDE),
        pytest.param("gemma3", "bfloat16", marks=BESIDE),
    ],
)
def test_weights_changed_in_the_middle_of_an_answer_are_found(kind, floats, answers):
    """In both rows, one behind padding; from layer 1 on. An answer of the new weights alone is the same."""
    one = answers(kind, floats)
    one.taught()
    ids = one.prompts(2)
    ids[0, :5] = 0
    kept = one.generate(ids, **after(PROMPT + 40, lambda: weights_change(one)))
    found = {answer.request.rpartition(" ")[2]: answer for answer in one.verdicts()}
    assert {row: answer.verdict for row, answer in found.items()} == {"0": "differs", "1": "differs"}, found[
        "0"
    ].table()
    told = [v for v in one.guard.violations if v.kind is Kind.RECOMPUTE]
    assert {(v.layer, v.rule) for v in told} == {(1, "everywhere")}
    assert {v.position for v in told} == {0, 5}
    kept = one.generate(one.prompts())
    assert kept is not None
    assert [answer.verdict for answer in one.verdicts()] == ["same"]


@pytest.mark.parametrize("floats", ["float32", pytest.param("bfloat16", marks=BESIDE)])
@pytest.mark.parametrize(
    ("fault", "rule", "layer"),
    [(skipped_layer, "attention", 2), (shifted_positions, "half", 0)],
)
def test_a_later_call_that_is_broken_is_found(fault, rule, layer, floats, answers, monkeypatch):
    """Direct calls with the bytes as written: the second chunk of a prompt. The same without the fault is the same."""
    one = answers("llama", floats)
    one.taught()
    fault(one, monkeypatch)
    for broken in (False, True):
        cache, ids = one.cache(static=broken), one.prompts(1, 120)
        for chunk in range(3):
            one.broken = broken and chunk == 1
            one.call(cache, ids[:, 40 * chunk : 40 * chunk + 40])
        one.broken = False
        (answer,) = one.verdicts()
        assert answer.verdict == ("differs" if broken else "same"), answer.table()
    (found,) = [v for v in one.guard.violations if v.kind is Kind.RECOMPUTE]
    assert (found.rule, found.layer) == (rule, layer)
    assert 40 <= found.position <= 42


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=BESIDE)])
def test_attention_one_short_in_decodes_is_found(kind, answers, monkeypatch):
    """From the first decode on; layers with a window and without."""
    one = answers(kind)
    one.taught()
    one_short(one, monkeypatch)
    one.broken = True
    kept = one.generate(one.prompts())
    one.broken = False
    (answer,) = one.verdicts()
    assert kept is not None
    assert answer.verdict == "differs", answer.table()
    (found,) = [v for v in one.guard.violations if v.kind is Kind.RECOMPUTE]
    assert found.position >= PROMPT


@pytest.mark.parametrize(
    ("kind", "floats"),
    [
        ("llama", "float32"),
        pytest.param("mistral", "float32", marks=BESIDE),
        pytest.param("gemma3", "bfloat16", marks=BESIDE),
    ],
)
def test_clean_answers_are_never_blamed(kind, floats, answers):
    """Of several rows, padded, sampled, in chunks and beams, with static caches, and continued."""
    one = answers(kind, floats)
    one.taught()
    judged = []
    for settings in (
        {"do_sample": True},
        {"num_beams": 3, "max_new_tokens": 10},
        {"prefill_chunk_size": 16, "cache_implementation": "static", "max_new_tokens": 20},
        {"prompt_lookup_num_tokens": 3, "rows": 1, "max_new_tokens": 20},
    ):
        # Moved or dropped rows are not followed where all layers have a window.
        if kind == "mistral" and ({*settings} & {"num_beams", "prompt_lookup_num_tokens"}):
            continue
        ids = one.prompts(settings.pop("rows", 3))
        ids[0, : 7 * (len(ids) > 1)] = 0
        kept = one.generate(ids, **settings)
        judged += one.verdicts()
        del kept
    kept = one.generate(one.prompts(2), max_new_tokens=10)
    more = torch.cat([kept.sequences, one.prompts(2, 8)], 1)
    # A token of the answer may be that of padding.
    again = one.generate(more, attention_mask=torch.ones_like(more), **{CACHE: kept[CACHE]})
    assert again is not None
    judged += one.verdicts()
    assert [answer.table() for answer in judged if answer.verdict != "same"] == []
    assert len(judged) == 3 + 3 + 2 + (0 if kind == "mistral" else 9 + 1)
    assert one.guard.violations == []


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=BESIDE)])
def test_where_all_rows_go_on_from_an_earlier_answer_there_are_verdicts(kind, answers):
    """Noise is learnt from such rows. What a weight that changed between the answers left in them is found, although
    nothing else was ever seen."""
    one = answers(kind)
    ids = one.prompts(4)
    kept = one.generate(ids, max_new_tokens=10)
    more = torch.cat([kept.sequences, one.prompts(4, 8)], 1)
    kept = one.generate(more, attention_mask=torch.ones_like(more), **{CACHE: kept[CACHE]})
    judged = one.verdicts()
    assert [answer.verdict for answer in judged[:3]] in (["unjudged"] * 3, ["same"] * 3)
    judged += one.verdicts()
    assert {answer.verdict for answer in judged[3:]} == {"same"}, judged[3].table()
    assert one.guard.stats()["recompute_taught"] == 4
    older = one.generate(one.prompts(), max_new_tokens=10)
    weights_change(one)
    more = torch.cat([older.sequences, one.prompts(1, 8)], 1)
    older = one.generate(more, attention_mask=torch.ones_like(more), **{CACHE: older[CACHE]})
    found = {answer.verdict for answer in one.verdicts() if answer.tokens < kept.sequences.shape[1]}
    assert found <= {"differs"}
    assert {(v.layer, v.rule, v.position) for v in one.guard.violations} == {(1, "brought", 0)}


@pytest.mark.parametrize(
    "recompute", [pytest.param("0", marks=pytest.mark.takes_turns("the same by the setting")), "100%"]
)
def test_answers_are_the_same_bit_for_bit(recompute, answers):
    """Sampled ones, with rows computed again at every step, by a call or by the setting, and without: the same tokens,
    and the same KV."""
    made = []
    for verify in (True, False):
        one = answers(recompute=recompute if verify else "0")
        ids = torch.tensor([[*range(3, 43)], [*range(50, 90)]])
        torch.manual_seed(5)
        look = {} if recompute != "0" or not verify else after(PROMPT + 20, lambda one=one: one.guard.verify())
        kept = one.generate(ids, do_sample=True, **look)
        made.append((kept.sequences, [layer.keys for layer in kept[CACHE].layers]))
        assert (one.guard.stats().get("recomputed_requests", 0) > 1) is verify
        assert one.guard.violations == []
        one.guard.close()
    assert torch.equal(made[0][0], made[1][0])
    assert all(map(torch.equal, made[0][1], made[1][1]))


def test_weights_changed_are_found_without_being_asked_for(answers, monkeypatch):
    """By ``CANARY_RECOMPUTE`` alone. Searches don't wait for the clock, so that each row is looked at."""
    monkeypatch.setattr(sampler, "LOOK_S", 0.0)
    one = answers(recompute="1000")
    for _ in range(5):
        one.generate(one.prompts(2))
    assert one.guard.violations == []
    one.generate(one.prompts(), max_new_tokens=70, **after(PROMPT + 10, lambda: weights_change(one)))
    assert {v.kind for v in one.guard.violations} == {Kind.RECOMPUTE}, one.guard.stats()
    assert one.guard.stats()["recompute_differs"] > 0


def test_any_thread_may_ask(answers):
    """While it generates, and of a cache that is kept: by its own thread at once, by another one with the next forward
    of that thread, or at once where it has ended."""
    one = answers()
    one.taught()
    told: list[Any] = []
    asking = threading.Thread(target=lambda: told.append(one.guard.verify(timeout_s=300)))

    def ask() -> None:
        asking.start()
        while not one.guard._verifiers._waits:
            pass

    kept = one.generate(one.prompts(), **after(PROMPT + 40, ask))
    asking.join()
    # The last token of the sequence is computed by the next forward.
    assert [(answer.verdict, answer.tokens) for answer in told[0]] == [("same", PROMPT + 39)]
    (name,) = {answer.request for answer in told[0]}
    late: list[Any] = []
    idle = threading.Thread(target=lambda: late.extend(one.guard.verify(name, timeout_s=0.2)))
    idle.start()
    idle.join()
    assert "did not come between two forwards within 0.2 s" in late[0].reason
    del kept
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(one.generate(one.prompts())))
    thread.start()
    thread.join()
    assert [answer.verdict for answer in one.verdicts()] == ["same"]
    hook = one.model.model.layers[0].register_forward_hook(lambda *given: one.guard.verify())
    with pytest.raises(CanaryError, match="within a forward"):
        one.generate(one.prompts())
    hook.remove()


def test_what_can_not_be_computed_again_says_so(answers):
    """Each with its reason, counted, and told once."""
    one = answers()
    one.taught()
    ids = one.prompts()
    before = one.guard.stats()["recompute_unjudged"]

    def reason(cache: Any) -> str:
        (answer,) = one.verdicts()
        assert (answer.verdict, answer.finding) == ("unjudged", None), answer.table()
        return str(answer.reason)

    cache = one.cache()
    one.model(inputs_embeds=one.model.get_input_embeddings()(ids), **{CACHE: cache})
    assert "given as embeddings" in reason(cache)
    cache = one.cache()
    one.call(cache, ids, attention_mask=torch.ones(1, 1, PROMPT, PROMPT).tril() > 0)
    assert "attention_mask of other than two dimensions" in reason(cache)
    cache, mask = one.cache(), torch.ones(1, 2 * PROMPT, dtype=torch.long)
    one.call(cache, ids, attention_mask=mask[:, :PROMPT])
    mask[:, 3] = 0
    one.call(cache, ids, attention_mask=mask)
    assert "was written to in place" in reason(cache)
    cache = one.cache()
    one.call(cache, ids)
    one.call(cache, ids, attention_mask=mask)
    assert "visible to one forward, and masked for another" in reason(cache)
    cache = one.cache()
    one.call(cache, ids, position_ids=torch.arange(0, 2 * PROMPT, 2)[None])
    assert "do not count up by one" in reason(cache)
    cache = copy.deepcopy(one.cache())
    one.model.train()
    one.call(cache, ids)
    one.model.eval()
    assert "in training mode" in reason(cache)
    cache = one.cache()
    one.call(cache, ids)
    cache.layers[1].keys = cache.layers[1].keys[:, :, :-1]
    cache.layers[1].values = cache.layers[1].values[:, :, :-1]
    assert "changed by something else" in reason(cache)
    del cache
    (unknown,) = one.guard.verify("generate 99 row 0") if one.guard._caches else (None,)
    assert unknown is None
    with pytest.raises(CanaryError, match="no cache of generate"):
        one.guard.verify()
    assert one.guard.stats()["recompute_unjudged"] == before + 7
    assert len(one.findings.told("unjudged")) >= 7
    assert one.guard.violations == []


def test_positions_and_masks_of_direct_calls_are_followed(answers):
    """A padded row with positions given, and without; a cropped cache, and rows that changed places."""
    one = answers()
    one.taught()
    ids, mask = one.prompts(2), torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for more in ({"position_ids": positions}, {}):
        cache = one.cache()
        one.call(cache, ids, attention_mask=mask, **more)
        longer = torch.cat([mask, torch.ones_like(mask)], 1)
        placed = {"position_ids": positions[:, -1:] + torch.arange(1, PROMPT + 1)} if more else {}
        one.call(cache, one.prompts(2), attention_mask=longer, **placed)
        assert [answer.verdict for answer in one.verdicts()] == ["same", "same"]
    cache.crop(-10)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    found = one.verdicts()
    assert [(answer.verdict, answer.tokens) for answer in found] == [("same", 2 * PROMPT - 10)] * 3
    assert one.guard.violations == []


def test_positions_given_to_many_forwards_are_kept_as_one():
    """Of a decode in a loop of the caller's own."""
    given, ids = Given(), torch.tensor([[5], [6]])
    for n in range(600):
        given.took(ModelCall(2, 1, ids, None, positions=torch.tensor([[n], [n + 7]])), n + 1)
    assert len(given._runs) < 300
    assert (given.span(0, 600), given.span(1, 600)) == ((0, 600, 0), (0, 600, 7))
    given.cropped(590)
    assert given.span(1, 590) == (0, 590, 7)


def test_nothing_is_made_until_somebody_asks(answers):
    """Off costs a look at two attributes."""
    one = answers()
    kept = one.generate(one.prompts(), max_new_tokens=NEW)
    assert kept is not None
    assert [v._recompute for v in one.guard._verifiers._models.values()] == [None]
    assert not [name for name in one.guard.stats() if name.startswith("recompute")]
