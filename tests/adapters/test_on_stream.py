"""`OnStream`: a stream that is the current one for a while."""

from types import SimpleNamespace

import torch

from canary_adapters import OnStream, on_stream


def test_without_a_stream_nothing_changes():
    """As on a CPU."""
    with OnStream(None), OnStream(None):
        pass


def test_what_was_current_is_so_again_afterwards(monkeypatch):
    """The stream and the device, also within itself."""
    told, now = [], SimpleNamespace(stream="theirs on 1", device=1)

    def make_current(stream):
        now.stream, now.device = stream.name, stream.device_index
        told.append(stream.name)

    def stream(name, device):
        return SimpleNamespace(name=name, device_index=device, device=torch.device("cuda", device))

    streams = {f"{whose} on {device}": stream(f"{whose} on {device}", device) for whose, device in
               (("theirs", 0), ("theirs", 1), ("engine's", 0))}  # fmt: skip
    monkeypatch.setattr(on_stream, "make_current", make_current)
    # That of the stream's device, which another device being current does not change.
    monkeypatch.setattr(on_stream, "current", lambda device: streams["theirs on 0"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(now, "device", device))
    ours = OnStream(streams["engine's on 0"])
    with ours:
        assert (now.stream, now.device) == ("engine's on 0", 0)
        with ours:
            assert now.stream == "engine's on 0"
    assert (now.stream, now.device) == ("theirs on 0", 1)
    assert told == ["engine's on 0", "engine's on 0", "theirs on 0", "theirs on 0"]
