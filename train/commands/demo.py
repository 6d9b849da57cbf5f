"""`diffnet demo`. The network beside this file was trained by the command in its metadata, and then written by

DiffusionNet.load("run/last.pt").save("figures.safetensors", training_command=…, test_accuracy=…, license="MIT")
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import check_folder_path, make_folder, write_atomically
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.view import open_page
from diffnet.train.console import console

WEIGHTS = Path(__file__).with_name("figures.safetensors")
SEED = 1000  # of a figure that is in no data set
FRONT = (160, 10)  # azimuth and elevation in degrees


def demo(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("diffnet-demo")) -> None:
    """Predict the parts of a generated figure with a trained network that is part of diffnet.

    Writes figure.html (a page, which opens in the browser), figure.png, figure.ply (the mesh with its labels) and
    network.safetensors (the network, for --checkpoint of other commands).
    """
    html, png, ply = (out / f"figure.{suffix}" for suffix in ("html", "png", "ply"))
    network_file = out / "network.safetensors"
    check_folder_path(out)
    if out.is_dir() and any(out.iterdir()) and not network_file.exists():
        raise OptionError(f"{out}: this folder holds other files; choose another one with --out")
    with ExitAtCtrlC():
        import numpy as np

        from diffnet import DiffusionNet
        from diffnet.data import figure
        from diffnet.train.inference.predict import predict_labels
        from diffnet.train.tasks.task import write_views
        from diffnet.viz import write_ply

    network, truth = DiffusionNet.load(WEIGHTS), figure(SEED)
    names = network.metadata["label_names"]
    ((mesh, labels),) = predict_labels([truth.mesh], network, "cpu")
    right = float(np.mean(labels == truth.labels))
    make_folder(out)
    write_atomically(network_file, WEIGHTS.read_bytes())  # first, because it marks the folder as one of the demo
    fields = [{"prediction": labels, "truth": truth.labels}]
    write_views([mesh], html, png, "Parts of a figure", fields, kind="labels", label_names=names, view=FRONT)
    write_ply(ply, mesh, labels=labels, label_names=names)
    console.print(
        f"A figure that the network has not seen: {100 * right:.1f} % of its {len(labels):,} vertices get the right "
        f"part ({100 * network.metadata['test_accuracy']:.1f} % on the generated test figures).\n"
        f"  page: {html}\n  picture: {png}\n"
        "Next:\n"
        f"  diffnet view {quote(str(ply))} --checkpoint {quote(str(network_file))}   # or a mesh of yours, without "
        "--checkpoint\n"
        "  diffnet train segmentation --data FOLDER --out run   # a folder of meshes and labels; see --help",
        soft_wrap=True,
    )
    open_page(html)
