"""A toy engine with one flipped bit."""

import torch
from support.guarded import Guarded
from support.toy import ToyEngine


def flipped(**settings):
    """A toy engine in which a bit of layer 1 was flipped; findings of it."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, **settings)
    request = guarded.submit("a", 12)
    guarded.step(8)
    guarded.engine.k[1].view(torch.int32)[request.slots[5], 3] ^= 1 << 9
    guarded.step(4)
    guarded.canary.close()
    return guarded.findings
