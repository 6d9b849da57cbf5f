"""`diffnet demo`: the built-in networks on two of the built-in bodies each."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.view import open_page
from diffnet.train.console import console

PARTS, MAPS = "body-parts", "body-maps"
BODY = 2  # the number of the labeled body, which faces the viewer


def demo(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("diffnet-demo")) -> None:
    """Label the parts of a body, and map one body to another, with trained networks that are part of diffnet.

    Writes parts.html (a page, which opens in the browser), parts.png and parts.ply (the mesh with its labels),
    map.html, map.png, a.ply and b.ply (the two bodies). The networks are body-parts and body-maps. Other commands take
    these names as --checkpoint and --from.
    """
    check_folder_path(out)
    if out.is_dir() and any(out.iterdir()) and not (out / "parts.html").exists():
        raise OptionError(f"{out}: this folder holds other files; choose another one with --out")
    with ExitAtCtrlC():
        import diffnet.data
        import diffnet.train
        import diffnet.viz  # noqa: F401, what both functions use

    make_folder(out)
    for result in (label_a_body(out), map_bodies(out)):
        console.print(result, soft_wrap=True)
    scan, a, b = (quote(str(out / name)) for name in ("parts.ply", "a.ply", "b.ply"))
    console.print(
        "Next, or with meshes of yours:\n"
        f"  diffnet predict {scan} --checkpoint {PARTS} --out labels.txt\n"
        f"  diffnet match {a} {b} --checkpoint {MAPS} --out map.txt\n"
        "  diffnet train segmentation --data FOLDER --out run   # a folder of meshes and labels; see --help",
        soft_wrap=True,
    )
    open_page(out / "parts.html")


def label_a_body(out: Path) -> str:
    """Write the parts of a test body, as the network predicts them. Returns what to print."""
    from diffnet import DiffusionNet, viz
    from diffnet.data import BODIES, load_dataset
    from diffnet.train import predict_labels
    from diffnet.train.tasks.task import write_views

    body, network = load_dataset(BODIES, needs_train=False).test[BODY], DiffusionNet.from_pretrained(PARTS)
    names = network.metadata["label_names"]
    ((mesh, labels),) = predict_labels([body.mesh], network, "cpu")
    html, png = out / "parts.html", out / "parts.png"
    fields = [{"prediction": labels, "truth": body.labels}]
    write_views([mesh], html, png, "Parts of a body", fields, kind="labels", at="faces", label_names=names)
    viz.write_ply(out / "parts.ply", mesh, labels=labels, label_names=names, at="faces")
    return (
        f"A body that the network has not seen: {100 * (labels == body.labels).mean():.1f} % of its {len(labels):,} "
        "faces get the right part.\n"
        f"  page: {html}\n  picture: {png}"
    )


def map_bodies(out: Path) -> str:
    """Write a map between two test bodies, where the second one gets the colors of the first. Returns what to print."""
    from diffnet import DiffusionNet, viz
    from diffnet.data import BODY_MAPS, load_pairs
    from diffnet.train import match_meshes
    from diffnet.train.report.transfer import pair_colors

    a, b = load_pairs(BODY_MAPS, needs_train=False).test[:2]
    matches = match_meshes(a.mesh, b.mesh, DiffusionNet.from_pretrained(MAPS)).matches
    meshes, titles = [b.mesh, a.mesh], ("its colors on another one", "a body")
    html, png, colors = out / "map.html", out / "map.png", pair_colors(b.mesh, a.mesh, matches)
    viz.page(meshes, colors=colors, titles=titles, heading=" to ".join(titles)).save(html)
    shown = [each["position"] for each in reversed(colors)]
    viz.picture(meshes[::-1], colors=shown, titles=titles[::-1]).save(png)
    for name, shape in (("a", a), ("b", b)):
        viz.write_ply(out / f"{name}.ply", shape.mesh)
    return f"A map between two other bodies, by colors:\n  page: {html}\n  picture: {png}"
