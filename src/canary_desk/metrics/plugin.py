"""The built-in plugin ``metrics``: offers the figures of every `Canary` of the process at the requested places."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from canary_core.config import CanaryConfig
from canary_core.config.shown import shares_metrics
from canary_core.errors import MetricsError, error_text
from canary_core.events import Event
from canary_core.place import Place
from canary_core.plugins.hookspecs import hookimpl
from canary_desk.metrics import opentelemetry, prometheus
from canary_desk.metrics.readings import READINGS, Readings

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary


PATIENCE_S, LOOK_S = 30.0, 0.25
"""Longest wait for a starting engine to import prometheus_client, and time between two looks, in seconds."""

LOADING = ("plugins_loaded", "plugins_installed")
"""Events with names of ``failed`` plugins."""


class Offers:
    """Where the metrics of one process are to be had. Each place is tried once; one that can't be had is told, and the
    engine goes on as if nothing were."""

    def __init__(self, readings: Readings) -> None:
        self.readings = readings
        self._process = os.getpid()
        self._tried: set[str] = set()
        self._imported = False
        """Whether prometheus_client was imported only for a port of Canary's own."""
        self._lock = threading.Lock()

    def begin(self, config: CanaryConfig, tell: Callable[[Event], None]) -> None:
        """Opens the places requested by ``config`` and not yet open; ``tell`` gets one event for each."""
        with self._lock:
            if os.getpid() != self._process:
                # Forked: threads and ports stay with the parent.
                self._process, self._tried = os.getpid(), set()
            for place, open_it in self._places(config).items():
                if place in self._tried:
                    continue
                self._tried.add(place)
                try:
                    found = open_it()
                except Exception as error:  # the engine goes on, whatever a library thinks of this
                    reason = str(error) if isinstance(error, MetricsError) else error_text(error)
                    tell(Event("metrics_unavailable", "warning", {"place": place, "reason": reason}))
                else:
                    fields: dict[str, object] = {"place": found if isinstance(found, str) else place}
                    if fields["place"] != place:
                        fields["reason"] = f"{place} was taken, by another replica or another program"
                    tell(Event("metrics", "info", fields))

    def begin_in_time(self, config: CanaryConfig, tell: Callable[[Event], None]) -> None:
        """As `begin`, for a process whose engine is about to start. prometheus_client decides at its import whether
        processes share metrics, perhaps before the engine has said so: a thread waits until the engine has imported it
        or has said so, for `PATIENCE_S` at most."""

        def settled() -> bool:
            return config.metrics == "opentelemetry" or shares_metrics() or "prometheus_client" in sys.modules

        def wait() -> None:
            until = time.monotonic() + PATIENCE_S
            while not settled() and time.monotonic() < until:
                time.sleep(LOOK_S)
            self.begin(config, tell)

        if settled():
            self.begin(config, tell)
        elif config.metrics != "off":
            threading.Thread(target=wait, name="canary-metrics-begin", daemon=True).start()

    def _places(self, config: CanaryConfig) -> dict[str, Callable[[], object]]:
        places: dict[str, Callable[[], object]] = {}
        if config.metrics == "opentelemetry":
            places["opentelemetry"] = lambda: opentelemetry.observe(self.readings)
        elif config.metrics == "auto":
            # An engine that has no metrics of its own is not made to import their library.
            if shares_metrics():
                places["shared files"] = lambda: prometheus.SharedFiles(self.readings)
            elif "prometheus_client" in sys.modules and not self._imported:
                places["registry"] = lambda: prometheus.register(self.readings)
        if config.metrics_listen is not None and config.metrics != "off":
            self._imported = self._imported or "prometheus_client" not in sys.modules
            address, port = config.metrics_listen.address, config.metrics_listen.port + config.rank
            places[f"http://{address}:{port}/metrics"] = lambda: prometheus.listen_near(self.readings, address, port)
        return places


OFFERS = Offers(READINGS)
"""The offers of this process."""


def _unattached(event: Event) -> bool:
    """Whether the event reports a pool as unguarded. A switched-off Canary counts, too: it has a reading of its own,
    see `Readings.refuse`. Draft models with a left-out pool are reported as coverage, while the served model is
    guarded."""
    if event.name == "coverage":
        left_out = not event.fields.get("regions", True) and bool(event.fields.get("uncovered"))
        return left_out and not event.fields.get("draft")
    return event.name == "disabled"


class Metrics:
    """The plugin. Each manager has its own; the opened places are the process's."""

    def __init__(self) -> None:
        self._config: CanaryConfig | None = None

    @hookimpl
    def canary_configure(self, config: CanaryConfig) -> None:
        """Keeps the settings for an engine that can't be guarded."""
        self._config = config

    @hookimpl
    def canary_event(self, event: Event) -> None:
        """If Canary can't start, or can't attach to a pool, the metrics say that nothing is checked."""
        unstarted = event.name == "start_failed" or (event.name in LOADING and bool(event.fields.get("failed")))
        if not unstarted and not _unattached(event):
            return
        from canary_core.plugins import emit

        # Bad settings may be why.
        config = self._config or CanaryConfig.readable()
        if config.mode == "off":
            return
        told: dict[str, Any] = event.fields
        config = config.model_copy(update={name: told[name] for name in ("replica", "rank", "model") if name in told})
        READINGS.refuse(Place.of(config, torch.device("cpu")), config)
        if unstarted:
            OFFERS.begin_in_time(config, emit)
        else:
            OFFERS.begin(config, emit)

    @hookimpl
    def canary_attached(self, canary: "Canary") -> None:
        """Offers the Canary's figures from now on."""
        READINGS.add(canary)
        OFFERS.begin(canary.config, canary.tell)

    @hookimpl
    def canary_detached(self, canary: "Canary") -> None:
        """Keeps the closed Canary's figures."""
        READINGS.end(canary)
