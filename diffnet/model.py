"""The whole network."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from diffnet.arguments import check_conditions, check_features, in_features_dtype, is_plain, refuses_fields
from diffnet.block import ORIGINAL_NAMES, BlockDetails, BlockOptions, DiffusionNetBlock, GradientMode
from diffnet.checkpoints.files import Activation, log_softmax
from diffnet.geometry import Operators
from diffnet.geometry.batches.functional import check_operators
from diffnet.geometry.device import existing_device
from diffnet.geometry.errors import OptionError, refuses
from diffnet.geometry.store.transfer import aligned
from diffnet.modulation import Modulation
from diffnet.ops import Backend, segment_mean
from diffnet.ops.common.precision import compute_dtype
from diffnet.ops.mlp.op import NOTHING, Shared, mlp_with
from diffnet.options import Architecture, DiffusionMode, InitialTimes, MLPNorm, about, takes
from diffnet.pair_attention import PairAttention
from diffnet.shared_launches import shared_launches
from diffnet.spatial_gradient_features import Rotation
from diffnet.vector_outputs import VectorOutputs

OutputsAt: TypeAlias = Literal["vertices", "faces", "edges", "global_mean"]
Outputs: TypeAlias = Tensor | tuple[Tensor, ...]
PLACES: tuple[OutputsAt, ...] = get_args(OutputsAt)  # the order of outputs at several


@dataclass(frozen=True)
class NetworkOptions(BlockDetails, Architecture):
    """The arguments of `DiffusionNet`."""

    in_channels: int = field(metadata=about("C_in.", least=1))
    out_channels: int = field(metadata=about("C_out.", least=1))
    outputs_at: OutputsAt | tuple[OutputsAt, ...] = field(
        default="vertices",
        kw_only=True,
        metadata=about(
            "vertices; faces or edges, the means over corners or ends; or global_mean, one output per mesh, weighted "
            "by vertex areas. Or one of these for each of the C_out channels: the network then returns a tuple of "
            "tensors, for vertices, faces, edges and meshes in this order, with the channels of each.",
        ),
    )
    vectors: int = field(
        default=0,
        kw_only=True,
        metadata=about(
            "The first 3 · vectors outputs are vectors that turn with the mesh, see `TangentVectors`. With "
            "`gradient_rotation=False`, they also mirror with it.",
            least=0,
        ),
    )
    condition_channels: int = field(
        default=0,
        kw_only=True,
        metadata=about("Numbers in the conditions of a mesh, such as a speed or a time, or 0.", least=0),
    )
    pair_attention: int = field(
        default=0,
        kw_only=True,
        metadata=about(
            "Layers of attention in pairs of meshes, one before each of the last blocks, see `PairAttention`.", least=0
        ),
    )
    last_activation: Activation | None = field(
        default=None, kw_only=True, metadata=about("Applied to the outputs, for example `torch.sigmoid`.")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at = tuple(self.outputs_at) if isinstance(self.outputs_at, list) else self.outputs_at  # a file has a list
        object.__setattr__(self, "outputs_at", at)
        is_right = len(at) == self.out_channels and {*at} <= {*PLACES} if isinstance(at, tuple) else at in PLACES
        if not is_right:
            each = f" for each of {self.out_channels} channels" if isinstance(at, tuple) else ""
            raise OptionError(f"outputs_at should be one of {', '.join(PLACES)}{each}, got {at!r:.200}")
        if self.pair_attention > self.blocks:
            raise ValueError(f"pair_attention should be at most {self.blocks}, got {self.pair_attention}")
        if self.last_activation is not None and not callable(self.last_activation):
            raise TypeError(
                f"last_activation should be a function of a tensor, got {self.last_activation!r}; "
                "write for example torch.sigmoid"
            )


class DiffusionNet(nn.Module):
    """DiffusionNet on packed ragged batches (Sharp et al. 2022, https://arxiv.org/abs/2012.00888).

    Its arguments are the fields of `NetworkOptions`; `help(DiffusionNet)` explains each. `DiffusionNetBlock` says more
    about the options of blocks. The arguments are attributes of the network, except `blocks`, which is the list of the
    blocks. `metadata` is a dictionary of values that belong to the network; `save` and `load` keep it. Set
    `recompute_activations = True` to train on meshes of millions of vertices with less memory: of each block, only the
    input is kept for the backward pass, which computes the block again. Results are the same.

    Raises ValueError for an unknown option, TypeError for the names that the original implementation gives arguments.

    >>> import torch, trimesh
    >>> from diffnet import DiffusionNet, precompute
    >>> mesh = trimesh.creation.icosphere(1)
    >>> operators = precompute(mesh, k=8)
    >>> model = DiffusionNet(3, 5, width=16, blocks=2, outputs_at="faces")
    >>> model(torch.from_numpy(mesh.vertices).float(), operators).shape
    torch.Size([80, 5])
    """

    outputs_at: OutputsAt | tuple[OutputsAt, ...]
    last_activation: Activation | None
    mlp_hidden: list[int]
    gradient_features: bool
    gradient_rotation: Rotation
    gradient: GradientMode
    backend: Backend
    diffusion: DiffusionMode
    initial_times: InitialTimes
    mlp_norm: MLPNorm
    attention_heads: int
    global_tokens: int = 0  # of the class, because pickles of older versions lack it
    condition_channels: int = 0
    vectors: int = 0
    pair_attention: int = 0
    dropout: float
    recompute_activations: bool = False

    @refuses(C_in="in_channels", C_out="out_channels", C_width="width", N_block="blocks", **ORIGINAL_NAMES)
    @takes(NetworkOptions)
    def __init__(self, options: NetworkOptions) -> None:
        super().__init__()
        o, width = options, options.width
        arguments = {f.name: getattr(o, f.name) for f in fields(o)}
        self.first = nn.Linear(o.in_channels, width)
        of_block = {f.name: arguments[f.name] for f in fields(BlockOptions) if f.name != "channels"}
        # Tokens of all blocks take four times as long and lower errors by 7 % (docs/measurements.md).
        tokens = [o.global_tokens if i == o.blocks // 2 else 0 for i in range(o.blocks)]
        self.blocks = nn.ModuleList(DiffusionNetBlock(width, **of_block | {"global_tokens": n}) for n in tokens)
        if o.condition_channels:
            self.modulation = Modulation(width, o.condition_channels, o.blocks)
        if o.pair_attention:
            self.pairs = nn.ModuleList(PairAttention(width) for _ in range(o.pair_attention))
        self.last: nn.Linear | VectorOutputs = (
            VectorOutputs(width, o.out_channels, o.vectors, o.backend)
            if o.vectors
            else nn.Linear(width, o.out_channels)
        )
        self._built = {name: arguments.pop(name) for name in ("in_channels", "out_channels", "width")}
        del arguments["blocks"]
        arguments["mlp_hidden"] = [int(w) for w in ((width, width) if o.mlp_hidden is None else o.mlp_hidden)]
        for name, value in arguments.items():
            setattr(self, name, value)
        self.metadata: dict[str, Any] = {}

    @property
    def in_channels(self) -> int:
        """C_in. If another first layer has no `in_features`, it is the number that the network was built with."""
        return self._channels("in_channels", self.first, "in_features")

    @property
    def out_channels(self) -> int:
        """C_out. If another last layer has no `out_features`, it is the number that the network was built with."""
        return self._channels("out_channels", self.last, "out_features")

    @property
    def width(self) -> int:
        """The channels inside the network."""
        return self._channels("width", self.first, "out_features")

    def _channels(self, name: str, layer: nn.Module, attribute: str) -> int:
        channels = getattr(layer, attribute, None)
        return self._built[name] if channels is None else int(channels)

    @property
    def architecture(self) -> dict[str, Any]:
        """The arguments that build this network, `DiffusionNet(**model.architecture)`, as a new dictionary.

        Each is also an attribute of the network, except the number of blocks, `len(model.blocks)`.

        >>> DiffusionNet(3, 8, width=64).architecture["width"]
        64
        """
        names = inspect.signature(NetworkOptions).parameters
        return {name: len(self.blocks) if name == "blocks" else getattr(self, name) for name in names}

    @refuses_fields
    def forward(self, features: Tensor, operators: Operators, conditions: Tensor | None = None) -> Outputs:
        """features (V, C_in), packed like the operators → (V, C_out), (F, C_out), (E, C_out) or (B, C_out)

        With several `outputs_at`, it is a tuple of such tensors, each with its own channels.

        conditions: (B, condition_channels), a row for each mesh, if the network has such channels

        Raises TypeError if features or conditions are no floating-point tensor. Raises ValueError if they don't fit the
        operators or the network, for spectral diffusion without eigenpairs, and for outputs at faces or edges without
        faces.
        """
        check_operators(operators)
        check_features(features, operators, self.first)
        check_conditions(conditions, operators, self.condition_channels)
        at = (self.outputs_at,) if isinstance(self.outputs_at, str) else self.outputs_at
        of_faces = [place for place in at if place in ("faces", "edges")]
        if of_faces and operators.faces.shape[0] == 0:
            raise ValueError(
                f'outputs_at="{of_faces[0]}" needs faces, but the operators are of point clouds; '
                'write outputs_at="vertices" or outputs_at="global_mean"'
            )
        x = aligned(features)
        further = () if conditions is None else (conditions,)
        layers = [self.first, *self.blocks, self.last]
        first, *shared, last = shared_launches(self, layers, self.backend, x, operators, *further)
        x = self._linear(self.first, x, **first)
        coefficients = self.modulation(conditions, operators) if further else ()
        # The operators as all blocks take them. On a GPU they are computed in the first step only.
        on_basis = any(isinstance(block, DiffusionNetBlock) and block.on_basis(operators) for block in self.blocks)
        prepared = (operators.prepared if on_basis else operators.with_basis_dtype)(compute_dtype(x))
        for number, (block, more) in enumerate(zip(self.blocks, shared, strict=True), self.pair_attention):
            if number >= len(self.blocks):
                x = self.pairs[number - len(self.blocks)](x, operators)
            x = self._call(block, x, prepared, *coefficients[number : number + 1], **more)
        is_vector = isinstance(self.last, VectorOutputs)
        x = self.last(x, operators) if is_vector else self._linear(self.last, x, **last)
        if isinstance(self.outputs_at, str):
            return self._outputs(x, operators, self.outputs_at)
        channels = x.unbind(1)
        parts = {place: [channels[i] for i, each in enumerate(at) if each == place] for place in PLACES}
        return tuple(self._outputs(torch.stack(part, 1), operators, place) for place, part in parts.items() if part)

    def _linear(self, layer: nn.Module, x: Tensor, shared: Shared = NOTHING) -> Tensor:
        """Compute a layer. A plain one is an MLP of one layer."""
        if not is_plain(layer, nn.Linear):
            return layer(x)
        biases = None if layer.bias is None else [layer.bias]
        return mlp_with([x], [layer.weight], biases, backend=self.backend, shared=shared)

    def _call(self, block: nn.Module, x: Tensor, operators: Operators, *further: Tensor, **shared: Shared) -> Tensor:
        """Call a block. With `recompute_activations`, only its input is kept for the backward pass."""
        call: Callable[..., Tensor] = block
        if self.recompute_activations and torch.is_grad_enabled():
            # A CUDA graph can't record that a random state is restored.
            draws = not isinstance(block, DiffusionNetBlock) or block.draws_numbers()
            call = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=draws)
        return call(x, operators, *further, **shared)

    def _outputs(self, x: Tensor, operators: Operators, at: OutputsAt) -> Tensor:
        """Average the values (V, C) at the vertices as `at` asks, and apply the last activation."""
        # The backward of `F.embedding` adds up in a fixed order. That of x[index] doesn't.
        if at == "faces":
            x = F.embedding(operators.faces, x).mean(1)
        elif at == "edges":
            x = F.embedding(operators.edges, x).mean(1)
        elif at == "global_mean":
            means = segment_mean(x, operators.mass, operators.ptr, operators.lengths, self.backend)
            x = in_features_dtype(means, x)
        return x if self.last_activation is None else self.last_activation(x)

    def save(self, path: str | os.PathLike[str], /, **metadata: Any) -> None:
        """Write the network to one file in safetensors format, which `DiffusionNet.load` reads.

        path: by custom it ends in .safetensors. An old file stays until the new one is complete.
        metadata: anything that JSON can hold, to be found in `metadata` of the loaded network. Tuples become lists, and
            keys of dictionaries become text. It is added to `model.metadata`. `diffnet predict` needs `features`, `k`
            and `normalize`, and uses `label_names`.

        The file holds the weights in their dtype, and in its header the architecture and the metadata as JSON. It does
        not hold an optimizer, hooks, or the code of a `last_activation` other than `log_softmax`, `torch.sigmoid` and
        `torch.tanh`; pass that function to `load`. Networks on a GPU and under `graphed` are saved alike.

        Raises TypeError, which names the key, for metadata that JSON can't hold. Raises ValueError for a network on the
        meta device, and for a network with other layers than `DiffusionNet(**model.architecture)` has. Raises
        CheckpointError, which names a weight, for weights that `load` refuses because they are NaN or infinite.

        >>> model = DiffusionNet(16, 8, width=64, blocks=2)
        >>> model.save("parts.safetensors", features="hks", k=128, normalize=True, label_names=["a", "b"])
        >>> loaded = DiffusionNet.load("parts.safetensors")
        >>> loaded.width, loaded.metadata["features"]
        (64, 'hks')
        """
        from diffnet.checkpoints.files import difference
        from diffnet.checkpoints.safetensors_file import write_network
        from diffnet.cuda_graphs.graphed_class import plain_class

        weights = self.state_dict()
        if any(isinstance(weight, Tensor) and weight.is_meta for weight in weights.values()):
            raise ValueError("a network on the meta device has no weights to save")
        with torch.device("meta"):
            built = DiffusionNet(**self.architecture)
        changed = difference(weights, built.state_dict())
        if changed is None and plain_class(self) is DiffusionNet:  # a subclass may build other modules in the same way
            types = {name: type(module) for name, module in built.named_modules()}
            modules = [(name, type(module)) for name, module in self.named_modules() if name]
            others = [f"{name} is {cls.__name__}" for name, cls in modules if cls is not types.get(name)]
            changed = f"has other modules: {', '.join(others[:3])}" if others else None
        if changed is not None:
            raise ValueError(
                f"the network is not the one of DiffusionNet(**model.architecture), it {changed}; "
                "write torch.save(model.state_dict(), path)"
            )
        write_network(path, weights, self.architecture, self.metadata | metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu", **options: Any) -> DiffusionNet:
        """Load a network that `save` or `diffnet train` (last.pt, best.pt) wrote. It is in eval mode.

        device: where to put the network.
        options: arguments of `DiffusionNet` that replace those in the file, such as `outputs_at="faces"`,
            `last_activation=None` or `backend="torch"`.

        `metadata` of the network is what was given to `save`. For a checkpoint of `diffnet train`, it holds
        `label_names`, the preprocessing (`features`, `k`, `normalize`, …) and the other options of the run.

        Reading a file runs no code from it. Raises CheckpointError, a ValueError, if the file is damaged, is none of
        these, or contradicts the options. Raises TypeError for an option that `DiffusionNet` does not have, and
        OptionError, a ValueError, for a device that is not available.
        """
        from diffnet.checkpoints.network import read_network, restore

        unknown = options.keys() - inspect.signature(NetworkOptions).parameters.keys()
        if unknown:
            raise TypeError(f"DiffusionNet has no argument {', '.join(sorted(unknown))}")
        place = existing_device(device)
        weights, architecture, metadata = read_network(path)
        model = restore(cls, path, weights, architecture | options)
        model.metadata = metadata
        return model.to(place)

    def save_pretrained(self, folder: str | os.PathLike[str], /, **metadata: Any) -> None:
        """Write a folder with the network, to share it: model.safetensors, config.json and a model card, README.md.

        folder: made if it is missing. An existing README.md stays. `huggingface_hub.upload_folder` uploads a folder.
        metadata: see `save`, which writes model.safetensors. `data_license` is required, here or in `model.metadata`.
            The card also shows `task`, `features`, `k`, `normalize`, `label_names`, `data`, `license` and what begins
            with `test_`. A network from a checkpoint of `diffnet train` has the first five.

        Raises ValueError without `data_license`, OptionError if the folder can't be made, and the errors of `save`.

        >>> model = DiffusionNet(16, 8, width=64, blocks=2)
        >>> model.save_pretrained("parts", features="hks", k=128, normalize=True, data="scans", data_license="CC0-1.0")
        >>> DiffusionNet.from_pretrained("parts").metadata["data_license"]
        'CC0-1.0'
        """
        from diffnet.checkpoints.pretrained import check_license, write_description
        from diffnet.geometry.files import make_folder
        from diffnet.pretrained import NETWORK_FILE

        check_license(self.metadata | metadata)
        make_folder(folder)
        self.save(Path(folder) / NETWORK_FILE, **metadata)
        write_description(Path(folder), sum(parameter.numel() for parameter in self.parameters()))

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | os.PathLike[str],
        *,
        revision: str | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> DiffusionNet:
        """Load a trained network in eval mode: a built-in one, or one that `save_pretrained` or a run wrote.

        name_or_folder: a folder, the name of a built-in network, or the name of a repository on the Hugging Face Hub,
            such as "user/name". Of the folder of a run, last.pt is read. Only the Hub needs a connection and
            ``pip install 'diffnet[hub]'``; a downloaded file stays in its cache.
        revision: a branch, tag or commit of the repository
        device, options: see `load`

        Only one file is read, and no code is run. Raises CheckpointError if there is no such network,
        ImportError if huggingface_hub is needed and not installed, and the errors of `load`.
        """
        from diffnet.checkpoints.pretrained import network_file

        return cls.load(network_file(name_or_folder, revision), device=device, **options)

    @classmethod
    def from_original_checkpoint(
        cls,
        path: str | os.PathLike[str],
        outputs_at: OutputsAt = "vertices",
        last_activation: Activation | Literal["auto"] | None = "auto",
    ) -> DiffusionNet:
        """Load a checkpoint of the original implementation, on the CPU and in eval mode.

        Three kinds are known: "original" is segmentation and classification. "original correspondence" is its
        functional maps, with the prefix `feature_extractor.`. "unsupervised correspondence" is the line of Cao et al.
        2023, `{"networks": {"feature_extractor": …}}`, whose gradient features are `gradient_rotation="swapped"`.
        Further prefixes, such as `module.`, and dictionaries around the weights are allowed.

        `metadata` of the network names the `kind`. It also holds what a checkpoint doesn't record, as it was for the
        published networks of this kind: `features` ("xyz" for 3 input channels, "hks" for 16, "wks-128" for 128, else
        it is missing), `k`, `normalize` and `operators`. Change it for another network.

        last_activation: "auto" is a log-softmax for the kind "original", as in the published networks, and None for
            features of the other kinds.

        Width, blocks and channels are read off the weights. Only tensors are read (`weights_only`). Raises
        CheckpointError, a ValueError, if the file holds something else.

        Sources: https://github.com/nmwsharp/diffusion-net, and Cao et al. 2023, "Unsupervised Learning of Robust
        Spectral Shape Matching"
        """
        from diffnet.checkpoints.files import read_checkpoint_file

        return cls._from_original(path, read_checkpoint_file(path), outputs_at, last_activation)

    @classmethod
    def from_original_state_dict(
        cls,
        state_dict: Mapping[str, Any],
        outputs_at: OutputsAt = "vertices",
        last_activation: Activation | Literal["auto"] | None = "auto",
    ) -> DiffusionNet:
        """Convert a network of the original implementation that is in memory. The weights are copied to the CPU.

        state_dict: `network.state_dict()`, or other content of a checkpoint

        For the kinds of networks, the other arguments and the errors, see `from_original_checkpoint`.
        """
        return cls._from_original("the state dict", state_dict, outputs_at, last_activation, in_memory=True)

    @classmethod
    def _from_original(
        cls,
        path: str | os.PathLike[str],
        content: Any,
        outputs_at: OutputsAt,
        last_activation: Activation | Literal["auto"] | None,
        *,
        in_memory: bool = False,
    ) -> DiffusionNet:
        from diffnet.checkpoints.network import restore
        from diffnet.checkpoints.original import converted_original, original_metadata

        weights, options, kind = converted_original(path, content, in_memory=in_memory)
        if last_activation == "auto":
            last_activation = log_softmax if kind == "original" else None
        options |= {"outputs_at": outputs_at, "last_activation": last_activation}
        model = restore(cls, path, weights, options)
        model.metadata = original_metadata(kind, model.in_channels)
        return model

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """`load_state_dict` of PyTorch calls this, also if the network is a part of another module."""
        if strict:
            from diffnet.checkpoints.network import check_state_dict

            weights = {name.removeprefix(prefix): state_dict[name] for name in state_dict if name.startswith(prefix)}
            check_state_dict(weights, self.state_dict())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)  # type: ignore[no-untyped-call]
