from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny.answers import Answers


@pytest.fixture
def answers(guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Answers]]:
    """Makes one, and restores the model's weights after the test."""
    made: list[tuple[Answers, dict[str, torch.Tensor]]] = []

    def make(*args: Any, **kwargs: Any) -> Answers:
        one = Answers(guard, *args, **kwargs)
        one.mark(monkeypatch)
        made.append((one, {name: w.clone() for name, w in one.model.state_dict().items()}))
        return one

    yield make
    for one, weights in made:
        one.model.load_state_dict(weights)
