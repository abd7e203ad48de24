"""A real SGLang scheduler and model runner in this process, driven step by step: ``engine_driver.py '<options>'``.

Reads one JSON command a line from stdin, ``{"do": name, ...}``, and answers each with one JSON line on stdout: what
the method of `Engine` of that name returns, or ``{"error": ...}``. Everything else goes to stderr. SGLang keeps global
state, so each engine needs a process of its own; the plugin comes in as it does for users, through SGLang's loader.
"""

import contextlib
import importlib
import inspect
import json
import os
import random
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builtin_canary
import cache_faults
import fake_compressors
import fake_deepseek_v4
import overlap
import speculation
import torch
from cpu_models import CPU_DEFAULTS, CPU_MODELS
from gpu_models import GPU_DEFAULTS, GPU_MODELS
from hybrid_models import HYBRID_MODELS, run_on_cpu

from canary_core import faults, plugins
from canary_core.events import Event
from canary_core.hookspecs import hookimpl
from canary_core.records import PAYLOAD_RECORD, PAYLOAD_STAMP, POSITION, STATES, STEP_WRITTEN, TOKEN, State
from canary_core.region import RegionKind
from canary_core.violation import Violation

MODELS = {**CPU_MODELS, **HYBRID_MODELS, **GPU_MODELS}

WAITS = frozenset(
    f"cuda{call}"
    for call in (
        "StreamSynchronize",
        "DeviceSynchronize",
        "EventSynchronize",
        "Malloc",
        "MallocAsync",
        "Free",
        "Memcpy",
    )
)
"""Functions of the CUDA runtime that wait for the device, or may."""


class Collector:
    """Keeps what a guarded engine told."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.events: list[Event] = []

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        self.violations.append(violation)

    @hookimpl
    def canary_event(self, event: Event) -> None:
        self.events.append(event)


class Engine:
    """``folder``: where the models' configurations are written. ``options``: `ServerArgs`; ``model`` and, to speculate
    with, ``draft_model``: names of `MODELS`. With ``device="cuda"`` the rest is as in `GPU_DEFAULTS`."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.told = Collector()
        plugins.manager().register(self.told)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if "kv_canary" in options and options.get("device", "cpu") == "cpu":
            builtin_canary.let_it_run_on_a_cpu()
        from sglang.srt.managers import scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        model = options.pop("model", "llama")
        if model == "deepseek_v4":
            fake_deepseek_v4.install()
        if options.get("device") != "cuda":
            run_on_cpu(model, options)
        cache_faults.use_swa_radix_cache(options)
        if options.get("enable_hierarchical_cache") and options.get("device", "cpu") == "cpu":
            sys.path.append(str(Path(__file__).with_name("cpu")))
            importlib.import_module("host_copies").install()
        options["model_path"] = _write_model(folder, model)
        if "draft_model" in options:
            options["speculative_draft_model_path"] = _write_model(folder / "draft", options.pop("draft_model"))
        defaults = GPU_DEFAULTS if options.get("device") == "cuda" else CPU_DEFAULTS
        if "speculative_algorithm" in options and defaults is CPU_DEFAULTS:
            speculation.allow_on_a_cpu(options["speculative_algorithm"])
        self.args = ServerArgs(**{**defaults, **options})
        if hasattr(self.args, "resolve_once"):
            self.args.resolve_once()
        ports = PortArgs.init_new(self.args)
        _publish(self.args)
        wanted = inspect.signature(scheduler.Scheduler.__init__).parameters
        ranks = ("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank", "dp_rank")
        extra = {name: None if name == "dp_rank" else 0 for name in ranks if name in wanted}
        self.scheduler = scheduler.Scheduler(self.args, ports, **extra)
        self.runner = self.scheduler.tp_worker.model_runner
        self.requests: list[Any] = []
        self.aborted: set[str] = set()
        self.steps = 0
        self.graphed: Counter[str] = Counter()
        _randomize(self.runner.model)
        if "speculative_algorithm" in options:
            speculation.let_agree(self.runner.model, speculation.draft_model(self.scheduler))

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """What SGLang's event loops run in: a stream of their own, and no gradients."""
        from sglang.srt.utils import DynamicGradMode

        module = torch.get_device_module(self.args.device)
        self.scheduler.schedule_stream = module.Stream(priority=0)
        with DynamicGradMode(), module.StreamContext(self.scheduler.schedule_stream):
            yield

    @property
    def session(self) -> Any:
        from canary_sglang.hooks import HOOKS

        return HOOKS.session

    @property
    def canaries(self) -> list[Any]:
        """Those of all models, the draft model's included."""
        from canary_sglang.hooks import HOOKS

        return [session.canary for session in HOOKS.sessions]

    @property
    def states(self) -> dict[str, Any]:
        """Canary's memory of all regions, a draft model's included."""
        return {name: state for canary in self.canaries for name, state in canary.states.items()}

    def serve(self, prompts: list[list[int]], new_tokens: int, together: int = 3) -> dict[str, Any]:
        """Serves the prompts, ``together`` at a time join every few steps; gives outputs, cached tokens, steps, and how
        many of each forward mode were replayed from a CUDA graph."""
        first, waiting = len(self.requests), list(prompts)
        before = self.steps
        self.graphed.clear()
        for turn in range(5001):
            if waiting and turn % 4 == 0:
                for prompt in waiting[:together]:
                    self._submit(prompt, new_tokens)
                waiting = waiting[together:]
            idle = not self._step()
            if idle and not waiting and all(r.finished() for r in self.requests[first:]):
                break
        else:
            raise RuntimeError("the traffic does not end")
        served = self.requests[first:]
        return {
            "outputs": [list(r.output_ids) for r in served],
            "cached": [int(r.cached_tokens) for r in served],
            "retracted": sum(int(getattr(r, "retraction_count", 0) or 0) for r in served),
            "steps": self.steps - before,
            "graphed": dict(self.graphed),
            "verifies": sum(r.spec_verify_ct for r in served),
        }

    def storm(self, seed: int, steps: int, prefix: int, new_tokens: int) -> dict[str, Any]:
        """At least ``steps`` steps of random traffic, the same for a seed: requests that begin with one of a few
        prefixes come in bursts, some are aborted while they wait or run, and now and then the cache is flushed."""
        rng = random.Random(seed)
        prefixes = [[rng.randrange(3, 250) for _ in range(prefix)] for _ in range(4)]
        first, before = len(self.requests), self.steps
        counts = {"aborted": 0, "flushed": 0}
        ending = False
        idle = 0
        while True:
            queued = len(self.scheduler.waiting_queue)
            if not ending and queued < 6 and rng.random() < 0.3:
                for _ in range(rng.randrange(1, 4)):
                    hit = rng.choice(prefixes)[: rng.randrange(prefix + 1)]
                    tail = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))]
                    self._submit(hit + tail, rng.choice((rng.randrange(1, new_tokens), new_tokens)))
            living = [r for r in self.requests[first:][-12:] if not r.finished() and r.rid not in self.aborted]
            if living and rng.random() < 0.03:
                self._abort(rng.choice(living).rid)
                counts["aborted"] += 1
            ending = ending or rng.random() < 0.01 or self.steps - before >= steps
            idle = 0 if self._step() else idle + 1
            if idle > 50:
                raise RuntimeError(f"the engine idles, {queued} requests wait")
            if idle and ending and not self.scheduler.waiting_queue:
                if self.steps - before >= steps:
                    break
                if not self.flush():
                    raise RuntimeError("an idle engine could not be flushed")
                counts["flushed"] += 1
                ending = False
        served = self.requests[first:]
        return {
            "outputs": [list(r.output_ids) for r in served],
            "steps": self.steps - before,
            "cached": sum(int(r.cached_tokens) for r in served),
            "retracted": sum(int(getattr(r, "retraction_count", 0) or 0) for r in served),
            **counts,
        }

    def storm_overlapped(self, seed: int, turns: int, new_tokens: int) -> dict[str, Any]:
        """Random traffic through SGLang's own loop with the overlap scheduler: see `overlap.storm`."""
        return overlap.storm(self, seed, turns, new_tokens)

    def findings(self) -> dict[str, Any]:
        """What was found since the last call, after everything was waited for."""
        session = self.session
        for canary in self.canaries:
            canary.drain()
        found, self.told.violations = self.told.violations, []
        return {
            "violations": [v.fields() for v in found],
            "stats": session.canary.stats() if session is not None else {},
            "drafts": {c.config.model: c.stats() for c in self.canaries if c.config.model},
        }

    def events(self) -> list[dict[str, Any]]:
        """What was told beside findings, since the start."""
        return [
            {"name": e.name, "level": e.level, **json.loads(json.dumps(e.fields, default=str))}
            for e in self.told.events
        ]

    def regions(self) -> dict[str, Any]:
        """Guarded regions: kind, slots, window, sources."""
        return {
            r.name: {
                "kind": r.kind.value,
                "slots": r.slots,
                "window": r.window_tokens,
                "sources": [s.name for s in r.sources],
            }
            for canary in self.canaries
            for r in canary.regions.values()
        }

    def flip(self, region: str, source: str, seed: int, among: list[int] | None = None) -> int:
        """Flips one bit of a slot that holds something; gives the slot."""
        state = self.states[region]
        written = among or (state.records[:, POSITION] % STATES == State.WRITTEN).nonzero()[:, 0].tolist()
        rng = random.Random(seed)
        slot = rng.choice([s for s in written if s])
        _flip_bit(next(s for s in state.sources if s.name == source), slot, rng)
        return int(slot)

    def flip_in_host_memory(self, source: str, seed: int) -> int:
        """Flips one bit of a slot in HiCache's host memory whose records came with it, early in its prompt, so that
        whoever has that prompt again reads it; gives the host slot."""
        rng = random.Random(seed)
        (parked,) = (records for way in self.session.arrivals for records in way._parked.values())
        early = (parked._table[:, PAYLOAD_RECORD] >> 32) // STATES < 30
        used = parked.host_pool.slot_used & (parked._table[:, PAYLOAD_STAMP] != 0) & early
        slot = rng.choice(used.nonzero()[:, 0].tolist())
        half, layer = source.split(".")
        content = getattr(parked.host_pool, f"{half}_buffer")[int(layer)][slot].view(torch.uint8).view(-1)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return int(slot)

    def arrivals(self) -> dict[str, int]:
        """What came to the pool without a forward, and what left it."""
        return {name: count for way in self.session.arrivals for name, count in way.counts.items()}

    def flip_and_scrub(self, region: str, source: str, seed: int) -> int:
        """Flips a bit and serves until the scrub has gone all round; gives the slot. One that was free and is written
        again by then shows nothing, so another one is taken."""
        records = self.states[region].records
        self.session.canary.settle()
        if not (records[:, POSITION] % STATES == State.WRITTEN).any():
            # Without a prefix cache only a running request has KV.
            self._submit(list(range(3, 43)), 30)
            for _ in range(4):
                self._step()
        for attempt in range(20):
            before = records[:, STEP_WRITTEN].clone()
            slot = self.flip(region, source, seed + 100 * attempt)
            self.scrub([9, 8, 7])
            if records[slot, STEP_WRITTEN] == before[slot]:
                return slot
        raise RuntimeError("no slot stays as it is")

    def beside(self, method: str, **arguments: Any) -> dict[str, Any]:
        """What ``method`` gives (``done``), and how many findings SGLang's own canary had meanwhile."""
        before = builtin_canary.findings()
        done = getattr(self, method)(**arguments)
        return {"done": done, "built_in": builtin_canary.findings() - before}

    def flip_running(self, prompt: list[int], region: str, source: str, seed: int) -> dict[str, Any]:
        """Flips one bit of what a running request will read, of a token close to its end, and serves on; gives the
        slot and our findings since. Ends with an empty cache."""
        from canary_sglang.layout.schedulers import table_row

        (request,) = self._decoding([prompt], 8)
        state = self.states[region]
        about = state.region
        position = len(prompt) - 3
        position -= (position + 1) % about.tokens_per_slot
        row, _ = table_row(self.scheduler, request)
        slot = int(row[position])
        slot = slot // about.tokens_per_slot if about.slot_map is None else int(about.slot_map[slot])
        if about.kind is RegionKind.RING:
            # Its newest row: that of a token close to the end may be another's by now.
            words = state.records[:, POSITION]
            slot = int(torch.where(words % STATES == State.WRITTEN, words, -1).argmax())
        _flip_bit(next(s for s in state.sources if s.name == source), slot, random.Random(seed))
        while not request.finished():
            self._step()
        self.scrub([9, 8, 7])
        found = self.findings()["violations"]
        self.flush()
        return {"slot": slot, "violations": found}

    def scrub(self, prompt: list[int]) -> None:
        """Steps of a small request until the scrub has gone all round."""
        for state in self.states.values():
            state.set_scrub_slots(state.region.slots)
        self.serve([prompt], 2)

    def inject(self, text: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Serves with the faults of ``text``, as ``CANARY_FAULTS`` names them; gives what was injected, whether each
        was found as what it is, whether all its slots were written again since, and everything that was found."""
        injector = faults.FaultInjector.parse(text, seed=1)
        plugins.manager().register(injector)
        try:
            self.serve(prompts, new_tokens)
        finally:
            plugins.manager().unregister(injector)
        self.scrub(prompts[0][:3])
        for canary in self.canaries:
            canary.drain()
        states = self.states
        found, self.told.violations = self.told.violations, []
        return {
            "injections": [i.fields() for i in injector.injections],
            "explained": [any(i.explains(v) for v in found) for i in injector.injections],
            "rewritten": [
                all(int(states[i.region].records[slot, STEP_WRITTEN]) > i.step for slot in i.slots)
                for i in injector.injections
            ],
            "violations": [v.fields() for v in found],
        }

    def sweep(self) -> dict[str, Any]:
        """One sweep of the idle engine's prefix cache, to its end; what it told."""
        return cache_faults.sweep(self)

    def break_cache(self, how: str, which: str = "any") -> dict[str, Any]:
        """Corrupts the prefix cache as `cache_faults` knows how to, sweeps, repairs it again; gives what was found."""
        return cache_faults.break_cache(self, how, which)

    def ownership(self) -> dict[str, Any]:
        """By region: how many slots of a page, and where Canary and the allocator differ about which slots are free."""
        lifetime, told = self.session.lifetime, {}
        self.session.canary.drain()
        for follower in lifetime._followers.values():
            pages = set(torch.cat([follower._free, *follower._released]).tolist())
            for name, page_slots in follower.regions.items():
                words = self.session.canary.states[name].records[:, POSITION]
                free = (words & State.FREED != 0) | (words % STATES == State.UNWRITTEN)
                # Page 0 is padding; a pool may be larger than what is handed out of it.
                end = (follower._allocator.size // follower._allocator.page_size + 1) * page_slots
                ours = {s for s in free.nonzero()[:, 0].tolist() if page_slots <= s < end}
                theirs = {page * page_slots + i for page in pages for i in range(page_slots)}
                told[name] = {"page_slots": page_slots, "differences": sorted(ours ^ theirs)}
        return told

    def misuse(self, what: str, prompts: list[list[int]]) -> dict[str, Any]:
        """Serves the prompts together; once all are decoding, the engine's own allocator is misused: ``double_free``,
        ``free_in_use`` of the last one's second page, or ``hand_out_held`` of it. Gives what is about it, and the
        findings of the next steps. The engine is of no use afterwards."""
        served = self._decoding(prompts, 400)
        self.session.canary.drain()
        from canary_sglang.layout import schedulers

        allocator = self.runner.token_to_kv_pool_allocator
        row, _ = schedulers.table_row(self.scheduler, served[-1])
        pages = getattr(allocator, "full_attn_allocator", allocator)
        page = int(row[pages.page_size]) // pages.page_size
        slots = torch.arange(page * pages.page_size, (page + 1) * pages.page_size)
        if what == "double_free":
            last = int(pages.free_pages[-1])
            slots = torch.arange(last * pages.page_size, (last + 1) * pages.page_size)
            pages.free(slots)
        elif what == "free_in_use":
            pages.free(slots)
        else:
            # As if the list itself had been overwritten.
            pages.free_pages[0] = page
        self.told.violations = []
        names = [r.rid for r in served]
        for _ in range(pages.page_size + 1):
            self._step()
        self.session.canary.drain()
        return {
            "requests": names,
            "slots": slots.tolist(),
            "violations": [v.fields() for v in self.told.violations],
        }

    def misuse_idle(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Serves the prompts to their end, then frees a free page; gives its slots, and the findings without another
        forward. The engine is of no use afterwards."""
        self.serve(prompts, 2)
        self.session.canary.drain()
        pages = self.runner.token_to_kv_pool_allocator
        slots = pages.alloc(pages.page_size).clone()
        pages.free(slots)
        pages.free(slots)
        self.told.violations = []
        for _ in range(2):
            # Not by the scheduler, whose own check would end the process; and as if time had passed.
            self.session._idle_read = 0.0
            self.session.idle()
        return {"slots": slots.tolist(), "violations": [v.fields() for v in self.told.violations]}

    def rot(self, prompt: list[int], region: str, source: str) -> dict[str, Any]:
        """Serves ``prompt``, then flips a bit of a slot that the prefix cache holds of it; gives the slot and what was
        served."""
        served = self.serve([prompt], 4)
        written = self._of_prompt(region, prompt)
        return {**served, "slot": self.flip(region, source, 1, [written[len(written) // 2]])}

    def rot_running(self, prompts: list[list[int]], region: str, source: str) -> dict[str, Any]:
        """Serves the prompts together and, once all are decoding, flips a bit of the last one's own KV; gives how each
        ended."""
        served = self._decoding(prompts, 30)
        slot = self.flip(region, source, 1, [self._of_prompt(region, prompts[-1])[-1]])
        while not all(r.finished() for r in served):
            self._step()
        return {
            "slot": slot,
            "requests": [r.rid for r in served],
            "outputs": [list(r.output_ids) for r in served],
            "reasons": [r.finished_reason.to_json() for r in served],
        }

    def _decoding(self, prompts: list[list[int]], new_tokens: int) -> list[Any]:
        """The prompts' requests, together, once each of them has more than its first token."""
        first = len(self.requests)
        for prompt in prompts:
            self._submit(prompt, new_tokens)
        served = self.requests[first:]
        while not all(len(r.output_ids) > 1 for r in served):
            self._step()
        return served

    def _of_prompt(self, region: str, prompt: list[int]) -> list[int]:
        """Slots in which the prompt's last tokens are, by position."""
        records = self.session.canary.states[region].records
        found: list[int] = []
        for position, token in list(enumerate(prompt))[-12:]:
            here = (records[:, POSITION] == position * STATES + State.WRITTEN) & (records[:, TOKEN] == token)
            found += here.nonzero()[:, 0].tolist()
        return found

    def flush(self) -> bool:
        """Empties the prefix cache, as a client may ask for at any time."""
        return bool(self.scheduler.flush_cache())

    def evictable(self) -> int:
        """Tokens that only the prefix cache holds."""
        size = self.scheduler.tree_cache.evictable_size()
        return int(size)

    def waits(self, prompts: list[list[int]], new_tokens: int, guarded: bool) -> dict[str, int]:
        """Serves the prompts twice from an empty cache; gives how often the host waited for the device or allocated its
        memory the second time, by function of the CUDA runtime. ``guarded``: False takes the guard away meanwhile."""
        from torch.profiler import ProfilerActivity, profile

        self.flush()
        for canary in self.canaries:
            canary.enabled = guarded
        # A flush gives the device's memory back, so the first round allocates it again.
        self.serve(prompts, new_tokens)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            self.serve(prompts, new_tokens)
        for canary in self.canaries:
            canary.enabled = True
        # Nothing is known of what was written without us.
        self.flush()
        return {e.key: e.count for e in trace.key_averages() if e.key in WAITS}

    def uninstall(self) -> None:
        """Ends the guard; the engine goes on."""
        plugins.uninstall()

    def break_us(self) -> None:
        """Makes the next of our own calls raise."""

        def broken(*args: Any) -> None:
            raise RuntimeError("broken on purpose")

        self.session._batches.view = broken

    def compressed(self) -> dict[str, int]:
        """What the compressors of DeepSeek-V4 read of their rings since the start."""
        return fake_compressors.READ

    def pool(self) -> str:
        """Class of the engine's pool."""
        return type(self.runner.token_to_kv_pool).__name__

    def _submit(self, prompt: list[int], new_tokens: int) -> None:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        name = f"r{len(self.requests)}"
        values = dict(
            rid=name, input_text="", input_ids=array("q", prompt), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False,
        )  # fmt: skip
        fields = (
            getattr(TokenizedGenerateReqInput, "__struct_fields__", ())
            or inspect.signature(TokenizedGenerateReqInput).parameters
        )
        if "array" not in str(getattr(TokenizedGenerateReqInput, "__annotations__", {}).get("input_ids", "")):
            values["input_ids"] = list(prompt)
        known = {key: value for key, value in values.items() if key in fields}
        self.scheduler.process_input_requests([TokenizedGenerateReqInput(**known)])
        self.requests.append(next(r for r in self.scheduler.waiting_queue if r.rid == name))

    def _abort(self, name: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=name))
        self.aborted.add(name)

    def _step(self) -> bool:
        """One iteration of the scheduler's plain event loop."""
        s = self.scheduler
        if len(inspect.signature(s.get_next_batch_to_run).parameters):
            plan = s.get_next_batch_to_run(running_batch=s.running_batch, last_batch=s.last_batch)
            s.running_batch = plan.running_batch
            batch = plan.batch_to_run
        else:
            batch = s.get_next_batch_to_run()
        s.cur_batch = batch
        if batch:
            mode = batch.forward_mode.name
            result = s.run_batch(batch)
            self.graphed[mode] += bool(getattr(result, "can_run_cuda_graph", False))
            s.process_batch_result(batch, result)
            self.steps += 1
        else:
            s.on_idle()
        s.last_batch = batch
        return bool(batch)


def _flip_bit(source: Any, slot: int, rng: random.Random) -> None:
    where = torch.tensor([slot], device=source.tensor.device)
    content = faults.read_bytes(source, where)
    content[0, rng.randrange(source.slot_bytes)] ^= 1 << rng.randrange(8)
    faults.write_bytes(source, where, content)


def _publish(args: Any) -> None:
    """Makes the arguments known to SGLang's own modules, as its processes do at their start."""
    try:
        from sglang.srt.runtime_context import publish
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
        return
    if "ranks" not in inspect.signature(publish).parameters:
        publish(args, role="scheduler")
        return
    from sglang.srt.runtime_context import SpawnRanks, spawn_world_rank

    world_rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=0))


def _write_model(folder: Path, model: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(MODELS[model]))
    return str(folder)


def _randomize(model: torch.nn.Module) -> None:
    """Weights with which outputs depend on the whole prompt; SGLang's dummy weights say the same token for ever. They
    are changed in place, so graphs that were captured before see them. Of a quantised model only the embeddings: other
    weights have scales and were rearranged for their kernels."""
    torch.manual_seed(0)
    quantised = getattr(model, "quant_config", None) is not None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if quantised and not any(part in name for part in ("embed_tokens", "lm_head")):
                continue
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
            else:
                weight.fill_(1.0 if "norm" in name else 0.0)


def main() -> None:
    """Serves commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    engine = Engine(Path(options.pop("folder")), options)
    answers.write(json.dumps({"ready": True}) + "\n")
    with engine.loop():
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = {"result": getattr(engine, command.pop("do"))(**command)}
            except BaseException as error:
                import traceback

                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer, default=str) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
