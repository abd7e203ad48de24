"""The signature of an incident: the same for the same sort of damage, in whichever process, slot and request."""

import re

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_desk.incidents.bundle import read_bundle
from canary_desk.incidents.signature import content_digest


def damaged(directory, name="a", position=5, layer=1, bit=9, seed=0, **settings):
    """The bundle and the events of one flipped bit in a toy engine."""
    guarded = Guarded(ToyEngine(layers=3, seed=seed), read_check=-1, incident_dir=str(directory), **settings)
    request = guarded.engine.submit(name, [100 + seed + i for i in range(12)])
    guarded.step(8)
    guarded.engine.k[layer].view(torch.int32)[request.slots[position], 3] ^= 1 << bit
    guarded.step(4)
    guarded.canary.close()
    (path,) = directory.iterdir()
    return read_bundle(path), guarded


def test_it_names_the_sort_and_neither_place_nor_request(tmp_path):
    """Kind, diagnosis, layer and shape; in the event diagnosis and in the bundle alike."""
    bundle, guarded = damaged(tmp_path, name="mallory")
    assert bundle.signature.text == "bytes:flipped_bit:1:bit:-"
    assert re.fullmatch("[0-9a-f]{12}", bundle.signature.id)
    (event,) = guarded.findings.told("diagnosis")
    assert event.fields["signature"] == bundle.incident["signature"] == bundle.signature.text
    assert event.fields["signature_id"] == bundle.signature.id


@pytest.mark.parametrize(("change", "same"), [({"name": "b", "position": 3, "bit": 20}, True), ({"layer": 2}, False)])
def test_it_is_the_same_for_another_request_and_slot_and_not_for_another_layer(change, same, tmp_path):
    """Over engines, too: nothing of a process is in it."""
    first, _ = damaged(tmp_path / "one")
    other, _ = damaged(tmp_path / "other", seed=7, **change)
    assert (first.signature == other.signature) is same
    assert (first.signature.id == other.signature.id) is same


def test_the_same_wrong_bytes_have_the_same_digest(tmp_path):
    """And others have another one, whichever keys the fingerprints of each process have."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"another secret of so many bytes")
    first, again = damaged(tmp_path / "one")[0], damaged(tmp_path / "again", keys="public")[0]
    third = damaged(tmp_path / "third", key_file=str(secret))[0]
    other = damaged(tmp_path / "other", bit=12)[0]
    digests = [bundle.incident["content"] for bundle in (first, again, third, other)]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert re.fullmatch("[0-9a-f]{12}", digests[0])
    # One of an older release does not say it, and has public keys.
    assert content_digest(again.rebuilt(), None) == digests[0]


def test_all_layers_are_one_word(tmp_path):
    """A slot that is overwritten in every layer has the same signature in a model of any depth."""
    texts = set()
    for layers in (2, 3):
        guarded = Guarded(ToyEngine(layers=layers), read_check=-1, incident_dir=str(tmp_path / str(layers)))
        request = guarded.submit("a", 12)
        guarded.step(8)
        for tensor in (*guarded.engine.k, *guarded.engine.v):
            tensor[request.slots[2]] = 0
        guarded.step(4)
        guarded.canary.close()
        (path,) = (tmp_path / str(layers)).iterdir()
        texts.add(read_bundle(path).signature.text)
    assert texts == {"bytes:zeroed:all:zeros:-"}
