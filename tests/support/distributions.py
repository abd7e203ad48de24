"""`installed`: a distribution's package and entry points on a path, without pip."""

import os
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def installed(folder: Path, site: Path) -> str:
    """Writes the metadata of the distribution in ``folder`` into ``site``; gives the ``PYTHONPATH`` on which it and
    Canary are installed."""
    about = tomllib.loads(folder.joinpath("pyproject.toml").read_text())["project"]
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    points = [f"{name} = {target}" for name, target in about["entry-points"]["canary"].items()]
    info.joinpath("entry_points.txt").write_text("\n".join(["[canary]", *points, ""]))
    return os.pathsep.join(map(str, [site, folder / "src", ROOT / "src"]))
