"""``canary demo`` on real continuous batching, with few requests."""

import pytest
from canary_transformers import plugin
from canary_transformers.demo import TransformersDemo

from canary_core import hookimpl
from canary_core.testing import Job
from canary_kit import demo
from canary_kit.demo import Demo
from canary_kit.engines import Traffic

ENGINE = TransformersDemo()


@pytest.fixture(autouse=True)
def quiet():
    """As in the command: findings are expected, and not logged."""
    with demo.unheard():
        yield


def test_the_plugin_offers_it():
    """``canary demo`` finds the engine through the plugin's hook."""
    assert isinstance(plugin.canary_demo(), TransformersDemo)


@pytest.mark.parametrize("model", ENGINE.models)
def test_clean_traffic_is_clean(model):
    """No alarm, and tokens and log probabilities are bit for bit those without Canary."""
    clean = Demo(ENGINE, model, seed=21, requests=24).clean()
    assert clean.passed, clean
    assert clean.slots_checked > 1000


@pytest.mark.parametrize("fault", ["req_to_token", "real_kv_unused_cache", "lost_write", "next_token_swap"])
@pytest.mark.parametrize("model", ENGINE.models)
def test_faults_are_found(model, fault):
    """One of each class; the whole list is what ``make demo`` runs."""
    trial = Demo(ENGINE, model, seed=22, requests=24).trial(fault)
    assert trial.passed, trial


def test_a_job_repeats_itself():
    """All requests wait when the engine starts, so the same job has the same batches."""

    class Batches:
        def __init__(self) -> None:
            self.seen = []

        @hookimpl
        def canary_pre_forward(self, canary, batch):
            self.seen.append(batch.new_lens.tolist())

    first, second = Batches(), Batches()
    for batches in (first, second):
        ENGINE.serve(Job("llama", 1, Traffic.of(12, 1), demo.default_config(), (batches,)))
    assert len(first.seen) > 10
    assert first.seen == second.seen
