"""Cross-entropy of each row of logits."""

from diffnet.ops.cross_entropy.op import cross_entropy

__all__ = [
    "cross_entropy",
]
