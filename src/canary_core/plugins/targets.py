"""`HookTarget`: a function of an engine to be hooked, and whether the installed release has it."""

import difflib
import importlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from canary_core.errors import PluginError, error_text

OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class HookTarget:
    """A function of the engine hooked by a plugin.

    name: full dotted name, e.g. ``engine.runner.ModelRunner.forward``. parameters: names of the parameters the plugin
    reads, each at its place from the left, without ``self``; None for any name: ``(None, "indices")``. optional: not
    every release has the function; where it exists, it must fit.
    """

    name: str
    parameters: tuple[str | None, ...] = ()
    optional: bool = False

    def problem(self, owner: object = None) -> str | None:
        """Why the function can't be hooked, in a sentence; None if it can. ``owner``: the object with the function,
        where the plugin hooks single objects; without an owner the name is imported, together with its module. A
        function that takes anything from some place on (``*args, **kwargs``), as a wrapper does, fits from there. Never
        raises; patches nothing."""
        path, _, function = self.name.rpartition(".")
        try:
            owner = _resolve(path) if owner is None else owner
            found = getattr(owner, function, None)
        except _Missing as error:
            return None if self.optional else f"{self.name} is not there ({error})"
        except Exception as error:  # whatever the engine raises when it is imported
            # The same sentence for each target that this keeps us from seeing.
            module = self.name.partition(".")[0]
            return None if self.optional else f"importing {module} itself failed ({error_text(error)})"
        if found is None:
            close = difflib.get_close_matches(function, dir(owner), n=1)
            hint = f" (there is {close[0]})" if close else ""
            return None if self.optional else f"{self.name} is not there{hint}"
        if not callable(found):
            return f"{self.name} is no function, got {type(found).__name__}"
        return self._misfit(owner, function, found) if self.parameters else None

    def _misfit(self, owner: object, function: str, found: Any) -> str | None:
        try:
            parameters = list(inspect.signature(found).parameters.values())
        except (TypeError, ValueError) as error:
            return f"{self.name} does not tell its parameters ({error_text(error)})"
        static = inspect.getattr_static(owner, function, None)
        if isinstance(owner, type) and not isinstance(static, (classmethod, staticmethod)):
            parameters = parameters[1:] if parameters and parameters[0].kind not in OPEN else parameters
        names = [p.name for p in parameters if p.kind not in OPEN]
        # From here on there is room for anything, in ``*args`` or ``**kwargs``.
        room = len(names) if len(names) < len(parameters) else len(self.parameters)
        wanted = [(place, name) for place, name in enumerate(self.parameters) if name is not None]
        missing = [name for place, name in wanted if name not in names and place < room]
        got = f"it takes ({', '.join(str(p).partition(':')[0].partition('=')[0] for p in parameters)})"
        if missing:
            return f"{self.name} has no parameter {', '.join(map(repr, missing))}; {got}"
        moved = [name for place, name in wanted if name in names and names.index(name) != place]
        return f"{self.name} has {', '.join(map(repr, moved))} at another place; {got}" if moved else None


class _Missing(Exception):
    """A name has no such module or attribute."""


def _resolve(path: str) -> Any:
    """The object of the dotted name ``path``, modules first. Raises `_Missing` where there is none, and any exception
    of a module's import, which `pkgutil.resolve_name` would hide."""
    parts = path.split(".")
    if "" in parts:
        raise _Missing(f"{path!r} names no module")
    found: Any = None
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            if found is None:
                raise _Missing(error_text(error)) from error
            break
    else:
        return found
    for part in parts[number - 1 :]:
        if not hasattr(found, part):
            raise _Missing(f"{getattr(found, '__name__', found)} has no {part}")
        found = getattr(found, part)
    return found


def problems(targets: Iterable[HookTarget | str]) -> Sequence[str]:
    """Why unfit ``targets`` can't be hooked, each sentence once; a name stands for a target without parameters. Raises
    `PluginError` for anything else."""
    found: dict[str, None] = {}
    for target in targets:
        if not isinstance(target, (HookTarget, str)):
            raise PluginError(f"a hook target must be a HookTarget or a dotted name, got {target!r}")
        problem = (HookTarget(target) if isinstance(target, str) else target).problem()
        if problem is not None:
            found[problem] = None
    return list(found)
