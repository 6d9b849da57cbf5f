"""Losses of classes: cross-entropy of each row of logits, with smoothed labels, focal loss and Dice losses."""
