"""Speed and memory against peers: one registry, one command (`diffnet bench`)."""

# A benchmark registers itself where it is defined, so its module must be listed here.
from diffnet.benchmarks import preprocessing as _preprocessing
from diffnet.benchmarks import spectral as _spectral
from diffnet.benchmarks.registry import BENCHMARKS, Benchmark, Case, Options, Unavailable, benchmark

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Options", "Unavailable", "benchmark"]

del _preprocessing, _spectral
