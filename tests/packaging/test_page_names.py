"""Options, files and names that the pages mention exist. `make docs` runs their code blocks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rooms import ROOT

from diffnet.benchmarks.__main__ import app as bench
from diffnet.train.cli import app

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
OTHERS = {  # options of other programs, which the pages mention
    "--fresh-seeds", "--seed", "--index-url", "--tool", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr",
    "--master-port", "--standalone", "--fix", "--rdzv-backend", "--map-root-user", "--net",
}  # fmt: skip


FILES = {("train", "txt"), ("data", "py"), ("data", "pyg")}  # the last is a module, imported by name


# Pages whose blocks may be wider: the walkthroughs have the lines of the code, and the others still have wide lines.
WIDE = {"CONTRIBUTING.md", "correspondence.md", "regression.md"}
WIDEST = 84  # characters of a line of a code block that the site shows whole


def options(command: Any) -> Iterator[str]:
    """The options of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)


def code(page: Path) -> list[str]:
    """The inline code of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in WIDE], ids=lambda page: page.name)
def test_code_is_narrow(page: Path) -> None:
    text = re.sub("<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    blocks = re.findall(r"^( *)```(?:python|sh)\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix(indent) for indent, block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    """Also in commands of blocks that are not run."""
    found = {option for text in code(page) for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        joined = block.replace("\\\n", " ").splitlines()
        lines = [line.partition("#")[0] for line in joined if "diffnet " in line.partition("#")[0]]
        found |= {option for text in lines for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    known = {"--help", *OTHERS, *(option for c in (app, bench) for option in options(typer.main.get_command(c)))}
    for program in (ROOT / "benchmarks").rglob("*.py"):
        known.update(re.findall(r'"(--[a-z-]+)"', program.read_text()))
    assert found - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    """All but those that a walkthrough adds."""
    rooms = "benchmarks|data|diffnet|docs|examples|geometry|ops|tests|train|viz"
    added = set(re.findall(r"ops/scale_rows/\w+\.py|[\w/]+/(?:test_)?scale_rows\.py", page.read_text()))
    named = {text for text in code(page) if re.fullmatch(rf"(?:{rooms})/[\w/]+(?:\.pyi?|\.md)", text)}
    assert {text for text in named if not (ROOT / text).exists() and "NAME" not in text} == added


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "from_diffusion_net"], ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    """The other page has names of the original, which are `geometry.…`, too."""
    named = {
        match.groups()
        for text in code(page)
        if (match := re.match(r"(?:diffnet\.)?(geometry|data|ops|train|viz)\.([a-zA-Z_]\w*)(?=[(.]|$)", text))
    }
    rooms = {room: importlib.import_module(f"diffnet.{room}") for room, _ in named}
    assert {name for name in named if not hasattr(rooms[name[0]], name[1])} - FILES == set()
