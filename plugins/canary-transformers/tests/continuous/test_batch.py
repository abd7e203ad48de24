"""Views of batches that no engine on a CPU makes."""

from types import SimpleNamespace

import torch
from canary_transformers.continuous.batch import ContinuousBatch, ContinuousForward
from canary_transformers.continuous.compat import KVGroup
from canary_transformers.continuous.tokens import TokenBook
from tiny.batching import FakeRequestState

from canary_core import Writers

CPU = torch.device("cpu")


def test_a_block_table_is_read_as_the_flash_kernel_reads_it():
    """The decode path without index lists: entries count pages of K or V rows, rows interleave by layer."""
    layers, page = 3, 4
    group = KVGroup(
        "full_attention", 0, (), block_slots=page, null_slots=range(page), pool_page=(2 * layers * page, page)
    )
    blocks = torch.tensor([[[5, 2, -1], [7, -1, -1], [-1, -1, -1]]], dtype=torch.int32) * 2 * layers
    requests = [
        SimpleNamespace(state=FakeRequestState("a", range(6), position_offset=6), query_length=1),
        SimpleNamespace(state=FakeRequestState("b", range(3), position_offset=3), query_length=1),
    ]
    arguments = {
        "input_ids": torch.tensor([[5, 2, 0]], dtype=torch.int32),
        "position_ids": torch.tensor([[5, 2, 0]], dtype=torch.int32),
        "block_table": blocks,
        "read_index": [torch.empty(0, dtype=torch.int64)],
        "write_index": [torch.zeros(3, dtype=torch.int64)],
    }
    view = ContinuousBatch([group], Writers(), CPU, TokenBook(CPU, 1 << 16)).view(
        ContinuousForward(requests, arguments)
    )
    table = view.tables["full_attention"]
    assert (view.prefix_lens.tolist(), view.new_lens.tolist()) == ([5, 2], [1, 1])
    assert table.write_slots is None
    assert table.entries.data_ptr() == blocks.data_ptr()
    rows, slots = table.pool_page
    numbers = [int(table.entries[0, p // page]) * page + p % page for p in range(6)]
    assert [n // rows * slots + n % rows for n in numbers] == [20, 21, 22, 23, 8, 9]


def test_padding_of_static_inputs_stays_outside():
    """CUDA graphs pad tokens and lists; rows are the requests, and nothing behind their tokens is theirs."""
    group = KVGroup("sliding_attention", 0, (), block_slots=4, null_slots=range(4), window_tokens=4)
    requests = [SimpleNamespace(state=FakeRequestState("a", range(9), position_offset=9), query_length=2)]
    arguments = {
        "input_ids": torch.tensor([[7, 8, 0, 0]]),
        "position_ids": torch.tensor([[7, 8, 0, 0]]),
        "read_index": [torch.tensor([40, 41, 42, 1, 1, 0, 0, 0])],
        "write_index": [torch.tensor([43, 40, 99, 99])],
    }
    view = ContinuousBatch([group], Writers(), CPU, TokenBook(CPU, 1 << 16)).view(
        ContinuousForward(requests, arguments)
    )
    table = view.tables["sliding_attention"]
    flat = arguments["read_index"][0]
    assert [int(flat[int(table.rows[0]) + p]) for p in (4, 5, 6)] == [40, 41, 42]
    assert table.stored_tokens == 4
    assert int(view.new_lens.sum()) == 2
