"""What the engines are asked to serve. All of it works on any stage that has requests."""

from bugs.museum import Stage


def finish(stage: Stage, most: int = 400) -> None:
    """Serves until there is nothing left to do."""
    for _ in range(most):
        if not stage.step():
            return
    raise RuntimeError(f"the traffic does not end in {most} forwards")


def until(stage: Stage, name: str, tokens: int) -> None:
    """Serves until the request has generated so many."""
    for _ in range(200):
        if stage.answered(name) >= tokens:
            return
        stage.step()
    raise RuntimeError(f"{name} gets no further than {stage.answered(name)} tokens")


def together(stage: Stage) -> None:
    """Alice and Bob decode side by side; Bob has more to say."""
    stage.submit("alice", stage.tokens("alice", 24), 10)
    stage.submit("bob", stage.tokens("bob", 31), 16)
    finish(stage)


def joining(stage: Stage) -> None:
    """Alice decodes; Bob and then Carol come in the middle of it; Alice ends first."""
    stage.submit("alice", stage.tokens("alice", 24), 8)
    until(stage, "alice", 3)
    stage.submit("bob", stage.tokens("bob", 31), 12)
    until(stage, "bob", 2)
    stage.submit("carol", stage.tokens("carol", 17), 12)
    finish(stage)


def same_beginning(stage: Stage) -> None:
    """Alice is served to the end. Bob, who comes after her, begins like her."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 6)
    finish(stage)
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 10)
    finish(stage)


def same_beginning_at_once(stage: Stage) -> None:
    """Alice is prefilled and decodes; Bob, who begins like her, comes meanwhile; then Carol does."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 12)
    until(stage, "alice", 3)
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 10)
    until(stage, "bob", 3)
    stage.submit("carol", [*asked, *stage.tokens("carol", 5)], 8)
    finish(stage)


def asked_again(stage: Stage) -> None:
    """Alice asks, and Bob asks what she did and what she was told, and more."""
    asked = stage.tokens("alice", 30)
    stage.submit("alice", asked, 8)
    finish(stage)
    stage.submit("bob", asked, 8)
    finish(stage)
    stage.submit("carol", asked, 12)
    finish(stage)


def through_host_memory(stage: Stage) -> None:
    """Alice is served; others fill the pool, so that her KV is in host memory only; Bob begins like her."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 4)
    finish(stage)
    for number in range(5):
        stage.submit(f"other{number}", stage.tokens(f"other{number}", 50), 2)
        finish(stage)
    stage.submit("bob", [*asked, *stage.tokens("bob", 3)], 6)
    finish(stage)
