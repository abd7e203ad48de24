"""`of_ranks`: whether one rank alone reported an incident, by the neighbouring bundles."""

from calendar import timegm
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from time import strptime
from typing import Any

from canary_core.wording import joined
from canary_desk.incidents.bundle import MOST_JSON_BYTES, PREFIX, Bundle, content, parsed

NEAR_S = 60
"""Largest distance in seconds between two bundles of one incident."""

MOST_BUNDLES = 500
"""Of a directory; more are not looked at."""


Who = tuple[int, str]
"""A rank, and the machine if different from the bundle's own."""


def of_ranks(bundle: Bundle) -> str:
    """Sentence about the bundles of other ranks in the same directory; empty for an engine of one rank. The same kind
    at the same position of the same request is the same incident."""
    mine, count = int(bundle.about.get("rank", 0)), int(bundle.about.get("ranks", 1))
    if count < 2:
        return ""
    told = list(_beside(bundle))
    same = {who for who, root in told if _place(root) == _place(bundle.incident["root"])}
    if same:
        return (
            f"{_named(same)} told the same beside rank {mine} of {count}: look at what ranks have in common, such as "
            "the scheduler and the tables, before the memory of one device"
        )
    others = f"; {_named({who for who, _ in told})} told something else at that time" if told else ""
    return (
        f"of {count} ranks only rank {mine} told it here{others}: look at that rank's own memory, copies and "
        "transfers, if all ranks write to this directory"
    )


def _beside(bundle: Bundle) -> Iterator[tuple[Who, Mapping[str, Any]]]:
    """Rank, machine and first finding of bundles of other ranks that serve the same model in the same replica, of about
    the same time. Unreadable ones are passed over."""
    mine = bundle.about
    written = _seconds(bundle.manifest)
    for path in sorted(bundle.path.resolve().parent.glob(f"{PREFIX}*"))[:MOST_BUNDLES]:
        try:
            manifest, about, incident = (_json(path / f"{name}.json") for name in ("manifest", "about", "incident"))
            same = all(about.get(name, none) == mine.get(name, none) for name, none in (("replica", 0), ("model", "")))
            other = same and int(about["rank"]) != int(mine["rank"])
            if other and abs(_seconds(manifest) - written) <= NEAR_S:
                host = str(about.get("host", ""))
                yield (int(about["rank"]), "" if host == mine.get("host", "") else host), incident["root"]
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = parsed(content(path, MOST_JSON_BYTES))
    return found


def _seconds(manifest: Mapping[str, Any]) -> int:
    return timegm(strptime(manifest["written"], "%Y-%m-%dT%H:%M:%SZ"))


def _place(root: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(root.get(name) for name in ("kind", "region", "request", "position", "slot"))


def _named(ranks: Collection[Who]) -> str:
    names = [f"{rank} on {host}" if host else str(rank) for rank, host in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {joined(names)}"
