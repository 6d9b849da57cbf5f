"""Learning on surfaces with DiffusionNet (Sharp et al. 2022, https://arxiv.org/abs/2012.00888)."""

from pathlib import Path as _Path

# In a wheel the rooms (ops, geometry, data, train) lie inside this folder. In a checkout they stand beside it, and
# then, and only then, the checkout's root joins the places where subpackages are looked for.
_here = _Path(__file__).resolve().parent
if not (_here / "ops" / "__init__.py").is_file() and (_here.parent / "ops" / "__init__.py").is_file():
    __path__.append(str(_here.parent))

from diffnet.block import DiffusionNetBlock  # noqa: E402  (imports need the path above)
from diffnet.block_sparse_attention import BlockSparseAttention  # noqa: E402
from diffnet.block_sparse_conv2d import BlockSparseConv2d  # noqa: E402
from diffnet.block_sparse_linear import BlockSparseLinear  # noqa: E402
from diffnet.diffusion import LearnedTimeDiffusion  # noqa: E402
from diffnet.geometry import (  # noqa: E402
    MeshError,
    Operators,
    collate,
    hks,
    load_mesh,
    normalize_positions,
    precompute,
    wks,
)
from diffnet.gradient_features import SpatialGradientFeatures  # noqa: E402
from diffnet.implicit_diffusion import ImplicitDiffusion  # noqa: E402
from diffnet.mesh_attention import MeshAttention  # noqa: E402
from diffnet.model import DiffusionNet  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConv2d",
    "BlockSparseLinear",
    "DiffusionNet",
    "DiffusionNetBlock",
    "ImplicitDiffusion",
    "LearnedTimeDiffusion",
    "MeshAttention",
    "MeshError",
    "Operators",
    "SpatialGradientFeatures",
    "collate",
    "hks",
    "load_mesh",
    "normalize_positions",
    "precompute",
    "wks",
]
