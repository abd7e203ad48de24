"""Who is guarded, and settings that can't be used."""

import canary_transformers
import pytest
from tiny.batching import Traffic, serve
from tiny.models import batching

from canary_core import ConfigError


def test_only_the_guarded_model_is_guarded():
    """The context manager gives the guard; another model pays nothing."""
    with canary_transformers.guard(batching("llama")) as guard:
        serve(batching("qwen3"), Traffic(requests=2))
        assert guard.stats() == {"violations": 0, "forwards": 0}
        serve(batching("llama"), Traffic(requests=2))
        once = guard.stats()["forwards"]
        serve(batching("llama"), Traffic(requests=2))
    assert guard.stats()["forwards"] == 2 * once > 0


def test_a_bad_setting_is_told_where_it_is_given():
    """One sentence: what, and what was got."""
    with pytest.raises(ConfigError, match=r"CANARY_MODE.*'rise'"):
        canary_transformers.guard(batching("llama"), mode="rise")


def test_no_model_is_not_every_model():
    """A variable that is None by mistake does not guard the whole process."""
    with pytest.raises(TypeError, match="CANARY_PLUGINS"):
        canary_transformers.guard(None)
