"""Recompute: the KV of requests in the cache against a second computation from the requests' tokens."""

from canary_core.watchers.recompute.attention import AttentionError as AttentionError
from canary_core.watchers.recompute.judge import RecomputeJudge as RecomputeJudge
from canary_core.watchers.recompute.questions import Questions as Questions
from canary_core.watchers.recompute.recompute import Recompute as Recompute
from canary_core.watchers.recompute.verification import LayerError as LayerError
from canary_core.watchers.recompute.verification import Verification as Verification
from canary_core.watchers.recompute.verification import Verifier as Verifier
