"""A rank's introduction to the others, and the finding about ranks that differ."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from canary_core.ops.sources import Label, SourceTable
from canary_core.place import Place
from canary_core.records import Kind, Phase
from canary_core.violation import Violation
from canary_core.watchers.ranks.digest import RankWord
from canary_core.watchers.ranks.group import RankGroup
from canary_core.watchers.ranks.judge import RankDifference
from canary_core.wording import joined

REGION = "ranks"
"""In findings, in the place of a region of slots."""

SAID = {
    "lengths": "the lengths of requests in the batch",
    "positions": "the positions of new tokens",
    "tokens": "the token ids that the forward was given",
    "slots": "the slots that new tokens were written to",
    "history": "tokens that running requests had computed before",
    "sampled": "the tokens that were sampled",
    "kv": "the KV that was written",
}
"""The differing part in words, by `RankDifference.what`."""


def introduction(place: Place, group: RankGroup, sources: SourceTable) -> dict[str, object]:
    """Introduction of a rank at ``place``, for the board. KV is compared between ranks with the same text for ``kv``:
    made of `RankGroup.kv`, ``sources`` and the keys of fingerprints."""
    kv, keys = None, sources.fingerprint_keys.id
    if group.kv is not None:
        same = (group.kv, [label.name for label in sources.judged], keys)
        kv = blake2b(repr(same).encode(), digest_size=8).hexdigest()
    return {"host": place.host, "gpu": place.gpu, "process": place.pid, "rank": place.rank, "kv": kv, "keys": keys}


def finding(
    found: Sequence[RankDifference],
    row: Sequence[int],
    about: Mapping[int, Mapping[str, Any]],
    sources: Sequence[Label],
) -> Violation:
    """The finding of all differences ``found`` in one forward. ``row``: the reporting rank's. ``about``: introductions
    of the compared ranks. ``sources``: of `RankDifference.columns`."""
    first = found[0]
    others = [rank for rank in about if rank not in first.odd]
    names = [_where(rank, about[rank]) for rank in first.odd]
    if not others:
        who = f"{joined(names)} differ"
    elif len(names) == 1:
        who = f"{names[0]} alone differs from {'rank' if len(others) == 1 else 'ranks'} {_numbers(others)}"
    else:
        who = f"{joined(names)} differ from {'rank' if len(others) == 1 else 'ranks'} {_numbers(others)}"
    what = joined([SAID[difference.what] for difference in found])
    facts: dict[str, Any] = {}
    if first.what == "kv":
        names = [sources[column].name for column in first.columns]
        what = f"{what} in {joined(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        facts = {"source": names[0], "layer": sources[first.columns[0]].layer, "half": sources[first.columns[0]].half}
    return Violation(
        kind=Kind.RANKS,
        region=REGION,
        phase=Phase.POST_FORWARD,
        step=row[RankWord.STEP],
        found_value=row[RankWord.NUMBER],
        rule=first.what,
        detail=f"{who} in {what}",
        odd_rank=about[first.odd[0]].get("rank") if others and len(first.odd) == 1 else None,
        **facts,
    )


def _where(rank: int, about: Mapping[str, Any]) -> str:
    """Such as ``rank 3 (host node7, GPU-1234, process 99)``."""
    gpu = f"{about['gpu']}, " if about.get("gpu") else ""
    place = f" (host {about['host']}, {gpu}process {about['process']})" if "host" in about else ""
    return f"rank {about.get('rank', rank)}{place}"


def _numbers(ranks: Sequence[int]) -> str:
    return joined([str(rank) for rank in ranks])
