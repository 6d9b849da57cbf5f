"""What decides a training run; a checkpoint carries it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from diffnet.block import DiffusionMode
from diffnet.data import FeatureKind, Preprocessing
from diffnet.geometry import BasisPrecision, LaplacianKind

Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
Schedule: TypeAlias = Literal["step", "cosine"]
TrainBackend: TypeAlias = Literal["auto", "torch"]


@dataclass(frozen=True)
class TrainOptions:
    """Options of `diffnet train segmentation`; its `--help` explains each.

    rotate: turn xyz features at random in training; None means yes for xyz, and no for descriptors, which don't turn
    """

    features: FeatureKind = "hks"
    k: int = 128
    laplacian: LaplacianKind = "robust"
    basis: BasisPrecision = "float32"
    epochs: int = 100
    width: int = 128
    blocks: int = 4
    diffusion: DiffusionMode = "spectral"
    attention_heads: int = 0
    dropout: float = 0.5
    learning_rate: float = 1e-3
    schedule: Schedule = "step"
    decay_every: int = 50
    batch_meshes: int | None = 1
    batch_vertices: int | None = None
    rotate: bool | None = None
    validation: float = 0.0
    eval_every: int = 5
    precision: Precision = "auto"
    backend: TrainBackend = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "width", "blocks", "decay_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} should be at least 1, got {getattr(self, name)}")
        for name in ("batch_meshes", "batch_vertices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} should be at least 1, got {value}")
        for name in ("dropout", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} should be at least 0 and below 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1e36:  # beyond, Adam's steps don't fit single precision
            raise ValueError(f"learning_rate should be above 0 and below 1e36, got {self.learning_rate}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed should be at least 0 and below 2^63, got {self.seed}")
        for name, choices in (
            ("precision", get_args(Precision)),
            ("backend", get_args(TrainBackend)),
            ("schedule", get_args(Schedule)),
            ("diffusion", get_args(DiffusionMode)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} should be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.attention_heads < 0 or (self.attention_heads > 0 and self.width % self.attention_heads != 0):
            raise ValueError(f"attention_heads should divide the width, {self.width}, got {self.attention_heads}")
        _ = self.preprocessing
        if self.k < 1 and self.diffusion == "spectral":
            raise ValueError(f"k should be at least 1 for spectral diffusion, got {self.k}")
        if self.rotate and self.features != "xyz":
            raise ValueError(f"rotate turns positions, so features should be xyz, got {self.features!r}")

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing(self.k, self.laplacian, self.features, self.basis)

    @property
    def rotates(self) -> bool:
        return self.features == "xyz" if self.rotate is None else self.rotate

    def learning_rate_at(self, epoch: int) -> float:
        """step: halved every `decay_every` epochs; cosine: falling to 0 over the whole run."""
        if self.schedule == "step":
            return self.learning_rate * 0.5 ** (epoch // self.decay_every)
        return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises ValueError for a device that isn't there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device should be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} isn't there: this PyTorch sees no GPU")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} isn't there: the last is cuda:{torch.cuda.device_count() - 1}")
    return device


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """bf16 where asked for, and by default on GPUs that compute it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=matmul_dtype(precision, device) == torch.bfloat16)


def matmul_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """What matrix products take under `autocast`."""
    bf16 = precision == "bf16" or (
        precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return torch.bfloat16 if bf16 else torch.float32
