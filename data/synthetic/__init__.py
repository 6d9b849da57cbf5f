"""The generated data sets: posed figures, pairs of them, and classes of bodies with four limbs."""

from diffnet.data.synthetic.classes import shapes
from diffnet.data.synthetic.dataset import curved_figure, figure, figures
from diffnet.data.synthetic.pairs import figure_pairs

__all__ = [
    "curved_figure",
    "figure",
    "figure_pairs",
    "figures",
    "shapes",
]
