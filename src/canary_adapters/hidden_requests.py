"""`HiddenRequests`: a KV connector of a scheduler like vLLM's, without its internal requests."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from canary_adapters.internal_requests import is_internal
from canary_core import Patches

UNDER_WAY = 16
"""Batches of one scheduler that may be under way at once, with ends of requests that the connector will report."""

ANSWERS: Mapping[str, Any] = {
    "on_new_request": None,
    "get_num_new_matched_tokens": (0, False),
    "get_loaded_kv_cache_group_ids": (),
    "update_state_after_alloc": None,
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "register_finished_partial_tail": False,
}
"""Functions of the connector with a request as the first argument, and the results for an internal request: nothing is
brought, and the blocks may be freed."""


class HiddenRequests:
    """Keeps internal requests from the connector of ``scheduler``, from `wrap` to `close`: no question and no message
    about an internal request, and outputs of the scheduler without these.

    `OffloadingConnector` reads blocks of ended requests until another request gets the block: blocks of internal
    requests are still told.

    sheltered: gives a context of code of ours on the scheduler's thread, as of `Recomputes.sheltered`. Where an output
    can't be read, the connector sees it as it is.
    """

    def __init__(self, scheduler: Any, sheltered: Callable[[], AbstractContextManager[Any]]) -> None:
        self._scheduler, self._sheltered = scheduler, sheltered
        self._connector = getattr(scheduler, "connector", None)
        self._patches = Patches()
        self._hid: deque[bool] = deque(maxlen=UNDER_WAY)

    def wrap(self) -> None:
        """Before the first internal request."""
        if self._connector is None or self._patches.done:
            return
        wraps = {name: _answers(answer) for name, answer in ANSWERS.items()}
        wraps |= {"build_connector_meta": self._builds, "update_connector_output": self._reports}
        for name, make in wraps.items():
            if hasattr(self._connector, name):
                self._patches.wrap(self._connector, name, make)

    def close(self) -> None:
        """Restores the connector, unless the end of an internal request is still to be reported."""
        if not any(self._hid) and not any(map(is_internal, self._scheduler.finished_req_ids)):
            self._patches.undo()

    def _builds(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def build(output: Any, *args: Any, **kwargs: Any) -> Any:
            kept: dict[str, Any] = {}
            with self._sheltered():
                kept = self._kept(output)
            if not kept:
                return original(output, *args, **kwargs)
            with _replaced(output, kept):
                return original(output, *args, **kwargs)

        return build

    def _kept(self, output: Any) -> dict[str, Any]:
        """Fields of the scheduler's output without internal requests; none where there are none of these."""
        names = {*filter(is_internal, output.num_scheduled_tokens), *filter(is_internal, output.finished_req_ids)}
        self._hid.append(bool(names))
        if not names:
            return {}
        kept = _without(output, names)
        self._fence(output, names)
        self._uncount(output, names)
        return kept

    def _reports(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Connectors of the workers are told of each end of a request, and some report the end at once."""

        def reported(output: Any, *args: Any, **kwargs: Any) -> Any:
            with self._sheltered():
                for names in (output.finished_sending, output.finished_recving):
                    if names:
                        names -= {*filter(is_internal, names)}
            return original(output, *args, **kwargs)

        return reported

    def _fence(self, output: Any, names: set[str]) -> None:
        """Adds the blocks handed out to internal requests to those of the others."""
        for connector in (self._connector, *getattr(self._connector, "_connectors", ())):
            taken = getattr(getattr(connector, "connector_scheduler", None), "_current_batch_allocated_block_ids", None)
            if taken is not None:
                taken.update(_handed_out(output, names))

    def _uncount(self, output: Any, names: set[str]) -> None:
        """Takes the lookups of internal requests out of the scheduler's statistics of the connector."""
        stats = getattr(self._scheduler, "connector_prefix_cache_stats", None)
        begun = [new for new in output.scheduled_new_reqs if new.req_id in names]
        if stats is not None:
            stats.requests -= len(begun)
            stats.queries -= sum(len(new.prompt_token_ids) for new in begun)


def _answers(answer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(request: Any, *args: Any, **kwargs: Any) -> Any:
            return answer if is_internal(request.request_id) else original(request, *args, **kwargs)

        return asked

    return make


def _handed_out(output: Any, names: set[str]) -> Iterator[int]:
    cached = output.scheduled_cached_reqs
    given = [new.block_ids for new in output.scheduled_new_reqs if new.req_id in names]
    given += [more for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True) if more and name in names]
    return (block for groups in given for blocks in groups for block in blocks if block)


def _without(output: Any, names: set[str]) -> dict[str, Any]:
    """Fields of the scheduler's output without ``names``."""
    given = vars(output)
    kept = _drop(given, names)
    kept["scheduled_new_reqs"] = [new for new in output.scheduled_new_reqs if new.req_id not in names]
    kept["total_num_scheduled_tokens"] = sum(kept["num_scheduled_tokens"].values())
    cached, state = output.scheduled_cached_reqs, given.get("kv_connector_block_state")
    rows = [row for row, name in enumerate(cached.req_ids) if name not in names]
    kept["scheduled_cached_reqs"] = _copy(cached, _drop(vars(cached), names) | _take(vars(cached), rows))
    if state is not None:
        kept["kv_connector_block_state"] = _copy(state, _drop(vars(state), names))
    return kept


@contextmanager
def _replaced(output: Any, fields: Mapping[str, Any]) -> Iterator[None]:
    """``output`` has other ``fields`` for a while."""
    before = {name: getattr(output, name) for name in fields}
    vars(output).update(fields)
    try:
        yield
    finally:
        vars(output).update(before)


def _drop(fields: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Those of ``fields`` that are sets or mappings of requests, without ``names``."""
    kept: dict[str, Any] = {}
    for field, value in fields.items():
        if isinstance(value, (set, frozenset)):
            kept[field] = value - names
        elif isinstance(value, dict):
            kept[field] = {name: one for name, one in value.items() if name not in names}
    return kept


def _take(fields: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Lists with an element for each request: the elements of ``rows``."""
    count = len(fields["req_ids"])
    lists = {field: value for field, value in fields.items() if isinstance(value, list) and len(value) == count}
    return {field: [value[row] for row in rows] for field, value in lists.items()}


def _copy(value: Any, fields: Mapping[str, Any]) -> Any:
    copied = copy.copy(value)
    vars(copied).update(fields)
    return copied
