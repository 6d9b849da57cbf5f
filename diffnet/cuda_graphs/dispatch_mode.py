"""Modes that see each operation of PyTorch."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode whose first operation doesn't import PyTorch's compiler, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch wraps `__torch_dispatch__` so that the compiler leaves it alone
