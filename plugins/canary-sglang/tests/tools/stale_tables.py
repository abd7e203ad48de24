"""What an attention backend makes of `req_to_token`, broken from outside, after SGLang's own functions have made it."""

from typing import Any

import torch

from tools.traffic import decoding

NEW_TOKENS = 8
"""Of each request: the lists of the forwards after those that are broken are right again."""


def stale_table(engine: Any, what: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Serves the prompts together; once all are decoding, for four forwards the lists of the Triton backend are wrong:
    ``entry`` names at one position of the last request a slot of the first one, ``old`` is the list of the forward
    before, ``window`` names at the oldest position of a window's list the slot after it. Then they are served to
    their end. Gives the findings, the requests' names, and for ``entry`` both slots and the position."""
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    served = decoding(engine, prompts, NEW_TOKENS)
    engine.session.canary.drain()
    engine.told.violations = []
    known: dict[str, Any] = {"requests": [r.rid for r in served]}
    before: list[torch.Tensor] = []
    fill, update = TritonAttnBackend._fill_kv_indptr_and_indices, triton_backend.update_sliding_window_buffer

    def filled(self: Any, bs: int, seq_lens: Any, req_pool_indices: Any, kv_indices: Any, *more: Any) -> Any:
        indptr = fill(self, bs, seq_lens, req_pool_indices, kv_indices, *more)
        rows = len(served)
        end = int(indptr[rows])
        right = kv_indices[:end].clone()
        if what == "entry":
            place = int(indptr[rows - 1]) + 3
            known.update(position=3, right=int(right[place]), wrong=int(right[1]))
            kv_indices[place] = right[1]
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

    TritonAttnBackend._fill_kv_indptr_and_indices = filled
    triton_backend.update_sliding_window_buffer = updated
    try:
        # A window's list and the full one take turns.
        for _ in range(4):
            engine.step()
    finally:
        TritonAttnBackend._fill_kv_indptr_and_indices = fill
        triton_backend.update_sliding_window_buffer = update
    engine.session.canary.drain()
    found = [v.fields() for v in engine.told.violations]
    while engine.step():
        pass
    return {**known, "violations": found}
