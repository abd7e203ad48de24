"""The plugin ``mini_infer``: what ``CANARY_PLUGINS=mini_infer`` turns on. Importing it imports no engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from canary_core import CanaryConfig, EngineInfo, HookTarget, hookimpl

if TYPE_CHECKING:
    from canary_core.testing import PluginConformance

CANARY_PROTOCOL = 1
"""The version of Canary's hooks that this plugin was written for."""


@hookimpl
def canary_engine() -> EngineInfo:
    """The release that this plugin was tested with."""
    return EngineInfo.of("mini-infer", "==0.2.5")


@hookimpl
def canary_targets() -> Sequence[HookTarget]:
    """The functions that are hooked, with the parameters that are relied on."""
    targets = {
        "engine.InferenceEngine.__init__": "",
        "engine.InferenceEngine.step": "",
        "models.qwen2.Qwen2ForCausalLM.forward": "input_ids past_key_values block_pool context_lens slot_mapping",
        "scheduler.continuous.ContinuousScheduler.schedule": "",
        "scheduler.continuous.ContinuousScheduler.add_sequence": "sequence",
        "cache.block_pool.BlockPool.allocate_block": "",
        "cache.block_pool.BlockPool.free_block": "block_id",
        "cache.block_pool.BlockPool.gather_batched_paged_kv": "layer_idx",
        "cache.block_pool.BlockPool.write_sequence_kv": "layer_idx physical_block_ids start_token_idx k_seq",
        "cache.prefix_cache.PrefixCache.match_prefix": "",
    }
    return [HookTarget(f"mini_infer.{name}", tuple(used.split())) for name, used in targets.items()]


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards every engine of this process that is made from now on."""
    from canary_mini_infer.hooks import HOOKS

    HOOKS.install(config)


@hookimpl
def canary_uninstall() -> None:
    """Ends what `canary_install` began."""
    from canary_mini_infer.hooks import HOOKS

    HOOKS.uninstall()


@hookimpl
def canary_conformance() -> "type[PluginConformance]":
    """What ``canary check-plugin mini_infer`` runs."""
    from canary_mini_infer.session import MiniConformance

    return MiniConformance
