"""The options of commands of tasks whose targets are labels."""

from typing import Annotated, Any

import typer

from diffnet.train.tasks.options.labels import LabelLoss, LabelScore

LABELS_PANEL = "Labels"  # of --help

LabelLossOption = Annotated[
    LabelLoss,
    typer.Option(
        "--loss",
        help="focal gives elements that are predicted well less weight. Dice losses measure overlap, so a rare class "
        "counts as much as a frequent one.",
        rich_help_panel=LABELS_PANEL,
    ),
]
LabelSmoothingOption = Annotated[
    float,
    typer.Option(
        min=0, max=0.99, help="Weight of the wrong classes in the loss, all together.", rich_help_panel=LABELS_PANEL
    ),
]
ScoreOption = Annotated[
    LabelScore,
    typer.Option(
        help="The score of each epoch, by which --validation chooses one. A rare class counts as much as a frequent "
        "one in balanced-accuracy and mean-iou.",
        rich_help_panel=LABELS_PANEL,
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


def with_label_options(shared: dict[str, Any], ignore: list[str] | None, **own: Any) -> dict[str, Any]:
    """The shared options of a command, and those of tasks with labels."""
    return {**own, "ignore": tuple(ignore or ()), **shared}
