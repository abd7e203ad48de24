"""What findings say is true of what was done to a real SGLang, from outside."""

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("mha")]


@pytest.mark.parametrize(
    ("name", "kind", "state", "says"),
    [
        (
            "use_after_free",
            "freed",
            "freed",
            "which was freed by {victim}{freed}; {victim} wrote it at step {written}: use after free.",
        ),
        (
            "handed_out_again",
            "unwritten",
            "allocated",
            "which was handed out again since {victim} wrote it at step {written}, and not written since: the slot was "
            "freed too early",
        ),
    ],
)
def test_a_slot_that_was_given_back_names_who_wrote_it(launch, name, kind, state, says):
    """Its request reads it: the finding names the request and the step of the write, whatever became of the slot."""
    engine = launch({}, like="mha")
    told = engine.mechanism(name=name)
    found = [v for v in told["violations"] if v["kind"] == kind]
    assert {v["slot"] for v in found} == set(told["slots"])
    first = found[0]
    assert (first["request"], first["stored_request"], first["step_written"], first["stored_state"]) == (
        told["victim"], told["victim"], told["written"], state,
    )  # fmt: skip
    freed = f" at step {first['step_freed']}" if "step_freed" in first else ""
    by = first.get("freed_by", "the engine")
    says = says.replace("by {victim}", f"by {by}")
    assert says.format(victim=told["victim"], written=told["written"], freed=freed) in first["explanation"]


def test_a_stale_prefix_match_is_among_the_guesses(launch):
    """The prefix cache gave slots that others have written since, as other positions; the diagnosis looks at the match
    in the prefix cache."""
    engine = launch({}, like="mha")
    told = engine.mechanism(name="stale_match")
    first = told["violations"][0]
    assert (first["kind"], first["request"]) == ("position", told["victim"])
    assert first["slot"] in told["slots"]
    assert first["stored_request"] != told["victim"]
    assert "a prefix match that is out of date" in first["explanation"]
    assert told["diagnoses"] == ["foreign_prefix"]
