"""`PluginConformance`: requirements for every plugin of an engine."""

from collections.abc import Mapping, Sequence

from canary_kit.conformance.defects import Defects
from canary_kit.conformance.session import Ability, EngineSession
from canary_kit.faults.catalogue import FAULTS


class PluginConformance(Defects):
    """Subclass it, declare the plugin and its engine's abilities, and return a `session`; pytest runs the rest::

        class TestToy(PluginConformance):
            plugin = "toy"
            layers, halves = 2, ("k", "v")
            abilities = frozenset({"lifetime", "padding", "prefix_cache"})
            lacking = {"fork": "the engine runs each request once"}

            def session(self) -> EngineSession:
                return ToySession()

    A failing test names the wrong part of the plugin, as `Nonconforming`. Abilities outside of ``abilities`` are
    skipped, and show in the support matrix. The adapter's view of the engine is judged here, and never used otherwise.
    """

    plugin: object = ""
    """Name of the plugin's entry point, or the object with the hooks."""
    layers: int = 1
    """Layers whose KV is within reach of `EngineSession.poke`."""
    halves: Sequence[str] = ("k", "v")
    """A layer's parts of a token, named as in `KVSource.half`."""
    abilities: frozenset[Ability] = frozenset()
    """See `Ability`."""
    lacking: Mapping[Ability, str] = {}
    """Abilities outside of ``abilities``, and why: the engine does not have them, or the plugin does not follow them.
    The reasons are in the skipped tests and in the support matrix."""
    vocabulary: int = 128
    """Prompts are made of token ids from 1 to below."""
    longest_prompt: int = 40
    """Tokens of the longest prompt: enough for several pages."""
    roll_backs: Sequence[int] = (1, 2, 3)
    """Lengths of roll backs that drop slots which neither a prefix cache keeps nor another request holds: fewer than a
    page; empty where every slot is a page."""
    faults: Sequence[str] = tuple(FAULTS)
    """Names of the faults to inject (see `FaultSpec`): all, unless the engine hides one and the plugin's documentation
    says so."""
    engine_package: str = ""
    """Name of the engine's package, with functions to be restored by `canary_uninstall`."""

    def session(self) -> EngineSession:
        """A fresh small engine with an empty pool, under whatever is installed."""
        raise NotImplementedError(f"{type(self).__name__}.session must give an EngineSession for the engine")
