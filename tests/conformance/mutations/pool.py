"""Wrong pools."""

from dataclasses import replace

import torch
from canary_toy.toy_engine import PAGE
from conformance.mutations.changes import (
    Break,
    cloned,
    each_source,
    heads_first,
    pool_of_first_engine,
    regions,
    sources,
    uncovered_too_little,
)

POOL: dict[str, Break] = {
    "the last layer is missing": sources(lambda s: [x for x in s if x.layer != 1]),
    "the first layer is missing": sources(lambda s: [x for x in s if x.layer != 0]),
    "V is missing": sources(lambda s: [x for x in s if x.half != "v"]),
    "K is missing": sources(lambda s: [x for x in s if x.half != "k"]),
    "V of one layer is missing": sources(lambda s: [x for x in s if x.name != "v.1"]),
    "half of the heads are missing": each_source(chunk_bytes=lambda s: s.slot_bytes // 2, chunks=1),
    "the last value of each head is missing": each_source(chunk_bytes=lambda s: s.slot_bytes - 4, chunks=1),
    "K and V are exchanged": sources(lambda s: [replace(x, half="v" if x.half == "k" else "k") for x in s]),
    "K and V of one layer are exchanged": sources(
        lambda s: [replace(x, half="v" if x.half == "k" else "k") if x.layer else x for x in s]
    ),
    "layers are reversed": sources(lambda s: [replace(x, layer=1 - x.layer) for x in s]),
    "layers count from 1": sources(lambda s: [replace(x, layer=x.layer + 1) for x in s]),
    "layer 0 is described twice, layer 1 never": sources(
        lambda s: [replace(x, layer=layer) for layer in range(2) for x in s if x.layer == 0]
    ),
    "the pool is copied, not viewed": sources(lambda s: [cloned(x) for x in s]),
    "one layer is copied, not viewed": sources(lambda s: [cloned(x) if x.layer else x for x in s]),
    "the pool is that of an earlier engine": pool_of_first_engine,
    "the pool's page size is half of what it is": each_source(
        page_size=2, page_stride_bytes=lambda s: s.page_stride_bytes, present=None
    ),
    "heads-first is read as tokens-first": sources(lambda s: [heads_first(x) for x in s]),
    "the slot stride is one head too short": each_source(slot_stride_bytes=lambda s: s.slot_stride_bytes // 2),
    "everything is one slot further": regions(
        lambda r: replace(
            r,
            slots=r.slots - PAGE,
            sources=tuple(replace(s, offset_bytes=s.offset_bytes + s.slot_stride_bytes) for s in r.sources),
        )
    ),
    "the last pages are left out": regions(lambda r: replace(r, slots=r.slots // 2)),
    "the null block is not known": regions(lambda r: replace(r, null_slot=None, null_slots=1)),
    "the null block is taken for one slot": regions(lambda r: replace(r, null_slots=1)),
    "the null block is looked for at the wrong place": regions(lambda r: replace(r, null_slot=PAGE)),
    "float32 is taken for float16": each_source(dtype=torch.float16),
    "what is left out is explained by too little": uncovered_too_little,
    "the null block is the last page": regions(lambda r: replace(r, null_slot=r.slots - PAGE)),
    "the null block is two pages": regions(lambda r: replace(r, null_slots=2 * PAGE)),
    "the null block is one slot of a live page": regions(lambda r: replace(r, null_slot=PAGE + 1, null_slots=1)),
    "the null block is half of the pool": regions(lambda r: replace(r, null_slots=r.slots // 2)),
}
"""By name, in the order of the table in the docs."""
