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
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
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
    rooms = {name for name in found if inspect.ismodule(getattr(importlib.import_module(found[name]), name))}
    return {name: package for name, package in found.items() if name not in rooms}


OWNERS = owners()


def add_sources(app: Sphinx, page: str, text: list[str]) -> None:
    """Add the tree of pages to the front page, and the public names of a package to its page of the reference."""
    if page == root_doc:
        text[0] += trees(text[0])
    if page == "docs/reference/names":
        text[0] += names()
    elif page.startswith("docs/reference/"):
        package = page.rpartition("/")[2]
        text[0] = linked(text[0], package) + entries(package, subjects(text[0], package))
    elif page == "examples/README":
        text[0] += gallery(text[0])


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


ROW = re.compile(r"^\| ([^|`]+) \| (`[^|]+`) \|$", re.MULTILINE)  # of a table of names by subject


def subjects(page: str, package: str) -> dict[str, list[str]]:
    """The names that a package owns, by the rows of the table of its page, else by their kinds.

    Raises ValueError for a table that lacks a name or has another one.
    """
    owned = sorted((name for name, owner in OWNERS.items() if owner == package), key=str.lower)
    if not (rows := ROW.findall(page)):
        titles = {"class": "Classes", "function": "Functions", "data": "Types and constants"}
        groups = {title: [n for n in owned if kind_of(package, n) == kind] for kind, title in titles.items()}
        return {title: names for title, names in groups.items() if names}
    table = {title: re.findall(r"`(\w+)`", names) for title, names in rows}
    if differ := set(owned).symmetric_difference(listed := [name for names in table.values() for name in names]):
        raise ValueError(f"docs/reference/{package}.md should list the names of {package}: {sorted(differ)}")
    if len(listed) != len(owned):
        raise ValueError(f"docs/reference/{package}.md lists a name twice")
    return table


def kind_of(package: str, name: str) -> str:
    """The kind of the directive of autodoc."""
    value = getattr(importlib.import_module(package), name)
    return "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"


def linked(page: str, package: str) -> str:
    """The page with a link for each name in its table."""
    return ROW.sub(lambda row: re.sub(r"`(\w+)`", rf"{{py:obj}}`\1 <{package}.\1>`", row[0]), page)


def entries(package: str, groups: dict[str, list[str]]) -> str:
    """Directives of autodoc for names, by subject."""
    parts = []
    for title, names in groups.items():
        parts += [f"## {title}", "", "```{eval-rst}"]
        for name in names:
            kind = kind_of(package, name)
            parts += [f".. auto{kind}:: {package}.{name}", *(["   :members:"] if kind == "class" else []), ""]
        parts += ["```", ""]
    return "\n".join(["", "", *parts])


# Pictures of the pages that show what a program does.
PICTURES = {
    "functional_maps": "body_map.png",
    "human_segmentation": "body_parts.png",
    "classification": "shapes.png",
    "viewing": "viewing_scalars.png",
}


def gallery(page: str) -> str:
    """The code of the examples in the order of the page, some with a picture."""
    parts = ["", "", "## The programs", ""]
    for name in re.findall(r"^\| \[`(\w+)\.py`\]", page, re.MULTILINE):
        parts += [f"### {name}", ""]
        parts += [f"![What {name} is about](../docs/{PICTURES[name]})", ""] if name in PICTURES else []
        parts += [f"```{{literalinclude}} {name}.py", ":language: python", "```", ""]
    return "\n".join(parts)


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
        shown.append(re.sub(r"^((?::param [^:]+:)? +\w)\.", r"\1\\.", "".join(parts)))  # "H." would begin a list
    lines[:] = shown


def plain_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A signature in words of its source: an array is an NDArray, and a default that a function makes is `…`."""
    if signature:
        signature = re.sub(r"~?numpy\.ndarray\[tuple\[[^]]*\], ~?numpy\.dtype\[([^]]*)\]\]", r"NDArray[\1]", signature)
        signature = re.sub(r"~(?:\w+\.)+(?=\w)", "", signature.replace("<factory>", "..."))
    return signature, returns


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
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-skip-member", skip_alias)
    app.connect("doctree-read", folders_as_text)
    app.connect("missing-reference", public_target)
    app.connect("build-finished", write_index)
