import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engines.process import EngineProcess
from engines.setups import SETUPS, SPECULATIVE, Setup
from tools.inspection import Findings

from canary_core import plugins

MARKERS = (
    "without_engine: runs where SGLang is not installed, too",
    "first: takes long, so it begins before others, which then share what time is left",
    "last: leaves its engine unfit for other tests, so it runs after them",
    "long: hundreds of forwards",
    "beyond_ci(covered_by): CI has no time for it; `covered_by` says what runs there and nearly covers it",
    "older_release: CI runs it on an older SGLang, too, and on the newest one, unless it is `long`",
    "newest_release: CI runs it on the newest SGLang, too",
    "where(mark, **parameters): has the mark, but only with these values of its parameters, one or a list each",
)
"""What `.ci/run` selects by. Why a test is ``beyond_ci`` stands at its mark; why all tests with an engine are, at its
`Setup.covered_by`; of an engine that takes turns, at its `Setup.beside`. Without a selection everything runs."""


def pytest_configure(config: pytest.Config) -> None:
    """Our markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Gives a test what its ``where`` markers say of its parameters. Raises `KeyError` for one that it has not."""
    for marker in item.iter_markers("where"):
        (mark,) = marker.args
        given = item.callspec.params
        wanted = {name: [values] if isinstance(values, str) else values for name, values in marker.kwargs.items()}
        if all(given[name] in values for name, values in wanted.items()):
            item.add_marker(mark)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``first`` come first of all, tests marked ``last`` last among those of their engine; tests that run
    the engine are skipped where it isn't installed."""
    places: dict[str, int] = {}
    for place, item in enumerate(items):
        places.setdefault(_group(item), place)
    items.sort(
        key=lambda item: (
            item.get_closest_marker("first") is None,
            places[_group(item)],
            item.get_closest_marker("last") is not None,
        )
    )
    if find_spec("sglang") is not None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("without_engine") is None:
            item.add_marker(pytest.mark.skip(reason="sglang is not installed; make test-sglang makes a place for it"))


def _group(item: pytest.Item) -> str:
    """Tests of one engine are together already; any other one is alone."""
    group = item.get_closest_marker("xdist_group")
    return item.nodeid if group is None else str(group.args[0])


def _marks(name: str, setup: Setup) -> list[pytest.MarkDecorator]:
    """Of all tests with this engine, which go to the same worker of `pytest -n 2 --dist loadgroup`: it starts once."""
    marks = [pytest.mark.xdist_group(name)]
    if setup.covered_by:
        marks.append(pytest.mark.beyond_ci(setup.covered_by))
    if setup.beside:
        marks.append(pytest.mark.takes_turns(setup.beside, unit=f"engine {name}"))
    return [*marks, pytest.mark.older_release] if setup.older_release else marks


@pytest.fixture(scope="session", params=[pytest.param(name, marks=_marks(name, SETUPS[name])) for name in SETUPS])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine of each of `SETUPS`, guarded, its first forwards audited, shared by all tests that want it."""
    setup = SETUPS[request.param]
    setup.skip_before()
    process = EngineProcess(setup, tmp_path_factory.mktemp(request.param), CANARY_AUDIT="24")
    yield process
    process.close()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineProcess]]:
    """Starts an engine from the fields of a `Setup`: ``launch({"options": {...}}, CANARY_MODE="log")``, or from a setup
    of `SETUPS` by its name, with some of its fields added to."""
    processes = []

    def launch_engine(fields: dict[str, Any], like: str = "", **settings: str) -> EngineProcess:
        known = vars(SETUPS[like]) if like else {}
        merged = {k: {**known[k], **v} if isinstance(v, dict) and k in known else v for k, v in fields.items()}
        processes.append(EngineProcess(Setup(**{**known, **merged}), tmp_path_factory.mktemp("engine"), **settings))
        return processes[-1]

    yield launch_engine
    for process in processes:
        process.close()


@pytest.fixture(scope="module")
def hicache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose prefix cache reaches into host memory, with the read check off as it is by default."""
    process = EngineProcess(SETUPS["hicache"], tmp_path_factory.mktemp("hicache"), CANARY_READ_CHECK="0")
    yield process
    process.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts an engine of one's own: ``start("mha", CANARY_MODE="raise")``."""
    processes = []

    def start_engine(name: str, **settings: str) -> EngineProcess:
        setup = {**SETUPS, **SPECULATIVE}[name]
        setup.skip_before()
        processes.append(EngineProcess(setup, tmp_path, **settings))
        return processes[-1]

    yield start_engine
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang's module of pools, with the global arguments that some of them ask for."""
    from sglang.srt.server_args import ServerArgs

    folder = tmp_path_factory.mktemp("model")
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    folder.joinpath("config.json").write_text(json.dumps(config))
    args = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    try:
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    else:
        ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
    from sglang.srt.mem_cache import memory_pool

    return memory_pool


@pytest.fixture
def findings() -> Iterator[Findings]:
    """What Canaries of this process find and tell during the test."""
    kept = Findings()
    plugins.hook_manager().register(kept)
    yield kept
    plugins.hook_manager().unregister(kept)
