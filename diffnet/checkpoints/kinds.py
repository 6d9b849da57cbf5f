"""The kinds of checkpoints of other programs, by the names of their weights."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

# "original": segmentation and classification of the original implementation.
# "original correspondence": its functional maps, whose weights have the prefix "feature_extractor.".
# "unsupervised correspondence": {"networks": {"feature_extractor": …}} of unsupervised functional maps
#     (Cao et al. 2023).
Kind: TypeAlias = Literal["original", "original correspondence", "unsupervised correspondence"]

PREFIX = "feature_extractor."


def kind_of(content: Any) -> Kind | None:
    """The kind of checkpoint that the content of a file is, or None for any other content."""
    if not isinstance(content, dict):
        return None
    if "first_lin.weight" in content:
        return "original"
    if f"{PREFIX}first_lin.weight" in content:
        return "original correspondence"
    networks = content.get("networks")
    extractor = networks.get("feature_extractor") if isinstance(networks, dict) else None
    if isinstance(extractor, dict) and "first_linear.weight" in extractor:
        return "unsupervised correspondence"
    return None
