"""The generated data sets: posed figures, and classes of bodies with four limbs."""

from diffnet.data.generated.classes import shapes
from diffnet.data.generated.dataset import figure, figures

__all__ = [
    "figure",
    "figures",
    "shapes",
]
