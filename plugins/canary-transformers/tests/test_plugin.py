"""What ``CANARY_PLUGINS=transformers`` turns on."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

SCRIPT = """
import json, logging, sys
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from canary_core import plugins
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1)).eval()
page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
model.generate_batch([[5, 6, 7]], generation_config=GenerationConfig(max_new_tokens=3, eos_token_id=-1),
    continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16, **{page: 8}))
from canary_transformers import plugin
print(json.dumps({"argv": sys.argv[1:], "stats": plugin._guard.stats() if plugin._guard else None}))
"""


@pytest.mark.parametrize("allowed", ["transformers", ""])
def test_an_unchanged_script_is_guarded_through_the_environment(allowed, tmp_path):
    """``CANARY_PLUGINS=transformers canary run script.py``; without the variable nothing is loaded."""
    if not any(p.name == "transformers" for p in metadata.entry_points(group="canary")):
        pytest.skip("canary-transformers is not installed, only on the path: no entry point")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "canary_core", "run", str(script), "--flag"],
        env={**os.environ, "CANARY_PLUGINS": allowed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["argv"] == ["--flag"]
    assert (told["stats"] is not None) == bool(allowed)
    if allowed:
        assert told["stats"]["forwards"] == 3
