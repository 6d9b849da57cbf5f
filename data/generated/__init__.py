"""The generated data sets: posed figures, and classes of bodies with four limbs."""

from diffnet.data.generated.classes import shapes
from diffnet.data.generated.dataset import curved_figure, figure, figures

__all__ = [
    "curved_figure",
    "figure",
    "figures",
    "shapes",
]
