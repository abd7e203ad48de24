"""All kinds of findings, gathered from the files of this folder, one for each `Kind`."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from canary_core.errors import CanaryError
from canary_core.records import Kind

if TYPE_CHECKING:
    from canary_core.kinds.classes import Class
    from canary_core.kinds.finding_kind import FindingKind
    from canary_core.kinds.links import Link


@cache
def load() -> "Mapping[Kind, FindingKind]":
    """All kinds, from causes to effects. Called at the start of a Canary, so that no finding has to wait for files.
    Raises `CanaryError` where a kind has no file, or a wrong one."""
    kinds = [_read(kind) for kind in Kind]
    places = [kind.place for kind in kinds]
    for kind in kinds:
        if places.count(kind.place) > 1:
            raise CanaryError(f"the place {kind.place} of {kind.name} is that of another kind, too; take a free one")
    return {kind.kind: kind for kind in sorted(kinds, key=lambda kind: kind.place)}


def of(kind: Kind) -> "FindingKind":
    """The `FindingKind` of ``kind``."""
    return load()[kind]


@cache
def links(one: Kind, other: Kind) -> "frozenset[Link]":
    """Possible links between two findings, whichever is the cause: findings of one read come in no causal order."""
    return frozenset(of(one).brings.get(other, frozenset()) | of(other).brings.get(one, frozenset()))


@cache
def classes() -> "Mapping[str, Class]":
    """All classes of bugs, by name."""
    from canary_core.kinds.classes import UNKNOWN

    named = {what.name: what for kind in load().values() for what in kind.classes}
    return {**named, UNKNOWN.name: UNKNOWN}


def _read(kind: Kind) -> "FindingKind":
    # Not above: an import of canary_core loads no kinds and nothing of them, a Canary does.
    from canary_core.kinds.finding_kind import FindingKind, always

    name = f"canary_core.kinds.{kind.name.lower()}"
    try:
        found = import_module(name).KIND
    except (ModuleNotFoundError, AttributeError) as error:
        raise CanaryError(f"the kind {kind.name} needs a file {name} with a FindingKind named KIND: {error}") from error
    if not isinstance(found, FindingKind) or found.kind is not kind or found.sentences[-1].when is not always:
        raise CanaryError(f"KIND of {name} is no FindingKind of {kind.name} whose last sentence always holds")
    return found
