"""What SGLang calls in its draft worker: wrapped once there is a draft model to guard."""

import importlib
from collections.abc import Callable
from typing import Any

from canary_core.batch import BatchView
from canary_sglang.layout import targets
from canary_sglang.session import Session


class DraftHooks:
    """Functions of SGLang's draft worker, wrapped through its `HookRegistry` once there is a draft model to guard.

    ``session_of``: the session of a `ModelRunner`, None where it has none.
    """

    def __init__(self, session_of: Callable[[Any], Session | None]) -> None:
        self._session_of = session_of
        self._registered = False

    def register(self) -> None:
        """Called when a draft model's pool was allocated: SGLang's hooks were applied, and its worker imported."""
        if self._registered:
            return
        self._registered = True
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        hooks = {targets.DRAFT_STEPS: self._steps, targets.DRAFT_EXTEND: self._extend, targets.VERIFY: self._verify}
        for target, hook in hooks.items():
            registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
        registry.HookRegistry.apply_hooks()

    def _steps(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session_of(worker.draft_runner)
        written = worker.speculative_num_steps - 1
        if session is None or written < 1 or batch.forward_mode.is_idle():
            return original(worker, batch, *args, **kwargs)
        drafts, tree = session.drafts, worker.topk > 1

        def settle(view: BatchView, output: Any) -> None:
            if tree:
                session.forget(drafts.branch_slots(batch, worker))
            else:
                drafts.guessed(view, output[0] if isinstance(output, tuple) else output)

        return session.around(
            lambda: original(worker, batch, *args, **kwargs),
            lambda: drafts.steps(batch, 0 if tree else written),
            settle,
        )

    def _extend(self, original: Callable[..., Any], worker: Any, batch: Any, result: Any) -> Any:
        session = self._session_of(worker.draft_runner)
        if session is None or batch.forward_mode.is_idle():
            return original(worker, batch, result)
        drafts = session.drafts
        return session.around(
            lambda: original(worker, batch, result), lambda: drafts.extend(batch, result.next_token_ids)
        )

    def _verify(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session_of(worker.target_worker.model_runner)
        drafted = batch.spec_info
        tree = not batch.forward_mode.is_idle() and drafted.topk > 1 and drafted.draft_token_num > 1
        result = original(worker, batch, *args, **kwargs)
        if session is not None and tree:
            drafts = session.drafts
            roots = drafted.draft_token.view(-1, drafted.draft_token_num)[:, 0]
            session.around(lambda: None, lambda: drafts.accepted(batch, roots, result))
            session.guarded("rejected tokens", lambda: session.forget(drafts.rejected_slots(batch, result)))
        return result
