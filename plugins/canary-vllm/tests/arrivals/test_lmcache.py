"""The real LMCache beside the real vLLM: its server in a process of its own, and its connector, none of it changed."""

from importlib.util import find_spec

import pytest
from vllm_on_cpu.lmcache_server import serving
from vllm_on_cpu.scripts import told_by

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("processes"),
    pytest.mark.takes_turns("test_loads: a connector in one process"),
    pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache is not installed; see docs/evidence.md"),
]


@pytest.fixture
def server(tmp_path):
    """LMCache's own."""
    with serving(tmp_path / "server.log") as server:
        yield server


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_lmcache_is_compared(server, mode):
    """Hundreds of blocks that LMCache stores and brings back are the same bytes, by our own comparison of vLLM's
    tensors, and Canary is silent. A bit that is flipped in LMCache's memory is told at the next reload, with connector,
    layer, half and block, and nothing else is."""
    told = told_by("lmcache_script", str(server.port), str(server.memory), mode, timeout_s=300)
    assert told["at_first"] == 0
    assert told["trouble"] == []
    assert all(told["same"])
    assert told["other"] == 0
    clean = told["clean"]
    assert clean["ledger_matched"] == clean["ledger_compared"] == told["blocks"] > 200
    assert not {"ledger_unknown", "ledger_unclear", "ledger_differing"} & {*clean}
    assert len(told["flips"]) == 4
    for one in told["flips"]:
        layer, half, position = one["flipped"]
        assert one["places"] == 1
        assert one["other"] == [[position // 32, one["layer"]]]
        assert one["found"] == [["ARRIVAL", layer, half, position, "LMCacheMPConnector"]]
