"""`nixl_agent`: see the package."""

import ctypes
import os
import pickle
import socket
import tempfile
import threading
from collections import defaultdict
from typing import Any

import numpy as np


class nixl_thread_sync_t:
    """Only looked at."""

    NIXL_THREAD_SYNC_STRICT = 0


def nixl_agent_config(**settings: Any) -> dict[str, Any]:
    """StateCheckpoints, not used."""
    return settings


class nixl_agent:
    """One end: writes to others' memory, and lets others write to its own."""

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self._path = os.path.join(tempfile.mkdtemp(), "agent")
        self._peers: dict[str, str] = {}
        self._notes: dict[str, list[bytes]] = defaultdict(list)
        self._ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        server = socket.socket(socket.AF_UNIX)
        server.bind(self._path)
        server.listen(64)
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()

    def create_backend(self, backend: str, params: Any) -> None:
        """Nothing to create."""

    def get_plugin_list(self) -> list[str]:
        """Whatever SGLang asks for by default."""
        return ["UCX"]

    def register_memory(self, ranges: Any, kind: str) -> Any:
        """Remembers what may be read and written."""
        self._ranges += [(int(address), int(address) + int(length)) for address, length, *_ in ranges]
        return [ranges]

    def get_agent_metadata(self) -> bytes:
        """Where to reach this agent."""
        return pickle.dumps((self.name, self._path))

    def add_remote_agent(self, metadata: bytes) -> None:
        """Another agent's."""
        name, path = pickle.loads(metadata)
        self._peers[name] = path

    def prep_xfer_dlist(self, peer: str, descriptors: Any, kind: str) -> Any:
        """Rows of address, length, device."""
        return np.asarray(descriptors, dtype=np.uint64)

    def get_xfer_descs(self, descriptors: Any, kind: str) -> Any:
        """The same for one transfer."""
        return np.asarray(descriptors, dtype=np.uint64)

    def make_prepped_xfer(self, op: str, source: Any, source_i: Any, target: Any, target_i: Any, note: bytes) -> Any:
        """Chosen rows of two lists. The peer is the one whose list it is: there is one here."""
        (peer,) = self._peers
        return source[np.asarray(source_i)], target[np.asarray(target_i)], peer, note

    def initialize_xfer(self, op: str, source: Any, target: Any, peer: str, note: bytes = b"") -> Any:
        """All rows of two lists."""
        return source, target, peer, note

    def transfer(self, handle: Any) -> str:
        """Copies at once, and tells the other end."""
        source, target, peer, note = handle
        if len(source) != len(target):
            return "ERR"
        pieces = []
        for (address, length, _), (there, room, _) in zip(source.tolist(), target.tolist(), strict=True):
            if length != room or not self._registered(address, length):
                return "ERR"
            pieces.append((there, ctypes.string_at(address, length)))
        return self._send(peer, pieces, note)

    def check_xfer_state(self, handle: Any) -> str:
        """It was done at once."""
        return "DONE"

    def send_notif(self, peer: str, note: bytes) -> None:
        """A note without bytes."""
        self._send(peer, [], note)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Since the last call."""
        with self._lock:
            notes, self._notes = dict(self._notes), defaultdict(list)
        return notes

    def _registered(self, address: int, length: int) -> bool:
        return any(first <= address and address + length <= end for first, end in self._ranges)

    def _send(self, peer: str, pieces: list[tuple[int, bytes]], note: bytes) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._peers[peer])
            connection.sendall(pickle.dumps((self.name, pieces, note)))
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(16).decode()

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                data = b"".join(iter(lambda: connection.recv(1 << 20), b""))  # noqa: B023
                name, pieces, note = pickle.loads(data)
                if not all(self._registered(address, len(content)) for address, content in pieces):
                    connection.sendall(b"ERR")
                    continue
                for address, content in pieces:
                    ctypes.memmove(address, content, len(content))
                with self._lock:
                    self._notes[name].append(note)
                connection.sendall(b"DONE")
