"""The footprint audit: a forward's real changes in the engine's own memory, against the adapter's claims.

In the order in which data flows: `memory` (the engine's storages), `snapshot` (a copy from before the forward),
`claims` (the adapter's claims), `footprint` (the comparison), `wording` (the result in sentences).
"""
