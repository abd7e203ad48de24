"""`cache_structure`: the prefix cache contradicts itself, its allocator or its window map."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import OWNERS, TWO_OWNERS, Link
from canary_core.records import Kind

BROKEN_CACHE = Class(
    "broken_cache",
    "a prefix cache that contradicts itself",
    ("sglang#38941", "sglang#27789"),
    ("Find the node; look for unusual ends of requests (abort, retraction) just before.",),
)

KIND = FindingKind(
    kind=Kind.CACHE_STRUCTURE,
    place=10,
    sentences=(Sentence("{node} is broken: {detail}."),),
    brings={Kind.CACHE_STRUCTURE: {Link.STEP, *OWNERS}, **TWO_OWNERS},
    diagnose=as_told(BROKEN_CACHE),
    classes=(BROKEN_CACHE,),
    blame=Blame("hooks", "the prefix cache is read wrongly"),
    page=Page(
        wrong=Wrong.CACHE,
        means="""
        The prefix cache contradicts itself, its allocator, or the map of its window. Only a sweep
        (`CANARY_SWEEP_INTERVAL`) finds this. The field `rule` says which rule is broken, `detail` says how.

        | `rule` | what is wrong |
        |---|---|
        | `parent` | a node has a child whose parent is another node |
        | `key` | a node is not found under its own key, or its key is no multiple of the page |
        | `length` | a node's key and its slots have different lengths |
        | `lock_ref` | a lock count is below zero |
        | `lock_order` | a child is held more often than its parent, or a window more often than its node |
        | `window` | a node holds slots of the window and none of the full pool |
        | `window_slot` | a window has passed and its node still has slots there |
        | `slot_free` | a slot is in the cache and in the allocator's free list |
        | `slot_twice` | a slot is in two nodes |
        | `sizes` | the cache's own counts are not those of its nodes; judged where it stood still for a whole walk |
        | `core` | the own check of SGLang's Rust core has failed |
        | `host` | slots in host memory do not hold the tokens and positions of the node, or the host pool could hand them out |
        | `tier` | a node is nowhere, or its parent is not where the node is |
        """,  # noqa: E501  (a row of a table)
        causes="""
        A slot freed while it is cached. A lock that is released twice, or never. A node that was split or merged
        wrongly. A race between the scheduler and a thread that copies to host memory.
        """,
        next_steps="""
        Find `node` in the cache. `lock_ref` and `lock_order` point to a request that ended in an unusual way.
        `slot_free` and `slot_twice` will become `double_alloc` and `position` findings later, if nobody notices.
        """,
        remedies=(ALLOCATOR,),
    ),
)
