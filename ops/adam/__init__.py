"""The update of Adam and AdamW for all parameters at once, with the average of the weights."""
