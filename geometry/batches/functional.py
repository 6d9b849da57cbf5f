"""The operations of `diffnet.ops` as functions of features and `Operators`.

Each calls the operation of the same name with the fields that it needs. Shapes: V packed vertices, B meshes, K
eigenpairs, C channels. Functions of two batches map pair by pair, mesh p of batch a and mesh p of batch b: P pairs, V_a
and V_b packed vertices. With `k`, the first k eigenpairs of each shape count. Autocast doesn't lower the precision of
maps. docs/functional_maps.md shows them together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet import ops
from diffnet.geometry.operators import Operators
from diffnet.ops import Backend, Regularizer
from diffnet.ops.common.checks import check_count, check_is_tensor, check_tensor, nonnegative
from diffnet.ops.common.memo import can_remember
from diffnet.ops.common.precision import without_autocast


def to_spectral(x: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Project functions onto the eigenbasis of each mesh, Φᵀ (mass ∘ x).

    x: (V, C) floating point
    backend: see `ops.to_spectral`

    Returns (B, K, C). It is differentiable in x. Raises ValueError for operators without eigenpairs and for other
    shapes, TypeError for arguments of other types.

    >>> import torch
    >>> from diffnet.geometry import precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=3)
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> torch.allclose(from_spectral(to_spectral(x, triangle), triangle), x, atol=1e-5)  # K = V
    True
    """
    o = with_eigenpairs("to_spectral", operators)
    return ops.to_spectral(x, o.evecs, o.mass, o.ptr, o.lengths, backend)


def from_spectral(coefficients: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Evaluate coefficients (B, K, C) of the eigenbasis at the vertices, (V, C).

    It is differentiable in the coefficients. For backend and errors see `to_spectral`.
    """
    o = with_eigenpairs("from_spectral", operators)
    return ops.from_spectral(coefficients, o.evecs, o.ptr, o.lengths, backend)


def diffuse(x: Tensor, operators: Operators, time: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Diffuse each channel of x (V, C) for its own time, in the eigenbasis. Returns (V, C).

    x: (V, C), or one function (V,) for one time (), which gives (V,), or for several (T,), which give (T, V)
    time: (C,), or (B, C) for other times on each mesh, at least 0, in the squared unit of the positions

    It is differentiable in x and the times. Functions outside of the K eigenvectors are lost. For backend and errors
    see `to_spectral`.
    """
    o = with_eigenpairs("diffuse", operators)
    if isinstance(x, Tensor) and x.ndim == 1:
        check_tensor("time", time, () if isinstance(time, Tensor) and time.ndim == 0 else ("T",), x.device)
        result = diffuse(x[:, None].expand(-1, time.numel()), o, time.reshape(-1), backend=backend)
        return result.mT if time.ndim else result[:, 0]
    spectrum = to_spectral(x, o, backend=backend)
    if isinstance(time, Tensor) and time.ndim == 2:
        check_tensor("time", time, (len(o), x.shape[-1]), x.device)
        rates = o.evals[..., None] * nonnegative("time", time)[:, None]
        return from_spectral(torch.exp(-rates) * spectrum, o, backend=backend)
    return from_spectral(ops.diffuse(spectrum, o.evals, time, backend), o, backend=backend)


def gradient(x: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Compute the tangent gradients of functions x (V, C). Returns (2, V, C): the X and Y components.

    The unit is that of x per length. `operators.frames[:, :2]` are the directions of X and Y in space. It is
    differentiable in x. `ops.gradient_features` takes the result.

    >>> import torch
    >>> from diffnet.geometry import precompute
    >>> verts = [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    >>> triangle = precompute((verts, [[0, 1, 2]]), k=2)
    >>> slope = gradient(torch.tensor([[0.0], [2.0], [0.0]]), triangle)  # twice the first coordinate
    >>> torch.einsum("dvc,vdx->vcx", slope, triangle.frames[:, :2])[0].round(decimals=4).abs()
    tensor([[2., 0., 0.]])
    """
    _check_rows(x, operators)
    with without_autocast(x):
        return ops.spmm(operators.gradient.pattern, operators.gradient.values, x, backend=backend)


def divergence(x: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """The divergence of tangent vectors x (2, V, C), with components as those of `gradient`. Returns (V, C).

    It is the negative adjoint of `gradient` under vertex areas: the mean of f · divergence(x) over a mesh is minus that
    of gradient(f) · x. It is 0 at vertices without area. It is differentiable in x.
    """
    check_operators(operators)
    o = operators
    check_tensor("x", x, (2, o.num_vertices, "C"), o.device)
    weighted = o.mass[:, None] * x
    with without_autocast(x):
        sums = ops.spmm(o.gradient.pattern, o.gradient.values, weighted, transpose=True, backend=backend).sum(0)
    return torch.where(o.mass[:, None] > 0, -sums / torch.where(o.mass > 0, o.mass, 1)[:, None], 0)


def spread(rows: Tensor, operators: Operators) -> Tensor:
    """A row of each mesh, (B, …), at each of its vertices, (V, …). Differentiable in the rows.

    >>> from diffnet.geometry import collate, precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> spread(torch.tensor([1, 2]), collate([triangle, triangle]))
    tensor([1, 1, 1, 2, 2, 2])
    """
    check_operators(operators)
    if not isinstance(rows, Tensor) or rows.shape[:1] != (len(operators),):
        raise ValueError(f"rows should have shape ({len(operators)}, …), got {tuple(getattr(rows, 'shape', ()))}")
    return rows.repeat_interleave(operators.ptr.diff(), 0, output_size=operators.num_vertices)


def to_padded(x: Tensor, operators: Operators) -> tuple[Tensor, Tensor]:
    """Packed rows x (V, …) as one tensor (B, N, …), N the largest number of vertices, for dense layers such as those of
    `torch.nn`. Differentiable in x.

    Returns it, and a mask (B, N) bool, True at vertices. Rows without a vertex are 0.
    """
    check_operators(operators)
    parts = operators.unpack(x)
    sizes = operators.ptr.diff()[:, None]
    mask = torch.arange(max(operators.lengths, default=0), device=x.device) < sizes
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), mask


def from_padded(padded: Tensor, operators: Operators) -> Tensor:
    """The inverse of `to_padded`: (B, N, …) → (V, …). Raises ValueError for another B, or an N that is too small."""
    check_operators(operators)
    lengths = operators.lengths
    if padded.ndim < 2 or len(padded) != len(lengths) or padded.shape[1] < max(lengths, default=0):
        expected = f"({len(lengths)}, {max(lengths, default=0)} or more, …)"
        raise ValueError(f"padded should have shape {expected}, shape is {tuple(padded.shape)}")
    return torch.cat([rows[:length] for rows, length in zip(padded, lengths, strict=True)])


def mesh_mean(x: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Average functions x (V, C) over each mesh, weighted by vertex areas. Returns (B, C). Differentiable in x."""
    _check_rows(x, operators)
    with without_autocast(x):
        return ops.segment_mean(x, operators.mass, operators.ptr, operators.lengths, backend)


def present_pairs(operators: Operators) -> Tensor:
    """A mask (B, K) bool of the eigenpairs of each mesh. The vectors of others are 0, if a mesh has fewer than K."""
    return torch.stack([(x != 0).any(0) for x in torch.split(operators.evecs, list(operators.lengths))])


def with_eigenpairs(name: str, operators: Operators, hint: str = "") -> Operators:
    """Return the operators if they have eigenpairs. Raises TypeError for another type, else ValueError with `hint`."""
    check_operators(operators)
    if operators.k == 0:
        raise ValueError(f"{name} needs eigenpairs, but the operators have k = 0; write precompute(mesh, k=128){hint}")
    return operators


def check_operators(operators: object) -> None:
    """Check that an argument is `Operators`. Raises TypeError that says what to write instead."""
    if isinstance(operators, Operators):
        return
    several = isinstance(operators, (list, tuple)) and all(isinstance(o, Operators) for o in operators)
    hint = "collate(operators)" if several else "precompute(mesh)"
    raise TypeError(f"operators should be Operators, got {type(operators).__name__}; write {hint}")


def _check_rows(x: Tensor, operators: Operators) -> None:
    check_operators(operators)
    if isinstance(x, Tensor) and (x.ndim < 2 or x.shape[-2] != operators.num_vertices):
        raise ValueError(f"x should have shape ({operators.num_vertices}, C), shape is {tuple(x.shape)}")


# ---- maps between the meshes of two batches ----


def functional_map(
    x_a: Tensor,
    x_b: Tensor,
    a: Operators,
    b: Operators,
    *,
    k: int | None = None,
    regularizer: Regularizer = "resolvent",
    weight: float | Tensor | None = None,
    gamma: float | Tensor = 0.5,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the functional maps from a to b that take the features x_a to x_b.

    x_a, x_b: (V_a, C) and (V_b, C) floating point
    k: how many eigenpairs to use, by default all of each side, K_a and K_b; see `Operators.truncated`
    regularizer, weight, gamma: see `ops.functional_map`
    backend: see `to_spectral`

    Returns (P, K_b, K_a). It is differentiable in x_a and x_b. Raises ValueError for batches of different lengths,
    operators without eigenpairs and other shapes, TypeError for arguments of other types.

    >>> import torch
    >>> from diffnet.geometry import hks, precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 2, 0]], [[0, 1, 2]]), k=3)
    >>> x = torch.eye(3)
    >>> functional_map(x, x, triangle, triangle).round(decimals=4).abs()[0]
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    check_pairs("functional_map", a, b)
    k_a, k_b = _sizes(k, a, b)
    with without_autocast(a.mass):
        spectrum_a, spectrum_b = to_spectral(x_a, a, backend=backend), to_spectral(x_b, b, backend=backend)
    # Where sizes can't be read, missing pairs are solved for, too. They give 0 if their systems have a solution.
    counts = [_pair_counts(o, most) if can_remember() else None for o, most in ((a, k_a), (b, k_b))]
    return ops.functional_map(
        spectrum_a[:, :k_a],
        spectrum_b[:, :k_b],
        a.evals[:, :k_a],
        b.evals[:, :k_b],
        regularizer=regularizer,
        weight=weight,
        gamma=gamma,
        k_a=counts[0],
        k_b=counts[1],
        backend=backend,
    )


def soft_functional_map(
    x_a: Tensor,
    x_b: Tensor,
    a: Operators,
    b: Operators,
    *,
    temperature: float | Tensor = 0.07,
    k: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute Φ_b⁺ Π Φ_a, the functional maps of the soft maps Π = softmax(x_b x_aᵀ / temperature).

    x_a, x_b: (V_a, C) and (V_b, C) floating point. The temperature is meant for rows of length 1, as
        `torch.nn.functional.normalize` returns them.
    k: how many eigenpairs to use, by default all
    backend: see `to_spectral`

    Returns (P, K_b, K_a). It is differentiable in x_a, x_b and the temperature. No table (V_b, V_a) is stored. For
    errors see `functional_map`.
    """
    check_pairs("soft_functional_map", a, b)
    k_a, k_b = _sizes(k, a, b)
    _check_row_count("x_a", x_a, a)
    _check_row_count("x_b", x_b, b)
    queries, keys, evecs = (
        torch.split(tensor, list(side.lengths)) for tensor, side in ((x_b, b), (x_a, a), (a.evecs[:, :k_a], a))
    )
    mapped = [ops.soft_map(*pair, temperature) for pair in zip(queries, keys, evecs, strict=True)]
    with without_autocast(b.mass):
        return ops.to_spectral(torch.cat(mapped), b.evecs[:, :k_b], b.mass, b.ptr, b.lengths, backend)


def functional_map_from_points(matches: Tensor, a: Operators, b: Operators, *, k: int | None = None) -> Tensor:
    """Compute Φ_b⁺ Π Φ_a, the functional maps of maps of points.

    matches: (V_b,) int32 or int64. For each vertex of b, the vertex of its partner in a, counted within that mesh.
    k: how many eigenpairs to use, by default all

    Returns (P, K_b, K_a). For errors see `functional_map` and `ops.functional_map_from_points`.
    """
    check_pairs("functional_map_from_points", a, b)
    k_a, k_b = _sizes(k, a, b)
    _check_row_count("matches", matches, b)
    maps = [
        ops.functional_map_from_points(partners, one.evecs[:, :k_a], other.evecs[:, :k_b], other.mass)
        for partners, one, other in zip(torch.split(matches, list(b.lengths)), a, b, strict=True)
    ]
    return torch.stack(maps)


def point_map(c: Tensor, a: Operators, b: Operators, *, orthogonal: bool = False) -> Tensor:
    """Find the vertex of a for each vertex of b, by functional maps from a to b, in the commute-time distance.

    c: (P, K_b, K_a) floating point, with at most as many eigenpairs as the operators have
    orthogonal: whether the nearest orthogonal map replaces c. Maps between shapes of about the same areas are nearly
        orthogonal, and noise in features makes high frequencies too weak. Maps of soft maps need it: they are weak.

    Vertices of a without mass, which no face uses, are no partners.

    Returns (V_b,) int64, counted within the mesh of a. `b.unpack(matches)` is a list with one tensor for each pair.
    For errors see `functional_map` and `ops.point_map`.
    """
    if orthogonal:
        u, _, vh = torch.linalg.svd(c.detach().double(), full_matrices=False)
        c = (u @ vh).to(c.dtype)
    vertices = []
    for c_of_pair, one, other in _each("point_map", c, a, b):
        partners = torch.nonzero(one.mass > 0)[:, 0]
        vertices.append(partners[ops.point_map(c_of_pair, one.evecs[partners], other.evecs, one.evals[0])])
    return torch.cat(vertices)


def zoomout(
    c: Tensor, a: Operators, b: Operators, *, k: int | None = None, step: int = 1, keep: bool = False
) -> Tensor:
    """Refine functional maps (ZoomOut, Melzi et al. 2019): to maps of points and back, with more eigenpairs each time.

    c: (P, K_b, K_a) floating point, maps from a to b
    k: the number of eigenpairs of the result, by default all
    step: how many eigenpairs to add at a time
    keep: whether the entries of c stay as they are, see `ops.zoomout`

    Returns (P, k, k), without gradient. For errors see `functional_map` and `ops.zoomout`.
    """
    pairs, maps = _each("zoomout", c, a, b), []
    size = min(a.k, b.k) if k is None else check_count("k", k, 1)
    for start, one, other in pairs:
        count, common = size, min(one.k, other.k)
        if common < min(size, a.k, b.k):  # this pair has fewer eigenpairs than its batch
            count, start = common, start[:common, :common]
        end = ops.zoomout(start, one.evecs[one.mass > 0], other.evecs, other.mass, k=count, step=step, keep=keep)
        maps.append(F.pad(end, (0, size - count, 0, size - count)))
    return torch.stack(maps)


def check_pairs(name: str, a: Operators, b: Operators) -> None:
    """Check that two batches have eigenpairs and as many meshes.

    Raises TypeError for arguments that are no operators, else ValueError.
    """
    with_eigenpairs(name, a)
    with_eigenpairs(name, b)
    if len(a) != len(b) or len(a) == 0:
        raise ValueError(f"{name} maps mesh after mesh, but the batches have {len(a)} and {len(b)} meshes")


def _sizes(k: int | None, a: Operators, b: Operators) -> tuple[int, int]:
    if k is None:
        return a.k, b.k
    if check_count("k", k, 1) > min(a.k, b.k):
        raise ValueError(f"k should be at most {min(a.k, b.k)}, as the operators have {a.k} and {b.k}, got {k}")
    return k, k


def _check_row_count(name: str, x: Tensor, operators: Operators) -> None:
    check_is_tensor(name, x)
    if x.ndim == 0 or len(x) != operators.num_vertices:
        raise ValueError(f"{name} should have {operators.num_vertices} rows, shape is {tuple(x.shape)}")


def _each(name: str, c: Tensor, a: Operators, b: Operators) -> list[tuple[Tensor, Operators, Operators]]:
    """Each functional map with its two shapes, and with the eigenpairs that these have."""
    check_pairs(name, a, b)
    check_tensor("c", c, (len(a), "K_b", "K_a"))
    counts = zip(_pair_counts(a, a.k), _pair_counts(b, b.k), strict=True)
    return [
        (c_of_pair[:k_b, :k_a], one.truncated(k_a), other.truncated(k_b))
        for c_of_pair, one, other, (k_a, k_b) in zip(c, a, b, counts, strict=True)
    ]


def _pair_counts(operators: Operators, most: int) -> list[int]:
    """How many of the first eigenpairs each mesh has, at least 1."""
    counts: list[int] = present_pairs(operators)[:, :most].sum(1).clamp(min=1).tolist()
    return counts
