"""`Operators`, the result of preprocessing and the input of networks: a packed ragged batch of meshes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.geometry.device import existing_device
from diffnet.geometry.discretize.connectivity import boundary_vertices
from diffnet.geometry.edges import Edges, edge_index, find_edges, pack_edges
from diffnet.geometry.field_checks import check_fields
from diffnet.geometry.fields import FIELDS, FieldKind, Fields
from diffnet.geometry.pytree import register_tree
from diffnet.geometry.store.transfer import aligned, compact_tensor, copies_of, pinned, to_gpu
from diffnet.ops import (
    Pattern,
    SparseMatrix,
    block_diagonal,
    block_diagonal_pattern,
    row_offsets,
    split_diagonal,
    split_diagonal_pattern,
    spmm,
)
from diffnet.ops.common.checks import check_count, check_is_tensor, check_tensor, device_and_dtype
from diffnet.ops.common.compiler import not_compiled
from diffnet.ops.common.memo import FieldwiseCopy, Later, can_remember, memoized, remember
from diffnet.ops.common.precision import without_autocast
from diffnet.ops.common.ragged import cat_shifted
from diffnet.ops.sparse.op import check_matrix_blocks

UnpackAt: TypeAlias = Literal["vertices", "faces", "edges", "mesh", "global_mean"]
_LENGTHS = {"vertices": "lengths", "faces": "face_lengths", "edges": "edge_lengths"}

# `prepared` remembers its results on a GPU while this part of the GPU's memory stays free.
FREE_SHARE = 0.5
# A function of length 1 that is nearer to the span of others is no further dimension: float32 rounds it by about 1e-7.
MIN_DISTANCE = 1e-6

# Values that `Operators` computes at first use.
_EMPTY_MEMO = dict.fromkeys(("_lengths", "_face_lengths", "_edges", "_preparations", "_unpacked", "_pinned"))


@dataclass(frozen=True, eq=False)
class Operators(FieldwiseCopy, Fields):
    """Discrete operators of a batch of B meshes packed as one larger, disconnected mesh of V vertices.

    It is a container of meshes: `len(operators)` is B, `operators[i]` is one mesh, `operators[i:j]` is a packed batch,
    and a loop runs over the meshes.

    ptr: (B+1,) int64; mesh b owns the vertices ptr[b]:ptr[b+1]
    mass: (V,) lumped vertex areas; 0 at vertices that no face uses
    evals: (B, K), ascending, and evecs: (V, K): eigenpairs L φ = λ M φ with ΦᵀMΦ = I for each mesh. If a mesh has fewer
        than K pairs, the missing vectors are 0 and the missing values repeat the last one. Another basis, set by
        `dataclasses.replace`, must be orthonormal in these areas, too. `with_span` takes any functions.
    laplacian: (V, V), positive semi-definite, block-diagonal over the meshes
    gradient: (V, V), with two sets of values (2, nnz) on one pattern: the X and Y components in the tangent frame
    frames: (V, 3, 3); the rows are tangent x, tangent y and normal
    faces: (F, 3) int64, packed vertex indices, and face_ptr: (B+1,) int64; F = 0 for point clouds
    gradient_evecs: (2, V, K) or None; the gradients of the eigenvectors, [G_X Φ, G_Y Φ]
    neighborhood: (V, V) or None; row i holds the vertices that vertex i attends to, see `with_k_ring` and
        `with_nearest`. None means the pattern of the gradient: the vertices joined to i by an edge, and i itself.
    joined: (V,) int64 or None; the first of the vertices at its position that a vertex is joined with, its own number
        if there is none. None means that no vertices are joined; see `precompute`. Joined vertices share their mass
        equally and have equal rows in `evecs`, `frames` and `gradient`. The gradient reads functions at the first ones.

    The constructor raises TypeError or ValueError for fields of other types or shapes. It reads no values. `from_parts`
    takes matrices of other libraries and checks their values, too.

    >>> from diffnet.geometry import collate, precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> collate([triangle, triangle, triangle])[1:]
    Operators(meshes=2, vertices=6, faces=2, k=2, dtype=torch.float32, device=cpu)
    """

    # Found at first use, see `memoized`.
    _lengths: ClassVar[tuple[int, ...] | None] = None
    _face_lengths: ClassVar[tuple[int, ...] | None] = None
    _edges: ClassVar[Edges | None] = None
    # For each dtype, the result of `prepared`, and the version of its source, see `_basis_version`.
    _preparations: ClassVar[Mapping[torch.dtype, tuple[Any, Operators]] | None] = None
    # Fields that `pack` packs when they are first read.
    _unpacked: ClassVar[Mapping[str, Later[Any]] | None] = None
    # The buffer in which `pin_memory` has put all tensors.
    _pinned: ClassVar[Tensor | None] = None

    def __post_init__(self) -> None:
        check_fields(self)
        remember(self, **_EMPTY_MEMO)

    @classmethod
    def from_parts(
        cls,
        *,
        mass: Any,
        laplacian: Any,
        evals: Any = None,
        evecs: Any = None,
        grad_x: Any = None,
        grad_y: Any = None,
        frames: Any = None,
        verts: Any = None,
        faces: Any = None,
        k: int = 128,
    ) -> Operators:
        """Operators of one mesh from matrices of your own. Missing parts are computed as in `precompute`.

        Matrices are SciPy sparse matrices, NumPy arrays, PyTorch tensors (CSR, COO or dense) or `SparseMatrix`. Arrays
        are NumPy arrays, tensors or lists. The result is float32 on the CPU.

        mass: (V,), or a diagonal matrix (V, V); positive, and 0 only at vertices that the Laplacian doesn't connect
        laplacian: (V, V), symmetric and positive semi-definite. Negate a Laplacian of libigl.
        evals: (K,), ascending, and evecs: (V, K), with L φ = λ M φ and ΦᵀMΦ = I. Without them, `eigenbasis`
            solves for k pairs. The rows of the Laplacian must then sum to 0.
        grad_x, grad_y: (V, V), the gradient in the tangent frames. Without them, it is fitted to the edges of the faces
            or, without faces, to those of the Laplacian; this needs `verts`.
        frames: (V, 3, 3), orthonormal and right-handed, see `Operators`. Without them, they are those of grad_x and
            grad_y if these are given, else those of `tangent_frames`; this needs `verts`.
        verts: (V, 3)
        faces: (F, 3); None for a point cloud
        k: number of eigenpairs, if they are not given

        Raises ValueError that names the wrong or missing part: for shapes that don't fit, entries that are not finite,
        a Laplacian that is not symmetric or has negative eigenvalues, a mass matrix that is not diagonal, masses that
        are not positive, frames that are not orthonormal or not right-handed, and pairs that don't ascend, aren't
        orthonormal or aren't eigenpairs. What rounding to single precision explains is accepted.

        >>> path = [[1.0, -1, 0], [-1, 2, -1], [0, -1, 1]]
        >>> verts = [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
        >>> Operators.from_parts(mass=[1, 1, 1], laplacian=path, verts=verts, k=2).evals.round(decimals=3)
        tensor([[0., 1.]])
        """
        # Imported here: it loads the libraries of preprocessing.
        from diffnet.geometry.mesh.objects import warn_of_gradients
        from diffnet.geometry.preprocessing.from_parts import fields_from_parts

        warn_of_gradients(mass, laplacian, evals, evecs, grad_x, grad_y, frames, verts, stacklevel=3)
        return cls(**fields_from_parts(mass, laplacian, evals, evecs, grad_x, grad_y, frames, verts, faces, k))

    @classmethod
    def from_reference(cls, parts: Sequence[Any], faces: Any = None) -> Operators:
        """Operators of one mesh from what the original implementation's `get_operators` returns.

        parts: the tuple (frames, mass, L, evals, evecs, gradX, gradY)
        faces: (F, 3); None for a point cloud

        Raises the errors of `from_parts`.
        """
        names = ("frames", "mass", "laplacian", "evals", "evecs", "grad_x", "grad_y")
        if not isinstance(parts, (tuple, list)) or len(parts) != len(names):
            problem = f"{len(parts)} items" if isinstance(parts, (tuple, list)) else type(parts).__name__
            raise ValueError(
                f"the tuple of get_operators expected: frames, mass, L, evals, evecs, gradX and gradY, got {problem}"
            )
        return cls.from_parts(**dict(zip(names, parts, strict=True)), faces=faces)

    def to_reference(self) -> tuple[Tensor, ...]:
        """The operators of one mesh as the original implementation's `get_operators` returns them.

        Returns the tuple (frames, mass, L, evals, evecs, gradX, gradY): (V, 3, 3), (V,), (V, V), (K,), (V, K) and twice
        (V, V), in the dtype and on the device of the operators. Matrices are torch.sparse_coo, coalesced.

        The original has no joined vertices; `precompute(mesh, operators="original")` has its values. Raises ValueError
        for a batch of other than one mesh.

        >>> from diffnet.geometry import precompute
        >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
        >>> frames, mass, L, evals, evecs, gradX, gradY = triangle.to_reference()
        >>> L.shape, L.layout
        (torch.Size([3, 3]), torch.sparse_coo)
        """
        if len(self) != 1:
            raise ValueError(
                f"the original's tuple holds one mesh, got {len(self)}; write [o.to_reference() for o in operators]"
            )
        gradient, (grad_x, grad_y) = self.gradient, self.gradient.values
        matrices = self.laplacian, SparseMatrix(gradient.pattern, grad_x), SparseMatrix(gradient.pattern, grad_y)
        coo = [matrix.to_torch().to_sparse(layout=torch.sparse_coo) for matrix in matrices]
        return self.frames, self.mass, coo[0], self.evals[0], self.evecs, coo[1], coo[2]

    if not TYPE_CHECKING:  # type checkers should still find misspelt names

        def __getattr__(self, name: str) -> Any:
            """Pack a field that is read for the first time. Python calls this for attributes that are not set."""
            later = (self.__dict__.get("_unpacked") or {}).get(name)
            if later is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = later.get()
            if later.known:
                remember(self, **{name: value})
            return value

    def __getstate__(self) -> dict[str, Any]:
        """The fields for pickle and copy, all packed. Preparations are left out, and each tensor has its own memory."""
        return dict(self.map_tensors(compact_tensor).__dict__)

    def __repr__(self) -> str:
        return (
            f"Operators(meshes={len(self)}, vertices={self.num_vertices}, faces={self.faces.shape[0]}, k={self.k}, "
            f"dtype={self.mass.dtype}, device={self.device})"
        )

    def __len__(self) -> int:
        """The number of meshes."""
        return self.ptr.shape[0] - 1

    def __getitem__(self, index: int | slice) -> Operators:
        """The operators of one mesh, or of several, packed.

        Negative numbers count from the end. Raises IndexError for a number out of range, TypeError for other indices.
        `for mesh in operators` takes one after the other. `split` splits many meshes faster.
        """
        meshes = len(self)
        if isinstance(index, slice):
            numbers = range(meshes)[index]
            if numbers.step == 1 or len(numbers) == 0:
                return self._consecutive(numbers.start, len(numbers))
            each = self.split()
            return pack([each[i] for i in numbers])
        number = check_count("the number of a mesh", index, -sys.maxsize)
        if not -meshes <= number < meshes:
            raise IndexError(f"the batch has {meshes} meshes, there is no mesh {number}")
        return self._consecutive(number % meshes, 1)

    def _consecutive(self, first: int, count: int) -> Operators:
        rest = len(self) - first - count
        return self if first == rest == 0 else self._groups([first, count, rest])[1]._aligned()

    if TYPE_CHECKING:
        # Python loops by `__getitem__`. An `Iterable` is a nest of lists for other libraries, which look for tensors in
        # it without end: the only mesh of a batch is again a batch of one mesh.
        def __iter__(self) -> Iterator[Operators]: ...

    @property
    def num_vertices(self) -> int:
        return self.mass.shape[0]

    @property
    def k(self) -> int:
        """The number of eigenpairs."""
        return self.evals.shape[1]

    @property
    def device(self) -> torch.device:
        return self.mass.device

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of vertices of each mesh. They are kept on the host, so reading them doesn't wait for a GPU."""
        return memoized(self, "_lengths", lambda o: _extents_on_host(o.ptr, o.num_vertices, "lengths"))

    @property
    def edges(self) -> Tensor:
        """(E, 2) int64, the undirected edges of the faces in the order of `mesh_edges`, mesh after mesh.

        Point clouds among meshes have none. Raises ValueError if there are point clouds only; see `edge_index`.
        """
        return memoized(self, "_edges", _find_edges).pairs

    @property
    def face_lengths(self) -> tuple[int, ...]:
        """The number of faces of each mesh, kept on the host like `lengths`."""
        return memoized(self, "_face_lengths", lambda o: _extents_on_host(o.face_ptr, len(o.faces), "face_lengths"))

    @property
    def edge_lengths(self) -> tuple[int, ...]:
        """The number of edges of each mesh, kept on the host like `lengths`. For errors see `edges`."""
        return memoized(self, "_edges", _find_edges).lengths

    @property
    def edge_ptr(self) -> Tensor:
        """(B+1,) int64; mesh b owns the edges edge_ptr[b]:edge_ptr[b+1]. For errors see `edges`."""
        return torch.tensor(list(accumulate(self.edge_lengths, initial=0)), device=self.device)

    @property
    def normals(self) -> Tensor:
        """(V, 3), the unit normals of the vertices: the third axes of `frames`."""
        return self.frames[:, 2]

    @property
    def boundary(self) -> Tensor:
        """(V,) bool, whether a vertex lies on an edge that has exactly one face. False everywhere for point clouds.

        Vertices that `precompute` has joined count as one vertex.
        """
        if self.joined is None:
            return boundary_vertices(self.faces, self.num_vertices)
        return boundary_vertices(self.joined[self.faces], self.num_vertices)[self.joined]

    def edge_index(self, self_loops: bool = False) -> Tensor:
        """Return the edges in both directions, (2, E) int64, as graph networks expect them. They are sorted.

        Two vertices are joined if the gradient of one reads the other: on meshes by the edges of the faces, in point
        clouds by the local triangulations of the points. It waits for a GPU.

        self_loops: whether each vertex is also joined to itself

        >>> from diffnet.geometry import precompute
        >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
        >>> triangle.edge_index().tolist()
        [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
        """
        return edge_index(self.gradient.pattern, self_loops)

    def unpack(self, y: Tensor, at: UnpackAt = "vertices", dim: int = 0) -> list[Tensor]:
        """Split packed values into a list of one tensor per mesh. The tensors are views.

        y: one row per vertex, face, edge or mesh in dimension `dim`, such as the outputs of a network
        at: "vertices", "faces", "edges" or "mesh". With "mesh", the tensors lose dimension `dim`. "global_mean" means
            the same, so `at=network.outputs_at` fits every network.

        Raises ValueError for another number of rows and an unknown `at`, TypeError if y is no tensor.

        >>> from diffnet.geometry import collate, precompute
        >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
        >>> batch = collate([triangle, triangle])
        >>> [each.shape for each in batch.unpack(batch.faces, at="faces")]
        [torch.Size([1, 3]), torch.Size([1, 3])]
        """
        if at not in get_args(UnpackAt):
            raise ValueError(f"at should be one of {', '.join(get_args(UnpackAt))}, got {at!r}")
        per_mesh = at in ("mesh", "global_mean")
        lengths = (1,) * len(self) if per_mesh else getattr(self, _LENGTHS[at])
        check_is_tensor("y", y)
        if not -y.ndim <= dim < y.ndim or y.shape[dim] != sum(lengths):
            rows = "meshes" if per_mesh else at
            raise ValueError(f"y should have {sum(lengths)} {rows} in dimension {dim}, shape is {tuple(y.shape)}")
        return list(y.unbind(dim) if per_mesh else torch.split(y, list(lengths), dim))

    def truncated(self, k: int) -> Operators:
        """These operators with the first k eigenpairs, as `precompute` with this k computes them.

        Raises ValueError for k below 1 or above the number of pairs, TypeError if it is no integer.

        >>> from diffnet.geometry import precompute
        >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=3)
        >>> triangle.truncated(2)
        Operators(meshes=1, vertices=3, faces=1, k=2, dtype=torch.float32, device=cpu)
        """
        if check_count("k", k, 1) > self.k:
            raise ValueError(f"k should be at most {self.k}, the number of eigenpairs, got {k}")
        return _with_pairs(self, k)

    def with_span(self, functions: Tensor) -> Operators:
        """These operators with the eigenpairs of the Laplacian in the span of functions, in place of its first ones.

        The functions may be modes of another energy or learned, alone or beside eigenvectors, as in a hybrid basis
        (Bastian et al. 2024). They may have another inner product. Their combinations that come nearest to
        eigenvectors (Rayleigh–Ritz) span the same space and are orthonormal in the areas, so everything takes them.

        functions: (V, K) floating point, linearly independent on each mesh. They get no gradient.

        Raises ValueError for functions of which a combination is 0 on a mesh, and for another shape or device, and
        TypeError for other dtypes.

        >>> from diffnet.geometry import precompute
        >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=1)
        >>> triangle.with_span(torch.tensor([[1.0, 3.0], [1.0, 3.0], [1.0, 0.0]])).evals.abs().round(decimals=3)
        tensor([[0.0000, 4.5000]])
        """
        check_tensor("functions", functions, (self.num_vertices, "K"), self.device)
        functions, mass, laplacian = (x.detach().double() for x in (functions, self.mass, self.laplacian.values))
        with without_autocast(functions):
            images = spmm(self.laplacian.pattern, laplacian, functions)
            parts = zip(self.unpack(functions), self.unpack(images), self.unpack(mass), strict=True)
            pairs = [_ritz_pairs(*part, mesh) for mesh, part in enumerate(parts)]
        evals, evecs = (torch.cat(x) for x in zip(*pairs, strict=True))
        operators = changed(self, {"evals": evals.to, "evecs": evecs.to, "gradient_evecs": lambda _: None})
        return operators if self.gradient_evecs is None else operators.with_gradient_evecs()

    def with_gradient_evecs(self) -> Operators:
        """These operators with `gradient_evecs`, so that gradients can be computed in the eigenbasis."""
        if self.gradient_evecs is not None:
            return self
        with without_autocast(self.evecs):
            gradient_evecs = spmm(self.gradient.pattern, self.gradient.values, self.evecs)
        return self._with_basis(self.evecs, gradient_evecs.to(self.evecs.dtype))

    def with_basis_dtype(self, dtype: torch.dtype) -> Operators:
        """These operators with `evecs` and `gradient_evecs` in another dtype. Other fields keep theirs.

        Under autocast, matrix products round their inputs. Rounding the basis once saves this step in every block.
        """
        if self.evecs.dtype == dtype:
            return self
        return self._with_basis(
            self.evecs.to(dtype), None if self.gradient_evecs is None else self.gradient_evecs.to(dtype)
        )

    def prepared(self, dtype: torch.dtype) -> Operators:
        """These operators as a network on a GPU uses them: with `gradient_evecs`, and with the basis in a dtype.

        It is the same as `.with_gradient_evecs().with_basis_dtype(dtype)`. On a GPU the result is remembered as long
        as these operators exist, if half of the GPU's memory stays free. Otherwise, and on other devices, it is
        computed in each call.

        Nothing is remembered if a gradient of the basis is needed, while torch.compile or torch.func traces, and while
        a CUDA graph is recorded. Call the network once before, or call this method.

        dtype: the dtype of the network's matrix products: autocast's dtype, or float32
        """
        if self.gradient_evecs is not None and self.evecs.dtype == dtype:
            return self
        remembered = self._preparations or {}
        if dtype in remembered and (torch.compiler.is_compiling() or remembered[dtype][0] == self._basis_version()):
            return remembered[dtype][1]
        if not can_remember():
            return self.with_gradient_evecs().with_basis_dtype(dtype)
        # Tensors made in inference mode could not be used in training later.
        with torch.inference_mode(torch.is_inference_mode_enabled() and self.evecs.is_inference()):
            result = self.with_gradient_evecs().with_basis_dtype(dtype)
        gradients = result.gradient_evecs
        assert gradients is not None
        if _are_plain([gradients]) and has_room(3 * gradients.nbytes // 2, gradients.device):
            remember(self, _preparations={**remembered, dtype: (self._basis_version(), result)})
        return result

    def _basis_version(self) -> Any:
        """A value that changes when the basis is written to."""
        # Fields that are not packed yet can't have been written to.
        basis = (self.__dict__.get("evecs"), self.gradient_evecs)
        return tuple(0 if x is None or x.is_inference() else x._version for x in basis)

    def _extents(self) -> dict[str, Any]:
        """What operators of the same meshes and faces know, too."""
        return {name: getattr(self, name) for name in ("_lengths", "_face_lengths", "_edges")}

    def _with_basis(self, evecs: Tensor, gradient_evecs: Tensor | None) -> Operators:
        """These operators with another basis. Nothing else is packed for it."""
        extents = self._extents()
        if not (self._unpacked or can_remember()):
            return remember(replace(self, evecs=evecs, gradient_evecs=gradient_evecs), **extents)
        fields = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        fields |= {"evecs": evecs, "gradient_evecs": gradient_evecs}
        later = {name: value for name, value in (self._unpacked or {}).items() if name not in fields}
        return packed_later(fields, later, extents)

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Operators:
        """Move to a device and convert the real-valued fields to a dtype. Returns self if nothing changes.

        Like the method of a tensor: `.to("cuda")`, `.to(torch.float64)` or `.to("cuda", torch.float64)`. The dtype is
        that of mass, evals, evecs, frames, gradient_evecs and of the values of laplacian and gradient. Index tensors
        keep theirs. Raises TypeError for a dtype that is not floating point, and OptionError for a device that is not
        available.

        From the CPU to a GPU, everything is copied as one buffer. The fields are views of it, so its memory is freed
        when none of them is used any more. It is fastest after `pin_memory`.

        non_blocking: whether to return before the GPU has finished, see `torch.Tensor.to`. Operators in pinned memory
            must not change until then.
        """
        device, dtype = device_and_dtype(device, dtype)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"operators are real, so their dtype should be floating point, got {dtype}")

        target = None if device is None else existing_device(device)

        def move(x: Tensor) -> Tensor:
            return x.to(device=target, dtype=dtype if x.is_floating_point() else None, non_blocking=non_blocking)

        if target is None or target.type != "cuda" or self.device.type != "cpu":
            return self if all(move(x) is x for x in _real_tensors(self)) else self.map_tensors(move)
        if dtype is not None and (converted := self.to(dtype)) is not self:
            return converted.to(target, non_blocking=non_blocking)
        if self._pinned is not None and can_remember():
            moved = self.map_tensors(copies_of(self._pinned, target))
            if not non_blocking:
                torch.cuda.current_stream(target).synchronize()
            return moved
        tensors = self._tensors()
        if not (can_remember() and _are_plain(tensors)):
            return self.map_tensors(move)
        return self._copied(tensors, to_gpu(tensors, target, non_blocking=non_blocking))

    def cuda(self, device: torch.device | int | None = None, *, non_blocking: bool = False) -> Operators:
        """Move to a GPU, by default the current one. Raises OptionError if it is not available."""
        target = torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
        return self.to(target, non_blocking=non_blocking)

    def cpu(self) -> Operators:
        """Move to the CPU."""
        return self.to("cpu")

    def pin_memory(self) -> Operators:
        """Copy to one buffer of pinned memory, from which a GPU copies faster.

        A `DataLoader` with `pin_memory=True` calls this. Raises RuntimeError if PyTorch finds no GPU.
        """
        tensors = self._tensors()
        if not _are_plain(tensors):
            return self.map_tensors(Tensor.pin_memory)
        buffer, copies = pinned(tensors)
        return remember(self._copied(tensors, copies), _pinned=buffer)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Operators:
        """Apply a function to all tensors, also to those that the operators have already found.

        function: returns a tensor with the same values, such as a copy on another device
        """
        patterns: dict[int, Pattern] = {}  # matrices may share a pattern

        def mapped(value: Any) -> Any:
            if value is None:
                return None
            if isinstance(value, SparseMatrix):
                return SparseMatrix(mapped(value.pattern), function(value.values))
            if not isinstance(value, Pattern):
                return function(value)
            if id(value) not in patterns:
                patterns[id(value)] = value.map_tensors(function)
            return patterns[id(value)]

        operators = Operators(**{name: mapped(getattr(self, name)) for name in FIELDS})
        return remember(
            operators,
            _lengths=self.lengths,
            _face_lengths=self.face_lengths,
            _edges=None if self._edges is None else self._edges._replace(pairs=function(self._edges.pairs)),
        )

    def _tensors(self) -> list[Tensor]:
        """All tensors, each once."""
        tensors: dict[int, Tensor] = {}
        self.map_tensors(lambda x: tensors.setdefault(id(x), x))
        return list(tensors.values())

    def _copied(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> Operators:
        """These operators with copies in place of all of their tensors."""
        copy_of = {id(x): copy for x, copy in zip(tensors, copies, strict=True)}
        return self.map_tensors(lambda x: copy_of[id(x)])

    def split(self) -> list[Operators]:
        """The meshes of the batch as separate operators. The inverse of `collate`. On the CPU, values are copied."""
        return [self] if len(self) == 1 else [each._aligned() for each in self._groups([1] * len(self))]

    def _aligned(self) -> Operators:
        return self.map_tensors(aligned) if self.device.type == "cpu" else self

    def _groups(self, counts: Sequence[int]) -> list[Operators]:
        """Split into batches of these numbers of consecutive meshes."""
        if self.ptr.is_meta:
            raise ValueError("operators on the meta device hold no extents; split them before .to('meta')")
        bounds = list(accumulate(counts, initial=0))
        lengths = [self.lengths[a:b] for a, b in pairwise(bounds)]
        face_lengths = [self.face_lengths[a:b] for a, b in pairwise(bounds)]
        sizes = {"B": counts, "V": [sum(each) for each in lengths], "F": [sum(each) for each in face_lengths]}
        parts = [_split_field(kind, getattr(self, name), sizes) for name, kind in FIELDS.items()]
        return [
            remember(
                Operators(**dict(zip(FIELDS, values, strict=True))), _lengths=lengths[b], _face_lengths=face_lengths[b]
            )
            for b, values in enumerate(zip(*parts, strict=True))
        ]


def pack(batch: Sequence[Operators]) -> Operators:
    """Pack operators into one batch. `collate` calls this, see there."""
    if not batch:
        raise ValueError("collate needs at least one Operators, got an empty sequence")
    if len(batch) == 1:
        return batch[0]
    k = max(o.k for o in batch)
    for what, values in (
        ("k", {o.k for o in batch} if 0 in {o.k for o in batch} else set()),  # without pairs, nothing can be padded
        ("device", {o.device for o in batch}),
        ("dtype", {o.mass.dtype for o in batch}),
    ):
        if len(values) > 1:
            names = ", ".join(sorted(map(str, values)))
            raise ValueError(f"operators with different {what} can't be packed: {names}")
    batch = [_with_pairs(o, k) for o in batch]
    lengths: tuple[int, ...] = sum((o.lengths for o in batch), ())
    face_lengths: tuple[int, ...] = sum((o.face_lengths for o in batch), ())
    extents = [list(accumulate(lengths, initial=0)), list(accumulate(face_lengths, initial=0))]
    both = torch.tensor(extents, dtype=batch[0].ptr.dtype).to(batch[0].device, non_blocking=True)
    ptr, face_ptr = map(aligned, both)
    fields: dict[str, Any] = {"ptr": ptr, "face_ptr": face_ptr}
    later: dict[str, Callable[[], Any]] = {}
    pieces: list[Tensor] = []
    offsets = row_offsets([o.num_vertices for o in batch])
    for name, kind in FIELDS.items():
        if kind.kind == "extents":
            continue
        parts = [getattr(o, name) for o in batch]
        if not kind.packed_later:
            fields[name] = _pack_field(kind, _completed(kind, parts, batch), offsets)
            continue
        if kind.kind == "matrix":
            check_matrix_blocks(parts)
        pieces += [x.values for x in parts] if kind.kind == "matrix" else parts
        later[name] = partial(_pack_field, kind, parts, offsets)
    edges = pack_edges([o._edges for o in batch], offsets)
    counts = {"_lengths": lengths, "_face_lengths": face_lengths, "_edges": edges}
    if not (can_remember() and _are_plain(pieces)):
        return remember(Operators(**fields, **{name: pack() for name, pack in later.items()}), **counts)
    packed = packed_later(fields, {name: Later(pack) for name, pack in later.items()}, counts)
    return remember(packed, _preparations=_pack_preparations(batch, packed))


def changed(operators: Operators, changes: Mapping[str, Callable[[Any], Any]]) -> Operators:
    """Operators with a function applied to each of some fields. The meshes, their faces and edges stay.

    Large fields are changed when they are first read, so unread fields cost nothing.
    """
    fields = {name: getattr(operators, name) for name, kind in FIELDS.items() if not kind.packed_later}
    fields |= {name: change(fields[name]) for name, change in changes.items() if fields.get(name) is not None}

    def field(name: str) -> Any:
        value = getattr(operators, name)
        return changes[name](value) if name in changes else value

    large = [name for name, kind in FIELDS.items() if kind.packed_later]
    extents = operators._extents()
    if not can_remember():
        return remember(Operators(**fields, **{name: field(name) for name in large}), **extents)
    return packed_later(fields, {name: Later(partial(field, name)) for name in large}, extents)


def _ritz_pairs(x: Tensor, images: Tensor, mass: Tensor, mesh: int) -> tuple[Tensor, Tensor]:
    """The eigenpairs (1, K) and (V, K) of L in the span of functions x (V, K) on a mesh with areas (V,). images: L x"""
    sizes = (mass[:, None] * x.square()).sum(0).sqrt()
    scale = torch.where(sizes > 0, sizes, 1)
    x, images = x / scale, images / scale
    factor, _ = torch.linalg.cholesky_ex(x.mT @ (mass[:, None] * x))
    # Entry j of the diagonal is the distance of function j from the span of those before it.
    if not (factor.diagonal() > MIN_DISTANCE).all():
        raise ValueError(f"functions should be linearly independent on each mesh, those on mesh {mesh} are not")
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=x.dtype, device=x.device), upper=False)
    evals, turn = torch.linalg.eigh(inverse @ (x.mT @ images) @ inverse.mT)
    return evals[None], x @ (inverse.mT @ turn)


def _with_pairs(operators: Operators, k: int) -> Operators:
    """Operators with k eigenpairs. Missing vectors are 0, and missing values repeat the last one."""
    missing = k - operators.k
    if missing == 0:
        return operators

    def vectors(x: Tensor) -> Tensor:
        return F.pad(x, (0, missing)) if missing > 0 else x[..., :k].contiguous()

    def values(x: Tensor) -> Tensor:
        return F.pad(x, (0, missing), mode="replicate") if missing > 0 else x[..., :k].contiguous()

    return changed(operators, {"evals": values, "evecs": vectors, "gradient_evecs": vectors})


def blank(vertices: int, k: int, device: torch.device, meshes: int = 1, **fields: Any) -> Operators:
    """Operators whose required fields are 0, except the given ones. The first mesh has all vertices and faces."""
    sizes: dict[Any, Any] = {
        "B": meshes,
        "V": vertices,
        "F": fields["faces"].shape[0] if "faces" in fields else 0,
        "K": k,
    }
    numbers = torch.zeros(vertices + 1, dtype=torch.int64, device=device)
    pattern = Pattern(numbers, numbers[:0], vertices, check=False)

    def field(kind: FieldKind) -> Any:
        shape: list[Any] = [sizes.get(size, size) for size in kind.shape]
        if kind.kind == "extents":
            return torch.tensor([0, *shape * meshes], device=device)
        if kind.kind == "matrix":
            return SparseMatrix(pattern, torch.zeros(*shape, 0, device=device))
        return torch.zeros(shape, dtype=torch.int64 if kind.kind == "vertices" else None, device=device)

    required = {name: field(kind) for name, kind in FIELDS.items() if not (kind.optional or name in fields)}
    return Operators(**required, **fields)


def has_room(size: int, device: torch.device) -> bool:
    """Return whether FREE_SHARE of a GPU's memory is left if `size` bytes are taken. On other devices, return False."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    if free - size >= FREE_SHARE * total:
        return True
    # Memory that PyTorch holds but doesn't use counts as free. Asking for it takes longer.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free - size >= FREE_SHARE * total


def packed_later(fields: Mapping[str, Any], later: Mapping[str, Later[Any]], memo: Mapping[str, Any]) -> Operators:
    """Operators without the fields in `later`, which are packed when they are first read."""
    return remember(object.__new__(Operators), **{**_EMPTY_MEMO, **fields, "_unpacked": later, **memo})


def _pack_preparations(batch: Sequence[Operators], packed: Operators) -> dict[torch.dtype, tuple[Any, Operators]]:
    """Pack the prepared operators that all meshes remember."""
    remembered = [o._preparations or {} for o in batch]
    packed_ones = {}
    for dtype in remembered[0]:
        if all(dtype in each for each in remembered):
            parts = [o.prepared(dtype) for o in batch]
            evecs = packed.evecs if dtype == batch[0].evecs.dtype else torch.cat([o.evecs for o in parts])
            gradient_evecs = torch.cat([o.gradient_evecs for o in parts if o.gradient_evecs is not None], dim=1)
            packed_ones[dtype] = packed._basis_version(), packed._with_basis(evecs, gradient_evecs)
    return packed_ones


def _completed(kind: FieldKind, values: list[Any], batch: Sequence[Operators]) -> list[Any] | None:
    """The values of an optional field for all meshes of a batch. None if the batch doesn't have it."""
    has = [value is not None for value in values]
    if all(has):
        return values
    if kind.missing is None or not any(has):
        return None
    return [kind.missing(o) if value is None else value for value, o in zip(values, batch, strict=True)]


def _pack_field(kind: FieldKind, values: list[Any] | None, offsets: Sequence[int]) -> Any:
    """The field of a batch from those of its meshes, which begin at these vertices."""
    if values is None:
        return None
    if kind.kind == "matrix":
        return block_diagonal(values)
    if kind.kind == "pattern":
        return block_diagonal_pattern(values)
    return cat_shifted(values, offsets) if kind.kind == "vertices" else torch.cat(values, kind.packed_dim)


def _split_field(kind: FieldKind, value: Any, sizes: Mapping[Any, Any]) -> Sequence[Any]:
    """The inverse of `_pack_field`, for groups of meshes with these sizes."""
    if value is None:
        return [None] * len(sizes["B"])
    if kind.kind == "matrix":
        return split_diagonal(value, sizes["V"])
    if kind.kind == "pattern":
        return [pattern for pattern, _ in split_diagonal_pattern(value, sizes["V"])]
    if kind.kind == "extents":
        bounds, offsets = [0, *accumulate(sizes["B"])], row_offsets(sizes[kind.shape[0]])
        return [value[a : b + 1] - offset for (a, b), offset in zip(pairwise(bounds), offsets, strict=True)]
    parts = torch.split(value, sizes[kind.shape[kind.packed_dim]], kind.packed_dim)
    if kind.kind == "values":
        return parts
    return [part - offset for part, offset in zip(parts, row_offsets(sizes["V"]), strict=True)]


def _real_tensors(operators: Operators) -> Iterator[Tensor]:
    for name, kind in FIELDS.items():
        value = getattr(operators, name)
        if value is not None and kind.kind in ("values", "matrix"):
            yield value.values if kind.kind == "matrix" else value


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor has a gradient, and none stands for another one while something is traced."""
    return all(type(x) is Tensor and not x.requires_grad for x in tensors)


@not_compiled
def _find_edges(operators: Operators) -> Edges:
    if torch.compiler.is_exporting():
        raise ValueError("torch.export can't find edges; read operators.edges once before")
    if operators.faces.is_meta:
        raise ValueError("operators on the meta device hold no faces to find edges of; read .edges before .to('meta')")
    return find_edges(operators.faces, operators.lengths)


def _extents_on_host(ptr: Tensor, rows: int, name: str) -> tuple[int, ...]:
    if len(ptr) == 2:
        return (rows,)
    if torch.compiler.is_exporting():
        raise ValueError(f"torch.export takes operators of one mesh, got a batch of {ptr.shape[0] - 1}")
    if ptr.is_meta:
        raise ValueError(f"operators on the meta device hold no extents; read .{name} before .to('meta')")
    return tuple(torch.diff(ptr).tolist())


register_tree(
    Operators,
    lambda operators: operators._edges,
    lambda fields, edges: remember(object.__new__(Operators), **{**_EMPTY_MEMO, **fields, "_edges": edges}),
)
# `torch.load` then reads a file of `torch.save`, which runs no code. The fields aren't checked.
torch.serialization.add_safe_globals([Edges, Operators, Pattern, SparseMatrix])
