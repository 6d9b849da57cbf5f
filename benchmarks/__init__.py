"""Speed and memory against peers: one registry, one command (`diffnet bench`)."""

# A benchmark registers itself where it is defined, so its module must be listed here.
from diffnet.benchmarks import block_sparse as _block_sparse
from diffnet.benchmarks import gradient_features as _gradient_features
from diffnet.benchmarks import inference as _inference
from diffnet.benchmarks import loss_head as _loss_head
from diffnet.benchmarks import mlp as _mlp
from diffnet.benchmarks import preprocessing as _preprocessing
from diffnet.benchmarks import sparse as _sparse
from diffnet.benchmarks import spectral as _spectral
from diffnet.benchmarks import train_step as _train_step
from diffnet.benchmarks import tuning as _tuning
from diffnet.benchmarks.registry import BENCHMARKS, Benchmark, Case, Options, Unavailable, benchmark

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
