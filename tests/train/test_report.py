"""The charts of a training run and the page about a trained model."""

import base64
import html
import io
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image

from diffnet.geometry import make_mesh
from diffnet.train import teeth_scores
from diffnet.train.metrics import class_mean, class_scores
from diffnet.train.ranking import average_precision, exact_rankings, log_odds, new_ranking, ranking_tally, roc_auc
from diffnet.train.report.charts import confusion_png, curves_png, r2_limits
from diffnet.train.report.report import (
    Chart,
    Prediction,
    charts_html,
    class_table,
    labels_html,
    meshes_html,
    write_page,
)
from diffnet.viz.palette import label_colors
from diffnet.viz.render import png_bytes

MATRIX = np.array([[8, 2, 0, 0], [1, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
METRICS = "epoch,train_loss,train_accuracy,test_accuracy,learning_rate\n1,2.0,0.1,,0.001\n2,1.0,0.5,0.4,0.001\n"


def png(content: bytes) -> np.ndarray:
    """The picture (H, W, 3) in the content of a PNG file."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def pictures(page: str) -> dict[str, np.ndarray]:
    """The pictures of a page, by alternative text."""
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)"', page)
    return {html.unescape(alt): png(base64.b64decode(data)) for data, alt in found}


@pytest.fixture
def ball() -> Prediction:
    mesh = trimesh.creation.icosphere(subdivisions=2)
    truth = (mesh.vertices[:, 0] > 0).astype(int)
    prediction = truth.copy()
    prediction[mesh.vertices[:, 1] > 0.5] = 1
    truth[mesh.vertices[:, 1] < -0.9] = -1
    return Prediction("ball", make_mesh(mesh.vertices, mesh.faces), prediction, truth)


def test_scores_by_class() -> None:
    scores = class_scores(MATRIX)
    assert scores.elements.tolist() == [10, 4, 0, 0]
    np.testing.assert_allclose(scores.accuracy, [0.8, 0.75, np.nan, np.nan])
    np.testing.assert_allclose(scores.iou, [8 / 11, 3 / 6, np.nan, np.nan])
    only_predicted = class_scores([[0, 0], [4, 6]])
    np.testing.assert_allclose(only_predicted.iou, [0, 0.6])
    assert np.isnan(only_predicted.accuracy[0])


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_of_rankings_against_all_pairs(classes: int) -> None:
    """Exact ones, and those of the tally of an epoch, which rounds log-odds to 1/1024."""
    rng = np.random.default_rng(0)
    logits, truth = torch.from_numpy(rng.normal(size=(200, classes))).float(), rng.integers(-1, classes, 200)
    logits[:, :] = (logits * 64).round() / 64  # equal ones occur
    odds = log_odds(logits).numpy()
    areas, precisions = [], []
    for column, scores in enumerate(odds.T):
        positive = truth == (column if classes > 2 else 1)
        yes, no = scores[positive], scores[~positive & (truth >= 0)]
        areas.append(np.mean((yes[:, None] > no) + 0.5 * (yes[:, None] == no)))
        at_least = [((yes >= s).sum(), (no >= s).sum()) for s in yes]
        precisions.append(np.mean([true / (true + false) for true, false in at_least]))
    exact = exact_rankings([odds[:80], odds[80:]], [truth[:80], truth[80:]], classes)
    tally = new_ranking(classes, torch.device("cpu")) + ranking_tally(logits, torch.from_numpy(truth))
    for counts, tolerance in ((exact, 1e-9), (tally.numpy(), 1e-3)):
        assert roc_auc(counts) == pytest.approx(np.mean(areas), abs=tolerance)
        assert average_precision(counts) == pytest.approx(np.mean(precisions), abs=tolerance)
    assert np.isnan(roc_auc(ranking_tally(logits, torch.full((200,), -1)).numpy()))
    assert class_mean("dice", [[3, 1], [0, 4]]) == pytest.approx((6 / 7 + 8 / 9) / 2)


def test_confusion_matrix_of_few_classes() -> None:
    names = ["$a", "b_", "c^", "d"]
    few = png(confusion_png(MATRIX, names))
    assert few.shape[0] > 400
    assert few.std() > 10
    # Classes that do not occur are not drawn.
    np.testing.assert_array_equal(few, png(confusion_png(MATRIX[:2, :2], names[:2])))
    assert (few != png(confusion_png(MATRIX.T, names))).any()


def test_confusion_matrix_of_many_classes() -> None:
    image = png(confusion_png(np.eye(260, dtype=int) * 5, [str(i) for i in range(260)]))
    assert 800 < image.shape[0] < 2000
    blue = (image[..., 2].astype(int) - image[..., 0] > 60) & (np.arange(image.shape[1]) < 0.8 * image.shape[1])
    rows, columns = np.nonzero(blue)
    assert np.corrcoef(rows, columns)[0, 1] > 0.99


@pytest.mark.parametrize("classes", [1, 8, 30])
def test_confusion_matrix_of_long_names_lies_within_its_picture(classes: int) -> None:
    """The title of the left axis, too."""
    image = png(confusion_png(np.eye(classes, dtype=int), [f"{'long name ' * 4}{i}" for i in range(classes)]))
    border = np.ones(image.shape[:2], bool)
    border[3:-3, 3:-3] = False
    assert (image[border] == 255).all()


def test_confusion_matrix_of_names_that_differ_at_the_end() -> None:
    one, two = (png(confusion_png([[1]], [f"a very long name of the {side}"])) for side in ("left", "right"))
    assert one.shape != two.shape or (one != two).any()


def test_confusion_matrix_without_elements() -> None:
    assert png(confusion_png(np.zeros((3, 3), int), ["a", "b", "c"])).shape[0] > 400


def test_curves(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS, encoding="utf-8")
    image = png(curves_png(tmp_path / "metrics.csv", "accuracy"))
    assert min(image.shape[:2]) > 400
    blue, orange = label_colors(6)[[0, 5]]
    assert (image == blue).all(-1).sum() > 200
    assert (image == orange).all(-1).sum() > 20  # a single point is visible


def test_curves_without_numbers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,train_loss\n1,3\n2,2\n", encoding="utf-8")
    expected = curves_png(path, "r2")
    path.write_text("epoch,train_loss,train_r2,test_r2\n1,3,nan,\n2,2,nan,\n", encoding="utf-8")
    assert curves_png(path, "r2") == expected


@pytest.mark.parametrize(
    ("curves", "limits"),
    [
        ([[-900.0, -0.1, 0.9], [0.4]], (-0.15, 0.95)),  # the first epoch is left out
        ([[-2.0, 0.0], [-1000.0]], (-1050.0, 50.0)),  # a bad last value is shown
        ([[0.5, 0.7]], (0.49, 0.71)),
        ([[0.5]], (0.45, 0.55)),
    ],
)
def test_limits_of_r2(curves: list[list[float]], limits: tuple[float, float]) -> None:
    assert r2_limits(curves) == pytest.approx(limits)


def page_of(
    folder: Path,
    prediction: Prediction,
    summary: dict[str, str],
    label_names: list[str],
    charts: Sequence[Chart] = (),
    title: str = "Predictions",
) -> str:
    """The text of a page."""
    section = partial(labels_html, label_names=label_names, at="vertices")
    meshes = meshes_html([prediction], section, "vertices")
    parts = [class_table(MATRIX, label_names, "vertices"), charts_html(charts), meshes]
    write_page(folder / "page.html", title, summary, parts)
    return (folder / "page.html").read_text(encoding="utf-8")


def test_page(tmp_path: Path, ball: Prediction) -> None:
    charts = [png_bytes(np.random.default_rng(i).integers(0, 256, (300, 300, 3), np.uint8)) for i in range(2)]
    summary = {"Test accuracy": "78.6 %", "Date": "2025-03-01"}
    names = ["Confusion matrix", "Losses and accuracies over the epochs"]
    figures = [(chart, name, "Chart") for chart, name in zip(charts, names, strict=True)]
    page = page_of(tmp_path, ball, summary, ["left", "right"], [*figures, (None, "A chart that there isn't", "")])
    assert "<dt>Test accuracy</dt><dd>78.6 %</dd>" in page
    rows = re.findall(rf'<tr><th scope="row"><i[^>]*></i>(.*?)</th>{"<td>(.*?)</td>" * 3}</tr>', page)
    assert rows == [("left", "10", "80.0 %", "72.7 %"), ("right", "4", "75.0 %", "50.0 %")]
    scored = ball.truth >= 0
    share = (ball.prediction == ball.truth)[scored].mean()
    assert f"<h3>ball <small>{100 * share:.1f} % correct</small></h3>" in page
    wrong = (ball.prediction != ball.truth)[scored].sum()
    assert f"<small>{wrong} of {scored.sum()}</small>" in page

    shown = pictures(page)
    np.testing.assert_array_equal(shown["Confusion matrix"], png(charts[0]))
    assert list(shown) == [*names, "ball: prediction", "ball: truth", "ball: errors"]
    for image in shown.values():
        assert min(image.shape[:2]) >= 300
        assert image.std() > 10
    red, green, blue = np.moveaxis(shown["ball: errors"].astype(int), -1, 0)
    errors = (red - green > 90) & (red - blue > 70)
    assert errors[:170].sum() > 1000  # the wrong cap is at the top
    assert not errors[200:].any()
    assert (shown["ball: prediction"] != shown["ball: truth"]).any()


def test_page_of_a_point_cloud_without_charts(tmp_path: Path, ball: Prediction) -> None:
    page = page_of(tmp_path, ball._replace(mesh=make_mesh(ball.mesh.verts, None)), {}, label_names=["left", "right"])
    assert len(pictures(page)) == 3


def test_page_is_self_contained_and_escapes_text(tmp_path: Path, ball: Prediction) -> None:
    nasty = '<script>alert("ü")</script>{{body}}\'" onload="x'
    page = page_of(tmp_path, ball._replace(name=nasty), {nasty: nasty}, label_names=[nasty, "b"], title=nasty)
    assert "<script" not in page
    assert 'onload="' not in page
    assert page.count(html.escape(nasty)) == 9  # title, heading, summary 2, class, mesh, three alternative texts
    assert not re.findall(r"https?:|<link|@import|url\(|href=", page)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', page))


CORNERS = np.array([[0.0, 0, 0], [2, 2, 2]])  # of a tooth, whose size is √2 in each direction
TEETH = np.concatenate([CORNERS, CORNERS + 10, CORNERS + 20, [[5, 5, 5], [6, 6, 6]]])
TRUE = [11, 11, 12, 12, 13, 13, 0, 0]


@pytest.mark.parametrize(
    ("predicted", "single", "distance", "right", "identified"),
    [
        (TRUE, None, 0, 8, 1),
        ([12, 12, 11, 11, 13, 13, 0, 0], None, 0, 8, 1 / 3),  # two labels are exchanged
        ([11, 11, 12, 12, 0, -1, 0, 0], None, 5 * 6**0.5 / 3, 6, 1),  # without a tooth, whose size has the length √6
        ([11, 11, 12, 12, 13, 14, 0, 0], [1, 1, 2, 2, 3, 3, 0, 0], 5 * 6**0.5 / 3, 6, 1),  # a tooth with two labels
        ([11, 11, 12, 12, 13, 13, 14, 14], None, 0, 6, 1),  # with a tooth too many
        ([11, 11, 12, 12, 13, 0, 0, 0], None, 1.5**0.5 / 3, 7, 2 / 3),  # a center that is moved by 1 in each direction
        ([0] * 8, None, 5 * 6**0.5, 2, 0),
    ],
)
def test_scores_of_teeth(
    predicted: list[int], single: list[int] | None, distance: float, right: int, identified: float
) -> None:
    scores = teeth_scores(TEETH, TRUE, predicted, teeth=single)
    assert scores == pytest.approx((np.exp(-distance), right / 8, identified))
