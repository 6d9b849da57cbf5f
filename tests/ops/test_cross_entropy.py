"""`cross_entropy`: kernels against plain PyTorch, ignored labels, and labels out of range."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_accuracy import Place, check, column, normal
from torch import Tensor

from diffnet.ops import cross_entropy, label_smoothing_loss

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


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
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_labels_of_either_dtype_and_of_any_stride(any_place: Place, backend: str, index: torch.dtype) -> None:
    logits, labels = any_place.put(normal(5, 4)), torch.tensor([3, 0, -1, 2, 1], device=any_place.device)
    expected = cross_entropy(logits.double(), labels)
    loss = cross_entropy(logits, column(labels.to(index)), backend=backend)
    torch.testing.assert_close(loss.double(), expected, rtol=any_place.bound, atol=0)


@BACKENDS
@pytest.mark.parametrize("label", [-5, 7])
def test_labels_out_of_range_raise_on_the_cpu(backend: str, label: int) -> None:
    logits, labels = normal(4, 7).float(), torch.tensor([0, label, -1, 6])
    with pytest.raises(IndexError, match=f"from 0 to 6, or -1, got {label}"):
        cross_entropy(logits, labels, backend=backend)
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


@BACKENDS
def test_bad_class_weights(backend: str) -> None:
    logits, labels = torch.zeros(2, 3), torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"weights should have shape \(3,\), shape is \(2,\)"):
        cross_entropy(logits, labels, backend=backend, weights=torch.ones(2))
    with pytest.raises(TypeError, match="weights should be floating point"):
        cross_entropy(logits, labels, backend=backend, weights=torch.ones(3).long())


@pytest.mark.gpu
@BACKENDS
def test_labels_out_of_range_are_nan_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and its gradient. In debug mode they raise."""
    logits = normal(4, 7).float().cuda().requires_grad_()
    labels = torch.tensor([0, 7, -1, -5], device="cuda")
    loss = cross_entropy(logits, labels, backend=backend)
    assert loss.isnan().tolist() == [False, True, False, True]
    assert loss[2] == 0
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.isnan().all(1).tolist() == [False, True, False, True]
    assert (grad[2] == 0).all()
    assert cross_entropy(logits[:, :0], labels, backend=backend).isnan().tolist() == [True, True, False, True]
    monkeypatch.setattr("diffnet.ops.common.checks.DEBUG", True)
    with pytest.raises(IndexError, match="got 7"):
        cross_entropy(logits, labels, backend=backend)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, about the logarithm of 0
def test_the_kernel_gives_nan_for_labels_out_of_range() -> None:
    """As it does on a GPU, where the labels are not checked. So this calls the functions behind the operator."""
    from diffnet.ops.cross_entropy.kernels import cross_entropy, cross_entropy_backward

    logits, labels = normal(4, 7).float(), torch.tensor([0, 7, -1, -5])
    loss = cross_entropy(logits, labels, -1)
    assert loss.isnan().tolist() == [False, True, False, True]
    assert loss[2] == 0
    assert cross_entropy(logits[:, :0], labels, -1).isnan().tolist() == [True, True, False, True]
    grad = cross_entropy_backward(torch.ones(4), logits, labels, -1)
    assert grad.isnan().all(1).tolist() == [False, True, False, True]
    assert (grad[2] == 0).all()
