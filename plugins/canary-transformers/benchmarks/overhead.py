"""What Canary costs Transformers on a GPU: one model, guarded and not guarded in turns; random weights.

    python3 overhead.py --out overhead.jsonl                           # Llama-3.2-1B's shape, all workloads
    python3 overhead.py --model 8b --workloads dynamic,compiled
    python3 overhead.py --arms off,on,on@0                             # how much of it is the scrub
    python3 overhead.py --device cpu --pairs 2                         # a check that the script runs

| workload     | what is served                                                                             |
|--------------|--------------------------------------------------------------------------------------------|
| `continuous` | continuous batching as it is without FlashAttention: `paged|sdpa`, no CUDA graphs, in step |
| `graphs`     | the same with CUDA graphs and asynchronous batches                                         |
| `dynamic`    | `generate()`, the dynamic cache that it makes by itself                                    |
| `static`     | `generate(cache_implementation="static")`, not compiled                                    |
| `compiled`   | the same, compiled as Transformers does it by itself on a GPU: decodes are CUDA graphs     |

Continuous batching serves 64 prompts of 512 tokens and 64 new ones, without prefix sharing; `generate()` 16 such rows.
A turn takes the arms to and fro, each twice: off, on, on, off. Both arms of a pair serve the same prompts, greedily,
and each answer is compared: drift of the machine falls out, and the loss is the median of the pairs' losses. A guard
begins with its arm and is closed after it. A step is the median time between two decodes of the whole batch; ``decode``
is all of them and what `generate()` does at its end; ``prefill`` is the time until then, for `generate()` with what it
takes to begin to guard a cache.

Hosts are unsteady, and single runs then say nothing. So there is also ``step, p25``: of all single steps of an arm,
over all turns, the one that a quarter is faster than; the loss between the arms; and from where to where nine of ten
such losses lie if turns are drawn by lot (bootstrap). One more run of each workload, which is not timed, tells how long
Canary's hooks take the host in each decode (median, lower quartile); ``overhead_host`` is what Canary measures of
itself while it is on, the calls of its core, as a share of the time.

Exits with 1 where answers differ that the engine alone gives twice alike, anything was found, or a workload failed; the
others run all the same. Results go to ``--out``, a JSON object a line; the table comes last.

Time on an H200, by estimate: 1b 100 s, 8b 180 s; of these compiling takes 30 to 50 s. ``--budget-s`` is for all
workloads; each has two turns at least.
"""

import argparse
import dataclasses
import functools
import gc
import importlib
import itertools
import json
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from canary_core import Event, hookimpl

DRAWS = 2000
"""Of turns by lot."""
HOOKS = {
    "canary_transformers.continuous.session:Session": ("_check", "_after"),
    "canary_transformers.generate.guarded_cache:GuardedCache": ("before", "after"),
    "canary_core.guard.step:Step": ("issues_first",),
}
"""What the engine's hooks call around a forward, by class; the last call of each but `Step`'s ends the forward."""
PHASES = {"prefill": "prefill_tokens_s", "decode": "decode_tokens_s", "step": "steps_s"}
"""What is told of each arm, and its name in the results."""
WORKLOADS = {"continuous": 64, "graphs": 64, "dynamic": 16, "static": 16, "compiled": 16}
"""Requests, or rows of `generate()`."""
PROMPT, NEW = 512, 64
"""Tokens of each."""
SHAPES: dict[str, dict[str, Any]] = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128),
}
LLAMA = dict(
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5,
    bos_token_id=1, eos_token_id=2, initializer_range=0.02,
)  # fmt: skip
TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=512, initializer_range=0.3,
)  # fmt: skip
BLOCK = 256
"""Tokens of a block of continuous batching: what Transformers has by default."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", choices=tuple(SHAPES))
    parser.add_argument("--arms", default="off,on", help="off, on, on@<scrub budget>")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=6, help="turns through the arms, at most")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention", default="sdpa", help="of continuous batching: sdpa, eager, ...")
    parser.add_argument("--budget-s", type=float, default=240, help="for all workloads together")
    parser.add_argument("--profile", action="store_true", help="also where the host's time of an arm that is on goes")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "overhead.jsonl")
    return parser.parse_args()


class Guarded:
    """Begins and ends the guard of an arm that is on; keeps what all of them came to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._guard: Any = None
        self.totals: dict[str, int] = {}
        self.coverage = ""
        self.problems: list[str] = []
        self.shares: list[float] = []
        self._canaries: list[Any] = []

    def begin(self, arm: str) -> None:
        """Guards the model, unless the arm is off."""
        import canary_transformers

        name, _, budget = arm.partition("@")
        if name == "on":
            settings: dict[str, Any] = {"scrub_budget": budget} if budget else {}
            self._guard = canary_transformers.guard(self._model, log_level="error", **settings)
            self._guard.register(self)

    def end(self) -> None:
        """The model is as it was."""
        guard, self._guard = self._guard, None
        canaries, self._canaries = self._canaries, []
        if guard is not None:
            measured = [canary.step.overhead.stats().get("overhead_host") for canary in canaries]
            self.shares += [share for share in measured if share is not None]
            guard.close()
            self.problems += [f"finding: {violation}" for violation in guard.violations]
            for name, number in guard.stats().items():
                self.totals[name] = self.totals.get(name, 0) + number

    @hookimpl
    def canary_attached(self, canary: Any) -> None:
        """Notes the coverage of the last cache that was guarded."""
        self.coverage = canary.coverage.summary
        self._canaries.append(canary)

    @hookimpl
    def canary_event(self, event: Event) -> None:
        """Notes that Canary has given up."""
        if event.name in ("disabled", "cache_released", "misuse", "cache_changed", "cache_layers_disagree"):
            self.problems.append(f"{event.name}: {dict(event.fields)}")

    def told(self) -> dict[str, Any]:
        """For the results."""
        always = dict.fromkeys(("forwards", "violations", "checked_slots"), 0)
        share = {"overhead_host": round(statistics.median(self.shares), 4)} if self.shares else {}
        return {"coverage": self.coverage, **always, **{k: v for k, v in self.totals.items() if v}, **share}


class HookTimes:
    """A context in which the time of Canary's hooks is taken, forward by forward. forwards: in seconds."""

    def __init__(self) -> None:
        self.forwards: list[float] = []
        self._now = 0.0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> "HookTimes":
        for place, names in HOOKS.items():
            module, _, name = place.partition(":")
            owner = getattr(importlib.import_module(module), name)
            for hook in names:
                original = getattr(owner, hook)
                setattr(owner, hook, self._timed(original, ends=hook.strip("_") == "after"))
                self._undo.append(functools.partial(setattr, owner, hook, original))
        return self

    def __exit__(self, *raised: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _timed(self, hook: Callable[..., Any], ends: bool) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            began, before = time.perf_counter(), self._now
            try:
                return hook(*args, **kwargs)
            finally:
                # One within another is part of it.
                self._now = before + time.perf_counter() - began
                if ends:
                    self.forwards.append(self._now)
                    self._now = 0.0

        return call

    def told(self) -> dict[str, float]:
        """Microseconds of a decode; the first forwards begin to guard."""
        us = [1e6 * seconds for seconds in self.forwards[len(self.forwards) // 2 :]]
        return {"hooks_us": round(statistics.median(us), 1), "hooks_us_p25": round(quartile(us), 1)} if us else {}


class Run:
    """What one run of a workload gave: the answers, and each step: when it had ended, how many tokens it decoded, and
    whether it had prompt tokens, too."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.steps: list[tuple[float, int, bool]] = []
        self.ended = 0.0
        self.answers: list[list[int]] = []

    def result(self, rows: int, prompt: int) -> dict[str, Any]:
        """Rates of prefill, until no step has prompt tokens any more, and decode after it; decodes of the largest batch
        a second, and how long each took."""
        last = max(i for i, (_, _, prefills) in enumerate(self.steps) if prefills)
        first, decodes = self.steps[last][0], self.steps[last:]
        whole = max(tokens for _, tokens, _ in decodes[1:])
        taken = [b[0] - a[0] for a, b in itertools.pairwise(decodes) if b[1] == whole]
        return {
            "prefill_tokens_s": rows * prompt / (first - self.began),
            "decode_tokens_s": sum(tokens for _, tokens, _ in decodes[1:]) / (self.ended - first),
            "steps_s": 1 / statistics.median(taken),
            "taken_s": taken,
        }


class Continuous:
    """Continuous batching, its loop called by hand: so that batches are the same in both arms, and errors are seen."""

    def __init__(self, model: Any, args: argparse.Namespace, rows: int, graphs: bool) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model, self._rows, self._sync = model, rows, args.device == "cuda"
        blocks = rows * -(-(args.prompt + args.new + 1) // args.block) + 8
        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        options: dict[str, Any] = {
            "num_blocks": blocks, "max_batch_tokens": args.batch_tokens, "max_requests_per_batch": rows,
            "allow_block_sharing": False, "block_size": args.block, "page_size": args.block,
            "auto_switch_to_flash": False,
        }  # fmt: skip
        # Without FlashAttention a release that has no such switch is told by this prefix not to look for one.
        model.set_attn_implementation(args.attention if "auto_switch_to_flash" in known else f"paged|{args.attention}")
        if graphs:
            options |= {"use_cuda_graph": True, "use_async_batching": True}
        config = ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known})
        generation = GenerationConfig(max_new_tokens=args.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        with torch.no_grad():
            self._processor = self._manager._create_batch_processor()
            self._manager.batch_processor = self._processor
            self._processor.warmup(model)
        self._behind = self._processor.use_async_batching
        settings = self._manager.continuous_batching_config
        print(
            f"  {model.config._attn_implementation}, CUDA graphs {settings.use_cuda_graph}, asynchronous "
            f"{settings.use_async_batching}, {blocks} blocks, {settings.max_batch_tokens} tokens a batch",
            flush=True,
        )

    @torch.no_grad()
    def run(self, prompts: list[list[int]], new: int) -> Run:
        """Serves the prompts; the engine gets them all at once."""
        from canary_transformers.continuous import compat

        manager, processor = self._manager, self._processor
        if self._sync:
            torch.cuda.synchronize()
        run = Run(time.perf_counter())
        names = manager.add_requests(prompts, max_new_tokens=new)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            if not processor.prepare_next_batch():
                raise RuntimeError(
                    f"the engine has nothing to run, and {len(names) - len(answers)} answers are missing"
                )
            batch = compat.requests(processor.inputs_and_outputs)
            lengths = [request.query_length for request in batch]
            manager._generation_step()
            if not self._behind:
                processor.update_batch()
            self._behind = False
            decoded = sum(length == 1 for length in lengths)
            run.steps.append((time.perf_counter(), decoded, decoded < len(lengths)))
            while not manager.output_router.output_queue.empty():
                output = manager.get_result(timeout=0)
                if output.error:
                    raise RuntimeError(f"{output.request_id} failed: {output.error}")
                if output.is_finished():
                    answers[output.request_id] = list(output.generated_tokens)
        run.ended = run.steps[-1][0]
        run.answers = [answers[name] for name in names]
        return run

    def close(self) -> None:
        """Gives the memory back."""
        self._manager.batch_processor = self._processor = None
        self._manager = None

    def notes(self) -> dict[str, Any]:
        """Nothing beside the rates."""
        return {}


class Generate:
    """`generate()`, with a cache that it makes by itself."""

    def __init__(self, model: Any, args: argparse.Namespace, kind: str) -> None:
        from transformers import CompileConfig

        self._model, self._device = model, args.device
        self._options: dict[str, Any] = {} if kind == "dynamic" else {"cache_implementation": "static"}
        if kind == "static":
            self._options["disable_compile"] = True
        if kind == "compiled" and args.device == "cpu":
            config = CompileConfig(backend="eager", mode=None)
            config._compile_all_devices = True
            self._options["compile_config"] = config
        self._compiled = kind == "compiled"
        if self._compiled:
            torch._dynamo.utils.counters.clear()

    @torch.no_grad()
    def run(self, prompts: list[list[int]], new: int) -> Run:
        """Serves the prompts as the rows of one batch."""
        from transformers import GenerationConfig, StoppingCriteriaList

        inputs = torch.tensor(prompts, device=self._device)
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, **self._options
        )
        self._wait()
        run = Run(time.perf_counter())

        def step(ids: torch.Tensor, scores: Any, **named: Any) -> torch.Tensor:
            # The engine waits for the device after each token by itself, but here it has not yet for this one.
            if not run.steps:
                self._wait()
            run.steps.append((time.perf_counter(), len(ids), not run.steps))
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        output = self._model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config,
            stopping_criteria=StoppingCriteriaList([step]),
        )  # fmt: skip
        self._wait()
        run.ended = time.perf_counter()
        run.answers = output[:, inputs.shape[1] :].tolist()
        return run

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Nothing is kept."""

    def notes(self) -> dict[str, Any]:
        """What was compiled since the workload began: a guard should add no graph and break none."""
        if not self._compiled:
            return {}
        counters = torch._dynamo.utils.counters
        kept = {
            "unique_graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        }
        return {"compiled": kept}


def workload_of(name: str, model: Any, args: argparse.Namespace, rows: int) -> Continuous | Generate:
    """The workload of that name."""
    if name in ("continuous", "graphs"):
        return Continuous(model, args, rows, graphs=name == "graphs")
    return Generate(model, args, name)


def make_model(args: argparse.Namespace) -> Any:
    """The model with random weights, made where it runs."""
    import transformers

    transformers.logging.set_verbosity_error()
    options = LLAMA | (TINY if args.device == "cpu" else SHAPES[args.model])
    config = transformers.LlamaConfig(**options)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if args.device == "cpu" else torch.bfloat16)
    try:
        with torch.device(args.device):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompts_of(rows: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens that belong to the seed."""
    rng = random.Random(seed)
    return [[rng.randrange(10, vocabulary) for _ in range(tokens)] for _ in range(rows)]


class Comparison:
    """The turns of one workload."""

    def __init__(self, name: str, model: Any, args: argparse.Namespace, rows: int) -> None:
        self._name, self._args, self._rows = name, args, rows
        self._vocabulary = model.config.vocab_size
        self.guarded = Guarded(model)
        self.workload = workload_of(name, model, args, rows)
        self.results: list[dict[str, Any]] = []
        self.compared = self.differ = self.unsteady = 0

    def arm(self, arm: str, turn: int, new: int) -> Run:
        """One arm of one turn, with ``new`` tokens."""
        prompts = prompts_of(self._rows, self._args.prompt, self._vocabulary, 1000 + turn)
        self.guarded.begin(arm)
        try:
            if isinstance(self.workload, Continuous):
                # The engine exists already: Canary takes it over with the first step.
                self.workload.run(prompts_of(2, 8, self._vocabulary, 1), 4)
            return self.workload.run(prompts, new)
        finally:
            self.guarded.end()

    def turn(self, arms: list[str], turn: int) -> None:
        """All arms of a turn, to and fro, so that a drift falls on all alike; their answers are compared."""
        for pair, order in enumerate((arms, arms[::-1]) if turn % 2 == 0 else (arms[::-1], arms)):
            runs = {arm: self.arm(arm, turn, self._args.new) for arm in order}
            given = runs[arms[0]].answers
            for arm, run in runs.items():
                rates = run.result(self._rows, self._args.prompt)
                self.results.append({"workload": self._name, "arm": arm, "turn": turn, "pair": pair, **rates})
                if arm != arms[0]:
                    self.compared += len(given)
                    self.differ += sum(one != other for one, other in zip(given, run.answers, strict=True))

    def hooks(self) -> dict[str, float]:
        """How long Canary's hooks take the host in a decode, seen in a run that is not timed."""
        with HookTimes() as times:
            self.arm("on", -3, self._args.new)
        return times.told()

    def measure(self, arms: list[str], until: float) -> None:
        """Warms up, then takes turns; two at least."""
        began = time.perf_counter()
        for arm in arms:
            # What is compiled has the length of the cache in it.
            self.arm(arm, -1, self._args.new if self._name == "compiled" else self._args.warm)
        warm = self.workload.notes()
        print(f"  warm after {time.perf_counter() - began:.0f} s {warm or ''}", flush=True)
        self.guarded.totals.clear()
        # Does the engine alone answer the same twice? If not, it says nothing that the arms differ.
        one, other = (self.arm("off", -2, self._args.new).answers for _ in range(2))
        self.unsteady = sum(a != b for a, b in zip(one, other, strict=True))
        for turn in range(self._args.pairs):
            if turn >= 2 and time.perf_counter() > until:
                break
            self.turn(arms, turn)
        notes = {"rows": self._rows, "unsteady": self.unsteady, "compared": self.compared, "differ": self.differ}
        notes["guard"] = self.guarded.told()
        if any(arm.startswith("on") for arm in arms):
            notes |= self.hooks()
        if warm:
            notes |= {"compiled_warm": warm["compiled"], "compiled_end": self.workload.notes()["compiled"]}
        notes["problems"] = self.guarded.problems
        print(f"  {json.dumps(notes)}", flush=True)
        self.results.append({"workload": self._name, "notes": notes})


def profiled(comparison: Comparison, new: int) -> str:
    """Where the host's time goes while an arm is on: functions by their own time."""
    import cProfile
    import io
    import pstats

    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.enable()
    comparison.arm("on", 999, new)
    profiler.disable()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats("canary", 25)
    return text.getvalue()


def table(results: list[dict[str, Any]]) -> str:
    """Medians of each arm, and of the pairs' losses against ``off``."""
    lines = [f"{'workload':10} {'phase':8} {'arm':8} {'per s':>10} {'loss %':>8}  pairs, least to most"]
    measured = [r for r in results if "arm" in r]
    for workload in dict.fromkeys(r["workload"] for r in measured):
        for phase, key in PHASES.items():
            mine = [r for r in measured if r["workload"] == workload]
            off = {(r["turn"], r["pair"]): r[key] for r in mine if r["arm"] == "off"}
            for arm in dict.fromkeys(sorted((r["arm"] for r in mine), key=lambda arm: arm != "off")):
                rates = [r[key] for r in mine if r["arm"] == arm]
                pairs = [(r[key], off.get((r["turn"], r["pair"]))) for r in mine if r["arm"] == arm]
                losses = sorted(100 * (1 - rate / bare) for rate, bare in pairs if bare)
                told = "" if arm == "off" or not losses else f"{statistics.median(losses):8.2f}  {_span(losses)}"
                lines.append(f"{workload:10} {phase:8} {arm:8} {statistics.median(rates):10.1f} {told}")
    lines += ["", f"{'workload':10} {'step, p25':17} {'us':>10} {'loss %':>8}  nine of ten, turns drawn by lot"]
    for workload in dict.fromkeys(r["workload"] for r in measured):
        lines += steps_table(workload, [r for r in measured if r["workload"] == workload])
    return "\n".join(lines)


def steps_table(workload: str, results: list[dict[str, Any]]) -> list[str]:
    """The lower quartile of all single steps of each arm, and the loss between it and that of ``off``."""
    # Of each arm and turn, how long each step took.
    steps: dict[str, dict[int, list[float]]] = {}
    for r in results:
        steps.setdefault(r["arm"], {}).setdefault(r["turn"], []).extend(r["taken_s"])
    lines = []
    for arm in sorted(steps, key=lambda arm: arm != "off"):
        told = ""
        if arm != "off" and "off" in steps:
            turns = sorted(steps[arm].keys() & steps["off"].keys())
            rng = random.Random(0)
            drawn = sorted(_p25_loss(steps, arm, rng.choices(turns, k=len(turns))) for _ in range(DRAWS))
            told = f"{_p25_loss(steps, arm, turns):8.2f}  {drawn[DRAWS // 20]:.2f} to {drawn[-DRAWS // 20]:.2f}"
        p25 = quartile([taken for turn in steps[arm].values() for taken in turn])
        lines.append(f"{workload:10} {arm:17} {1e6 * p25:10.1f} {told}")
    return lines


def _p25_loss(steps: dict[str, dict[int, list[float]]], arm: str, turns: Sequence[int]) -> float:
    off, on = (quartile([taken for turn in turns for taken in steps[which][turn]]) for which in ("off", arm))
    return 100 * (on / off - 1)


def quartile(values: list[float]) -> float:
    """The value that a quarter lies below."""
    return sorted(values)[len(values) // 4]


def _checked(notes: dict[str, Any]) -> str:
    guard = notes["guard"]
    return (
        f"{notes['compared']} answers compared, {notes['differ']} differ, and {notes['unsteady']} of {notes['rows']} "
        f"between two runs without Canary; {guard['forwards']} forwards, "
        f"{guard['checked_slots']} slots checked, {guard['violations']} findings, {len(notes['problems'])} problems; "
        f"of the host {guard.get('overhead_host', 0.0):.2%} by Canary's own measure, {notes.get('hooks_us', 0.0)} us a "
        f"decode in its hooks (p25 {notes.get('hooks_us_p25', 0.0)})"
    )


def _span(losses: list[float]) -> str:
    return f"{losses[0]:.2f} to {losses[-1]:.2f} ({len(losses)})"


def main() -> None:
    """Measures each workload by itself, tells."""
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cpu = args.device == "cpu"
    args.prompt, args.new, args.warm = (40, 12, 6) if cpu else (PROMPT, NEW, 24)
    args.block, args.batch_tokens = (16, 64) if cpu else (BLOCK, 4096)
    chosen = [name for name in args.workloads.split(",") if name in WORKLOADS and not (cpu and name == "graphs")]
    began = time.perf_counter()
    model = make_model(args)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{args.model}: {parameters / 1e9:.2f} G parameters, up after {time.perf_counter() - began:.0f} s", flush=True
    )
    results: list[dict[str, Any]] = []
    failed = False
    for number, name in enumerate(chosen):
        print(f"{name} at {time.perf_counter() - began:.0f} s", flush=True)
        rows = 4 if cpu else WORKLOADS[name]
        # What the ones before have left of the time is shared by those to come.
        spent = time.perf_counter() - began
        until = time.perf_counter() + (args.budget_s - spent) / (len(chosen) - number)
        comparison = None
        try:
            comparison = Comparison(name, model, args, rows)
            comparison.measure(args.arms.split(","), until)
            if args.profile:
                print(profiled(comparison, args.new), flush=True)
            failed |= bool(comparison.differ and not comparison.unsteady) or bool(comparison.guarded.problems)
        except Exception as error:
            failed = True
            traceback.print_exc()
            results.append({"workload": name, "error": repr(error)})
        if comparison is not None:
            results += comparison.results
            comparison.workload.close()
        del comparison
        # Of a workload that failed as well.
        model.set_attn_implementation("sdpa")
        gc.collect()
        if not cpu:
            torch.cuda.empty_cache()
        args.out.write_text("".join(json.dumps({"model": args.model, **r}) + "\n" for r in results))
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    for result in results:
        told = _checked(result["notes"]) if "notes" in result else f"FAILED: {result.get('error')}"
        if "arm" not in result:
            print(f"{result['workload']:10} {told}")
    print(table(results), flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
