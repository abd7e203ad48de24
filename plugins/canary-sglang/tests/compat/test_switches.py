"""SGLang's environment switches mean to us what they mean to SGLang, whatever word they are set to."""

from types import SimpleNamespace

import pytest
from canary_sglang.compat import drafts, runners
from canary_sglang.compat.switches import switched_on

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("pools")]

WORDS = ("1", "true", "TRUE", "yes", "Y", "0", "false", "no", "n", "N", "on", "off", "2", "")
"""Those that SGLang knows, and some that it takes for unset."""


@pytest.mark.parametrize("name", ["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "SGLANG_USE_PICKLE_IPC"])
def test_every_word_means_what_it_means_to_sglang(monkeypatch, name):
    """Of a switch that is off by default and of one that is on."""
    from sglang.srt.environ import envs

    switch = getattr(envs, name)
    for word in (None, *WORDS):
        if word is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, word)
        assert switched_on(name) is switch.get(), word
    assert {word: switch.parse(word) for word in WORDS[:10]} == {word: word in WORDS[:5] for word in WORDS[:10]}


@pytest.mark.parametrize("absent", [False, True])
def test_a_switch_of_other_releases_means_nothing(monkeypatch, absent):
    """What a release doesn't read doesn't change it."""
    for word in WORDS:
        monkeypatch.setenv("SGLANG_NO_RELEASE_HAS_THIS", word)
        assert switched_on("SGLANG_NO_RELEASE_HAS_THIS", absent) is absent


@pytest.mark.parametrize("word", ["1", "0", "yes", "no", "off"])
@pytest.mark.parametrize("name", ["SGLANG_OPT_USE_COMPRESSOR_V2", "SGLANG_OPT_USE_OLD_COMPRESSOR"])
def test_rings_of_an_older_compressor_are_left_out(monkeypatch, name, word):
    """Only where this release has the switch and takes the word for one that changes compressors."""
    from sglang.srt.environ import envs

    monkeypatch.setenv(name, word)
    newer, older = (
        getattr(envs, of).get() if hasattr(envs, of) else default
        for of, default in (("SGLANG_OPT_USE_COMPRESSOR_V2", True), ("SGLANG_OPT_USE_OLD_COMPRESSOR", False))
    )
    refusal = runners.compressor_state_refusal(SimpleNamespace(server_args=SimpleNamespace()))
    assert (refusal is None) == (newer and not older)
    assert refusal is None or "older compressor" in refusal


@pytest.mark.parametrize("word", ["1", "0", "no"])
def test_a_draft_pools_shared_prefix_beside_the_cache_in_cpp(monkeypatch, word):
    """Pairs of tokens, unless the cache in C++ is switched on in a release that has it."""
    from sglang.srt.environ import envs

    name = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
    monkeypatch.setenv(name, word)
    runner = SimpleNamespace(
        is_draft_worker=True,
        server_args=SimpleNamespace(),
        spec_algorithm=SimpleNamespace(is_eagle=lambda: True),
        req_to_token_pool=SimpleNamespace(),
    )
    assert drafts.shared_with_next_token(runner) == (not hasattr(envs, name) or word != "1")
