"""Benchmarks of whole networks as people use them, in wall-clock time."""
