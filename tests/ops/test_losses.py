"""Losses: kernels against plain PyTorch, definitions in float64, and labels that are ignored or out of range."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from kernel_accuracy import Place, check, normal
from refusals import refused
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops import cross_entropy, dice_loss, focal_loss, generalized_dice_loss, label_smoothing_loss

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels aren't checked, as on a GPU."""
    monkeypatch.setattr(import_module("diffnet.ops.cross_entropy.op"), "readable", lambda labels: False)


@pytest.mark.parametrize("ignored", [-1, 2], ids=["ignored-1", "ignored2"])
def test_cross_entropy(place: Place, ignored: int) -> None:
    large = [(70, 260), (3, 5000)] if place.device == "cuda" else [(3, 260)]
    for rows, classes in [(1, 1), (5, 2), (33, 18), *large]:

        def draw() -> list[Tensor | None]:
            labels = torch.randint(classes, (rows,))  # noqa: B023
            labels[torch.rand(rows) < 0.2] = ignored  # noqa: B023
            return [normal(rows, classes, scale=3.0), labels.clamp(max=max(classes - 1, ignored))]  # noqa: B023

        check(place, partial(cross_entropy, ignored=ignored), draw, [(rows,)])


@BACKENDS
def test_no_rows(any_place: Place, backend: str) -> None:
    logits = any_place.put(torch.zeros(0, 7)).requires_grad_()
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.int64, device=any_place.device), backend=backend)
    loss.sum().backward()
    assert (loss.shape, logits.grad.shape) == ((0,), (0, 7))


@BACKENDS
@pytest.mark.parametrize("label", [-5, 7])
def test_labels_out_of_range_raise_on_the_cpu(backend: str, label: int) -> None:
    logits, labels = normal(4, 7).float(), torch.tensor([0, label, -1, 6])
    refused(IndexError, f"from 0 to 6, or -1, got {label}", cross_entropy, logits, labels, backend=backend)
    labels[2] = 3
    assert cross_entropy(logits, labels, ignored=label, backend=backend)[1] == 0


@BACKENDS
def test_class_weights_are_pytorchs(any_place: Place, backend: str) -> None:
    logits = any_place.put(normal(9, 4)).requires_grad_()
    labels = torch.tensor([3, 0, -1, 2, 1, 1, -1, 0, 3], device=any_place.device)
    weights = torch.tensor([0.5, 0.0, 2.0, 7.0], device=any_place.device)
    found = cross_entropy(logits, labels, backend=backend, weights=weights)
    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, weights.double(), ignore_index=-1, reduction="none")
    torch.testing.assert_close(found.double(), expected, rtol=any_place.bound, atol=any_place.bound)
    pull = torch.arange(1.0, 10.0, device=any_place.device)
    (grad,), (reference,) = (torch.autograd.grad(x, y, pull.to(x)) for x, y in ((found, logits), (expected, exact)))
    torch.testing.assert_close(grad.double(), reference, rtol=any_place.bound, atol=any_place.bound)
    scale = torch.where(labels >= 0, weights[labels.clamp(min=0)], 0)
    for smoothing in (0.0, 0.3):
        mean = label_smoothing_loss(logits, labels, smoothing, backend=backend, weights=weights)
        rows = [label_smoothing_loss(exact[i : i + 1], labels[i : i + 1], smoothing) for i in range(9)]
        expected = (torch.stack(rows) * scale).sum() / scale.sum()
        torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=0)
    nothing = label_smoothing_loss(logits, labels.where(labels == 1, -1), backend=backend, weights=weights)
    assert nothing == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, about the logarithm of 0
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "triton"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("torch", "triton"))],
)
def test_labels_out_of_range_are_nan_without_checks(device: str, backend: str, unchecked: None) -> None:
    """The loss and its gradient. On a GPU, labels are not checked; in debug mode they are."""
    logits = normal(4, 7).float().to(device).requires_grad_()
    labels = torch.tensor([0, 7, -1, -5], device=device)
    loss = cross_entropy(logits, labels, backend=backend)
    assert loss.isnan().tolist() == [False, True, False, True]
    assert loss[2] == 0
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.isnan().all(1).tolist() == [False, True, False, True]
    assert (grad[2] == 0).all()
    assert cross_entropy(logits[:, :0], labels, backend=backend).isnan().tolist() == [True, True, False, True]


@pytest.mark.gpu
@BACKENDS
def test_labels_out_of_range_raise_in_debug_mode(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffnet.ops.common.checks.DEBUG", True)
    with pytest.raises(IndexError, match="got 7"):
        cross_entropy(torch.zeros(1, 7, device="cuda"), torch.tensor([7], device="cuda"), backend=backend)


def original(log_probabilities: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The definition of the original implementation, with a row for each sample."""
    classes = log_probabilities.shape[-1]
    one_hot = F.one_hot(labels, classes).to(log_probabilities)
    one_hot = one_hot * (1 - smoothing) + (1 - one_hot) * smoothing / (classes - 1)
    return -(one_hot * log_probabilities).sum(-1).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("classes", [2, 30])
def test_it_is_the_originals(classes: int, smoothing: float) -> None:
    logits = torch.randn(9, classes, dtype=torch.float64).requires_grad_()
    labels = torch.randint(classes, (9,))
    expected = original(F.log_softmax(logits, -1), labels, smoothing)
    for given in (logits, F.log_softmax(logits, -1)):
        found = label_smoothing_loss(given, labels, smoothing)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True) for x in (found, expected)))
    if smoothing * classes <= classes - 1:
        share = smoothing * classes / (classes - 1)
        torch.testing.assert_close(F.cross_entropy(logits, labels, label_smoothing=share), expected)


def test_impossible_classes_without_smoothing() -> None:
    impossible = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert label_smoothing_loss(impossible, torch.tensor([1]), smoothing=0.0).isfinite()


@BACKENDS
@pytest.mark.parametrize("loss", [cross_entropy, label_smoothing_loss])
def test_wrong_weights(loss: Any, backend: str) -> None:
    call = partial(loss, torch.zeros(2, 3), torch.tensor([0, 2]), backend=backend)
    for wrong in (-1.0, float("nan"), float("inf")):
        message = rf"weights should be finite and at least 0, got {wrong} at index \[2\]"
        refused(ValueError, message, call, weights=torch.tensor([1.0, 0.0, wrong]))
    refused(ValueError, r"weights should have shape \(3,\), shape is \(2,\)", call, weights=torch.ones(2))
    refused(TypeError, "weights should be floating point", call, weights=torch.ones(3).long())


LABELS = torch.tensor([3, 0, -1, 3, 3, 1, -1, 0, 3])  # class 2 doesn't occur
WEIGHTS = torch.tensor([0.5, 2.0, 7.0, 1.0])
OF_CLASSES = [focal_loss, dice_loss, generalized_dice_loss]
LOSSES = pytest.mark.parametrize("loss", OF_CLASSES)
ALL_LOSSES = pytest.mark.parametrize("loss", [label_smoothing_loss, *OF_CLASSES])
Loss = Callable[..., Tensor]


def focal(logits: Tensor, labels: Tensor, gamma: float, weights: Tensor) -> Tensor:
    """Lin et al. 2017, equation 5, as a mean."""
    rows = [(F.softmax(z, 0)[c], weights[c]) for z, c in zip(logits, labels, strict=True) if c >= 0]
    return -sum(a * (1 - p) ** gamma * p.log() for p, a in rows) / sum(a for _, a in rows)


def counted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    kept = labels >= 0
    return F.softmax(logits[kept], 1), F.one_hot(labels[kept], logits.shape[1]).to(logits)


def dice(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Milletari et al. 2016, section 3, for each class that occurs."""
    p, g = counted(logits, labels)
    found = [
        (2 * (p[:, c] * g[:, c]).sum() / ((p[:, c] ** 2).sum() + (g[:, c] ** 2).sum()), weights[c])
        for c in labels[labels >= 0].unique().tolist()
    ]
    return 1 - sum(d * w for d, w in found) / sum(w for _, w in found)


def generalized(logits: Tensor, labels: Tensor) -> Tensor:
    """Sudre et al. 2017, section 2.1."""
    p, g = counted(logits, labels)
    over = under = torch.zeros((), dtype=logits.dtype)
    for c in labels[labels >= 0].unique().tolist():
        w = 1 / g[:, c].sum() ** 2
        over, under = over + w * (g[:, c] * p[:, c]).sum(), under + w * (g[:, c] + p[:, c]).sum()
    return 1 - 2 * over / under


ONES = torch.ones(4)
DEFINITIONS = {
    "focal": (focal_loss, lambda z, c: focal(z, c, 2.0, ONES)),
    "focal of 0.5 with weights": (
        lambda z, c: focal_loss(z, c, 0.5, weights=WEIGHTS.to(z)),
        lambda z, c: focal(z, c, 0.5, WEIGHTS),
    ),
    "dice": (dice_loss, lambda z, c: dice(z, c, ONES)),
    "dice with weights": (lambda z, c: dice_loss(z, c, weights=WEIGHTS.to(z)), lambda z, c: dice(z, c, WEIGHTS)),
    "generalized dice": (generalized_dice_loss, generalized),
    "smoothing": (label_smoothing_loss, lambda z, c: original(F.log_softmax(z[c >= 0], -1), c[c >= 0], 0.2)),
}


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_definitions(name: str, device: str) -> None:
    ours, definition = DEFINITIONS[name]
    exact = (2 * torch.randn(9, 4, dtype=torch.float64)).requires_grad_()
    expected = definition(exact, LABELS)
    (reference,) = torch.autograd.grad(expected, exact)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        logits = exact.detach().to(device, dtype).requires_grad_()
        found = ours(logits, LABELS.to(device))
        (grad,) = torch.autograd.grad(found, logits)
        assert (found.dtype, found.shape) == (dtype, ())
        torch.testing.assert_close(found.double().cpu(), expected, rtol=bound, atol=0)
        assert torch.linalg.norm(grad.double().cpu() - reference) <= bound * torch.linalg.norm(reference)
        assert (grad[LABELS < 0] == 0).all()
    if device == "cpu":
        assert torch.autograd.gradcheck(lambda z: ours(z, LABELS), exact)


def test_focal_loss_of_gamma_0_is_the_cross_entropy() -> None:
    logits = torch.randn(9, 4)
    torch.testing.assert_close(focal_loss(logits, LABELS, 0.0), F.cross_entropy(logits, LABELS, ignore_index=-1))
    expected = F.cross_entropy(logits, LABELS, WEIGHTS, ignore_index=-1)
    torch.testing.assert_close(focal_loss(logits, LABELS, 0.0, weights=WEIGHTS), expected)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_certain_predictions_have_finite_focal_gradients(gamma: float) -> None:
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0, 0]), gamma)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss == 100
    assert grad.tolist() == [[0, 0], [-0.5, 0.5]]  # a wrong one counts in full


def test_packed_meshes() -> None:
    """Focal losses of separate meshes have their mean by labeled rows. Dice losses score the batch as one mesh."""
    logits, parts = torch.randn(9, 4, dtype=torch.float64), (slice(0, 3), slice(3, 9))
    labeled = torch.tensor([float((LABELS[part] >= 0).sum()) for part in parts], dtype=torch.float64)
    alone = torch.stack([focal_loss(logits[part], LABELS[part]) for part in parts])
    torch.testing.assert_close(focal_loss(logits, LABELS), (alone * labeled).sum() / labeled.sum())
    order = torch.randperm(9)
    for loss in (dice_loss, generalized_dice_loss):
        whole = loss(logits, LABELS)
        torch.testing.assert_close(loss(logits[order], LABELS[order]), whole)
        assert abs(whole - torch.stack([loss(logits[part], LABELS[part]) for part in parts]).mean()) > 1e-3
        twice = loss(torch.cat([logits, logits]), torch.cat([LABELS, LABELS]))
        torch.testing.assert_close(twice, whole)


@ALL_LOSSES
def test_rows_that_do_not_count(loss: Loss) -> None:
    """Rows that a captured step adds have any outputs."""
    logits = torch.randn(9, 4)
    broken = logits.clone()
    of_rows = loss in (focal_loss, label_smoothing_loss)  # as PyTorch's own loss, they have NaN for NaN
    broken[2], broken[6, 1] = 1e30 if of_rows else float("nan"), -1e30
    broken.requires_grad_()
    found = loss(broken, LABELS.int())
    torch.testing.assert_close(found, loss(logits[LABELS >= 0], LABELS[LABELS >= 0]))
    (grad,) = torch.autograd.grad(found, broken)
    assert grad.isfinite().all()
    assert (grad[LABELS < 0] == 0).all()
    torch.testing.assert_close(loss(logits, LABELS.where(LABELS >= 0, 2), ignored=2), found.detach())
    for nothing in (torch.full((9,), -1), torch.zeros(0, dtype=torch.int64)):
        rows = logits[: len(nothing)].clone().requires_grad_()
        zero = loss(rows, nothing)
        assert zero == 0
        assert (torch.autograd.grad(zero, rows)[0] == 0).all()


@pytest.mark.parametrize("loss", [focal_loss, dice_loss])
def test_classes_of_weight_0(loss: Loss) -> None:
    logits, none = torch.randn(9, 4, requires_grad=True), torch.tensor([0.0, 0.0, 1.0, 0.0])
    zero = loss(logits, LABELS, weights=none)
    assert zero == 0
    assert (torch.autograd.grad(zero, logits)[0] == 0).all()


@LOSSES
def test_perfect_and_worst_predictions(loss: Loss) -> None:
    right, wrong = 100 * F.one_hot(LABELS.clamp(min=0), 4), 100 * F.one_hot((LABELS + 1) % 4, 4)
    assert loss(right.float(), LABELS) == pytest.approx(0, abs=1e-6)
    assert loss(wrong.float(), LABELS) >= 1 - 1e-6


@ALL_LOSSES
def test_low_precision(loss: Loss) -> None:
    rounded = (4 * torch.randn(50, 8)).bfloat16()
    labels = torch.randint(8, (50,))
    found = loss(rounded, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loss(rounded.float(), labels))


WRONG: list[tuple[list[Loss], dict[str, Any], type[Exception], str]] = [
    (
        [label_smoothing_loss, *OF_CLASSES],
        {"labels": torch.tensor([0, 3])},
        IndexError,
        "labels should be from 0 to 2, or -1, got 3",
    ),
    ([label_smoothing_loss], {"smoothing": 1.5}, ValueError, "from 0 to 1, got 1.5"),
    ([label_smoothing_loss], {"smoothing": float("nan")}, ValueError, "from 0 to 1, got nan"),
    ([label_smoothing_loss], {"smoothing": "a"}, TypeError, "smoothing should be a number, got 'a' of type str"),
    ([label_smoothing_loss], {"smoothing": True}, TypeError, "smoothing should be a number, got True"),
    ([label_smoothing_loss], {"logits": torch.zeros(2, 1)}, ValueError, r"2 classes, got logits of shape \(2, 1\)"),
    ([label_smoothing_loss], {"logits": torch.zeros(3)}, ValueError, r"\(N, C\), shape is \(3,\)"),
    (
        [focal_loss, dice_loss],
        {"weights": torch.tensor([1.0, -1.0, 1.0])},
        ValueError,
        "weights should be finite and at least 0, got -1.0",
    ),
    ([focal_loss], {"gamma": -1.0}, ValueError, "gamma should be finite and at least 0, got -1.0"),
    ([focal_loss], {"gamma": float("nan")}, ValueError, "gamma should be finite and at least 0, got nan"),
    ([focal_loss], {"gamma": "2"}, TypeError, "gamma should be a number, got '2' of type str"),
]


@pytest.mark.parametrize(
    ("loss", "changed", "error", "words"), [(loss, *case) for losses, *case in WRONG for loss in losses]
)
def test_wrong_arguments(loss: Loss, changed: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(error, words, loss, **{"logits": torch.zeros(2, 3), "labels": torch.zeros(2).long(), **changed})


@LOSSES
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_labels_out_of_range_are_nan(loss: Loss, device: str, unchecked: None) -> None:
    """The kernel gives the cross-entropies on the CPU, too."""
    chosen = {"backend": "triton"} if loss is focal_loss else {}
    logits = torch.randn(4, 7, device=device, requires_grad=True)
    for wrong in ([0, 7, -1, 2], [-5, -5, -1, -1]):
        found = loss(logits, torch.tensor(wrong, device=device), **chosen)
        assert found.isnan()
        assert torch.autograd.grad(found, logits)[0].isnan().any()
