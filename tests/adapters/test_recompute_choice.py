"""Which running request a scheduler has computed again, without being asked."""

from unittest import mock

import pytest

from canary_adapters.internal_requests import InternalRequests, Running
from canary_adapters.recompute_requests import TEACHING, Recomputes
from canary_adapters.touched_requests import TouchedRequests
from canary_core.config.values import RecomputeShare


@pytest.mark.parametrize("how", ["beyond_tokens", "hit"])
def test_what_others_had_a_say_in_comes_first_once_the_noise_is_known(how):
    """Whatever other requests there are: KV of an adapter, media or embeddings, and that of a hit."""
    touched, grown = TouchedRequests(), 0
    engine = mock.create_autospec(InternalRequests, instance=True, parked="nothing is remembered")

    def running() -> list[Running]:
        others = [Running(f"plain {n}", 40 + grown, 40 + grown, 0) for n in range(3)]
        return [*others, Running("special", 40 + grown, 40 + grown, 0, how == "beyond_tokens")]

    engine.running.side_effect = running
    engine.find.side_effect = lambda name: next(one for one in running() if one.name == name)
    engine.begin.return_value = None
    engine.computed.side_effect = lambda name: 1 << 20
    engine.crowded.return_value = False
    recomputes = Recomputes(engine, touched, RecomputeShare.parse("100%"))
    while len(engine.begin.mock_calls) < TEACHING + 6:
        recomputes.before()
        recomputes.after(10_000)
        grown += 10
        if how == "hit" and len(engine.begin.mock_calls) == TEACHING:
            touched.began("special", 32)
    chosen = [call.args[1] for call in engine.begin.mock_calls]
    assert chosen[:TEACHING].count("special") <= TEACHING // 3
    assert chosen[TEACHING + 1 :].count("special") >= 2
