"""The class of a network whose forward pass runs as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diffnet.cuda_graphs.module_state import GRAPHS


class _Graphed:
    """Base class of the classes with graphs. `plain` is the class without graphs."""

    plain: type[nn.Module]


def plain_class(network: nn.Module) -> type[nn.Module]:
    """The class of a network without graphs."""
    cls = type(network)
    return cls.plain if issubclass(cls, _Graphed) else cls


@functools.cache
def graphed_class(plain: Any) -> Any:
    """A subclass of a class of modules. Its method `forward` calls the object in the attribute `GRAPHS`.

    Copies and pickles have this class, too. An attribute `forward` would be bound to the network, and copies of the
    network would call it.
    """

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        # Replicas of `DataParallel` live for one step.
        state = vars(self)  # a missing attribute of a module takes long to look for
        if torch.compiler.is_compiling() or state.get("_is_replica", False):
            return plain.forward(self, *arguments, **options)
        return state[GRAPHS].of(self)(*arguments, **options)

    def delete(self: nn.Module, name: str) -> None:
        """`del network.forward` turns the graphs off."""
        if name != "forward" or name in vars(self):
            plain.__delattr__(self, name)
            return
        self.__class__ = plain
        del vars(self)[GRAPHS]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        make, arguments, *state = plain.__reduce_ex__(self, protocol)
        # A pickle can only name the class without graphs.
        return (_from_pickle, (make, tuple(plain if a is type(self) else a for a in arguments)), *state)

    members = {"forward": forward, "__delattr__": delete, "__reduce_ex__": reduce, "plain": plain}
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain)(plain.__name__, (plain, _Graphed), members | names)


def _from_pickle(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """Make a network with graphs from a pickle."""
    network = make(*arguments)
    plain: Any = type(network)
    network.__class__ = graphed_class(plain)
    return network
