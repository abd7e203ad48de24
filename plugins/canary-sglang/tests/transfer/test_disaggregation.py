"""PD disaggregation: records travel beside the KV from a prefill engine to a decode engine.

`test_two_engines` is real but for NIXL itself: two `sglang.Engine`s with their schedulers, bootstrap and transfer
manager, and `cpu/nixl`, which copies from the addresses of one process to those of the other as the lists say. The rest
looks at single pieces; where a manager is needed there, a plain object with its fields stands for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.transfer import disaggregation
from canary_sglang.transfer.disaggregation import DecodeSide, PrefillSide
from canary_sglang.transfer.transfer_buffers import TransferBuffers, entries

from canary_core import Canary, CanaryConfig, RecordBuffers, Writers
from canary_core.records import POSITION, STATES, TOKEN, WRITER, State
from canary_core.region import KVSource, Region

SLOTS, PAGE, ROW = 64, 4, 16
TESTS = Path(__file__).parents[1]


@pytest.fixture
def make(monkeypatch, findings):
    """Makes Canaries on small pools, which are closed after the test; no function of the engine is hooked."""
    monkeypatch.setattr(disaggregation.REGISTRAR, "apply", lambda hooks: None)
    monkeypatch.setattr(disaggregation, "_SIDES", [])
    canaries = []

    def make_canary(**settings: object) -> Canary:
        pool = [torch.randint(0, 256, (SLOTS, ROW), dtype=torch.uint8) for _ in range(4)]
        sources = tuple(
            KVSource(tensor, half, layer, chunk_bytes=ROW, slot_stride_bytes=ROW)
            for (half, layer), tensor in zip((("k", 0), ("k", 1), ("v", 0), ("v", 1)), pool, strict=True)
        )
        config = CanaryConfig.load(scrub_budget="0", mode="log", silence_s=0, **settings)
        canaries.append(Canary([Region("full", SLOTS, sources, null_slot=0)], config))
        return canaries[-1]

    yield make_canary
    for canary in canaries:
        canary.close()


def write(canary: Canary, slots: torch.Tensor, position: int = 0) -> None:
    """Records of tokens 5, 6, ... at ``position``, ..., with the fingerprints of the bytes as they are."""
    state = canary.states["full"]
    state.records[slots, TOKEN] = torch.arange(5, 5 + len(slots), dtype=torch.int32)
    state.records[slots, POSITION] = (
        torch.arange(position, position + len(slots), dtype=torch.int32) * STATES + State.WRITTEN
    )


def lists(layers: int = 4, page_bytes: int = PAGE * ROW, more_state: bool = False) -> SimpleNamespace:
    """The fields of a manager's arguments that we touch, for ``layers`` buffers."""
    pages = SLOTS // PAGE
    state = ([[1000 + i for i in range(4)]], [[pages * page_bytes] * 4], [[page_bytes] * 4])
    return SimpleNamespace(
        kv_data_ptrs=list(range(1, layers + 1)),
        kv_data_lens=[pages * page_bytes] * layers,
        kv_item_lens=[page_bytes] * layers,
        kv_layer_ids=[],
        kv_data_mem_kinds=["VRAM"] * layers,
        page_size=PAGE,
        state_types=["swa"] if more_state else [],
        state_data_ptrs=state[0] if more_state else [],
        state_data_lens=state[1] if more_state else [],
        state_item_lens=state[2] if more_state else [],
        state_layer_ids=[[]] if more_state else [],
    )


def ride(sender: Canary, receiver: Canary, slots: torch.Tensor, there: torch.Tensor) -> RecordBuffers:
    """The rows of ``slots`` in an inbox, copied page by page as the lists of both sides say."""
    source, inbox = sender.slots.record_buffers("full"), receiver.slots.empty_buffers("full")
    mine, theirs = entries(source, SLOTS, 1), entries(inbox, SLOTS, 1)
    assert [entry[1:] for entry in mine] == [entry[1:] for entry in theirs]
    for table, other in zip(
        (source.stamps, source.records, source.fingerprints),
        (inbox.stamps, inbox.records, inbox.fingerprints),
        strict=True,
    ):
        other[there] = table[slots]
    return inbox


def test_rows_lie_as_the_lists_say(make):
    """Each entry is a table's address, the bytes of all its pages and of one; every page has the same number."""
    rider = make().slots.record_buffers("full")
    listed = entries(rider, SLOTS // PAGE, PAGE)
    assert [item for _, _, item in listed] == [8 * PAGE, 32 * PAGE, 4 * 8 * PAGE]
    assert {length // item for _, length, item in listed} == {SLOTS // PAGE}
    assert [address for address, _, _ in listed] == [
        t.data_ptr() for t in (rider.stamps, rider.records, rider.fingerprints)
    ]
    assert entries(rider, SLOTS // PAGE + 1, PAGE) == []


def test_entries_are_appended_to_every_list(make):
    """All lists that a manager reads grow alike; a list of layer ids that is empty stays so."""
    args = lists()
    canary = make()
    riders = TransferBuffers(canary, canary.slots.record_buffers)
    riders.append(args)
    assert len(riders.kv) == 3
    assert {len(x) for x in (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, args.kv_data_mem_kinds)} == {7}
    assert args.kv_data_ptrs[:4] == [1, 2, 3, 4]
    assert args.kv_layer_ids == []


@pytest.mark.parametrize(("layers", "longer"), [(4, 2), (2, 1)], ids=["a longer buffer", "too few buffers"])
def test_nothing_is_appended_to_buffers_that_it_would_not_fit(make, layers, longer):
    """Where a page's number does not mean the same in all of them, or where there are fewer than ours."""
    args = lists(layers)
    args.kv_data_lens[-1] *= longer
    canary = make()
    riders = TransferBuffers(canary, canary.slots.record_buffers)
    riders.append(args)
    assert (riders.kv, len(args.kv_data_ptrs)) == ([], layers)


@pytest.mark.parametrize("more", [[], [8 * PAGE, 32 * PAGE, 2 * 8 * PAGE]], ids=["none", "fewer layers"])
def test_a_peer_that_takes_no_records_gets_none(make, findings, more):
    """The prefill side takes its entries back for good when a decode engine's list is another one, and says so."""
    side = PrefillSide(make())
    args = lists()
    theirs = [*args.kv_item_lens, *more]
    side.registering(args)
    peer = SimpleNamespace(agent_name="d", decode_tp_size=1, dst_kv_item_lens=theirs, dst_state_item_lens=[])
    manager = SimpleNamespace(kv_args=args, attn_tp_size=1)
    side.meeting(manager, peer)
    assert (args.kv_item_lens, len(args.kv_data_ptrs), len(args.kv_data_mem_kinds)) == ([PAGE * ROW] * 4, 4, 4)
    assert findings.events[-1].name == "records_left_out"


def test_a_peer_with_the_same_list_keeps_them(make):
    """Nothing changes for a decode engine whose entries are of the same sizes; another tensor-parallel size has others
    in the same bytes."""
    args = lists()
    side = PrefillSide(make())
    side.registering(args)
    manager = SimpleNamespace(kv_args=args, attn_tp_size=1)
    peer = dict(agent_name="d", dst_kv_item_lens=list(args.kv_item_lens), dst_state_item_lens=[])
    side.meeting(manager, SimpleNamespace(decode_tp_size=1, **peer))
    assert len(args.kv_item_lens) == 7
    side.meeting(manager, SimpleNamespace(decode_tp_size=2, **peer))
    assert len(args.kv_item_lens) == 4


def test_a_window_goes_buffer_by_buffer_or_without_records(make):
    """A state component that ends with our rows is sent flat to a peer that has them, and cut for one that has not."""
    args = lists(more_state=True)
    side = PrefillSide(make())
    riders = side._buffers
    riders.by_region["swa"], riders._names["swa"] = riders.by_region["full"], "swa"
    side.registering(args)
    assert [len(args.state_data_ptrs[0]), len(args.state_item_lens[0])] == [7, 7]
    manager = SimpleNamespace(kv_args=args, attn_tp_size=1)
    peer = dict(decode_tp_size=1, dst_kv_item_lens=list(args.kv_item_lens))
    side.meeting(manager, SimpleNamespace(agent_name="a", dst_state_item_lens=[list(args.state_item_lens[0])], **peer))
    side.meeting(manager, SimpleNamespace(agent_name="b", dst_state_item_lens=[args.state_item_lens[0][:4]], **peer))
    call = dict(src_data_ptrs=args.state_data_ptrs[0], item_lens=args.state_item_lens[0], notif="x")
    assert side.sending(manager, {**call, "peer_name": "a"}) == {**call, "peer_name": "a", "force_flat": True}
    cut = side.sending(manager, {**call, "peer_name": "b"})
    assert (len(cut["src_data_ptrs"]), len(cut["item_lens"]), cut["notif"]) == (4, 4, "x")
    kv = {**call, "src_data_ptrs": args.kv_data_ptrs, "peer_name": "b"}
    assert side.sending(manager, kv) == kv


def test_rows_that_did_not_come_are_unwritten(make):
    """Of a request of which some rows came, the others were lost; of one of which none came, nothing is known."""
    sender, receiver = make(), make()
    slots, there = torch.arange(8, 14), torch.arange(20, 26)
    write(sender, slots)
    inbox = ride(sender, receiver, slots, there)
    inbox.clear(there[-2:])
    receiver.slots.import_records("full", there, inbox.payload(there), writer=3)
    state = receiver.states["full"]
    arrived = State.WRITTEN + State.ARRIVED
    assert (state.records[there, POSITION] % STATES).tolist() == [arrived] * 4 + [State.UNWRITTEN] * 2
    assert state.records[there[:4], WRITER].tolist() == [3] * 4
    inbox.clear(there)
    receiver.slots.import_records("full", there, inbox.payload(there))
    assert (state.records[there, POSITION] % STATES).tolist() == [State.UNKNOWN] * 6


def test_a_prefill_side_that_is_off_says_nothing(make):
    """Once its Canary is off its tables stand still: what leaves then is unknown to the other side."""
    sender, receiver = make(), make()
    side = PrefillSide(sender)
    slots, there = torch.arange(8, 14), torch.arange(20, 26)
    write(sender, slots)
    side.close()
    rider = side._buffers.by_region["full"]
    inbox = receiver.slots.empty_buffers("full")
    inbox.stamps[there], inbox.records[there] = rider.stamps[slots], rider.records[slots]
    receiver.slots.import_records("full", there, inbox.payload(there))
    states = receiver.states["full"].records[there, POSITION] % STATES
    assert states.tolist() == [State.UNKNOWN] * 6


def test_records_of_a_peer_with_another_secret_are_told_once(make, findings, tmp_path):
    """The decode side does not judge what it gets, and nothing counts as cut short; one event says what to do."""
    secrets = [tmp_path / name for name in ("prefill", "decode")]
    for file in secrets:
        file.write_text(f"the secret of {file.name}, long enough")
    sender, receiver = (make(key_file=str(file)) for file in secrets)
    slots, there = torch.arange(8, 14), torch.arange(20, 26)
    write(sender, slots)
    inbox = ride(sender, receiver, slots, there)
    for _ in range(2):
        receiver.slots.import_records("full", there, inbox.payload(there))
        receiver.slots.check("full", there)
        receiver.drain()
    states = receiver.states["full"].records[there, POSITION] % STATES
    assert states.tolist() == [State.UNKNOWN] * 6
    assert findings.violations == []
    (event,) = [event for event in findings.events if event.name == "other_keys"]
    assert "CANARY_KEY_FILE" in event.fields["reason"]


@pytest.mark.parametrize("carried", [True, False])
def test_slots_that_are_written_to_are_not_judged(make, findings, carried):
    """From the moment a prefill engine knows of slots their bytes may change without a finding."""
    canary = make()
    slots = torch.arange(8, 14)
    write(canary, slots)
    side = DecodeSide(canary, RequestWriters(Writers(), torch.device("cpu")), carried)

    class Request:
        rid, origin_input_ids, output_ids, finished_reason = "a", [5] * 6, [], None

    side.allocated(Request(), None, 0, slots)
    canary.regions["full"].sources[0].tensor[slots] += 1
    canary.slots.check("full", slots)
    canary.drain()
    assert findings.violations == []
    assert (canary.states["full"].records[slots, POSITION] % STATES).tolist() == [State.UNKNOWN] * 6


@pytest.mark.beyond_ci("records that leave, come and are left out, without an engine")
@pytest.mark.first
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "options",
    [["--model", "llama"], ["--model", "swa", "--secret"], ["--guard", "prefill"], ["--guard", "decode"], ["--stress"]],
    ids=["llama", "swa", "prefill-only", "decode-only", "stress"],
)
def test_two_engines(options):
    """A prefill and a decode engine: clean requests raise nothing on either side; KV that is corrupted on the prefill
    side after its forward is reported by the decode side, with layer and half, and not by the prefill side; so are a
    transfer that is cut short and one whose pages are swapped. A page that is freed twice, or while it is in use, is
    reported by the side that does it. With Canary on one side only nothing happens, and neither where transfers fail,
    and SGLang retracts and resumes requests all the time. Keys are public, or made from a secret that both have."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS / "cpu"), os.environ.get("PYTHONPATH", "")])}
    script = [sys.executable, str(TESTS / "gpu" / "pd.py"), "--device", "cpu", *options]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=1400)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line for line in said if not line.get("good", "error" not in line)] == []
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [line for line in said if "good" in line]
    assert len(cases) == {"--model": 9, "--guard": 7, "--stress": 5}[options[0]]
    assert all(line["first_tokens_agree"] for line in cases if line["case"] == "clean")
