"""What is to be known of a draft model's pool, from made-up runners."""

from types import SimpleNamespace

import pytest
import torch
from canary_sglang.batches.forward import Anchors
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat.drafts import shared_with_next_token

from canary_core import Writers
from canary_core.ops.hashing import COMMON_ANCHOR

pytestmark = pytest.mark.without_engine


@pytest.mark.parametrize(
    ("draft", "eagle", "states", "radix_off", "sure"),
    [
        (False, False, False, False, True),
        (True, True, False, False, True),
        (True, False, False, False, False),
        (True, False, False, True, True),
        (True, True, True, False, False),
    ],
)
def test_where_a_shared_prefix_may_end_in_anothers_token(draft, eagle, states, radix_off, sure):
    """A draft model's slot holds the next token, which requests that share the slot have in common where the prefix
    cache is keyed by pairs of tokens: of EAGLE, unless there are recurrent states; or where nothing is shared. Rows of
    padding have no anchor."""
    pool = SimpleNamespace(mamba_pool=None) if states else SimpleNamespace()
    runner = SimpleNamespace(
        is_draft_worker=draft,
        server_args=SimpleNamespace(disable_radix_cache=radix_off),
        spec_algorithm=SimpleNamespace(is_eagle=lambda: eagle),
        req_to_token_pool=pool,
    )
    assert shared_with_next_token(runner) is sure
    anchors = Anchors(runner, RequestWriters(Writers(), torch.device("cpu")))
    rows = torch.zeros(3, dtype=torch.int32)
    assert anchors.of(rows, ["a", "b", "c"]).tolist() == [COMMON_ANCHOR if sure else 0] * 3
    assert anchors.of(rows).tolist() == [0, 0, 0]
