"""`diffnet match`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.data.labeled import DataError
from diffnet.data.numbers import check_vertex_numbers, read_lines
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder, write_atomically
from diffnet.geometry.mesh.mesh import mesh_stem
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.many_files import Item, end, settings_of, work_through
from diffnet.train.commands.mesh_files import report_file
from diffnet.train.commands.options import (
    MESH_FILES,
    CheckpointOption,
    described_input,
    options_of_many_files,
    parameters,
    with_parameters,
)
from diffnet.train.commands.predicting import check_outputs, check_suffix
from diffnet.train.console import console
from diffnet.train.options import TrainOptions

if TYPE_CHECKING:
    from diffnet.train.inference.matching import Matched

COLUMNS = ("first", "second")  # of the report


@with_parameters(
    *parameters(TrainOptions, ["zoomout"]),
    *options_of_many_files(),
)
def match(
    checkpoint: CheckpointOption,
    out: Annotated[
        Path,
        typer.Option(
            help="File to write (.txt, .csv or .npy): for each vertex of B, the number of a vertex of A, from 0. A "
            "folder for --pairs, which gets .txt files."
        ),
    ],
    a: Annotated[Path | None, typer.Argument(metavar="A", help=f"A mesh: {MESH_FILES}.")] = None,
    b: Annotated[Path | None, typer.Argument(metavar="B", help="Another mesh, with any number of vertices.")] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of A and B: a text file with two meshes in each line, below its own folder. For each vertex "
            "of the first, FIRST_SECOND.txt in --out has a vertex of the second.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with B and A, where B has the colors and texture of A.")
    ] = None,
    fine_tune: Annotated[
        int, typer.Option(metavar="N", min=0, help="First train on these two meshes for N steps, without supervision.")
    ] = 0,
    **options: Any,
) -> None:
    """Match two meshes: find a vertex of A for each vertex of B.

    Of the pairs in a file, one that can't be matched does not stop the others. report.csv in the folder lists all pairs
    with reasons and times. With --cache, worker processes preprocess the next meshes meanwhile.
    """
    if pairs is not None:
        if a is not None or html is not None:
            raise OptionError("--pairs is without A, B and --html")
        _match_pairs(pairs, checkpoint, out, fine_tune, options)
        return
    if a is None or b is None:
        raise OptionError("give two meshes, A and B, or a file with --pairs")
    if options["resume"]:
        raise OptionError("--resume is for --pairs")
    with ExitAtCtrlC():
        from diffnet.train.console import progress_bar
        from diffnet.train.device import pick_device
        from diffnet.train.inference.matching import load_matching_network, match_meshes
        from diffnet.train.report.transfer import pair_page

    if out.is_dir():
        raise OptionError(f"--out should be a file, and {out} is a folder")
    check_suffix("--html", html, ".html")
    written = [path for path in (out, html) if path is not None]
    check_outputs(written, [a, b, checkpoint])
    check_suffix("--out", out, ".txt", ".csv", ".npy")
    for path in written:
        check_folder_path(path.parent)
    network = load_matching_network(checkpoint)
    described_input(checkpoint, network)
    with progress_bar(console, disable=fine_tune == 0) as bar:
        shown = bar.add_task("fine-tuning", total=fine_tune)
        matched = match_meshes(
            a,
            b,
            network,
            pick_device(options["device"]),
            zoomout=options["zoomout"],
            fine_tune=fine_tune,
            cache_dir=options["cache"],
            after_step=lambda: bar.advance(shown),
        )
    _write_map(out, matched)
    matches = matched.matches
    if html is not None:
        make_folder(html.parent)
        pair_page(matched.b, matched.a, matches, (mesh_stem(b), mesh_stem(a))).save(html)
    partners = len(set(matches.tolist()) - {-1})
    text = f"{(matches >= 0).sum()} vertices of {b.name} have partners among {partners} vertices of {a.name}"
    console.print(text, soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def _write_map(file: Path, matched: Matched) -> None:
    """Write a vertex in each line. A table (.csv) also has the name of its column."""
    from diffnet.train.tasks.task import npy_bytes

    for mesh in (matched.a, matched.b):
        check_vertex_numbers(mesh, file, "Save it as")
    make_folder(file.parent)
    suffix = file.suffix.lower()
    lines = ["vertex"] * (suffix == ".csv") + [str(vertex) for vertex in matched.matches.tolist()]
    write_atomically(file, npy_bytes(matched.matches) if suffix == ".npy" else "\n".join(lines) + "\n")


def _match_pairs(pairs: Path, checkpoint: Path, out: Path, fine_tune: int, options: Mapping[str, Any]) -> None:
    """Match the pairs in a file, each as in a set of pairs: the first mesh is B of `diffnet match`, the second is A."""
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.inference.matching import load_matching_network, match_meshes
        from diffnet.train.ranks import connected

    if out.suffix and not out.is_dir():
        raise OptionError(f"--out should be a folder for --pairs, got {out}")
    check_folder_path(out)
    with connected() as ranks:
        meshes, zoomout, cache = read_pairs(pairs), options["zoomout"], options["cache"]
        report = report_file(out, COLUMNS)
        items = [Item(pair, file) for pair, file in zip(meshes, pair_files(meshes, out), strict=True)]
        sources = dict.fromkeys(mesh for pair in meshes for mesh in pair)
        check_outputs([*(item.result for item in items), report], [*sources, checkpoint, pairs])
        network = load_matching_network(checkpoint)
        expected, device = described_input(checkpoint, network), pick_device(options["device"])

        def work(i: int) -> None:
            b, a = meshes[i]
            matched = match_meshes(a, b, network, device, zoomout=zoomout, fine_tune=fine_tune, cache_dir=cache)
            _write_map(items[i].result, matched)

        ahead = None
        if cache is not None and expected.normalize and ranks.is_alone:
            ahead = expected.options.preprocessing, cache, options["jobs"]
        failed = work_through(
            items,
            work,
            ranks,
            "matching",
            report=report,
            settings=settings_of(checkpoint, zoomout=zoomout, fine_tune=fine_tune),
            columns=COLUMNS,
            resume=options["resume"],
            ahead=ahead,
        )
    end([], report, failed, ranks)


def read_pairs(path: Path) -> list[tuple[Path, Path]]:
    """The pairs of paths in the lines of a file, each once. Raises DataError for other lines and an empty file."""
    pairs: dict[tuple[Path, Path], None] = {}
    for number, line in enumerate(read_lines(path), 1):
        names = line.replace(",", " ").split()
        if len(names) != 2:
            raise DataError(f"{path}, line {number}: expected two paths, got {line[:60]!r}")
        pairs[path.parent / names[0], path.parent / names[1]] = None
    return list(pairs)


def pair_files(pairs: Sequence[tuple[Path, Path]], out: Path) -> list[Path]:
    """The file of each pair: FIRST_SECOND.txt, or, if several pairs would have this name, PATH/PATH.txt.

    PATH is the whole path below the folder that all meshes have in common.
    """
    short = [f"{mesh_stem(first)}_{mesh_stem(second)}.txt" for first, second in pairs]
    count = Counter(short)
    absolute = [tuple(Path(os.path.abspath(mesh)) for mesh in pair) for pair in pairs]
    common = os.path.commonpath([mesh.parent for pair in absolute for mesh in pair])
    files = []
    for name, (first, second) in zip(short, absolute, strict=True):
        long = first.relative_to(common) / second.relative_to(common)
        files.append(out / (name if count[name] == 1 else long.with_name(f"{long.name}.txt")))
    return files
