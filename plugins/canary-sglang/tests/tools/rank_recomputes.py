"""A plugin of SGLang's own for `engines.ranks_script`: has requests computed again on one rank's word, and breaks one
rank, by nothing but SGLang and torch.

``RANKS_FOLDER`` has ``control``, a word and a number of a rank:

- ``ask``: this rank alone asks for all that runs, and writes the answers down.
- ``scale``: attention of layer 1 is scaled wrongly there, until ``control`` is another.
- ``off``: Canary ends there, in a batch with an internal request between two chunks if there is one; ``fail``: by an
  error of its own.
- ``kill``: this rank ends in such a batch.
- ``abort``, ``retract`` (on both ranks): a client aborts a request, or there is no room for its next token, while it is
  computed again.

It gets ``answers``, a line for each of the ranks' answers.
"""

import json
import os
import signal
from typing import Any

import torch

from tools.rank_flips import FOLDER, control

DECODES = 34
"""Decodes of a phase before it begins: enough tokens for a verdict."""


class Rank:
    """One rank's plugin. ``scheduler``: SGLang's."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.number = torch.distributed.get_rank()
        self._phase, self._decodes, self._done = "", 0, False
        self._asked: list[Any] = []

    def before(self, batch: Any) -> None:
        """Before each batch."""
        wanted, _, rank = control().partition(" ")
        if control() != self._phase:
            self._phase, self._decodes, self._done = control(), 0, False
        self._set_scale(1.05 if wanted == "scale" and rank == str(self.number) else 1.0)
        self._decodes += batch.forward_mode.is_decode()
        if self._decodes < DECODES or self._done:
            return
        here = rank in ("", str(self.number))
        if wanted == "ask":
            self._done = True
            if here:
                self._asked.append(verifier().ask())
        elif self._in_the_middle() and hasattr(self, f"_{wanted}"):
            self._done = True
            if here:
                getattr(self, f"_{wanted}")()

    def tell(self) -> None:
        """Writes down what was answered."""
        for asked in [one for one in self._asked if one.done()]:
            self._asked.remove(asked)
            error = asked.exception()
            answers = [] if error is not None else [answer.to_dict() for answer in asked.result()]
            with FOLDER.joinpath("answers").open("a") as file:
                file.write(json.dumps({"rank": self.number, "error": error and str(error), "answers": answers}) + "\n")

    def _in_the_middle(self) -> bool:
        """Whether an internal request is between two chunks."""
        chunked = self.scheduler.chunked_req
        return chunked is not None and chunked.rid.startswith("canary-recompute")

    def _set_scale(self, factor: float) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        model = self.scheduler.tp_worker.model_runner.model
        layer = [module for module in model.modules() if isinstance(module, RadixAttention)][1]
        layer.scaling = factor * layer.head_dim**-0.5

    def _off(self) -> None:
        from canary_core import plugins

        plugins.uninstall()

    def _fail(self) -> None:
        from canary_sglang.hooks import HOOKS

        assert HOOKS.session is not None
        with HOOKS.session.canary.guard("a test"):
            raise RuntimeError("an error of Canary's own")

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _abort(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        running = sorted(str(one.rid) for one in self.scheduler.running_batch.reqs)
        users = [name for name in running if not name.startswith("canary")]
        self.scheduler.abort_request(AbortReq(rid=users[0]))

    def _retract(self) -> None:
        batch = self.scheduler.running_batch
        enough, first = type(batch).check_decode_mem, True

        def full_at_first(*args: Any, **kwargs: Any) -> bool:
            nonlocal first
            full, first = first, False
            return False if full else bool(enough(batch, *args, **kwargs))

        batch.check_decode_mem = full_at_first


def verifier() -> Any:
    """That of Canary in this process."""
    from canary_sglang.hooks import HOOKS

    assert HOOKS.session is not None
    return HOOKS.session.canary.verifier


def install() -> None:
    """The plugin, which each of SGLang's processes runs before anything else."""
    from engines.models import randomize
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    load, run, turn = ModelRunner.load_model, Scheduler.run_batch, Scheduler.get_next_batch_to_run
    ranks: dict[int, Rank] = {}

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        done = load(runner, *args, **kwargs)
        randomize(runner.model)
        return done

    def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        ranks.setdefault(id(scheduler), Rank(scheduler)).before(batch)
        return run(scheduler, batch, *args, **kwargs)

    def get_next_batch_to_run(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if id(scheduler) in ranks:
            ranks[id(scheduler)].tell()
        return turn(scheduler, *args, **kwargs)

    ModelRunner.load_model = load_model
    Scheduler.run_batch, Scheduler.get_next_batch_to_run = run_batch, get_next_batch_to_run
