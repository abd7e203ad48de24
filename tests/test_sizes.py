"""How large a room may become."""

from pathlib import Path

PLUGINS = Path(__file__).parents[1] / "plugins"
MOST_LINES = {"canary-vllm": 2525}
"""What engines have in common belongs to `canary_adapters` or the core."""


def test_a_plugin_has_only_what_its_engine_alone_needs():
    """Counted in lines of its source, as they stand."""
    lines = {
        plugin: sum(len(file.read_text().splitlines()) for file in (PLUGINS / plugin / "src").rglob("*.py"))
        for plugin in MOST_LINES
    }
    assert {plugin: count for plugin, count in lines.items() if count > MOST_LINES[plugin]} == {}
