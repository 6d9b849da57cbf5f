from .harness.registry import Benchmark, Case, Options, Unavailable, benchmark
from .registered import BENCHMARKS

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Options", "Unavailable", "benchmark"]
