"""Weights of classes as text. The options of a run read them, so this loads fast."""

from __future__ import annotations

import math

from diffnet.geometry.errors import OptionError

BALANCED, SQRT = BY_FREQUENCY = "balanced", "sqrt"  # inverse to the frequencies of the classes, or to their roots


def class_weight_entries(text: str) -> list[tuple[str | None, float]]:
    """The weights in a text such as "1,0.5,2" or "arm=2,leg=0.5", with the class of each, or None.

    Raises OptionError for a text that is neither, for a weight that is negative or not finite, for a class that occurs
    twice, and if all weights are 0.

    >>> class_weight_entries("arm=2,leg=0.5")
    [('arm', 2.0), ('leg', 0.5)]
    """
    expected = f"class_weights should be {BALANCED}, {SQRT}, a list such as 1,0.5,2, or a list such as arm=2,leg=0.5"
    found: list[tuple[str | None, float]] = []
    for entry in text.split(","):
        name, equals, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError as e:
            raise OptionError(f"{expected}; got {entry!r}") from e
        if not (0 <= weight < math.inf):
            raise OptionError(f"class_weights should be finite and at least 0, got {entry!r}")
        found.append((name.strip() if equals else None, weight))
    names = [name for name, _ in found]
    if None in names and any(name is not None for name in names):
        raise OptionError(f"{expected}; got {text!r}")
    if None not in names and len(set(names)) < len(names):
        raise OptionError(f"class_weights should name each class once, got {text!r}")
    if not any(weight for _, weight in found) and None in names:
        raise OptionError(f"class_weights should have a weight above 0, got {text!r}")
    return found
