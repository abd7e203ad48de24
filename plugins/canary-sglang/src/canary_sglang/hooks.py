"""What SGLang calls: a few functions of its runner, scheduler and pools, each wrapped by the `Registrar`."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from canary_core import CanaryConfig, Event, ViolationError, Watchdog, emit, hook_manager
from canary_sglang.actions.quarantine import Quarantine
from canary_sglang.allocator.lifetime import allocator_hooks
from canary_sglang.batches.draft_hooks import DraftHooks
from canary_sglang.compat import runners, targets
from canary_sglang.compat.registrar import REGISTRAR, Hook
from canary_sglang.pools import mamba
from canary_sglang.session import Session, attach_runner

LAST_WORDS_S = 5.0
"""Most time to read the last findings of an engine that has failed, whose device may hang."""


class Hooks:
    """The hooks of this process. They stay in place for its life; without a configuration (`stop`) they only call on.

    One session for each guarded model of the process: ``session`` is that of the model that is served, ``sessions``
    has those of its draft models, too.
    """

    def __init__(self) -> None:
        self._config: CanaryConfig | None = None
        self._watchdog: Watchdog | None = None
        self._by_runner: dict[int, Session] = {}
        self.session: Session | None = None
        """Of the model that is served."""
        self._drafts = DraftHooks(lambda runner: self._by_runner.get(id(runner)))
        self._quarantine: Quarantine | None = None

    @property
    def sessions(self) -> Sequence[Session]:
        """All, in the order in which their pools were allocated."""
        return tuple(self._by_runner.values())

    def start(self, config: CanaryConfig) -> None:
        """Guards the runners that are built from now on. Called before SGLang applies its hooks, i.e. from its plugin
        loader, or before an engine is made. Raises `PluginError` if a function to hook does not exist."""
        hooks: dict[str, Hook] = {
            targets.ALLOCATE: (self._allocated, "AFTER"),
            targets.RESIZE: (self._resized, "AFTER"),
            targets.FORWARD: (self._forward, "AROUND"),
            targets.RUN_BATCH: (self._batch, "AROUND"),
            targets.FLUSH: (self._flushed, "AFTER"),
            targets.IDLE: (self._idle, "AFTER"),
            targets.STATE_COPY: (mamba.copied, "AFTER"),
            targets.STATE_LOAD: (mamba.loaded, "AFTER"),
            targets.TURN: (self._turn, "BEFORE"),
            targets.LOOP: (self._loop, "AROUND"),
        }
        REGISTRAR.register({name: hooks[name] for name in targets.targets()})
        REGISTRAR.register(allocator_hooks(lambda: self.session))
        self._config = config
        if config.on_violation != "report":
            self._quarantine = Quarantine(config, lambda: [session.canary for session in self.sessions])
            hook_manager().register(self._quarantine)

    def stop(self) -> None:
        """Ends the session; the hooks only call on from now on."""
        self._config = None
        if self._watchdog is not None:
            self._watchdog.feed()
            self._watchdog = None
        self._close(self.sessions)
        if self._quarantine is not None:
            hook_manager().unregister(self._quarantine)
            self._quarantine = None

    def _allocated(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if not runners.awaits_resize(runner):
            self._attach(runner)

    def _resized(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        self._attach(runner)

    def _attach(self, runner: Any) -> None:
        if self._config is None:
            return
        model = runners.draft_name(runner)
        # Another engine in this process: the old one's models are gone, or this one of them.
        self._close([s for s in self.sessions if model is None or s.model == model])
        others = self.sessions
        session = attach_runner(runner, self._config, others[0].requests if others else None)
        if session is not None:
            self._by_runner[id(runner)] = session
            if session.model is None:
                self.session = session
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

    def _batch(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._config is not None:
            self._begin_batch(self._config, scheduler, args[0] if args else kwargs["batch"])
        result = original(scheduler, *args, **kwargs)
        for session in self.sessions:
            # This is the scheduler's stream: under the overlap scheduler one of its own, on which it writes to the
            # tables of the next batch while this one runs.
            session.canary.step.follow_check()
        return result

    def _begin_batch(self, config: CanaryConfig, scheduler: Any, batch: Any) -> None:
        if self._watchdog is None:
            self._watchdog = Watchdog(config.silence_s, self._silent)
        if self._quarantine is not None:
            # Not every loop of SGLang makes turns; those that don't are told of.
            self._quarantine.begin(scheduler)
        for session in self.sessions:
            session.notice(batch.reqs)
        if self.session is not None:
            self.session.sweep.before_batch(scheduler)

    def _flushed(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if result:
            for session in self.sessions:
                session.canary.step.flushed()

    def _turn(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if self._quarantine is not None:
            self._quarantine.turn(scheduler)

    def _idle(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        for session in self.sessions:
            session.canary.step.idle()

    def _loop(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(scheduler, *args, **kwargs)
        except Exception:
            # What was found in the last steps may be why the engine fails, and the host reads it some steps late.
            reader = threading.Thread(target=self._last_words, daemon=True)
            reader.start()
            reader.join(LAST_WORDS_S)
            raise

    def _last_words(self) -> None:
        for session in self.sessions:
            # The engine's mode of its threads: what it made in this one can't be written to in another.
            with contextlib.suppress(ViolationError), torch.inference_mode():
                session.last_words()

    def _silent(self) -> None:
        what = "no pool was attached" if not self._by_runner else "no forward was seen"
        reason = f"the scheduler runs batches, but {what}; were the hooks applied? See SGLang's log"
        emit(Event("silence", "error", {"reason": reason}))


HOOKS = Hooks()
"""The one of this process: the engine's classes exist once."""
