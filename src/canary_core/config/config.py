"""`CanaryConfig`: every setting, with unit and default. No other module reads the environment (``CANARY_*``)."""

import os
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from canary_core.config.faults import readable_faults
from canary_core.config.profiles import Profile, ProfileSource, plain
from canary_core.config.values import (
    MOST_BYTES,
    LayerShare,
    LayersSetting,
    ListenSetting,
    MemorySetting,
    MemoryShare,
    RecomputeSetting,
    RecomputeShare,
    ScrubBudget,
    ScrubBudgetSetting,
    Untested,
    notify_target,
    sentence,
    unit,
)
from canary_core.errors import ConfigError

Mode = Literal["off", "log", "raise"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

AUDITED_FORWARDS = 4
"""Forwards audited for an engine newer than tested, unless the setting asks for more: a prefill and decodes."""

_MOST_SLOTS = (1 << 31) - 1


class CanaryConfig(BaseSettings):
    """Frozen settings. Each field is read from ``CANARY_<NAME>``; an argument wins over the environment, and both win
    over the ``profile``.

    Use `CanaryConfig.load` to build one: pydantic's report becomes one `ConfigError` sentence per setting.
    """

    model_config = SettingsConfigDict(env_prefix="CANARY_", frozen=True, extra="forbid", env_ignore_empty=True)

    plugins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Names of the plugins to load, separated by commas. Empty: none, and nothing is paid.",
        json_schema_extra=unit("names"),
    )
    mode: Mode = Field(
        default="log",
        description="off: nothing is checked. log: findings are reported, the engine always goes on. raise: the first "
        "finding stops the engine with a ViolationError.",
    )
    profile: Profile = Field(
        default="watch",
        description="One dial for all that follows. watch: made for production. hunt: everything that finds sooner, at "
        "a price. ci: hunt that stops the engine and audits its first forwards. What is set by itself wins. "
        "CANARY_MODE=raise without a profile has that of hunt.",
    )
    untested: Untested = Field(
        default="guard",
        description="What to do with an engine that is newer than its plugin was tested with. guard: it is guarded if "
        "every function to hook is found and the audit of the first forwards passes, with an untested_engine event; "
        "where no audit can be made an audit_skipped error says what is not proven, and raise mode stops. refuse: it "
        "is not guarded.",
    )
    bytes: Literal["off", "partial", "all"] = Field(
        default="all",
        description="Which KV bytes are fingerprinted on every layer and half: off (mapping checks only), partial "
        "(the first 16 bytes of each source of a slot), all.",
    )
    layers: LayersSetting = Field(
        default=LayerShare(),
        description="Layers whose bytes are fingerprinted: all; 1/8: every eighth one, from another one on by host, "
        "replica, rank and the hour of the start, so that a fleet covers all at an eighth of the memory; 1/8@3: the "
        "one turn from the layer at index 3 on. The mapping of slots is checked for all in any case.",
        json_schema_extra=unit("share of the layers"),
    )
    memory: MemorySetting = Field(
        default=MemoryShare(),
        description="Device memory for Canary, of a pool. Where one fingerprint a source would take more, as in the "
        "narrow shards of tensor parallelism, layers of a half share fingerprints, and K and V if need be, in groups "
        "as small as fit: one damaged layer or flipped bit is named as ever. exact: one a source. 64 MiB are free.",
        json_schema_extra=unit("share of the pool"),
    )
    backend: Literal["auto", "torch", "triton"] = Field(
        default="auto", description="auto: triton for pools on a GPU, torch elsewhere. The choice is logged."
    )
    read_check: Annotated[int, Field(ge=-1, le=_MOST_SLOTS)] = Field(
        default=0,
        description="Slots per forward whose bytes are compared before the forward reads them, rotating over the "
        "batch; -1: all of them (testing; it re-reads the whole context in every forward), 0: leave it to the scrub.",
        json_schema_extra=unit("slots per forward"),
    )
    check_budget: Annotated[int, Field(ge=0, le=_MOST_SLOTS)] = Field(
        default=0,
        description="Slots per forward whose mapping is checked, rotating over the batch, so that each slot is looked "
        "at once in (readable slots / budget) forwards; 0: all of them in every forward.",
    )
    scrub_budget: ScrubBudgetSetting = Field(
        default=ScrubBudget.parse("0.1%"),
        description="How much the scrub may do after each forward: a share of time such as 1%, or bytes per forward "
        "such as 64MiB; 0 turns it off. Slots of running requests come first; what holds nothing is passed over.",
        json_schema_extra=unit("share of time, or bytes per forward"),
    )
    sweep_interval: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Forwards between two sweeps of the engine's prefix cache: every node's slots against what was "
        "recorded, and the cache's own structure; 0: none.",
        json_schema_extra=unit("forwards"),
    )
    divergence_interval: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Forwards between two window_divergence events, for engines that map a sliding window's slots from "
        "those of the full pool; 0: none.",
        json_schema_extra=unit("forwards"),
    )
    state_interval: Annotated[int, Field(ge=1)] = Field(
        default=256,
        description="Decode steps between two whose recurrent states (Mamba, linear attention) are fingerprinted and "
        "compared before the next step, since every step rewrites all their bytes; prefills always are. 1: every step.",
        json_schema_extra=unit("forwards"),
    )
    table_interval: Annotated[int, Field(ge=0)] = Field(
        default=16,
        description="Forwards between two in which a table that attention was given (a page table, a list of slots, "
        "the buffers of a CUDA graph) is compared with the one that the engine keeps, where its plugin can; such a "
        "forward has no scrub. 1: every forward, beside its scrub; 0: never.",
        json_schema_extra=unit("forwards"),
    )
    store_check: bool = Field(
        default=False,
        description="Each layer's new slots are fingerprinted right after they were stored, too, and compared with "
        "what they hold at the end of the forward, where the engine's plugin tells of its stores; not in forwards that "
        "are replayed from a CUDA graph. Takes 8 bytes more for each slot and source, and a launch a layer. Where "
        "groups of layers take turns on the same memory, slots are looked at as they are handed out, too, so that a "
        "lost write is found whichever group had them before.",
    )
    weights: bool = Field(
        default=False,
        description="The parameters of the model are compared with what they were, some after each forward, as many "
        "bytes as CANARY_SCRUB_BUDGET gives to slots, beside these. Takes 12 bytes for each 64 KiB of weights.",
    )
    ranks_interval: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Forwards between two compared between the tensor-parallel ranks of one machine, by the plugins of "
        "vLLM and SGLang: batches, sampled tokens and KV that all hold; 0: none. They meet in CANARY_CONTROL_DIR.",
        json_schema_extra=unit("forwards"),
    )
    recompute: RecomputeSetting = Field(
        default=RecomputeShare(),
        description="Time in which requests are computed again, and compared with the KV in the cache, where the "
        "engine's plugin can: a share such as 1%, or so many verdicts, such as 8, at any price; 0: none unasked.",
        json_schema_extra=unit("share of time, or verdicts"),
    )
    hit_check: bool = Field(
        default=False,
        description="Bytes that a prefix hit shares are compared once, when they are shared, where the engine's plugin "
        "follows hits. On with CANARY_ON_VIOLATION=protect.",
    )
    on_violation: Literal["report", "abort", "quarantine", "protect"] = Field(
        default="report",
        description="report: tell, nothing else. abort: end requests that a finding concerns with a retryable error. "
        "quarantine: also evict what is corrupted from the prefix cache. protect: besides, no token computed from KV "
        "found to be wrong is given out: its request is computed again, or ends so. Where the engine's plugin can.",
    )
    repair: bool = Field(
        default=False,
        description="One flipped word of KV that no request has is put back where the fingerprint tells what it was, "
        "and proven by the fingerprint; a repaired event tells it. Not with CANARY_ON_VIOLATION=protect, which gives "
        "up what was computed from it, too.",
    )
    lifetime: bool = Field(
        default=True,
        description="Follow the engine's allocator, where its plugin can: use after free, write after free, slots "
        "freed or handed out twice.",
    )
    non_finite: bool = Field(
        default=True, description="Report NaN and infinity in float KV that was just written, and in null slots."
    )
    read_interval: Annotated[int, Field(ge=1)] = Field(
        default=4,
        description="Forwards between two reads of the counters by the host, on a GPU in log mode, and 20 ms at least "
        "unless it is 1: how late a finding is told, against host time. On the CPU and in raise mode every forward is "
        "read.",
    )
    audit: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="First forwards of each pool that are audited: the engine's whole KV memory is compared before and "
        "after, and each changed byte must be one that the plugin says is written. For authors and CI: slow, and it "
        "takes a copy of the pool; 0: none.",
        json_schema_extra=unit("forwards"),
    )
    ring_rows: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=1024,
        description="Violation rows kept on the device until the host reads them, beside the first eight of each kind; "
        "counts are never lost.",
        json_schema_extra=unit("rows"),
    )
    stats_interval: Annotated[int, Field(ge=0)] = Field(
        default=1000, description="Forwards between two stats events; 0: none.", json_schema_extra=unit("forwards")
    )
    silence_s: Annotated[float, Field(ge=0, le=threading.TIMEOUT_MAX)] = Field(
        default=60.0,
        description="Seconds that an engine that is known to run may take to its first checked forward, after which a "
        "silence event is raised; 0: never.",
        json_schema_extra=unit("seconds"),
    )
    transfer_records: bool = Field(
        default=True,
        description="What is known of slots travels with their bytes to host memory and to other engines, where the "
        "engine's plugin knows how; false: what arrives is not judged until it is written again.",
    )
    ledger: Annotated[ByteSize, Field(le=MOST_BYTES), PlainSerializer(int, return_type=int)] = Field(
        default=ByteSize(256 << 20),
        description="Host memory for the ledger, which remembers what was stored under each prefix, so that KV that a "
        "connector or a host tier brings back can be compared: about 48 bytes a token for 32 layers with K and V and "
        "blocks of 16. Taken as it fills, where the engine's plugin tells what leaves and comes back; 0: nothing is "
        "compared.",
        json_schema_extra=unit("bytes, e.g. 256MiB"),
    )
    ledger_private: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="KV connectors and storage back ends that only this engine stores with, by name (`HiCacheFile` for "
        "SGLang's files), where the engine's plugin can't know: "
        "what others store may have been computed with other numerics, so a difference would prove nothing.",
        json_schema_extra=unit("names"),
    )
    keys: Literal["auto", "seeded", "public"] = Field(
        default="auto",
        description="Keys of the fingerprints without CANARY_KEY_FILE. seeded: drawn by each process, or for all ranks "
        "at once with CANARY_RANKS_INTERVAL, and known to nobody else. public: the same everywhere, for engines that "
        "exchange records. auto: public where the engine's plugin sends records to other engines, else seeded.",
    )
    key_file: str = Field(
        default="",
        description="File with a secret of 16 bytes or more, from which the keys of the fingerprints are made: the "
        "same for all engines that exchange records. Empty: see CANARY_KEYS.",
    )
    rank: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Rank of this process among those that serve one replica, told with each event."
    )
    replica: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Index of the replica of the engine that this process belongs to, told with each event: the plugin "
        "of an engine with data-parallel replicas sets it.",
    )
    model: str = Field(
        default="",
        description="Name told with each event; a plugin whose engine runs several models names the draft models.",
    )
    served_model: str = Field(
        default="",
        description="Name under which the engine serves its model, told as the model of each event where the setting "
        "above is empty: the engine's plugin sets it.",
    )
    faults: Annotated[str, AfterValidator(readable_faults)] = Field(
        default="",
        description="Deliberate corruptions for self-tests, e.g. 'real_kv_used:probability=0.01,warmup=50;lost_write'. "
        "Empty: none.",
    )
    seed: int = Field(default=0, description="Seed of fault injection.")
    violation_level: LogLevel = Field(
        default="debug",
        description="Level of the violation event that each finding is told with. Findings of one cause are one "
        "incident event of level error; error tells each of them beside it.",
    )
    incident_limit: Annotated[int, Field(ge=0)] = Field(
        default=20,
        description="Incidents that are told with an event of their own within a minute; of those beyond it an "
        "incidents_limited event has the counts; 0: no limit.",
        json_schema_extra=unit("incidents per minute"),
    )
    diagnose: bool = Field(
        default=True,
        description="After an incident, look at the slots concerned and say what probably happened. The looking is "
        "issued once for each incident; the rest is done by a thread.",
    )
    incident_dir: str = Field(
        default="",
        description="Directory into which a bundle of each incident is written, for canary explain. Empty: none.",
    )
    incident_most: Annotated[int, Field(ge=1)] = Field(
        default=50,
        description="Bundles that the directory may hold; beyond, the oldest of the most frequent kind is removed. One "
        "of each kind and the newest of all stay, whatever this and the next two settings say.",
        json_schema_extra=unit("bundles"),
    )
    incident_size: Annotated[ByteSize, Field(ge=1, le=MOST_BYTES), PlainSerializer(int, return_type=int)] = Field(
        default=ByteSize(1 << 30),
        description="Size of all bundles in the directory; beyond, some are removed in the same order.",
        json_schema_extra=unit("bytes, e.g. 1GiB"),
    )
    incident_days: Annotated[float, Field(ge=0)] = Field(
        default=30.0,
        description="Age of a bundle, after which it is removed when the next one is written; 0: none is too old.",
        json_schema_extra=unit("days"),
    )
    incident_bytes: bool = Field(
        default=False, description="Bundles hold the bytes of up to 64 slots, 16 MiB at most: KV, not text."
    )
    incident_tokens: bool = Field(
        default=False,
        description="Findings hold token ids and prefix hashes, in logs, events, errors, plugins, dumps and bundles; "
        "without, they say that a token is wrong, and not which.",
    )
    suppressions: str = Field(
        default="",
        description="File with signatures of known incidents, a pattern a line, # and a reason behind it. Such an "
        "incident is told and kept as ever, marked as suppressed, and neither notifies nor stops anything. Empty: "
        "none.",
    )
    notify: Annotated[str, AfterValidator(notify_target)] = Field(
        default="",
        description="Who is told of an incident that needs somebody: exec:PROGRAM ARGUMENTS gets it on its standard "
        "input, https://... by POST, as JSON. Trusted as the environment itself. Empty: nobody.",
        json_schema_extra=unit("exec:program, or https://address"),
    )
    notify_key_file: str = Field(
        default="",
        description="File with a key of 16 bytes or more, by which each notification is signed (HMAC-SHA256). Empty: "
        "unsigned.",
    )
    unready_file: str = Field(
        default="",
        description="File that appears when CANARY_UNREADY_AFTER incidents within ten minutes need somebody, or one "
        "does and a flood of findings comes: a readiness probe that looks for it takes the engine out of service. "
        "Empty: none.",
    )
    unready_after: int = Field(
        default=3,
        ge=1,
        description="Incidents within ten minutes, suppressed ones not counted, after which CANARY_UNREADY_FILE "
        "appears.",
    )
    metrics: Literal["auto", "off", "opentelemetry"] = Field(
        default="auto",
        description="auto: the metrics are where the engine's own are, if it uses prometheus_client: in the registry "
        "of its process, or in the files that its processes share. off: nowhere. opentelemetry: instruments of the "
        "process's meter provider.",
    )
    metrics_listen: ListenSetting = Field(
        default=None,
        description="Where the metrics are served over HTTP beside that: a port of this machine, or an address and a "
        "port. Rank r takes the r-th port after it, or the next free one. Empty: nowhere.",
        json_schema_extra=unit("port, or address:port"),
    )
    control: Literal["off", "read", "write"] = Field(
        default="read",
        description="What canary ctl and canary top may do over the control socket of the process. off: there is none. "
        "read: ask. write: also change mode and budget, pause, resume, verify.",
    )
    control_dir: str = Field(
        default="",
        description="Folder of the control sockets, one a process, named after it. Empty: canary-<user id> in the "
        "system's folder for temporary files.",
    )
    log_format: LogFormat = Field(
        default="console",
        description="How reports to stderr look. Where the host has configured structlog, its own setup decides.",
    )
    log_level: LogLevel = Field(
        default="info",
        description="Least level of reports to stderr; incidents are errors. Where the host has configured structlog, "
        "its own setup decides.",
    )

    # No settings: what was found out about the engine, which an environment variable must not claim.
    _untested_engine: bool = PrivateAttr(default=False)
    _exports: str = PrivateAttr(default="")

    @property
    def untested_engine(self) -> bool:
        """Whether the engine is newer than tested, so that a failed audit switches Canary off. Not a setting: see
        `for_untested_engine`."""
        return self._untested_engine

    def for_untested_engine(self) -> "CanaryConfig":
        """A copy of the settings for an engine newer than tested: `untested_engine`, and at least `AUDITED_FORWARDS`
        forwards audited. Further copies keep both."""
        marked = self.model_copy(update={"audit": max(self.audit, AUDITED_FORWARDS)})
        marked._untested_engine = True
        return marked

    @property
    def exports(self) -> str:
        """The reason why fingerprints leave the process, empty where they don't. Not a setting: see `for_exports`."""
        return self._exports

    def for_exports(self, reason: str) -> "CanaryConfig":
        """A copy of the settings for an engine that sends fingerprints to others, and why; copied on with it."""
        marked = self.model_copy()
        marked._exports = reason
        return marked

    def control_folder(self) -> Path:
        """Where the control sockets are."""
        return Path(self.control_dir or Path(tempfile.gettempdir(), f"canary-{os.geteuid()}"))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, the environment, the profile."""
        return init_settings, env_settings, ProfileSource(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: Any) -> object:
        return plain(value, cls.model_fields[info.field_name].annotation)

    @classmethod
    def readable(cls) -> "CanaryConfig":
        """Settings from the environment, with defaults for bad values: the good ones still say where to report."""
        defaults: dict[str, Any] = {}
        while True:
            try:
                return cls(**defaults)
            except ValidationError as error:
                bad = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]} & cls.model_fields.keys()
                if bad <= defaults.keys():
                    return cls.model_construct()
                defaults |= {name: cls.model_fields[name].default for name in bad}

    @classmethod
    def load(cls, **overrides: object) -> "CanaryConfig":
        """Settings from ``overrides`` and the environment. Raises `ConfigError` naming each bad setting."""
        try:
            return cls(**overrides)  # type: ignore[arg-type]
        except ValidationError as error:
            raise ConfigError("; ".join(sentence(problem) for problem in error.errors())) from error
