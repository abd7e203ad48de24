"""A connector of a scheduler like vLLM's, without its internal requests."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from canary_adapters.hidden_requests import ANSWERS, HiddenRequests
from canary_adapters.internal_requests import PREFIX
from canary_adapters.sheltered import Sheltered
from canary_adapters.touched_requests import TouchedRequests
from canary_adapters.unfit_requests import refusals, unfit_connector, unfit_request
from canary_core import Origin, Touch

OURS = f"{PREFIX}1"


class Connector:
    """Keeps what it is asked and told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Brings 32 tokens."""
        self.heard.append(request.request_id)
        return 32, True

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, None]:
        """Frees the blocks itself."""
        self.heard.append(request.request_id)
        return True, None

    def build_connector_meta(self, output: Any) -> str:
        """Sees the output, and changes a field of it."""
        cached, state = output.scheduled_cached_reqs, output.kv_connector_block_state
        self.heard.append(
            (
                [new.req_id for new in output.scheduled_new_reqs], cached.req_ids, cached.new_block_ids,
                cached.resumed_req_ids, cached.new_token_ids, output.num_scheduled_tokens,
                output.total_num_scheduled_tokens, output.finished_req_ids, state.req_ids,
                list(state.boundary_state_offloads),
            )
        )  # fmt: skip
        output.new_block_ids_to_zero = [7]
        return "meta"

    def update_connector_output(self, output: Any) -> None:
        """Sees the workers' reports."""
        self.heard.append(output.finished_sending)


def output() -> Any:
    """Of a step with an internal request that begins, one that goes on, and the end of a third one."""
    also = f"{PREFIX}2"
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=([4, 0, 5], [6]), prompt_token_ids=[1] * 40) for name in ("a", OURS)
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[also, "b"], resumed_req_ids={"b"}, new_block_ids=[([8], [9]), None], new_token_ids=[],
            num_computed_tokens=[32, 64],
        ),
        num_scheduled_tokens={"a": 40, OURS: 40, also: 8, "b": 1}, total_num_scheduled_tokens=89,
        finished_req_ids={f"{PREFIX}0", "c"}, preempted_req_ids=None, new_block_ids_to_zero=[1],
        kv_connector_block_state=SimpleNamespace(
            req_ids={"a", "b", OURS}, boundary_state_offloads={OURS: [], "a": []}
        ),
    )  # fmt: skip


def scheduler(connector: Any) -> Any:
    """With ``connector``."""
    stats = SimpleNamespace(requests=2, queries=80)
    return SimpleNamespace(connector=connector, finished_req_ids=set(), connector_prefix_cache_stats=stats)


def test_a_connector_neither_sees_nor_brings_nor_keeps_internal_requests():
    """But all else, and the scheduler's output is whole again afterwards, with what the connector has changed."""
    connector = Connector()
    of = scheduler(connector)
    hidden = HiddenRequests(of, nullcontext)
    hidden.wrap()
    hidden.wrap()
    user, ours = (SimpleNamespace(request_id=name) for name in ("a", OURS))
    assert connector.get_num_new_matched_tokens(user, 0) == (32, True)
    assert connector.get_num_new_matched_tokens(ours, 0) == (0, False)
    assert (connector.request_finished(user, []), connector.request_finished(ours, [])) == ((True, None), (False, None))
    made = output()
    assert connector.build_connector_meta(made) == "meta"
    seen = ["a"], ["b"], [None], {"b"}, [], {"a": 40, "b": 1}, 41, {"c"}, {"a", "b"}, ["a"]
    assert connector.heard == ["a", "a", seen]
    assert vars(made) | {"new_block_ids_to_zero": [1]} == vars(output())
    assert made.new_block_ids_to_zero == [7]
    assert (of.connector_prefix_cache_stats.requests, of.connector_prefix_cache_stats.queries) == (1, 40)


def test_an_end_reported_by_the_workers_connector_goes_no_further():
    """vLLM's scheduler fails at the report of a request that it has freed; LMCache reports each one that ends."""
    connector = Connector()
    HiddenRequests(scheduler(connector), nullcontext).wrap()
    reported = SimpleNamespace(finished_sending={"a", OURS}, finished_recving=None)
    connector.update_connector_output(reported)
    assert connector.heard == [{"a"}]
    assert reported.finished_sending == {"a"}


def test_an_output_of_another_shape_ends_nothing_but_recomputes():
    """The connector sees it as it is."""
    connector, told = Connector(), []
    odd = output()
    del odd.scheduled_cached_reqs.req_ids
    connector.build_connector_meta = lambda seen: [new.req_id for new in seen.scheduled_new_reqs]
    HiddenRequests(scheduler(connector), lambda: Sheltered(lambda *_: told.append(_), "hidden")).wrap()
    assert connector.build_connector_meta(odd) == ["a", OURS]
    assert [where for where, _ in told] == ["hidden"]
    reported = SimpleNamespace(finished_sending=frozenset({OURS}))
    connector.update_connector_output(reported)
    assert len(told) == 2


@pytest.mark.parametrize("several", [False, True])
def test_blocks_that_internal_requests_take_are_still_told(several):
    """`OffloadingConnector` reads blocks of ended requests until somebody gets them: it waits for these reads then."""
    offloading, taken = Connector(), set[int]()
    offloading.connector_scheduler = SimpleNamespace(_current_batch_allocated_block_ids=taken)
    connector = Connector() if several else offloading
    connector._connectors = [offloading] if several else []
    HiddenRequests(scheduler(connector), nullcontext).wrap()
    connector.build_connector_meta(output())
    assert taken == {4, 5, 6, 8, 9}


def test_the_connector_is_restored_once_the_last_end_is_surely_reported():
    """Else the wraps stay, which leave all other requests alone."""
    connector = Connector()
    of = scheduler(connector)
    hidden = HiddenRequests(of, nullcontext)
    hidden.wrap()
    connector.build_connector_meta(output())
    hidden.close()
    assert "update_connector_output" in vars(connector)
    quiet = output()
    quiet.num_scheduled_tokens, quiet.finished_req_ids = {}, set()
    for _ in range(16):
        connector.build_connector_meta(quiet)
    of.finished_req_ids = {OURS}
    hidden.close()
    assert "update_connector_output" in vars(connector)
    of.finished_req_ids = {"a"}
    hidden.close()
    assert [*vars(connector)] == ["heard"]


def test_a_scheduler_without_a_connector_is_left_alone():
    """As one whose connector has not all of vLLM's functions."""
    none = HiddenRequests(SimpleNamespace(connector=None, finished_req_ids=set()), nullcontext)
    none.wrap()
    none.close()
    connector = SimpleNamespace(on_new_request=lambda request: "told")
    HiddenRequests(scheduler(connector), nullcontext).wrap()
    assert connector.on_new_request(SimpleNamespace(request_id=OURS)) is ANSWERS["on_new_request"]
    assert connector.on_new_request(SimpleNamespace(request_id="a")) == "told"


def test_where_nothing_is_computed_again():
    """Connectors of others, lossy ones, and those that make up KV; requests on their way to another engine."""
    assert unfit_connector(None) is None
    assert unfit_connector(Origin("OffloadingConnector", shared=False)) is None
    for origin, reason in (
        (Origin("NixlConnector", shared=True), "unless CANARY_LEDGER_PRIVATE names it"),
        (Origin("LMCacheConnectorV1", shared=False, lossy=True), "changed bytes"),
        (Origin("DecodeBenchConnector", shared=False), "makes up KV"),
    ):
        assert reason in str(unfit_connector(origin))
    about = dict(prompt_embeds=None, mm_features=[], sampling_params=1, resumable=False, kv_transfer_params=None)
    assert unfit_request(SimpleNamespace(**about)) is None
    sent = {**about, "kv_transfer_params": {"do_remote_decode": True}}
    assert unfit_request(SimpleNamespace(**sent)) == "its KV goes to another engine, or comes from one"
    assert "pooling" in str(unfit_request(SimpleNamespace(**{**about, "sampling_params": None})))


def test_media_that_can_not_be_handed_on_have_a_reason():
    """By the model, or because they are gone."""
    about: dict[str, Any] = dict(sampling_params=1, mm_features=[SimpleNamespace(data=1)])
    causal: dict[str, Any] = dict(is_encoder_decoder=False, is_mm_prefix_lm=False)

    def why(gone: bool = False, encoder: Any = None, **model: bool) -> str | None:
        config = SimpleNamespace(model_config=SimpleNamespace(**{**causal, **model}))
        request = {**about, "mm_features": [SimpleNamespace(data=None)]} if gone else about
        return refusals(SimpleNamespace(vllm_config=config, ec_connector=encoder), None)(SimpleNamespace(**request))

    assert why() is None
    assert why(is_encoder_decoder=True) == "its media are read by an encoder beside the tokens"
    assert why(is_mm_prefix_lm=True) == "attention to its media depends on the chunks"
    assert why(encoder=1) == "what an encoder makes of its media comes from another engine"
    assert why(gone=True) == "its media are gone"


def test_tokens_of_a_connector_are_an_arrival_behind_those_of_a_hit():
    """As many as came: of a load that failed nothing is left, and the next begin is one of its own."""
    touched = TouchedRequests()
    touched.brought("a", 32)
    touched.began("a", 96)
    touched.brought("b", 0)
    touched.began("b", 64)
    touched.brought("c", 32)
    touched.began("c", 0)
    touched.began("c", 64)
    assert touched.of("a") == (Touch("hit", 32), Touch("arrival", 96))
    assert touched.of("b") == (Touch("arrival", 64),)
    assert touched.of("c") == (Touch("hit", 64),)
