"""``sglang.Engine`` with several ranks: ``python -m engines.ranks_script FOLDER OPTIONS`` serves
FOLDER/phases.json.

A phase has ``control`` (see `tools.ranks_witness`), ``prompts`` and ``new_tokens``, and maybe ``idle_s``, for which
nobody is served after it. Prints one JSON line for each, after ``PHASE``: by prompt its tokens and how it ended.
``OPTIONS``, a JSON object: more `ServerArgs`, and ``model``, one of `models.MODELS`.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from engines.gpu_models import GPU_DEFAULTS
from engines.models import write_model
from engines.user_script import on_cpu


async def serve(engine: Any, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """All prompts at once; a request that fails says how."""
    sampling = dict(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    jobs = [engine.async_generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
    return [
        {"tokens": [], "status": getattr(done, "status_code", None), "error": str(done)}
        if isinstance(done, BaseException)
        else {"tokens": done["output_ids"], "status": 200, "cached": done["meta_info"]["cached_tokens"]}
        for done in await asyncio.gather(*jobs, return_exceptions=True)
    ]


def main() -> None:
    """See above."""
    import sglang

    folder = Path(sys.argv[1])
    options = json.loads(sys.argv[2])
    defaults = GPU_DEFAULTS if options.get("device") == "cuda" else on_cpu()[1]
    path = write_model(folder / "model", options.pop("model"))
    engine = sglang.Engine(model_path=path, **{**defaults, "disable_overlap_schedule": False, **options})
    for phase in json.loads(folder.joinpath("phases.json").read_text()):
        # At once, so that nobody reads half of it.
        fresh = folder / "control.new"
        fresh.write_text(phase["control"])
        fresh.replace(folder / "control")
        done = engine.loop.run_until_complete(serve(engine, phase["prompts"], phase["new_tokens"]))
        sys.stdout.write("\nPHASE " + json.dumps(done) + "\n")
        sys.stdout.flush()
        time.sleep(phase.get("idle_s", 0))
    engine.shutdown()


if __name__ == "__main__":
    main()
