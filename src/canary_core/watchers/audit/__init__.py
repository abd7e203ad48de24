"""The footprint audit: what a forward really changed in the engine's own memory, against what its adapter said.

In the order in which data flows: `memory` (the engine's storages), `snapshot` (a copy from before the forward),
`claims` (what the adapter said), `footprint` (both compared), `wording` (what that means, in sentences).
"""
