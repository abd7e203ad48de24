"""`EngineInfo`: a plugin's engine, and whether the installed version is fit to be guarded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from canary_core import installed
from canary_core.config import Untested
from canary_core.errors import PluginError

EngineStatus = Literal["tested", "newer", "too_old", "known_bad", "not_installed"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A plugin's engine. ``version`` is the installed one, None if the engine isn't installed; ``supported_range`` is
    the text shown to users, e.g. ``>=5.17,<6``, and ``supported`` whether the plugin was tested with the version.

    | status        | the installed version is                     | consequence                                       |
    |---------------|----------------------------------------------|---------------------------------------------------|
    | tested        | in the range                                 | guarded                                           |
    | newer         | above the range                              | guarded with an audit; see ``CANARY_UNTESTED``    |
    | too_old       | below the range                              | refused                                           |
    | known_bad     | one named by the plugin, with its `reason`   | refused                                           |
    | not_installed | none                                         | refused                                           |

    Without a ``status``, it is derived: installed but not supported counts as too old.
    """

    name: str
    version: str | None
    supported_range: str
    supported: bool
    status: EngineStatus = "tested"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.status == "tested" and not self.supported:
            object.__setattr__(self, "status", "not_installed" if self.version is None else "too_old")

    @classmethod
    def of(cls, distribution: str, supported_range: str, known_bad: Mapping[str, str] | None = None) -> "EngineInfo":
        """Looks the installed version up without importing the engine. ``supported_range`` is a PEP 440 specifier;
        release candidates inside count as tested, those of the upper bound as newer. ``known_bad``: specifiers of
        versions that must not be guarded, each with the reason in a few words; they win over the range, as ``!=`` in
        the range does.

        Raises `PluginError` if the installed version can't be read.
        """
        text = installed.version(distribution)
        if text is None:
            return cls(distribution, None, supported_range, supported=False)
        try:
            version = Version(text)
        except (InvalidVersion, TypeError) as error:
            raise PluginError(
                f"the installed {distribution} has a version that can't be compared with {supported_range}, got "
                f"{text!r}; install one with a version as PEP 440 has them"
            ) from error
        for specifier, reason in (known_bad or {}).items():
            if SpecifierSet(specifier).contains(version, prereleases=True):
                return cls(distribution, text, supported_range, False, "known_bad", reason)
        broken = [s for s in SpecifierSet(supported_range) if not s.contains(version, prereleases=True)]
        if any(s.operator == "!=" for s in broken):
            return cls(distribution, text, supported_range, False, "known_bad", f"{supported_range} leaves it out")
        if broken:
            newer = all(_is_above(version, s) for s in broken)
            return cls(distribution, text, supported_range, False, "newer" if newer else "too_old")
        return cls(distribution, text, supported_range, True)

    def refusal(self, who: str, distribution: str | None, untested: Untested = "guard") -> str | None:
        """Why the engine can't be hooked, None if it can, judging by the version. ``who`` begins the sentence;
        ``distribution``: the plugin's. ``untested``: the setting."""
        if self.status == "tested" or (self.status == "newer" and untested == "guard"):
            return None
        fix = f"install {self.name}{self.supported_range} or a release of {distribution} that supports it"
        if self.status == "known_bad":
            return f"{who} refuses {self.name} {self.version}: {self.reason}; {fix}"
        head = f"{who} supports {self.name} {self.supported_range}"
        if self.status == "not_installed":
            return f"{head}, which is not installed; {fix}"
        if self.status == "too_old":
            return f"{head}, got {self.name} {self.version}; {fix}"
        return f"{head}, got {self.name} {self.version}, which is newer than tested (CANARY_UNTESTED=refuse); {fix}"

    def describe(self, untested: Untested = "guard") -> str:
        """For ``canary plugins``: the engine, and whether it is guarded."""
        if self.status == "not_installed":
            return f"{self.name} is not installed; needs {self.supported_range}"
        head = f"{self.name} {self.version}"
        if self.status == "tested":
            return f"{head} (tested)"
        if self.status == "too_old":
            return f"{head} is not supported; needs {self.supported_range}"
        if self.status == "known_bad":
            return f"{head} is known to be bad and refused: {self.reason}"
        then = (
            "refused, since CANARY_UNTESTED=refuse"
            if untested == "refuse"
            else "guarded if all functions to hook are found and the first forwards pass the audit"
        )
        return f"{head} is newer than tested ({self.supported_range}): {then}"


def _is_above(version: Version, broken: Specifier) -> bool:
    """Whether ``version``, outside of ``broken``, is above, not below."""
    if broken.operator in ("<", "<="):
        return True
    return broken.operator not in (">", ">=") and version > Version(broken.version.removesuffix(".*"))
