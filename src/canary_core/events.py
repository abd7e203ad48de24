"""`Event`: a report of Canary beside violations, as a name and fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing worth telling. ``name`` is stable and machine-readable, ``fields`` are plain values.

    | name                | when                                                                                   |
    |---------------------|----------------------------------------------------------------------------------------|
    | plugins_loaded      | plugins were loaded: names, and errors of the failed ones                              |
    | plugins_installed   | plugins hooked their engines: names, with refusals and failures                        |
    | plugins_uninstalled | plugins let go of their engines: names, and failures                                   |
    | plugin_incomplete   | a plugin has one hook of a pair: the missing one, and the consequence                  |
    | untested_engine     | an engine is newer than its plugin was tested with: versions, and the response         |
    | start_failed        | Canary was asked to start and can't: a bad setting, a plugin that isn't installed      |
    | unknown_setting     | a variable ``CANARY_*`` is no setting: its name, and the nearest setting                |
    | reporting_failed    | a plugin raised in a reporting hook                                                    |
    | attached            | a pool is guarded: backend, mode, regions, slots, memory of ours                       |
    | coverage            | share of KV bytes under guard, and the rest with reasons                               |
    | audit               | the first forwards were audited: every changed byte was claimed                        |
    | audit_failed        | a forward's changes differ from the adapter's claims: the tensors                      |
    | audit_skipped       | an audit was asked for and can't be made: why, and what to do                          |
    | pool_moved          | a region describes memory given up by the engine: its slots are not judged             |
    | starting            | a start takes long: what is being done, for how many sorts of batch, since how long     |
    | compiled_late       | a kernel was compiled while the engine served: which one, seconds                      |
    | warmed_up           | kernels of forwards are compiled: number of sorts of batch, seconds                    |
    | stats               | every ``CANARY_STATS_INTERVAL`` forwards: the counters                                 |
    | silence             | an engine runs unchecked: from its start for ``CANARY_SILENCE_S`` seconds, or from now |
    | unguarded_tokens    | the engine counts computed tokens not seen by any hook: how many                       |
    | workers_unguarded   | workers of an engine are unguarded, or guarded unlike the scheduler: names, and why     |
    | answers_unchecked   | an engine's own lists of answers are not compared with what was sampled, and why       |
    | alarm_dead          | a probe of the alarm was not reported: real findings would not be reported either      |
    | out_of_memory       | the device had no memory for a check: forwards pass by unchecked for so many seconds    |
    | disabled            | an exception of ours, or a failed audit, switched this canary off; the engine goes on  |
    | misuse              | Canary was called out of order or with impossible arguments, and the remedy            |
    | wrong_memory        | by the first forwards, an adapter describes other memory than the engine's             |
    | metrics             | the metrics are served: the place                                                      |
    | metrics_unavailable | metrics are missing at one place, and why; the engine and its own metrics go on        |
    | control             | the control socket is open: path, and allowed commands                                 |
    | control_unavailable | the control socket is not open, and why; the engine goes on                            |
    | mode_changed        | somebody changed the mode of a running engine's guard: the new mode                    |
    | budget_changed      | somebody changed how much the scrub may do                                             |
    | weights_changed     | the engine computes with other weights: how, the how manieth change; told at 1, 2, 4.. |
    | scales_changed      | a layer's KV is quantized by another scale than before: layer, scale, old and new      |
    | weights_unwatched   | changes of some parameters, or of all, are not looked for, and why                     |
    | weights_guarded     | the parameters compared with ``CANARY_WEIGHTS``: how many, bytes, and what is left out |
    | weights_unguarded   | ``CANARY_WEIGHTS`` is on, and no byte of weights is compared: why                      |
    | ranks_compared      | all ranks of a group are here, and every how many forwards they are compared           |
    | ranks_blind         | ranks are not compared with others, or with none: why, and which                       |
    | ranks_rounding      | KV that several ranks hold is not bit-equal: it is not compared in such forwards       |
    | weights_unsure      | weights changed, perhaps by an update untold by anybody; told at 1, 2, 4..: the names  |
    | parked_full         | so many requests have ended that prefixes in the cache are not remembered: most_tokens |
    | parked_left_out     | a prefix in the cache can't be computed again: request, reason; each reason once       |
    | paused              | somebody has paused the guard: forwards are not checked until resumed                  |
    | resumed             | the guard goes on; the slots of then are not judged until written again                |
    | summary             | once, at close or at the process's exit: everything checked and found, and zeros       |
    | incident            | findings of one cause: the root, and counts of its consequences                        |
    | incident_grew       | more findings of a reported incident: how many, and all counts                         |
    | incidents_limited   | more incidents than ``CANARY_INCIDENT_LIMIT`` a minute: how many, and all counts       |
    | diagnosis           | an incident's probable nature, with sureness, evidence, and the place of the bundle    |
    | diagnosis_failed    | an incident could not be looked at, and why                                            |
    | notify_failed       | nobody could be notified, why, and how many messages are lost; a minute apart           |
    | unready             | the engine should take no more requests: why, and the file that says so                |
    | unready_failed      | ``CANARY_UNREADY_FILE`` can't be made or looked at, and why                            |
    | suppressions_unavailable | ``CANARY_SUPPRESSIONS`` can't be read, and why: nothing is suppressed            |
    | bundle_failed       | no bundle of an incident could be written, and why; told once                          |
    | findings_lost       | an engine failed, and the last findings can't be read from its device any more         |
    | rows_dropped        | more findings than ring rows between two host reads; the counts are complete           |
    | findings_limited    | more findings than there is time to tell: how many were only counted, and their kinds  |
    | dismissed           | a plugin explained a finding away                                                      |
    | fault_injected      | a self-test corrupted something on purpose                                             |
    | fault_moot          | the target of a fault was dropped before any read; the fault is repeated               |
    | fault_not_injected  | a fault was asked for and never done: no such target, no candidate, never due          |
    | unguarded_forward   | an engine ran a kind of forward unknown to its plugin; the slots are not judged        |
    | sweep               | a sweep of the prefix cache is done and read back: nodes, slots, findings              |
    | sweep_unavailable   | a sweep was asked for and there is no prefix cache, or no known one                    |
    | window_divergence   | distance of a sliding window's slots from the full pool's, and evictions               |
    | records_travel      | records go with KV to host memory or to another engine: the way, and the memory        |
    | records_left_out    | records can't go along, and why; arrivals are not judged                               |
    | other_keys          | records or a ledger's entries came with other keys or of another layout: never judged  |
    | records_travelled   | at the end: how many slots went and came with records                                  |
    | ledger_shared       | an origin brings prefixes never kept by this engine: a difference proves nothing now   |
    | ledger_blind        | unknown blocks were kept: a difference proves nothing in the region                    |
    | ledger_doubt        | 10 %, and again 50 %, of arrivals can't be judged: the ledger forgot too much          |
    | aborted             | a running request was ended because of a finding: request, kind, region, slot          |
    | unjudged            | a request that somebody asked to verify could not be judged, and why; once for a reason |
    | verified            | the verdict on a running request that something else suspected (`canary_suspect`)      |
    | recompute_off       | ``CANARY_RECOMPUTE`` is on, and nothing is computed again (any more): why               |
    | recompute_left_out  | requests are compared with a second computation but for these sources: sources |
    | recompute_starved   | ``CANARY_RECOMPUTE`` is on, and no request could be chosen for long: looks, reason |
    | recomputed          | a request is computed again because of a finding: request, kind, region, slot          |
    | quarantined         | the prefix of a finding was evicted from the prefix cache: kind, region, slot, tokens  |
    | repaired            | a flipped word of KV that no request has was put back: slot, source, word, bits        |
    | repair_failed       | a flipped word was put back and the fingerprint was another one: it is as it was found |
    | repair_off          | ``CANARY_REPAIR`` is on, and nothing can be repaired with these settings: why          |
    | quarantine_failed   | nothing could be done about a finding, or can't be in this engine, and why             |
    | hits_unchecked      | ``CANARY_HIT_CHECK`` is on, and the bytes of prefix hits are not compared, and why       |
    | hooks_left_out      | functions hooked by a plugin are missing or changed: names, and the unguarded part     |
    | tables_left_out     | tables of an attention backend are not compared with the engine's own: names, and why  |
    | lifetime_off        | an engine's allocator can't be followed (any more): frees in the regions are unknown   |
    | parking_off         | cached slots without a request can't be told apart (any more): the cache, and why      |
    | adopted             | a cache was adopted with tokens in it; its slots are not judged until rewritten        |
    | cache_changed       | a cache was changed around its own methods                                             |
    | cache_layers_disagree | layers of one cache hold different lengths: the layers                               |
    | cache_released      | a cache can't be followed any more, and why                                            |
    """

    name: str
    level: Level = "info"
    fields: dict[str, object] = field(default_factory=dict)


def escaped(text: str) -> str:
    """``text`` in one printable line: control characters, line ends, marks of direction and broken surrogates as in
    Python's source."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def all_escaped(value: object) -> Any:
    """A plain value, of mappings, lists, texts and numbers, with every text `escaped`; anything else as its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {escaped(str(name)): all_escaped(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [all_escaped(one) for one in value]
    # Of an enumeration's text its value, not its name.
    return escaped(str.__str__(value) if isinstance(value, str) else str(value))


def size_text(size_bytes: int) -> str:
    """``1.5 MB``: bytes for people, in powers of 1000. As `rich.filesize.decimal`, which an engine need not load."""
    if size_bytes < 1000:
        return f"{size_bytes} byte{'' if size_bytes == 1 else 's'}"
    power = 1
    while size_bytes >= 1000 ** (power + 1) and power < len(_SIZES):
        power += 1
    return f"{size_bytes / 1000**power:,.1f} {_SIZES[power - 1]}"


_SIZES = ("kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
