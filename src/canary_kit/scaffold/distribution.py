"""Writes the distribution of a new plugin, from templates."""

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import canary_core
from canary_core.errors import PluginError

SUFFIX = "jinja"


@dataclass(frozen=True, slots=True)
class Names:
    """Names derived from a plugin's ``name``: ``my_engine`` is the distribution ``canary-my-engine`` with the package
    ``canary_my_engine``, and its classes begin with ``MyEngine``.

    Raises `PluginError` if ``name`` is unfit.
    """

    name: str

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", self.name):
            return
        words = re.findall(r"[a-z0-9]+", self.name.lower())
        near = "_".join(words).lstrip("0123456789_")
        hint = f", for example {near}" if near else ""
        raise PluginError(
            f"a plugin's name begins with a letter and has lower-case letters, digits and single underscores between "
            f"them, got {self.name!r}; name it after its engine{hint}"
        )

    @property
    def package(self) -> str:
        """The Python package."""
        return f"canary_{self.name}"

    @property
    def distribution(self) -> str:
        """Name for pip, and of the folder."""
        return f"canary-{self.name.replace('_', '-')}"

    @property
    def title(self) -> str:
        """How classes begin."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    def require_free(self) -> None:
        """Raises `PluginError` if a plugin of this name, or a package with its package's name, is installed."""
        for point in metadata.entry_points(group="canary", name=self.name):
            dist = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            raise PluginError(f"a plugin named {self.name!r} is installed already ({dist}); take another name")
        if importlib.util.find_spec(self.package) is not None:
            raise PluginError(f"a package {self.package!r} is installed already; take another name than {self.name!r}")


def write(names: Names, into: Path) -> list[Path]:
    """Writes the distribution as a new folder in ``into``, made if need be; returns the files written, relative to
    ``into``. Raises `PluginError`, with nothing written, if the new folder exists, ``into`` is no folder, or writing
    fails."""
    folder = into / names.distribution
    if folder.exists() or folder.is_symlink():
        raise PluginError(f"{folder} exists already, and nothing is overwritten; take another name or another --into")
    rendered = {names.distribution / path: text for path, text in _render(names).items()}
    try:
        for path, text in rendered.items():
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{folder} can't be written: {error}; choose another folder with --into") from error
    return list(rendered)


def _render(names: Names) -> dict[Path, str]:
    """Every file's path in the distribution, and its text."""
    environment = Environment(
        loader=PackageLoader("canary_kit.scaffold"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    fields = {
        "name": names.name,
        "package": names.package,
        "distribution": names.distribution,
        "title": names.title,
        "core_range": _core_range(),
    }
    files = {}
    for template in environment.list_templates(extensions=[SUFFIX]):
        parts = template.removesuffix(f".{SUFFIX}").split("/")
        path = Path(*(names.package if part == "package" else part for part in parts))
        files[path] = environment.get_template(template).render(fields)
    return files


def _core_range() -> str:
    """Range of canary-core releases fit for a plugin written today: up to the next minor one."""
    major, minor = canary_core.__version__.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"
