"""`Sighting`: one incident of one engine, from a bundle or from Prometheus."""

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canary_core.errors import CanaryError, error_text
from canary_desk.explain.affected import self_test
from canary_desk.incidents.bundle import PREFIX, Bundle, BundleError, read_bundle
from canary_desk.incidents.signature import NONE, Signature, content_digest

MOST_BUNDLES = 10_000
"""Bundles that are read; more are counted."""

MOST_REPLY_BYTES = 16 << 20
PATIENCE_S = 30.0

ENGINES = ("sglang", "vllm", "transformers")


@dataclass(frozen=True, slots=True)
class Sighting:
    """``gpu``: the UUID, else the host where there is none; ``engine``: host, replica and model; ``release``: of the
    engine. ``content``: see `content_digest`. ``written``: time in UTC, empty where unknown. ``count``: how many
    incidents, more than 1 only from counters. ``requests``: names. ``where``: the bundle's path, else empty."""

    signature: Signature
    gpu: str
    host: str
    engine: str
    rank: str
    release: str
    content: str = ""
    written: str = ""
    count: int = 1
    requests: tuple[str, ...] = ()
    self_test: bool = False
    where: str = ""


def of_bundles(folders: Sequence[Path]) -> tuple[list[Sighting], list[str]]:
    """The incidents of all bundles in ``folders``, and in folders directly below; and a sentence for each that can't be
    read. Raises `CanaryError` where a folder does not exist."""
    found, wrong = [], []
    for place, path in enumerate(_bundles(folders)):
        if place >= MOST_BUNDLES:
            wrong.append(f"only the first {MOST_BUNDLES} bundles were read")
            break
        try:
            found.append(_of(read_bundle(path)))
        except (BundleError, OSError) as error:
            wrong.append(str(error))
        except Exception as error:  # whoever made it may have put anything there
            wrong.append(f"{path.name} does not hold what a bundle holds: {type(error).__name__}")
    return found, wrong


def of_prometheus(url: str) -> list[Sighting]:
    """The incidents that a Prometheus server counts now, by its HTTP interface. Diagnosis, layers and requests are not
    known there. Raises `CanaryError` where the server does not answer as such."""
    try:
        told = {_key(m["metric"]): m["metric"] for m in _query(url, "kv_canary_info")}
        tested = {_key(m["metric"]) for m in _query(url, "kv_canary_self_test == 1")}
        out = []
        for one in _query(url, "kv_canary_incidents_total > 0"):
            labels, key = one["metric"], _key(one["metric"])
            about = told.get(key, {})
            host = str(about.get("host") or labels.get("instance", ""))
            engine = f"{labels.get('instance', '')} replica {labels.get('replica', '0')}"
            sort = Signature(str(labels["kind"]), NONE)
            gpu, rank = str(about.get("gpu") or host), str(labels.get("rank", "0"))
            release = f"canary {about['version']}" if about.get("version") else ""
            count = int(float(one["value"][1]))
            out.append(Sighting(sort, gpu, host, engine, rank, release, count=count, self_test=key in tested))
        return out
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CanaryError(f"{url} does not answer as Prometheus: {error_text(error)}") from error


def _bundles(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise CanaryError(f"{folder} is no directory; give one of CANARY_INCIDENT_DIR, or one that holds several")
        if (folder / "manifest.json").exists():
            yield folder
            continue
        yield from sorted({*folder.glob(f"{PREFIX}*"), *folder.glob(f"*/{PREFIX}*")})


def _of(bundle: Bundle) -> Sighting:
    about, incident = bundle.about, bundle.rebuilt()
    host = str(about.get("host") or "unknown machine")
    model = f" {about['model']}" if about.get("model") else ""
    versions = about.get("versions", {})
    release = next((f"{name} {versions[name]}" for name in ENGINES if name in versions), "")
    return Sighting(
        bundle.signature,
        str(about.get("gpu") or host),
        host,
        f"{host} replica {about.get('replica', 0)}{model}",
        str(about.get("rank", 0)),
        release,
        str(bundle.incident.get("content", content_digest(incident, bundle.evidence))),
        str(bundle.manifest.get("written", "")),
        requests=tuple(incident.requests),
        self_test=bool(self_test(bundle)),
        where=str(bundle.path),
    )


def _query(url: str, query: str) -> list[dict[str, Any]]:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise CanaryError(f"{url!r} is no address of a Prometheus server, such as http://localhost:9090")
    address = f"{url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        told = json.loads(answer.read(MOST_REPLY_BYTES))
    found: list[dict[str, Any]] = told["data"]["result"]
    return found


def _key(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in ("instance", "job", "replica", "rank", "model"))
