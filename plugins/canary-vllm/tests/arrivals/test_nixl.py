"""The real NIXL between two real vLLM, one that computes prompts and one that decodes, none of it changed."""

from importlib.util import find_spec

import pytest
from vllm_on_cpu.scripts import told_by

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.xdist_group("processes"),
    pytest.mark.takes_turns("test_loads: a connector in one process"),
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed; see docs/evidence.md"),
]
BLOCK = 32


def test_what_nixl_hands_over_is_compared():
    """Where the ledger's entries are handed over with the request, every block that NIXL brings is compared: those
    that are the same bytes, by our own comparison of both engines' tensors, are silent. A bit that is flipped in the
    sender's pool before it is read is told with layer, half and block; so are blocks that a transfer leaves out; the
    hand-over after that is silent again."""
    told = told_by("nixl_script", "decode", timeout_s=480)
    clean = told["clean"]
    assert len(clean) == 12
    assert all(one["different"] == one["found"] == one["prefill_trouble"] == [] for one in clean)
    # The sender's first token, and that of who goes on from its KV.
    assert all(here == there for here, there in (one["first"] for one in clean))
    assert told["trouble"] == []
    ledger = told["ledger"]
    assert ledger["ledger_matched"] == ledger["ledger_compared"] == ledger["ledger_imported"] == 4 * len(clean)
    assert len(told["flips"]) == 8
    for one in told["flips"]:
        layer, half, block = one["flipped"]
        assert one["different"] == [[block, told["layers"][layer]]]
        (found,) = one["found"]
        assert found[:5] == ["ARRIVAL", layer, half, block * BLOCK, "NixlConnector"]
    short = told["short"]
    assert short["different"] == [[3, told["layers"][-1]]]
    (found,) = short["found"]
    assert found[0] == "ARRIVAL"
    assert found[3:5] == [3 * BLOCK, "NixlConnector"]
    assert found[5].endswith("layer 1 K and V")
    assert told["after"]["different"] == told["after"]["found"] == []
