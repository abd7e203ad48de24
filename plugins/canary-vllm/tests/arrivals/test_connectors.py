"""Which connectors only this engine stores with, by their own settings."""

import os
from types import SimpleNamespace

import pytest
from canary_vllm.compat.connectors import origin

HOST_TIER = {
    "LMCACHE_CHUNK_SIZE": "256", "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "4.0",
    "LMCACHE_TRACK_USAGE": "false",
}  # fmt: skip
OFFLOAD = {"num_cpu_blocks": 4096, "cpu_bytes_to_use": 2 << 30}


@pytest.fixture
def settings(monkeypatch):
    """LMCache's variables, of which none is set yet."""
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def told(connector, private=(), **extra):
    """Whether others may store there, and whether it is lossy, of a runner with vLLM's own configuration."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
    found = origin(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config)), private)
    assert found.name == connector
    return found.shared, found.lossy


def test_a_host_tier_is_this_engines_own(settings):
    """vLLM's offloading, and LMCache in this process with nothing but memory of the host: a difference is told."""
    assert told("OffloadingConnector", **OFFLOAD) == (False, False)
    assert told("SimpleCPUOffloadConnector", cpu_bytes_to_use=1 << 30) == (False, False)
    assert told("LMCacheConnectorV1") == (False, False)
    for name, value in HOST_TIER.items():
        settings.setenv(name, value)
    assert told("LMCacheConnectorV1") == (False, False)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REMOTE_URL", "lm://cache:65432"), ("LOCAL_DISK", "file:///cache"), ("ENABLE_P2P", "True"),
        ("ENABLE_PD", "1"), ("GDS_PATH", "/cache"), ("MARU_PATH", "maru://pool"), ("STORAGE_PLUGINS", "mine"),
        ("REMOTE_CONFIG_URL", "http://settings"), ("EXTRA_CONFIG", '{"enable_nixl_storage": true}'),
    ],
)  # fmt: skip
def test_where_others_may_store_nothing_is_told(settings, variable, value):
    """Servers, disks, other engines, storages of others: with LMCache each of them is one setting."""
    settings.setenv(f"LMCACHE_{variable}", value)
    assert told("LMCacheConnectorV1") == (True, False)
    assert told("LMCacheConnectorV1", private=("LMCacheConnectorV1",)) == (False, False)


def test_a_file_and_vllms_own_settings_count(settings, tmp_path):
    """LMCache's file with all that YAML may be, the environment over it, and vLLM's configuration over both."""
    file = tmp_path / "lmcache.yaml"
    settings.setenv("LMCACHE_CONFIG_FILE", str(file))
    file.write_text("chunk_size: 256\nlocal_cpu: true\nremote_url: null\nremote_storage_plugins: []\n")
    assert told("LMCacheConnectorV1") == (False, False)
    file.write_text("local_cpu: true\nremote_storage_plugins:\n  - mine\n")
    assert told("LMCacheConnectorV1") == (True, False)
    file.write_text("local_cpu: true\nextra_config:\n  enable_nixl_storage: true\n")
    assert told("LMCacheConnectorV1") == (True, False)
    file.write_text("local_disk: file:///cache\nremote_serde: cachegen\n")
    assert told("LMCacheConnectorV1") == (True, True)
    settings.setenv("LMCACHE_LOCAL_DISK", "")
    settings.setenv("LMCACHE_REMOTE_SERDE", "naive")
    assert told("LMCacheConnectorV1") == (False, False)
    assert told("LMCacheConnectorV1", **{"lmcache.enable_blending": True}) == (False, True)


def test_of_what_is_not_known_others_may_store_there(settings):
    """A server of LMCache is open to others, and of a connector of one's own nobody knows."""
    for name in ("LMCacheMPConnector", "NixlConnector", "HostStore"):
        assert told(name) == (True, False)
        assert told(name, private=(name,)) == (False, False)
    assert told("OffloadingConnector", spec_name="TieringOffloadingSpec", **OFFLOAD) == (True, False)
