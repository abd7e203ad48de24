"""A `ForwardBatch` as a `BatchView`, with the tensors of SGLang's own kernels, wherever they fit."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import TABLE_STEP, UniformLens, slot_table
from canary_core import BatchAdapter, BatchView
from canary_sglang.batches.tokens import expected_tokens, folded_tensor
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import batches, drafts, runners

FIRST_ROWS = 256
"""Rows of static buffers at first. A larger batch enlarges them."""


class Anchors:
    """The anchors of one runner's rows, the starts of their prefix hashes, by the requests' identities: mostly the
    common one. Where a shared prefix may end in another request's token (`drafts.shared_with_next_token`), they are 0,
    and the hashes unknown. Then positions, written tokens and bytes are still checked in this pool. Whether all slots
    of a row are of one sequence is checked in the served model's pool, whose rows have the same slots.

    ``common``: whether there are any, and not 0.
    """

    def __init__(self, runner: Any, requests: RequestWriters) -> None:
        self._requests = requests
        self.common = drafts.shared_with_next_token(runner)
        self._zeros = UniformLens()

    def of(self, rows: Tensor, names: Sequence[str] = ()) -> Tensor:
        """`BatchView.anchors` for as many rows as ``rows`` has, of the requests ``names``; without names they are rows
        of padding. Must not be written to."""
        return self._requests.anchors(names) if self.common and names else self._zeros.of(0, rows, torch.int64)


class ForwardBatches(BatchAdapter[Any]):
    """Views of the forwards of one `ModelRunner`.

    To be made before the forward, on its stream. A decode costs no copy and one launch (prefix length = sequence length
    - 1, into a static buffer); a verification of drafted tokens costs neither; an extend has its lengths on the device
    already, and copies the requests' own tokens there, in one copy.
    """

    def __init__(self, runner: Any, regions: Sequence[str], writers: RequestWriters) -> None:
        self._entries: Tensor = runner.req_to_token_pool.req_to_token
        self._regions = tuple(regions)
        self._writers = writers
        self._uniform = UniformLens()
        self._anchors = Anchors(runner, writers)
        self._prefix_lens = torch.zeros(FIRST_ROWS, dtype=torch.int64, device=self._entries.device)
        # The part of it that the last decode had.
        self._decode_prefix_lens = self._prefix_lens
        # A draft model's slot at position p holds the token at p + 1.
        self._ahead = int(runners.draft_name(runner) is not None)
        self.trees_followed = False
        """Whether the verifier of a tree also reports accepted slots and their move."""

    def view(self, batch: Any) -> BatchView | None:
        """None for a forward without requests, such as a warm-up, for one that can't be checked (see
        `batches.is_checked`, `batches.verified_tokens`), and for one with rows without a request of their own:
        beams."""
        names = batch.rids
        mode = batch.forward_mode.name
        if not names or not batches.is_checked(batch) or batches.has_beams(batch):
            return None
        expected, positions, slots, tokens = None, batch.positions, batch.out_cache_loc, batch.input_ids
        if mode == "DECODE":
            prefix_lens, new_lens = self._decode_lens(batch.seq_lens)
        elif mode == "TARGET_VERIFY":
            drafted = batches.verified_tokens(batch)
            if drafted is None:
                return None
            if batches.is_tree(batch):
                # Each token counts as the one at its slot's place in the table. Those that are accepted are told anew
                # once they were moved, the rest is forgotten (`DraftHooks`). Where nobody does that, only the reads are
                # known, and the session forgets what was written.
                positions = None
                if not self.trees_followed:
                    drafted, slots = 0, None
            prefix_lens, new_lens = batch.seq_lens, self._uniform.of(drafted, batch.seq_lens)
        else:
            prefix_lens, new_lens = batch.extend_prefix_lens, batch.extend_seq_lens
            expected = self._expected(batch, names)
            tokens = self._tokens(batch, names)
        tables = dict.fromkeys(self._regions, slot_table(self._entries, batch.req_pool_indices, slots))
        return BatchView(
            prefix_lens=prefix_lens,
            new_lens=new_lens,
            token_ids=tokens,
            writers=self._writers.ids(names),
            tables=tables,
            positions=positions,
            expected_tokens=expected,
            anchors=self._anchors.of(prefix_lens, names),
        )

    def padding(self, rows: int) -> Iterator[BatchView]:
        """A decode and extends of ``rows`` rows without reads and writes, for `Canary.warm_up`."""
        numbers = self._entries.new_zeros(rows, dtype=torch.int64)
        lengths = self._entries.new_zeros(rows, dtype=torch.int32)
        known = lengths.new_full((rows, TABLE_STEP), -1)
        tables = dict.fromkeys(self._regions, slot_table(self._entries, numbers, numbers))
        for lens, expected in ((numbers, None), (lengths, known)):
            yield BatchView(
                prefix_lens=lens,
                new_lens=lens,
                token_ids=numbers,
                writers=lengths,
                tables=tables,
                positions=numbers,
                expected_tokens=expected,
                anchors=self._anchors.of(numbers),
            )

    def _decode_lens(self, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        rows = seq_lens.shape[0]
        if rows > self._prefix_lens.shape[0] or seq_lens.dtype != self._prefix_lens.dtype:
            # Rare: SGLang's type of lengths differs, or the batch is the largest so far.
            self._prefix_lens = torch.zeros(max(rows, FIRST_ROWS), dtype=seq_lens.dtype, device=seq_lens.device)
            self._decode_prefix_lens = self._prefix_lens
        if self._decode_prefix_lens.shape[0] != rows:
            self._decode_prefix_lens = self._prefix_lens[:rows]
        ones, prefix_lens = self._uniform.of(1, seq_lens), self._decode_prefix_lens
        torch.sub(seq_lens, ones, out=prefix_lens)
        return prefix_lens, ones

    def _tokens(self, batch: Any, names: Sequence[str]) -> Tensor:
        """The tokens of an extend, with the numbers of embeddings that override some of them."""
        tokens: Tensor = batch.input_ids
        prefixes, news = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        if self._ahead or prefixes is None or news is None:
            return tokens
        if batches.has_images(batch) and tokens.dtype == torch.int64:
            tokens = folded_tensor(tokens)
        if getattr(batch, "replace_embeds", None) is None:
            return tokens
        return self._writers.writers.contents.given(names, prefixes, news, tokens)

    def _expected(self, batch: Any, names: Sequence[str]) -> Tensor | None:
        """The requests' own tokens for an extend, as `BatchView.expected_tokens`; None if the model computes others, as
        with embeddings, or images in a separate encoder. A draft model gets the tokens of images after the served model
        has cut them to the vocabulary."""
        images = batches.has_images(batch) and (self._ahead > 0 or batches.strips_media(batch))
        prefixes, news = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        if images or batch.input_embeds is not None or prefixes is None or news is None:
            return None
        mixed = batch.forward_mode.name == "MIXED"
        requests = self._writers.requests(names)
        for i, (request, new) in enumerate(zip(requests, news, strict=True)):
            # Decode rows of a mixed batch were checked when their requests were extended.
            if mixed and new == 1 and request is not None and len(request.output_ids):
                requests[i] = None
        ends = [prefix + new + self._ahead for prefix, new in zip(prefixes, news, strict=True)]
        begins = None if self._anchors.common else [prefix + self._ahead for prefix in prefixes]
        contents = None if self._ahead else self._writers.writers.any_contents
        tokens = expected_tokens(requests, ends, batch.input_ids.device, begins, contents)
        return tokens if tokens is None else tokens[:, self._ahead :]
