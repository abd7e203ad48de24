"""`Prompts`: the requests' own tokens, as long as their prompt is computed."""

import torch

from canary_adapters import TABLE_STEP, Prompts


def test_a_prompt_is_expected_until_it_is_computed():
    """In chunks as well, and again after a preemption; rows that decode have none, and neither has who is over."""
    prompts = Prompts(torch.device("cpu"))
    prompts.give("a", torch.tensor([1, 2, 3, 4]))
    prompts.give("b", torch.tensor([5, 6]))

    def table(computed: list[int], new: list[int]) -> list[list[int]] | None:
        found = prompts.table(["a", "b"], lambda: computed, new)
        return None if found is None else [[token for token in row if token >= 0] for row in found.tolist()]

    assert table([0, 0], [2, 2]) == [[1, 2, 3, 4], [5, 6]]
    assert table([2, 2], [2, 1]) == [[1, 2, 3, 4], []]
    assert table([4, 3], [1, 1]) is None
    assert prompts.table(["a", "b"], lambda: 1 / 0, [1, 1]) is None, "in decode nothing is asked"
    prompts.again("b")
    prompts.again("never heard of")
    assert table([5, 0], [1, 2]) == [[], [5, 6]]
    prompts.again("a")
    prompts.drop("a")
    prompts.drop("b")
    assert table([0, 0], [4, 2]) is None


def test_a_table_has_room_for_what_is_computed():
    """Its width is that of the longest row that computes its prompt, in whole steps."""
    prompts = Prompts(torch.device("cpu"))
    prompts.give("a", torch.arange(5))
    found = prompts.table(["a"], lambda: [TABLE_STEP - 1], [2])
    assert found is None
    found = prompts.table(["a"], lambda: [0], [5])
    assert found is None, "it was computed whole"
    prompts.again("a")
    found = prompts.table(["a"], lambda: [0], [5])
    assert found is not None
    assert found.shape == (1, TABLE_STEP)
