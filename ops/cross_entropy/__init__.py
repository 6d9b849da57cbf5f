"""Cross-entropy of each row of logits, and with smoothed labels."""

from diffnet.ops.cross_entropy.label_smoothing import label_smoothing_loss
from diffnet.ops.cross_entropy.op import cross_entropy

__all__ = [
    "cross_entropy",
    "label_smoothing_loss",
]
