"""The registry with all benchmarks in it. A module registers its benchmarks when it is imported."""

from importlib import import_module

from diffnet.benchmarks.catalog import modules
from diffnet.benchmarks.harness.registry import BENCHMARKS

__all__ = ["BENCHMARKS"]

for module in modules():
    import_module(module)
