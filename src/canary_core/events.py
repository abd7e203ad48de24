"""`Event`: what Canary tells beside violations, as a name and fields."""

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing worth telling. ``name`` is stable and machine-readable, ``fields`` are plain values.

    | name                | when                                                                                   |
    |---------------------|----------------------------------------------------------------------------------------|
    | plugins_loaded      | plugins were loaded: which, and which failed with what error                           |
    | plugins_installed   | plugins hooked their engines: which, and which were refused or failed                  |
    | plugins_uninstalled | plugins let go of their engines: which, and which failed to                            |
    | plugin_incomplete   | a plugin has one half of two hooks that belong together: which, and what that means    |
    | untested_engine     | an engine is newer than its plugin was tested with: versions, and what is done now     |
    | start_failed        | Canary was asked to start and can't: a bad setting, a plugin that isn't installed      |
    | unknown_setting     | a variable ``CANARY_*`` is set that is no setting: which, and which one may be meant   |
    | reporting_failed    | a plugin raised while it was told something                                            |
    | attached            | a pool is guarded: backend, mode, regions, slots, memory of ours                       |
    | coverage            | what share of KV bytes is guarded, and what is not and why                             |
    | audit               | the first forwards were audited: every byte that they changed was claimed              |
    | audit_failed        | a forward changed what the adapter does not say, or not what it says: which tensors    |
    | audit_skipped       | an audit was asked for and can't be made: why, and what to do                          |
    | pool_moved          | a region describes memory that the engine has given up: its slots are not judged       |
    | warmed_up           | what forwards need is compiled: for how many sorts of batch, in how many seconds       |
    | stats               | every ``CANARY_STATS_INTERVAL`` forwards: the counters                                 |
    | silence             | an engine runs unchecked: from its start for ``CANARY_SILENCE_S`` seconds, or from now |
    | unguarded_tokens    | the engine says that it computed tokens which no hook of ours has seen: how many       |
    | workers_unguarded   | workers of an engine are not guarded, or otherwise than its scheduler: which, and why   |
    | alarm_dead          | a probe of the alarm did not come out of it: real findings would not be told either    |
    | disabled            | an exception of ours, or a failed audit, switched this canary off; the engine goes on  |
    | misuse              | Canary was called out of order or with arguments that can't be right, and what to do   |
    | wrong_memory        | the first forwards say that an adapter describes other memory than the engine's        |
    | metrics             | the metrics can be had: at which place                                                 |
    | metrics_unavailable | they can't, at one place, and why; the engine and its own metrics are as they were     |
    | control             | the control socket is open: where, and what it allows                                  |
    | control_unavailable | it is not, and why; the engine goes on                                                 |
    | mode_changed        | somebody changed the mode of a running engine's guard: to which                        |
    | budget_changed      | somebody changed how much the scrub may do                                             |
    | paused              | somebody has paused the guard: forwards are not checked until it is resumed            |
    | resumed             | it goes on; what slots held by then is not judged until they are written again         |
    | summary             | once, at close or at the process's exit: what was checked, told and found, and zeros   |
    | incident            | findings of one cause: the root, and counts of what follows from it                    |
    | incident_grew       | more was found of an incident that was told: how many, and all counts                  |
    | incidents_limited   | more incidents than ``CANARY_INCIDENT_LIMIT`` a minute: how many, and all counts       |
    | diagnosis           | what an incident probably is, how sure that is, by what evidence, and where its bundle is |
    | diagnosis_failed    | an incident could not be looked at, and why                                            |
    | bundle_failed       | no bundle of an incident could be written, and why; told once                          |
    | findings_lost       | an engine failed, and what was found last can't be read from its device any more       |
    | rows_dropped        | more findings than ring rows between two host reads; the counts are complete           |
    | dismissed           | a plugin explained a finding away                                                      |
    | fault_injected      | a self-test corrupted something on purpose                                             |
    | fault_moot          | what a fault broke was dropped before anything could read it; it is done again         |
    | fault_not_injected  | a fault was asked for and never done: no such target, no candidate, never due          |
    | unguarded_forward   | an engine ran a kind of forward that its plugin can't check; its slots are not judged  |
    | sweep               | a sweep of the prefix cache is done and its results are read: nodes, slots, findings   |
    | sweep_unavailable   | a sweep was asked for and there is no prefix cache, or none that is known              |
    | window_divergence   | how far a sliding window's slots are from those of the full pool, and what it evicted  |
    | records_travel      | records go with KV to host memory or to another engine: which way, and what that takes |
    | records_left_out    | they can't, and why; what arrives is not judged                                        |
    | records_travelled   | at the end: how many slots went and came that way                                      |
    | ledger_shared       | an origin brings prefixes that this engine never kept: a difference proves nothing now |
    | ledger_blind        | blocks were kept of which nothing is known: a difference proves nothing in that region |
    | ledger_doubt        | 10 %, and again 50 %, of what comes back can't be judged: the ledger forgot too much    |
    | aborted             | a running request was ended because of a finding: request, kind, region, slot          |
    | quarantined         | what a finding concerns was evicted from the prefix cache: kind, region, slot, tokens  |
    | quarantine_failed   | nothing could be done about a finding, or can't be in this engine, and why             |
    | hooks_left_out      | functions that a plugin hooks are missing or changed: which, and what is unguarded     |
    | tables_left_out     | tables of an attention backend are not compared with the engine's own: which, and why  |
    | lifetime_off        | an engine's allocator can't be followed (any more); of these regions nothing is freed  |
    | parking_off         | cached slots that no request has can't be told (any more): of which cache, and why     |
    | adopted             | a cache that held tokens already was taken over; they are not judged until rewritten   |
    | cache_changed       | a cache was changed by something else than its own methods                             |
    | cache_layers_disagree | layers of one cache hold different lengths: which                                    |
    | cache_released      | a cache can't be followed any more, and why                                            |
    """

    name: str
    level: Level = "info"
    fields: dict[str, object] = field(default_factory=dict)


def size_text(size_bytes: int) -> str:
    """``1.5 MB``: bytes for people, in powers of 1000. As `rich.filesize.decimal`, which an engine need not load."""
    if size_bytes < 1000:
        return f"{size_bytes} byte{'' if size_bytes == 1 else 's'}"
    power = 1
    while size_bytes >= 1000 ** (power + 1) and power < len(_SIZES):
        power += 1
    return f"{size_bytes / 1000**power:,.1f} {_SIZES[power - 1]}"


_SIZES = ("kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
