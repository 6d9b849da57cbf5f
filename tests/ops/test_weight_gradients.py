"""`weight_gradients`: the sums of several layers and of a projection, in one launch."""

from __future__ import annotations

import pytest
import torch
from kernel_accuracy import Place, normal, pointer, relative
from torch import Tensor

pytest.importorskip("triton")

from diffnet.ops.common.spans import sum_spans
from diffnet.ops.mlp.weight_gradient_kernels import Projection, weight_gradients

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


def random(place: Place, *shape: int) -> Tensor:
    return normal(*shape).to(place.device, place.dtype)


def by_mesh(sums: tuple[Tensor, int], ptr: Tensor) -> Tensor:
    """Add up the spans of each mesh."""
    partial, span = sums
    return sum_spans(partial, ptr, span)[0]


def test_a_projection_in_the_launch_of_the_weights(place: Place) -> None:
    """In 16 bits, the launch also computes Φᵀ x of each mesh. In float32 it leaves the projection to another launch.

    Small meshes have several spans each in the interpreter. Meshes may be empty.
    """
    on_cpu = place.device == "cpu"
    cases = [((40,), 18), ((19, 0, 21), 5)] if on_cpu else [((30_001,), 128), ((5000, 0, 17, 1200, 1), 36)]
    for lengths, c in cases:
        v, ptr = sum(lengths), pointer(lengths).to(place.device)
        inputs, hidden, grads = ([random(place, v, c) for _ in range(n)] for n in (3, 2, 3))
        evecs, x = random(place, v, c), random(place, v, c)
        alone = weight_gradients(inputs, hidden, grads)
        found = weight_gradients(inputs, hidden, grads, leave_sum=True, projection=Projection(evecs, x, ptr))
        assert alone.unsummed is None
        assert found.unsummed is not None
        found.unsummed.total.copy_(found.unsummed.partial[0].sum(0))
        layers = [torch.cat(inputs, 1), *hidden]
        for n, (grad, layer) in enumerate(zip(grads, layers, strict=True)):
            for sums in (alone, found):
                assert relative(sums.weights[n], grad.double().mT @ layer.double()) <= place.bound
                assert relative(sums.biases[n], grad.double().sum(0)) <= place.bound
        if place.dtype == torch.float32:
            assert found.projected is None
            continue
        assert found.projected is not None
        pairs = zip(evecs.double().split(lengths), x.double().split(lengths), strict=True)
        expected = torch.stack([phi.mT @ values for phi, values in pairs])
        assert relative(by_mesh(found.projected, ptr), expected) <= place.bound


def test_a_mesh_with_nan_spoils_no_other() -> None:
    c, ptr = 4, pointer((20, 3, 30))
    x = torch.randn(53, c).half()
    x[20:23] = float("nan")
    grad = torch.randn(53, c).half()
    found = weight_gradients([grad], [], [grad], projection=Projection(grad, x, ptr))
    assert found.projected is not None
    projected = by_mesh(found.projected, ptr)
    assert projected[1].isnan().all()
    assert projected[[0, 2]].isfinite().all()
    assert found.weights[0].isfinite().all()


@pytest.mark.parametrize(("rows", "k", "c"), [(30, 4, 5), (30, 5, 4), (0, 4, 4)], ids=["K", "C", "no rows"])
def test_a_projection_of_another_shape_is_left_out(rows: int, k: int, c: int) -> None:
    evecs, x, grad = (torch.randn(rows, n).half() for n in (k, c, 4))
    found = weight_gradients([grad], [], [grad], projection=Projection(evecs, x, pointer((rows,))))
    assert found.projected is None
    assert relative(found.weights[0], grad.double().mT @ grad.double()) <= 1e-3
