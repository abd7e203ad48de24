"""The built-in plugin ``metrics``: offers the numbers of every `Canary` of this process where they are wanted."""

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from canary_core.config import CanaryConfig, shares_metrics
from canary_core.errors import MetricsError
from canary_core.events import Event
from canary_core.hookspecs import hookimpl
from canary_core.metrics import opentelemetry, prometheus
from canary_core.metrics.readings import READINGS, Readings
from canary_core.place import Place
from canary_core.plugins.plugin import error_text

if TYPE_CHECKING:
    from canary_core.canary import Canary


class Offers:
    """Where the metrics of one process are to be had. Each place is tried once; one that can't be had is told, and the
    engine goes on as if nothing were."""

    def __init__(self, readings: Readings) -> None:
        self.readings = readings
        self._process = os.getpid()
        self._tried: set[str] = set()
        self._imported = False
        """Whether it is only for a port of ours that there is a prometheus_client in this process."""
        self._lock = threading.Lock()

    def begin(self, config: CanaryConfig, tell: Callable[[Event], None]) -> None:
        """Opens what ``config`` asks for and nobody has opened yet; ``tell`` is given one event for each."""
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
"""Those of this process."""


class Metrics:
    """The plugin. Each manager has its own; what it opens is the process's."""

    def __init__(self) -> None:
        self._config: CanaryConfig | None = None

    @hookimpl
    def canary_configure(self, config: CanaryConfig) -> None:
        """Takes the settings over for an engine that can't be guarded."""
        self._config = config

    @hookimpl
    def canary_event(self, event: Event) -> None:
        """Where Canary can't start, or can't attach to a pool, the metrics say that nothing is checked."""
        refused = event.name == "plugins_installed" and event.fields.get("failed")
        # One that was attached says where it is, and has a reading of its own.
        unattached = event.name == "disabled" and "replica" not in event.fields
        if not (event.name == "start_failed" or unattached or refused):
            return
        from canary_core.plugins import emit

        # Bad settings may be why; then where the metrics go by default is all that is known.
        config = self._config or CanaryConfig.model_construct()
        model = event.fields.get("model")
        place = Place.of(config.model_copy(update={"model": model} if model else {}), torch.device("cpu"))
        READINGS.refuse(place, config)
        OFFERS.begin(config, emit)

    @hookimpl
    def canary_attached(self, canary: "Canary") -> None:
        """Its numbers are to be had from now on."""
        READINGS.add(canary)
        OFFERS.begin(canary.config, canary.tell)

    @hookimpl
    def canary_detached(self, canary: "Canary") -> None:
        """What it came to stays."""
        READINGS.end(canary)
