"""Which modules let rows be added to a batch, and which ones no graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from diffnet.cuda_graphs.graphed_class import plain_class
from diffnet.cuda_graphs.module_state import GRAPHS, MACHINERY

# Modules of PyTorch that compute each row from this row alone.
_BY_ROWS = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.Identity, nn.Dropout, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
)
# Those that do so along a dimension of a row.
_BY_DIMENSION = (nn.Softmax, nn.LogSoftmax, nn.Softmin)
_FUNCTIONS = ("log_softmax", "sigmoid", "tanh", "relu")
# They exchange gradients or weights between processes or devices, by hooks that a graph would not call.
_EXCHANGES = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")

RowWise = Collection[type[nn.Module]]


def reads_other_rows(network: nn.Module, row_wise: RowWise = ()) -> str | None:
    """The class of a module that may compute a row from other rows. None if all compute each row from itself.

    Modules of diffnet exchange rows by the operators alone, in which added rows have no mass and no neighbors. A
    subclass counts as another module, and so does a module with a function of the user among its attributes, such as a
    `last_activation`.

    row_wise: further classes whose modules compute each row from this row alone, as their user declares
    """
    for module in network.modules():
        cls: type[nn.Module] = plain_class(module)
        if cls in row_wise:
            continue
        if not _is_row_wise(module, cls) or not all(map(_is_function_of_rows, _functions(module))):
            return cls.__name__
    return None


def _is_row_wise(module: nn.Module, cls: type[nn.Module]) -> bool:
    if cls in (nn.LayerNorm, nn.RMSNorm):
        return len(module.normalized_shape) == 1  # type: ignore[arg-type]
    if cls in _BY_DIMENSION:
        return module.dim in (-1, 1)
    return cls in _BY_ROWS or cls.__module__.startswith("diffnet.")


def _functions(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The functions among the attributes of a module."""
    return (value for name, value in vars(module).items() if name not in MACHINERY | {GRAPHS} and callable(value))


def _is_function_of_rows(function: Any) -> bool:
    package = (getattr(function, "__module__", None) or "torch").partition(".")[0]  # builtins of PyTorch have None
    return package in ("torch", "diffnet") and getattr(function, "__name__", None) in _FUNCTIONS


def gradient_exchange(modules: nn.Module) -> str | None:
    """The name of a class that exchanges gradients in Python, at any depth. None if there is none."""
    for module in modules.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _EXCHANGES and cls.__module__.startswith("torch."):
                return cls.__name__
    return None
