"""Every fault, injected into a toy engine's memory, is found as what it is; without faults nothing is touched."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig, ConfigError, Event, Kind, Violation, ViolationError, hookimpl
from canary_core.config.faults import FaultName
from canary_core.guard.reporting.budget import PROCESS
from canary_core.plugins import Plugins, hook_manager, private_hooks, start
from canary_core.region import KVSource
from canary_core.testing import FAULTS, FaultInjector, FaultSpec, Findings, read_bytes, write_bytes

BYTES = {Kind.BYTES}
MAPPING = {Kind.POSITION, Kind.TOKEN, Kind.PREFIX}
EXPECTED = {
    "req_to_token": MAPPING,
    "real_kv_used": BYTES,
    "real_kv_unused_cache": BYTES,
    "real_kv_post_forward": BYTES,
    "lost_write": {Kind.LOST_WRITE},
    "stray_write": BYTES,
    "swap_pages": BYTES,
    "next_token_swap": {Kind.WRITE_INPUT},
}
AIMED = sorted(set(FAULTS) - {"req_to_token", "next_token_swap"})
"""Faults that break bytes, so that a source can be named."""


@dataclass
class Run:
    """A guarded toy engine with everything that was reported."""

    faults: str = ""
    seed: int = 0
    window: int = 5

    def __post_init__(self) -> None:
        # What was told before in this process, maybe by a starved machine, leaves no finding of this run untold.
        PROCESS.fill()
        self.engine = ToyEngine(slots=128, window=self.window)
        self.heard = Findings()
        self.injector = FaultInjector.parse(self.faults, self.seed)
        self.manager = private_hooks(self.heard, self.injector)
        self.manager.unregister(name="reporting")
        # Bytes of all slots are compared in every forward, so that no fault is overwritten before it is seen.
        config = CanaryConfig(scrub_budget="1MiB", stats_interval=0, silence_s=0)
        self.canary = Canary(self.engine.regions(), config, hooks=self.manager, writers=self.engine.writers)

    @property
    def violations(self) -> list[Violation]:
        return self.heard.violations

    def serve(self, steps: int = 8) -> "Run":
        """Four requests, one of which shares a prefix, one of which ends early and stays cached."""
        engine = self.engine
        early = engine.submit("early", list(range(40, 52)))
        first = engine.submit("first", list(range(10, 32)))
        engine.submit("second", [10, 11, *range(60, 80)])
        for _ in range(3):
            self.step()
        engine.requests.remove(early)
        engine.submit("third", [*range(10, 15), *range(90, 110)], shared=first, prefix=5 if not self.window else 0)
        for _ in range(steps):
            self.step()
        self.canary.close()
        return self

    def step(self) -> None:
        self.engine.step(self.canary, chunk=3)

    def injected(self) -> list[Event]:
        return self.heard.told("fault_injected")


@pytest.mark.parametrize("region", ["full", "window"])
@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_every_fault_is_found_as_what_it_is(fault, region, seed):
    """In both kinds of region, wherever the seed puts it: one injection, one event, and a finding that names it."""
    run = Run(f"{fault}:warmup=2,region={region}", seed).serve()
    assert [e.fields["fault"] for e in run.injected()] == [fault]
    (injection,) = run.injector.injections
    found = [v for v in run.violations if injection.explains(v)]
    assert found, f"{injection} went unseen; {[str(v) for v in run.violations]}"
    assert {v.kind for v in found} <= EXPECTED[fault]
    assert {v.region for v in found} == {region}
    assert injection.step > 2


@pytest.mark.parametrize(("region", "source"), [("full", "k.0"), ("full", "v.1"), ("window", "v.9")])
@pytest.mark.parametrize("fault", AIMED)
def test_any_layer_and_half_can_be_aimed_at(fault, region, source):
    """The finding names the layer and half that the fault was aimed at, and no other one."""
    run = Run(f"{fault}:warmup=2,region={region},source={source}").serve()
    (injection,) = run.injector.injections
    assert injection.source == source
    assert {v.source for v in run.violations} == {source}
    assert any(injection.explains(v) for v in run.violations)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_all_faults_at_once_are_each_found(seed):
    """Faults of one run do not hide each other, nor hit the same content twice."""
    text = ";".join(f"{f}:probability=0.4,warmup=1,count=2" for f in AIMED if f != "lost_write")
    run = Run(text, seed).serve(12)
    unseen = [i for i in run.injector.injections if not any(i.explains(v) for v in run.violations)]
    assert unseen == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", ["real_kv_unused_cache", "stray_write"])
def test_a_slot_that_is_broken_already_is_left_alone(fault, seed):
    """Whoever broke it: another row that lands there could repair it. Of many such slots a single one is intact."""
    run = Run(f"{fault}:warmup=4,region=full,source=k.0", seed)
    intact = []

    class Vandal:
        @hookimpl(tryfirst=True)
        def canary_pre_forward(self, canary, batch):
            state = canary.states["full"]
            if canary.forwards != 5:
                return
            busy = {0, *batch.tables["full"].write_slots.tolist()}
            written = [s for s in range(state.region.slots) if state.records[s, 1] % 8 == 1 and s not in busy]
            # Held by the request that has ended, so that no forward reads it.
            intact.append(written[0])
            others = torch.tensor(written[1:])
            (source,) = (s for s in state.sources if s.name == "k.0")
            write_bytes(source, others, read_bytes(source, others) ^ 1)

    run.manager.register(Vandal())
    run.serve()
    (injection,) = run.injector.injections
    assert injection.step == 5
    assert list(injection.slots) == intact
    assert any(injection.explains(v) for v in run.violations)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30), fault=st.sampled_from([f for f in AIMED if FAULTS[f].moment == "pre_forward"]))
def test_slot_picking_spares_this_forwards_writes_and_the_null_slot(seed, fault):
    """Bytes are never broken in a slot that the forward is still going to write, nor in the padding slot."""
    run = Run(f"{fault}:probability=0.7,count=0", seed)
    races = []

    class Spy:
        @hookimpl
        def canary_recorded(self, canary, batch):
            writing = set(batch.tables["full"].write_slots.tolist())
            now = [i for i in run.injector.injections if i.step == canary.forwards and i.fault != "lost_write"]
            for i in now:
                slots = writing if i.region == "full" else set(run.engine.slot_map[list(writing)].tolist())
                races.extend(slots & set(i.slots))

    run.manager.register(Spy())
    run.serve()
    assert run.injector.injections
    assert races == []
    assert 0 not in {s for i in run.injector.injections for s in i.slots}
    assert "disabled" not in {e.name for e in run.heard.events}


def test_nothing_is_injected_by_default():
    """No text, no fault: the pool is byte for byte that of an unguarded engine, and nothing is found."""
    run = Run().serve()
    bare = Run(window=run.window)
    bare.canary.close()
    bare.serve()
    assert run.violations == []
    assert run.injected() == []
    assert all(torch.equal(a, b) for a, b in zip(run.engine.k, bare.engine.k, strict=True))
    assert torch.equal(run.engine.table, bare.engine.table)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seed_repeats_itself(fault):
    """The same seed gives the same faults, whatever other faults there are."""
    alone = Run(f"{fault}:warmup=2,probability=0.5", seed=7).serve().injector.injections
    again = Run(f"{fault}:warmup=2,probability=0.5", seed=7).serve().injector.injections
    assert alone == again


def test_a_table_entry_is_put_back():
    """After the forward the engine's table is what it was."""
    faulty, clean = Run("req_to_token:warmup=2", seed=3).serve(), Run().serve()
    assert len(faulty.injected()) == 1
    assert torch.equal(faulty.engine.table, clean.engine.table)


def test_a_lost_write_keeps_the_old_bytes():
    """The engine's own tensor lacks the row, in the aimed source only."""
    run, clean = Run("lost_write:warmup=4,source=v.0,region=full", seed=1).serve(), Run().serve()
    (injection,) = run.injector.injections
    slots = list(injection.slots)
    assert torch.equal(run.engine.k[0], clean.engine.k[0])
    assert not torch.equal(run.engine.v[0][slots], clean.engine.v[0][slots])


def test_count_warmup_and_probability():
    """``count`` bounds the injections (0: no bound), ``warmup`` delays them, probability 0 is never."""
    assert [i.step for i in Run("real_kv_used:warmup=4,count=3").serve().injector.injections] == [5, 6, 7]
    assert len(Run("real_kv_used:count=0").serve().injector.injections) == 10
    assert Run("real_kv_used:probability=0").serve().injector.injections == []


def test_a_fault_without_candidate_tries_again_and_says_so_in_the_end():
    """Nothing is readable in the first forward, so the fault comes in the second; one that never can is told."""
    assert [i.step for i in Run("real_kv_used").serve().injector.injections] == [2]
    run = Run("real_kv_unused_cache:warmup=500;lost_write:region=nowhere;swap_pages:source=k.77").serve()
    told = {e.fields["fault"]: e.fields["reason"] for e in run.heard.told("fault_not_injected")}
    assert "not due in 11 forwards" in told["real_kv_unused_cache"]
    assert "no candidate in 11 forwards" in told["lost_write"]
    at_start = [e.fields["reason"] for e in run.heard.told("fault_not_injected")[:2]]
    assert at_start[0] == "there is no region 'nowhere'; the regions are full, window"
    assert at_start[1].startswith("there is no source 'k.77'; the guarded ones are k.0, k.1, k.9")


def test_a_fault_for_one_of_several_ranks():
    """Only the process of that rank injects it; the others don't miss it."""
    ours = Run("real_kv_used:rank=0").serve()
    assert [e.fields["rank"] for e in ours.injected()] == [0]
    theirs = Run("real_kv_used:rank=1;lost_write:region=nowhere,rank=1").serve()
    assert theirs.injector.injections == []
    assert [e.name for e in theirs.heard.events if e.name.startswith("fault")] == []


def test_a_fault_in_a_slot_that_is_dropped_is_done_again():
    """Content that the engine drops before another forward begins is gone with its fault: told, and tried again."""
    run = Run("real_kv_post_forward:warmup=1,region=full", window=0)

    class Dropper:
        @hookimpl(trylast=True)
        def canary_recorded(self, canary, batch):
            if canary.forwards == 2:
                canary.slots.clear("full", batch.tables["full"].write_slots)

    run.manager.register(Dropper())
    run.serve()
    (moot,) = run.heard.told("fault_moot")
    assert (moot.fields["step"], moot.fields["reason"]) == (2, "the slot was dropped before another forward began")
    (injection,) = run.injector.injections
    assert injection.step == 3
    assert any(injection.explains(v) for v in run.violations)


def test_a_fault_after_the_last_forward_proves_nothing():
    """Nobody looks at it any more, so it doesn't count as injected."""
    run = Run("real_kv_post_forward:warmup=10").serve()
    assert run.canary.forwards == 11
    assert run.injector.injections == []
    assert len(run.heard.told("fault_moot")) == 1


def test_settings_switch_faults_on():
    """``CANARY_FAULTS`` reaches every Canary, through `Plugins.load` or without it, once."""
    config = CanaryConfig(faults="real_kv_used", seed=5, mode="raise", read_check=-1, silence_s=0)
    plugins = Plugins()
    plugins.load(config)
    engine = ToyEngine()
    canary = Canary([engine.region()], config, hooks=plugins.manager, writers=engine.writers)
    engine.submit("a", list(range(5, 25)))
    for _ in range(2):
        batch = engine.batch()
        canary.step.before(batch)
        engine.forward(batch)
        canary.step.after(batch)
    with pytest.raises(ViolationError, match="bytes in region full"):
        canary.step.end()
    assert len([p for p in plugins.manager.get_plugins() if isinstance(p, FaultInjector)]) == 1


def test_no_setting_registers_no_injector():
    """By default there is no injector, nor in mode off."""
    plugins = Plugins()
    plugins.load(CanaryConfig())
    plugins.load(CanaryConfig(faults="real_kv_used", mode="off"))
    assert not any(isinstance(p, FaultInjector) for p in plugins.manager.get_plugins())


def test_a_private_manager_shares_the_injector_of_the_process(fresh_process):
    """A fault that is to happen once in a process happens once, however many managers there are."""
    config = CanaryConfig(faults="real_kv_used")
    start(config)
    (shared,) = (p for p in hook_manager().get_plugins() if isinstance(p, FaultInjector))
    private = private_hooks()
    private.hook.canary_configure(config=config, manager=private)
    assert [p for p in private.get_plugins() if isinstance(p, FaultInjector)] == [shared]


def test_every_fault_has_its_name_in_the_settings():
    """What ``CANARY_FAULTS`` may name, and what can be done, in the same order."""
    assert list(get_args(FaultName)) == list(FAULTS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bitrot", "unknown fault 'bitrot'; the faults are req_to_token, real_kv_used"),
        (
            "lost_write:layer=3",
            "'layer=3'; write key=value with a key of probability, warmup, count, region, source, rank",
        ),
        ("lost_write:rank=first", "lost_write has rank=first: Input should be a valid integer"),
        ("lost_write:warmup", "lost_write has 'warmup'; write key=value"),
        ("lost_write:warmup=soon", "warmup=soon: Input should be a valid integer"),
        ("lost_write:count=-1", "count=-1: Input should be greater than or equal to 0"),
        ("lost_write:probability=nan", "probability=nan: Input should be a finite number"),
        ("lost_write:probability=1.5", "probability=1.5: Input should be less than or equal to 1"),
        ("lost_write:count=1,count=2", "lost_write has count twice"),
    ],
)
def test_bad_text_is_one_sentence(text, sentence):
    """A fault that can't be understood names what is known, where the settings are read."""
    with pytest.raises(ConfigError) as error:
        CanaryConfig.load(faults=text)
    assert str(error.value).startswith("CANARY_FAULTS: ")
    assert sentence in str(error.value)


def test_the_syntax():
    """Blanks and empty parts don't matter."""
    parsed = FaultSpec.parse(" real_kv_used : probability=0.01, warmup=50,count=2 ,region=full,source=v.3,rank=1")
    expected = {"probability": 0.01, "warmup": 50, "count": 2, "region": "full", "source": "v.3", "rank": 1}
    assert parsed == FaultSpec(fault="real_kv_used", **expected)
    assert FaultSpec.parse_all("lost_write; ;") == [FaultSpec(fault="lost_write")]
    assert FaultSpec.parse_all(" ; ") == []


def sources() -> Iterator[KVSource]:
    """Rows; 584-byte slots in packed pages; a one-byte tail; heads-first pages."""
    yield KVSource(torch.zeros(40, 8, dtype=torch.bfloat16), "k", 0, chunk_bytes=16, slot_stride_bytes=16)
    packed = torch.zeros(4, 4 * 584 + 8, dtype=torch.uint8)
    yield KVSource(packed, "k", 0, 576, 576, page_size=4, page_stride_bytes=4 * 584 + 8)
    yield KVSource(packed, "k", 1, 8, 8, page_size=4, page_stride_bytes=4 * 584 + 8, offset_bytes=4 * 576)
    yield KVSource(torch.zeros(20, 13, dtype=torch.uint8)[1:], "k", 2, 13, 13)
    heads = torch.zeros(4, 2, 4, 6, dtype=torch.float32)  # [pages, heads, slots, dim]
    yield KVSource(heads, "k", 3, 24, 24, page_size=4, page_stride_bytes=192, chunks=2, chunk_stride_bytes=96)


@pytest.mark.parametrize("source", list(sources()), ids=lambda s: s.name + f"-{s.slot_bytes}")
def test_bytes_are_those_of_the_slot(source):
    """What is written to some slots is read from them, and no other byte of the storage changes."""
    flat = torch.empty(0, dtype=torch.uint8).set_(source.tensor.untyped_storage())
    before = flat.clone()
    slots = torch.tensor([3, 9])
    content = torch.randint(1, 256, (2, source.slot_bytes), dtype=torch.uint8)
    write_bytes(source, slots, content)
    assert torch.equal(read_bytes(source, slots), content)
    assert int((flat != before).sum()) == content.numel()
    start = source.address - source.tensor.untyped_storage().data_ptr()
    first = start + 9 // source.page_size * source.page_stride_bytes + 9 % source.page_size * source.slot_stride_bytes
    assert int(flat[first]) == int(content[1, 0])
