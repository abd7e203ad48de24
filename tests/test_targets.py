"""`HookTarget`: whether an engine has the functions that a plugin hooks."""

import functools
import importlib
import sys

import pytest

from canary_core import HookTarget, PluginError
from canary_core.plugins.targets import problems

ENGINE = """
import functools

def anything(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

def kept(function):
    return functools.wraps(function)(anything(function))

class Runner:
    size = 3

    def forward(self, batch, stream=None): ...

    @anything
    def hidden(self, batch): ...

    @kept
    def decorated(self, batch): ...

    @staticmethod
    def free(pages): ...

    @classmethod
    def make(cls, config): ...

    def loose(self, batch, *args, **kwargs): ...

    def handed_on(*args): ...

def release(request, cache): ...
"""


@pytest.fixture
def engine(distribution):
    """An engine that nobody has imported yet."""
    distribution("toy-engine", {"toy_engine": ENGINE, "toy_broken": "raise RuntimeError('no driver')"})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Runner.forward", ()),
        ("Runner.forward", ("batch",)),
        ("Runner.forward", (None, "stream")),
        ("Runner.hidden", ("batch",)),
        ("Runner.decorated", ("batch",)),
        ("Runner.free", ("pages",)),
        ("Runner.make", ("config",)),
        ("Runner.loose", ("batch",)),
        ("Runner.loose", ("batch", "stream")),
        ("Runner.handed_on", ("batch", "stream")),
        ("release", ("request", "cache")),
    ],
)
@pytest.mark.usefixtures("engine")
def test_what_fits(name, parameters):
    """Places are counted without ``self``; what a wrapper takes without saying so fits."""
    assert HookTarget(f"toy_engine.{name}", parameters).problem() is None


@pytest.mark.parametrize(
    ("name", "parameters", "parts"),
    [
        ("toy_engine.Runner.forwards", (), ["toy_engine.Runner.forwards is not there", "there is forward"]),
        ("toy_engine.Worker.forward", (), ["toy_engine.Worker.forward is not there", "Worker"]),
        ("toy_moved.Runner.forward", (), ["toy_moved.Runner.forward is not there", "No module named 'toy_moved'"]),
        ("toy_broken.Runner.forward", (), ["importing toy_broken itself failed", "no driver"]),
        ("toy_engine.Runner.size", (), ["is no function, got int"]),
        ("toy_engine.Runner.forward", ("plan",), ["has no parameter 'plan'", "it takes (batch, stream)"]),
        ("toy_engine.Runner.forward", ("stream",), ["has 'stream' at another place", "it takes (batch, stream)"]),
        ("toy_engine.Runner.loose", ("plan",), ["has no parameter 'plan'", "it takes (batch, *args, **kwargs)"]),
        ("toy_engine.release", ("cache", "request"), ["'cache', 'request' at another place"]),
        ("release", (), ["release is not there"]),
    ],
)
@pytest.mark.usefixtures("engine")
def test_what_does_not_fit_is_told_in_a_sentence(name, parameters, parts):
    """With the function's full name, what it has instead, and the engine's own error where it can't be imported."""
    problem = HookTarget(name, parameters).problem()
    for part in parts:
        assert part in problem


@pytest.mark.usefixtures("engine")
def test_an_optional_function_may_be_missing_but_not_changed():
    """Not every release has it."""
    assert HookTarget("toy_engine.Runner.resize", ("slots",), optional=True).problem() is None
    assert HookTarget("toy_moved.resize", optional=True).problem() is None
    assert "no parameter 'slots'" in HookTarget("toy_engine.Runner.forward", ("slots",), optional=True).problem()


@pytest.mark.usefixtures("engine")
def test_methods_of_one_object():
    """Where a plugin hooks single objects, the last part of the name is looked up on the object."""
    runner = importlib.import_module("toy_engine").Runner()
    assert HookTarget("Runner.forward", ("batch", "stream")).problem(runner) is None
    assert "Runner.forward has no parameter 'plan'" in HookTarget("Runner.forward", ("plan",)).problem(runner)
    runner.forward = functools.wraps(runner.forward)(lambda *args: None)
    assert HookTarget("Runner.forward", ("batch", "stream")).problem(runner) is None


@pytest.mark.usefixtures("engine")
def test_the_engine_is_imported_only_when_asked():
    """To make a target imports nothing, `problem` does."""
    target = HookTarget("toy_engine.Runner.forward")
    assert "toy_engine" not in sys.modules
    assert target.problem() is None
    assert "toy_engine" in sys.modules


@pytest.mark.usefixtures("engine")
def test_problems_takes_names_as_well():
    """A name stands for a target without parameters; anything else is refused."""
    assert problems(["toy_engine.release", HookTarget("toy_engine.release", ("request",))]) == []
    assert len(problems(["toy_engine.gone", HookTarget("toy_engine.release", ("gone",))])) == 2
    with pytest.raises(PluginError, match=r"HookTarget or a dotted name, got 3"):
        problems([3])


def test_an_engine_whose_import_fails_is_told_once(distribution):
    """The error of the import itself, not that each function is missing; also where a package comes before it."""
    modules = {"toy_broken": "import toy_cuda_that_nobody_has"}
    distribution("toy-engine", {"toy_engine": ENGINE, **modules})
    targets = [f"toy_broken.Runner.{name}" for name in ("forward", "free", "make")]
    (sentence,) = problems(targets)
    assert "importing toy_broken itself failed (ModuleNotFoundError: No module named 'toy_cuda_that" in sentence
    assert problems(["toy_nowhere.Runner.forward"]) == [
        "toy_nowhere.Runner.forward is not there (ModuleNotFoundError: No module named 'toy_nowhere')"
    ]
