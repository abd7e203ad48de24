"""Where SGLang puts recurrent states aside within a forward, from made-up batches."""

from types import SimpleNamespace

import pytest
import torch
from canary_sglang.compat.state_checkpoints import Checkpoints

pytestmark = [pytest.mark.without_engine, pytest.mark.beyond_ci("make test")]


def forward(mode, **tracked):
    """What a `ForwardBatch` says of checkpoints."""
    known = dict.fromkeys(("indices", "mask", "seqlens"))
    about = {f"mamba_track_{name}": value for name, value in {**known, **tracked}.items()}
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), extend_seq_lens_cpu=None, seq_lens_cpu=None, **about
    )


def test_where_an_extend_puts_states_aside():
    """As of its last whole chunk, which begin where the prefix ends; SGLang gives a token more where that is not the
    last one of all. Rows that do not are left out, and a batch without a whole chunk is no work at all."""
    checkpoints, prefixes = Checkpoints(64, 256), torch.tensor([0, 10, 0, 5], dtype=torch.int32)
    tracked = dict(
        indices=torch.tensor([4, 5, 6, 7]),
        mask=torch.tensor([True, True, True, False]),
        seqlens=torch.tensor([100, 10 + 128, 64 + 1, -1]),
    )
    batch = forward("EXTEND", **tracked)
    kept = checkpoints.of_forward(batch, prefixes)
    assert kept.slots.tolist() == [4, 5, 6, -1]
    assert kept.positions[:3].tolist() == [63, 10 + 127, 63]
    batch.extend_seq_lens_cpu = [60, 63]
    assert checkpoints.of_forward(batch, prefixes) is None
    assert checkpoints.of_forward(forward("EXTEND", **{**tracked, "seqlens": None}), prefixes) is None
    assert checkpoints.of_forward(forward("MIXED"), prefixes) is None


def test_where_a_decode_puts_states_aside():
    """As of its only token; where no length is due, as the host knows them, that is no work at all."""
    checkpoints, prefixes = Checkpoints(64, 256), torch.tensor([255, 300])
    batch = forward("DECODE", indices=torch.tensor([4, 5]), mask=torch.tensor([True, False]))
    for lengths in (None, torch.tensor([256, 301])):
        batch.seq_lens_cpu = lengths
        kept = checkpoints.of_forward(batch, prefixes)
        assert (kept.slots.tolist(), kept.positions.tolist()) == ([4, -1], [255, 300])
    batch.seq_lens_cpu = torch.tensor([257, 301])
    assert checkpoints.of_forward(batch, prefixes) is None
