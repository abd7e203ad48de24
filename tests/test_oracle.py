"""`TokenOracle`: an answer depends on every token before it, and on its place."""

import torch

from canary_core.testing import TokenOracle


def test_an_answer_depends_on_each_token_and_its_place():
    """Another token, two that are exchanged, one less: other answers. The same tokens give the same one."""
    oracle = TokenOracle(slots=8, vocabulary=50_000)
    prompt = [5, 9, 30, 30, 7]
    right = oracle.answer(prompt, 4)
    assert oracle.answer(list(prompt), 4) == right
    others = [[5, 9, 30, 31, 7], [9, 5, 30, 30, 7], [5, 9, 30, 7], [5, 9, 30, 30, 7, 7]]
    assert all(oracle.answer(other, 4) != right for other in others)
    assert all(3 <= token < 50_000 for token in right)


def test_a_sequence_is_read_through_the_engines_table():
    """Tokens are where a forward has stored them; a greedy sampler gives what follows the ones that are read."""
    oracle = TokenOracle(slots=8, vocabulary=100)
    oracle.store(torch.tensor([6, 2, 4]), torch.tensor([11, 12, 13], dtype=torch.int32))
    table = torch.tensor([6, 2, 4], dtype=torch.int32)
    assert oracle.read(table).tolist() == [11, 12, 13]
    logits = torch.randn(2, 100)
    oracle.speak(logits, [oracle.read(table), oracle.read(table[:2])])
    assert logits.argmax(1).tolist() == [oracle.after([11, 12, 13]), oracle.after([11, 12])]
