"""The table of docs/incidents.md: what the first diagnosis of each injury was, from docs/confusion.json.

``python -m support.confusion RESULTS...`` puts what ``tiny.patient`` and ``engines.confusion`` have printed into that
file, and the table into the page.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "confusion.json", ROOT / "docs" / "incidents.md"
MARKS = re.compile(r"(<!-- confusion -->\n).*?(<!-- /confusion -->)", re.S)


def table(outcomes: list[dict[str, object]]) -> str:
    """A row for each injury: what was told on each engine, and how sure; then how often the first was right."""
    engines = sorted({str(o["engine"]) for o in outcomes})
    rows = [f"| what was done | right is | {' | '.join(engines)} |", f"|---|---|{'---|' * len(engines)}"]
    for injury in dict.fromkeys(o["injury"] for o in outcomes):
        own = [o for o in outcomes if o["injury"] == injury]
        cells = []
        for engine in engines:
            told = Counter(f"{o['first']} ({o['sure']})" for o in own if o["engine"] == engine)
            cells.append(", ".join(f"{number} x {what}" for what, number in told.items()) or "")
        rows.append(f"| {injury} | `{' or '.join(own[0]['right'])}` | {' | '.join(cells)} |")
    lines = []
    for engine in engines:
        own = [o for o in outcomes if o["engine"] == engine]
        right = sum(o["first"] in o["right"] for o in own)
        wrong = [o for o in own if o["first"] not in o["right"]]
        sure = sum(o["sure"] == "certain" for o in wrong)
        classes = len({name for o in own for name in o["right"]})
        one = sum(o["incidents"] == 1 for o in own)
        lines.append(
            f"{engine}: {len(own)} injuries of {classes} classes. The first diagnosis was right in {right} of "
            f"{len(own)} ({right / len(own):.0%}), certain and wrong in {sure}. {one} of {len(own)} were one incident."
        )
    return "\n".join(rows) + "\n\n" + "\n\n".join(lines) + "\n"


def main() -> None:
    """Writes both files."""
    outcomes = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    DATA.write_text("".join(json.dumps(outcome) + "\n" for outcome in outcomes))
    PAGE.write_text(MARKS.sub(lambda m: m[1] + table(outcomes) + m[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
