"""What an attention backend makes of `req_to_token`, broken from outside, after SGLang's own functions have made it."""

import contextlib
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any
from unittest import mock

import torch

from tools.traffic import decoding

NEW_TOKENS = 8
"""Of each request: the lists of the forwards after those that are broken are right again."""


def stale_table(engine: Any, what: str, prompts: list[list[int]], backend: str = "triton") -> dict[str, Any]:
    """Serves the prompts together; once all are decoding, for four forwards what the backend is given is wrong:
    ``entry`` names at a place of the last request what an earlier place of the first one has, ``old`` is the list of
    the forward before (Triton), ``short`` has the right entries and one token too few for the last request, ``window``
    names at the oldest position of a window's list the slot after it. Then they are served to their end. Gives the
    findings, the requests' names, and for ``entry`` the first position that is wrong and the slots there. ``backend``:
    ``triton``, ``flashinfer``, ``fa3`` for the page tables of its graphs, ``fa3_eager`` for those without one."""
    served = decoding(engine, prompts, NEW_TOKENS)
    engine.session.canary.drain()
    engine.told.violations = []
    known: dict[str, Any] = {"requests": [r.rid for r in served]}
    with BREAKS[backend](what, len(served), known):
        # A window's table and the full one take turns.
        for _ in range(4):
            engine.step()
    engine.session.canary.drain()
    found = [v.fields() for v in engine.told.violations]
    while engine.step():
        pass
    return {**known, "violations": found}


def wrong_entry(indptr: torch.Tensor, indices: torch.Tensor, rows: int, known: dict[str, Any]) -> None:
    """Position 3 of the last row names the slot that position 1 of the first one has."""
    place = int(indptr[rows - 1]) + 3
    known.update(position=3, right=int(indices[place]), wrong=int(indices[1]))
    indices[place] = indices[1].clone()


@contextlib.contextmanager
def break_triton(what: str, rows: int, known: dict[str, Any]) -> Iterator[None]:
    """Its two functions that fill lists, for eager forwards and graphs."""
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    before: list[torch.Tensor] = []
    fill, update = TritonAttnBackend._fill_kv_indptr_and_indices, triton_backend.update_sliding_window_buffer

    def filled(*args: Any, **kwargs: Any) -> Any:
        indptr = fill(*args, **kwargs)
        kv_indices = signature(fill).bind(*args, **kwargs).arguments["kv_indices"]
        end = int(indptr[rows])
        right = kv_indices[:end].clone()
        if what == "entry":
            wrong_entry(indptr, kv_indices, rows, known)
        elif what == "short":
            indptr[rows] -= 1
        elif what == "old" and before:
            old = before[-1][:end]
            kv_indices[: len(old)] = old
        before.append(right)
        return indptr

    def updated(*args: Any, **kwargs: Any) -> Any:
        made = update(*args, **kwargs)
        indptr, indices = made[:2]
        if what == "window":
            indices[int(indptr[0])] = indices[int(indptr[0]) + 1]
        return made

    with (
        mock.patch.object(TritonAttnBackend, "_fill_kv_indptr_and_indices", filled),
        mock.patch.object(triton_backend, "update_sliding_window_buffer", updated),
    ):
        yield


@contextlib.contextmanager
def break_flashinfer(what: str, rows: int, known: dict[str, Any]) -> Iterator[None]:
    """The kernel that makes all of its lists; a window's has a first position of each row."""
    from sglang.srt.layers.attention import flashinfer_backend

    class Breaking:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(table: Any, req: Any, lengths: Any, indptr: Any, start: Any, indices: Any, *more: Any) -> None:
                right[grid](table, req, lengths, indptr, start, indices, *more)
                if what == "entry" and start is None:
                    wrong_entry(indptr, indices, rows, known)
                elif what == "short" and start is None:
                    indptr[rows] -= 1
                elif what == "window" and start is not None:
                    indices[int(indptr[0])] = indices[int(indptr[0]) + 1].clone()

            return launch

    right = flashinfer_backend.create_flashinfer_kv_indices_triton
    with mock.patch.object(flashinfer_backend, "create_flashinfer_kv_indices_triton", Breaking()):
        yield


@contextlib.contextmanager
def break_fa3(what: str, rows: int, known: dict[str, Any]) -> Iterator[None]:
    """The function that fills the page tables of a decode that is replayed from a graph. ``entry``: the second page
    of the last row, which must have one, is the first one of the first row."""
    from sglang.srt.layers.attention import flashattention_backend

    right = flashattention_backend.normal_decode_set_metadata

    def filled(*args: Any, **kwargs: Any) -> Any:
        done = right(*args, **kwargs)
        given = signature(right).bind(*args, **kwargs).arguments
        table, size = given["page_table"], given["page_size"]
        if what == "entry":
            slots = {"right": int(table[rows - 1, 1]) * size, "wrong": int(table[0, 0]) * size}
            known.update(position=size, positions=size, **slots)
            table[rows - 1, 1] = table[0, 0].clone()
        elif what == "short":
            given["cache_seqlens_int32"][rows - 1] -= 1
        else:
            window, end = given["swa_page_table"], int(given["seq_lens"][0])
            first = max(end - known["window_tokens"], 0) // size
            window[0, first] = window[0, first + 1].clone()
        return done

    known["window_tokens"] = 128
    with mock.patch.object(flashattention_backend, "normal_decode_set_metadata", filled):
        yield


@contextlib.contextmanager
def break_fa3_eager(what: str, rows: int, known: dict[str, Any]) -> Iterator[None]:
    """What an eager decode calls between making its page table and making a window's of it, and the map that it makes
    this one with. Both tables have an entry a slot there."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    right, translate = FlashAttentionBackend._maybe_init_local_attn_metadata, SWAKVPool.translate_loc_from_full_to_swa
    first: list[int] = []

    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = signature(right).bind(self, *args, **kwargs).arguments["metadata"]
        table, size = metadata.page_table, self.page_size
        if what == "entry":
            known.update(position=size, positions=size, right=int(table[rows - 1, size]), wrong=int(table[0, 0]))
            table[rows - 1, size] = table[0, 0].clone()
        elif what == "short":
            metadata.cache_seqlens_int32 = metadata.cache_seqlens_int32.clone()
            metadata.cache_seqlens_int32[rows - 1] -= 1
        else:
            place = max(int(metadata.cache_seqlens_int32[0]) - self.sliding_window_size, 0) // size * size
            first[:] = [place, place + size]
        return right(self, *args, **kwargs)

    def translated(self: Any, slots: torch.Tensor) -> torch.Tensor:
        found = translate(self, slots)
        if first and slots.dim() == 2:
            found[0, first[0]] = found[0, first[1]].clone()
            first.clear()
        return found

    with (
        mock.patch.object(FlashAttentionBackend, "_maybe_init_local_attn_metadata", made),
        mock.patch.object(SWAKVPool, "translate_loc_from_full_to_swa", translated),
    ):
        yield


BREAKS = {"triton": break_triton, "flashinfer": break_flashinfer, "fa3": break_fa3, "fa3_eager": break_fa3_eager}
