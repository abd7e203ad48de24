"""Tables of attention backends for a forward: lists of slots and page tables made from `req_to_token`, with lengths."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from canary_sglang.compat import batches

PARTS = ("prefill_backend", "decode_backend", "full_attn_backend", "primary")
"""Names of a backend's inner backends, which do the work; the part for recurrent layers, not among them, reads no slots
of tokens."""

READ_THEMSELVES = frozenset({"TorchNativeAttnBackend", "TorchFlexAttnBackend", "IntelAMXAttnBackend"})
"""Backends with a look-up of every slot in `req_to_token`."""

METADATA = ("init_forward_metadata", "init_forward_metadata_out_graph")
"""Methods of a backend for making tables, for a forward and for the replay of a graph."""


READ_BY_ROW = {"TorchNativeAttnBackend": "scaled_dot_product_attention"}
"""Of these those that compute a row at a time, with the function of their module that gets the row's keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Lens:
    """Lengths made for the rows of a table. name, given, begins: as in `ReadLens`. of: the positions that the table has
    (``read``), these and the tokens that the forward computes (``rest``), both from position 0 on (``whole``), or the
    computed tokens alone (``new``)."""

    name: str
    given: Tensor
    of: Literal["read", "rest", "whole", "new"]
    begins: bool = True


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Indices:
    """A list of the slots of all rows, one row after the other: row ``r`` has those from ``starts[r]`` on.

    window_tokens: the list begins with the first of so many last positions of a row, None for all. own_slots: it has
    slots of the window's own pool, else numbers as in `req_to_token`.
    """

    name: str
    entries: Tensor
    starts: Tensor
    window_tokens: int | None = None
    own_slots: bool = False
    lens: tuple[Lens, ...] = ()

    @property
    def rows(self) -> int:
        """Number of batch rows."""
        return self.starts.shape[0] - 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pages:
    """A page table, ``[rows, pages]``: the number of a page of ``page_size`` slots for each page of a row. Of a window
    only the last ``window_tokens`` positions are read. ``own_slots`` as in `Indices`."""

    name: str
    entries: Tensor
    page_size: int
    window_tokens: int | None = None
    own_slots: bool = False
    lens: tuple[Lens, ...] = ()

    @property
    def rows(self) -> int:
        """Number of batch rows."""
        return self.entries.shape[0]


Made = Indices | Pages


def leaves(backend: Any) -> Iterator[Any]:
    """``backend``, or its parts."""
    parts = [part for name in PARTS if (part := getattr(backend, name, None)) is not None]
    # FlashInfer's own backend has names of kernels there.
    parts = [part for part in parts if not isinstance(part, str)]
    if not parts:
        yield backend
    for part in dict.fromkeys(parts):
        yield from leaves(part)


def recurrent(backend: Any) -> Any | None:
    """The part of ``backend`` for recurrent layers, None for none."""
    return getattr(backend, "linear_attn_backend", None)


def state_slots(backend: Any, batch: Any) -> Tensor | None:
    """The slots of the batch's recurrent states as noted by such a part for its kernels, ``[rows]`` and padding; None
    where the forward computes them in another way than one state a request, or nothing is known."""
    if batch.forward_mode.name not in ("DECODE", "EXTEND", "MIXED") or batch.spec_info is not None:
        return None
    slots = getattr(getattr(backend, "forward_metadata", None), "mamba_cache_indices", None)
    return slots if isinstance(slots, Tensor) and slots.dim() == 1 else None


def why_not(backend: Any) -> str | None:
    """Why the tables of a leaf are not compared, None if they are."""
    name = type(backend).__name__
    if name in READ_THEMSELVES:
        return "it makes no table: it reads req_to_token itself"
    if name not in KNOWN:
        return "what it makes of req_to_token is not known here"
    sharded = getattr(backend, "dcp_size", 1) > 1 or (getattr(backend, "attn_cp_size", None) or 1) > 1
    if sharded or getattr(backend, "_kv_shard_pool", None) is not None:
        return "the slots of one request lie on several ranks"
    if getattr(backend, "is_prefill_aware_swa", False):
        return "its page tables leave out what the window has passed"
    # Up to 0.5.17, and later.
    hooks = getattr(backend, "_unified_hooks", None)
    translates = getattr(backend, "_translate_kv_loc", None) is not None or getattr(hooks, "enabled", False)
    if translates or getattr(getattr(backend, "kv_index_translator", None), "is_translating", False):
        return "req_to_token has virtual slots, which it translates"
    return None


def made(backend: Any, graph: bool, batch: Any) -> Iterator[Made]:
    """The tables last made by a leaf for ``batch``. ``graph``: for the replay of a CUDA graph, in the graph's own
    buffers."""
    yield from KNOWN[type(backend).__name__](backend, graph, batch)


def _triton(backend: Any, graph: bool, batch: Any) -> Iterator[Made]:
    kind = "TritonAttnBackend"
    queries: tuple[Lens, ...] = ()
    if graph:
        holder, entries, window = backend, backend.cuda_graph_kv_indices, "cuda_graph_window_kv_indices"
    else:
        holder, window = backend.forward_metadata, "window_kv_indices"
        entries = holder.kv_indices
        if batch.forward_mode.name in ("EXTEND", "MIXED"):
            queries = (Lens(f"qo_indptr of {kind}", holder.qo_indptr, "new"),)
    starts = holder.kv_indptr
    lens = (Lens(f"kv_indptr of {kind}", starts, "read"), *queries)
    yield Indices(name=f"kv_indices of {kind}", entries=entries.view(-1), starts=starts, lens=lens)
    tokens = _window_tokens(backend)
    entries, starts = getattr(holder, window, None), getattr(holder, "window_kv_indptr", None)
    if tokens and entries is not None and starts is not None:
        own = bool(getattr(backend, "use_sliding_window_kv_pool", False))
        name, lens = f"window_kv_indices of {kind}", (Lens(f"window_kv_indptr of {kind}", starts, "read"), *queries)
        entries = entries.view(-1)
        yield Indices(name=name, entries=entries, starts=starts, window_tokens=tokens, own_slots=own, lens=lens)


def _flashinfer(backend: Any, graph: bool, batch: Any) -> Iterator[Made]:
    """The lists its wrappers were planned with: one for all layers, or a window's and one for the other layers."""
    mode = batch.forward_mode.name
    # Of drafted tokens other code makes it.
    if mode == "TARGET_VERIFY":
        return
    if not graph:
        metadata = backend.forward_metadata
        wrappers = getattr(metadata, "decode_wrappers", None) or getattr(metadata, "prefill_wrappers", ())
    elif mode == "DECODE":
        wrappers = backend.decode_cuda_graph_metadata[batch.batch_size]
    else:
        wrappers = backend.full_cg_prefill_wrappers
    # The slots of what it has dequantized.
    if not wrappers or getattr(backend, "dq_page_table", None) is not None:
        return
    kind, window = "FlashInferAttnBackend", _window_tokens(backend.indices_updater_decode)
    name, full = f"kv_indices of {kind}", wrappers[-1]
    starts = full._paged_kv_indptr_buf
    lens = _planned_lens(backend, graph, mode, f"kv_indptr of {kind}", starts)
    yield Indices(name=name, entries=full._paged_kv_indices_buf, starts=starts, lens=lens)
    if len(wrappers) == 2 and window:
        own = getattr(backend.indices_updater_decode, "_swa_kv_pool", None) is not None
        tokens = window + 1 if mode == "DECODE" else window
        entries, starts = wrappers[0]._paged_kv_indices_buf, wrappers[0]._paged_kv_indptr_buf
        lens, name = _planned_lens(backend, graph, mode, f"window_kv_indptr of {kind}", starts), f"window_{name}"
        yield Indices(name=name, entries=entries, starts=starts, window_tokens=tokens, own_slots=own, lens=lens)


def _planned_lens(backend: Any, graph: bool, mode: str, name: str, starts: Tensor) -> tuple[Lens, ...]:
    """Of an extend's list the new tokens are part where nothing else gives them; in a graph that is not known."""
    if mode == "DECODE":
        return (Lens(name, starts, "read"),)
    ragged = None if graph else getattr(backend.forward_metadata, "use_ragged", None)
    return () if ragged is None else (Lens(name, starts, "read" if ragged else "rest"),)


def _flash_attention(backend: Any, graph: bool, batch: Any) -> Iterator[Made]:
    # Branches of drafted tokens have tables beside this one.
    if batch.forward_mode.name == "TARGET_VERIFY" and (getattr(backend, "topk", 0) or 0) > 1:
        return
    metadata = backend.forward_metadata
    kind, size = "FlashAttentionBackend", int(backend.page_size)
    name = f"page_table of {kind}"
    lens = (
        Lens(f"cache_seqlens_int32 of {kind}", metadata.cache_seqlens_int32, "whole", begins=False),
        Lens(f"cu_seqlens_q of {kind}", metadata.cu_seqlens_q, "new"),
    )
    if metadata.page_table is not None:
        yield Pages(name=name, entries=metadata.page_table, page_size=size, lens=lens)
    tokens = _window_tokens(backend)
    if tokens and metadata.swa_page_table is not None:
        entries = metadata.swa_page_table
        name = f"swa_{name}"
        yield Pages(name=name, entries=entries, page_size=size, window_tokens=tokens, own_slots=True, lens=lens)


def _window_tokens(holder: Any) -> int | None:
    tokens = getattr(holder, "sliding_window_size", None)
    return int(tokens) if tokens and tokens > 0 else None


KNOWN: dict[str, Callable[[Any, bool, Any], Iterator[Made]]] = {
    "TritonAttnBackend": _triton,
    "FlashInferAttnBackend": _flashinfer,
    "FlashAttentionBackend": _flash_attention,
}
"""Known backends, with readers of the tables."""


def read_lengths(batch: Any) -> Tensor | None:
    """How many positions of each row of a `ForwardBatch` such a list has, int32 or int64; None where that isn't known:
    steps of a draft, and encoders."""
    mode = batch.forward_mode.name
    if batch.encoder_lens is not None or not batch.rids:
        return None
    lengths: Tensor | None = None
    if (mode == "DECODE" and batch.spec_info is None) or mode == "TARGET_VERIFY":
        lengths = batch.seq_lens
    elif mode in ("EXTEND", "MIXED"):
        lengths = batch.extend_prefix_lens
    return lengths


def new_lengths(batch: Any) -> Tensor | int | None:
    """How many tokens of each row a forward with `read_lengths` computes; None where that isn't known."""
    mode = batch.forward_mode.name
    if mode == "TARGET_VERIFY":
        ragged = getattr(batch.spec_info, "ragged_verify_layout", None) is not None
        return None if ragged else batches.verified_tokens(batch)
    lengths: Tensor | int = 1 if mode == "DECODE" else batch.extend_seq_lens
    return lengths
