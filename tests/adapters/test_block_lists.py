"""Lists of blocks, and the lengths beside them, without an engine. Those that attention is given: `test_tables` of the
plugins."""

from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.guarded import Guarded

from canary_adapters import BlockLists, GivenBlocks, metadata_blocks, moved_states
from canary_core import Kind


def test_states_that_go_on_in_another_block_move() -> None:
    """A row whose last token lies in another block of tokens than the one before the forward; not one that begins, one
    that stays, or one whose blocks are not known."""
    blocks = [[4, 5], [6], [7, 8], None, [0, 9, 3]]
    assert moved_states(32, [32, 3, 0, 32, 70], [1, 29, 40, 1, 5], blocks) == [(4, 5)]
    assert moved_states(32, [33, 64], [31, 1], [[4, 5], [0, 9, 3]]) == [(9, 3)]


def metadata(name: str, **values: object) -> Any:
    """Attention metadata of a class of that name."""
    return make_dataclass(name, [(key, object) for key in values])(**values)


@dataclass
class Made:
    """What is found in metadata of one layer, and what is left out."""

    one: Any
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def blocks(self) -> list[GivenBlocks]:
        """Of a region of pages of 4."""
        make = partial(GivenBlocks, region="full", group=0, page_slots=4, block_slots=4)
        return list(metadata_blocks({"l": self.one}, ["l"], None, make, lambda *what: self.left_out.append(what)))

    def lens(self) -> dict[str, list[str]]:
        """Names of lengths by that of their table, without the class."""
        kind = type(self.one).__name__
        return {
            given.name.removesuffix(f" of {kind}"): [lens.name.removesuffix(f" {kind}") for lens in given.lens]
            for given in self.blocks()
        }


TABLE = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
SEQ = torch.tensor([6, 5], dtype=torch.int32)
STARTS = torch.tensor([0, 1, 4], dtype=torch.int32)
SLOTS = torch.tensor([9, 14, 15, 16])


def test_lengths_are_those_that_a_backend_reads_by():
    """FlashAttention's go with both tables; those of MLA with its parts; those of a cascade leave out the common
    prefix."""
    usual = {"seq_lens": SEQ, "query_start_loc": STARTS, "slot_mapping": SLOTS}
    plain = Made(metadata("FlashAttentionMetadata", block_table=TABLE, **usual))
    both = ["seq_lens of", "query_start_loc of"]
    assert plain.lens() == {"block_table": both, "slot_mapping": both}
    cascade = Made(
        metadata("Cascade", block_table=TABLE, use_cascade=True, common_prefix_len=4, suffix_kv_lens=SEQ - 4, **usual)
    )
    assert cascade.lens()["block_table"] == ["suffix_kv_lens of", "query_start_loc of"]
    assert [given.common for given in cascade.blocks()] == [4, 0]
    decode = metadata("Decode", block_table=TABLE[:1], seq_lens=SEQ[:1])
    prefill = metadata("Prefill", block_table=TABLE[1:], query_start_loc=STARTS[1:] - 1, chunked_context=None)
    mla = Made(
        metadata("MLA", num_decodes=1, query_start_loc=STARTS, slot_mapping=SLOTS, decode=decode, prefill=prefill)
    )
    named = [[lens.name for lens in given.lens] for given in mla.blocks()]
    assert named == [
        ["seq_lens of decode MLA"],
        ["context_lens of MLA", "query_start_loc of MLA"],
        ["query_start_loc of MLA"],
    ]
    assert [*plain.left_out, *cascade.left_out, *mla.left_out] == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"causal": False}, "attention that is not causal may read an encoder's tokens"),
        ({"logits_indices_padded": SEQ}, "only the last tokens of each row are computed"),
        ({"make_virtual_batches_block_table": None}, "its rows are pieces of requests"),
    ],
)
def test_lengths_that_are_not_the_requests_are_left_out_and_told(more, why):
    """Encoders, rows cut to their last tokens, and chunked local attention, whose table has other rows, too."""
    usual = {"seq_lens": SEQ, "query_start_loc": STARTS, "slot_mapping": SLOTS}
    made = Made(metadata("Other", block_table=TABLE, **usual, **more))
    assert [lens for given in made.blocks() for lens in given.lens] == []
    assert ("lengths of Other", why) in made.left_out
    assert len(made.blocks()) == (1 if "make_virtual_batches_block_table" in more else 2)


def test_metadata_without_lengths_is_told():
    """It has none that are known, or only where queries begin."""
    for starts in ({}, {"query_start_loc": STARTS}):
        made = Made(metadata("Odd", block_table=TABLE, slot_mapping=SLOTS, **starts))
        assert len(made.blocks()) == 2
        assert set(made.left_out) == {("lengths of Odd", "how much it reads is not known here")}


def test_lengths_alone_and_those_of_a_cascade_are_compared_with_the_view():
    """Where a table can't be compared its lengths are; padded rows and fewer rows than the batch has are no finding."""
    g = Guarded(table_interval=1)
    g.submit("a", 3)
    g.submit("b", 4)
    batch = g.engine.batch()
    lists = BlockLists(g.canary)
    starts = torch.tensor([0, 3, 7, 7, 7], dtype=torch.int32)
    for seq, common, wrong in (((3, 4, 0, 0), 0, []), ((3, 3, 0, 0), 0, ["b"]), ((1, 2, 9), 2, []), ((3,), 0, [])):
        values = {"seq_lens": torch.tensor(seq, dtype=torch.int32)}
        if common:
            values = {"suffix_kv_lens": values["seq_lens"], "use_cascade": True, "common_prefix_len": common}
        made = Made(metadata("Meta", block_table=TABLE, query_start_loc=starts, slot_mapping=None, **values))
        (given,) = made.blocks()
        alone = GivenBlocks(**{f.name: getattr(given, f.name) for f in fields(given)} | {"entries": None})
        lists.compare(batch, [alone], lambda one: [None, None])
        g.canary.step.tables.ended()
        g.canary.drain()
        found = [v for v in g.violations if v.kind is Kind.READ_LENGTH]
        assert [v.request for v in found] == wrong
        g.violations.clear()
    told = [event.fields["reason"] for event in g.findings.told("tables_left_out")]
    assert told == ["they are not those of the batch's rows"]
