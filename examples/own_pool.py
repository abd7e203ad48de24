"""Guard a KV pool of your own: block tables, two layers, and a page that is handed out twice.

    python examples/own_pool.py

No engine and no GPU needed. Every forward runs within `canary.step.run`; then a page is given to two requests, and the
report says who wrote what.
"""

import torch

from canary_adapters import PagedPool, block_table, kv_layers
from canary_core import BatchView, Canary, CanaryConfig

PAGE, HEADS, DIM, PAGES = 4, 2, 8, 16

keys = [torch.zeros(PAGES, PAGE, HEADS, DIM) for _ in range(2)]
values = [torch.zeros(PAGES, PAGE, HEADS, DIM) for _ in range(2)]
pool = PagedPool("full", kv_layers(keys, values))
canary = Canary(pool.regions(), CanaryConfig.load(read_check=-1))
tables = torch.zeros(2, 4, dtype=torch.int32)  # pages of two requests


def forward(prefix: list[int], new: list[list[int]]) -> None:
    """One forward of both requests: check, compute, record, report."""
    table = block_table(tables, PAGE)
    view = BatchView(
        prefix_lens=torch.tensor(prefix),
        new_lens=torch.tensor([len(t) for t in new]),
        token_ids=torch.tensor([token for row in new for token in row]),
        writers=torch.tensor([canary.writers.id(name) for name in ("alice", "bob")]),
        tables={"full": table},
    )
    canary.step.run(lambda: compute(prefix, new), lambda: view)


def compute(prefix: list[int], new: list[list[int]]) -> None:
    """The engine's own work: K and V of each new token go to its place."""
    for row, tokens in enumerate(new):
        for i, token in enumerate(tokens):
            position = prefix[row] + i
            page, offset = tables[row, position // PAGE], position % PAGE
            for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                k[page, offset] = torch.sin(torch.arange(DIM) + token + 10 * position + layer)
                v[page, offset] = torch.cos(torch.arange(DIM) + token + layer)


tables[0, :2] = torch.tensor([3, 7])
tables[1, :2] = torch.tensor([5, 9])
forward([0, 0], [[11, 12, 13, 14, 15], [21, 22, 23]])
forward([5, 3], [[16], [24]])

tables[1, 1] = 7  # the allocator hands alice's second page to bob as well
forward([6, 4], [[17], [25]])  # bob overwrites alice's position 4
forward([7, 5], [[18], [26]])  # alice is about to read it
canary.drain()
print(canary.stats()["violations"], "findings")
