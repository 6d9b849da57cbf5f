"""The step of an optimizer in a CUDA graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from itertools import chain, count
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from diffnet.ops.adam.reference import AdamOptions, AdamTensors
from diffnet.ops.common.backend import use_kernels
from diffnet.weight_average import WeightAverage

MAX_SETTINGS = 100
# Of a group of parameters: the learning rate, and what schedulers note. A graph bakes in all others.
_FREE = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})


class Adam(torch.optim.Adam):
    """`torch.optim.Adam` without the wrappers by which `torch.compile` recognizes it.

    On their first call, the wrappers import the compiler, which takes 1 to 2 seconds. Nothing here compiles a step.
    """

    add_param_group = unwrap(torch.optim.Adam.add_param_group)
    load_state_dict = unwrap(torch.optim.Adam.load_state_dict)
    state_dict = unwrap(torch.optim.Adam.state_dict)
    step = torch.no_grad()(unwrap(torch.optim.Adam.step))
    zero_grad = unwrap(torch.optim.Adam.zero_grad)


# The optimizers whose step a graph can record, with the function that takes it.
_STEPS: dict[type[torch.optim.Optimizer], Any] = {
    cls: unwrap(cls.step) for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, Adam)
}


class CapturedOptimizer:
    """Takes steps of an optimizer that a CUDA graph can record. The optimizer's groups stay as its user wrote them.

    During a step, learning rates are tensors on the device, and `capturable` is on. Where the user has chosen neither
    `fused` nor `foreach`, one kernel updates all parameters of a group. In graphs of Adam and AdamW, it is a Triton
    kernel, which also updates the average of the weights.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rates: dict[tuple[int, torch.device], Tensor] = {}  # for each group
        self._values: dict[tuple[int, torch.device], float] = {}
        self._options: list[Any] = []
        self._settings: dict[Hashable, tuple[int, list[Any]]] = {}  # the lists keep objects alive, so ids stay theirs
        self._numbers = count()
        self._number = -1
        self._state: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedOptimizer, (self.optimizer,)  # the rest follows from it

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def is_known(self) -> bool:
        """Whether a graph can record the step: that of Adam, AdamW or SGD, which no subclass, hook or wrapper changes.

        The wrapper that a scheduler of learning rates puts around the step changes nothing.
        """
        optimizer: Any = self.optimizer
        step = _STEPS.get(type(optimizer))
        if step is None or unwrap(type(optimizer).step) is not step:
            return False
        changed = vars(optimizer).keys() & {"grad_scale", "found_inf"}
        if changed or unwrap(getattr(optimizer.step, "__func__", optimizer.step)) is not step:
            return False
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        of_all = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
        # Other tensors may be parts of larger ones, as after `fully_shard`.
        return not hooks and not of_all and {*map(type, self.parameters())} <= {Tensor, nn.Parameter}

    def settings(self) -> int:
        """A number for what a graph bakes in: all options but learning rates that are numbers, and the parameters."""
        groups = self.optimizer.param_groups
        now = [v for group in groups for n, v in group.items() if n != "lr" or isinstance(v, Tensor)]
        now += chain.from_iterable(group["params"] for group in groups)
        if len(now) != len(self._options) or not all(map(is_, now, self._options)):
            self._options = now
            options = [(n, v) for group in groups for n, v in group.items() if n not in _FREE]
            options += [("lr", group["lr"]) for group in groups if isinstance(group["lr"], Tensor)]
            key = tuple((name, _entry(value)) for name, value in options)
            if len(self._settings) > MAX_SETTINGS:
                self._settings.clear()
            self._number, _ = self._settings.setdefault(key, (next(self._numbers), now))
        return self._number

    def has_other_state(self) -> bool:
        """Whether tensors of its state have been replaced since `note_state`, as by `load_state_dict`."""
        now = self._members()
        return len(now) < len(self._state) or not all(map(is_, now, self._state))

    def note_state(self) -> None:
        self._state = self._members()

    def _members(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self.optimizer.state.values()))]

    def follow_rates(self, device: torch.device) -> None:
        """Copy learning rates that have changed to the device."""
        for i, group in enumerate(self.optimizer.param_groups):
            rate, key = group["lr"], (i, device)
            if isinstance(rate, Tensor) and rate.device == device:
                continue  # a graph reads this tensor
            value = float(rate)
            if key not in self._rates:
                dtype = torch.float64 if _has_doubles(group) else torch.float32
                self._rates[key] = torch.full((), value, dtype=dtype, device=device)
            elif value != self._values[key]:
                self._rates[key].fill_(value)
            self._values[key] = value

    def step(self, device: torch.device, average: WeightAverage[Any] | None = None, is_recorded: bool = True) -> None:
        """Take a step. The average of the weights gets it, too.

        is_recorded: whether a graph will repeat it. Outside of graphs, PyTorch's fused kernel starts faster.
        """
        self.follow_rates(device)  # nothing to do if it has been called
        averaged: set[Tensor] = set()
        with self._capturable(device):
            for group in self.optimizer.param_groups if is_recorded and self._is_adam() else ():
                averaged |= self._update_adam(group, average)
            self.optimizer.step()  # also without gradients, because schedulers notice the call
        if average is not None:
            average.update(averaged)

    def _is_adam(self) -> bool:
        """Whether the Triton kernel may take the step. Compiling it for a GPU of AMD takes half a minute."""
        return torch.version.hip is None and isinstance(self.optimizer, torch.optim.Adam) and self.is_known()

    def _update_adam(self, group: dict[str, Any], average: WeightAverage[Any] | None) -> set[Tensor]:
        """Update a group by the Triton kernel and take its gradients away, if the kernel suits the group.

        Returns the parameters whose averages have been updated, too.
        """
        has_tensors = any(isinstance(beta, Tensor) for beta in group["betas"])
        if has_tensors or group["amsgrad"] or group["maximize"] or not group["fused"]:
            return set()
        if not use_kernels("auto", group["lr"]):  # a tensor on the device of the step
            return set()
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        parameters, grads, means, squares, _, steps = lists
        optimizer: Any = self.optimizer
        optimizer._init_group(group, *lists)  # makes the state of parameters that have none
        averages = None
        if average is not None and all(p in average.averages for p in parameters):
            averages = [average.averages[p] for p in parameters]
        tensors = AdamTensors(parameters, grads, means, squares, steps, averages)
        used = [group["lr"], *chain.from_iterable(x or () for x in tensors)]
        alike = all(x.dtype == torch.float32 and x.is_contiguous() and x.device == used[0].device for x in used)
        if not parameters or not alike:
            return set()
        from diffnet.ops.adam import kernels

        decay = 0.0 if average is None else average.decay
        decoupled = group["decoupled_weight_decay"]
        options = AdamOptions(group["betas"], group["eps"], group["weight_decay"], decoupled, decay)
        kernels.adam(tensors, group["lr"], options)
        for p in parameters:
            p.grad = None
        return set() if averages is None else set(parameters)

    @contextmanager
    def _capturable(self, device: torch.device) -> Iterator[None]:
        before = []
        for i, group in enumerate(self.optimizer.param_groups):
            changes: dict[str, Any] = {}
            if not (isinstance(group["lr"], Tensor) and group["lr"].device == device):
                changes["lr"] = self._rates[i, device]
            if "capturable" in group and device.type == "cuda":
                changes["capturable"] = True
                self._move_counts(group["params"])
            if self._may_fuse(group):
                changes["fused"] = True
            before.append({name: group[name] for name in changes})
            group.update(changes)
        try:
            yield
        finally:
            for group, options in zip(self.optimizer.param_groups, before, strict=True):
                group.update(options)

    def _may_fuse(self, group: dict[str, Any]) -> bool:
        """Whether one kernel may update all parameters, because the user has chosen no other form."""
        if group.get("fused", False) is not None or group.get("foreach") is not None or group.get("differentiable"):
            return False
        if _has_doubles(group) and group["params"][0].is_cuda:  # fused kernels on a GPU read rates in float32
            return False
        changed = [p for p in group["params"] if p.grad is not None]
        # The kernel of SGD takes momenta of all parameters or of none.
        state_sizes = {len(self.optimizer.state.get(p, ())) for p in changed}
        is_sgd = isinstance(self.optimizer, torch.optim.SGD)
        return all(p.is_floating_point() for p in changed) and not (is_sgd and len(state_sizes) > 1)

    def _move_counts(self, parameters: list[Tensor]) -> None:
        """Move the numbers of steps from the CPU, where optimizers keep them without `capturable`."""
        for p in parameters:
            state = self.optimizer.state.get(p, {})
            steps = state.get("step")
            if isinstance(steps, Tensor) and steps.device != p.device:
                state["step"] = steps.to(p.device, torch.float32)


def _has_doubles(group: dict[str, Any]) -> bool:
    return any(p.dtype == torch.float64 for p in group["params"])


def _entry(value: Any) -> Hashable:
    """An option of a group. Tensors are compared by identity."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_entry, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)
