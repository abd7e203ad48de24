"""Updates of the weights under running requests."""

import ctypes
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


def flip_a_weight(engine: Any, element: int, bit: int) -> dict[str, Any]:
    """Flips a bit of the largest parameter, past torch; gives its name, and the element's bits before and after."""
    name, weight = max(engine.runner.model.named_parameters(), key=lambda one: one[1].numel())
    size = weight.element_size()
    memory = {2: ctypes.c_uint16, 4: ctypes.c_uint32}[size].from_address(weight.data_ptr() + size * element)
    before = memory.value
    memory.value = before ^ 1 << bit
    return {"name": name, "old": f"(0x{before:0{2 * size}x})", "new": f"(0x{memory.value:0{2 * size}x})"}


def update_past_torch(engine: Any) -> None:
    """All parameters, so that no version counter moves."""
    for parameter in engine.runner.model.parameters():
        parameter.data.mul_(1.05)
