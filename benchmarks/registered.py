"""The registry with all benchmarks in it. Importing the modules of `cases` and `loops` registers them."""

from diffnet.benchmarks import cases, loops
from diffnet.benchmarks.harness.registry import BENCHMARKS

__all__ = ["BENCHMARKS", "cases", "loops"]
