"""Keys of the fingerprints: nobody outside of the process knows them, unless they are exchanged."""

import json
import subprocess
import sys

import pytest
import torch
from ledger.host_tier import PAGE, HostTier
from support.guarded import Guarded
from support.toy import ToyEngine
from support.weights import Model, flip
from typer.testing import CliRunner

from canary_core import AttachError, CanaryConfig, ConfigError, Kind, State, check_payload
from canary_core.ops import fingerprint_keys, hashing
from canary_core.records import POSITION, STATES
from canary_core.testing import read_bytes
from canary_desk.cli.app import app

WORD = 1 << 32
PROMPT = list(range(100, 117))

SERVES = """
import json, sys, torch
sys.path[:0] = json.loads(sys.argv[1])
from support.guarded import Guarded
from support.toy import ToyEngine
g = Guarded(ToyEngine(), **json.loads(sys.argv[2]))
g.submit("a", 12)
g.step()
g.step()
rows = g.canary.slots.export_records("full", torch.arange(1, 13))
layers = [t[1:13].view(torch.int16).tolist() for pair in zip(g.engine.k, g.engine.v) for t in pair]
print(json.dumps([g.canary.states["full"].fingerprints[1:13].tolist(), rows.tolist(), layers]))
"""


def elsewhere(**settings):
    """Of another process with the toy engine and one request in slots 1 to 12: fingerprints, payload, bytes."""
    command = [sys.executable, "-c", SERVES, json.dumps(sys.path), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def secret(folder, text="sixteen bytes or more", mode=0o600):
    """The path of a file with a secret."""
    path = folder / f"{''.join(filter(str.isalnum, text))}.key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def attached(guarded):
    """The fields of its first event."""
    (event,) = guarded.findings.told("attached")
    return event.fields


def test_two_processes_have_other_fingerprints_of_the_same_bytes(tmp_path):
    """By default; with public keys, and with one secret, they have the same."""
    one, other = elsewhere(), elsewhere()
    assert one[2] == other[2]
    assert not {n for row in one[0] for n in row} & {n for row in other[0] for n in row}
    public = elsewhere(keys="public")[0]
    assert public == elsewhere(keys="public")[0] != one[0]
    shared = elsewhere(key_file=secret(tmp_path))[0]
    assert shared == elsewhere(key_file=secret(tmp_path))[0] != public
    assert elsewhere(key_file=secret(tmp_path, "another secret, as long"))[0] not in (public, shared)


def collision(words):
    """Two words of a slot and their other values, so that the sum with public keys stays the same: the shortest vector
    of the lattice ``a * key[i] + b * key[j] = 0``, by Gauss's algorithm; None where no pair of words has room."""
    keys = [int(k) % (1 << 64) for k in hashing.keys(len(words))]
    for i in range(len(words)):
        for j in range(i):
            small, large = (-keys[j] * pow(keys[i], -1, 1 << 64) % (1 << 64), 1), (1 << 64, 0)
            while True:
                size = small[0] ** 2 + small[1] ** 2
                times = round((small[0] * large[0] + small[1] * large[1]) / size)
                rest = large[0] - times * small[0], large[1] - times * small[1]
                if rest[0] ** 2 + rest[1] ** 2 >= size:
                    break
                small, large = rest, small
            for sign in (1, -1):
                new = {i: words[i] + sign * small[0], j: words[j] + sign * small[1]}
                if all(0 <= value < WORD for value in new.values()):
                    return new
    return None


@pytest.mark.parametrize(("keys", "told"), [("public", 0), ("seeded", 1)])
def test_a_collision_made_for_public_keys_is_found_with_seeded_ones(keys, told):
    """Two words of a slot are changed by one who knows how Canary adds: with public keys the scrub sees nothing, and
    with those of the process it tells where."""
    guarded = Guarded(ToyEngine(row_elements=128), keys=keys, scrub_budget="1MiB")
    assert attached(guarded)["keys"] == keys
    guarded.submit("a", 12)
    guarded.step(12)
    row = guarded.engine.k[1].view(torch.int32)[6]
    new = collision([int(word) % WORD for word in row])
    assert new is not None
    for index, value in new.items():
        row[index] = value - WORD if value >= WORD // 2 else value
    for _ in range(20):
        guarded.decode()
    guarded.canary.drain()
    assert [(v.kind, v.slot, v.source) for v in guarded.violations] == [(Kind.BYTES, 6, "k.1")] * told


def test_the_keys_of_any_secret_tell_any_two_flipped_bits():
    """Seeds are drawn anew where they have a pair of keys that could cancel: looked at here by sorting, and one secret
    in a few needs it."""
    second = 0
    for number in range(60):
        text = b"secret %d" % number
        found = fingerprint_keys._drawn("shared", text)
        keys = hashing.keys(hashing.SURE_WORDS, seed=found.of_words)
        assert bool((keys & 1).all())
        low = [int(k) % (1 << 33) for k in keys]
        either = sorted({*low, *((1 << 33) - k for k in low)})
        assert len(either) == 2 * len(low)
        first = fingerprint_keys._seeds("shared", text, 0)
        second += found != first
        assert (found != first) == (not hashing.are_sure(hashing.keys(hashing.SURE_WORDS, seed=first.of_words)))
    assert 0 < second < 20


def imports(slots, payload, **settings):
    """An engine to whose slots such records came, with the bytes of another one in there."""
    guarded = Guarded(ToyEngine(), scrub_budget="1MiB", **settings)
    fingerprints, rows, layers = payload
    assert len(fingerprints) == len(slots)
    tensors = [t for pair in zip(guarded.engine.k, guarded.engine.v, strict=True) for t in pair]
    for tensor, rows_of in zip(tensors, layers, strict=True):
        tensor[slots] = torch.tensor(rows_of, dtype=torch.int16).view(torch.bfloat16)
    guarded.canary.slots.import_records("full", slots, torch.tensor(rows))
    return guarded


def reads(guarded, slots):
    """A request that goes on from there."""
    request = guarded.engine.submit("theirs", [*range(5, 17), 90], prefix=12)
    request.slots = slots.tolist()
    for _ in range(6):
        guarded.step()
        guarded.decode()
    guarded.canary.drain()


def test_engines_with_one_secret_exchange_records(tmp_path):
    """Two processes: what came clean is silent, and a bit that flipped on the way is told with the slot."""
    slots, key_file = torch.arange(30, 42), secret(tmp_path)
    payload = elsewhere(key_file=key_file)
    clean, damaged = (imports(slots, payload, key_file=key_file) for _ in range(2))
    damaged.engine.k[1].view(torch.int16)[33, 4] ^= 1 << 9
    for guarded in (clean, damaged):
        reads(guarded, slots)
        assert guarded.findings.told("other_keys") == []
        assert guarded.canary.stats()["unfit_rows"] == 0
        assert attached(guarded)["keys"] == "shared"
    assert clean.violations == []
    assert [(v.kind, v.slot, v.source) for v in damaged.violations] == [(Kind.BYTES, 33, "k.1")]


@pytest.mark.parametrize("theirs", ["another secret, as long", "public", "seeded"])
def test_records_of_other_keys_are_told_once_and_never_judged(theirs, tmp_path):
    """From a peer with another secret or with none: one event, a count of the slots, and no finding, though the bytes
    are others than those fingerprinted; nor the other way round, where these keys are the process's own."""
    slots = torch.arange(30, 42)
    told = {"keys": theirs} if theirs in ("public", "seeded") else {"key_file": secret(tmp_path, theirs)}
    payload = elsewhere(**told)
    for own in ({"key_file": secret(tmp_path)}, {"keys": "seeded"}):
        guarded = imports(slots, payload, **own)
        guarded.engine.k[1][33] += 1
        reads(guarded, slots)
        guarded.canary.slots.import_records("full", slots[:3], torch.tensor(payload[1][:3]))
        guarded.step()
        guarded.canary.drain()
        assert guarded.violations == []
        words = guarded.canary.states["full"].records[slots, POSITION]
        assert (words % STATES).tolist() == [int(State.UNKNOWN)] * 12
        (event,) = guarded.findings.told("other_keys")
        assert (event.level, event.fields["with"], event.fields["number"]) == ("warning", "records", 12)
        assert guarded.canary.stats()["unfit_rows"] == 15


def test_bytes_on_the_host_are_compared_with_the_keys_of_their_payload(tmp_path, monkeypatch):
    """`check_payload` of a secret that the process has finds a flip; of one that it has not it compares nothing, and
    says so."""
    guarded = Guarded(ToyEngine(), key_file=secret(tmp_path, "only here, and as long"))
    guarded.submit("a", 12)
    guarded.step(12)
    slots = torch.arange(1, 13)
    layout, rows = guarded.canary.slots.payload_layout("full"), guarded.canary.slots.export_records("full", slots)
    parked = {s.name: read_bytes(s, slots) for s in guarded.engine.region().sources}
    parked["v.0"][3, 20] ^= 1
    check = check_payload(layout, rows, parked)
    assert [(d.row, d.source) for d in check.differences] == [(3, "v.0")]
    assert not check.other_keys
    monkeypatch.delitem(fingerprint_keys._known, layout.keys)
    check = check_payload(layout, rows, parked)
    assert (check.differences, check.checked, check.skipped, check.other_keys) == ((), 0, 48, True)


def test_a_ledgers_entries_are_exchanged_under_one_secret(tmp_path):
    """A prefill engine's entries let the decode engine judge what it gets, as with public keys."""
    key_file = secret(tmp_path)
    prefill, decode = HostTier.make(key_file=key_file), HostTier.make(key_file=key_file)
    prefill.save(prefill.compute(PROMPT))
    assert decode.g.canary.ledger.import_entries("full", PAGE, prefill.g.canary.ledger.export("full", PAGE)) == 4
    decode.stored = prefill.stored
    decode.finish(decode.load(PROMPT))
    decode.g.canary.drain()
    assert decode.g.violations == []
    decode.load(PROMPT, lambda block, source, data: data + (block == 3 and source == 2))
    decode.g.canary.drain()
    assert [(v.kind, v.sources) for v in decode.g.violations] == [(Kind.ARRIVAL, ("k.1",))]


def test_a_ledgers_entries_of_other_keys_put_their_prefixes_in_doubt(tmp_path):
    """They are told once and not entered. This engine has computed the prefix, too, with other numerics: bytes of the
    peer that differ from its own are no finding."""
    prefill, decode = HostTier.make(key_file=secret(tmp_path)), HostTier.make()
    prefill.save(prefill.compute(PROMPT))
    decode.save(decode.compute(PROMPT))
    for _ in range(2):
        assert decode.g.canary.ledger.import_entries("full", PAGE, prefill.g.canary.ledger.export("full", PAGE)) == 0
    decode.stored = prefill.stored
    decode.load(PROMPT, lambda block, source, data: data + (source == 2))
    decode.g.canary.drain()
    assert decode.g.violations == []
    assert decode.counts("unknown", "differing") == [4, 0]
    (event,) = decode.g.findings.told("other_keys")
    assert (event.fields["with"], event.fields["number"]) == ("entries of a ledger", 4)
    assert decode.g.canary.stats()["ledger_other_keys"] == 8
    with pytest.raises(AttachError, match="another layout"):
        HostTier.make(rank=1).g.canary.ledger.import_entries("full", PAGE, prefill.g.canary.ledger.export("full", PAGE))


def test_an_engine_that_sends_records_has_public_keys_without_a_secret_and_says_why(tmp_path):
    """A plugin says that they are sent; a secret, or the operator's word, goes before."""
    engine = ToyEngine()
    for settings, kind, reason in (
        ({}, "public", True),
        ({"keys": "seeded"}, "seeded", False),
        ({"keys": "public"}, "public", False),
        ({"key_file": secret(tmp_path)}, "shared", False),
    ):
        config = CanaryConfig.load(**settings).for_exports("records travel")
        keys = fingerprint_keys.FingerprintKeys.of(config.model_copy(update={"rank": 1}))
        assert keys.kind == kind
        assert fingerprint_keys.keys_reason(config).startswith("records travel") is reason
    assert attached(Guarded(engine, bytes="off")).get("keys") is None


def test_a_secret_that_everybody_may_read_is_told(tmp_path):
    """The engine is guarded with it all the same; the event says what to do."""
    guarded = Guarded(key_file=secret(tmp_path, mode=0o644))
    (event,) = guarded.findings.told("attached")
    assert (event.level, event.fields["keys"]) == ("warning", "shared")
    assert "chmod 600" in event.fields["keys_reason"]
    assert attached(Guarded(key_file=secret(tmp_path, mode=0o640))).get("keys_reason") is None


@pytest.mark.parametrize("text", [None, "", "fifteen bytes..", "  fifteen bytes..\n"])
def test_a_secret_that_is_none_is_refused(text, tmp_path):
    """With the setting and what is wrong; the secret itself is not in it."""
    path = str(tmp_path / "missing") if text is None else secret(tmp_path, text)
    with pytest.raises(ConfigError, match=r"^CANARY_KEY_FILE: .*(can't be read|bytes, 16 at least)") as raised:
        Guarded(key_file=path)
    assert "fifteen bytes" not in str(raised.value)


@pytest.mark.parametrize("shared", [False, True])
def test_a_bundle_is_checked_again_where_it_can_be(shared, tmp_path, monkeypatch):
    """Another process redoes the check by the seeds in the bundle. A secret is not in there: without it the bytes are
    not looked at again, which is said, and with it they are."""
    settings = {"key_file": secret(tmp_path, "of bundles, and as long")} if shared else {}
    folder = tmp_path / "bundles"
    guarded = Guarded(read_check=-1, incident_dir=str(folder), incident_bytes=True, **settings)
    guarded.submit("a", 12)
    guarded.step()
    guarded.engine.k[1].view(torch.int32)[3, 2] ^= 1 << 7
    guarded.step()
    guarded.canary.close()
    (path,) = folder.iterdir()
    seeds = guarded.canary.states["full"].sources.fingerprint_keys
    inside = b"".join(file.read_bytes() for file in path.iterdir())
    assert (str(seeds.of_words).encode() in inside) is not shared
    assert b"of bundles" not in inside
    monkeypatch.setattr(fingerprint_keys, "_known", {0: fingerprint_keys.PUBLIC})
    monkeypatch.setattr(fingerprint_keys, "_SECRET", b"another process's")
    checked = CliRunner().invoke(app, ["explain", str(path), "--check"])
    assert checked.exit_code == 0, checked.output
    assert ("were not fingerprinted again" in checked.output) is shared
    monkeypatch.setenv("CANARY_KEY_FILE", secret(tmp_path, "of bundles, and as long"))
    checked = CliRunner().invoke(app, ["explain", str(path), "--check"])
    assert (checked.exit_code, checked.output.count("\n")) == (0, 1)
    shown = CliRunner().invoke(app, ["explain", str(path)])
    assert "bit 7 of 32-bit word 2" in shown.output.replace("\n", " ")


def test_weights_are_taken_anew_by_a_canary_of_other_keys():
    """A second Canary over the same model goes on where the first ended, but not with fingerprints that mean nothing to
    it: nothing is found, and a later flip is."""
    model = Model()
    for element, keys in enumerate(("public", "seeded", "seeded")):
        guarded = Guarded(ToyEngine(slots=256), keys=keys, weights=True, scrub_budget="64MiB")
        guarded.canary.guard_weights(model, resume=True)
        guarded.submit()
        for _ in range(6):
            guarded.step()
            guarded.decode()
        guarded.canary.drain()
        assert guarded.violations == []
        assert "weights_unsure" not in guarded.canary.stats()
        if keys == "seeded":
            parameter = next(iter(model.large().values()))
            flip(parameter, element, 2)
            for _ in range(6):
                guarded.decode()
            guarded.canary.drain()
            assert [v.kind for v in guarded.violations] == [Kind.WEIGHTS]
            flip(parameter, element, 2)
        guarded.canary.close()
