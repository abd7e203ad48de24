"""`Stage`: one engine with the plugin installed, and all its findings and events."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from canary_core import plugins
from canary_core.config import CanaryConfig
from canary_core.errors import PluginError
from canary_core.events import Event
from canary_core.guard.canary import Canary
from canary_core.plugins.discovery import entry_points, inspect, new_manager, not_installed
from canary_core.records import Kind
from canary_core.violation import Violation
from canary_kit.conformance.onlooker import Onlooker
from canary_kit.conformance.problems import Culprit, Nonconforming, blamed_for_error, require_silence
from canary_kit.conformance.session import EngineSession
from canary_kit.findings import Findings

MOST_STEPS = 2000
"""Most steps of an engine before it counts as stuck."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the suite's."""

    name: str
    tokens: tuple[int, ...]
    new_tokens: int


class Drive:
    """Serves requests on one engine."""

    def __init__(self, session: EngineSession) -> None:
        self.session = session
        self.asks: dict[str, Ask] = {}
        """Every request so far by name."""
        self.steps = 0
        """Steps that ran something."""

    def submit(self, *asks: Ask) -> None:
        """All of ``asks`` begin with the next step."""
        for ask in asks:
            self.asks[ask.name] = ask
            self.session.submit(ask.name, ask.tokens, ask.new_tokens)

    def fork(self, request: str, child: str) -> None:
        """``child`` goes on from the state of ``request``."""
        self.session.fork(request, child)
        self.asks[child] = Ask(child, self.asks[request].tokens, self.asks[request].new_tokens)

    def step(self) -> bool:
        """One step; whether anything was left to run."""
        ran = self.session.step()
        self.steps += ran
        return ran

    def step_until(self, request: str, answered: int) -> None:
        """Steps until ``request`` has so many answered tokens. Raises `Nonconforming` if it never has."""
        for _ in range(MOST_STEPS):
            if len(self.session.answer(request)) >= answered or not self.step():
                break
        got = len(self.session.answer(request))
        if got < answered:
            raise Nonconforming(
                "session",
                f"step() gave False, or {MOST_STEPS} steps ran, and {request} has {got} of {answered} answered tokens",
            )

    def finish(self) -> None:
        """Steps until nothing is left to run."""
        for _ in range(MOST_STEPS):
            if not self.step():
                return
        raise Nonconforming("session", f"step() still gives True after {MOST_STEPS} steps")

    def answers(self) -> dict[str, tuple[int, ...]]:
        """Answers so far, by request."""
        return {name: tuple(self.session.answer(name)) for name in self.asks}


class Stage(Drive):
    """The same under guard: ``onlooker`` keeps views and Canaries, ``findings`` the findings and events.
    ``longest_prompt``: tokens of the suite's longest prompt."""

    def __init__(self, session: EngineSession, onlooker: Onlooker, findings: Findings, longest_prompt: int) -> None:
        super().__init__(session)
        self.onlooker = onlooker
        self.findings = findings
        self._longest_prompt = longest_prompt

    def step(self) -> bool:
        """As `Drive.step`. Raises `Nonconforming` where no prompt has a whole page and a token more: then nothing can
        be reused, parked or mixed up."""
        ran = super().step()
        page = min(self.onlooker.pages, default=0)
        if page >= self._longest_prompt:
            raise Nonconforming(
                "session",
                f"by the views a page has {page} slots, and the longest prompt has "
                f"{self._longest_prompt} tokens: no prompt fills a page and goes on; set longest_prompt of the suite "
                "to more than one page, better several, or give the session's engine smaller pages",
            )
        return ran

    @property
    def canaries(self) -> Sequence[Canary]:
        """The Canaries of the engine's pools. Raises `Nonconforming` if there is none."""
        if self.onlooker.canaries:
            return self.onlooker.canaries
        reasons = [str(e.fields["reason"]) for e in self.findings.told("disabled") if "reason" in e.fields]
        if reasons:
            raise Nonconforming("PoolAdapter", f"no Canary could be built: {reasons[0]}")
        raise Nonconforming(
            "hooks",
            "no Canary was built: canary_install must hook the place where the engine makes its pool, and build one "
            f"there{self.troubles()}",
        )

    @property
    def errors(self) -> list[Event]:
        """Reported errors."""
        about_findings = ("incident", "diagnosis")
        return [e for e in self.findings.events if e.level == "error" and not e.name.startswith(about_findings)]

    def unseen_by(self) -> Culprit:
        """The part to blame for forwards that were not checked."""
        if not self.errors:
            return "BatchAdapter" if self.unchecked else "hooks"
        part = blamed_for_error(self.errors[0])
        return "BatchAdapter" if part == "hooks" and self.errors[0].name != "misuse" else part

    def troubles(self) -> str:
        """Reported errors, for the end of a sentence; empty without any."""
        errors = [f"{e.name} {e.fields.get('reason') or e.fields.get('error')}" for e in self.errors]
        return f"; told was: {'; '.join(errors[:2])}" if errors else ""

    def told(self, event: str) -> int:
        """How often an event of slots was told."""
        return sum(counts.get(event, 0) for c in self.onlooker.canaries for counts in c.slots.counts.values())

    @property
    def unchecked(self) -> int:
        """Forwards whose view was None."""
        return sum(canary.step.unchecked for canary in self.onlooker.canaries)

    def require_silence(self, doing: str, part: Culprit | None = None) -> None:
        """As `problems.require_silence`, of all that was found and told so far."""
        self.drain()
        first = next(iter(self.violations), None)
        if part is None and first is not None and first.kind is Kind.UNWRITTEN and self.told("clear"):
            part = "slot events"
        require_silence(self.violations, self.findings.events, doing, part)

    @property
    def violations(self) -> list[Violation]:
        """All findings so far."""
        return self.findings.violations

    def drain(self) -> None:
        """Everything found so far is told."""
        for canary in self.canaries:
            canary.drain()

    def counter(self, name: str) -> int:
        """A counter (see `Canary.stats`) of all Canaries together, as of the last read."""
        return sum(canary.stats().get(name, 0) for canary in self.canaries)


def target_of(plugin: object) -> object:
    """The plugin object: ``plugin`` itself, or the object of the entry point of this name. Raises `PluginError`, with
    the reason, if not installed or unfit."""
    if not isinstance(plugin, str):
        return plugin
    found = entry_points()
    for missing in not_installed([plugin], found):
        raise PluginError(str(missing.error))
    loaded = inspect(plugin, found[plugin])
    if loaded.error is not None:
        raise PluginError(loaded.error)
    return loaded.target


@contextlib.contextmanager
def installed(target: object, config: CanaryConfig, *listeners: object) -> Iterator[None]:
    """Context with the plugin ``target`` installed; ``listeners`` receive calls about its Canaries."""
    process, own = plugins.hook_manager(), new_manager()
    own.register(target)
    # Canary asks what the plugin says of findings (canary_dismiss) through the manager of the process.
    known = any(plugin is target for plugin in process.get_plugins())
    with contextlib.ExitStack() as stack:
        for plugin in (*listeners, *(() if known else (target,))):
            process.register(plugin)
            stack.callback(process.unregister, plugin)
        stack.callback(own.hook.canary_uninstall)
        own.hook.canary_install(config=config)
        yield


def fill(session: EngineSession, seed: int = 0) -> None:
    """Fills the engine's memory with noise, so that every write changes it."""
    draw = torch.Generator().manual_seed(seed)
    for tensor in session.pool_tensors().values():
        if tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
        else:
            # Small values of each byte: no NaN in any format of eight bits.
            noise = torch.randint(0, 64, (tensor.numel() * tensor.element_size(),), generator=draw, dtype=torch.uint8)
            tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))
