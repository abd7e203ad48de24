"""Canary's knowledge of SGLang's code, and of differences between releases.

This package has the hooked functions, and the used parts of runners, schedulers, allocators, prefix caches,
`ForwardBatch` and switches. Parts for one room only are named there:

| package or module      | part of SGLang                                                                         |
|------------------------|----------------------------------------------------------------------------------------|
| `pools`                | KV pools, by class in `pool_kinds`; `MambaPool` in `mamba`                             |
| `batches`              | tensors of `ForwardBatch`, `ScheduleBatch` and of draft workers' results               |
| `prefix_cache/tree.py` | nodes of the prefix caches, with a table of releases and caches                        |
| `transfer`             | HiCache's controllers, transfer managers of PD disaggregation                          |

Some names are used everywhere: a runner's pools, a scheduler's ``tree_cache``, a batch's ``reqs``, a request's ``rid``.

Differences between releases:

| part                                     | releases                                                             |
|------------------------------------------|----------------------------------------------------------------------|
| `ModelRunner.alloc_memory_pool`          | 0.5.14 and later; before, `init_memory_pool`                         |
| `ModelRunner.post_capture_resize_kv_pool`| from 0.5.17: a pool may get its memory only after graphs are captured|
| `ForwardBatch`, `Scheduler.run_batch`,   | the used parts run on each of 0.5.14 - 0.5.23                        |
| `on_idle`, `flush_cache`                 |                                                                      |
| allocators' lists of free pages          | `release_pages`, in the paged one `staged_pages` from 0.5.2x;        |
|                                          | `free_segment` from 0.5.17, `free_page_ids` from 0.5.21;             |
|                                          | `restore_state` up to 0.5.14                                         |
| DSA's indexer                            | `index_k_with_scale_buffer`: a list, from 0.5.21 a property          |
| `NSATokenToKVPool`                       | called `DSATokenToKVPool` from 0.5.14                                |
| `mamba_cache_chunk_size`                 | to 0.5.17 a property of `ServerArgs`, then of `runtime_context`      |
| `HybridCacheController.start_loading`    | to 0.5.20 a method of its own, then inherited of `HiCacheController` |
| a request's tokens in the cache          | tensors of slots, from 0.5.22 numbers, see `progress`                |
| the cache taking a running request's KV  | `maybe_cache_unfinished_req`, from 0.5.22 `checkpoint_kv_cache`      |
| numbers in the place of media            | one an item, from 0.5.23 four of 62 bits that take turns             |
| switches of `sglang.srt.environ`         | older compressors to 0.5.17, the cache in C++ to 0.5.20              |
"""
