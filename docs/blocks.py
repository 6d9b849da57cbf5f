"""A plugin of pytest that runs the code blocks of Markdown pages. CONTRIBUTING.md says how to mark a block.

The blocks of a page run in order, in one temporary folder and one Python session.
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.doctest import NUMBER, DocTestEvaluator, OutputChecker
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.doctest import DocTestStringParser
from sybil.region import Lexeme

ROOT = Path(__file__).resolve().parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | NUMBER
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|run with|run small): (?P<text>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\S*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHOWN = ("csv", "json", "text")  # languages of blocks that are no code
SECONDS = 240
PICTURES = bool(os.environ.get("PICTURES"))  # keep the pictures of blocks, and run those with "run small" as they stand


def parts(document: Document) -> Iterator[Region]:
    """The blocks that run. A block that is neither run nor marked is an error."""
    for block in BLOCK.finditer(document.text):
        language, mark, text = block["language"], block["mark"], block["text"]
        start, end = block.start("code"), block.end("code")
        if language in SHOWN or language.startswith("{") or mark == "not run":
            continue
        code = dedent(block["code"])
        for pair in text.split("; ") if mark and not (PICTURES and mark == "run small") else ():
            old, new = pair.split(" → ")
            if old not in code:
                raise ValueError(f"{document.path}: '{mark}: {pair}', but the block does not contain {old!r}")
            code = code.replace(old, new)
        if language == "python" and not code.startswith(">>> "):
            yield Region(start, end, Lexeme(code, offset=0, line_offset=-1), PythonEvaluator())
        elif language in ("python", "pycon"):
            evaluate = DocTestEvaluator(FLAGS)
            for example in DocTestStringParser(evaluate)(code, document.path):
                yield Region(start + example.start, start + example.end, example.parsed, evaluate)
        elif language == "sh":
            yield Region(start, end, code, run_commands)
        elif language == "console":
            yield Region(start, end, code, run_session)
        else:
            line = document.text.count("\n", 0, start)
            raise ValueError(f"{document.path}:{line}: blocks in {language or 'no language'!r} can't be run")


def output_of(commands: str) -> str:
    """Run commands in a shell. → what they write to both streams. Raises AssertionError if one fails."""
    environment = os.environ | {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, f"exit code {run.returncode} of\n{commands}\n{run.stdout}"
    return run.stdout


def run_commands(example: Example) -> None:
    output_of(example.parsed)


def run_session(example: Example) -> str | None:
    """Run each command after a $ and compare its output with the lines below it, if there are any."""
    for entry in re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)[1:]:
        command, _, expected = entry.partition("\n")
        found = output_of(command)
        if expected.strip() and not OutputChecker().check_output(expected, found, FLAGS):
            return f"$ {command}\nExpected:\n{expected}\nGot:\n{found}"
    return None


def enter(names: dict[str, Any]) -> None:
    """Start the session of a page."""
    names |= {"__name__": "__main__", "_home": os.getcwd(), "_folder": tempfile.mkdtemp(prefix="page-")}
    os.chdir(names["_folder"])
    torch.manual_seed(0)


def leave(names: dict[str, Any]) -> None:
    """End it. With PICTURES=1, keep the pictures that pages show."""
    os.chdir(names["_home"])
    folder = Path(names["_folder"])
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for picture in folder.glob("*.png"):
        if PICTURES and f"]({picture.name})" in pages:
            shutil.copy(picture, ROOT / "docs")
    shutil.rmtree(folder)


pytest_collect_file = Sybil([parts], path=str(ROOT), pattern="*.md", setup=enter, teardown=leave).pytest()
