"""Numbers with nouns, for messages. The command line reads this, so it loads fast."""


def counted(count: int, one: str, several: str) -> str:
    """A number with its noun in the singular or the plural.

    >>> counted(1, "mesh", "meshes"), counted(2, "mesh", "meshes")
    ('1 mesh', '2 meshes')
    """
    return f"{count} {one if count == 1 else several}"
