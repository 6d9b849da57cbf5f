"""The documentation site. Its pages are Markdown files of the repository, so the source folder is the root."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import diffnet

ROOT = Path(__file__).parent.parent
ROOMS = ("geometry", "data", "data.pyg", "ops", "train", "viz")
PACKAGES = ("diffnet", *(f"diffnet.{room}" for room in ROOMS))

project = "diffnet"
version = release = diffnet.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "examples/README.md"]
html_theme = "furo"
html_title = f"diffnet {version}"
html_show_copyright = False
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

myst_heading_anchors = 3
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # for a cell
nb_merge_streams = True

default_role = "py:obj"
suppress_warnings = ["ref.python"]  # a method in a docstring that several classes have
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True


def owners() -> dict[str, str]:
    """The package under which the reference lists each public name: the shortest of those that have it."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            found.setdefault(name, package)
    return {name: package for name, package in found.items() if not inspect.ismodule(getattr(diffnet, name, None))}


OWNERS = owners()


def add_sources(app: Sphinx, page: str, text: list[str]) -> None:
    """Add the tree of pages to the front page, and the public names of a package to its page of the reference."""
    if page == root_doc:
        text[0] += trees(text[0])
    if page == "docs/reference/names":
        text[0] += names()
    elif page.startswith("docs/reference/"):
        text[0] += entries(page.rpartition("/")[2])


def trees(front: str) -> str:
    """A tree for each bold word that begins an entry of the front page's list of pages, with the links after it."""
    found = re.findall(r"^- \*\*(.+?)\.?\*\*(.*(?:\n  .*)*)", front, re.MULTILINE)
    parts = []
    for caption, links in found:
        pages = [link.removesuffix(".md") for link in re.findall(r"\]\(([\w./]+\.(?:md|ipynb))\)", links)]
        parts += ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
    return "\n".join(["", "", *parts])


def names() -> str:
    """A list of all public names, each with the first sentence of its docstring."""
    rows = ["", "", "```{eval-rst}"]
    for name, package in sorted(OWNERS.items(), key=lambda each: each[0].lower()):
        value = getattr(importlib.import_module(package), name)
        text = inspect.getdoc(value) or ""
        lines = text.split("\n\n")[0].split("\n") if text != inspect.getdoc(type(value)) else []  # of a plain value
        as_rst(None, "", name, value, None, lines)
        sentence = re.split(r"(?<!al[.])(?<=[.]) (?=[A-Z])", " ".join(lines))[0]
        rows.append(f"- :py:obj:`{package}.{name}` {sentence}")
    return "\n".join([*rows, "```", ""])


def entries(package: str) -> str:
    """Directives of autodoc for the names that a package owns: classes, functions, then all others."""
    module = importlib.import_module(package)
    groups: dict[str, list[str]] = {"class": [], "function": [], "data": []}
    for name in sorted((n for n in module.__all__ if OWNERS.get(n) == package), key=str.lower):
        value = getattr(module, name)
        groups["class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"].append(name)
    parts = []
    for kind, title in (("class", "Classes"), ("function", "Functions"), ("data", "Types and constants")):
        parts += [f"## {title}", "", "```{eval-rst}"] if groups[kind] else []
        for name in groups[kind]:
            parts += [f".. auto{kind}:: {package}.{name}", *(["   :members:"] if kind == "class" else []), ""]
        parts += ["```", ""] if groups[kind] else []
    return "\n".join(["", "", *parts])


PARAMETER = re.compile(r"((?:[a-z_]\w*|\*\w+)(?:, (?:[a-z_]\w*|\*\w+))*): (?=\S)")
CHOICE = re.compile(r'( *)(?="[^"]+"[^:]*: )')


def as_rst(app: Sphinx | None, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText.

    Entries `name: text` become fields, indented entries `"choice": text` a list, and plain characters are escaped.
    """
    if what == "data" and inspect.getdoc(value) == inspect.getdoc(type(value)):
        lines.clear()
    shown: list[str] = []
    example = False
    choices: int | None = None  # the indentation of a list
    for line in lines:
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>> "))
        if example:
            shown.append(line)
            continue
        if match := PARAMETER.match(line):
            if shown and shown[-1].strip() and not shown[-1].startswith((":", " ")):
                shown.append("")
            line = f":param {match[1]}: {line[match.end() :]}"
        if choice := CHOICE.match(line):
            shown += [] if choices is not None else [""]
            choices = len(choice[1])
            line = f"{choice[1]}- {line[choices:]}"
        elif choices is not None and line.startswith(" " * (choices + 4)):
            line = line[2:]
        elif choices is not None:
            shown.append("")
            choices = None
        parts = re.split(r"(`[^`]+`)", line)
        parts[::2] = [re.sub(r"([*|\\])", r"\\\1", re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", part)) for part in parts[::2]]
        shown.append(re.sub(r"^(:param [^:]+: \w)\.", r"\1\\.", "".join(parts)))  # "H." would begin a list
    lines[:] = shown


def skip_alias(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """The class says what the fields of a named tuple mean."""
    return True if (inspect.getdoc(value) or "").startswith("Alias for field number") else None


def folders_as_text(app: Sphinx, page: nodes.document) -> None:
    """The site has no pages of folders, so links to folders of the repository become their text."""
    for link in list(page.findall(pending_xref)):
        if link["reftype"] == "myst" and (ROOT / app.env.docname).parent.joinpath(link["reftarget"]).is_dir():
            link.replace_self(link.children)


def public_target(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element) -> nodes.Element | None:
    """Link a class or function, which signatures name by its module, to the entry of its public name."""
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in OWNERS or not target.startswith(("diffnet.", name)):
        return None
    page = app.builder.get_relative_uri(env.docname, f"docs/reference/{OWNERS[name]}")
    return nodes.reference("", "", shown, internal=True, refuri=f"{page}#{OWNERS[name]}.{name}")


def write_index(app: Sphinx, error: Exception | None) -> None:
    """The front page is also index.html, which web servers and browsers look for."""
    if not error and app.builder.name == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_sources)
    app.connect("autodoc-process-docstring", as_rst, priority=600)  # after napoleon
    app.connect("autodoc-skip-member", skip_alias)
    app.connect("doctree-read", folders_as_text)
    app.connect("missing-reference", public_target)
    app.connect("build-finished", write_index)
