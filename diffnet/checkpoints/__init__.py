"""Files of networks: those of `DiffusionNet.save`, of `diffnet train`, and of the original implementation.

`DiffusionNet.load` and `DiffusionNet.from_original_checkpoint` are the public functions. No file runs code when it is
read.
"""
