"""Focal and Dice losses against loops over the definitions of their papers, in float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops import cross_entropy, dice_loss, focal_loss, generalized_dice_loss

pytestmark = pytest.mark.usefixtures("one_thread")

LABELS = torch.tensor([3, 0, -1, 3, 3, 1, -1, 0, 3])  # class 2 doesn't occur
WEIGHTS = torch.tensor([0.5, 2.0, 7.0, 1.0])
LOSSES = pytest.mark.parametrize("loss", [focal_loss, dice_loss, generalized_dice_loss])
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
    "dice with weights": (
        lambda z, c: dice_loss(z, c, weights=WEIGHTS.to(z)),
        lambda z, c: dice(z, c, WEIGHTS),
    ),
    "generalized dice": (generalized_dice_loss, generalized),
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


@LOSSES
def test_rows_that_do_not_count(loss: Loss) -> None:
    """Rows that a captured step adds have any outputs."""
    logits = torch.randn(9, 4)
    broken = logits.clone()
    broken[2], broken[6, 1] = 1e30 if loss is focal_loss else float("nan"), -1e30  # PyTorch's own loss has NaN, too
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


@LOSSES
def test_low_precision(loss: Loss) -> None:
    rounded = torch.randn(50, 8).bfloat16()
    labels = torch.randint(8, (50,))
    found = loss(rounded, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loss(rounded.float(), labels))


WRONG: list[tuple[list[Loss], dict[str, Any], type[Exception], str]] = [
    (
        [focal_loss, dice_loss, generalized_dice_loss],
        {"labels": torch.tensor([0, 3])},
        IndexError,
        "labels should be from 0 to 2, or -1, got 3",
    ),
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
    with pytest.raises(error, match=words):
        loss(**{"logits": torch.zeros(2, 3), "labels": torch.zeros(2).long(), **changed})


@pytest.mark.gpu
@LOSSES
def test_labels_out_of_range_are_nan_on_a_gpu(loss: Loss) -> None:
    logits = torch.randn(4, 7, device="cuda", requires_grad=True)
    for wrong in ([0, 7, -1, 2], [-5, -5, -1, -1]):
        found = loss(logits, torch.tensor(wrong, device="cuda"))
        assert found.isnan()
        assert torch.autograd.grad(found, logits)[0].isnan().any()


@LOSSES
def test_labels_out_of_range_are_nan_without_checks(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where labels aren't checked. The kernel gives the cross-entropies there."""
    monkeypatch.setattr(import_module("diffnet.ops.cross_entropy.op"), "readable", lambda labels: False)
    chosen = {"backend": "triton"} if loss is focal_loss else {}
    assert loss(torch.randn(4, 7), torch.tensor([0, 7, -1, 2]), **chosen).isnan()
    assert cross_entropy(torch.randn(1, 7), torch.tensor([7]), backend="triton").isnan()
