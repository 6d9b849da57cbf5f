"""Sparse Cholesky factors on a GPU by NVIDIA's cuDSS, where that and nvmath-python are installed (extras cu12, cu13).

Its solutions for several right sides differ by rounding from call to call; it has no mode in which they don't.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import threading
import weakref
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

_THREADING_LAYER = "libcudss_mtlayer_gomp.so.0"


class CudssFactor:
    """The factor of a symmetric positive definite matrix.

    matrix: (V, V) float64, count: of the vectors that are solved for together

    It is ordered by nested dissection on the CPU, in as many threads as PyTorch may use, and all else is done on the
    device. Raises ArithmeticError where the matrix isn't positive definite.
    """

    def __init__(self, matrix: scipy.sparse.csr_matrix, count: int, device: torch.device) -> None:
        lower = scipy.sparse.tril(matrix, format="csr")
        indptr, indices, values = (torch.from_numpy(a).to(device) for a in (lower.indptr, lower.indices, lower.data))
        left = torch.sparse_csr_tensor(indptr, indices, values, matrix.shape, check_invariants=False)
        self.right = torch.zeros(count, matrix.shape[0], dtype=torch.float64, device=device)
        self.solver = _direct_solver(left, self.right.mT)
        weakref.finalize(self, self.solver.free)
        self.solver.plan()
        self.solver.factorize()
        pivot = _failed_pivot(self.solver)
        if pivot != 0:
            raise ArithmeticError(f"Cholesky factorization failed at pivot {pivot}")

    def solve(self, rows: Tensor) -> Tensor:
        """The solutions for right sides (any number, V), as rows."""
        _set_up_thread(self.right.device)
        solutions = []
        for part in torch.split(rows, len(self.right)):
            self.right[: len(part)] = part
            solutions.append(self.solver.solve().mT[: len(part)])
        return solutions[0] if len(solutions) == 1 else torch.cat(solutions)


def is_chosen(device: torch.device) -> bool:
    """Where it is installed, unless `torch.use_deterministic_algorithms` asks for the same result in every run."""
    return device.type == "cuda" and _is_installed() and not torch.are_deterministic_algorithms_enabled()


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("nvmath") is not None and _distribution() is not None


@functools.cache
def _distribution() -> importlib.metadata.Distribution | None:
    """cuDSS for PyTorch's version of CUDA."""
    cuda = str(torch.version.cuda).split(".")[0]
    try:
        return importlib.metadata.distribution(f"nvidia-cudss-cu{cuda}")
    except importlib.metadata.PackageNotFoundError:
        return None


def _direct_solver(left: Tensor, right: Tensor) -> Any:
    from nvmath.sparse.advanced import (
        DirectSolver,
        DirectSolverMatrixType,
        DirectSolverMatrixViewType,
        DirectSolverOptions,
    )

    threads = torch.get_num_threads()
    layer = _threading_layer() if threads > 1 else None
    options = DirectSolverOptions(
        sparse_system_type=DirectSolverMatrixType.SPD,
        sparse_system_view=DirectSolverMatrixViewType.LOWER,
        multithreading_lib=layer,
        logger=_logger(),
    )
    solver = DirectSolver(left, right, options=options)
    if layer is not None:
        solver.plan_config.host_nthreads = threads
    return solver


_thread = threading.local()


def _set_up_thread(device: torch.device) -> None:
    """As making a solver does, for threads that use one made in another."""
    if device.type == "cuda" and getattr(_thread, "device", None) != device:
        from cuda.core import Device

        Device(device.index).set_current()
        _thread.device = device


def _failed_pivot(solver: Any) -> int:
    """0 where there is none. What `factorize` returns tells it only in the thread that has imported nvmath."""
    from nvmath.bindings import cudss

    info = np.zeros(1, cudss.get_data_param_dtype(cudss.DataParam.INFO))
    written = np.zeros(1, np.uint64)
    arguments = (solver.handle, solver.data_ptr, cudss.DataParam.INFO)
    cudss.data_get(*arguments, info.ctypes.data, info.nbytes, written.ctypes.data)
    return int(info[0])


@functools.cache
def _threading_layer() -> str | None:
    """What cuDSS starts threads by, which is installed with it."""
    distribution = _distribution()
    files = [] if distribution is None else distribution.files or []
    return next((str(file.locate()) for file in files if file.name == _THREADING_LAYER), None)


@functools.cache
def _logger() -> logging.Logger:
    """Errors only: warnings tell of threads that aren't used, which are those of other meshes."""
    logger = logging.getLogger("diffnet.cudss")
    logger.setLevel(logging.ERROR)
    return logger
