"""What ranks agree on for recompute, over a real process group of two."""

import json
import random
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from canary_sglang.actions.agreement import AGREE_EVERY, Agreement
from canary_sglang.actions.ranks import Ranks
from torch import distributed

pytestmark = pytest.mark.without_engine
TURNS = 60
ENDS = 40
"""The turn from which on rank 1 can't go on."""


def rank(number: int, folder: str) -> None:
    """One rank: now and then somebody asks there, and it is slow in its own way. Writes down what each turn gave."""
    distributed.init_process_group("gloo", f"file://{folder}/group", rank=number, world_size=2)
    agreement, draw = Agreement(Ranks(distributed.group.WORLD)), random.Random(number)
    gave = []
    for turn in range(TURNS):
        wanted = [f"{number} {turn}"] if draw.random() < 0.1 else []
        end = "over" if number == 1 and turn >= ENDS else None
        said, ends = agreement.turn(wanted, end)
        gave.append([list(said), list(ends), agreement.clock(), agreement.idles()])
        if ends:
            break
        time.sleep(0.002 * draw.random())
    Path(folder, f"{number}").write_text(json.dumps(gave))
    distributed.destroy_process_group()


def test_all_ranks_hear_the_same_in_the_same_turn(tmp_path):
    """Who asked on either rank, the time, and the end of one of them, which is the last that they exchange."""
    torch.multiprocessing.spawn(rank, (str(tmp_path),), nprocs=2)
    ours, theirs = (json.loads(Path(tmp_path, f"{number}").read_text()) for number in (0, 1))
    assert ours == theirs
    assert ours[-1][1] == ["over"]
    assert ENDS < len(ours) <= ENDS + 2 * AGREE_EVERY
    wanted = {name for said, *_ in ours for name in said}
    assert {name.split()[0] for name in wanted} == {"0", "1"}
    clock = [now for *_, now, _ in ours]
    assert clock == sorted(clock)
    assert clock[-1] > 0


def test_a_single_rank_agrees_at_once():
    """And has its own clock."""
    agreement = Agreement(Ranks(None))
    assert agreement.turn(["a"], None) == (["a"], [])
    assert agreement.turn([], "over") == ([], ["over"])
    assert agreement.clock() == pytest.approx(time.monotonic(), abs=5)
    assert agreement.idles()
