"""What SGLang calls: a few functions of its runner, scheduler and pools, wrapped through its own `HookRegistry`."""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from canary_core import plugins
from canary_core.config import CanaryConfig
from canary_core.errors import ViolationError
from canary_core.events import Event
from canary_core.runtime.watchdog import Watchdog
from canary_sglang.actions.quarantine import Quarantine
from canary_sglang.allocator.lifetime import allocator_hooks
from canary_sglang.compat import runners, targets
from canary_sglang.draft_hooks import DraftHooks
from canary_sglang.pools import mamba
from canary_sglang.session import Session, attach

LAST_WORDS_S = 5.0
"""Most time to read the last findings of an engine that has failed, whose device may hang."""


class Hooks:
    """The hooks of this process. They stay in place for its life, since `HookRegistry` takes none back; without a
    configuration (`stop`) they only call on.

    One session for each guarded model of the process: ``session`` is that of the model that is served, ``sessions``
    has those of its draft models, too.
    """

    def __init__(self) -> None:
        self._registered = False
        self._config: CanaryConfig | None = None
        self._watch: Watchdog | None = None
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
        if not self._registered:
            names = targets.targets()
            registry = importlib.import_module("sglang.srt.plugins.hook_registry")
            hooks = {
                targets.ALLOCATE: (self._allocated, registry.HookType.AFTER),
                targets.RESIZE: (self._resized, registry.HookType.AFTER),
                targets.FORWARD: (self._forward, registry.HookType.AROUND),
                targets.RUN_BATCH: (self._batch, registry.HookType.AROUND),
                targets.FLUSH: (self._flushed, registry.HookType.AFTER),
                targets.IDLE: (self._idle, registry.HookType.AFTER),
                targets.STATE_COPY: (mamba.copied, registry.HookType.AFTER),
                targets.STATE_LOAD: (mamba.loaded, registry.HookType.AFTER),
                targets.TURN: (self._turn, registry.HookType.BEFORE),
                targets.LOOP: (self._loop, registry.HookType.AROUND),
            }
            for name in names:
                registry.HookRegistry.register(name, *hooks[name])
            for target, hook in allocator_hooks(lambda: self.session).items():
                registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
            self._registered = True
        self._config = config
        if config.on_violation != "report":
            self._quarantine = Quarantine(config, lambda: [session.canary for session in self.sessions])
            plugins.hook_manager().register(self._quarantine)

    def stop(self) -> None:
        """Ends the session; the hooks only call on from now on."""
        self._config = None
        if self._watch is not None:
            self._watch.feed()
            self._watch = None
        self._close(self.sessions)
        if self._quarantine is not None:
            plugins.hook_manager().unregister(self._quarantine)
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
        session = attach(runner, self._config, others[0].requests if others else None)
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
        if self._watch is not None:
            self._watch.feed()
        batch = args[0] if args else kwargs["forward_batch"]
        return session.forward(lambda: original(runner, *args, **kwargs), batch)

    def _batch(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._config is not None:
            self._begin_batch(self._config, scheduler, args[0] if args else kwargs["batch"])
        result = original(scheduler, *args, **kwargs)
        for session in self.sessions:
            session.launched()
        return result

    def _begin_batch(self, config: CanaryConfig, scheduler: Any, batch: Any) -> None:
        if self._watch is None:
            self._watch = Watchdog(config.silence_s, self._silent)
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
                session.flushed()

    def _turn(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if self._quarantine is not None:
            self._quarantine.turn(scheduler)

    def _idle(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if self.session is not None:
            self.session.sweep.idle(scheduler)
        for session in self.sessions:
            session.idle()

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
        plugins.emit(Event("silence", "error", {"reason": reason}))


HOOKS = Hooks()
"""The one of this process: the engine's classes exist once."""
