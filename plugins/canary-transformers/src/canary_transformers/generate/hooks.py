"""Hooks `generate()` and direct calls of a model: every `Cache` passed through a guarded model is followed."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import local
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from canary_core import ViolationError, Witness
from canary_transformers.engine_hooks import EngineHooks, ModelOwner
from canary_transformers.generate import caches
from canary_transformers.generate.answer import Answer
from canary_transformers.generate.forward import ModelCall, Told
from canary_transformers.generate.guarded_cache import GuardedCache


class CacheOwner(ModelOwner, Protocol):
    """An owner of models to guard in `generate()` and direct calls."""

    def open_cache(self, model: Any) -> GuardedCache:
        """Begins to guard a cache of ``model``."""

    def open_cross(self, model: Any, whole: Any, own: GuardedCache) -> GuardedCache:
        """Begins to guard the cross-attention half of the cache ``whole``, whose other half is ``own``."""

    def retire_cache(self, guarded: GuardedCache) -> None:
        """The cache is gone, or the owner: keeps its numbers, closes it."""

    @property
    def judges(self) -> bool:
        """Whether caches are kept until an answer is complete, to be compared or judged."""

    @property
    def withholds(self) -> bool:
        """Whether no answer is returned before all KV it was computed from was compared."""

    @property
    def witness(self) -> Witness:
        """Tokens computed by the owner's models."""

    def settle(self, model: Any) -> None:
        """An answer of ``model`` is complete: reports forwards that passed the hooks by."""

    def between(self) -> None:
        """This thread is between two forwards: computes due rows again. Never raises."""

    def tell_unguarded(self, model: Any, reason: str) -> None:
        """A forward of ``model`` can't be guarded; told once for each class and reason."""


class GenerateHooks(EngineHooks[CacheOwner]):
    """Brackets the outermost call of a model. Calls of `Cache`'s methods announce changes, for comparison with the
    layers; `prepare_inputs_for_generation`, where not replaced by the model, gives the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self._followed: WeakKeyDictionary[Any, tuple[CacheOwner, GuardedCache]] = WeakKeyDictionary()
        self._histories: WeakKeyDictionary[Any, Told] = WeakKeyDictionary()
        self._late: list[ViolationError] = []
        self._calls = local()
        self._answering = 0

    @property
    def _answer(self) -> Answer | None:
        """That of the `generate()` which this thread runs."""
        return getattr(self._calls, "answer", None)

    def _install(self) -> None:
        model = importlib.import_module("transformers.modeling_utils").PreTrainedModel
        cache = importlib.import_module("transformers.cache_utils").Cache
        mixin = importlib.import_module("transformers.generation.utils").GenerationMixin
        self._patches.wrap(model, "__call__", self._wrap_call)
        self._patches.wrap(model, "get_compiled_call", self._wrap_compiled)
        self._patches.wrap(mixin, "generate", self._wrap_generate)
        self._patches.wrap(mixin, "prepare_inputs_for_generation", self._wrap_prepare)
        follow: dict[str, Callable[[GuardedCache, Any, Any], None]] = {
            "reorder_cache": lambda guarded, cache, rows: guarded.reordered(cache, rows),
            "batch_select_indices": lambda guarded, cache, rows: guarded.reordered(cache, rows),
            "batch_repeat_interleave": lambda guarded, cache, times: guarded.repeated(cache, times),
            "crop": lambda guarded, cache, tokens: guarded.cropped(tokens),
            "reset": lambda guarded, cache, nothing: guarded.cleared(),
        }
        for name, told in follow.items():
            moves = name not in ("crop", "reset")
            self._patches.wrap(cache, name, functools.partial(self._wrap_changing, moves))
            self._patches.follow(cache, name, functools.partial(self._cache_changed, told))

    @property
    def within(self) -> bool:
        """Whether this thread is in a forward of a guarded model, or of Canary's own."""
        return bool(getattr(self._calls, "inside", False))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Context for forwards of Canary's own on this thread: they are nobody's, and not guarded."""
        inside, self._calls.inside = getattr(self._calls, "inside", False), True
        try:
            yield
        finally:
            self._calls.inside = inside

    def _release(self, owner: CacheOwner) -> None:
        for cache, (owned_by, guarded) in list(self._followed.items()):
            if owned_by is owner:
                del self._followed[cache]
                self._end(owner, guarded)
        self._raise_late()

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(model: Any, *args: Any, **kwargs: Any) -> Any:
            # What is traced here must stay a model's own; `_wrap_compiled` brackets it from outside.
            if torch.compiler.is_compiling():
                return original(model, *args, **kwargs)
            return self._bracket(model, functools.partial(original, model), args, kwargs)

        return __call__

    def _wrap_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_compiled_call(model: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = original(model, *args, **kwargs)

            def call(*inputs: Any, **named: Any) -> Any:
                return self._bracket(model, compiled, inputs, named)

            return call

        return get_compiled_call

    def _bracket(self, model: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``call(*args, **kwargs)``, with its cache checked before and recorded after."""
        owner = None if getattr(self._calls, "inside", False) else self._owner(model)
        if owner is None:
            return call(*args, **kwargs)
        self._calls.inside = True
        judged: Sequence[tuple[Any, GuardedCache]] = ()
        try:
            given = _arguments(model, args, kwargs)
            cache = caches.among(given.values())
            answer = self._answer
            number, placed = (0, False) if answer is None else (answer.number, answer.placed)
            forward = ModelCall.of(model, given, self._history(cache), number, placed)
            if forward is None:
                output = call(*args, **kwargs)
                if cache is not None:
                    owner.tell_unguarded(
                        model,
                        f"it has a cache, and none of its arguments ({', '.join(sorted(given))}) is named input_ids or "
                        "inputs_embeds; what it computes is not guarded until it takes its tokens under such a name",
                    )
            else:
                owner.between()
                halves = self._guard(owner, model, cache)
                for half, guarded in halves:
                    if self._meets(owner, half, guarded):
                        guarded.compare(half)
                    guarded.before(half, forward)
                try:
                    output = call(*args, **kwargs)
                except BaseException:
                    for _, guarded in halves:
                        guarded.failed()
                    raise
                if not halves:
                    halves = self._guard(owner, model, caches.among(_parts(output)))
                    for half, guarded in halves:
                        self._meets(owner, half, guarded)
                self._count(owner, forward.rows * forward.new)
                for half, guarded in halves:
                    guarded.after(half, forward)
                if not halves:
                    self._not_guarded(owner, model, given, forward.rows * forward.new)
                judged = halves
        finally:
            self._calls.inside = False
        self._raise_late()
        _withhold(judged)
        return output

    def _meets(self, owner: CacheOwner, half: Any, guarded: GuardedCache) -> bool:
        """Whether it is the first forward of a judged answer with this cache."""
        answer = self._answer
        return answer is not None and owner.judges and answer.meets(half, guarded)

    def _count(self, owner: CacheOwner, tokens: int) -> None:
        """A forward of so many tokens was seen. Within `generate()` its answer has the right number."""
        answer = self._answer
        if answer is None:
            owner.witness.computed(tokens)
        else:
            answer.seen += tokens

    def _not_guarded(self, owner: CacheOwner, model: Any, given: Mapping[str, Any], tokens: int) -> None:
        """A forward had no cache to follow. Reported once for each sort of model, if there should have been one."""
        other = next((type(value).__name__ for value in given.values() if caches.is_cache(value)), None)
        answering = self._answer is not None
        if other is None and not (answering and given.get("use_cache") is not False):
            owner.witness.dropped(tokens)
            return
        owner.witness.explain("no_cache", tokens)
        reason = (
            f"no cache was found among its arguments ({', '.join(sorted(given))}) nor in what it gives"
            if other is None
            else f"its cache is a {other}, which keeps tokens in a way of its own"
        )
        owner.tell_unguarded(model, f"{reason}; what it keeps is not guarded")

    def _wrap_generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            owner = self._owner(model)
            outer = self._answer
            if owner is None or outer is not None:
                return original(model, *args, **kwargs)
            self._calls.answer = answer = Answer.begin(args, kwargs)
            self._answering += 1
            output = None
            try:
                output = original(model, *args, **kwargs)
            finally:
                self._calls.answer = None
                self._answering -= 1
                owner.witness.computed(answer.tokens(output))
            if owner.withholds:
                for half, guarded in answer.halves:
                    guarded.compare(half)
            self._generated(owner, model)
            _withhold(answer.halves)
            return output

        return generate

    def _generated(self, owner: CacheOwner, model: Any) -> None:
        owner.between()
        for owned_by, guarded in list(self._followed.values()):
            if owned_by is owner:
                guarded.drain()
        if not self._answering:
            owner.settle(model)
        self._raise_late()

    def _wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_inputs_for_generation(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = original(model, input_ids, *args, **kwargs)
            # A model with a function of its own may feed other tokens than these.
            if type(model).prepare_inputs_for_generation is prepare_inputs_for_generation and self._owner(model):
                cache = caches.guarded(caches.among(inputs.values()))
                if cache is not None and isinstance(input_ids, Tensor):
                    mask = kwargs.get("attention_mask")
                    self._histories[cache] = Told(input_ids, mask)
            return inputs

        return prepare_inputs_for_generation

    def _wrap_changing(self, moves: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def change(cache: Any, *args: Any, **kwargs: Any) -> Any:
            _, guarded = self._followed.get(cache, (None, None))
            if guarded is not None:
                guarded.changing(moves)
            return original(cache, *args, **kwargs)

        return change

    def _cache_changed(
        self, told: Callable[[GuardedCache, Any, Any], None], output: Any, cache: Any, *args: Any, **kwargs: Any
    ) -> None:
        _, guarded = self._followed.get(cache, (None, None))
        if guarded is not None:
            told(guarded, cache, next(iter((*args, *kwargs.values())), None))

    def _history(self, cache: Any) -> Told | None:
        inner = caches.guarded(cache)
        return None if inner is None else self._histories.pop(inner, None)

    def _guard(self, owner: CacheOwner, model: Any, cache: Any) -> list[tuple[Any, GuardedCache]]:
        """``cache`` with its guard; with an encoder's states beside, the half for these with its own. Empty where there
        is nothing to follow."""
        inner = caches.guarded(cache)
        if inner is None:
            return []
        own = self._follow(owner, inner, lambda: owner.open_cache(model))
        cross = caches.cross(cache)
        if cross is None:
            return [(cache, own)]
        return [(cache, own), (cross, self._follow(owner, cross, lambda: owner.open_cross(model, cache, own)))]

    def _follow(self, owner: CacheOwner, cache: Any, begin: Callable[[], GuardedCache]) -> GuardedCache:
        """The guard of ``cache``, begun where there is none yet."""
        known = self._followed.get(cache)
        if known is not None:
            return known[1]
        guarded = begin()
        with self._lock:
            self._followed[cache] = owner, guarded
        finalize(cache, self._end, owner, guarded).atexit = False
        return guarded

    def _end(self, owner: CacheOwner, guarded: GuardedCache) -> None:
        """The cache is gone. Runs whenever Python frees it, where nothing can be raised: `_raise_late` does so."""
        try:
            owner.retire_cache(guarded)
        except ViolationError as error:
            self._late.append(error)

    def _raise_late(self) -> None:
        if self._late:
            error = self._late[0]
            self._late.clear()
            raise error


def _withhold(halves: Sequence[tuple[Any, GuardedCache]]) -> None:
    """Raises in the place of what was computed from a cache that a verdict is about."""
    errors = [error for _, guarded in halves if (error := guarded.withheld()) is not None]
    if errors:
        raise errors[0]


def _arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if not args:
        return kwargs
    names = [name for name in inspect.signature(model.forward).parameters if name != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _parts(output: Any) -> Iterable[Any]:
    """A model's outputs, including a cache made by the model itself."""
    if isinstance(output, Mapping):
        return output.values()
    return output if isinstance(output, tuple) else ()


GENERATE = GenerateHooks()
"""The only one in the process: the engine's classes exist once."""
