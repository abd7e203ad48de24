"""The ledger: KV that comes back without records is judged by what was stored under its prefix, whoever brings it."""

from canary_core.ledger.arrival import Arrival, Origin, block_hashes
from canary_core.ledger.ledger import Ledger

__all__ = ["Arrival", "Ledger", "Origin", "block_hashes"]
