"""The ledger: judges KV that comes back without records by the stored fingerprints of its prefix, whoever brings it."""

from canary_core.watchers.ledger.arrival import Arrival, Origin, block_hashes
from canary_core.watchers.ledger.ledger import Ledger

__all__ = ["Arrival", "Ledger", "Origin", "block_hashes"]
