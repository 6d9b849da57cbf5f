"""Speed and memory against peers: one registry, one command (`diffnet bench`)."""

# A benchmark registers itself where it is defined, so its module must be listed here.
from diffnet.benchmarks.cases import block_sparse as _block_sparse
from diffnet.benchmarks.cases import gradient_features as _gradient_features
from diffnet.benchmarks.cases import inference as _inference
from diffnet.benchmarks.cases import loss_head as _loss_head
from diffnet.benchmarks.cases import mlp as _mlp
from diffnet.benchmarks.cases import preprocessing as _preprocessing
from diffnet.benchmarks.cases import sparse as _sparse
from diffnet.benchmarks.cases import spectral as _spectral
from diffnet.benchmarks.cases import train_step as _train_step
from diffnet.benchmarks.cases import tuning as _tuning
from diffnet.benchmarks.harness.registry import BENCHMARKS, Benchmark, Case, Options, Unavailable, benchmark

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Options", "Unavailable", "benchmark"]

del (
    _block_sparse,
    _gradient_features,
    _inference,
    _loss_head,
    _mlp,
    _preprocessing,
    _sparse,
    _spectral,
    _train_step,
    _tuning,
)
