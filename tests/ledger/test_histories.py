"""Random histories of a toy engine with a host tier: what was broken is found, all of it and nothing else."""

import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger.host_tier import PAGE, HostTier
from support.toy import ToyEngine

from canary_core import Kind


def history(seed, backend="torch", empties=0.0, context=True, **options):
    """Prompts that share prefixes are computed, with changing numerics, stored, lost, brought back right or broken, by
    forwards that do or do not wait; with probability ``empties`` all that was stored is gone after a turn. Without
    ``context`` KV depends on its token alone, as in an even context without positions. Gives what
    was broken and what was found, as (request, position, sources), what else was found, and the tier."""
    rng = random.Random(seed)
    tier = HostTier.make(engine=ToyEngine(slots=96), backend=backend, **options)
    engine, canary = tier.g.engine, tier.g.canary
    prompts = [[rng.choice([5, 6]) for _ in range(rng.randint(5, 17))] for _ in range(4)]
    forward, scale = engine.forward, 1.0

    def numerics(batch):
        forward(batch)
        news = zip(engine.requests, engine.news, strict=True)
        # As a model's: of everything before, so that the same tokens elsewhere have other KV.
        past = [hash(tuple(r.tokens[: p + 1])) % 251 for r, n in news for p in range(r.cached - n, r.cached)]
        for tensor in tier.tensors:
            slots = batch.tables["full"].write_slots.long()
            tensor[slots] = scale * (tensor[slots] + context * torch.tensor(past)[:, None]).to(tensor.dtype)

    engine.forward = numerics
    broken = []
    for turn in range(20):
        name, prompt = f"r{turn}", rng.choice(prompts)
        scale = rng.choice([1.0, 1.0, 1.5])
        blocks = (len(prompt) - 1) // PAGE
        there = blocks > 0 and all(tuple(prompt[: (b + 1) * PAGE]) in tier.stored for b in range(blocks))
        if not there or rng.random() < 0.3:
            # Where it was stored before, another one of the same prefix takes its place; both are right.
            request = tier.compute(prompt, name)
            tier.save(request)
            if rng.random() < 0.5:
                tier.g.step()
        else:
            request, arrival = tier.claim(prompt, name)
            early = rng.random() < 0.5
            bad = {rng.randrange(blocks): sorted(rng.sample(range(4), rng.randint(1, 4)))} if rng.random() < 0.4 else {}

            def fault(block, source, data, bad=bad):
                if source in bad.get(block, ()):
                    data.view(torch.uint8)[rng.randrange(PAGE), rng.randrange(8)] ^= 1 << rng.randrange(8)
                return data

            if early:
                canary.ledger.expect(arrival)
                if rng.random() < 0.3:
                    canary.ledger.keep("full", arrival.slots, PAGE)
                tier.g.step(fault=lambda request=request, fault=fault: tier.copy(request, fault))
            else:
                tier.copy(request, fault)
            canary.ledger.arrive(arrival)
            if rng.random() < 0.5:
                tier.g.step()
            names = ("k.0", "v.0", "k.1", "v.1")
            broken += [(name, block * PAGE, tuple(names[s] for s in sources)) for block, sources in bad.items()]
            if not bad and rng.random() < 0.3:
                tier.save(request)
        tier.finish(request)
        canary.slots.settle()
        if empties and rng.random() < empties:
            tier.stored.clear()
            assert canary.ledger.emptied()
    canary.drain()
    found = [(v.request, v.position, v.sources) for v in tier.g.violations if v.kind is Kind.ARRIVAL]
    others = [v for v in tier.g.violations if v.kind is not Kind.ARRIVAL]
    return broken, found, others, tier


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6))
def test_what_was_broken_is_found_and_nothing_else(seed):
    """Each broken block, with the sources in which it is, by its request."""
    broken, found, others, tier = history(seed)
    assert (sorted(found), others) == (sorted(broken), [])
    assert tier.counts("unknown", "unclear", "rewritten", "unjudged") == [0, 0, 0, 0]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6))
def test_the_same_tokens_elsewhere_may_have_the_same_kv(seed):
    """After entries were evicted, a block like another one of the same tokens is no finding."""
    broken, found, others, _ = history(seed, empties=0.3, context=False, ledger=5 * 230)
    assert (set(found) - set(broken), others) == (set(), [])


def test_the_histories_break_and_reload_something():
    """Over two seeds that break and reload much: the test above is not empty, and the kernels do the same as torch."""
    totals = torch.zeros(2, dtype=torch.int64)
    for seed in (4, 6):
        broken, found, others, tier = history(seed, "triton")
        assert (sorted(found), others) == (sorted(broken), [])
        assert found == history(seed)[1]
        totals += torch.tensor([len(found), tier.counts("matched")[0]])
    assert totals[0] > 10
    assert totals[1] > 40
