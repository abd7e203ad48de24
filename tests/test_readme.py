"""What README.md shows must run."""

import re
from pathlib import Path

README = Path(__file__).parents[1].joinpath("README.md").read_text()


def test_library_example_finds_its_stray_write(capsys, logs):
    """The library quickstart runs as printed and reports exactly the stray write it makes."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "1 slot with wrong bytes\n"
    (finding,) = (e for e in logs if e["event"] == "violation")
    assert (finding["kind"], finding["slot"], finding["source"]) == ("bytes", 5, "k.0")


def test_commands_named_in_the_readme_exist():
    """Every ``make`` target that README.md names is in the Makefile."""
    makefile = Path(__file__).parents[1].joinpath("Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= named
    assert [t for t in named if not re.search(rf"^{t}:", makefile, re.M)] == []
