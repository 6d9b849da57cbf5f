"""The options of regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from diffnet.data.feature_names import DISPLACEMENT_PREFIX, checked_targets, vector_targets
from diffnet.options import option
from diffnet.train.options.shared import SharedOptions, weight_entries
from diffnet.train.options.task_options import TaskOptions

Loss: TypeAlias = Literal["mse", "l1", "huber"]
VectorHead: TypeAlias = Literal["surface", "space"]


def _checked_weights(text: str) -> str:
    weight_entries("target_weights", text)
    return text


@dataclass(frozen=True)
class RegressionOptions(SharedOptions):
    """The options of regression alone."""

    targets: str | None = option(
        None,
        "Targets at vertices, faces or edges: MESH.NAME or NAME/MESH with .npy, .txt or .csv, or the property "
        "NAME of a PLY or VTK file. Several are joined by +. vector:NAME turns with the mesh, and displacement:NAME "
        "has its unit of length, too. By default, a table targets.csv has the targets of whole meshes; "
        "COLUMN,COLUMN… picks some of its columns, and table:COLUMN joins one to targets in files.",
        metavar="file:NAME",
        check=checked_targets,
    )
    loss: Loss = option("mse", "Mean squared error, mean absolute error, or Huber's loss, which is between the two.")
    target_weights: str | None = option(
        None,
        "Weights of targets in the loss, by the names of columns or of vector:NAME. Those of others are 1. All targets "
        "are standardized first.",
        metavar="NAME=WEIGHT,…",
        check=_checked_weights,
    )
    scalar_targets: bool = option(
        False,
        "All targets are numbers that stay as they are when a mesh is turned or mirrored. Columns that look like "
        "a vector, such as u_x, u_y, u_z, need this or --no-rotate.",
    )
    vector_head: VectorHead = option(
        "surface",
        "How the network gives vector:NAME: by directions of the surface, so that predictions turn and mirror with the "
        "mesh as features do; or as three numbers in space, for meshes that stand alike.",
    )
    equal_weights: bool = option(
        False, "Relative errors and angles count all vertices, faces or edges alike, and not by their areas."
    )

    @property
    def vector_names(self) -> list[str]:
        """The names of the vectors among the targets, see `vector_targets`."""
        return [part.partition(":")[2] for part in vector_targets(self.targets)]

    @property
    def vectors(self) -> int:
        """So many vectors are the first columns of the targets."""
        return len(self.vector_names)

    @property
    def lengths(self) -> list[int]:
        """The columns of the targets in the unit of length of the mesh."""
        of = [part.startswith(DISPLACEMENT_PREFIX) for part in vector_targets(self.targets)]
        return [i for i in range(3 * len(of)) if of[i // 3]]

    @property
    def vector_outputs(self) -> int:
        """So many vectors are the first outputs of the network, by directions of the surface."""
        return self.vectors if self.vector_head == "surface" else 0


OPTIONS = TaskOptions(
    help="""Train a network that predicts numbers, and report its results on the test meshes.

    Targets are at vertices, faces or edges, in files beside the meshes (--targets), or belong to whole meshes, in a
    table targets.csv with lines file,COLUMN,… or file,COLUMN,…,split. nan, and an empty cell, is a missing target.

    --conditions names columns that the network gets as inputs. A table may be a CSV or a TSV file.

    A folder is divided into training and test meshes by train/ and test/, by train.txt and test.txt, or at random.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """,
    data="Folder of meshes with targets, a table file,COLUMN,… of whole meshes (.csv or .tsv), or shards.",
    sets=("files", "mask"),
    own=RegressionOptions,
    prediction=("targets", "vector_head", "equal_weights"),
    recipe={"width": 128, "dropout": 0.0, "learning_rate": 1e-3},
)
