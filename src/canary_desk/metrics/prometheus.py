"""Gives the metrics to prometheus_client: in a registry scraped in this process, on a port of Canary's own, or through
the files by which several processes of an engine share one endpoint.

prometheus_client decides at its import whether processes share metrics, and engines set the choice late. So it is
imported here inside functions only, once a pool is guarded.
"""

import atexit
import errno
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from canary_core.errors import MetricsError
from canary_core.runtime.watch import WATCH
from canary_desk.metrics.families import FAMILIES, Family
from canary_desk.metrics.readings import Readings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

PUBLISH_S = 2.0
"""Seconds between two writes into the shared files."""

PORTS = 64
"""Ports to try, one after the other."""

MODES = {"sum": "livesum", "min": "livemin", "max": "livemax"}
"""How prometheus_client puts gauges of several processes together."""


class KVCanaryCollector:
    """A collector of prometheus_client: reads facts known to the host on each scrape. Never looks at a device, and
    never raises: a scrape belongs to the engine."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator["Metric"]:
        """All metrics with a value."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        try:
            live, ended = self._readings.take()
            found = [(family, list(family.samples(live, ended))) for family in FAMILIES]
        except Exception:
            # Some other thread is changing what is read; the next scrape will do.
            return
        for family, samples in found:
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = made(family.full_name, family.help, labels=family.labels)
            for sample in samples:
                metric.add_metric(sample.labels, sample.value)
            yield metric

    def describe(self) -> Iterator["Metric"]:
        """All metrics, without values: the names a registry must not have yet."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for family in FAMILIES:
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            yield made(family.full_name, family.help, labels=family.labels)


def register(readings: Readings, registry: "CollectorRegistry | None" = None) -> None:
    """Adds the metrics to ``registry``, by default the process's. Raises `MetricsError` if the registry has metrics of
    these names."""
    import prometheus_client

    registry = prometheus_client.REGISTRY if registry is None else registry
    try:
        registry.register(KVCanaryCollector(readings))
    except ValueError as error:
        raise MetricsError(
            f"the registry of this process has metrics of these names already ({error}), so Canary's are not in it; "
            "give them a port of their own with CANARY_METRICS_LISTEN, or rename the others"
        ) from error


def listen(readings: Readings, address: str, port: int) -> Any:
    """Serves the metrics at ``http://address:port/metrics``, from a thread of its own; returns the argument of
    `shutdown`. Raises `MetricsError` on failure."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    register(readings, registry)
    try:
        server, _ = prometheus_client.start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise MetricsError(
            f"metrics can't be served at {address}:{port} ({error}); choose another port in CANARY_METRICS_LISTEN"
        ) from error
    if hasattr(os, "register_at_fork"):
        # A child that lives on must not keep its dead parent's port.
        os.register_at_fork(after_in_child=server.socket.close)
    return server


def listen_near(readings: Readings, address: str, port: int) -> str:
    """As `listen`, at the first port from ``port`` on that is free: replicas of an engine on one machine have ranks of
    the same numbers. Gives the address. Raises `MetricsError` where none of `PORTS` is."""
    for near in range(port, min(port + PORTS, 65536)):
        try:
            listen(readings, address, near)
        except MetricsError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            last = error
        else:
            return f"http://{address}:{near}/metrics"
    raise MetricsError(f"none of {PORTS} ports from {port} on is free ({last})") from last


class SharedFiles:
    """Writes the metrics every `PUBLISH_S` into the files by which the processes of an engine share one endpoint, from
    a thread of its own.

    Gauges are written as read, counters by their growth since the last time, as prometheus_client's own metrics need.
    Raises `MetricsError` if the folder can't be written.
    """

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._process = os.getpid()
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        try:
            self._metrics = {family.name: _shared(family) for family in FAMILIES}
            self.write()
        except (OSError, ValueError) as error:
            raise MetricsError(
                f"metrics can't be written into the folder that this engine's processes share ({error}); see that "
                "PROMETHEUS_MULTIPROC_DIR names one that can be written"
            ) from error
        self._thread = threading.Thread(target=self._run, name="canary-metrics", daemon=True)
        self._thread.start()
        WATCH.expect(self._thread)
        atexit.register(self.close)

    def write(self) -> None:
        """Writes the present values."""
        with self._lock:
            live, ended = self._readings.take()
            for family in FAMILIES:
                metric = self._metrics[family.name]
                for sample in family.samples(live, ended):
                    child = metric.labels(*sample.labels)
                    if family.kind == "gauge":
                        child.set(sample.value)
                        continue
                    key = (family.name, sample.labels)
                    new = sample.value - self._written.get(key, 0.0)
                    if new > 0:
                        child.inc(new)
                        self._written[key] = sample.value
                    elif key not in self._written:
                        self._written[key] = 0.0

    def close(self) -> None:
        """Writes once more and stops. Does nothing when called again, or in a forked process."""
        if self._ended.is_set() or os.getpid() != self._process:
            return
        self._ended.set()
        WATCH.release(self._thread)
        try:
            self.write()
        except Exception:
            # The engine has removed the folder; it ends, too.
            return

    def _run(self) -> None:
        while not self._ended.wait(PUBLISH_S):
            try:
                self.write()
            except RuntimeError:
                # Some other thread was changing what is read; the next time will do.
                continue
            except Exception:
                return


def _shared(family: Family) -> Any:
    """A metric written by prometheus_client into the shared files. In no registry: the scraped process reads files."""
    import prometheus_client

    name = family.full_name
    if family.kind == "counter":
        return prometheus_client.Counter(name, family.help, family.labels, registry=None)
    return prometheus_client.Gauge(
        name,
        family.help,
        family.labels,
        registry=None,
        multiprocess_mode=MODES[family.together],  # type: ignore[arg-type]
    )


def processes_share() -> bool:
    """Whether prometheus_client writes to shared files."""
    from prometheus_client import values

    return values.ValueClass is not values.MutexValue
