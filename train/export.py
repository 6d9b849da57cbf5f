"""Networks as files of plain PyTorch operations, which run without diffnet."""

from __future__ import annotations

import copy
import io
import json
import os
import warnings
from typing import Any

import torch
import trimesh
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_symbols

from diffnet import DiffusionNet, Operators, __version__, precompute
from diffnet.arguments import check_conditions
from diffnet.geometry.edges import Edges
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import write_atomically
from diffnet.geometry.operators import blank
from diffnet.ops import Pattern
from diffnet.ops.common.memo import remember

DESCRIPTION = "diffnet.json"  # the name of the text inside the file
MAX_ERROR = 1e-5  # of the largest output
# The inputs of exported networks: the letters are open sizes, and V + 1 is the length of a row pointer.
SHAPES: dict[str, tuple[Any, ...]] = {
    "features": ("V", "C_in"),
    "mass": ("V",),
    "evals": ("K",),
    "evecs": ("V", "K"),
    "gradient_evecs": (2, "V", "K"),
    "faces": ("F", 3),
    "edges": ("E", 2),
    "neighbor_indptr": ("V+1",),
    "neighbor_indices": ("N",),
    "conditions": ("C_cond",),
}


def export_network(network: DiffusionNet, path: str | os.PathLike[str]) -> None:
    """Write a network to a file of `torch.export` with operations of PyTorch only. It runs without diffnet, in float32.

    path: by custom it ends in .pt2

    `torch.export.load(path).module()` takes the tensors of `exported_inputs` as keyword arguments, for one mesh of any
    number of vertices V and eigenpairs K, and returns what the network returns in eval mode. The file is of the CPU;
    `torch.export.passes.move_to_device_pass` moves it. Its text "diffnet.json", see `extra_files` of
    `torch.export.load`, holds the names and shapes of the inputs, and the metadata of the network.

    The outputs are compared with the network's on a mesh. Raises OptionError, a ValueError, if they differ by more than
    1e-5 of the largest, as those of networks with other layers that read the matrices of the operators, for networks
    with `vectors`, attention in pairs or outputs at several places, and for implicit diffusion, whose number of steps
    depends on the values.
    """
    if network.pair_attention:
        raise OptionError("a network with attention in pairs takes two meshes, so it can't be exported")
    if network.diffusion == "implicit":
        raise OptionError(
            "implicit diffusion takes a number of steps that depends on the mesh, so it can't be exported"
        )
    if network.vectors:
        raise OptionError(
            "vectors by directions of the surface read the matrix of gradients, which exported networks don't take; "
            "export a network with --vector-head space"
        )
    network = copy.deepcopy(network).to("cpu", torch.float32).eval()
    operators = precompute(trimesh.creation.icosphere(1), k=8)
    features = torch.randn(operators.num_vertices, network.in_channels, generator=torch.Generator().manual_seed(0))
    conditions = torch.ones(1, network.condition_channels) if network.condition_channels else None
    inputs = exported_inputs(network, features, operators, conditions)
    content = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own code is deprecated
        expected = network(features, operators, conditions)
        program = _exported(network, inputs)
        outputs = program.module()(**inputs)
    error, largest = (float(x.abs().max()) for x in (outputs - expected, expected))
    if not error <= MAX_ERROR * largest:
        raise OptionError(
            f"outputs of the exported network differ by up to {error:.1g} from those of the network, whose largest is "
            f"{largest:.1g}; export a network of other layers with torch.export.export(network, (features, operators))"
        )
    described = {
        "diffnet_version": __version__,
        "inputs": {name: {"shape": SHAPES[name], "dtype": str(x.dtype).split(".")[1]} for name, x in inputs.items()},
        "architecture": {n: v for n, v in network.architecture.items() if n != "last_activation"},
        "metadata": network.metadata,
    }
    torch.export.save(program, content, extra_files={DESCRIPTION: json.dumps(described, ensure_ascii=False)})
    write_atomically(path, content.getvalue())


def exported_inputs(
    network: DiffusionNet, features: Tensor, operators: Operators, conditions: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors that an exported network takes, by name, in the order of `forward`.

    features: (V, C_in)
    operators: of one mesh
    conditions: (1, C_cond), of a network that has them

    | name | shape | in files of |
    |---|---|---|
    | `features` | (V, C_in) | all networks |
    | `mass`, `evals`, `evecs` | (V,), (K,), (V, K) | all networks |
    | `gradient_evecs` | (2, V, K) | all networks |
    | `faces` or `edges` | (F, 3) or (E, 2) int64 | networks with outputs at faces or edges |
    | `neighbor_indptr`, `neighbor_indices` | (V+1,), (N,) int32 | networks with attention; the pattern in CSR form |
    | `conditions` | (C_cond,) | networks with conditions |

    Raises ValueError for operators of several meshes, and for missing conditions, and OptionError for a network with
    outputs at several places.
    """
    if isinstance(network.outputs_at, tuple):
        raise OptionError("an exported network has one tensor of outputs, and this one has outputs at several places")
    if len(operators) != 1:
        raise ValueError(f"an exported network takes one mesh, got operators of {len(operators)}")
    o = operators.to(dtype=torch.float32).with_gradient_evecs()
    assert o.gradient_evecs is not None
    inputs = {"features": features.float(), "mass": o.mass, "evals": o.evals[0], "evecs": o.evecs}
    inputs["gradient_evecs"] = o.gradient_evecs
    if network.outputs_at in ("faces", "edges"):
        inputs[network.outputs_at] = getattr(o, network.outputs_at)
    if network.attention_heads:
        pattern = (o.neighborhood or o.gradient.pattern).with_row_order(None)[0]
        inputs |= {"neighbor_indptr": pattern.indptr, "neighbor_indices": pattern.indices}
    check_conditions(conditions, o, network.condition_channels)
    if conditions is not None:
        inputs["conditions"] = conditions[0].float()
    return inputs


def _exported(network: DiffusionNet, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    sizes = {name: torch.export.Dim(name) for name in ("V", "K", "F", "E", "N")}
    sizes["V+1"] = sizes["V"] + 1  # type: ignore[assignment]
    shapes = {name: {i: sizes[n] for i, n in enumerate(SHAPES[name]) if n in sizes} for name in inputs}
    plain = copy.deepcopy(network)
    for module in plain.modules():
        for option, value in (("backend", "torch"), ("gradient", "spectral")):
            if hasattr(module, option):
                setattr(module, option, value)
    program: torch.export.ExportedProgram = torch.export.export(_Plain(plain), (), inputs, dynamic_shapes=shapes)
    program = program.run_decompositions({torch.ops.aten.repeat_interleave.self_Tensor: _repeated})
    # Sizes that turned out to be equal stay in the list. Reading the file would warn of each.
    values = [node.meta["val"] for node in program.graph.nodes if node.meta.get("val") is not None]
    for symbol in program.range_constraints.keys() - free_symbols(values):
        del program.range_constraints[symbol]
    return program


def _repeated(numbers: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int) -> Tensor:
    """`torch.repeat_interleave` of numbers (N,). ONNX has none with a size of the output."""
    ends = repeats.long().cumsum(0)
    steps = ends.new_zeros(output_size + 1).index_add(0, ends, torch.ones_like(ends))
    return numbers[steps[:-1].cumsum(0)]


class _Plain(nn.Module):
    """A network as a function of tensors, for one mesh."""

    def __init__(self, network: DiffusionNet) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        features: Tensor,
        mass: Tensor,
        evals: Tensor,
        evecs: Tensor,
        gradient_evecs: Tensor,
        faces: Tensor | None = None,
        edges: Tensor | None = None,
        neighbor_indptr: Tensor | None = None,
        neighbor_indices: Tensor | None = None,
        conditions: Tensor | None = None,
    ) -> Any:
        fields: dict[str, Any] = {"mass": mass, "evals": evals[None], "evecs": evecs, "gradient_evecs": gradient_evecs}
        vertices, k = evecs.shape
        if edges is not None:
            faces = edges.new_zeros(1, 3)  # the network only sees that there are faces
        if faces is not None:
            fields["faces"] = faces
        if neighbor_indptr is not None and neighbor_indices is not None:
            fields["neighborhood"] = Pattern(neighbor_indptr, neighbor_indices, vertices, check=False)
        operators = blank(vertices, k, evecs.device, **fields)
        if edges is not None:
            remember(operators, _edges=Edges(edges, (edges.shape[0],)))
        return self.network(features, operators, None if conditions is None else conditions[None])
