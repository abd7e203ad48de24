"""Kinds of bugs that were tried from outside before anything here was made for them: which entries have them now."""

KINDS: dict[str, tuple[str, ...] | str] = {
    "a streaming session keeps the stale hash of a block": ("live/vllm_session_keeps_a_stale_hash",),
    "another adapter under the same name": ("live/vllm_another_adapter_of_that_name", "vllm/lora_left_out_of_the_hash"),
    "a growing cache keeps its length when it is reset": ("live/transformers_reset_keeps_its_length",),
    "an adapter reloaded in place": ("live/vllm_adapter_reloaded",),
    "weights updated with the prefix cache kept": (
        "live/sglang_weights_kept",
        "live/vllm_weights_kept",
        "live/transformers_weights_kept",
    ),
    "weights updated with the blocks of a tier kept": (
        "live/vllm_tier_kept",
        "live/vllm_lmcache_kept_when_it_is_reset",
    ),
    "lengths that attention is given": (
        "sglang/decode_reads_one_token_too_few",
        "sglang/later_chunk_reads_no_context",
        "sglang/list_begins_of_rows_one_short",
        "vllm/later_chunk_with_the_first_chunks_length",
        "vllm/length_one_short_in_decode",
        "transformers/attention_mask_leaves_a_token_out",
    ),
    "a connector fills the wrong blocks; a failed load counts as done; a store runs after its blocks were used again": (
        "vllm/connector_fills_the_wrong_blocks",
        "vllm/failed_load_counts_as_done",
        "vllm/store_runs_after_its_blocks_were_used_again",
    ),
    "draft layers, scales or parts of a block that a tier leaves as they were": (
        "vllm/load_brings_the_first_layer_only",
        "vllm/load_brings_half_of_each_block",
        "sglang/load_from_host_memory_brings_only_k",
        "sglang/storage_keeps_only_k",
    ),
    "an asynchronous scheduler's tokens are not those that were sampled": (
        "vllm/asynchronous_scheduler_notes_another_token",
    ),
    "preemption and resume": (
        "vllm/preempted_request_resumes_where_it_was",
        "vllm/resumed_request_keeps_its_old_blocks",
    ),
    "windows and rings that go back, or round": (
        "live/transformers_static_window_cropped",
        "live/transformers_window_cropped_twice",
        "transformers/window_ring_read_one_place_too_late",
        "transformers/window_ring_keeps_the_wrong_end_of_a_chunk",
        "transformers/static_window_rolls_the_other_way",
        "transformers/window_cut_too_early_after_a_draft",
    ),
    "a rejected load is computed again, and the V2 runner does not rewind its count (vllm#49250)": (
        "live/vllm_rejected_load_computed_again",
    ),
    "pages zeroed by sleep and wake-up, and their hashes kept (vllm#17103, sglang#19029)": (
        "both engines do it on a GPU only; the core finds it as `zeroed`"
    ),
    "a dummy batch of an idle rank writes drafts through stale rows (vllm#56734)": "wants two ranks with a drafter",
    "beams of a paged engine take the wrong parents' rows (SGLang)": "its own beam search ends with an error on a CPU",
    "cross-attention KV of the input before (transformers#31166)": (
        "transformers/cross_attention_of_the_input_before",
    ),
}
"""By kind: files of entries, or the reason why there is none."""
