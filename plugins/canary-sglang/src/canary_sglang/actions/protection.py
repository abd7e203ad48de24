"""`Protection`: acts on verdicts before the scheduler takes the tokens of a step (``CANARY_ON_VIOLATION=protect``)."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from canary_adapters import Tries, leaked
from canary_core import Canary, CanaryConfig, RegionKind, Verdict, Violation, Writers, hookimpl
from canary_sglang.actions.quarantine import Quarantine, Slots, States, about, message
from canary_sglang.actions.ranks import Ranks
from canary_sglang.actions.suspect import Suspect
from canary_sglang.compat import caches, disaggregated, retraction, schedulers
from canary_sglang.pools import mamba

LOST = Suspect("", -1, True, -1, "findings_lost", ())
"""Findings were lost: any KV may be wrong."""


class Case(NamedTuple):
    """A finding to act on. stands: as in `Verdict`."""

    suspect: Suspect
    stands: bool


class Protection(Quarantine):
    """A `Quarantine` whose requests get no token of the step with a finding. A request loses its slots, as in SGLang's
    own retraction, and its KV does not enter the prefix cache. A request without tokens, or whose tokens are right
    (`Verdict.stands`), is queued again and keeps the tokens; any other ends with a retryable error.
    Nodes with the slot leave the prefix cache with all below.

    A finding may name the slot of a recurrent state. The slot's request is taken, however often the state was rewritten
    since, out of itself. So is a request on the node of a wrong checkpoint, for the node to leave: tokens computed from
    the checkpoint before the change stand.

    Acts right before the result of the step is taken. The overlap scheduler has made one batch more by then. On a CPU
    the verdict is there before that, and requests are taken before the next batch is made. On a GPU it comes with the
    tokens, so the next batch has such requests, too: their rows are passed by. They are queued again when no batch
    under way has them. Where neither is possible, acts as a `Quarantine`.

    The stages of a pipeline have several batches on their way. There a batch keeps the rows of withdrawn requests until
    the result has been taken, and the requests are queued after that.

    Of several ranks that schedule together each finds the wrong slots of one shard, and a single one gives out tokens.
    So every rank tells the others after every batch whether a verdict is there (`issued`; on a GPU when the tokens have
    come), and looks at the answers before the result is taken, all at the same place of the scheduler's loop. Only
    after a verdict do ranks exchange the findings, and act on the same set in the same order.

    A PD decode engine's requests always end, since it can't compute their prompts. A PD prefill engine's end as those
    whose transfer fails, and nothing more of them is sent.
    """

    withholds = True

    def __init__(
        self,
        config: CanaryConfig,
        canaries: Callable[[], Iterable[Canary]],
        together: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(config, canaries, together)
        self._state_interval = config.state_interval
        self._protects: bool | None = None
        self._cases: list[Case] = []
        self._tries = Tries[Any]("protect", WeakKeyDictionary())
        self._again: list[Any] = []
        # Whether verdicts come with the tokens, after the next batch has begun.
        self._late = False
        self._flying: deque[Any] = deque()
        # Taken from the scheduler, and perhaps in a batch still.
        self._gone: list[Any] = []
        self._held: list[Any] = []

    @hookimpl
    def canary_verdict(self, verdict: Verdict) -> None:
        """Keeps the verdict until the scheduler goes on."""
        suspect = LOST if verdict.finding is None else Suspect.of(verdict.finding, at_once=True)
        if suspect == LOST or (suspect is not None and self._canary(suspect.region) is not None):
            # The bytes of a state are compared before each read only where each forward's are.
            unseen = _is_wrong_state(suspect) and self._state_interval > 1
            self._cases.append(Case(suspect, verdict.stands and not unseen))

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """See `Quarantine`."""
        if not self._protects:
            super().canary_violation(violation)

    def begin(self, scheduler: Any) -> Ranks:
        """See `Quarantine`. The first call also reports an engine where tokens can't be withheld."""
        ranks = super().begin(scheduler)
        if self._protects is None:
            reason = self._refusal(scheduler)
            self._protects = not self._off and reason is None
            self._late = schedulers.on_gpu(scheduler) and not schedulers.is_staged(scheduler)
            if reason is not None and not self._off:
                instead = "CANARY_ON_VIOLATION=protect does what quarantine does here"
                if disaggregated.side(scheduler) != "null":
                    self._off, instead = True, "nothing is aborted or evicted with PD disaggregation then"
                self._tell("quarantine_failed", {"reason": f"{reason}; {instead}"}, "warning")
        return ranks

    def issued(self, batch: Any) -> None:
        """The scheduler has run ``batch``, and its result is not taken yet. Every rank must call this, even with Canary
        off. Does not wait."""
        if not self._late and (ranks := self._ask()) is not None and ranks.staged:
            self._flying.append(batch)

    def _ask(self) -> Ranks | None:
        """Begins a round of the ranks, if there are several, and returns them."""
        if not self._protects or self._ranks is None or self._ranks.size == 1:
            return None
        self._ranks.begin_round(bool(self._cases), self._present)
        return self._ranks

    def turn(self, scheduler: Any) -> None:
        """See `Quarantine`."""
        if not self._protects:
            self._cases.clear()
            super().turn(scheduler)
            return
        self._turn += 1
        if schedulers.is_staged(scheduler):
            return
        taken = self._withhold(scheduler, scheduler.last_batch)
        gone, self._gone = self._gone, []
        retraction.leave_out([*taken, *gone], scheduler.running_batch, scheduler.last_batch)
        self._queue_again(scheduler)

    def beginning(self, begin: Callable[..., Any], processor: Any, batch: Any) -> Any:
        """A PD decode engine begins the requests of ``batch``. First tokens of the prefill engine are kept back until
        the first forward here, with the comparison of arrived KV, was judged."""
        if self._protects is False:
            return begin(processor, batch)
        return disaggregated.begin_holding(begin, processor, batch, self._held)

    def taking(self, take: Callable[[], Any], scheduler: Any, batch: Any, result: Any) -> Any:
        """Runs ``take``: the scheduler takes the ``result`` of ``batch``."""
        if not self._protects:
            self._held = disaggregated.give_out(scheduler, batch, self._held)
            return take()
        if self._late:
            self._await(scheduler, result)
        if self._flying:
            self._flying.popleft()
        taken = [] if scheduler.enable_overlap and not self._late else self._withhold(scheduler, batch)
        self._held = disaggregated.give_out(scheduler, batch, self._held)
        gone = [*self._gone, *taken]
        with retraction.passing_by_retracted(scheduler) if gone else nullcontext():
            done = take()
        if scheduler.enable_overlap:
            # What samples for the next batch still needs its rows.
            self._gone = gone
        else:
            flying = set(map(id, self._flying))
            rest = [one for one in schedulers.microbatches(scheduler) if id(one) not in flying]
            running = [] if id(scheduler.running_batch) in flying else [scheduler.running_batch]
            retraction.leave_out(gone, *running, *rest, batch)
            self._gone = [request for request in gone if any(request in one.reqs for one in self._flying)]
        self._queue_again(scheduler)
        return done

    def _await(self, scheduler: Any, result: Any) -> None:
        """Waits for the tokens of ``result``, as the scheduler does next, and so for what was found before them."""
        schedulers.await_tokens(scheduler, result)
        for canary in self._canaries():
            canary.step.reader.judge()
        self._ask()

    def _refusal(self, scheduler: Any) -> str | None:
        """Why tokens can't be withheld, None if they can."""
        if not self._evicts:
            return "copies of KV may come back"
        if caches.keeps_host_copies(scheduler) and not all(c.config.transfer_records for c in self._canaries()):
            return "KV comes back from host memory without records (CANARY_TRANSFER_RECORDS)"
        if disaggregated.side(scheduler) != "null" and caches.keeps_host_copies(scheduler):
            return "KV comes back from host memory"
        kinds = {region.kind for canary in self._canaries() for region in canary.regions.values()}
        if RegionKind.RING in kinds:
            return "withholding was not shown with the rings of DeepSeek-V4's compressors"
        return retraction.withholding_refusal(scheduler, RegionKind.STATE in kinds)

    def _withhold(self, scheduler: Any, batch: Any) -> list[Any]:
        """Acts on the verdicts so far. ``batch``: the one whose result is taken next. Returns the requests taken from
        the scheduler, still in the batches. Raises only if the process group fails."""
        cases = self._agreed()
        taken: list[Any] = []
        try:
            for request, own in self._concerned(scheduler, batch, cases):
                if self._late and request in retraction.made(scheduler):
                    # A chunk of its prompt is about to run. Nothing is given out for it before the next turn.
                    self._cases += own
                else:
                    self._take(scheduler, request, own, taken)
            self._evict(scheduler, cases)
        except Exception as error:
            # In log mode the engine goes on whatever happens.
            self._tell("quarantine_failed", {"reason": leaked(error)}, "error")
        return taken

    def _agreed(self) -> list[Case]:
        """The verdicts to act on now, the same on all ranks. With several ranks none before they were asked about the
        last batch; then waits for the ranks that have not issued it yet."""
        ranks = self._ranks
        if ranks is None or ranks.size == 1:
            return self._present()
        return ranks.end_round(self._present) or []

    def _present(self) -> list[Case]:
        """This rank's own verdicts so far, but for slots rewritten since and right by now. Never raises: other ranks
        wait."""
        cases, self._cases = list(dict.fromkeys(self._cases)), []
        try:
            return [case for case in cases if _stays(case.suspect) or not self._is_gone(case.suspect)]
        except Exception as error:
            self._tell("quarantine_failed", {"reason": repr(error)}, "error")
            return cases

    def _concerned(self, scheduler: Any, batch: Any, cases: list[Case]) -> list[tuple[Any, list[Case]]]:
        """The running requests with wrong KV, each with the cases."""
        places = self._places(scheduler, [case.suspect for case in cases])
        spoiled = self._places(scheduler, [case.suspect for case in cases if case.suspect.spoiled])
        found = []
        for request in schedulers.running_requests(scheduler, batch) if cases else ():
            name, (row, _) = Writers.told(request.rid), schedulers.table_row(scheduler, request)
            if row is None:
                continue
            held = {region: place.of(request) for region, (place, _) in places.items()}
            own = [
                case
                for case in cases
                if case.suspect == LOST
                or name in case.suspect.requests
                or (_is_everyones(case.suspect) and case.suspect.slot in held.get(case.suspect.region, ()))
            ]
            own = own or [Case(suspects[0], True) for place, suspects in spoiled.values() if place.beside(request)]
            found.append((request, own))
        for one in (batch, *self._flying):
            if retraction.counts_logprobs(one) and any(own and request in one.reqs for request, own in found):
                # SGLang would give the rows after one passed by the log-probabilities of its prompt.
                beside = [Case(cases[0].suspect, True)]
                found = [(request, own or (beside if request in one.reqs else own)) for request, own in found]
        return [(request, own) for request, own in found if own]

    def _places(self, scheduler: Any, suspects: Iterable[Suspect]) -> "dict[str, tuple[Slots | States, list[Suspect]]]":
        """By region the place of the slots of ``suspects``, and the suspects, where requests or the prefix cache have
        such slots."""
        by_region: dict[str, list[Suspect]] = {}
        for suspect in suspects:
            if suspect.slot >= 0:
                by_region.setdefault(suspect.region, []).append(suspect)
        places = {name: (self._place(scheduler, *own), own) for name, own in by_region.items()}
        return {name: (place, own) for name, (place, own) in places.items() if place is not None}

    def _take(self, scheduler: Any, request: Any, own: list[Case], taken: list[Any]) -> None:
        suspect = own[0].suspect
        if disaggregated.side(scheduler) == "prefill":
            if disaggregated.fail(scheduler, request, schedulers.corrupted(message(suspect))):
                self._tell("aborted", {"request": request.rid, **about(suspect)}, "error")
            return
        if not retraction.may_be_retracted(request):
            self._abort(scheduler, request, suspect)
            return
        stands = all(case.stands for case in own) or not request.output_ids
        again = self._tries.again(request, stands) and retraction.may_go_on(scheduler, request)
        retraction.retract(scheduler, request)
        taken.append(request)
        if again:
            self._again.append(request)
            self._tell("recomputed", {"request": request.rid, **about(suspect)}, "warning")
        else:
            retraction.end(scheduler, request, message(suspect))
            self._tell("aborted", {"request": request.rid, **about(suspect)}, "error")

    def _evict(self, scheduler: Any, cases: list[Case]) -> None:
        """Takes nodes with a wrong slot from the prefix cache, and all nodes below."""
        if any(case.suspect == LOST for case in cases):
            evicted = caches.evict_nodes(scheduler.tree_cache, lambda slots: torch.ones_like(slots, dtype=torch.bool))
            self._tell_evicted(LOST, evicted)
            return
        for place, suspects in self._places(scheduler, [case.suspect for case in cases]).values():
            if not place.cached():
                continue
            self._tell_evicted(suspects[0], place.evict())
            if place.cached():
                # A request that could not be retracted has it.
                again = [suspect for suspect in suspects if suspect.spoiled and suspect.written >= 0]
                self._cases += [Case(replace(suspect, requests=()), False) for suspect in again]

    def _queue_again(self, scheduler: Any) -> None:
        for request in list(self._again):
            if request not in self._gone and not retraction.under_way(scheduler, request):
                self._again.remove(request)
                retraction.queue(scheduler, request)


def _is_everyones(suspect: Suspect) -> bool:
    """Whether the slot is wrong for every reader."""
    return suspect.slot >= 0 and (suspect.spoiled or not suspect.requests)


def _is_wrong_state(suspect: Suspect) -> bool:
    return suspect.spoiled and suspect.plain_region == mamba.REGION


def _stays(suspect: Suspect) -> bool:
    """Whether a rewritten slot is wrong still: a state is rewritten out of itself."""
    return suspect == LOST or _is_wrong_state(suspect)
