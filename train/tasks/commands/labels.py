"""The options of commands of tasks whose targets are labels."""

from typing import Annotated, Any

import typer

LABELS_PANEL = "Labels"  # of --help

LabelSmoothingOption = Annotated[
    float,
    typer.Option(
        min=0, max=0.99, help="Weight of the wrong classes in the loss, all together.", rich_help_panel=LABELS_PANEL
    ),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CLASS",
        help="A class, by name or number, that counts neither in the loss nor in the scores. Repeatable.",
        rich_help_panel=LABELS_PANEL,
    ),
]
ClassWeightsOption = Annotated[
    str | None,
    typer.Option(
        metavar="WEIGHTS",
        help="Weights of the classes in the loss: balanced, one over their frequencies; sqrt, one over the roots; or "
        "1,0.5,2 for all, or NAME=2,NAME=0.5.",
        rich_help_panel=LABELS_PANEL,
    ),
]
MirrorLabelsOption = Annotated[
    str | None,
    typer.Option(
        metavar="PAIRS",
        help="Classes that --mirror exchanges: NAME=NAME,NAME=NAME, or fdi for the FDI numbers of teeth, or none.",
        rich_help_panel=LABELS_PANEL,
    ),
]


def with_label_options(
    shared: dict[str, Any],
    label_smoothing: float,
    ignore: list[str] | None,
    class_weights: str | None,
    mirror_labels: str | None,
) -> dict[str, Any]:
    """The shared options of a command, and those of tasks with labels."""
    own = {"label_smoothing": label_smoothing, "ignore": tuple(ignore or ()), "class_weights": class_weights}
    return {**own, "mirror_labels": mirror_labels, **shared}
