"""The engines of SGLang that the museum's bugs run on, by name."""

from dataclasses import replace
from pathlib import Path

from engines.process import GUARD, EngineProcess
from engines.setups import SETUPS as OTHERS
from engines.setups import SPECULATIVE, Setup

from bugs.museum import PROFILES

IMPORTED = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
"""What must be set before SGLang is imported, the same for all: so all engines are forked off one process that has done
that. What is compiled for a CPU starts threads, after which a process can't be forked."""

PYTHON_TREE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
"""The prefix cache's tree in Python, where its functions can be replaced; by default it is in Rust."""

STORAGE = replace(OTHERS["hicache"], options={**OTHERS["hicache"].options, "hicache_ratio": 1.5})
OWN = {
    "hicache_storage": STORAGE,
    "hicache_private": replace(STORAGE, environment={"CANARY_LEDGER_PRIVATE": "HiCacheFile"}),
    "small": Setup({"max_total_tokens": 112, "schedule_conservativeness": 0.1}, PYTHON_TREE),
    "swa_python": replace(OTHERS["swa"], environment={**OTHERS["swa"].environment, **PYTHON_TREE}),
    "triton": Setup({"attention_backend": "triton", "dtype": "float32", "triton_attention_num_kv_splits": 1}),
}
"""``hicache_storage``: host memory that is soon full, too; its traffic attaches a storage back end, whose files nobody
else has, as ``hicache_private`` says. ``small``: a pool that is soon full. ``triton``: attention has a list of slots of
its own."""


def _of_the_museum(setup: Setup) -> Setup:
    later = {name: value for name, value in setup.environment.items() if name not in IMPORTED}
    guard = {name: value for name, value in later.items() if name.startswith("CANARY_")}
    options = {**setup.options, "environment": {k: v for k, v in later.items() if k not in guard}}
    return replace(setup, options=options, environment={**IMPORTED, **guard}, driver="museum")


SETUPS = {name: _of_the_museum(setup) for name, setup in {**OTHERS, **SPECULATIVE, **OWN}.items()}
"""Those of canary-sglang's own tests, and `OWN`."""


def guarded(setup: str, profile: str, folder: Path) -> EngineProcess:
    """An engine as a user has it who sets nothing but the profile."""
    unset = dict.fromkeys(GUARD, "") | {"CANARY_PLUGINS": "sglang"}
    return EngineProcess(SETUPS[setup], folder, **unset, CANARY_PROFILE=PROFILES[profile])
