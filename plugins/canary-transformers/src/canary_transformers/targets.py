"""Functions of Transformers hooked for the whole process, with the parameters relied on.

`continuous.compat` has the hooks on single objects: a cache's pool and allocators.
"""

from canary_core import HookTarget

API = "transformers.generation.continuous_batching.continuous_api"
MANAGER = f"{API}.ContinuousBatchingManager"
MODEL = "transformers.modeling_utils.PreTrainedModel"
CACHE = "transformers.cache_utils.Cache"
MIXIN = "transformers.generation.utils.GenerationMixin"

TARGETS = (
    HookTarget(f"{MANAGER}._create_batch_processor"),
    HookTarget(f"{MANAGER}._generation_step"),
    HookTarget(f"{MANAGER}.stop"),
    HookTarget(f"{API}.ContinuousMixin.continuous_batching_context_manager"),
    HookTarget(f"{MODEL}.__call__"),
    HookTarget(f"{MODEL}.get_compiled_call"),
    HookTarget(f"{MIXIN}.generate"),
    HookTarget(f"{MIXIN}.prepare_inputs_for_generation", ("input_ids",)),
    # Their one parameter is read by its place, whatever it is called.
    HookTarget(f"{CACHE}.reorder_cache"),
    HookTarget(f"{CACHE}.batch_select_indices"),
    HookTarget(f"{CACHE}.batch_repeat_interleave"),
    HookTarget(f"{CACHE}.crop"),
    HookTarget(f"{CACHE}.reset"),
)
