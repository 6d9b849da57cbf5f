"""The recipes of `diffnet train`."""

import inspect
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from diffnet.checkpoints.training import OLDER_DEFAULTS
from diffnet.data import LabeledMesh, LabeledMeshes, MeshPairs, PairShape
from diffnet.geometry import make_mesh
from diffnet.train.cli import train_app
from diffnet.train.commands.training import train_command
from diffnet.train.options import TrainOptions, recipe
from diffnet.train.options.shared import TaskName
from diffnet.train.options.task_options import RecipeName

TASKS = get_args(TaskName)


class Stop(Exception):
    """Ends a command before it trains."""


def chosen(monkeypatch: pytest.MonkeyPatch, task: str, *arguments: str, meshes: int = 0) -> TrainOptions:
    """The options with which a command would train on so many meshes."""
    found: list[TrainOptions] = []

    def run(data: LabeledMeshes, options: TrainOptions, *rest: object, **given: object) -> None:
        found.append(options)
        raise Stop

    monkeypatch.setattr("diffnet.train.run.run_training", run)
    triangle = make_mesh([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]])
    for loader in ("segmentation.index_dataset", "classification.shapes", "regression.index_targets"):
        items = [LabeledMesh("a", triangle, np.zeros(3, np.int64))] * meshes
        data = LabeledMeshes(items, [], ["a"], "vertices")
        monkeypatch.setattr(f"diffnet.train.tasks.{loader}", lambda *_, data=data, **__: data)
    shape = PairShape("a", triangle)
    pairs = MeshPairs([shape, shape], [], [(0, 1)] * 100, [])  # as many as give the default number of epochs
    monkeypatch.setattr("diffnet.train.tasks.correspondence.load_pairs", lambda *_, **__: pairs)
    data = "shapes" if task == "classification" else "bodies"
    result = CliRunner().invoke(train_app, [task, "--data", data, "--out", "nowhere", "--cache", ".", *arguments])
    assert isinstance(result.exception, Stop), result.output
    return found[-1]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", get_args(RecipeName))
def test_commands_follow_recipes(monkeypatch: pytest.MonkeyPatch, name: RecipeName, task: TaskName) -> None:
    expected = TrainOptions(task=task, **recipe(name, task))
    assert chosen(monkeypatch, task, "--recipe", name) == expected
    if name == "default":
        assert chosen(monkeypatch, task) == expected


@pytest.mark.parametrize("task", TASKS)
def test_the_help_shows_the_default_recipe(task: TaskName) -> None:
    command = train_command(task)
    options = TrainOptions(task=task, **recipe("default", task)).as_dict()
    shown = {name: p.default for name, p in inspect.signature(command).parameters.items() if name in options}
    unset = {"laplacian": None}  # decided by --operators
    if task == "correspondence":
        unset |= {"epochs": None, "features": None}  # decided by the training set
    if task == "segmentation":
        unset |= {"learning_rate": None}
    assert shown == {name: value for name, value in (options | unset).items() if name in shown}
    assert len(shown) > 25


@pytest.mark.parametrize(
    ("arguments", "meshes", "rate"),
    [
        ("", 12, 2e-3),
        ("", 80, 2e-3),
        ("", 120, 16 / 12_000),
        ("", 400, 5e-4),
        ("--epochs 30", 400, 16 / 12_000),
        ("--validation 0.2", 150, 16 / 12_000),
        ("--batch-meshes 4", 400, 16 / 10_000),
        ("--batch-vertices 5000", 400, 2e-3),
        ("--lr 1e-3", 400, 1e-3),
        ("--recipe original", 400, 1e-3),
    ],
)
def test_long_runs_of_segmentation_have_a_lower_rate(
    monkeypatch: pytest.MonkeyPatch, arguments: str, meshes: int, rate: float
) -> None:
    options = chosen(monkeypatch, "segmentation", *arguments.split(), meshes=meshes)
    assert options.learning_rate == pytest.approx(rate, rel=1e-12)


def test_a_recipe_may_depend_on_other_options() -> None:
    known = recipe("default", "correspondence")
    assert recipe("default", "correspondence", {"k": 64}) == {**known, "map_k": 64}
    changed = recipe("default", "correspondence", {"method": "unsupervised"})
    assert (changed["features"], changed["k"], changed["map_k"]) == ("wks", 200, 200)
    changed = recipe("original", "correspondence", {"method": "unsupervised"})
    assert (changed["features"], changed["k"], changed["map_k"]) == ("wks", 200, 200)
    for name in get_args(RecipeName):
        assert recipe(name, "segmentation", {"start": "a.pt"}) == {
            **recipe(name, "segmentation"),
            "learning_rate": 5e-4,
        }


def test_options_win_over_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--recipe", "original", "--features", "xyz", "--dropout", "0.1", "--k", "64"
    options = chosen(monkeypatch, "segmentation", *given)
    assert (options.features, options.dropout, options.k) == ("xyz", 0.1, 64)
    assert (options.laplacian, options.schedule, options.width) == ("cotan", "step", 128)
    # An option with the value of its default also counts as given.
    default = TrainOptions().schedule
    assert chosen(monkeypatch, "segmentation", *given, "--schedule", default).schedule == default


@pytest.mark.parametrize("name", get_args(RecipeName))
def test_a_limit_of_vertices_replaces_that_of_meshes(monkeypatch: pytest.MonkeyPatch, name: RecipeName) -> None:
    options = chosen(monkeypatch, "segmentation", "--recipe", name, "--batch-vertices", "5000")
    assert (options.batch_meshes, options.batch_vertices) == (None, 5000)
    options = chosen(monkeypatch, "segmentation", "--batch-vertices", "5000", "--batch-meshes", "3")
    assert (options.batch_meshes, options.batch_vertices) == (3, 5000)


def test_older_checkpoints_do_not_follow_the_recipe() -> None:
    """Options of the recipe that the first version did not have are those of the original in older checkpoints."""
    first_version = {
        *("features", "k", "laplacian", "basis", "width", "blocks", "diffusion", "attention_heads", "dropout"),
        *("learning_rate", "decay_every", "batch_meshes"),
        "operators",  # which it had, too, but not those of the original
    }
    later = {name: value for name, value in recipe("original", "segmentation").items() if name not in first_version}
    assert {name: OLDER_DEFAULTS[name] for name in later} == later
