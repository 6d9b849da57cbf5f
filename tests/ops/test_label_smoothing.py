"""`label_smoothing_loss` against the original's definition, and against PyTorch's other one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops import cross_entropy, label_smoothing_loss

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_masked_labels_do_not_count() -> None:
    logits, labels = torch.randn(6, 4).requires_grad_(), torch.tensor([3, -1, 0, 2, -1, 1], dtype=torch.int32)
    kept = labels != -1
    loss = label_smoothing_loss(logits, labels)
    torch.testing.assert_close(loss, original(F.log_softmax(logits[kept], -1), labels[kept].long(), 0.2))
    (grad,) = torch.autograd.grad(loss, logits)
    assert (grad[~kept] == 0).all()
    assert (grad[kept] != 0).all()
    with_twos = label_smoothing_loss(logits, labels.masked_fill(~kept, 2), ignored=2)
    others = kept & (labels != 2)
    torch.testing.assert_close(with_twos, label_smoothing_loss(logits[others], labels[others]))
    nothing = label_smoothing_loss(logits, torch.full((6,), -1))
    assert nothing == 0
    nothing.backward()
    assert (logits.grad == 0).all()


def test_low_precision_and_impossible_classes() -> None:
    logits, labels = 4 * torch.randn(50, 8), torch.randint(8, (50,))
    rounded = logits.bfloat16()
    found = label_smoothing_loss(rounded, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, label_smoothing_loss(rounded.float(), labels))
    impossible = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert label_smoothing_loss(impossible, torch.tensor([1]), smoothing=0.0).isfinite()


@pytest.mark.parametrize(
    ("logits", "labels", "smoothing", "error", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2).long(), 1.5, ValueError, "from 0 to 1, got 1.5"),
        (torch.zeros(2, 3), torch.zeros(2).long(), float("nan"), ValueError, "from 0 to 1, got nan"),
        (torch.zeros(2, 1), torch.zeros(2).long(), 0.2, ValueError, r"2 classes, got logits of shape \(2, 1\)"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), 0.2, IndexError, "from 0 to 2, or -1, got 3"),
        (torch.zeros(3), torch.tensor(0), 0.2, ValueError, r"\(N, C\), shape is \(3,\)"),
        (torch.zeros(2, 3), torch.zeros(2).long(), "a", TypeError, "smoothing should be a number, got 'a' of type str"),
        (torch.zeros(2, 3), torch.zeros(2).long(), True, TypeError, "smoothing should be a number, got True"),
    ],
)
def test_wrong_arguments(logits: Any, labels: Any, smoothing: float, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        label_smoothing_loss(logits, labels, smoothing)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("loss", [cross_entropy, label_smoothing_loss])
def test_wrong_weights(loss: Any, wrong: float, backend: str) -> None:
    weights = torch.tensor([1.0, 0.0, wrong])
    with pytest.raises(ValueError, match=rf"weights should be finite and at least 0, got {wrong} at index \[2\]"):
        loss(torch.zeros(2, 3), torch.zeros(2).long(), backend=backend, weights=weights)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    logits, labels = torch.randn(1000, 30).requires_grad_(), torch.randint(-1, 30, (1000,))
    there = logits.detach().cuda().requires_grad_()
    here, found = label_smoothing_loss(logits, labels), label_smoothing_loss(there, labels.cuda())
    torch.testing.assert_close(found.cpu(), here)
    torch.testing.assert_close(torch.autograd.grad(found, there)[0].cpu(), torch.autograd.grad(here, logits)[0])
