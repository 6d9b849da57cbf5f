"""Launches of all Triton kernels, made by the functions that launch them and recorded instead of run.

Tensors have no content and stand for tensors on a GPU, so a machine without a GPU will do. Widths, rows, dtypes and
options go over a grid that reaches every tile of the launch code.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, MockTensor

from diffnet import ops
from diffnet.ops.adam import kernels as adam
from diffnet.ops.adam.reference import AdamOptions, AdamTensors
from diffnet.ops.block_sparse import attention_kernels, kernels as block_sparse
from diffnet.ops.block_sparse.pattern import BLOCKS, BlockArrays
from diffnet.ops.block_sparse.reference import AttentionInputs
from diffnet.ops.common.matmul import operands
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import Unsummed
from diffnet.ops.common.tiling import on_hopper
from diffnet.ops.cross_entropy import kernels as cross_entropy
from diffnet.ops.fronts import kernels as fronts
from diffnet.ops.fronts.reference import FrontLevel
from diffnet.ops.functional_maps.kernels import inverse_factors
from diffnet.ops.global_tokens import kernels as global_tokens
from diffnet.ops.global_tokens.parameters import Parameters
from diffnet.ops.gradient_features import (
    coefficient_kernels as coefficients,
    direct_kernels as direct_features,
    kernels as gradient_features,
)
from diffnet.ops.implicit.kernels import iteration
from diffnet.ops.implicit.reference import System
from diffnet.ops.mlp import kernels as mlp, linear_kernels as linear
from diffnet.ops.mlp.weight_gradient_kernels import Projection, weight_gradients
from diffnet.ops.sparse import softmax_kernels, spmm_kernels
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.spectral import kernels as spectral

BOTH = (False, True)
INDICES = (torch.int32, torch.int64)
# Triton compiles other code for multiples of 16, so there are two lists of widths. Both reach every tile.
WIDTHS = ((16, 32, 64, 128, 256), (10, 30, 50, 100, 200))
ROWS = (1_000, 50_000, 1_000_000)  # vertices: fewer tiles than multiprocessors, some more, and many
# The dtypes of products, and the arithmetic of float32: sums of two bfloat16 numbers, or of three.
ARITHMETICS = (
    (torch.bfloat16, "ieee"), (torch.float16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")
)  # fmt: skip


class Launch(NamedTuple):
    """A launch of a kernel that can be pickled. Stand-ins of Triton take the place of tensors."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Variant(NamedTuple):
    """A launch. No other variant has the same compiled kernel.

    capability: the compute capability of the GPU, 90 for 9.0
    types: the narrowest dtype of numbers, that of indices, and the precision of products
    tile: the sizes of a program's tiles, its warps and its stages
    flags: all other constants and dtypes, and whether sizes are 0, 1 or multiples of 16
    """

    capability: int
    launch: Launch
    types: str
    tile: str
    flags: str


def package_kernels() -> dict[str, Any]:
    """All kernels of the package by name. A kernel is a decorated function named `…_kernel`."""
    modules = [import_module(found.name) for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and not inspect.isfunction(value)
    }


def variants(capability: int, amd: str = "") -> list[Variant]:
    """Return what has to be compiled for GPUs of this compute capability: each flag with each tile of its dtypes.

    amd: the architecture of a GPU of AMD instead, which takes the tiles of the capability

    Call it in a process of its own: from then on, PyTorch takes tensors on the device "meta" for tensors on a GPU.

    Raises RuntimeError if a kernel of the package has no launch.
    """
    found: dict[tuple[str, str, str], dict[frozenset[str], Launch]] = {}

    def record(kernel: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        types, tile, flags = _described(kernel, arguments, options)
        launches = found.setdefault((kernel.__name__, types, tile), {})
        if flags not in launches:
            launches[flags] = Launch(kernel.fn.__module__, kernel.__name__, _without_tensors(arguments), options)

    gpu = SimpleNamespace(multi_processor_count=132, major=capability // 10, minor=capability % 10)
    torch.version.hip = amd or None
    torch.Tensor.is_cuda = property(lambda tensor: tensor.is_meta)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device: gpu  # type: ignore[assignment, misc]
    run, JITFunction.run = JITFunction.run, record  # type: ignore[method-assign, assignment]
    try:
        _launch_all()
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
    check_coverage({name for name, *_ in found}, capability)
    return [
        Variant(capability, launches[flags], types, tile, " ".join(sorted(flags)))
        for (_, types, tile), launches in found.items()
        for flags in _cover(list(launches))
    ]


def _cover(sets: list[frozenset[str]]) -> list[frozenset[str]]:
    """Choose sets that have all elements together. Each choice is the set with the most missing elements."""
    missing = frozenset[str]().union(*sets)
    chosen: list[frozenset[str]] = []
    while missing or not chosen:
        chosen.append(max(sets, key=lambda flags: len(flags & missing)))
        missing -= chosen[-1]
    return chosen


def check_coverage(launched: set[str], capability: int) -> None:
    """Check that each kernel was launched that this GPU and this version of Triton use.

    Raises RuntimeError that names the kernels without a launch.
    """
    missing = set(package_kernels()) - launched
    if capability < 90 or not on_hopper(_empty(1)):
        missing = {name for name in missing if "hopper" not in name}
    if capability < 90:
        missing -= {"mlp_forward_kernel", "mlp_backward_kernel"}
        missing = {name for name in missing if not name.startswith("global_tokens")}
    if missing:
        raise RuntimeError(f"no launch reaches {', '.join(sorted(missing))}; add one to {__name__}")


def _described(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> tuple[str, str, frozenset[str]]:
    """The types, the tile and the flags of a launch, see `Variant`."""
    values = {**dict(zip((p.name for p in kernel.params), arguments)), **options}  # noqa: B905 - constants follow
    unspecialized = {p.name for p in kernel.params if p.do_not_specialize and not p.is_constexpr}
    types, tile, flags, numbers = [], [], [], []
    for name, value in values.items():
        first = value[0] if isinstance(value, tuple) else value
        if isinstance(first, Tensor):
            kind = str(first.dtype).removeprefix("torch.")
            if first.is_floating_point():
                numbers.append(first.dtype)
            if name in ("indptr", "indices"):
                types.append(kind)
            flags.append(f"{name}:{kind}")
        elif name == "PRECISION":
            types.append(value)
        elif name.startswith(("BLOCK", "MATRICES", "num_")) or name == "maxnreg":
            tile.append(f"{name}={value}")
        elif isinstance(value, (bool, str)) or name.isupper():
            flags.append(f"{name}={value}")
        elif isinstance(value, int) and name not in unspecialized:
            flags.append(f"{name}={value if value in (0, 1) else '16·n' if value % 16 == 0 else 'n'}")
    narrowest = min(numbers, key=lambda dtype: dtype.itemsize)
    types.insert(0, str(narrowest).removeprefix("torch."))
    return " ".join(dict.fromkeys(types)), " ".join(tile), frozenset(flags)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_tensors, value))
    return MockTensor(value.dtype) if isinstance(value, Tensor) else value


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _launch_all() -> None:
    for dtype, arithmetic in ARITHMETICS:
        torch.backends.cuda.matmul.fp32_precision = arithmetic
        for widths in WIDTHS:
            for k, c in product(widths, widths):
                for meshes in (1, 2):
                    _spectral(dtype, k, c, meshes)
                _layers(dtype, k, c)
            for c in widths:
                _mlp(dtype, c)
                _direct_features(dtype, c)
                for n, conditions, meshes in product((0, 5, 16, 32), BOTH, (1, 2)):
                    _tokens(dtype, c, n, conditions, meshes)
        for c in (2, 3, 5, 8, 16, 32, 64, 260):
            logits, labels = _empty(1000, c, dtype=dtype), _empty(1000, dtype=torch.int64)
            cross_entropy.cross_entropy(logits, labels, -1)
            cross_entropy.cross_entropy_backward(_empty(1000), logits, labels, -1)
        for block, c, rows in product(BLOCKS, (*WIDTHS[0][:4], *WIDTHS[1][:4]), (1000, 1024)):  # up to 128 channels
            _blocks(dtype, block, c, rows)
    for dtype, index, rows, entries in product((x for x, _ in ARITHMETICS), INDICES, (1, 100, 160), (1, 500, 800)):
        for c in (1, 2, 3, 5, *WIDTHS[0], *WIDTHS[1]):
            _sparse(dtype, index, rows, entries, c)
    for index, c, meshes, ordered in product(INDICES, (1, 2, 5, *WIDTHS[0], *WIDTHS[1]), (1, 2), BOTH):
        _implicit(index, c, meshes, ordered)
    for dtype in (torch.float32, torch.float64):
        inverse_factors(_empty(5, 41, 32, dtype=dtype))
    _fronts()
    _adam()


def _spectral(dtype: torch.dtype, k: int, c: int, meshes: int) -> None:
    ptr, d, evals = _empty(meshes + 1, dtype=torch.int64), _empty(meshes, k, c), _empty(meshes, k)
    time, a = _empty(c), _empty(c, c)
    for rows in ROWS:
        x, evecs = _empty(rows, c, dtype=dtype), _empty(rows, k, dtype=dtype)
        for scale in (_empty(rows), None):
            spans = spectral.project_spans(x, evecs, scale, ptr)
            spectral.sum_and_diffuse(*spans, ptr, evals, time)
            for added in (None, x):
                spectral.evaluate(d, evecs, scale, ptr, added=added)
    gradient_evecs = _empty(2, len(x), k, dtype=dtype)
    spectral.diffuse(d, evals, time)
    spectral.diffuse_backward(d, d, evals, time)
    for a_im, swapped, with_values in product((a, None), BOTH, BOTH):
        if swapped and a_im is None:
            continue
        own = evecs if with_values else None
        table = coefficients.table(d, a, a_im, evecs)
        gradient_features.forward(table, own, gradient_evecs, ptr, swapped=swapped)
        unsummed = Unsummed(_empty(1, 3, c), _empty(c))
        sums = gradient_features.backward(
            x, table, gradient_evecs, ptr,
            swapped=swapped, values_grad=x if with_values else None, evecs=own, unsummed=unsummed,
        )  # fmt: skip
        for diffused in ((d, evals, time), None):
            coefficients.backward(sums, d, a, a_im, diffused)


def _layers(dtype: torch.dtype, c: int, h: int) -> None:
    """Layers of an MLP from c to h channels, one kernel for each."""
    bias, seed = _empty(h), _empty(2).long()
    for rows, parts in product((50_000, 100_000), (1, 2, 3)):
        x, y = _empty(rows, c, dtype=dtype), _empty(rows, h, dtype=dtype)
        weight, *_ = operands([_empty(h, parts * c)], dtype, dot_precision(x))
        for dropout, own, added in product((0.0, 0.5), (bias, None), (y, None)):
            some_seed = seed if dropout else None
            linear.linear([x] * parts, weight, own, activation=True, dropout=dropout, seed=some_seed, residual=added)
            linear.linear([x] * parts, weight, own, residual=added)
        for added in (x, None):
            linear.inputs_backward(y, weight, parts, added)
        weight_gradients([x] * parts, [], [y])
        weight_gradients([x] * parts, [y, y], [y, y, y])
    weight, *_ = operands([_empty(h, c)], dtype, dot_precision(x))
    linear.linear_backward(y, weight, hidden=x, dropout=0.5)


def _mlp(dtype: torch.dtype, c: int) -> None:
    """An MLP of three layers of c channels."""
    x, ptr = _empty(50_000, c, dtype=dtype), _empty(3, dtype=torch.int64)
    for parts in (1, 2, 3):
        matrices = [_empty(c, parts * c), _empty(c, c), _empty(c, c)]
        weights = operands(matrices, dtype, dot_precision(x))
        for dropout, biases, added, keep in product((0.0, 0.5), ([_empty(c)] * 3, []), (x, None), BOTH):
            seeds = _empty(2, 2).long() if dropout else None
            _, *kept = mlp.forward([x] * parts, weights, biases, added, dropout, seeds, keep)
        for skip, need_inputs in product(BOTH, BOTH):
            mlp.backward(x, [x] * parts, weights, kept, skip, 0.5, need_inputs)
        weight_gradients([x] * parts, [x, x], [x, x, x], projection=Projection(x, x, ptr))


def _tokens(dtype: torch.dtype, c: int, n: int, conditions: bool, meshes: int) -> None:
    x, mass, ptr = _empty(50_000, c, dtype=dtype), _empty(50_000), _empty(meshes + 1, dtype=torch.int64)
    if not (global_tokens.fits(x, n) and (n or conditions)):
        return
    tokens = _empty(n, c), _empty(n), _empty(3 * c, c), _empty(3 * c), _empty(c, c)
    layers, coefficients = Parameters(*tokens) if n else None, _empty(meshes, 2 * c) if conditions else None
    _, results = global_tokens.forward(x, mass, ptr, coefficients, layers)
    global_tokens.backward(x, x, mass, ptr, coefficients, layers, results)


def _direct_features(dtype: torch.dtype, c: int) -> None:
    x, a = _empty(50_000, c, dtype=dtype), _empty(c, c, dtype=dtype)
    for gradients in (_empty(2, 50_000, c, dtype=dtype), _empty(2, 50_000, c)):
        for a_im, swapped in ((a, False), (a, True), (None, False)):
            direct_features.forward(gradients, a, a_im, swapped)
            direct_features.pointwise_backward(x, gradients, a, a_im, swapped)


def _sparse(dtype: torch.dtype, index: torch.dtype, rows: int, entries: int, c: int) -> None:
    def arrays(pieces: int, ordered: int, by_length: int) -> CsrArrays:
        long_pieces = _empty(pieces, 4, dtype=torch.int64)
        sizes = (rows + 1, entries, ordered, by_length)
        indptr, indices, row_order, order = (_empty(n, dtype=index) for n in sizes)
        return CsrArrays(indptr, indices, long_pieces, row_order, order)

    order = _empty(entries, dtype=torch.int64)
    for csr in (arrays(0, 0, 0), arrays(3, rows, 0), arrays(16, 0, rows)):
        for sets, shared in product((1, 2, 3), BOTH):
            values, x = _empty(sets, entries, dtype=dtype), _empty(1 if shared else sets, rows, c, dtype=dtype)
            for reduce, own in product(BOTH, (order, None)):
                spmm_kernels.spmm(csr, values, x, reduce, own)
            for a, b in ((x, x[:1]), (x[:1], x), (x, x)):
                spmm_kernels.sddmm(csr, a, b)
        if c == 1:
            scores = _empty(2, entries, dtype=dtype)
            for masks in (0, 1, 2):
                mask = _empty(masks, entries, dtype=torch.bool) if masks else None
                softmax_kernels.softmax(csr, scores, mask, 0.5)
            softmax_kernels.softmax_backward(csr, scores, scores, 0.5)


def _implicit(index: torch.dtype, c: int, meshes: int, ordered: bool) -> None:
    rows, entries = 1000, 7000
    indptr, indices, order = (_empty(n, dtype=index) for n in (rows + 1, entries, rows if ordered else 0))
    csr = CsrArrays(indptr, indices, _empty(0, 4, dtype=torch.int64), order, indices[:0])
    system = System(csr, _empty(entries), _empty(rows), _empty(rows), _empty(c), _empty(meshes + 1, dtype=torch.int64))
    u, bound = _empty(rows, c), _empty(meshes, c)
    iteration(system, u, u, u, bound)(bound)


def _fronts() -> None:
    numbers, sizes = _empty(5, 20, dtype=torch.int32), _empty(5, dtype=torch.int32)
    matrices, rows = _empty(5, 20, 20, dtype=torch.float64), _empty(2, 5, 40, dtype=torch.int32)
    level = FrontLevel(numbers, numbers, sizes, sizes, rows, matrices, matrices)
    right = _empty(100, 8, dtype=torch.float64)
    own, _ = fronts.forward(level, right, right)
    fronts.backward(level, own, right)


def _adam() -> None:
    tensors = [_empty(size) for size in (1, 1000, *[1600] * 40)]
    for averages, decay, decoupled in product((tensors, None), (0.0, 0.1), BOTH):
        given = AdamTensors(tensors, tensors, tensors, tensors, [_empty(1)] * len(tensors), averages)
        adam.adam(given, _empty(1), AdamOptions((0.9, 0.999), 1e-8, decay, decoupled, 0.99))


def _blocks(dtype: torch.dtype, block: int, c: int, rows: int) -> None:
    heads, count = 2, 5
    indptr, indices = (_empty(n, dtype=torch.int64) for n in (heads * -(-rows // block) + 1, count))
    values, x = _empty(1, count, block, block, dtype=dtype), _empty(1, heads, rows, c, dtype=dtype)
    keys, bias, sums = _empty(1, rows, dtype=torch.bool), _empty(count, block, block), _empty(1, heads, rows)
    mask = _empty(count, block, block, dtype=torch.bool)
    block_sparse.sdd(indptr, indices, x, x, block)
    for order in (None, indices):
        block_sparse.dsd(indptr, indices, values, x, rows, order)
    for own_bias, own_keys, own_mask in product((bias, None), (keys, None), (mask, None)):
        block_sparse.softmax(indptr, indices, values, own_bias, own_keys, own_mask, 0.5, rows, rows)
    block_sparse.softmax_backward(indptr, values, values, 0.5)
    arrays = BlockArrays(indptr, indices, indptr, indices, indices)
    for own_keys, own_mask in product((keys, None), (mask, None)):
        inputs = AttentionInputs(x, x, x, own_keys, own_mask, 0.5, block)
        attention_kernels.attention(arrays, inputs)
        attention_kernels.attention_backward(arrays, inputs, x, sums, x)
