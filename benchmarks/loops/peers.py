"""The training loops that are compared. Each one is a function that trains on the next batch and returns the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet import GraphedStep, graphed
from diffnet.benchmarks.harness.captured import CapturedStep
from diffnet.benchmarks.harness.peers import first_made, on_kernels
from diffnet.benchmarks.harness.registry import Run, Unavailable
from diffnet.benchmarks.loops.workload import BLOCKS, Workload
from diffnet.benchmarks.original.network import original_network
from diffnet.data import Sample, collate_samples
from diffnet.geometry import rotate
from diffnet.ops import Backend
from diffnet.train.options import TrainOptions
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.segmentation import TASK

Step = Callable[[], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def training_peers(work: Workload, compile: bool) -> dict[str, Run]:
    """All training loops by name. `diffnet.benchmarks.catalog.PEERS` explains the names."""
    device = work.device
    peers: dict[str, Run] = {
        "original": first_made(partial(original, work)),
        "plain": first_made(partial(loop, work, "torch")),
        "diffnet": first_made(partial(loop, work, "triton")),
        "diffnet-graphed": first_made(partial(loop, work, "triton", graphs=True)),
        "diffnet-graphed-fused": first_made(partial(loop, work, "triton", graphs=True, fused=True)),
        "diffnet-step": first_made(partial(whole_step, work, nn.CrossEntropyLoss(reduction="none"))),
        "diffnet-step-own-loss": first_made(partial(whole_step, work, losses_of_rows)),
        "diffnet-captured": first_made(partial(captured, work)),
        "diffnet-command": first_made(partial(command, work)),
    }
    if compile:
        peers["original-compiled"] = first_made(partial(original, work, compile=True))
        peers["plain-compiled"] = first_made(partial(loop, work, "torch", compile=True))
        peers["diffnet-compiled"] = first_made(partial(loop, work, "triton", compile=True))
    return {name: on_kernels(device, run) if name.startswith("diffnet") else run for name, run in peers.items()}


def loop(work: Workload, backend: Backend, *, compile: bool = False, graphs: bool = False, fused: bool = False) -> Step:
    """A loop as users write it: `collate`, a network under autocast, a loss, and `torch.optim.Adam`."""
    if graphs:
        needs_gpu(work.device)
    network = work.network(backend).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=fused or None)
    if graphs:
        graphed(network)
    samples = work.plain_samples() if backend == "torch" else work.samples_of_a_peer()
    forward = torch.compile(network) if compile else network
    order = work.order()

    def step() -> Tensor:
        sample = collate_samples([samples[i] for i in next(order)])
        return train(optimizer, lambda: mean_loss(work.forward(forward, sample), sample.labels))

    return step


def whole_step(work: Workload, loss: Loss) -> Step:
    """A loop as users write it with `GraphedStep`."""
    needs_gpu(work.device)
    network = work.network("triton").train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    training_step = GraphedStep(network, optimizer, loss)
    samples, order = work.samples_of_a_peer(), work.order()

    def step() -> Tensor:
        sample = collate_samples([samples[i] for i in next(order)])
        with work.autocast():
            return training_step(work.features(sample), sample.operators, sample.labels)

    return step


def largest_batch(work: Workload) -> Step:
    """The loop without graphs, on the largest meshes only."""
    samples = sorted(work.samples_of_a_peer(), key=lambda s: s.operators.num_vertices)[-work.batch :]
    largest = Workload(work.size, tuple(samples), work.batch, work.rotates, work.shared)
    return loop(largest, "triton")


def original(work: Workload, compile: bool = False) -> Step:
    """The loop of the original implementation: float32, or tf32 where it is allowed, one mesh after another."""
    network = work.network("torch").train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    forward = torch.compile(partial(original_network, network)) if compile else partial(original_network, network)
    meshes, order = work.original_meshes, work.order()

    def step() -> Tensor:
        batch = next(order)
        samples = [work.samples[i] for i in batch]
        labels = torch.cat([s.labels for s in samples])
        lengths = [len(s.features) for s in samples]

        def loss() -> Tensor:
            features = torch.cat([work.features(s) for s in samples])
            return F.cross_entropy(forward(features, [meshes[i] for i in batch], lengths), labels)

        return train(optimizer, loss)

    return step


def captured(work: Workload) -> Step:
    """A loop with one CUDA graph of the whole step for each mesh."""
    needs_gpu(work.device)
    if work.batch > 1:
        raise Unavailable("a graph for each mesh serves batches of one mesh")
    network = work.network("triton").train()
    rate = torch.tensor(1e-3, device=work.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate, capturable=True, fused=True)
    pool, order = torch.cuda.graph_pool_handle(), work.order()  # type: ignore[no-untyped-call]
    rotations = work.rotations(1)

    def loss(sample: Sample) -> Tensor:
        features = sample.features
        if work.rotates:
            features = rotate(features, rotations, sample.operators.ptr)
        with work.autocast():
            outputs = network(features, sample.operators)
        return mean_loss(outputs, sample.labels)

    steps = [CapturedStep(partial(train, optimizer, partial(loss, s)), pool) for s in work.samples_of_a_peer()]

    def step() -> Tensor:
        (i,) = next(order)
        if work.rotates:
            rotations.copy_(work.rotations(1))
        return steps[i]()

    return step


def command(work: Workload) -> Step:
    """The step of `diffnet train segmentation`."""
    needs_gpu(work.device)
    if work.size.storage == torch.float16:
        raise Unavailable("diffnet train has no float16")
    options = TrainOptions(
        features="xyz" if work.rotates else "hks",
        k=work.samples[0].operators.k,
        width=work.size.width,
        blocks=BLOCKS,
        batch_meshes=work.batch,
        precision="bf16" if work.size.storage == torch.bfloat16 else "fp32",
    )
    network = work.network("auto").train()
    training_step = TrainingStep(TASK, network, options, work.device)
    samples, order, rotations = work.samples_of_a_peer(), work.order(), _rotations_of_passes(work)
    training_step.capture([s.operators for s in samples])

    def step() -> Tensor:
        sample = collate_samples([samples[i] for i in next(order)])
        return training_step(sample, next(rotations) if work.rotates else None)

    return step


def _rotations_of_passes(work: Workload) -> Iterator[Tensor]:
    """The rotations of each step, drawn once per pass as in `diffnet train`."""
    while True:
        yield from torch.split(work.rotations(work.steps * work.batch), work.batch)


def train(optimizer: torch.optim.Optimizer, loss: Step) -> Tensor:
    """A step of the optimizer. Returns the loss."""
    optimizer.zero_grad(set_to_none=True)
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return value


def mean_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return losses_of_rows(outputs, labels).mean()


def losses_of_rows(outputs: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each vertex."""
    # A mean inside PyTorch's loss would sum all vertices on one multiprocessor.
    return F.cross_entropy(outputs.float(), labels, reduction="none")


def needs_gpu(device: torch.device) -> None:
    """Raises Unavailable on the CPU, which has no CUDA graphs."""
    if device.type != "cuda":
        raise Unavailable("CUDA graphs need a GPU")


def evaluation(work: Workload, network: Callable[..., Tensor], samples: list[Sample]) -> Step:
    """A loop that computes outputs without gradients."""
    order = work.order()

    def step() -> Tensor:
        with torch.no_grad():
            return work.forward(network, collate_samples([samples[i] for i in next(order)]))

    return step
