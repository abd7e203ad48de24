"""Numbers of layers by the names of their modules."""

import re
from collections.abc import Sequence


def layer_numbers(names: Sequence[str]) -> dict[str, int]:
    """The number in each name, such as 3 of ``model.layers.3.self_attn.attn``, 0 without one; all are counted where two
    have the same, as two attentions of one block."""
    found = {name: re.findall(r"\.(\d+)\.", f".{name}.") for name in names}
    given = {name: int(numbers[0]) if numbers else 0 for name, numbers in found.items()}
    return given if len(set(given.values())) == len(given) else {name: i for i, name in enumerate(names)}
