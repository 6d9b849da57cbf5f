"""Speed and memory against peers: a registry of benchmarks, run by `diffnet bench`.

Importing this package imports `cases`, which registers every benchmark in `BENCHMARKS`.
"""

from diffnet.benchmarks import cases
from diffnet.benchmarks.harness.registry import BENCHMARKS, Benchmark, Case, Options, Unavailable, benchmark

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Options", "Unavailable", "benchmark", "cases"]
