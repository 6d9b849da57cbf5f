"""The generated data set of posed figures."""

from diffnet.data.generated.dataset import figure, figures

__all__ = [
    "figure",
    "figures",
]
