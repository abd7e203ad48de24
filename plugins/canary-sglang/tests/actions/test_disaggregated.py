"""``CANARY_ON_VIOLATION=protect`` with PD disaggregation. Engines are SGLang's own, in processes of their own, and bits
flip from outside (`tools.pd_flips`); NIXL is stood in for. Ends of requests are looked at without an engine, too."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from canary_sglang.compat import disaggregated
from tools.pd_flips import Pair, lose_the_peer, serve_flipped

MESSAGE = "the KV cache of this request is corrupted (bytes); try again"
QUIET = {"CANARY_SCRUB_BUDGET": "0", "CANARY_READ_CHECK": "0"}
GUARD = {"CANARY_PLUGINS": "sglang", "CANARY_ON_VIOLATION": "protect", **QUIET}
ENGINES = [
    pytest.mark.first,
    pytest.mark.timeout(1500),
    pytest.mark.beyond_ci("ends of requests, without an engine, and a decode engine's by what test_protection shows"),
]
FINE = {name: [0, 0] for name in ("quarantine_failed", "disabled", "reporting_failed")}


class Sender:
    """What a prefill engine's request sends with; ``told`` has the rooms that failed, and why."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.kv_mgr = SimpleNamespace(conclude_failure=self._conclude)
        self.aborted = False

    def abort(self) -> None:
        """As SGLang's."""
        self.aborted = True

    def _conclude(self, bootstrap_room: int, failure_reason: str) -> None:
        self.told.append((bootstrap_room, failure_reason))


def asked(**more: object) -> SimpleNamespace:
    """A request of a prefill engine."""
    fields = {"to_finish": None, "finished_reason": None, "skip_radix_cache_insert": False, "bootstrap_room": 7}
    request = SimpleNamespace(**fields, disagg_kv_sender=Sender(), **more)
    request.finished = lambda: request.finished_reason is not None
    return request


@pytest.mark.parametrize("sent", [False, True], ids=["before it is sent", "in transfer"])
def test_a_prefill_engines_request_ends_with_its_transfer(sent):
    """The decode engine is told why; one that is being sent ends as SGLang finds the failed transfer, with this reason
    in the place of SGLang's. Nothing of it stays cached, and it ends once."""
    request, reason = asked(), SimpleNamespace(message=MESSAGE)
    scheduler = SimpleNamespace(chunked_req=None, disagg_prefill_inflight_queue=[request] if sent else [])
    assert disaggregated.fail(scheduler, request, reason)
    assert (request.finished_reason, request.to_finish) == ((reason, None) if sent else (None, reason))
    assert (request.disagg_kv_sender.told, request.disagg_kv_sender.aborted) == ([(7, MESSAGE)], sent)
    assert request.skip_radix_cache_insert
    assert not disaggregated.fail(scheduler, request, reason)
    assert len(request.disagg_kv_sender.told) == 1


def test_a_prompt_in_chunks_goes_on_to_its_last_one():
    """The next chunk is computed from the ones before, in the cache."""
    request = asked()
    scheduler = SimpleNamespace(chunked_req=request, disagg_prefill_inflight_queue=[])
    assert disaggregated.fail(scheduler, request, SimpleNamespace(message=MESSAGE))
    assert not request.skip_radix_cache_insert


def test_the_decode_engine_knows_whose_transfer_failed_for_a_finding():
    """By the error that SGLang makes of the prefill engine's reason; any other failure stays as it is."""
    for message, known in ((f"transfer failed with exception {MESSAGE}", MESSAGE), ("the peer is down", None)):
        failed = SimpleNamespace(finished_reason=SimpleNamespace(message=message))
        assert disaggregated.failure(failed) == known
    assert disaggregated.failure(SimpleNamespace(finished_reason=None)) is None


def test_a_first_token_waits_for_what_came_with_it():
    """It is given out when the first forward of its request was judged, and never of one that ended with an error; of a
    request that ends with it, at once."""
    sent: list[tuple[str, ...]] = []

    @dataclass(frozen=True)
    class Processor:
        output_streamer: object

        def begin(self, batch: SimpleNamespace) -> None:
            self.output_streamer.stream_output(batch.reqs, batch.return_logprob)

    def stream(requests: list[SimpleNamespace], return_logprob: bool) -> None:
        sent.append(tuple(one.rid for one in requests))

    streamer = SimpleNamespace(stream_output=stream)
    one, short, ill, later = (asked(rid=name) for name in ("one", "short", "ill", "later"))
    short.finished_reason = "length"
    held: list[SimpleNamespace] = []
    every = SimpleNamespace(reqs=[one, short, ill, later], return_logprob=False)
    disaggregated.begin_holding(Processor.begin, Processor(streamer), every, held)
    assert (sent, held) == ([("short",)], [one, ill, later])
    ill.finished_reason = "abort"
    scheduler, first = SimpleNamespace(output_streamer=streamer), SimpleNamespace(reqs=[one, ill], return_logprob=False)
    held = disaggregated.give_out(scheduler, first, held)
    assert (sent, held) == ([("short",), ("one",)], [later])


@pytest.fixture
def pair(tmp_path, request):
    """A prefill and a decode engine, with the overlap scheduler; the parameter: more options."""
    made = Pair(tmp_path / "pair", {"disable_overlap_schedule": False, **request.param}, **GUARD)
    yield made
    made.close()


def part(served, *names):
    """These numbers, and those of what must never happen."""
    return {name: served.get(name, 0) for name in (*names, *FINE, "wrong", "right_again")}


@pytest.mark.parametrize(("pair", "ranks"), [({}, 1), ({"tp_size": 2}, 2)], indirect=["pair"], ids=["single", "tp2"])
@pytest.mark.usefixtures("pair")
class TestArrivals:
    """Bits flip before KV is sent, or when it has come, with two ranks on the last one of each engine only."""

    pytestmark = ENGINES

    def test_no_token_from_what_arrived_wrong_leaves_the_decode_engine(self, pair, ranks):
        """Each request ends with status 503 and no token, not even the prefill engine's own, on all ranks; clean
        requests are left alone, and a peer that dies ends what waits for it, not the engine."""
        for case in ("arrived", "sent"):
            served = serve_flipped(pair, 8, case)
            assert part(served, "error 503", "given", "aborted") == FINE | {
                "error 503": 8, "given": 0, "aborted": [0, 8 * ranks], "wrong": 0, "right_again": 6,
            }  # fmt: skip
        clean = serve_flipped(pair, 12, "nothing")
        assert part(clean, "right", "aborted") == FINE | {"right": 12, "aborted": [0, 0], "wrong": 0, "right_again": 6}
        assert lose_the_peer(pair) == {"killed": [500] * 3, "lives": True}


@pytest.mark.parametrize("pair", [{"disable_radix_cache": False}], indirect=True)
class TestPrefill:
    """Bits flip in the prefix cache of the prefill engine."""

    pytestmark = ENGINES

    def test_what_a_prefill_engine_finds_is_not_served(self, pair):
        """It ends the request, the decode engine ends it with the same reason and status, and the next one for the
        prompt is right."""
        served = serve_flipped(pair, 16, "parked", together=1)
        flipped = served["flipped"]
        assert flipped > 4
        assert part(served, "right", "error 503", "prefill 503", "given") == FINE | {
            "right": 16 - flipped, "error 503": flipped, "prefill 503": flipped, "given": 0, "wrong": 0,
            "right_again": 6,
        }  # fmt: skip
