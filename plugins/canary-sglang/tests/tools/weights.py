"""Updates of the weights under running requests."""

from typing import Any

import torch

from tools.inspection import findings


def serve_through_updates(engine: Any, prompts: list[list[int]], retract: bool) -> dict[str, Any]:
    """All ``prompts`` at once, and two updates of the weights while they run: with ``retract`` all running requests
    lose their KV before, and the prefix cache is flushed; without, they go on with theirs, and nothing is flushed.
    Gives what was found, and the changes of these updates; nothing where this SGLang can't pause."""
    try:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
    except ImportError:
        return {}

    (canary,) = engine.canaries
    before = canary.stats().get("weights_changed", 0)
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, 14, f"running-{number}")
    steps = 0
    while engine.step():
        steps += 1
        if steps not in (4, 9):
            continue
        if retract:
            engine.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        update(engine)
        if retract:
            if not engine.scheduler.flush_cache():
                raise RuntimeError("the cache can't be flushed")
            engine.scheduler.continue_generation(ContinueGenerationReqInput())
    changes = canary.stats().get("weights_changed", 0) - before
    return {**findings(engine), "on": bool(canary.enabled), "changes": changes, "steps": steps}


def update(engine: Any) -> None:
    """New norms, through SGLang's own function."""
    model = engine.runner.model
    news = [(name, p.detach().clone() * 1.05) for name, p in model.named_parameters() if "layernorm" in name]
    updater = getattr(engine.runner, "weight_updater", engine.runner)
    done, why = updater.update_weights_from_tensor(named_tensors=news, load_format="direct")
    if not done:
        raise RuntimeError(why)
    torch.set_grad_enabled(False)
