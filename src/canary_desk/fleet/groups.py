"""`Group`: incidents of many engines with one probable cause, by their parts in common."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from canary_desk.fleet.sightings import Sighting
from canary_desk.incidents.signature import NONE

LEAST, LEAST_SHARE = 3, 0.2
"""Least number, and least share, of incidents of one sort that a value must have in common to part them."""

PARTS: dict[str, Callable[[Sighting], str]] = {
    "peer or store": lambda s: s.signature.origin,
    "content": lambda s: s.content,
    "GPU": lambda s: s.gpu,
    "layer": lambda s: s.signature.layers,
    "release": lambda s: s.release,
}
"""Parts by which incidents of one sort are told apart, the most telling first."""

COMMON_SHARE = 0.8
"""Least share of a group's incidents with one value for the value to be told as common."""


@dataclass(frozen=True, slots=True)
class Group:
    """Incidents of one kind and diagnosis with one probable cause. ``common``: values in common by part, with their
    share of the group; ``verdict``: a sentence."""

    sightings: tuple[Sighting, ...]
    common: dict[str, tuple[str, float]]
    verdict: str

    @property
    def name(self) -> str:
        """Kind and diagnosis."""
        sort = self.sightings[0].signature
        return sort.kind if sort.diagnosis == NONE else f"{sort.kind}, {sort.diagnosis}"

    @property
    def count(self) -> int:
        """How many incidents."""
        return sum(s.count for s in self.sightings)

    @property
    def since(self) -> str:
        """When the first one was written; empty where unknown."""
        return min((s.written for s in self.sightings if s.written), default="")

    @property
    def until(self) -> str:
        """When the last one was."""
        return max((s.written for s in self.sightings), default="")

    @property
    def requests(self) -> int:
        """How many different requests are named, of each engine."""
        return len({(s.engine, name) for s in self.sightings for name in s.requests})

    def values(self, part: str) -> list[tuple[str, int]]:
        """Values of a part, or of ``engine`` or ``rank``, with numbers of incidents, the most frequent first."""
        read = PARTS.get(part) or (lambda s: str(getattr(s, part)))
        return [
            (value, number) for value, number in _counted(self.sightings, read).most_common() if value not in ("", NONE)
        ]


def groups(sightings: Iterable[Sighting]) -> list[Group]:
    """The groups, largest first; self-tests are left out."""
    real = [s for s in sightings if not s.self_test]
    fleet = {part: {read(s) for s in real} - {"", NONE} for part, read in PARTS.items()}
    sorts: dict[tuple[str, str], list[Sighting]] = {}
    for s in real:
        sorts.setdefault((s.signature.kind, s.signature.diagnosis), []).append(s)
    found = [_group(each, fleet) for same in sorts.values() for each in _parted(same, fleet)]
    return sorted(found, key=lambda g: (-g.count, g.name))


def _counted(sightings: Iterable[Sighting], read: Callable[[Sighting], str]) -> Counter[str]:
    """Numbers of incidents by value of ``read``."""
    counts = Counter[str]()
    for s in sightings:
        counts[read(s)] += s.count
    return counts


def _parted(same: Sequence[Sighting], fleet: dict[str, set[str]]) -> list[list[Sighting]]:
    """Incidents of one sort, parted by values that a notable share of them has in common."""
    rest, out = list(same), []
    while rest:
        weight = sum(s.count for s in rest)
        best: tuple[int, Callable[[Sighting], str], str] | None = None
        for part, read in PARTS.items():
            known = len(fleet[part])
            for value, number in _counted(rest, read).items():
                # One of few values is shared by chance; the only one of all tells nothing apart.
                notable = number >= LEAST and number > weight * max(LEAST_SHARE, min(2 / max(known, 1), 0.99))
                if value in ("", NONE) or known < 2 or not notable:
                    continue
                if best is None or number > best[0]:
                    best = number, read, value
        if best is None:
            out.append(rest)
            break
        _, read, value = best
        out.append([s for s in rest if read(s) == value])
        rest = [s for s in rest if read(s) != value]
    return out


def _group(sightings: Sequence[Sighting], fleet: dict[str, set[str]]) -> Group:
    count, common = sum(s.count for s in sightings), {}
    for part, read in PARTS.items():
        value, number = _counted(sightings, read).most_common(1)[0]
        if value not in ("", NONE) and number >= COMMON_SHARE * count:
            common[part] = value, number / count
    return Group(tuple(sightings), common, _verdict(sightings, common, fleet))


def _verdict(sightings: Sequence[Sighting], common: dict[str, tuple[str, float]], fleet: dict[str, set[str]]) -> str:
    gpus = {s.gpu for s in sightings}
    if sum(s.count for s in sightings) < LEAST:
        return "too few to tell what they have in common"
    if "peer or store" in common and len(gpus) > 1:
        return f"what {common['peer or store'][0]} brings is wrong, on {len(gpus)} GPUs: look at it first"
    if "GPU" in common and len(fleet["GPU"]) > 1:
        alike = ", always in the same layer" if "layer" in common and len(fleet["layer"]) > 1 else ", in any layer"
        return f"it is one GPU again and again{alike}: take it out, test its memory"
    if "content" in common and len(gpus) > 1:
        return f"the same wrong bytes on {len(gpus)} GPUs: they have one source"
    text = f"the same layer on {len(gpus)} GPUs" if "layer" in common else f"spread over {len(gpus)} GPUs"
    if "release" in common and len(fleet["release"]) > 1:
        return f"{text}, with {common['release'][0]} only: look at that release"
    return f"{text}: look at software rather than at one machine"
