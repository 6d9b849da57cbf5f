"""`diffnet match`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from diffnet.geometry.errors import OptionError
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.console import console
from diffnet.train.commands.options import MESH_FILES, DeviceOption, ZoomOutOption


def match(
    a: Annotated[Path, typer.Argument(metavar="A", help=f"A mesh: {MESH_FILES}.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another mesh, with any number of vertices.")],
    checkpoint: Annotated[
        Path,
        typer.Option(
            help="best.pt or last.pt of `diffnet train correspondence`, or a published checkpoint of correspondence."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Text file to write: for each vertex of B, the number of a vertex of A, from 0.")
    ],
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with B and A, where B has the colors and texture of A.")
    ] = None,
    zoomout: ZoomOutOption = False,
    fine_tune: Annotated[
        int, typer.Option(metavar="N", min=0, help="First train on these two meshes for N steps, without supervision.")
    ] = 0,
    device: DeviceOption = "auto",
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder that keeps preprocessed meshes. By default, none is kept.")
    ] = None,
) -> None:
    """Match two meshes: find a vertex of A for each vertex of B."""
    with ExitAtCtrlC():
        from diffnet.geometry.files import check_folder_path, make_folder, write_atomically
        from diffnet.geometry.mesh.mesh import mesh_stem
        from diffnet.train.commands.predicting import check_outputs, check_suffix, described_input
        from diffnet.train.device import pick_device
        from diffnet.train.inference.matching import load_matching_network, match_meshes
        from diffnet.train.report.transfer import pair_page
        from diffnet.train.run import progress_bar

    if out.is_dir():
        raise OptionError(f"--out should be a text file, and {out} is a folder")
    check_suffix("--html", html, ".html")
    written = [path for path in (out, html) if path is not None]
    check_outputs(written, [a, b, checkpoint])
    for path in written:
        check_folder_path(path.parent)
    network = load_matching_network(checkpoint)
    described_input(checkpoint, network)
    with progress_bar(console) if fine_tune > 0 else nullcontext() as bar:
        shown = None if bar is None else bar.add_task("fine-tuning", total=fine_tune)
        found = match_meshes(
            a,
            b,
            network,
            pick_device(device),
            zoomout=zoomout,
            fine_tune=fine_tune,
            cache_dir=cache,
            after_step=lambda: None if bar is None or shown is None else bar.advance(shown),
        )
    for path in written:
        make_folder(path.parent)
    write_atomically(out, "".join(f"{vertex}\n" for vertex in found.matches.tolist()))
    if html is not None:
        pair_page(found.b, found.a, found.matches, (mesh_stem(b), mesh_stem(a))).save(html)
    used = len(set(found.matches.tolist()))
    matched = f"{len(found.matches)} vertices of {b.name} have partners among {used} vertices of {a.name}"
    console.print(matched, soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
