"""What SGLang's batches say of themselves, from made-up ones."""

from types import SimpleNamespace

import pytest
from canary_sglang.compat import batches

pytestmark = pytest.mark.without_engine


class EagleVerifyInput(SimpleNamespace):
    """As SGLang calls it."""


class NgramVerifyInput(SimpleNamespace):
    """As SGLang calls it."""


@pytest.mark.parametrize(
    ("drafted", "tokens", "tree"),
    [
        (EagleVerifyInput(topk=1, draft_token_num=4), 4, False),
        (EagleVerifyInput(topk=2, draft_token_num=5), 5, True),
        (EagleVerifyInput(topk=2, draft_token_num=1), 1, False),
        (NgramVerifyInput(draft_token_num=4), 4, True),
        (SimpleNamespace(topk=1, draft_token_num=4), None, False),
    ],
)
def test_what_a_verification_writes(drafted, tokens, tree):
    """How many tokens, and whether they are a tree, in which some share positions; what another algorithm verifies is
    not known."""
    batch = SimpleNamespace(spec_info=drafted, forward_mode=SimpleNamespace(name="TARGET_VERIFY"))
    assert batches.verified_tokens(batch) == tokens
    assert batches.is_tree(batch) is tree


@pytest.mark.parametrize(
    ("mode", "speculates", "checked"),
    [
        ("MIXED", False, True),
        ("MIXED", True, False),
        ("EXTEND", True, True),
        ("TARGET_VERIFY", True, True),
        ("DLLM_EXTEND", False, False),
        ("SPLIT_PREFILL", False, False),
    ],
)
def test_what_does_not_follow_from_a_batch_is_not_judged(mode, speculates, checked):
    """Passes over a few layers or over tokens that change, and mixed batches whose requests speculate."""
    algorithm = SimpleNamespace(is_none=lambda: not speculates)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(name=mode), spec_algorithm=algorithm)
    assert batches.is_checked(batch) is checked
