"""Wrong plugins: each mutation breaks the toy engine's plugin in one way that an author might."""

from dataclasses import dataclass

from conformance.mutations.batch import BATCH
from conformance.mutations.changes import Break
from conformance.mutations.events import EVENTS
from conformance.mutations.hooks import HOOKS
from conformance.mutations.pool import POOL


@dataclass(frozen=True)
class Mutation:
    """One bug: its name, what breaks the plugin, and the part that the suite must blame."""

    name: str
    apply: Break
    part: str


PARTS = {"PoolAdapter": POOL, "BatchAdapter": BATCH, "hooks": HOOKS, "slot events": EVENTS}
"""Every bug by its name, by the part of the plugin that has it."""

MUTATIONS = tuple(Mutation(name, apply, part) for part, bugs in PARTS.items() for name, apply in bugs.items())
