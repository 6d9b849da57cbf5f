"""Labeled data sets on disk."""

from diffnet.data.folders.layouts import LAYOUTS, Layout, load_dataset

__all__ = [
    "LAYOUTS",
    "Layout",
    "load_dataset",
]
