"""Whether the bytes of a model's parameters stay the same while nobody updates the weights."""

from canary_core.watchers.weights.watch import WeightWatch

__all__ = ["WeightWatch"]
