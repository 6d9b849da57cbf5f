"""The options and commands that the programs of this folder share."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options --out and --seeds. Abbreviations are left to the command that gets the other options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser


def run_diffnet(*words: object) -> None:
    """Run a command of `diffnet`, in a process of its own. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "diffnet", *map(str, words)], check=True)


def results(run: Path) -> dict[str, Any]:
    """The content of the results.json in a folder."""
    content: dict[str, Any] = json.loads((run / "results.json").read_text("utf-8"))
    return content
