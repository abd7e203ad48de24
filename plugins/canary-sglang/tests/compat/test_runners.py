"""What a model runner says of its engine: which ones are refused, and why."""

from types import SimpleNamespace

import pytest
from canary_sglang.compat import runners

pytestmark = pytest.mark.without_engine


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"is_draft_worker": True, "speculative_algorithm": "DFLASH"}, "DFLASH"),
        ({"is_draft_worker": True, "enable_multi_layer_eagle": True}, "multi-layer"),
        ({"enable_lmcache": True}, "LMCache"),
        ({"enable_hisparse": True}, "HiSparse"),
        ({"enable_hierarchical_cache": True, "disaggregation_mode": "decode"}, None),
        ({}, None),
    ],
)
def test_engines_that_would_raise_false_alarms_are_refused(change, word):
    """Where KV arrives without a forward, or slots mean something else, nothing is guarded and the reason is given."""
    args = SimpleNamespace(enable_hierarchical_cache=False, disaggregation_mode="null", speculative_algorithm="EAGLE")
    runner = SimpleNamespace(
        is_draft_worker=False, server_args=args, model_config=SimpleNamespace(is_encoder_decoder=False)
    )
    for name, value in change.items():
        setattr(runner if hasattr(runner, name) else args, name, value)
    refusal = runners.refusal(runner)
    assert (refusal is None) if word is None else (word in refusal)


@pytest.mark.parametrize(("options", "captures"), [({}, True), ({"disable_cuda_graph": True}, False)])
def test_an_engine_without_graphs_has_nothing_to_compile_beside(options, captures):
    """It would wait for the compiler at once. Releases may have no such option."""
    assert runners.captures_graphs(SimpleNamespace(server_args=SimpleNamespace(**options))) is captures
