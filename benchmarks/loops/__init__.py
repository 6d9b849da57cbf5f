"""Benchmarks of whole networks as people use them, in wall-clock time. This package imports all of them."""

from diffnet.benchmarks.loops import command, inference, pair_step, train_step, training_loop

__all__ = ["command", "inference", "pair_step", "train_step", "training_loop"]
