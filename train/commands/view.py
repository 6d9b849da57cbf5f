"""`diffnet view`."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import make_folder
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.options import MESH_FILES, ConditionOption, checkpoint_option, described_input
from diffnet.train.commands.predicting import check_suffix
from diffnet.train.console import console

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from diffnet.geometry import Mesh
    from diffnet.geometry.mesh.attributes import MeshArray
    from diffnet.train.tasks.task import Fields, NetworkInput

EIGENPAIRS = 128  # those of `diffnet train`, so the HKS is the one that networks get
SHOWN_EIGENFUNCTIONS = 8
SHOWN_GRADIENTS = 3  # those of the first eigenfunctions
SHOWN_TIMES = (0.01, 0.1, 1.0)  # of the HKS, those of `hks_times(3)`


def view(
    mesh: Annotated[Path, typer.Argument(metavar="MESH", help=f"A file: {MESH_FILES}.")],
    checkpoint: Annotated[
        Path | None, checkpoint_option("A network whose predictions are shown, too: any that diffnet predict takes.")
    ] = None,
    condition: ConditionOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page to write. Default: a temporary file.")
    ] = None,
) -> None:
    """Show a mesh with the arrays in its file, eigenfunctions, heat kernel signature (HKS), gradients and predictions.

    Opens a page in the browser, one file that works offline. The values are those of the mesh at radius 1.
    """
    check_suffix("--out", out, ".html")
    if condition and checkpoint is None:
        raise OptionError("--condition is for the network of --checkpoint")
    with ExitAtCtrlC():
        from diffnet.geometry import load_mesh
        from diffnet.geometry.mesh.mesh import mesh_stem
        from diffnet.viz import page

    loaded = load_mesh(mesh)
    predicted, network = ([], None) if checkpoint is None else _prediction(loaded, mesh, checkpoint, condition or [])
    computed, vectors = _values(loaded)
    taken = {title for field in predicted for title in field.values}
    network = network if any(field.kind == "labels" for field in predicted) else None
    stored, arrows, classes = _arrays(loaded, mesh, taken, network)
    fields, name = [*predicted, *stored, *computed], mesh_stem(loaded.name)
    values: dict[str, Any] = {"labels": {}, "scalars": {}, "colors": {}}
    for field in fields:
        values[field.kind] |= field.values
    shown = page(
        loaded,
        **values,
        vectors=arrows | vectors,
        at={title: field.at for field in fields for title in field.values},
        color_map=dict.fromkeys(computed[0].values, "coolwarm"),
        label_names={} if network is None else dict.fromkeys(taken | classes, network.label_names),
        heading=name,
    )
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="diffnet-")) / f"{name}.html"
    make_folder(out.parent)
    shown.save(out)
    console.print(f"wrote {out}", soft_wrap=True)
    open_page(out)


def _arrays(
    mesh: Mesh, path: Path, predicted: set[str], network: NetworkInput | None
) -> tuple[list[Fields], dict[str, NDArray[Any]], set[str]]:
    """The arrays in the file of a mesh and labels beside it.

    predicted: titles that are taken. An array of this name is NAME_input.
    network: one that predicts classes, or None

    Returns the arrays, the vectors at vertices by the names of their lengths, and the titles of the labels that are
    classes of the network. Other labels are no truth.
    """
    import numpy as np

    from diffnet.data.folders.labels import labels_beside
    from diffnet.data.folders.sources import PROPERTIES
    from diffnet.geometry.mesh.attributes import mesh_arrays
    from diffnet.train.tasks.task import Fields

    fields: list[Fields] = []
    vectors: dict[str, NDArray[Any]] = {}
    classes, names_before = set[str](), set[str]()
    beside = labels_beside(mesh)
    class_names = {"truth", *PROPERTIES, *(array.name for array in beside)}
    for array in (*mesh_arrays(path), *beside):
        name = f"{array.name} at the {array.at}" if array.name in names_before else array.name
        names_before.add(array.name)
        places = None if network is None else _places_of_classes(array, class_names, network.label_numbers)
        values = array.values if places is None else places
        is_no_truth = network is not None and places is None and name == "truth"
        name = f"{name}_input" if name in predicted or is_no_truth else name
        if places is not None:
            classes.add(name)
        if array.at == "faces" and len(values) == mesh.polygon_count:
            values = values[mesh.polygons]
        if array.kind == "vectors" and array.at == "vertices":
            vectors[name] = values
        if array.kind in ("labels", "colors"):
            fields.append(Fields(array.kind, array.at, {name: values}))
            continue
        columns = [np.linalg.norm(values, axis=1)] if array.kind == "vectors" else list(values.T)
        names = [name] if len(columns) == 1 else [f"{name} {i}" for i in range(len(columns))]
        fields.append(Fields("scalars", array.at, dict(zip(names, columns, strict=True))))
    return fields, vectors, classes


def _places_of_classes(array: MeshArray, names: set[str], numbers: Sequence[int]) -> NDArray[Any] | None:
    """The places (N,) of labels among the numbers of classes, −1 for negative labels.

    names: of arrays that may be classes

    None for other arrays, and for labels that are no classes.
    """
    import numpy as np

    if array.kind != "labels" or array.name not in names:
        return None
    places = {number: i for i, number in enumerate(numbers)}
    distinct, inverse = np.unique(array.values, return_inverse=True)
    if any(label >= 0 and label not in places for label in distinct.tolist()):
        return None
    return np.array([places.get(label, -1) for label in distinct.tolist()])[inverse.reshape(-1)]


def _values(mesh: Mesh) -> tuple[list[Fields], dict[str, NDArray[Any]]]:
    """The eigenfunctions, the HKS and the lengths of gradients, and the gradients (V, 3) by the names of their lengths.

    They are those of the mesh at radius 1.
    """
    import torch

    from diffnet.data.feature_names import log_hks
    from diffnet.data.features import prepare
    from diffnet.data.options import Preprocessing
    from diffnet.geometry import gradient
    from diffnet.train.device import pick_device
    from diffnet.train.tasks.task import Fields

    operators = prepare(mesh, Preprocessing(EIGENPAIRS), device=pick_device("auto"))[1].cpu()
    constants = int((operators.evals[0] <= 1e-6 * operators.evals.max()).sum())  # one for each component
    first = max(min(constants, operators.k - SHOWN_EIGENFUNCTIONS), 0)
    evecs = operators.evecs[:, first : first + SHOWN_EIGENFUNCTIONS].contiguous()
    numbers = range(first, first + evecs.shape[1])
    eigenfunctions = {f"eigenfunction {i}": evecs[:, i - first].numpy() for i in numbers}
    signature = 3 * log_hks(operators, torch.tensor(SHOWN_TIMES))
    heat = {f"log HKS at t = {t:g}": signature[:, i].numpy() for i, t in enumerate(SHOWN_TIMES)}
    slopes = gradient(evecs[:, :SHOWN_GRADIENTS].contiguous(), operators)
    in_space = torch.einsum("dvc,vdx->cvx", slopes, operators.frames[:, :2].to(slopes.dtype)).numpy()
    vectors = {f"gradient of eigenfunction {first + i}": arrows for i, arrows in enumerate(in_space)}
    lengths = {name: (arrows**2).sum(1) ** 0.5 for name, arrows in vectors.items()}
    return [Fields("scalars", "vertices", each) for each in (eigenfunctions, heat, lengths)], vectors


def _prediction(mesh: Mesh, path: Path, checkpoint: Path, texts: list[str]) -> tuple[list[Fields], NetworkInput]:
    """The prediction of a network, and what it says of its outputs. texts: conditions, see `conditions_of`"""
    from diffnet.data.folders.rows import conditions_of, with_fields
    from diffnet.train.device import pick_device
    from diffnet.train.inference.network_input import load_network
    from diffnet.train.inference.predict import predictor
    from diffnet.train.tasks.task import task_named

    network = load_network(checkpoint)
    expected = described_input(checkpoint, network)
    task, names = task_named(expected.options.task).on_meshes(), expected.options.condition_names
    conditions = with_fields(path, conditions_of([path], texts, names)[0], names)
    return [task.fields(predictor(network, pick_device("auto"))(mesh, conditions), expected)], expected


def open_page(path: Path) -> bool:
    """Open a page in the browser of the desktop. Returns whether there is one.

    Nothing is opened without a display, where `webbrowser` may start a text browser, and nothing if the output of the
    command goes to a file or to a program.
    """
    has_display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return has_display and sys.stdout.isatty() and webbrowser.open(path.resolve().as_uri())
