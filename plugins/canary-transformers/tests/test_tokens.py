"""The book of expected tokens, and views of batches that no CPU engine makes."""

import random
from types import SimpleNamespace

import torch
from canary_transformers.continuous.batch import ContinuousBatch, ContinuousForward
from canary_transformers.continuous.compat import KVGroup
from canary_transformers.continuous.tokens import TokenBook

from canary_core.writers import Writers

CPU = torch.device("cpu")


class State:
    """As much of a `RequestState` as the adapters read."""

    def __init__(self, request_id, prompt, position_offset=0):
        self.request_id = request_id
        self.initial_tokens = list(prompt)
        self.generated_tokens = []
        self.position_offset = position_offset
        self._true_initial_tokens = 0


def truth(states, width):
    """By hand: each request's tokens, then -1."""
    return [(s.initial_tokens + s.generated_tokens + [-1] * width)[:width] for s in states]


def test_the_book_says_what_requests_say_whoever_comes_and_goes():
    """Random batches of growing requests, names reused, rows evicted."""
    r = random.Random(1)
    book = TokenBook(CPU, budget_bytes=1 << 16)
    running = {}
    for _ in range(300):
        for name in r.sample(range(40), 6):
            if name not in running or r.random() < 0.1:
                running[name] = State(str(name), [r.randrange(500) for _ in range(r.randrange(1, 30))])
        batch = r.sample(sorted(running), r.randrange(1, min(len(running), 12) + 1))
        states = [running[name] for name in batch]
        for s in states:
            s.generated_tokens += [r.randrange(500) for _ in range(r.randrange(0, 3))]
        width = max(len(s.initial_tokens) + len(s.generated_tokens) for s in states) + r.randrange(2)
        assert book.expected(states, width).tolist() == truth(states, width)


def test_the_book_keeps_to_its_budget():
    """Positions beyond what the budget can hold are unknown, not wrong."""
    book = TokenBook(CPU, budget_bytes=4 * 64)
    states = [State("a", range(100)), State("b", range(100, 110))]
    found = book.expected(states, 100)
    assert found.shape[1] == 16
    assert found.tolist() == truth(states, 16)
    assert book._tokens.numel() <= 64


def test_a_block_table_is_read_as_the_flash_kernel_reads_it():
    """The decode path without index lists: entries count pages of K or V rows, rows interleave by layer."""
    layers, page = 3, 4
    group = KVGroup("full_attention", 0, (), block_slots=page, null_slot=0, pool_page=(2 * layers * page, page))
    blocks = torch.tensor([[[5, 2, -1], [7, -1, -1], [-1, -1, -1]]], dtype=torch.int32) * 2 * layers
    requests = [
        SimpleNamespace(state=State("a", range(6), position_offset=6), query_length=1),
        SimpleNamespace(state=State("b", range(3), position_offset=3), query_length=1),
    ]
    arguments = {
        "input_ids": torch.tensor([[5, 2, 0]], dtype=torch.int32),
        "position_ids": torch.tensor([[5, 2, 0]], dtype=torch.int32),
        "block_table": blocks,
        "read_index": [torch.empty(0, dtype=torch.int64)],
        "write_index": [torch.zeros(3, dtype=torch.int64)],
    }
    view = ContinuousBatch([group], Writers(), TokenBook(CPU, 1 << 16)).view(ContinuousForward(requests, arguments))
    table = view.tables["full_attention"]
    assert (view.prefix_lens.tolist(), view.new_lens.tolist()) == ([5, 2], [1, 1])
    assert table.write_slots is None
    assert table.entries.data_ptr() == blocks.data_ptr()
    rows, slots = table.pool_page
    numbers = [int(table.entries[0, p // page]) * page + p % page for p in range(6)]
    assert [n // rows * slots + n % rows for n in numbers] == [20, 21, 22, 23, 8, 9]


def test_padding_of_static_inputs_stays_outside():
    """CUDA graphs pad tokens and lists; rows are the requests, and nothing behind their tokens is theirs."""
    group = KVGroup("sliding_attention", 0, (), block_slots=4, null_slot=1, window_tokens=4)
    requests = [SimpleNamespace(state=State("a", range(9), position_offset=9), query_length=2)]
    arguments = {
        "input_ids": torch.tensor([[7, 8, 0, 0]]),
        "position_ids": torch.tensor([[7, 8, 0, 0]]),
        "read_index": [torch.tensor([40, 41, 42, 1, 1, 0, 0, 0])],
        "write_index": [torch.tensor([43, 40, 99, 99])],
    }
    view = ContinuousBatch([group], Writers(), TokenBook(CPU, 1 << 16)).view(ContinuousForward(requests, arguments))
    table = view.tables["sliding_attention"]
    flat = arguments["read_index"][0]
    assert [int(flat[int(table.rows[0]) + p]) for p in (4, 5, 6)] == [40, 41, 42]
    assert table.stored_tokens == 4
    assert int(view.new_lens.sum()) == 2
