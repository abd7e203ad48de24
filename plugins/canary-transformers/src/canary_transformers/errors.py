"""`WithheldError`: an answer that is not given out."""

from canary_core import CanaryError, Violation


class WithheldError(CanaryError):
    """An answer was computed from KV found to be wrong, and is not given out. Another try computes it anew, with a new
    cache. Raised by `generate()` and by a direct call of a model, the text of a failed request of continuous batching;
    never with ``CANARY_ON_VIOLATION=report``. The text has nothing of the request's content."""

    def __init__(self, kind: str, region: str) -> None:
        where = f" ({kind} in {region})" if region else f" ({kind})"
        super().__init__(
            f"the KV cache of this answer was found to be wrong{where}, so nothing is given out; try again, with a new "
            "cache (canary, CANARY_ON_VIOLATION)"
        )

    @classmethod
    def of(cls, finding: Violation | None) -> "WithheldError":
        """For a verdict's finding."""
        return cls("findings_lost", "") if finding is None else cls(finding.kind.name.lower(), finding.region)
