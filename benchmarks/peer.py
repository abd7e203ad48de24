"""SGLang's built-in canary on the same traffic, in the same process: its own kernels, launched through its own API.

Only its kernel modules are imported, not the engine: the packages above them are entered without their ``__init__``,
which needs all of SGLang's dependencies. The kernels are compiled by nvcc at first use, through ``tvm_ffi``.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.setting import Setting, flat

PACKAGE = "sglang.kernels.ops.kv_canary"
RECORD_BYTES = 32
RING_ROWS = 1024


class PeerUnavailableError(Exception):
    """The built-in cannot run here; the reason."""


@dataclass(frozen=True, slots=True)
class Modules:
    """The built-in's modules. ``launch_*`` are its launchers, or on the CPU their torch references."""

    consts: Any
    verify: Any
    write: Any
    launch_plan: Callable[..., None]
    launch_verify: Callable[..., None]
    launch_write: Callable[..., None]


def load(reference: bool = False) -> Modules:
    """Imports the built-in; ``reference``: with its torch references in place of its kernels. Raises
    `PeerUnavailableError`."""
    try:
        _enter_packages()
        consts, verify, write = (importlib.import_module(f"{PACKAGE}.{n}") for n in ("consts", "verify", "write"))
        suffix = ("_ref", "_torch_reference") if reference else ("", "")
        launchers = []
        for name, function in (("plan", "plan_kernels"), ("verify", "verify_kernel"), ("write", "write_kernel")):
            module = importlib.import_module(f"{PACKAGE}.{name}{suffix[0]}")
            launchers.append(getattr(module, f"launch_canary_{function}{suffix[1]}"))
        if not reference:
            importlib.import_module("tvm_ffi")
    except (ImportError, AttributeError) as error:
        raise PeerUnavailableError(f"SGLang's canary kernels do not import: {error!r}") from error
    return Modules(consts, verify, write, *launchers)


def compile_ahead(modules: Modules) -> ThreadPoolExecutor:
    """Starts nvcc for all kernels at once; `ThreadPoolExecutor.shutdown` waits for them. A kernel that does not compile
    is reported where it is used."""
    target = importlib.import_module("sglang.kernels.jit.utils").get_jit_cuda_arch().target_name
    # The loader sets and restores it around each build; set beforehand, parallel builds restore the same value.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = target
    entries = importlib.import_module(f"{PACKAGE}.plan.entries_kernel")
    pool = ThreadPoolExecutor(5)
    for tokens in (False, True):
        pool.submit(modules.verify._jit_canary_verify_module, tokens)
        pool.submit(entries._jit_plan_entries_module, False, tokens)
    pool.submit(modules.write._jit_canary_write_module)
    return pool


class Peer:
    """The built-in guarding the pool of ``setting``: one lane (one record buffer, up to one source, as it does it).

    Raises `PeerUnavailableError` where it has no way to guard that pool."""

    def __init__(self, setting: Setting, modules: Modules) -> None:
        self._setting, self._modules = setting, modules
        traffic, device = setting.traffic, setting.device
        rows, width = traffic.slots.shape
        # Its row 0 is padding.
        self._req_to_token = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self._req_to_token[1:] = traffic.slots
        self._expected = torch.zeros_like(self._req_to_token) if setting.case.tokens else None
        if self._expected is not None:
            self._expected[1:] = traffic.tokens
        zeros = partial(torch.zeros, device=device)
        sources = self._sources()
        mode = modules.consts.RealKvHashMode
        self._context = modules.verify.VerifyOrWriteContext(
            canary_buf=zeros(setting.state.region.slots, RECORD_BYTES, dtype=torch.uint8),
            kernel_kind=modules.verify.CanaryLaunchTag.HEAD_K_FULL,
            violation_ring=zeros(RING_ROWS, modules.consts.VIOLATION_FIELDS, dtype=torch.int64),
            violation_write_index=zeros(1, dtype=torch.int32),
            slot_run_counter=zeros(1, dtype=torch.int64),
            kernel_run_counter=zeros(1, dtype=torch.int64),
            real_kv_sources=sources,
            real_kv_hash_mode=mode.ALL if sources else mode.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=device),
        )
        context = setting.case.shape.context_tokens
        if context:
            prime = _Batch(self, slice(0, rows), 0, context)
            prime.plan()
            prime.write()
        self._batches = [_Batch(self, f.rows, context, width) for f in setting.forwards]
        for batch in self._batches:
            batch.plan()

    def launcher(self, op: str) -> tuple[Callable[[], None], int]:
        """A function that launches ``op`` (``plan``, ``verify``, ``write``) for several batches, and for how many."""
        launches = [getattr(batch, op) for batch in self._batches]

        def launch() -> None:
            for one in launches:
                one()

        return launch, len(launches)

    def require_clean(self) -> None:
        """Its speed counts only if it did the work and found nothing in clean data. Raises `PeerUnavailableError`."""
        found, slots = int(self._context.violation_write_index), int(self._context.slot_run_counter)
        if found or not slots:
            raise PeerUnavailableError(
                f"the built-in went over {slots} slots of clean data and reported {found} findings"
            )

    def _sources(self) -> tuple[Any, ...]:
        case, region = self._setting.case, self._setting.state.region
        if not case.has_bytes:
            return ()
        source = region.sources[0]
        if source.page_size != 1 or source.slot_bytes % 16:
            raise PeerUnavailableError("the built-in has no way to say where such a slot's bytes are")
        rows = source.tensor.view(torch.uint8).view(region.slots, source.slot_bytes)
        size = source.slot_bytes
        return (self._modules.verify.RealKvSource(tensor=rows, page_size=1, num_bytes_per_token=size, read_bytes=size),)


class _Batch:
    """One forward as the built-in takes it."""

    def __init__(self, peer: Peer, rows: slice, first: int, end: int) -> None:
        traffic, modules, device = peer._setting.traffic, peer._modules, peer._setting.device
        count = rows.stop - rows.start
        lengths = partial(torch.full, (count,), dtype=torch.int64, device=device)
        self._verify_plan = modules.verify.VerifyPlan.allocate(verify_capacity=max(count * first, 1), device=device)
        self._write_plan = modules.write.WritePlan.allocate(write_req_capacity=count, device=device)
        expected = peer._expected
        self.plan = partial(
            modules.launch_plan,
            verify_plan_out=self._verify_plan,
            write_plan_out=self._write_plan,
            req_pool_indices=torch.arange(rows.start + 1, rows.stop + 1, device=device),
            prefix_lens=lengths(first),
            extend_seq_lens=lengths(end - first),
            req_to_token=peer._req_to_token,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=max(count * first, 1),
            req_to_verify_expected_tokens=expected,
            req_to_verify_expected_tokens_valid_lens=None if expected is None else lengths(end),
            kv_token_id_vs_position_offset=0,
        )
        self.verify = partial(
            modules.launch_verify,
            context=peer._context,
            plan=self._verify_plan,
            check_verify_expected_token=expected is not None,
        )
        self.write = partial(
            modules.launch_write,
            context=peer._context,
            plan=self._write_plan,
            input_ids=flat(traffic.tokens[rows, first:end]),
            positions=torch.arange(first, end, device=device).repeat(count),
            out_cache_loc=flat(traffic.slots[rows, first:end]),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )


def _enter_packages() -> None:
    if PACKAGE in sys.modules:
        return
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ImportError("sglang is not installed")
    root = found.submodule_search_locations[0]
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops"):
        if name not in sys.modules:
            _put(name).__path__ = [os.path.join(root, *name.split(".")[1:])]
    if "sglang.utils" not in sys.modules:
        vars(_put("sglang.utils"))["is_in_ci"] = lambda: False


def _put(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module
