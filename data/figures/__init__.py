"""The generated data set of posed figures."""

from diffnet.data.figures.dataset import figure, figures

__all__ = [
    "figure",
    "figures",
]
