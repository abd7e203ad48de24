"""A real SGLang scheduler and model runner in this process, driven step by step: ``python -m engines.driver OPTIONS``.

Reads one JSON command a line from stdin, ``{"do": name, ...}``, and answers each with one JSON line on stdout: what
the function of that name among `COMMANDS` returns, or ``{"error": ...}``. Everything else goes to stderr. SGLang keeps
global state, so each engine needs a process of its own; the plugin comes in as it does for users, through SGLang's
loader. ``OPTIONS``, a JSON object: those of `Engine`, and ``folder``.
"""

import contextlib
import importlib
import inspect
import json
import os
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from tools import (
    adapters,
    allocator_misuse,
    attention_faults,
    bad_copies,
    bit_flips,
    blindness,
    builtin_canary,
    cache_faults,
    cached_states,
    device_waits,
    fault_injection,
    flip_storms,
    graph_tables,
    identities,
    injured,
    inspection,
    late_verdicts,
    lessons,
    mechanisms,
    odd_requests,
    padding,
    parked_flips,
    parked_prefixes,
    recomputes,
    slot_lives,
    stale_tables,
    storms,
    token_faults,
    token_oracle,
    traffic,
    weights,
)

from canary_core import plugins
from canary_core.guard.reporting.budget import PROCESS
from engines import TESTS, fake_deepseek_v4, fake_flash_attention, speculation
from engines.cpu_models import CPU_DEFAULTS
from engines.gpu_models import GPU_DEFAULTS
from engines.hybrid_models import run_on_cpu
from engines.models import randomize, write_model


class Engine:
    """``folder``: where the models' configurations are written. ``options``: `ServerArgs`; ``model`` and, to speculate
    with, ``draft_model``: names of `models.MODELS`; ``tree_core``: that of the prefix cache. With
    ``device="cuda"`` the rest is as in `GPU_DEFAULTS`."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.told = inspection.Findings()
        plugins.hook_manager().register(self.told)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if "kv_canary" in options and options.get("device", "cpu") == "cpu":
            builtin_canary.let_it_run_on_a_cpu()
        from sglang.srt.managers import scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        model = options.pop("model", "llama")
        if model == "deepseek_v4":
            fake_deepseek_v4.install()
        if options.get("attention_backend") == "fa3" and options.get("device") != "cuda":
            fake_flash_attention.install()
        if options.get("device") != "cuda":
            run_on_cpu(model, options)
            if options.get("enable_lora"):
                adapters.without_pins()
        cache_faults.use_swa_radix_cache(options)
        if "tree_core" in options:
            os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = options.pop("tree_core")
        if options.get("enable_hierarchical_cache") and options.get("device", "cpu") == "cpu":
            sys.path.append(str(TESTS / "cpu"))
            importlib.import_module("host_copies").install()
        options["model_path"] = write_model(folder, model)
        if "draft_model" in options:
            options["speculative_draft_model_path"] = write_model(folder / "draft", options.pop("draft_model"))
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
        # SGLang turns it off by itself where it doesn't fit the rest; a test that asked for it would show nothing.
        overlaps = not {**defaults, **options}.get("disable_overlap_schedule", False)
        assert self.scheduler.enable_overlap == overlaps, "SGLang has turned the overlap scheduler off"
        self.runner = self.scheduler.tp_worker.model_runner
        self.requests: list[Any] = []
        self.aborted: set[str] = set()
        self.steps = 0
        self.graphed: Counter[str] = Counter()
        randomize(self.runner.model)
        if hasattr(self.runner.model, "post_load_weights") and model.startswith(("deepseek_v2", "deepseek_v3")):
            # Its attention has copies of some weights, for decodes.
            self.runner.model.post_load_weights()
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

    def submit(
        self, prompt: list[int], new_tokens: int, name: str | None = None, namespace: str | None = None, **more: Any
    ) -> Any:
        """One more request, named by its number unless it has a name; gives SGLang's `Req`. ``namespace``: of the
        prefix cache, as each LoRA adapter has one of its own; None for the common one. ``more``: fields of SGLang's
        message. Raises `TypeError` for one that this release has not."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        name = name or f"r{len(self.requests)}"
        values = dict(
            rid=name, input_text="", input_ids=array("q", prompt), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False, extra_key=namespace,
        )  # fmt: skip
        fields = (
            getattr(TokenizedGenerateReqInput, "__struct_fields__", ())
            or inspect.signature(TokenizedGenerateReqInput).parameters
        )
        if "array" not in str(getattr(TokenizedGenerateReqInput, "__annotations__", {}).get("input_ids", "")):
            values["input_ids"] = list(prompt)
        unknown = more.keys() - set(fields)
        if unknown:
            raise TypeError(f"this SGLang's requests have no {', '.join(sorted(unknown))}")
        known = {key: value for key, value in values.items() if key in fields} | more
        self.scheduler.process_input_requests([TokenizedGenerateReqInput(**known)])
        self.requests.append(next(r for r in self.scheduler.waiting_queue if r.rid == name))
        return self.requests[-1]

    def abort(self, name: str) -> None:
        """As a client aborts a request."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=name))
        self.aborted.add(name)

    def step(self) -> bool:
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
            # Of the overlap scheduler's loop, which this one is not: `on_idle` asks for it.
            s.result_queue = getattr(s, "result_queue", deque())
            s.on_idle()
        s.last_batch = batch
        return bool(batch)


def take_down() -> None:
    """Takes down what SGLang has once in a process, so that another engine can be made in it."""
    from sglang.srt.distributed import destroy_distributed_environment, destroy_model_parallel
    from sglang.srt.runtime_context import reset_context

    destroy_model_parallel()
    destroy_distributed_environment()
    reset_context()
    told = [p for p in plugins.hook_manager().get_plugins() if isinstance(p, inspection.Findings)]
    for findings in told:
        plugins.hook_manager().unregister(findings)


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


def beside(engine: Engine, method: str, **arguments: Any) -> dict[str, Any]:
    """What the command ``method`` gives (``done``), and how many findings SGLang's own canary had meanwhile."""
    before = builtin_canary.findings()
    done = COMMANDS[method](engine, **arguments)
    return {"done": done, "built_in": builtin_canary.findings() - before}


def uninstall(engine: Engine) -> None:
    """Ends the guard; the engine goes on."""
    plugins.uninstall()


COMMANDS: dict[str, Callable[..., Any]] = {
    command.__name__: command
    for command in (
        traffic.serve,
        traffic.flush,
        weights.serve_through_updates,
        adapters.adapted_traffic,
        adapters.adapted_faults,
        adapters.unloaded_adapter,
        weights.flip_a_weight,
        weights.update_past_torch,
        storms.storm,
        storms.storm_overlapped,
        inspection.findings,
        inspection.events,
        inspection.regions,
        inspection.arrivals,
        inspection.evictable,
        inspection.table_names,
        inspection.compressed,
        inspection.pool,
        bit_flips.flip,
        bit_flips.flip_in_host_memory,
        bit_flips.scribble_within_a_forward,
        bit_flips.flip_and_scrub,
        bit_flips.flip_running,
        bit_flips.rot,
        bit_flips.rot_running,
        bit_flips.rot_running_state,
        bit_flips.scrub,
        fault_injection.inject,
        fault_injection.break_us,
        cache_faults.sweep,
        cache_faults.break_cache,
        cached_states.cached_states,
        cached_states.reuse_wrong_state,
        cached_states.share_broken_state,
        allocator_misuse.ownership,
        allocator_misuse.parked,
        allocator_misuse.misuse,
        allocator_misuse.misuse_cached,
        allocator_misuse.misuse_states,
        allocator_misuse.misuse_idle,
        stale_tables.stale_table,
        graph_tables.graph_tables,
        allocator_misuse.misuse_and_fail,
        device_waits.waits,
        blindness.bypass,
        blindness.lose,
        blindness.serve_until_told,
        injured.injure,
        identities.serve_in_turn,
        identities.forget_in_keys,
        identities.serve_images,
        identities.serve_overrides,
        identities.verify_images,
        identities.verify_overrides,
        identities.match_any_image,
        mechanisms.mechanism,
        padding.pad_with_nan,
        padding.store_in_null_slot,
        parked_flips.serve_parked,
        parked_flips.serve_changed_within,
        late_verdicts.know_findings_with_tokens,
        flip_storms.storm_of_flips,
        odd_requests.serve_embeddings,
        odd_requests.serve_twins,
        odd_requests.serve_beams,
        bad_copies.break_copies,
        bad_copies.serve_until_found,
        token_oracle.ask,
        token_oracle.wrong_answers,
        token_faults.mix_up,
        token_faults.mix_up_overlapped,
        slot_lives.slot_lives,
        recomputes.recompute_traffic,
        recomputes.recompute_overlapped,
        recomputes.recompute_broken,
        recomputes.mend_windows,
        recomputes.recompute_aborted,
        lessons.lesson_pressed,
        lessons.lesson_learnt,
        attention_faults.attention_verified,
        *parked_prefixes.COMMANDS,
        beside,
        uninstall,
    )
}
"""What can be asked of an engine, by name."""


def begin() -> tuple[dict[str, Any], TextIO]:
    """The options of this process, and where its answers go; what anything else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return json.loads(sys.argv[1]), answers


def converse(answers: TextIO, call: Callable[..., Any]) -> None:
    """Answers commands until stdin ends, and ends the process: ``call`` is given the name of each, and its keywords.
    Findings of one command are not fewer because another had many."""
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        PROCESS.fill()
        try:
            answer = {"result": call(command.pop("do"), **command)}
        except BaseException as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, default=str) + "\n")
    os._exit(0)


def main() -> None:
    """Serves commands until stdin ends."""
    options, answers = begin()
    engine = Engine(Path(options.pop("folder")), options)
    with engine.loop():
        converse(answers, lambda do, **arguments: COMMANDS[do](engine, **arguments))


if __name__ == "__main__":
    main()
