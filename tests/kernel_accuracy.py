"""Triton kernels against plain PyTorch in float64: arithmetics, sizes, random inputs, and the comparison itself.

Without a GPU the kernels run in Triton's interpreter, which is slow. Sizes are small there, and the arithmetics are
float32 in three bfloat16 parts, in two if tf32 is allowed, and float16; the interpreter has no bfloat16 products.
`pytest -m gpu` runs larger sizes and all arithmetics on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """A device and an arithmetic. `bound` limits ‖out − reference‖ / ‖reference‖."""

    device: str
    dtype: torch.dtype
    bound: float
    tf32: bool = False

    def put(self, x: Tensor | None) -> Tensor | None:
        """x on this device, and in this dtype if it is floating point."""
        return x if x is None else x.to(self.device, self.dtype if x.is_floating_point() else None)


PLACES = [
    pytest.param(Place("cpu", torch.float32, 1e-5), id="cpu-fp32"),
    pytest.param(Place("cpu", torch.float16, 1e-2), id="cpu-fp16"),
    pytest.param(Place("cpu", torch.float32, 1e-3, tf32=True), id="cpu-tf32"),
    pytest.param(Place("cuda", torch.float32, 1e-5), id="cuda-fp32", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", torch.float32, 1e-3, tf32=True), id="cuda-tf32", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", torch.bfloat16, 1e-2), id="cuda-bf16", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", torch.float16, 1e-2), id="cuda-fp16", marks=pytest.mark.gpu),
]
ONE_PLACE_PER_DEVICE = [PLACES[i] for i in (0, 3, 5)]

# Vertices of each mesh, K, C. Tiles have 16 rows and columns in the interpreter and up to 128 on a GPU. No size divides
# them, some span several tiles, and one mesh is empty.
SMALL = [((1,), 5, 3), ((20,), 17, 3), ((5, 0, 18), 5, 18)]
LARGE = [
    ((1,), 3, 5),
    ((63,), 5, 40),
    ((1000,), 128, 64),
    ((5000, 0, 17, 1200, 1), 100, 36),
    ((100_003,), 128, 128),
    ((3000, 500), 300, 200),
]


def sizes(place: Place) -> list[tuple[tuple[int, ...], int, int]]:
    """The sizes for a place. In the interpreter, arithmetics other than float32 take the last of the small ones."""
    if place.device != "cpu":
        return LARGE
    return SMALL if place.bound <= 1e-5 else SMALL[-1:]


def at_places(names: str, cases: dict[str, Any], others: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize a test by places and cases. In the interpreter, other arithmetics than float32 take few cases.

    names: of the arguments of a case
    others: the names of these few
    """
    rows = [
        pytest.param(*place.values, *(case if "," in names else [case]), id=f"{place.id}-{name}", marks=place.marks)
        for place in PLACES
        for name, case in cases.items()
        if place.id == "cpu-fp32" or "cuda" in str(place.id) or name in others
    ]
    return pytest.mark.parametrize(("place", *names.split(",")), rows, indirect=["place"])


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal random numbers in float64."""
    return scale * torch.randn(*shape, dtype=torch.float64)


def pointer(lengths: Sequence[int]) -> Tensor:
    """The extents of meshes with these numbers of rows."""
    return torch.tensor(list(accumulate(lengths, initial=0)))


def spectral_inputs(lengths: Sequence[int], k: int, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, evecs, mass and ptr. The masses are as small as the areas of a surface of area 1."""
    v = sum(lengths)
    return normal(v, c), normal(v, k), normal(v).abs() / max(v, 1), pointer(lengths)


def feature_inputs(
    lengths: Sequence[int], k: int, c: int, rotation: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """coefficients, evecs, gradient_evecs, a_re, a_im, ptr. A is far from symmetric, and tanh gets about 1."""
    v = sum(lengths)
    scale = (k * k * c) ** -0.25
    a_im = normal(c, c) if rotation else None
    return normal(len(lengths), k, c), normal(v, k), normal(2, v, k, scale=scale), normal(c, c), a_im, pointer(lengths)


Operation: TypeAlias = Callable[..., Tensor | tuple[Tensor, ...]]


def outputs_and_gradients(
    operation: Operation, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor], constants: int = 0
) -> list[Tensor]:
    """The outputs of an operation, and the gradients of its floating-point inputs but the last `constants`."""
    leaves = [x for x in inputs[: len(inputs) - constants] if x is not None and x.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    out = operation(*inputs)
    outs = [out] if isinstance(out, Tensor) else list(out)
    grads = torch.autograd.grad(outs, leaves, [c.to(o) for c, o in zip(cotangents, outs, strict=True)])
    assert all(g.shape == leaf.shape and g.dtype == leaf.dtype for g, leaf in zip(grads, leaves, strict=True))
    return [*outs, *grads]


def relative(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖, or ‖out‖ if the reference is 0."""
    assert out.shape == reference.shape
    norm = torch.linalg.norm(reference.detach())
    difference = torch.linalg.norm(out.detach().to(reference) - reference.detach())
    return float(difference / norm if norm > 0 else difference)


def check(
    place: Place,
    operation: Operation,
    draw: Callable[[], Sequence[Tensor | None]],
    outputs: Sequence[tuple[int, ...]],
    constants: int = 0,
    disturbance: float = 1 / 16,
) -> None:
    """Check operation(*draw(), backend="triton") and all its gradients against backend="torch" in float64.

    The reference starts from the same rounded inputs, so only the arithmetic differs.

    A draw is repeated if it is ill-conditioned: terms may cancel, above all on a mesh with one vertex, and then any
    rounding exceeds the bound. The condition is measured on the reference alone, by a small disturbance of its inputs.

    Args:
        place: the device, the arithmetic and the bound
        operation: takes the drawn inputs and `backend`
        draw: returns random inputs
        outputs: the shapes of the outputs
        constants: how many of the last inputs have no gradient
        disturbance: the relative disturbance of the inputs, in units of the bound
    """

    def exact(x: Tensor | None) -> Tensor | None:
        return x if x is None or not x.is_floating_point() else x.detach().double()

    def disturbed(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        return x.detach().double() * (1 + disturbance * place.bound * torch.randn_like(x, dtype=torch.float64))

    # bfloat16 rounds intermediate results about as coarsely as the bound. The errors average out over many rows, but
    # not over few. So the bound holds for the median of several draws there.
    draws = 7 if place.dtype == torch.bfloat16 and outputs[0][0] < 100 else 1
    found: list[list[float]] = []
    for _ in range(100 * draws):
        inputs = [place.put(x) for x in draw()]
        cotangents = [place.put(normal(*shape)) for shape in outputs]
        wide = [c.double() for c in cotangents]
        plain = partial(operation, backend="torch")
        expected = outputs_and_gradients(plain, [exact(x) for x in inputs], wide, constants)
        near = [outputs_and_gradients(plain, [disturbed(x) for x in inputs], wide, constants) for _ in range(3)]
        if all(relative(a, b.detach()) <= place.bound / 2 for n in near for a, b in zip(n, expected, strict=True)):
            got = outputs_and_gradients(partial(operation, backend="triton"), inputs, cotangents, constants)
            found.append([relative(a, b.detach()) for a, b in zip(got, expected, strict=True)])
            if len(found) == draws:
                errors = torch.tensor(found).median(dim=0).values.tolist()
                assert all(error <= place.bound for error in errors), found  # false for NaN
                return
    pytest.fail(f"{len(found)} draws are well-conditioned, not {draws}")


def single_vertex_disturbance(lengths: Sequence[int]) -> float:
    """The disturbance for `check`. Over a single vertex no errors average out, so a draw has to bear more."""
    return 1 / 8 if sum(lengths) == 1 else 1 / 16


# ---- memory layouts ----


def column_major(x: Tensor) -> Tensor:
    """The same values with the second to last dimension innermost in memory."""
    return x.mT.contiguous().mT


def every_other_column(x: Tensor) -> Tensor:
    """The same values as every other column of a wider tensor that holds NaN elsewhere."""
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1).flatten(-2)[..., ::2]


def first_columns(x: Tensor) -> Tensor:
    """The same values as the first columns of a wider tensor that holds NaN elsewhere."""
    return torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]]


def column(index: Tensor) -> Tensor:
    """The same values as a column of an (n, 2) tensor."""
    return torch.stack([index, torch.full_like(index, -7)], dim=1)[:, 0]


LAYOUTS = [column_major, every_other_column, first_columns]
