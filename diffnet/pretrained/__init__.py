"""The built-in networks, NAME.safetensors in this folder, and what a user may name a network by.

The command line reads this, so it loads fast.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent
NETWORK_FILE = "model.safetensors"  # in a folder of `DiffusionNet.save_pretrained`


def built_in_names() -> list[str]:
    """The names of the built-in networks."""
    return sorted(file.stem for file in FOLDER.glob("*.safetensors"))


def network_path(name: str | os.PathLike[str]) -> Path:
    """The file of a network.

    name: a file, a folder of `DiffusionNet.save_pretrained` or of a run, whose last.pt counts, or the name of a
        built-in network. Files and folders win.

    Any other name, and a folder without a network, is returned as it is. Reading it gives the reason.
    """
    path = Path(name)
    if path.is_dir():
        return next((path / file for file in (NETWORK_FILE, "last.pt") if (path / file).is_file()), path)
    return FOLDER / f"{path}.safetensors" if str(path) in built_in_names() and not path.exists() else path


def names_text() -> str:
    """What a message about a missing network says of the built-in ones."""
    names = built_in_names()
    return f"; the built-in networks are {', '.join(names)}" if names else ""
