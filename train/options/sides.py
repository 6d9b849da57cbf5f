"""Classes that a mirror image exchanges, such as left and right, as text. Options read it, so this loads fast."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from diffnet.geometry.errors import OptionError

NO_SIDES, FDI = "none", "fdi"  # no class has a side; the numbers of teeth by the World Dental Federation
_TOOTH = re.compile("[1-4][1-8]|[5-8][1-5]")
_SIDES = (  # in several languages
    "left right/l r/lh rh/lt rt/links rechts/linke rechte/linker rechter/gauche droite/gauche droit/izquierda derecha/"
    "izquierdo derecho/esquerda direita/esquerdo direito/sinistra destra/sinistro destro/sinistra dextra/sx dx/"
    "vänster höger/venstre højre/lewa prawa/lewy prawy/левая правая/левый правый/左 右"
)
_PAIRS = [pair.split() for pair in _SIDES.split("/")]
_WORD = re.compile(  # a word with other letters than A to Z, or the words of names such as LeftArm and armleft
    r"(?i:left|right)|[左右]|(?=[^\W\d_]*[^\W\d_a-zA-Z])(?:(?![左右])[^\W\d_])+"
    "|[A-Z]?(?:(?!left|right)[a-z])+|[A-Z]+(?![a-z])|[^A-Za-z]"
)

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

    Words for left and right are those of several languages. Names that differ by case alone have partners of their own.

    >>> found_sides(["head", "armL", "armR", "Left leg", "Right leg", "light", "right", "main gauche", "main droite"])
    [('armL', 'armR'), ('Left leg', 'Right leg'), ('main gauche', 'main droite')]
    """
    teeth, paired = are_teeth(names), set[str]()
    by_lower: dict[str, list[str]] = {}
    for name in names:
        by_lower.setdefault(name.lower(), []).append(name)
    pairs: Pairs = []
    for name in names:
        tooth = tooth_on_other_side(name) if teeth else None
        others = [tooth] if tooth else _names_on_other_side(name)
        alike = [each for other in others for each in by_lower.get(other.lower(), ()) if each not in {name, *paired}]
        if name not in paired and alike:
            partner = next((each for each in alike if each in others), alike[0])
            pairs.append((name, partner))
            paired.update((name, partner))
    return pairs


def _names_on_other_side(name: str) -> list[str]:
    """What the name with the other side may be called, with the same case. Empty for a name without a side."""
    names = [""]
    for word in _WORD.findall(name):
        others = [sides[sides[0] == word.lower()] for sides in _PAIRS if word.lower() in sides] or [word]
        case = str.title if word.istitle() and len(word) > 1 else str.upper if word.isupper() else str.lower
        names = [before + (word if other is word else case(other)) for before in names for other in others]
    return [other for other in names if other != name]
