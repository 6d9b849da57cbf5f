from .harness.registry import (
    Benchmark as Benchmark,
    Case as Case,
    Options as Options,
    Unavailable as Unavailable,
    benchmark as benchmark,
)
from .registered import BENCHMARKS as BENCHMARKS
