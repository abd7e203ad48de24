"""The engine for the conformance suite: driven from outside of Canary and of the adapter."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mini_infer import InferenceEngine, Qwen2Config, Qwen2ForCausalLM
from mini_infer.scheduler import Sequence as Request
from torch import Tensor

from canary_core.testing import Ability, EngineSession, PluginConformance
from canary_mini_infer import plugin

LAYERS, PAGE, VOCABULARY = 2, 16, 128
HALVES = ("k", "v")
Change = Callable[[dict[str, Any], int], None]
"""Breaks the arguments of a forward, at a row."""


def small_engine(blocks: int = 64, mended: bool = False, **settings: Any) -> InferenceEngine:
    """A model of random weights, always the same, and a pool of ``blocks`` blocks.

    mini-infer 0.2.5 computes a prompt that hits its prefix cache without the cached KV, and stores it over the cached
    blocks. ``mended``: it hands the cached KV to the model, and stores behind it. Otherwise prefix caching is off,
    unless ``settings`` turn it on.
    """
    config = Qwen2Config(VOCABULARY, 32, 64, LAYERS, 4, 2, 8, max_position_embeddings=512, tie_word_embeddings=False)
    model = Qwen2ForCausalLM(config).eval()
    draw = torch.Generator().manual_seed(0)
    for name, weights in model.named_parameters():
        if "norm" not in name:
            # So large that the next token depends on all before it.
            weights.data.normal_(std=0.4, generator=draw)
    settings = {"enable_prefix_caching": mended, **settings}
    engine = InferenceEngine(model, config, blocks, PAGE, device=torch.device("cpu"), **settings)
    if mended:
        _mend(engine)
    return engine


def _mend(engine: InferenceEngine) -> None:
    """A hit ends before the last token, so that there is one to compute, and brings its KV."""
    match = engine.prefix_cache.match_prefix

    def matched(tokens: list[int], pool: Any) -> tuple[list[int], int]:
        blocks, count = match(tokens[:-1], pool)
        request = next(r for r in engine.scheduler.running if r.prompt_token_ids is tokens)
        if count:
            request.past_key_values = [pool.read_sequence_kv(layer, blocks, count) for layer in range(LAYERS)]
        return blocks, count

    engine.prefix_cache.match_prefix = matched


class MiniSession(EngineSession):
    """A fresh engine, under whatever hooks are installed. Its own block tables and tensors say where KV is."""

    def __init__(self, mended: bool = False) -> None:
        self.engine = small_engine(192 if mended else 64, mended)
        self.requests: dict[str, Request] = {}
        self._model_changes: dict[str, Change] = {}
        self._store_changes: dict[str, Change] = {}
        self._model = self.engine.model.forward
        self.engine.model.forward = self._forward
        self._store = self.engine.block_pool.write_sequence_kv
        self.engine.block_pool.write_sequence_kv = self._write

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """K and V of each layer."""
        pool = self.engine.block_pool
        caches = (pool.key_caches, pool.value_caches)
        return {f"{half}.{i}": t for half, cache in zip(HALVES, caches, strict=True) for i, t in enumerate(cache)}

    def submit(self, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request."""
        self.requests[request] = self.engine.add_request(list(tokens), max_tokens=new_tokens, request_id=request)

    def step(self) -> bool:
        """Runs one iteration; False once nothing is left. The last one lets go of what has ended."""
        running = self.engine.scheduler.has_unfinished_sequences()
        if running:
            self.engine.step()
        return running

    def answer(self, request: str) -> Sequence[int]:
        """The tokens that were generated so far."""
        return list(self.requests[request].output_token_ids)

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        """Flips one bit of that KV, found through the request's block table."""
        block = self.requests[request].block_table.physical_block_ids[position // PAGE]
        pool = self.engine.block_pool
        cache = (pool.key_caches, pool.value_caches)[HALVES.index(half)]
        cache[layer].view(torch.int32)[block, 0, position % PAGE, 0] ^= 1 << 20

    def evict(self) -> None:
        """Empties the prefix cache."""
        self.engine.prefix_cache.evict_lru(self.engine.block_pool, len(self.engine.prefix_cache.last_accessed))

    def preempt(self, request: str) -> None:
        """Takes a running request's blocks."""
        self.engine.scheduler.preempt(self.requests[request])

    def release_running(self, request: str) -> None:
        """The bug of a free too many."""
        self.engine.block_pool.free_blocks(list(self.requests[request].block_table.physical_block_ids))

    def release_again(self, request: str) -> None:
        """The bug of a double release: what only the prefix cache holds is let go of."""
        held = {block for r in self.requests.values() for block in r.block_table.physical_block_ids}
        self.engine.block_pool.free_blocks([b for b in self.engine.prefix_cache.last_accessed if b not in held])

    def hand_out_cached(self) -> None:
        """The bug of a lost eviction: a cached block is in the free list, and so is handed out."""
        held = {block for r in self.requests.values() for block in r.block_table.physical_block_ids}
        pool = self.engine.block_pool
        pool.free_list.append(next(b for b in self.engine.prefix_cache.last_accessed if b not in held))
        pool.allocate_block()

    def misplace_write(self, request: str) -> None:
        """The bug of a wrong slot mapping: a decode's token goes beside its own slot, a prompt one further."""

        def wrong_row(given: dict[str, Any], row: int) -> None:
            block, offset = given["slot_mapping"][row]
            given["slot_mapping"][row] = (block, offset ^ 1)

        def wrong_start(given: dict[str, Any], row: int) -> None:
            given["start_token_idx"] += 1

        if self.requests[request].output_token_ids:
            self._model_changes[request] = wrong_row
        else:
            self._store_changes[request] = wrong_start

    def misfeed(self, request: str) -> None:
        """The bug of a token that is another's."""

        def wrong(given: dict[str, Any], row: int) -> None:
            given["input_ids"][row, -1] ^= 1

        self._model_changes[request] = wrong

    def shift_positions(self, request: str) -> None:
        """The bug of positions that count from one."""

        def wrong(given: dict[str, Any], row: int) -> None:
            new = given["input_ids"].shape[1]
            past = given.get("past_key_values")
            begins = [length - 1 for length in given.get("context_lens", ())] or [past[0][0].shape[2] if past else 0]
            given["position_ids"] = torch.tensor([range(begin, begin + new) for begin in begins])
            given["position_ids"][row] += 1
            if new > 1:
                # Else the model makes its mask from the positions, and fails.
                given["attention_mask"] = torch.ones(new, begins[0] + new, dtype=torch.bool).tril(begins[0])

        self._model_changes[request] = wrong

    def miscount(self, request: str, tokens: int) -> None:
        """The bug of a length that the model has wrong."""

        def wrong(given: dict[str, Any], row: int) -> None:
            given["context_lens"][row] += tokens

        self._model_changes[request] = wrong

    def misplace_read(self, request: str, position: int, other: str) -> None:
        """The bug of a block table that has another's block."""

        def wrong(given: dict[str, Any], row: int) -> None:
            blocks = list(given["block_tables"][row])
            blocks[position // PAGE] = self.requests[other].block_table.physical_block_ids[position // PAGE]
            given["block_tables"][row] = blocks

        self._model_changes[request] = wrong

    def spoil_store(self, layer: int, half: str, request: str) -> None:
        """The bug of another layer's store that runs on: it hits what was just stored."""
        pool, right = self.engine.block_pool, self.engine.block_pool.gather_batched_paged_kv

        def wrong(stored: int, *given: Any) -> Any:
            gathered = right(stored, *given)
            if stored == layer:
                pool.gather_batched_paged_kv = right
                self.poke(layer, half, request, self.requests[request].block_table.num_tokens - 1)
            return gathered

        pool.gather_batched_paged_kv = wrong

    def _forward(self, input_ids: Tensor, **given: Any) -> Any:
        """The model, whose arguments a planted bug changes."""
        given["input_ids"] = input_ids
        tables = given.get("block_tables")
        for row, request in enumerate(self._prompt() if tables is None else map(self._owner, tables)):
            change = self._model_changes.pop(request, None)
            if change is not None:
                change(given, row)
        return self._model(**given)

    def _write(self, **given: Any) -> None:
        """The store of a prompt's layer, likewise; a bug stays for all layers."""
        (request,) = self._prompt()
        if request in self._store_changes:
            self._store_changes[request](given, 0)
            if given["layer_idx"] == LAYERS - 1:
                del self._store_changes[request]
        self._store(**given)

    def _owner(self, blocks: Sequence[int]) -> str:
        """The request with this very block table."""
        return next(name for name, r in self.requests.items() if r.block_table.physical_block_ids is blocks)

    def _prompt(self) -> list[str]:
        """The request whose prompt goes on: its slots are reserved, and its tokens not yet counted."""
        return [
            name
            for name, r in self.requests.items()
            if not r.output_token_ids and r.block_table.num_tokens > r.prompt_tokens_processed
        ]


_OF_PREFIXES: frozenset[Ability] = frozenset({"prefix_cache", "park", "evict", "names"})


class MiniConformance(PluginConformance):
    """mini-infer as it is, without its prefix cache, which is broken (see `small_engine`)."""

    plugin = plugin
    layers, halves = LAYERS, HALVES
    abilities = frozenset(
        {
            "slot_mapping",
            "lifetime",
            "preempt",
            "raise",
            "uninstall",
            "token_ids",
            "positions",
            "lengths",
            "tables",
            "stores",
        }
    )
    lacking: Mapping[Ability, str] = {
        **dict.fromkeys(_OF_PREFIXES, "its prefix cache is broken"),
        "padding": "mini-infer pads no batches",
        "graphs": "mini-infer has no CUDA graphs",
        "fork": "mini-infer runs one answer a request",
        "copies": "mini-infer forks no requests",
        "roll_back": "mini-infer rolls no request back",
        "sampled": "the plugin does not follow the sampler",
        "identities": "mini-infer has no key beside the tokens",
        "contents": "mini-infer takes tokens only",
        "weights": "without prefixes no KV outlives its request",
        "read_tables": "attention reads the scheduler's own tables",
    }
    engine_package = "mini_infer"

    def session(self) -> EngineSession:
        """A fresh engine."""
        return MiniSession()


class MendedConformance(MiniConformance):
    """With a prefix cache that works."""

    abilities = MiniConformance.abilities | _OF_PREFIXES
    lacking: Mapping[Ability, str] = {
        **{ability: why for ability, why in MiniConformance.lacking.items() if ability not in _OF_PREFIXES},
        "weights": "mini-infer has no update of its own",
    }

    def session(self) -> EngineSession:
        """A fresh engine, mended."""
        return MiniSession(mended=True)
