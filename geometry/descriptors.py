"""Spectral descriptors: features at the vertices that need no learning."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from diffnet.geometry.batches.functional import with_eigenpairs
from diffnet.geometry.errors import refuses
from diffnet.geometry.operators import Operators
from diffnet.ops import from_spectral
from diffnet.ops.common.checks import check_count, check_finite, check_tensor, readable

MIN_TIME, MAX_TIME = 0.01, 1.0  # default times of `hks`
_warned_of_size: list[str] = []  # names of given warnings; each is given once


@refuses("write hks(operators, 16) or hks(operators, scales=scales)", evals="operators", evecs="operators")
def hks(operators: Operators, count: int = 16, *, scales: Tensor | None = None) -> Tensor:
    """Heat kernel signature Σ_k exp(−λ_k t) φ_k(v)² (Sun et al. 2009) at each vertex and time, (V, T).

    count: number of times, if `scales` is not given
    scales: (T,) times. By default they are spaced logarithmically from 0.01 to 1, which suits shapes of unit size (see
        `normalize_positions`). On the CPU, this warns once if they don't fit the size of a mesh.

    Raises ValueError for operators without eigenpairs, for a count below 1, and on the CPU for times that are negative
    or not finite.

    >>> from diffnet.geometry import precompute
    >>> operators = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> hks(operators, 4).shape
    torch.Size([3, 4])
    """
    with_eigenpairs("hks", operators)
    check_count("count", count, 1)
    if scales is not None:
        check_tensor("scales", scales, ("T",))
        check_finite("scales", scales, least=0)
    if scales is None:
        _warn_of_size(operators)
        scales = hks_times(count)
    scales = scales.to(operators.evals)
    return _weighted_squares(operators, torch.exp(-operators.evals[:, :, None] * scales))


def hks_times(count: int = 16, device: torch.device | str = "cpu") -> Tensor:
    """The default times of `hks`, (count,) float32.

    >>> hks_times(3)
    tensor([0.0100, 0.1000, 1.0000])
    """
    return torch.logspace(math.log10(MIN_TIME), math.log10(MAX_TIME), count, dtype=torch.float32, device=device)


def wks(operators: Operators, count: int = 16) -> Tensor:
    """Wave kernel signature (Aubry et al. 2011) at each vertex and energy, (V, count).

    The energies of each mesh are spaced evenly in log λ over its own spectrum, so the signature depends on the size of
    the mesh only by a factor. Energies range from 2σ above the first log λ to 2σ below the last, with σ = 7/128 of the
    range of log λ. These are the paper's values for 100 energies, used here for every count. Null vectors and missing
    vectors are left out.

    Raises ValueError for operators without eigenpairs and for a count below 1.
    """
    with_eigenpairs("wks", operators)
    check_count("count", count, 1)
    evals = operators.evals
    # If a mesh has fewer than K pairs, the missing pairs have zero vectors. They must not count in the sum of weights.
    present = torch.stack([(v != 0).any(0) for v in torch.split(operators.evecs, list(operators.lengths))])
    live = present & (evals > 1e-6 * evals[:, -1:])
    log_evals = torch.log(torch.where(live, evals, 1.0))
    has_pairs = live.any(1)
    low = torch.where(has_pairs, torch.where(live, log_evals, math.inf).amin(1), 0.0)[:, None]
    high = torch.where(has_pairs, torch.where(live, log_evals, -math.inf).amax(1), 0.0)[:, None]
    sigma = ((high - low) * 7 / 128).clamp(min=1e-3)  # the range is 0 if there is one eigenvalue
    steps = torch.linspace(0, 1, count, dtype=evals.dtype, device=evals.device)
    energies = low + 2 * sigma + steps * (high - low - 4 * sigma)
    weights = torch.exp(-(((energies[:, None, :] - log_evals[:, :, None]) / sigma[..., None]) ** 2) / 2)
    weights = torch.where(live[:, :, None], weights, 0.0)
    total = weights.sum(1, keepdim=True)
    return _weighted_squares(operators, weights / torch.where(total > 0, total, 1.0))


def _warn_of_size(operators: Operators) -> None:
    """Warn, the first time, of a mesh at which most of the default times of `hks` give nearly the same values.

    With the smallest positive eigenvalue λ₁ and the largest λ_K, exp(−λ t) is nearly 0 for all λ > 0 if λ₁ t is large,
    and nearly 1 if λ_K t is small. The bounds on the area keep shapes of unit size from a warning whose spectrum is
    unusual, such as many small parts.
    """
    if _warned_of_size or not (readable(operators.evals) and readable(operators.mass)):
        return
    middle = math.sqrt(MIN_TIME * MAX_TIME)
    masses = torch.split(operators.mass, list(operators.lengths))
    for number, (values, mass) in enumerate(zip(operators.evals.tolist(), masses, strict=True)):
        positive = [value for value in values if value > 1e-6 * values[-1]]
        if not positive:
            continue
        area, smallest, largest = float(mass.sum()), positive[0], positive[-1]
        small = smallest * middle > 4 and area < 1
        if not small and not (largest * middle < 1 and area > 50):
            continue
        which = f"mesh {number} of the batch" if len(operators) > 1 else "the mesh"
        effect = "too long for {}, so all vertices have" if small else "too short for {}, so all times have"
        message = (
            f"hks: most of the default times, {MIN_TIME:g} to {MAX_TIME:g}, are {effect.format(which)} nearly the same "
            f"value. Its area is {area:.3g}, and its eigenvalues above 0 run from {smallest:.3g} to {largest:.3g}. "
            "Use precompute(…, normalize=True), or pass `scales` near 1/λ"
        )
        _warned_of_size.append(message)
        warnings.warn(message, stacklevel=4)  # the caller of `hks`, which is wrapped once
        return


def _weighted_squares(operators: Operators, weights: Tensor) -> Tensor:
    """Σ_k w_k φ_k(v)², (V, T), for weights (B, K, T)."""
    # A basis in half precision is squared in the precision of the rest.
    squares = operators.evecs.to(operators.evals.dtype) ** 2
    return from_spectral(weights, squares, operators.ptr, operators.lengths)
