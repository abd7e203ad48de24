"""Hooks in SGLang's draft workers, applied only when needed by a model."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from canary_core import BatchView
from canary_sglang.compat import targets
from canary_sglang.compat.drafts import draft_targets
from canary_sglang.compat.registrar import REGISTRAR, Hook
from canary_sglang.session import Session


class DraftHooks:
    """Brackets a draft worker's work on a batch as one forward, even if SGLang issues several forwards, a CUDA graph of
    them, or none.

    ``session_of``: returns the session of a `ModelRunner`, None without one.
    """

    def __init__(self, session_of: Callable[[Any], Session | None]) -> None:
        self._session_of = session_of
        self._verifying: _Tree | None = None
        """The tree under verification."""

    def register(self, runner: Any) -> None:
        """Applies the hooks needed by the runner's model. To be called after the pool of a guarded model was allocated:
        then SGLang has imported the worker and applied its other hooks."""
        hooks: dict[str, Hook] = {
            targets.DRAFT_STEPS: (self._steps, "AROUND"),
            targets.DRAFT_EXTEND: (self._extend, "AROUND"),
            targets.VERIFY: (self._verify, "AROUND"),
            targets.NGRAM: (self._ngram, "AROUND"),
            targets.MOVE_ACCEPTED: (self._moved, "AFTER"),
        }
        REGISTRAR.apply({target: hooks[target] for target in draft_targets(runner)})

    def _steps(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session_of(worker.draft_runner)
        written = worker.speculative_num_steps - 1
        if session is None or written < 1 or batch.forward_mode.is_idle():
            return original(worker, batch, *args, **kwargs)
        drafts, tree = session.drafts, worker.topk > 1

        def settle(view: BatchView, output: Any) -> None:
            if tree:
                session.forget_slots(drafts.branch_slots(batch, worker))
            else:
                drafts.guessed(view, output[0] if isinstance(output, tuple) else output)

        return session.canary.step.run(
            lambda: original(worker, batch, *args, **kwargs),
            lambda: drafts.steps(batch, 0 if tree else written),
            settle=settle,
        )

    def _extend(self, original: Callable[..., Any], worker: Any, batch: Any, result: Any) -> Any:
        session = self._session_of(worker.draft_runner)
        if session is None or batch.forward_mode.is_idle():
            return original(worker, batch, result)
        drafts = session.drafts
        return session.canary.step.run(
            lambda: original(worker, batch, result), lambda: drafts.extend(batch, result.next_token_ids)
        )

    def _verify(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session_of(worker.target_worker.model_runner)
        drafted = batch.spec_info
        tree = not batch.forward_mode.is_idle() and drafted.topk > 1 and drafted.draft_token_num > 1
        if session is None:
            return original(worker, batch, *args, **kwargs)
        if tree:
            with self._following(session) as verified:
                result = original(worker, batch, *args, **kwargs)
            _accept(verified, batch, drafted, result)
        else:
            result = original(worker, batch, *args, **kwargs)
        if not batch.forward_mode.is_idle():
            session.sampled.verified(batch, result)
        return result

    def _ngram(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The worker's whole work on a batch; only decodes are verified."""
        session = self._session_of(worker.target_worker.model_runner)
        if session is None or not batch.forward_mode.is_decode():
            return original(worker, batch, *args, **kwargs)
        with self._following(session) as verified:
            result = original(worker, batch, *args, **kwargs)
        _accept(verified, batch, batch.spec_info, result)
        session.sampled.verified(batch, result)
        return result

    @contextlib.contextmanager
    def _following(self, session: Session) -> "Iterator[_Tree]":
        self._verifying = tree = _Tree(session)
        try:
            with session.following_trees():
                yield tree
        finally:
            self._verifying = None

    def _moved(self, result: None, batch: Any, accepted: Any, *args: Any, **kwargs: Any) -> None:
        """After ``move_accept_tokens_to_target_kvcache(batch, accept_index, ...)``, which has copied the accepted path
        to the front of each request's slots."""
        tree = self._verifying
        if tree is not None and tree.session.canary.enabled:
            with tree.session.canary.guard("accepted tokens"):
                tree.session.carry(*tree.session.drafts.moved(batch, accepted))
                tree.moved = True


@dataclass(slots=True, eq=False)
class _Tree:
    """A tree verified by ``session``'s model. ``moved``: whether the move of its accepted path was seen."""

    session: Session
    moved: bool = False


def _accept(tree: _Tree, batch: Any, drafted: Any, result: Any) -> None:
    """Records the accepted path of a verified tree, moved by SGLang to the front of each request's slots. The slots
    behind hold nothing from now on: a reader has kept a rejected draft. Without a seen move, a token missing in its
    slot is a lost write."""
    session = tree.session

    def accepted() -> BatchView:
        roots = drafted.draft_token.view(-1, drafted.draft_token_num)[:, 0]
        view = session.drafts.accepted(batch, roots, result, carried=tree.moved)
        # They are recorded twice, by the verification and now.
        session.canary.witness.computed(view.tokens)
        return view

    session.canary.step.run(lambda: None, accepted)
    if session.canary.enabled:
        with session.canary.guard("rejected tokens"):
            session.clear_slots(session.drafts.rejected_slots(batch, result))
