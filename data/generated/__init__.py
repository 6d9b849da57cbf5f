"""The generated data sets: posed figures, pairs of them, and classes of bodies with four limbs."""

from diffnet.data.generated.classes import shapes
from diffnet.data.generated.dataset import figure, figures
from diffnet.data.generated.pairs import figure_pairs

__all__ = [
    "figure",
    "figure_pairs",
    "figures",
    "shapes",
]
