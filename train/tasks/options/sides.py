"""Classes that a mirror image exchanges, such as left and right, as text. Options read it, so this loads fast."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from diffnet.geometry.errors import OptionError

NO_SIDES, FDI = "none", "fdi"  # no class has a side; the numbers of teeth by the World Dental Federation
_TOOTH = re.compile("[1-4][1-8]|[5-8][1-5]")
_WORD = re.compile("(?i:left|right)|[A-Z]?(?:(?!left|right)[a-z])+|[A-Z]+(?![a-z])|[^A-Za-z]+")
_OTHER = {"l": "r", "r": "l", "left": "right", "right": "left"}

Pairs: TypeAlias = list[tuple[str, str]]


def are_numbers(text: str) -> bool:
    """Whether a text has a number for each class, such as "0,2,1", as a run stores it."""
    return re.fullmatch(r"(-1|\d+)(,(-1|\d+))*", text, re.ASCII) is not None


def side_pairs(text: str) -> Pairs:
    """The pairs in a text such as "11=21,12=22". Raises OptionError for other text, and for a name that occurs twice.

    >>> side_pairs("left arm=right arm, 3=4")
    [('left arm', 'right arm'), ('3', '4')]
    """
    pairs = []
    for entry in text.split(","):
        name, _, other = (part.strip() for part in entry.partition("="))
        if not name or not other or "=" in other:
            raise OptionError(f"mirror_labels should be fdi, none or pairs such as 11=21,12=22, got {text!r}")
        pairs.append((name, other))
    names = [name for pair in pairs for name in pair]
    if len(set(names)) < len(names):
        raise OptionError(f"mirror_labels should name each class once, got {text!r}")
    return pairs


def tooth_on_other_side(name: str) -> str | None:
    """The FDI number of the tooth opposite. None if the name is no FDI number.

    >>> tooth_on_other_side("11"), tooth_on_other_side("85"), tooth_on_other_side("0")
    ('21', '75', None)
    """
    return f"{(int(name[0]) - 1 ^ 1) + 1}{name[1]}" if _TOOTH.fullmatch(name) else None


def are_teeth(names: Sequence[str]) -> bool:
    """Whether all numbers among the names are FDI numbers of teeth, or 0, and there are some.

    >>> are_teeth(["0", "11", "21"]), are_teeth(["10", "11", "21"])
    (True, False)
    """
    numbers = [name for name in names if name.isdecimal() and int(name) > 0]
    return bool(numbers) and all(map(tooth_on_other_side, numbers))


def found_sides(names: Sequence[str]) -> Pairs:
    """The pairs of names that are alike but for their side: left and right, l and r, or FDI numbers of teeth.

    >>> found_sides(["head", "armL", "armR", "Left leg", "Right leg", "light", "right"])
    [('armL', 'armR'), ('Left leg', 'Right leg')]
    """
    teeth, known = are_teeth(names), {name.lower(): name for name in names}
    found: Pairs = []
    for name in names:
        other = tooth_on_other_side(name) if teeth else None
        other = other or "".join(_OTHER.get(word.lower(), word.lower()) for word in _WORD.findall(name))
        partner = known.get(other, name)
        if partner != name and (partner, name) not in found:
            found.append((name, partner))
    return found
