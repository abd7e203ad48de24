"""What names of layers and settings of LMCache say."""

import pytest

from canary_adapters import layer_numbers, lmcache_storage


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["model.layers.3.self_attn.attn", "model.layers.10.self_attn.attn"], [3, 10]),
        (["attn"], [0]),
        (["h.0.attn", "h.0.cross_attn", "h.1.attn"], [0, 1, 2]),
    ],
)
def test_a_layers_number_is_that_in_its_name(names, numbers):
    """Where two layers have the same, all are counted."""
    assert layer_numbers(names) == dict(zip(names, numbers, strict=True))


def test_the_last_setting_of_lmcache_counts(monkeypatch, tmp_path):
    """A file, the environment, and what the engine was given, in this order: whether others may store there, and
    whether what comes back is the same."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("remote_url: lm://server:1\n")
    monkeypatch.delenv("LMCACHE_REMOTE_URL", raising=False)
    assert lmcache_storage({}) == (False, False)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert lmcache_storage({}) == (True, False)
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "none")
    assert lmcache_storage({}) == (False, False)
    assert lmcache_storage({"lmcache.remote_url": "lm://server:1", "lmcache.remote_serde": "cachegen"}) == (True, True)
