"""The trace of a request, by SGLang's own objects, as its tokenizer's process sends them to the scheduler's."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from canary_sglang.compat.schedulers import traceparent

TRACE = "0af7651916cd43dd8448eb211c80319c"

SCRIPT = f"""
import pickle
from types import SimpleNamespace
from canary_sglang.compat.schedulers import traceparent
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats, SchedulerReqTimeStats
from sglang.srt.observability.trace import process_tracing_init, trace_set_thread_info
process_tracing_init("127.0.0.1:9", "test")
trace_set_thread_info("Scheduler", 0, 0, 0)
header = {{"traceparent": "00-{TRACE}-b7ad6b7169203331-01"}}
stats = APIServerReqTimeStats()
stats.init_trace_ctx("r1", None, header)
stats.set_created_time()
sent = pickle.loads(pickle.dumps(stats))
request = SimpleNamespace(time_stats=SchedulerReqTimeStats.new_from_obj(sent))
print("found", traceparent(request))
import os; os._exit(0)
"""


@pytest.mark.without_engine
@pytest.mark.parametrize(
    "request_", [SimpleNamespace(), SimpleNamespace(time_stats=None), SimpleNamespace(time_stats=SimpleNamespace())]
)
def test_a_request_without_a_trace(request_):
    """As of older releases, and where SGLang does not trace."""
    assert traceparent(request_) is None


@pytest.mark.timeout(400)
@pytest.mark.skipif(
    find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None,
    reason="SGLang traces with opentelemetry-sdk and opentelemetry-exporter-otlp only: pip install them",
)
@pytest.mark.parametrize(
    "exporter", ["", pytest.param("1", marks=pytest.mark.beyond_ci("the same, exported by the process itself"))]
)
def test_the_trace_of_a_request(exporter, tmp_path):
    """It is the one that the client sent, and the parent is SGLang's own span; also where another process exports."""
    environment = {**os.environ, "SGLANG_TRACE_ASYNC": exporter or "0"}
    out = tmp_path / "out.txt"
    with out.open("w") as file:
        # The exporter's process lives on: a pipe would stay open.
        done = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            done.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(done.pid, signal.SIGKILL)
    (found,) = [line.split()[1] for line in out.read_text().splitlines() if line.startswith("found ")]
    version, trace, parent, _ = found.split("-")
    assert (version, trace, parent != "b7ad6b7169203331") == ("00", TRACE, True), out.read_text()
