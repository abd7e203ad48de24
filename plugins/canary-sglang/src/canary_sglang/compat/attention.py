"""What attention backends are given for a forward: lists of slots and page tables that they make of `req_to_token`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

PARTS = ("prefill_backend", "decode_backend", "full_attn_backend", "primary")
"""Under these names a backend keeps others, which do its work; beside them those of recurrent layers, which read no
slots of tokens."""

READ_THEMSELVES = frozenset({"TorchNativeAttnBackend", "TorchFlexAttnBackend", "IntelAMXAttnBackend"})
"""Backends that look every slot up in `req_to_token`."""

METADATA = ("init_forward_metadata", "init_forward_metadata_out_graph")
"""Methods of a backend that make its tables, for a forward and for the replay of a graph."""


@dataclass(frozen=True, slots=True, eq=False)
class Indices:
    """A list of the slots of all rows, one row after the other: row ``r`` has those from ``starts[r]`` on.

    window_tokens: the list has only so many of a row's last positions, None for all. own_slots: it has slots of the
    window's own pool, else numbers as in `req_to_token`.
    """

    name: str
    entries: Tensor
    starts: Tensor
    window_tokens: int | None = None
    own_slots: bool = False


def leaves(backend: Any) -> Iterator[Any]:
    """``backend``, or those of which it consists."""
    parts = [part for name in PARTS if (part := getattr(backend, name, None)) is not None]
    if not parts:
        yield backend
    for part in dict.fromkeys(parts):
        yield from leaves(part)


def recurrent(backend: Any) -> Any | None:
    """The part of ``backend`` that computes recurrent layers, None for none."""
    return getattr(backend, "linear_attn_backend", None)


def state_slots(backend: Any, batch: Any) -> Tensor | None:
    """The slots of the batch's recurrent states that such a part has noted for its kernels, ``[rows]`` and padding;
    None where the forward computes them in another way than one state a request, or nothing is known of them."""
    if batch.forward_mode.name not in ("DECODE", "EXTEND", "MIXED") or batch.spec_info is not None:
        return None
    slots = getattr(getattr(backend, "forward_metadata", None), "mamba_cache_indices", None)
    return slots if isinstance(slots, Tensor) and slots.dim() == 1 else None


def why_not(backend: Any) -> str | None:
    """Why the tables of a leaf are not compared, None if they are."""
    name = type(backend).__name__
    if name in READ_THEMSELVES:
        return "it makes no table: it reads req_to_token itself"
    if name != "TritonAttnBackend":
        return "what it makes of req_to_token is not known here"
    if getattr(backend, "dcp_size", 1) > 1:
        return "the slots of one request lie on several ranks"
    # Up to 0.5.17, and later.
    translates = getattr(backend, "_translate_kv_loc", None) is not None
    if translates or getattr(getattr(backend, "kv_index_translator", None), "is_translating", False):
        return "req_to_token has virtual slots, which it translates"
    return None


def indices(backend: Any, graph: bool) -> Iterator[Indices]:
    """What a leaf has made last. ``graph``: for the replay of a CUDA graph, in that graph's own buffers."""
    if graph:
        made, entries, window = backend, backend.cuda_graph_kv_indices, "cuda_graph_window_kv_indices"
    else:
        made, window = backend.forward_metadata, "window_kv_indices"
        entries = made.kv_indices
    name = type(backend).__name__
    yield Indices(f"kv_indices of {name}", entries.view(-1), made.kv_indptr)
    tokens = getattr(backend, "sliding_window_size", None)
    entries, starts = getattr(made, window, None), getattr(made, "window_kv_indptr", None)
    if tokens and tokens > 0 and entries is not None and starts is not None:
        own = bool(getattr(backend, "use_sliding_window_kv_pool", False))
        yield Indices(f"window_kv_indices of {name}", entries.view(-1), starts, int(tokens), own)


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
