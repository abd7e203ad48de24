"""Lists that SGLang's FlashInfer backend plans its wrappers with. The backend is SGLang's own, the kernels that make
the lists run in Triton's interpreter; FlashInfer's wrappers are stand-ins that keep the lists as theirs do
(`engines.fake_flashinfer`). Nothing is computed."""

import pytest
from engines.setups import TRITON

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.beyond_ci("FlashAttention-3's tables, with the same code"),
]


@pytest.mark.parametrize(("mode", "paged"), [("DECODE", False), ("EXTEND", False), ("EXTEND", True)])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["mha", "pages", "swa", "swa_pages"])
def test_lists_are_those_of_req_to_token(name, graph, mode, paged, launch):
    """What is compared is what `req_to_token` and the map of window slots say, entry by entry: for batches without a
    graph, and in the buffers of CUDA graphs after captures of several sizes, with padded rows, longer and shorter than
    those before; extends that read the prefix alone through the list, and all of it (``paged``)."""
    options = {"page_size": 4 if name.endswith("pages") else 1, "max_running_requests": 12}
    engine = launch({"options": options, "environment": TRITON}, like=name.split("_")[0])
    done = engine.graph_tables(mode=mode, graph=graph, paged=paged, name="flashinfer")
    assert done["leaves"]
    assert done["why_not"] is None
    windows = {"window_kv_indices of FlashInferAttnBackend"} if name.startswith("swa") else set()
    assert done["seen"].keys() == {"kv_indices of FlashInferAttnBackend"} | windows
    assert all(looked > 500 for looked, _ in done["seen"].values())
    assert all(wrong == 0 for _, wrong in done["seen"].values())
    # In a graph for extends it is not known whether the new tokens are among them.
    known = mode == "DECODE" or not graph
    lens = {seen.replace("kv_indices", "kv_indptr") for seen in done["seen"]} if known else set()
    assert done["lens"].keys() == lens
    assert all(looked > 50 and wrong == 0 for looked, wrong in done["lens"].values())
