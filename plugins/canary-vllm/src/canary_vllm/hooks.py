"""`Hooks`: code around vLLM's own functions, of runners, scheduler and connectors."""

import functools
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from canary_adapters import MARK, RollCall, SchedulerRequests, Telling, answer, error_text, judged_answer, leaked, mark
from canary_core import CanaryConfig, Event, Patches, PluginError, emit, hook_manager
from canary_vllm import workers
from canary_vllm.actions import recompute
from canary_vllm.actions.protection import Protection
from canary_vllm.allocator import messages
from canary_vllm.allocator.recorder import BlockRecorder
from canary_vllm.compat import runners, targets
from canary_vllm.session import Session, attach_runner


class Hooks:
    """The hooks of this process: vLLM's front end, its engine core with the scheduler, a worker with a runner, or all
    of them."""

    def __init__(self) -> None:
        self._config: CanaryConfig | None = None
        self._patches = Patches()
        self._sessions: dict[int, Session] = {}
        self._without = False
        self._recorders: dict[int, BlockRecorder] = {}
        self._internal: dict[int, SchedulerRequests] = {}
        self._roll_calls: dict[int, RollCall] = {}
        self._telling: Telling[Session] = Telling()
        self._place: dict[str, object] = {}
        self._protection: Protection | None = None
        self._later: Callable[..., Any] | None = None

    @property
    def sessions(self) -> Sequence[Session]:
        """One for each guarded runner."""
        return tuple(self._sessions.values())

    def start(self, config: CanaryConfig) -> None:
        """Guards engines built from now on. Does nothing when called again."""
        if self._patches.done:
            return
        self._config = config
        fitting = targets.runners()
        if not fitting:
            raise PluginError("neither of vLLM's model runners can be hooked")
        for name, group in targets.RUNNERS.items():
            if name not in fitting:
                self._left_out(f"{name} is not guarded", targets.problems(group))
        if targets.V1 in fitting:
            self._hook_runner(targets.V1)
            self._wrap(f"{targets.V1}._model_forward", self._forward)
        if targets.V2 in fitting:
            self._hook_runner(targets.V2)
            self._follow(f"{targets.V2}.prepare_attn", self._prepared)
            for kind in ("KVConnector", "ActiveKVConnector"):
                self._follow(f"{targets.CONNECTORS}.{kind}.pre_forward", self._connected)
        if targets.WORKER_END.problem() is None:
            self._wrap(targets.WORKER_END.name, self._worker_ends)
        if not targets.problems(targets.IDLE):
            self._wrap(targets.IDLE[0].name, self._has_work)
        if targets.WEIGHTS_END.problem() is None:
            self._wrap(targets.WEIGHTS_END.name, self._weights_end)
        if missing := targets.problems(targets.ROLL_CALL):
            self._left_out("nobody looks whether all workers are guarded, or asks for requests", missing)
        else:
            self._follow(f"{targets.ENGINE}._initialize_kv_caches", self._started)
            self._follow(f"{targets.SCHEDULER}.update_from_output", self._returned)
            self._wrap(f"{targets.WORKER}.execute_model", self._given)
        if missing := targets.problems(targets.LIFETIME):
            self._left_out("blocks of the scheduler are not followed", missing)
            return
        self._follow(f"{targets.SCHEDULER}.__init__", self._scheduler)
        self._wrap(f"{targets.SCHEDULER}.shutdown", self._scheduler_ends)
        if config.on_violation != "report":
            self._protection = Protection(config, self._whose, self._tell)
            hook_manager().register(self._protection)
            if config.on_violation == "protect" and not targets.problems(targets.STAGES):
                self._wrap(targets.STAGES[0].name, self._serves)
            self._wrap(f"{targets.SCHEDULER}.schedule", self._schedule)
            self._wrap(f"{targets.SCHEDULER}.update_from_output", self._update)

    def _whose(self) -> Sequence[Session]:
        return self._telling.among(self.sessions)

    def _tell(self, event: Event) -> None:
        """With the place of the engine, as far as known here."""
        if (session := next(iter(self._whose()), None)) is not None:
            session.canary.tell(event)
        else:
            emit(Event(event.name, event.level, {**event.fields, **self._place}))

    def stop(self) -> None:
        """Closes all sessions, and restores vLLM's functions."""
        self._config = None
        self._patches.undo()
        if self._protection is not None:
            hook_manager().unregister(self._protection)
            self._protection.close()
            self._protection = None
        self._roll_calls.clear()
        while self._internal:
            self._internal.popitem()[1].close()
        while self._recorders:
            self._recorders.popitem()[1].close()
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _hook_runner(self, name: str) -> None:
        self._wrap(f"{name}.initialize_kv_cache", self._initialize)
        self._wrap(f"{name}.execute_model", self._execute)
        self._wrap(f"{name}.sample_tokens", self._made)
        if missing := targets.problems([targets.SAMPLERS[name]]):
            self._left_out("what is sampled is not compared with the next forward", missing)
        else:
            self._follow(targets.SAMPLERS[name].name, self._sampled)

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        """``around(original, object, *arguments)`` in the place of the method."""
        owner, method = targets.owner(name)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapper(this: Any, *args: Any, **kwargs: Any) -> Any:
                return around(functools.partial(original, this, *args, **kwargs), this, *args, **kwargs)

            return wrapper

        self._patches.wrap(owner, method, make)

    def _follow(self, name: str, told: Callable[..., None]) -> None:
        self._patches.follow(*targets.owner(name), told)

    def _initialize(self, original: Callable[[], Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        profiling = kwargs.get("is_profiling", args[1] if len(args) > 1 else False)
        if not profiling:
            self._end(runner)
        result = original()
        if self._config is not None and not profiling:
            if (session := attach_runner(runner, self._config)) is not None:
                self._sessions[id(runner)] = session
            self._without = bool(session is None and runners.groups(runner))
        return result

    def _end(self, runner: Any) -> None:
        """Closes the session while the guarded memory is still the runner's; the session's own is given back, too."""
        if (session := self._sessions.pop(id(runner), None)) is not None:
            with self._telling.only():
                session.close()

    def answer(self, worker: Any, verdicts: str) -> dict[str, object]:
        """The worker's word on its guard. ``verdicts``: see `workers.question`."""
        session = self._sessions.get(id(getattr(worker, "model_runner", None)))
        refused = "its runner is not guarded: see the coverage or disabled event of that process"
        why = refused if session is None and self._without else ""
        told = answer(self._config, workers.VERSION, getattr(session, "canary", None), why, "vllm")
        heard = self._protection is not None and self._protection.way.open(verdicts) if verdicts else None
        return told if heard is None else {**told, "verdicts": heard}

    def _started(self, _: Any, core: Any, *args: Any, **kwargs: Any) -> None:
        """All workers of an engine have their KV cache, and there is no scheduler yet."""
        if self._config is None or self._config.mode == "off":
            return
        try:
            self._roll_calls.pop(id(core.vllm_config), None)
            pipe = None if self._protection is None else self._protection.way.pipe(core.vllm_config)
            roll_call, deaf = workers.call(core, self._config, "" if pipe is None else pipe.path)
            self._roll_calls[id(core.vllm_config)] = roll_call
            if pipe is not None:
                pipe.opened()
            if self._config.on_violation == "protect" and not workers.await_all(core):
                reason = "tokens may leave before it is known what pipeline stages before the last have found"
                emit(Event("quarantine_failed", "error", {"reason": reason}))
            if deaf:
                reason = f"ranks {deaf} can't tell the scheduler's process what they find: they run on other machines"
                emit(Event("quarantine_failed", "error", {"reason": f"{reason}, or are unguarded", "ranks": deaf}))
        except Exception as error:
            self._failed("workers are not asked whether they are guarded", error)

    def _returned(self, _: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        made = kwargs.get("model_runner_output", args[-1] if args else None)
        if (internal := self._internal.get(id(scheduler))) is not None:
            internal.hear(made)
        # After an exception of ours no more are looked at.
        if (roll_call := self._roll_calls.pop(id(scheduler.vllm_config), None)) is not None:
            try:
                given: Any = kwargs.get("scheduler_output", args[0] if args else None)
                roll_call.output(getattr(made, MARK, None), int(given.total_num_scheduled_tokens))
                self._roll_calls[id(scheduler.vllm_config)] = roll_call
            except Exception as error:
                self._failed("outputs are not looked at", error)

    def _serves(self, original: Callable[[], Any], process: Any, *args: Any, **kwargs: Any) -> Any:
        if not runners.samples():
            self._later = judged_answer(pkgutil.resolve_name(targets.LATER))
            workers.answer_later(process)
        return original()

    def _given(self, original: Callable[[], Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if (session := self._sessions.get(id(getattr(wrapper.worker, "model_runner", None)))) is None:
            return original()
        with session.canary.guard("give"):
            session.give(kwargs.get("scheduler_output", args[0] if args else None))
        made = original()
        if made is None and self._later is not None:
            with session.lock, session.canary.guard("give"):
                made = self._later(session.canary.device, functools.partial(self._judge, session, session.leaves()))
        return made

    def _made(self, original: Callable[[], Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._sessions.get(id(runner))
        return original() if session is None else self._run(session, original, True)

    def _run(self, session: Session, run: Callable[[], Any], leaves: bool) -> Any:
        with self._telling.only(session), session.lock:
            made = run()
            if leaves or made is not None:
                with session.canary.guard("mark"):
                    judge = functools.partial(self._judge, session, session.leaves()) if leaves else None
                    mark(made, session.word, session.recomputed.wanted, judge)
        return made

    def _judge(self, session: Session, loads: Callable[[], None] | None) -> None:
        """The tokens of the session's step are on the host. From any thread. ``loads``: of `Session.leaves`."""
        with self._telling.only(session):
            session.canary.step.reader.judge()
            if loads is not None:
                loads()

    def _failed(self, what: str, error: Exception) -> None:
        """An exception of ours reaches vLLM in raise mode only."""
        if self._config is not None and self._config.mode == "raise":
            raise error
        self._left_out(what, [error_text(error)])

    def _execute(self, original: Callable[[], Any], runner: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._sessions.get(id(runner))
        dummy = kwargs.get("dummy_run", args[1] if len(args) > 1 else False)
        if session is None or dummy:
            return original()
        return self._run(session, functools.partial(session.execute, original, output), False)

    def _forward(self, original: Callable[[], Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._sessions.get(id(runner))
        return original() if session is None else session.forward(original)

    def _sampled(self, output: Any, runner: Any, _: Any, about: Any = None, *args: Any, **kwargs: Any) -> None:
        if (session := self._sessions.get(id(runner))) is not None:
            session.sampled(output, kwargs.get("spec_decode_metadata", kwargs.get("input_batch", about)))

    def _prepared(self, tables: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if (session := self._sessions.get(id(runner))) is not None:
            session.prepared(batch, tables)

    def _connected(self, _: Any, *args: Any, **kwargs: Any) -> None:
        for session in self._telling.among(()):
            session.begin(kwargs.get("attn_metadata"))

    def _scheduler(self, _: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if self._config is None:
            return
        try:
            replica = runners.replica(scheduler.vllm_config)
            self._place = {"replica": replica} if replica else {}
            recorder = self._recorders[id(scheduler)] = BlockRecorder(scheduler, self._config.sweep_interval)
            internal = self._internal[id(scheduler)] = recompute.follow(scheduler, self._config, lambda: self.sessions)
            recorder.told.append(lambda output: internal.note(output, getattr(messages.attached(output), "loads", ())))
            if self._protection is not None:
                self._protection.joined(scheduler)
                recorder.told.append(functools.partial(self._protection.scheduled, scheduler))
        except Exception as error:
            self._left_out("blocks of the scheduler are not followed", [error_text(error)])

    def _has_work(self, original: Callable[[], bool], core: Any) -> bool:
        if original():
            return True
        internal = self._internal.get(id(core.scheduler))
        # Alone among ranks of data parallelism an engine may not run a batch.
        if internal is None or not core.is_running() or hasattr(core, "dp_group"):
            return False
        recompute.idle(core, internal)
        return original()

    def _schedule(self, original: Callable[[], Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._act(scheduler)
        return original()

    def _update(self, original: Callable[[], Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._act(scheduler, kwargs.get("model_runner_output", args[-1] if args else None))
        outputs = original()
        if self._protection is not None:
            self._protection.ended(scheduler, outputs)
        return outputs

    def _act(self, scheduler: Any, made: Any = None) -> None:
        if self._protection is not None and id(scheduler) in self._recorders:
            own = [one for one in self._sessions.values() if one.runner.vllm_config is scheduler.vllm_config]
            with self._telling.only(*own):
                try:
                    for session in own:
                        with session.lock:
                            session.leaves()
                    self._protection.act(scheduler, made)
                except Exception as error:
                    self._tell(Event("quarantine_failed", "error", {"reason": leaked(error)}))

    def _scheduler_ends(self, original: Callable[[], Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._roll_calls.pop(id(scheduler.vllm_config), None)
        if (internal := self._internal.pop(id(scheduler), None)) is not None:
            internal.close()
        if (recorder := self._recorders.pop(id(scheduler), None)) is not None:
            recorder.close()
            if self._protection is not None:
                self._protection.left(scheduler)
        return original()

    def _worker_ends(self, original: Callable[[], Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        self._end(getattr(getattr(wrapper, "worker", None), "model_runner", None))
        return original()

    def _weights_end(self, original: Callable[[], Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._sessions.get(id(worker.model_runner))
        with nullcontext() if session is None else session.weights.loads.load("finish_weight_update"):
            return original()

    def _left_out(self, what: str, problems: Sequence[str]) -> None:
        emit(Event("hooks_left_out", "error", {"reason": f"{what}: {'; '.join(problems)}"}))


HOOKS = Hooks()
"""The only one in the process."""
