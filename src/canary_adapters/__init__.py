"""Engine-free adapters: an engine's tensors in, Canary's views out.

Sources locate a slot's bytes, a probe finds the place where shapes don't tell, pools join sources to regions and check
their addresses, tables and lengths describe the reads of a forward, events report changes of blocks, the filter
dismisses findings explained by the model, whose embedding may be spread over ranks, and rules say what its attention
means. Nothing here imports an engine; sources, pools and tables neither read from a device nor copy a tensor.
"""

from canary_adapters.addresses import require_disjoint
from canary_adapters.answer_lists import AnswerLists
from canary_adapters.answers import ANSWER_TOKENS, AnswerCheck, AnswerParts
from canary_adapters.attention_calls import AttentionCalls, Operands, unabsorbed
from canary_adapters.attention_rules import ATTENTION_TYPES, AttentionLayer, attention_layers, attention_rule
from canary_adapters.block_breaches import BlockBreach, BlockSweep, count_breaches, report_breaches
from canary_adapters.block_events import BlockEvent, BlockEvents, BlockGroup, BlockSort, add_event
from canary_adapters.block_lists import BlockLists, GivenBlocks, GivenLens, RequestBlocks, metadata_blocks, moved_states
from canary_adapters.block_loads import BlockLoads
from canary_adapters.block_replay import BlockLoad, BlockMessage, BlockReplay
from canary_adapters.complete_blocks import CompleteBlocks
from canary_adapters.compressed_kv import Expanded, Projection
from canary_adapters.contents import content_numbers, embedding_numbers, media_number, put_embeddings, put_media
from canary_adapters.draft_forwards import DraftForwards
from canary_adapters.embedding_filter import EmbeddedRequests, EmbeddingFilter
from canary_adapters.embedding_shards import EmbeddingPart, EmbeddingShards, default_store, embedding_layer
from canary_adapters.hash_chain import HashChain
from canary_adapters.held_states import HeldStates
from canary_adapters.internal_requests import LEAST_TOKENS, InternalRequests, RecomputePair, Running, is_internal
from canary_adapters.issued import judged_answer
from canary_adapters.layer_numbers import layer_numbers
from canary_adapters.layer_stores import follow_stores
from canary_adapters.lengths import FirstRows, PrefixLens, UniformLens
from canary_adapters.lmcache import lmcache_storage
from canary_adapters.marked_outputs import MARK, carried, mark
from canary_adapters.on_stream import OnStream
from canary_adapters.parked_blocks import follow_releases, free_blocks
from canary_adapters.parked_prefixes import LOST_ADAPTER, PROOF_SHARE, UNREMEMBERED, ParkedPrefix, ParkedPrefixes
from canary_adapters.parked_proofs import NOT_REMEMBERED, UNKNOWN_PREFIX
from canary_adapters.pools import (
    GrowingPool,
    JoinedPools,
    LayerTensors,
    PackedPool,
    PagedPool,
    RegionPool,
    RowPool,
    WindowPool,
    kv_layers,
    stacked_layers,
)
from canary_adapters.prefix_hits import hits_unchecked
from canary_adapters.probe import ProbedLayouts, ProbedPiece, probe_layout
from canary_adapters.recompute_pairs import RecomputePairs, model_rounding
from canary_adapters.recompute_requests import Recomputes
from canary_adapters.recompute_scheduler import IdleWorkers, SchedulerRequests, deliver, prepare
from canary_adapters.roll_call import Answer, Mark, RollCall, answer
from canary_adapters.same_inputs import same_inputs
from canary_adapters.sampled_tokens import sampled_tokens
from canary_adapters.scales import WatchedScales, kv_scales
from canary_adapters.sheltered import Sheltered
from canary_adapters.sources import (
    CHECKED_DTYPES,
    PackedPage,
    Part,
    growing_source,
    packed_page_padding,
    packed_page_source,
    paged_source,
    row_source,
)
from canary_adapters.tables import block_table, ragged_table, ring_table, slot_table
from canary_adapters.telling import Telling
from canary_adapters.token_table import TABLE_STEP, Prompts, token_table, unknown_tokens
from canary_adapters.touched_requests import TouchedRequests
from canary_adapters.tries import Tries, leaked
from canary_adapters.under_way import UnderWay
from canary_adapters.unfit_requests import refusals
from canary_adapters.verdict_pipe import BlockVerdict, VerdictPipe, VerdictPost, VerdictWay
from canary_adapters.weights import AdapterContents, WatchedWeights, WeightLoads
from canary_core.errors import error_text
from canary_core.ops.upload import number_array, upload
from canary_core.recomputer import recompute_off
from canary_core.records import FIRST_CONTENT
from canary_core.runtime.streams import BatchRows

__all__ = [
    "ANSWER_TOKENS",
    "ATTENTION_TYPES",
    "CHECKED_DTYPES",
    "FIRST_CONTENT",
    "LEAST_TOKENS",
    "LOST_ADAPTER",
    "MARK",
    "NOT_REMEMBERED",
    "PROOF_SHARE",
    "TABLE_STEP",
    "UNKNOWN_PREFIX",
    "UNREMEMBERED",
    "AdapterContents",
    "Answer",
    "AnswerCheck",
    "AnswerLists",
    "AnswerParts",
    "AttentionCalls",
    "AttentionLayer",
    "BatchRows",
    "BlockBreach",
    "BlockEvent",
    "BlockEvents",
    "BlockGroup",
    "BlockLists",
    "BlockLoad",
    "BlockLoads",
    "BlockMessage",
    "BlockReplay",
    "BlockSort",
    "BlockSweep",
    "BlockVerdict",
    "CompleteBlocks",
    "DraftForwards",
    "EmbeddedRequests",
    "EmbeddingFilter",
    "EmbeddingPart",
    "EmbeddingShards",
    "Expanded",
    "FirstRows",
    "GivenBlocks",
    "GivenLens",
    "GrowingPool",
    "HashChain",
    "HeldStates",
    "IdleWorkers",
    "InternalRequests",
    "JoinedPools",
    "LayerTensors",
    "Mark",
    "OnStream",
    "Operands",
    "PackedPage",
    "PackedPool",
    "PagedPool",
    "ParkedPrefix",
    "ParkedPrefixes",
    "Part",
    "PrefixLens",
    "ProbedLayouts",
    "ProbedPiece",
    "Projection",
    "Prompts",
    "RecomputePair",
    "RecomputePairs",
    "Recomputes",
    "RegionPool",
    "RequestBlocks",
    "RollCall",
    "RowPool",
    "Running",
    "SchedulerRequests",
    "Sheltered",
    "Telling",
    "TouchedRequests",
    "Tries",
    "UnderWay",
    "UniformLens",
    "VerdictPipe",
    "VerdictPost",
    "VerdictWay",
    "WatchedScales",
    "WatchedWeights",
    "WeightLoads",
    "WindowPool",
    "add_event",
    "answer",
    "attention_layers",
    "attention_rule",
    "block_table",
    "carried",
    "content_numbers",
    "count_breaches",
    "default_store",
    "deliver",
    "embedding_layer",
    "embedding_numbers",
    "error_text",
    "follow_releases",
    "follow_stores",
    "free_blocks",
    "growing_source",
    "hits_unchecked",
    "is_internal",
    "judged_answer",
    "kv_layers",
    "kv_scales",
    "layer_numbers",
    "leaked",
    "lmcache_storage",
    "mark",
    "media_number",
    "metadata_blocks",
    "model_rounding",
    "moved_states",
    "number_array",
    "packed_page_padding",
    "packed_page_source",
    "paged_source",
    "prepare",
    "probe_layout",
    "put_embeddings",
    "put_media",
    "ragged_table",
    "recompute_off",
    "refusals",
    "report_breaches",
    "require_disjoint",
    "ring_table",
    "row_source",
    "same_inputs",
    "sampled_tokens",
    "slot_table",
    "stacked_layers",
    "token_table",
    "unabsorbed",
    "unknown_tokens",
    "upload",
]
