"""Losses of classes: cross-entropy of each row of logits, with smoothed labels, focal loss and Dice losses."""

from diffnet.ops.cross_entropy.dice import dice_loss, generalized_dice_loss
from diffnet.ops.cross_entropy.focal import focal_loss
from diffnet.ops.cross_entropy.label_smoothing import label_smoothing_loss
from diffnet.ops.cross_entropy.op import cross_entropy

__all__ = [
    "cross_entropy",
    "dice_loss",
    "focal_loss",
    "generalized_dice_loss",
    "label_smoothing_loss",
]
