"""The smallest eigenpairs of the Laplacian."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
from numpy.typing import NDArray

from diffnet.geometry.lanczos import KrylovSpace
from diffnet.geometry.shift_invert import Rows, ShiftInvert, shift_invert

Array: TypeAlias = NDArray[np.float64]
Problem: TypeAlias = tuple[scipy.sparse.csr_matrix, Array]  # a Laplacian (V, V) and masses (V,)
Pairs: TypeAlias = tuple[Array, Array]  # values (k,) ascending, vectors (V, k)

DENSE_LIMIT = 256  # below this many vertices a dense solve is faster than a Lanczos iteration
TOLERANCE = 1e-8  # of residuals, relative to the eigenvalue of the inverse
# Shifts in units of the k-th eigenvalue that Weyl's law lets expect, 4π k/area. The first keeps the lowest pairs from
# converging so far ahead of the others that orthogonality is lost to them every other step; the second is for
# spectra far below the law; the last, with all care, for Laplacians that rounding makes indefinite.
MODERATE, SMALL, LARGE = 1 / 12, 1 / 1200, 1.0


class Component(NamedTuple):
    """A connected component, whose k smallest pairs are looked for, apart from its constant."""

    laplacian: scipy.sparse.csr_matrix
    mass: Array
    k: int

    def shift(self, unit: float) -> float:
        """σ in units of about the k-th eigenvalue of a surface of this area."""
        return unit * 4 * np.pi * self.k / float(self.mass.sum())

    @property
    def is_small(self) -> bool:
        """Solved as a dense matrix."""
        return len(self.mass) <= max(DENSE_LIMIT, 4 * self.k)


def eigenbasis(
    laplacian: scipy.sparse.csr_matrix, mass: Array, k: int, device: torch.device | str = "cpu"
) -> tuple[Array, Array]:
    """The k smallest pairs of L φ = λ M φ: evals (k,) ascending and ≥ 0, evecs (V, k) with ΦᵀMΦ = I, float64.

    laplacian: (V, V) positive semi-definite, mass: (V,) ≥ 0. Vertices of zero mass take no part: their entries are 0.
    device: "cpu", or a GPU for the solves and products of large meshes. It factorises too where cuDSS is
        installed; otherwise, and under `torch.use_deterministic_algorithms`, the CPU does.

    Constants on each connected component are null vectors exactly and known beforehand, so they are set rather than
    searched for: the iteration spends itself on the rest, and hundreds of components do it no harm. Where there are
    more components than k, the ones of largest area are kept. Where there are fewer than k pairs, the missing vectors
    are 0 and the missing values repeat the last. The result is the same at every call on the same device, but for
    rounding where cuDSS is used.

    The rest comes from a block Lanczos iteration on the inverse of L + σM, component by component (Grimes, Lewis &
    Simon 1994). What it finds is checked before it is returned: residuals, orthonormality, and by the inertia of
    L − μM that no eigenvalue was passed over. Where a check fails, SciPy's single-vector iteration takes its place,
    with a warning that says why.

    Raises ValueError for k < 0, and RuntimeError where nothing converges.
    """
    steps = search(laplacian, mass, k)
    pairs = None
    try:
        while True:
            pairs = component_pairs(steps.send(pairs), torch.device(device))  # type: ignore[arg-type]
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def search(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Generator[Component, Pairs, Pairs]:
    """`eigenbasis` step by step: yields each component whose pairs it needs, is sent them, and returns the result."""
    if k < 0:
        raise ValueError(f"k should be at least 0, got {k}")
    live = np.flatnonzero(mass > 0)
    evals, evecs = np.zeros(k), np.zeros((len(mass), k), order="F")  # vector by vector, as they are found
    pairs = min(k, len(live))
    if pairs == 0:
        return evals, evecs
    stiffness = scipy.sparse.csr_matrix(laplacian)
    if len(live) < len(mass):
        stiffness = stiffness[live][:, live]
    found, vectors = yield from _smallest_pairs(stiffness, mass[live], pairs)
    evals[:pairs], evals[pairs:] = found, found[-1]
    if vectors.shape == evecs.shape:
        return evals, vectors
    for column, vector in zip(evecs.T, vectors.T, strict=False):
        column[live] = vector
    return evals, evecs


def _smallest_pairs(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Generator[Component, Pairs, Pairs]:
    count, component = scipy.sparse.csgraph.connected_components(laplacian, directed=False)
    area = np.bincount(component, mass)
    by_area = np.argsort(-area, kind="stable")
    members = np.split(np.argsort(component, kind="stable"), np.cumsum(np.bincount(component))[:-1])
    evals, evecs = np.zeros(k), np.zeros((len(mass), k), order="F")
    for i, c in enumerate(by_area[:k]):
        evecs[members[c], i] = 1 / np.sqrt(area[c])
    rest = k - count
    if rest <= 0:
        return evals, evecs

    # Components are problems of their own. By Weyl's law each has pairs in proportion to its area, so that many are
    # looked for; where the pairs of all of them show that one has more below the last, it is solved again.
    pairs: dict[int, Pairs] = {}
    wanted = {c: rest if 2 * area[c] > area.sum() else int(1.1 * rest * area[c] / area.sum()) + 4 for c in by_area}
    while wanted:
        for c, number in wanted.items():
            inside = members[c]
            block = laplacian if count == 1 else laplacian[inside][:, inside]
            pairs[c] = yield Component(block, mass[inside], min(number, rest, len(inside) - 1))
        found = np.sort(np.concatenate([values for values, _ in pairs.values()]))
        last = found[rest - 1] if len(found) >= rest else np.inf
        wanted = {
            c: 4 + 2 * len(values)
            for c, (values, _) in pairs.items()
            if len(values) < min(rest, len(members[c]) - 1) and not (len(values) and values[-1] > last)
        }

    order = sorted((value, c, i) for c in by_area for i, value in enumerate(pairs[c][0]))[:rest]
    evals[count : count + len(order)] = [value for value, _, _ in order]
    for c in {c for _, c, _ in order}:
        columns = [count + at for at, (_, owner, _) in enumerate(order) if owner == c]
        vectors = pairs[c][1][:, : len(columns)]  # ascending, so these are its first
        if count == 1:  # at once, which is several times faster
            evecs[:, count : count + len(columns)] = vectors
        else:
            for column, vector in zip(columns, vectors.T, strict=True):
                evecs[members[c], column] = vector
    return evals, evecs


def component_pairs(component: Component, device: torch.device) -> Pairs:
    if component.k == 0:
        return np.zeros(0), np.zeros((len(component.mass), 0))
    return _dense(*component) if component.is_small else _sparse(component, device)


def _dense(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Pairs:
    root = np.sqrt(mass)
    matrix = laplacian.toarray() / root[:, None] / root[None, :]
    constant = root / np.sqrt(mass.sum())
    # Lift the constant above everything else, so that the k smallest are the others.
    matrix += (2 * np.abs(matrix).sum(1).max() + 1) * np.outer(constant, constant)
    evals, evecs = np.linalg.eigh(matrix)  # NumPy's, see `lanczos`
    return _signed(evals[:k], evecs[:, :k] / root[:, None])


def _sparse(component: Component, device: torch.device) -> Pairs:
    reasons = []
    for unit, tolerated_loss in ((MODERATE, 1e-8), (SMALL, 1e-8), (LARGE, 0.0)):
        try:
            return _block_lanczos(component, component.shift(unit), tolerated_loss, device)
        except (ArithmeticError, np.linalg.LinAlgError) as e:
            reasons.append(str(e))
    failed = f"block Lanczos failed on {len(component.mass)} vertices ({'; then: '.join(reasons)})"
    warnings.warn(f"{failed}; SciPy's slower iteration is used", stacklevel=2)
    return _scipy(*component)


def _block_lanczos(component: Component, sigma: float, tolerated_loss: float, device: torch.device) -> Pairs:
    """Raises ArithmeticError or LinAlgError where L + σM isn't positive definite, or a result fails a check."""
    operator = shift_invert(component.laplacian, component.mass, sigma, device)

    def with_blocks_of(block: int) -> Pairs:
        values, vectors = KrylovSpace(operator, component.k, block, tolerated_loss).converge(TOLERANCE)
        return checked_pairs(component, operator, sigma, values, vectors, block)

    with suppress(_MissedError):
        return with_blocks_of(operator.block)
    return with_blocks_of(2 * operator.block)


def checked_pairs(
    component: Component, operator: ShiftInvert, sigma: float, values: Array, rows: Rows, block: int
) -> Pairs:
    """Of the inverse's eigenvalues (k,) and vectors (k, V), which the iteration found with blocks of so many.

    Raises ArithmeticError or LinAlgError where they fail a check. Vectors come to the host when all is done.
    """
    laplacian, mass, _ = component
    evals = 1 / values - sigma
    if evals[-1] < sigma < component.shift(LARGE):  # 1/(λ + σ) hardly tells such λ apart
        raise ArithmeticError(f"the largest eigenvalue is {evals[-1]:.1e}, below the shift of {sigma:.1e}")
    rows = _orthonormalized(rows, operator) / operator.from_host(np.sqrt(mass))
    _check_residuals(laplacian, mass, evals, rows, operator, sigma)
    found, there = _counts(laplacian, mass, evals, block)
    if found != there:
        raise _MissedError(f"{found} eigenvalues were found where there are {there}")
    peak = operator.to_host(rows[range(len(rows)), abs(rows).argmax(1)])
    rows *= operator.from_host(_signs(peak))[:, None]
    return np.maximum(evals, 0), operator.to_host(rows).T


class _MissedError(ArithmeticError):
    """Of an eigenvalue of high multiplicity; wider blocks may find all of its vectors."""


def _orthonormalized(rows: Rows, operator: ShiftInvert) -> Rows:
    """Rows that the iteration left almost orthonormal, and orthogonal to M^½ 1.

    Raises ArithmeticError or LinAlgError where they are too far from it.
    """
    gram = operator.to_host(rows @ rows.T)
    if np.abs(gram - np.eye(len(rows))).max() > 1e-10:
        rows = operator.from_host(np.linalg.inv(np.linalg.cholesky(gram))) @ rows
        gram = operator.to_host(rows @ rows.T)
    along_constant = operator.to_host(rows @ operator.constant)
    deviation = max(np.abs(gram - np.eye(len(rows))).max(), np.abs(along_constant).max())
    if not deviation < 1e-8:
        raise ArithmeticError(f"eigenvectors are orthonormal only to {deviation:.1e}")
    return rows


def _check_residuals(
    laplacian: scipy.sparse.csr_matrix, mass: Array, evals: Array, rows: Rows, operator: ShiftInvert, sigma: float
) -> None:
    """Raises ArithmeticError where L Φ isn't M Φ Λ, with eigenvectors as rows."""
    root = np.sqrt(mass)
    # A residual R means an error of (L + σM)⁻¹ R in the vectors, relative to gaps of the inverse; R itself is mostly
    # rounding at degenerate faces, where cotangents are huge and masses tiny. A few random combinations of the columns
    # see an error in any of them.
    mixture = np.random.default_rng(0).standard_normal((4, len(evals)))
    both = operator.to_host(operator.from_host(np.concatenate([mixture, mixture * (evals + sigma)])) @ rows)
    mixed, scaled = both[:4], both[4:]
    residual = operator.from_host(((laplacian @ mixed.T).T + mass * (sigma * mixed - scaled)) / root)
    residual = operator.without_constant(operator.apply(operator.without_constant(residual)))
    error = np.linalg.norm(operator.to_host(residual)) / np.linalg.norm(mixed * root)
    if not error < 1e-6:
        raise ArithmeticError(f"eigenvectors are accurate only to {error:.1e}")


def _counts(laplacian: scipy.sparse.csr_matrix, mass: Array, evals: Array, block: int) -> tuple[int, int]:
    """How many eigenvalues below some μ were found, and how many L has.

    A block Krylov space holds as many vectors of one eigenvalue as its blocks have, so any that are missing belong to
    eigenvalues found that often. Only then are they counted: as the negative pivots of L − μM (Sylvester's law).
    """
    found = len(evals)
    last = evals[block - 1 :]
    if not (last - evals[: len(last)] < 1e-5 * last).any():
        return found, found
    ascending = np.concatenate([[0.0], evals])
    gaps = np.flatnonzero(np.diff(ascending) > 1e-4 * evals[-1])
    below = int(gaps[-1]) + 1  # μ lies in the last gap that is wide enough to tell its sides apart
    mu = (ascending[below - 1] + ascending[below]) / 2
    order = _shuffled(len(mass))
    try:
        pivots = _superlu((laplacian - mu * scipy.sparse.diags(mass))[order][:, order]).U.diagonal()
    except RuntimeError:  # a pivot of exactly 0, whose sign tells nothing
        return found, found
    return below, int((pivots < 0).sum())


def _shuffled(count: int) -> NDArray[np.int64]:
    """SuperLU takes a hundred times as long to order some regular meshes as they are, such as subdivided spheres."""
    return np.random.default_rng(0).permutation(count)


def _scipy(laplacian: scipy.sparse.csr_matrix, mass: Array, k: int) -> Pairs:
    """ARPACK's Lanczos iteration on the inverse of L + σM, kept M-orthogonal to the constant."""
    order = _shuffled(len(mass))
    laplacian, mass = laplacian[order][:, order], mass[order]
    mass_matrix = scipy.sparse.diags(mass).tocsc()
    mean = mass / mass.sum()
    start = np.random.default_rng(0).standard_normal(len(mass))
    for shift, patience in ((SMALL, 1), (LARGE, 4)):
        sigma = Component(laplacian, mass, k).shift(shift)
        factor = _superlu(laplacian + sigma * mass_matrix)

        def deflated_solve(b: Array, factor: scipy.sparse.linalg.SuperLU = factor) -> Array:
            x: Array = factor.solve(b)
            x -= mean @ x
            return x

        try:
            evals, evecs = scipy.sparse.linalg.eigsh(
                laplacian,
                k,
                M=mass_matrix,
                sigma=-sigma,
                OPinv=scipy.sparse.linalg.LinearOperator(laplacian.shape, deflated_solve, dtype=np.float64),
                v0=start - mean @ start,
                ncv=min(len(mass) - 1, (2 * k + 20) * patience),
                maxiter=100 * k * patience,
            )
        except scipy.sparse.linalg.ArpackError:
            continue
        ascending = np.argsort(evals, kind="stable")
        evals, evecs = evals[ascending], evecs[:, ascending]
        gram = evecs.T @ (mass[:, None] * evecs)
        residual = laplacian @ evecs - mass[:, None] * evecs * evals
        error = np.sqrt(np.abs((residual * deflated_solve(residual)).sum(0)) / (evals + sigma)).max()
        if np.abs(gram - np.eye(k)).max() < 1e-8 and error < 1e-5:
            return _signed(evals, evecs[np.argsort(order)])
    raise RuntimeError(f"the eigenbasis didn't converge for {k} pairs on {len(mass)} vertices")


def _superlu(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.linalg.SuperLU:
    """L U of a symmetric matrix with pivots from the diagonal, so that their signs are its inertia."""
    return scipy.sparse.linalg.splu(
        matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )


def _signed(evals: Array, evecs: Array) -> Pairs:
    peak = evecs[np.argmax(np.abs(evecs), axis=0), np.arange(evecs.shape[1])]
    return np.maximum(evals, 0), evecs * _signs(peak)


def _signs(peak: Array) -> Array:
    """Eigenvectors have no sign; take the one that makes the entry of largest size, the peak, positive."""
    return np.where(peak < 0, -1.0, 1.0)
