"""`Hooks`: code before, after or around SGLang's own functions, of runner, scheduler and pools."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from canary_core import CanaryConfig, Event, Level, PluginError, ViolationError, Watchdog, emit, hook_manager
from canary_sglang.actions.protection import Protection
from canary_sglang.actions.quarantine import Quarantine
from canary_sglang.actions.recompute import SchedulerRecompute
from canary_sglang.actions.roll_call import RECOMPUTES, RanksRollCall
from canary_sglang.allocator.lifetime import allocator_hooks
from canary_sglang.batches.draft_hooks import DraftHooks
from canary_sglang.compat import ranks, runners, schedulers, targets
from canary_sglang.compat.registrar import REGISTRAR, Hook, is_applying
from canary_sglang.pools import mamba
from canary_sglang.pools.parts import tensor_bytes
from canary_sglang.session import Session, attach_runner

NOT_ATTACHED = "its pool is not guarded; the coverage or disabled event of that process says why"

LAST_WORDS_S = 5.0
"""Most time for reading the last findings when the engine has failed: its device may hang."""


class Hooks:
    """The hooks of the process. Never removed; after `stop` they only call SGLang's functions.

    There is one session for each guarded model: ``session`` is the served model's, ``sessions`` includes those of draft
    models.
    """

    def __init__(self) -> None:
        self._config: CanaryConfig | None = None
        self._watchdog: Watchdog | None = None
        self._applied: Watchdog | None = None
        self._by_runner: dict[int, Session] = {}
        self.session: Session | None = None
        """Session of the served model, None without one."""
        self._drafts = DraftHooks(lambda runner: self._by_runner.get(id(runner)))
        self._quarantine: Quarantine | None = None
        self._roll_call: RanksRollCall | None = None
        self._recompute: SchedulerRecompute | None = None

    @property
    def sessions(self) -> Sequence[Session]:
        """All sessions, in the order of the pools' allocation."""
        return tuple(self._by_runner.values())

    def start(self, config: CanaryConfig) -> None:
        """Guards runners built from now on. To be called before SGLang applies its hooks: from its plugin loader, or
        before an engine is made, after `targets.hook_targets` were found."""
        hooks: dict[str, Hook] = {
            targets.ALLOCATE: (self._allocated, "AFTER"),
            targets.RESIZE: (self._resized, "AFTER"),
            targets.FORWARD: (self._forward, "AROUND"),
            targets.RUN_BATCH: (self._batch, "AROUND"),
            targets.FLUSH: (self._flushed, "AFTER"),
            targets.IDLE: (self._idle, "AFTER"),
            targets.STATE_COPY: (mamba.copied, "AFTER"),
            targets.STATE_CLONES: (mamba.cloned, "AROUND"),
            targets.STATE_LOAD: (mamba.loaded, "AFTER"),
            targets.TURN: (self._turn, "BEFORE"),
            targets.LOOP: (self._loop, "AROUND"),
            targets.SAMPLE: (self._sampled, "AFTER"),
            targets.PROCESS: (self._processed, "AROUND"),
        }
        hooked = targets.targets()
        REGISTRAR.register({name: hooks[name] for name in hooked})
        REGISTRAR.register(allocator_hooks(lambda: self.session))
        loads = targets.existing(targets.WEIGHT_LOADS)
        REGISTRAR.register({name: (partial(self._load, name.rpartition(".")[2]), "AROUND") for name in loads})
        if not loads:
            _tell_left_out(["update_weights"], "warning", "this release loads weights in another way")
        if config.unready_file:
            REGISTRAR.register(dict.fromkeys(targets.existing([targets.READY]), (self._ready, "AROUND")))
        if config.on_violation == "protect":
            REGISTRAR.register(dict.fromkeys(targets.existing(targets.PD_TURNS), (self._turn, "BEFORE")))
            REGISTRAR.register(dict.fromkeys(targets.existing([targets.PD_BEGIN]), (self._begun, "AROUND")))
        self._config = config
        missing = targets.missing()
        if missing:
            _tell_left_out(missing, "warning", "this release does not have them")
        self._applied = Watchdog(config.silence_s, self._no_pool)
        if config.on_violation != "report":
            kind = Protection if config.on_violation == "protect" else Quarantine
            self._quarantine = kind(
                config, lambda: [session.canary for session in self.sessions], lambda: _together(self._roll_call)
            )
            hook_manager().register(self._quarantine)

    def stop(self) -> None:
        """Closes all sessions. From now on the hooks only call SGLang's functions."""
        self._config = None
        if self._watchdog is not None:
            self._watchdog.feed()
            self._watchdog = None
        self._close(self.sessions)
        if self._roll_call is not None:
            self._roll_call.close()
            self._roll_call = None
        if self._quarantine is not None:
            hook_manager().unregister(self._quarantine)
            self._quarantine = None
        if self._recompute is not None and not self._recompute.linked:
            self._recompute = None

    def _allocated(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if not runners.awaits_resize(runner):
            self._attach(runner)

    def _resized(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        self._attach(runner)

    def _attach(self, runner: Any) -> None:
        if self._config is None:
            return
        if self._applied is not None:
            # At once, where an engine begins.
            self._applied.feed()
            self._applied = None
            self._look_at_hooks()
        model = runners.draft_name(runner)
        # A new engine in this process replaces the old one: a served model replaces all models, a draft model the one
        # with its name.
        self._close([s for s in self.sessions if model is None or s.model == model])
        others = self.sessions
        if model is None:
            self._roll_call, self._recompute = _called(runner, self._config), None
        session = attach_runner(runner, self._config, others[0].requests if others else None)
        if model is None and self._roll_call is not None:
            if session is not None:
                self._roll_call.say(session.canary)
            else:
                self._roll_call.say(None, NOT_ATTACHED if tensor_bytes(runner.token_to_kv_pool) else "")
        if session is not None:
            self._by_runner[id(runner)] = session
            if session.model is None:
                self.session, self._recompute = session, session.recompute
                if session.recompute is not None and self._roll_call is not None:
                    session.recompute.together = partial(self._roll_call.together, RECOMPUTES)
            self._drafts.register(runner)

    def _close(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            del self._by_runner[id(session.runner)]
            if session is self.session:
                self.session = None
            session.close()

    def _forward(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._by_runner.get(id(runner))
        if session is None:
            return original(runner, *args, **kwargs)
        if self._watchdog is not None:
            self._watchdog.feed()
        batch = args[0] if args else kwargs["forward_batch"]
        return session.forward(lambda: original(runner, *args, **kwargs), batch)

    def _sampled(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        session = self._by_runner.get(id(runner))
        if session is not None:
            session.sampled.after(kwargs.get("forward_batch", args[-1] if args else None), result)

    def _processed(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        def process() -> Any:
            return original(scheduler, *args, **kwargs)

        if len(args) + len(kwargs) != 2:
            return process()
        batch, result = args if len(args) == 2 else (kwargs.get("batch", args and args[0]), kwargs.get("result"))
        take = process
        if self.session is not None:
            take = partial(self.session.sampled.answers.processed, process, batch, result)
        if not isinstance(self._quarantine, Protection):
            return take()
        return self._quarantine.taking(take, scheduler, batch, result)

    def _begun(self, original: Callable[..., Any], processor: Any, batch: Any) -> Any:
        if not isinstance(self._quarantine, Protection):
            return original(processor, batch)
        return self._quarantine.beginning(original, processor, batch)

    def _batch(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        tokens: dict[Session, int] = {}
        if self._config is not None:
            guard = contextlib.nullcontext() if self.session is None else self.session.canary.guard("batch")
            with guard:
                batch = args[0] if args else kwargs["batch"]
                self._begin_batch(self._config, scheduler, batch)
                for session in self.sessions:
                    tokens[session] = schedulers.computed_tokens(scheduler, batch, session.model is not None)
        if self._recompute is None:
            result = original(scheduler, *args, **kwargs)
        else:
            with self._recompute.made(scheduler, args[0] if args else kwargs["batch"]):
                result = original(scheduler, *args, **kwargs)
        for session in self.sessions:
            # Here the current stream is the scheduler's. With the overlap scheduler it is not that of the forwards, and
            # the scheduler writes to the tables of the next batch on it while this batch runs.
            session.canary.step.follow_check()
            session.unguarded.computed(tokens.get(session, 0))
        if self.session is not None:
            self.session.sampled.answers.issued(result)
        if isinstance(self._quarantine, Protection):
            self._quarantine.issued(args[0] if args else kwargs["batch"])
        return result

    def _begin_batch(self, config: CanaryConfig, scheduler: Any, batch: Any) -> None:
        if self._watchdog is None:
            self._watchdog = Watchdog(config.silence_s, self._silent)
        if self._quarantine is not None:
            # Some of SGLang's loops never call `_turn`; in those only `begin` tells that nothing can be done.
            self._quarantine.begin(scheduler)
        if self._roll_call is not None:
            self._roll_call.begin()
            self._roll_call.require(wait=True)
        for session in self.sessions:
            session.notice(batch.reqs)
        if self.session is not None:
            self.session.sampled.answers.begin()
            self.session.hits.notice(batch)
            if self.session.lifetime is not None:
                self.session.lifetime.meet(scheduler.tree_cache)
            self.session.sweep.before_batch(scheduler)

    def _flushed(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if result:
            for session in self.sessions:
                session.canary.step.flushed()

    def _load(self, how: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A draft's weights alone do not make other KV of the served model.
        weights = None if self.session is None else self.session.weights
        with contextlib.nullcontext() if weights is None else weights.load(how):
            return original(*args, **kwargs)

    def _ready(self, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """SGLang's own readiness, and that of ``CANARY_UNREADY_FILE``, which a scheduler's process makes."""
        out = self._config is not None and os.path.exists(self._config.unready_file)
        return original(*args, **kwargs) and not out

    def _turn(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if self._roll_call is not None:
            self._roll_call.require()
        if self._quarantine is not None:
            self._quarantine.turn(scheduler)
        if self._recompute is not None:
            self._recompute.turn(scheduler)

    def _idle(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        for session in self.sessions:
            session.canary.step.idle()
        if self._recompute is not None:
            self._recompute.idle(scheduler)

    def _loop(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        # The engine has started: no request has come yet.
        for session in self.sessions:
            session.canary.finish_warm_up()
        if self._roll_call is not None:
            self._roll_call.begin()
        try:
            return original(scheduler, *args, **kwargs)
        except Exception:
            # Findings of the last steps may say why the engine failed, and the host has not read them yet.
            reader = threading.Thread(target=self._last_words, daemon=True)
            reader.start()
            reader.join(LAST_WORDS_S)
            raise

    def _last_words(self) -> None:
        for session in self.sessions:
            # The engine's tensors are inference tensors, which can be written to only in this mode.
            with contextlib.suppress(ViolationError), torch.inference_mode():
                session.last_words()

    def _look_at_hooks(self) -> None:
        """Reports hooks missing after SGLang's loader, which only logs a hook that can't be applied."""
        left_out = REGISTRAR.left_out() if self._config is not None else []
        if left_out:
            _tell_left_out(left_out, "error", "SGLang could not apply these hooks; its log says why")
            if self._config is not None and self._config.mode == "raise":
                raise PluginError(f"SGLang could not hook {', '.join(left_out)}; see its log")

    def _no_pool(self) -> None:
        """No pool was allocated so far, as in a process without an engine, or with an unhooked allocation."""
        if self._config is None:
            return
        if is_applying():
            self._applied = Watchdog(self._config.silence_s, self._no_pool)
            return
        with contextlib.suppress(PluginError):
            self._look_at_hooks()

    def _silent(self) -> None:
        what = "no pool was attached" if not self._by_runner else "no forward was seen"
        reason = f"the scheduler runs batches, but {what}; were the hooks applied? See SGLang's log"
        emit(Event("silence", "error", {"reason": reason}))


def _tell_left_out(names: Iterable[str], level: Level, why: str) -> None:
    reason = f"{why}: {', '.join(names)}. What they would follow is not guarded"
    emit(Event("hooks_left_out", level, {"reason": reason}))


def _called(runner: Any, config: CanaryConfig) -> RanksRollCall | None:
    """The roll call joined by the rank; None where ranks may come and go."""
    if runners.is_elastic(runner):
        return None
    call = RanksRollCall(config, ranks.places(runner), ranks.world_rank())
    call.arrive()
    return call


def _together(roll_call: RanksRollCall | None) -> bool:
    """Whether all ranks act on findings."""
    return roll_call is None or roll_call.together()


HOOKS = Hooks()
"""The only one in the process."""
