"""`FINDINGS`: any finding, with any of its fields missing, for properties of sentences."""

from hypothesis import strategies as st

from canary_core import Kind, Phase, State, Violation

NUMBERS = st.sampled_from([None, -1, 0, 1, 7, 4096])
NAMES = st.sampled_from([None, "", "0", "77", "-1", "chat_3", "None of these"])

FINDINGS = st.builds(
    Violation,
    kind=st.sampled_from(Kind),
    region=st.just("full"),
    phase=st.sampled_from(Phase),
    step=st.integers(0, 9),
    **dict.fromkeys(
        (
            "slot", "page", "layer", "position", "token", "stored_position", "stored_token", "stored_value",
            "found_value", "step_written", "step_freed", "node",
        ),
        NUMBERS,
    ),
    **dict.fromkeys(("request", "stored_request", "freed_by"), NAMES),
    source=st.sampled_from([None, "k.1"]),
    half=st.sampled_from([None, "k"]),
    stored_state=st.sampled_from([None, *State]),
    rule=st.sampled_from([None, "parent"]),
    detail=st.sampled_from([None, "", "slot 4 is in the free list"]),
    origin=st.sampled_from([None, "", "LMCacheConnectorV1"]),
    sources=st.sampled_from([None, ("k.1",), ("k.1", "v.1")]),
    arrived=st.sampled_from([None, True]),
    identity=st.sampled_from([None, "LoRA adapter sql", "the weights of change 2"]),
    element=st.sampled_from([None, 0, 4096]),
    odd_rank=st.sampled_from([None, 0, 3]),
    old=st.sampled_from([None, "1 (0x3f80)"]),
    new=st.sampled_from([None, "2 (0x4000)"]),
    stored_identity=st.sampled_from([None, "cache salt #0a1b2c3d"]),
)  # fmt: skip
"""Any kind, with any of its fields missing, unknown to the device (-1), or 0."""
