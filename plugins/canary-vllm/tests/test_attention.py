"""One layer's attention is computed a second time in plain torch, in turns, where vLLM computes a request again: wrong
on every path alike is found. vLLM's own layers are broken from outside, in all of its forwards."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_on_cpu import guarded, setups, verified
from vllm_on_cpu.attention_types import MORE, WINDOW, checkpoint
from vllm_on_cpu.engine import SmallEngine

from canary_adapters import ATTENTION_TYPES, attention_watch
from canary_core import Kind
from canary_core.testing import Findings

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("process 0")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
"""All checks of bytes are off."""
LAYERS = 3
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SIXTEEN = {"dtype": "bfloat16", "initializer_range": 0.2}
"""With smaller logits: rounding hides less of a fault."""
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
COARSE = ({**FP8, "initializer_range": 0.2}, {**SIXTEEN, "kv_cache_dtype": "fp8_e5m2"})
LACKING = setups.lacking("fp8")
OFTEN = frozenset({"gemma2", "gpt_oss", "qwen3_moe"})
"""Types that CI runs by themselves: with a cap, with sinks, with one window for all. Others have tests below."""


@pytest.fixture(scope="module")
def engines() -> Callable[..., SmallEngine]:
    """Gives one for each checkpoint."""
    made: dict[str, SmallEngine] = {}

    def make(kind: str, **more: Any) -> SmallEngine:
        key = f"{kind} {more}"
        if key not in made:
            options = {"dtype": more.pop("dtype", "float32"), "num_gpu_blocks_override": 48, "max_num_seqs": 12}
            options["kv_cache_dtype"] = more.pop("kv_cache_dtype", "auto")
            made[key] = SmallEngine(checkpoint(kind, **more), load_format="auto", **options)
        return made[key]

    return make


def every_layer(small: SmallEngine, name: str) -> list[Any]:
    """Verifications of a request, one for each layer."""
    verified.begin(small, 20, {name: verified.prompt(name, 90)})
    answers = [verified.verify(small, name)[0] for _ in verified.layers(small)]
    verified.finish(small)
    return answers


def answers_after(
    small: SmallEngine, fault: Callable[..., None], patch: pytest.MonkeyPatch
) -> tuple[list[Any], Findings]:
    """The answers of each layer after ``fault``, and all that is told; before, no layer differs."""
    with guarded.guard(small, **QUIET) as guard:
        before = every_layer(small, "before")
        assert sorted(answer.attention.layer for answer in before) == list(range(LAYERS))
        assert [answer.table() for answer in before if answer.attention.differs] == []
        fault(small, patch)
        after = every_layer(small, "asked")
        guard.canary.drain()
    return after, guard.findings


def scale(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """Two per cent too large, in one layer."""
    verified.rescale(verified.layers(small)[1], patch.setattr)


def window(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """One token shorter than the configuration says."""
    for layer in verified.layers(small):
        if layer.sliding_window is not None:
            patch.setattr(layer.impl, "sliding_window", layer.impl.sliding_window - 1)


def head(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """Each group of heads reads the other group's keys and values."""
    kind = type(verified.layers(small)[0].impl)
    right = kind.forward

    def wrong(self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        return right(self, layer, query, key, value, cache.flip(1).contiguous(), *args, **kwargs)

    patch.setattr(kind, "forward", wrong)


def values(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """K and V are exchanged when they are stored."""
    kind = type(verified.layers(small)[0].impl)
    right = kind.do_kv_cache_update
    patch.setattr(kind, "do_kv_cache_update", lambda self, layer, k, v, *rest: right(self, layer, v, k, *rest))


@pytest.mark.parametrize(
    ("fault", "kind", "more", "wrong"),
    [
        (scale, "llama", {}, {1}),
        (scale, "llama", SIXTEEN, {1}),
        (window, "gemma3_text", MIXED, {0, 2}),
        (window, "mistral", {}, {0, 1, 2}),
        (head, "llama", {}, {0, 1, 2}),
        (values, "llama", {}, {0, 1, 2}),
    ],
)
def test_attention_that_is_wrong_on_every_path_is_found(fault, kind, more, wrong, engines, monkeypatch):
    """Within as many verifications as there are layers, each broken layer and no other, with the deviation by its name;
    and nothing before."""
    small = engines(kind, layers=LAYERS, **more)
    after, findings = answers_after(small, fault, monkeypatch)
    assert {answer.attention.layer for answer in after if answer.attention.differs} == wrong
    found = [v for v in findings.violations if v.kind is Kind.ATTENTION]
    assert (found[0].rule, found[0].layer, found[0].request) == (fault.__name__, min(wrong), "asked")
    assert found[0].position == 0 if fault is values else found[0].position < 90
    if fault is window:
        assert found[0].position >= WINDOW - 1
    if fault is head:
        assert "of the keys, and the head's own is" in found[0].detail
    differing = [answer for answer in after if answer.attention.differs]
    assert {(answer.verdict, answer.attention.deviation) for answer in differing} == {("differs", fault.__name__)}
    assert [event.fields["diagnosis"] for event in findings.told("diagnosis")][:1] == ["wrong_attention"]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", SIXTEEN),
        ("gemma3_text", MIXED),
        ("deepseek_v2", {}),
        pytest.param("deepseek_v2", {"dtype": "bfloat16"}, marks=pytest.mark.takes_turns("the same in float32")),
        *(
            pytest.param("llama", more, marks=pytest.mark.skipif(LACKING is not None, reason=str(LACKING)))
            for more in COARSE
        ),
    ],
)
def test_clean_traffic_is_never_blamed_and_answers_stay_the_same(kind, more, engines):
    """Hits, chunks and mixed batches: each layer again and again, and nothing is left of a look."""
    small = engines(kind, layers=LAYERS, **more)
    small.renew()
    # Large blocks leave little room for second computations.
    rounds = 10 if kind == "deepseek_v2" else 4
    plain = guarded.traffic(small, rounds, seed=kind, new_tokens=40)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        assert guarded.traffic(small, rounds, seed=kind, new_tokens=40) == plain
        stats = guard.canary.stats()
        assert (stats["attention_layers"], "attention_differs" in stats) == (LAYERS, False)
        assert stats["attention_looks"] >= 2 * LAYERS
        assert guard.findings.violations == []
        assert all(
            "forward" not in vars(layer.impl) and "forward_impl" not in vars(layer) for layer in verified.layers(small)
        )


def projected(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """Each head of one layer of MLA has the keys and values that another head projects."""
    layer = verified.layers(small)[1]

    def project(rows: Any) -> tuple[Any]:
        made = layer.kv_b_proj(rows)[0]
        return (made.view(len(rows), layer.num_heads, -1).roll(1, 1).flatten(1),)

    patch.setattr(layer.impl, "kv_b_proj", project)


def compressed(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """One number of the compressed KV of one layer is stored half as large again."""
    impl = verified.layers(small)[1].impl
    right = impl.do_kv_cache_update

    def store(rows: Any, *rest: Any) -> None:
        rows = rows.clone()
        rows[:, 3] *= 1.5
        right(rows, *rest)

    patch.setattr(impl, "do_kv_cache_update", store)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.takes_turns("the same in float32"))]
)
@pytest.mark.parametrize(("fault", "rule"), [(scale, "scale"), (projected, "head"), (compressed, "keys")])
def test_attention_of_mla_that_is_wrong_on_every_path_is_found(fault, rule, dtype, engines):
    """The same of compressed KV, in one layer; and nothing after."""
    small = engines("deepseek_v2", layers=LAYERS, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        after, findings = answers_after(small, fault, patch)
    assert [(one.attention.layer, one.attention.deviation) for one in after if one.attention.differs] == [(1, rule)]
    found = [v for v in findings.violations if v.kind is Kind.ATTENTION]
    assert [(v.rule, v.layer, v.request) for v in found] == [(rule, 1, "asked")]
    with guarded.guard(small, **QUIET):
        assert [answer.attention.deviation for answer in every_layer(small, "mended")] == [None] * LAYERS


def scaled(layer: Any, **scales: float) -> Any:
    """The layer, but for its scales."""
    other = copy.copy(layer)
    vars(other).update(scales)
    return other


def stored(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """K of one layer is stored under a scale 1.5 times the layer's."""
    wrong = verified.layers(small)[1]
    kind = type(wrong.impl)
    right = kind.do_kv_cache_update

    def store(self: Any, layer: Any, *rest: Any) -> None:
        other = layer if layer is not wrong else scaled(layer, _k_scale_float=1.5 * layer._k_scale_float)
        right(self, other, *rest)

    patch.setattr(kind, "do_kv_cache_update", store)


def read(small: SmallEngine, patch: pytest.MonkeyPatch) -> None:
    """K of one layer is read under a scale 1.05 times the layer's."""
    wrong = verified.layers(small)[1]
    kind = type(wrong.impl)
    right = kind.forward

    def forward(self: Any, layer: Any, *rest: Any, **more: Any) -> Any:
        other = layer if layer is not wrong else scaled(layer, _k_scale_float=1.05 * layer._k_scale_float)
        return right(self, other, *rest, **more)

    patch.setattr(kind, "forward", forward)


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
@pytest.mark.parametrize("more", COARSE, ids=str)
@pytest.mark.parametrize(("fault", "rule"), [(stored, "keys"), (read, "scale"), (scale, "scale")])
def test_a_wrong_scale_of_fp8_is_found_and_its_layer_named(more, fault, rule, engines, monkeypatch):
    """Each layer has scales of its own. Whoever stores or reads K of one layer by another one is told, as is the scale
    of its products; and nothing before."""
    small = engines("llama", layers=LAYERS, **more)
    for number, layer in enumerate(verified.layers(small)):
        monkeypatch.setattr(layer, "_k_scale_float", 0.3 + 0.1 * number)
        monkeypatch.setattr(layer, "_v_scale_float", 0.7 - 0.1 * number)
    after, findings = answers_after(small, fault, monkeypatch)
    differing = [answer.attention for answer in after if answer.attention.differs]
    assert [(one.layer, one.deviation) for one in differing] == [(1, rule)]
    found = [v for v in findings.violations if v.kind is Kind.ATTENTION]
    assert [(v.rule, v.layer, v.request) for v in found] == [(rule, 1, "asked")]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.beyond_ci) for kind in sorted(MORE)]
)
def test_each_known_type_computes_what_its_rule_says(kind, engines, monkeypatch):
    """And another scale is told."""
    small = engines(kind)
    with guarded.guard(small, **QUIET):
        clean = every_layer(small, "clean")
        for layer in verified.layers(small):
            verified.rescale(layer, monkeypatch.setattr)
        wrong = every_layer(small, "wrong")
    assert [(answer.attention.layer, answer.attention.deviation) for answer in clean] == [(0, None), (1, None)]
    assert {answer.attention.deviation for answer in wrong} == {"scale"}


def test_there_is_a_model_of_each_type():
    """Each rule is compared with vLLM's own code."""
    assert MORE.keys() == ATTENTION_TYPES


@pytest.fixture
def graph(engines, monkeypatch) -> Iterator[SmallEngine]:
    """An engine whose attention is computed without a call of its implementation's method, as where a graph is
    replayed."""
    small = engines("llama", layers=LAYERS)
    kind = type(verified.layers(small)[0])
    right = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        shadow = vars(self.impl).pop("forward", None)
        try:
            return right(self, *args, **kwargs)
        finally:
            if shadow is not None:
                vars(self.impl)["forward"] = shadow

    monkeypatch.setattr(kind, "forward", forward)
    return small


def test_a_forward_that_calls_no_attention_is_counted(graph):
    """With a reason that is told once."""
    with guarded.guard(graph, **QUIET) as guard:
        answers = every_layer(graph, "asked")
        stats = guard.canary.stats()
        told = [event.fields["reason"] for event in guard.findings.told("unjudged")]
    assert [answer.attention for answer in answers] == [None] * LAYERS
    assert (stats["attention_unjudged"], stats.get("attention_looks", 0)) == (LAYERS, 0)
    assert len([reason for reason in told if "graph" in reason]) == 1


def test_of_a_long_request_the_last_tokens_are_looked_at(engines, monkeypatch):
    """In several forwards; a longer one is not, and a reason is told."""
    small = engines("llama", layers=LAYERS)
    monkeypatch.setattr(attention_watch, "MOST_QUERIES", 33)
    with guarded.guard(small, **QUIET) as guard:
        clean = every_layer(small, "clean")
        scale(small, monkeypatch)
        wrong = every_layer(small, "wrong")
        monkeypatch.setattr(attention_watch, "MOST_TOKENS", 64)
        long = every_layer(small, "long")
        guard.canary.drain()
        told = [event.fields["reason"] for event in guard.findings.told("unjudged")]
    assert {answer.attention.deviation for answer in clean} == {None}
    assert {answer.attention.tokens for answer in clean} == {33}
    (found,) = [answer.attention for answer in wrong if answer.attention.differs]
    assert (found.layer, found.position >= 64) == (1, True)
    assert [answer.attention for answer in long] == [None] * LAYERS
    assert len([reason for reason in told if "more than 64 tokens" in reason]) == 1


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("llama4", {"num_gpu_blocks_override": 96}, "what attention of a llama4_text is"),
    ],
)
def test_layers_without_a_reference_are_told(model, options, reason):
    """By an event, once, and a counter that stays zero."""
    small = SmallEngine(model, **options)
    with guarded.guard(small, **QUIET) as guard:
        answers = every_layer(small, "asked")
        stats = guard.canary.stats()
        told = [event.fields["reason"] for event in guard.findings.told("unjudged")]
        doubts = [item["reason"] for item in guard.findings.told("coverage")[-1].fields["uncovered"]]
    assert all(answer.attention is None for answer in answers)
    assert any(reason in doubt for doubt in doubts)
    assert stats.get("attention_layers", 0) == 0
    assert [reason in text for text in told if "has no reference" in text] == [True]
