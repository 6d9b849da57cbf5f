"""The benchmarks. A module registers its benchmarks when it is imported, so this package imports all of them."""

from diffnet.benchmarks.cases import (
    block_sparse,
    functional_maps,
    gradient_features,
    loss_head,
    mlp,
    operators,
    preprocessing,
    sparse,
    spectral,
)

__all__ = [
    "block_sparse",
    "functional_maps",
    "gradient_features",
    "loss_head",
    "mlp",
    "operators",
    "preprocessing",
    "sparse",
    "spectral",
]
