"""Networks as CUDA graphs, and their memory. Without a GPU, graphs and their pool are emulated."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import DEVICES, EmulatedGraph, counted_replays, network as small, with_graphs
from refusals import refused
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from diffnet import DiffusionNet, Operators, collate, precompute
from diffnet.cuda_graphs import graphed, lane as lane_module, sizes as graph_sizes
from diffnet.cuda_graphs.buffers import BatchBuffers
from diffnet.cuda_graphs.forward import MAX_LANES, GraphedForward, Recording
from diffnet.cuda_graphs.lane import Lane
from diffnet.cuda_graphs.module_state import GRAPHS
from diffnet.cuda_graphs.runtime import Settings
from diffnet.cuda_graphs.sizes import BatchSize, round_up
from diffnet.cuda_graphs.static_operators import StaticOperators
from diffnet.ops.common.cuda_graph import capturable_stream, forget_recording, record

network = partial(small, blocks=2)


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def features(operators: Operators) -> Tensor:
    return torch.randn(operators.num_vertices, 3, generator=torch.Generator().manual_seed(0)).to(operators.device)


def assert_same_gradients(plain: nn.Module, model: nn.Module, atol: float = 1e-6) -> None:
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=atol)


def batches_of(meshes: list[Operators], device: str) -> list[Operators]:
    a, b, c = meshes
    packed = [a, b, c, collate([a, b]), collate([c, a, b]), collate([b, a, c, a])]
    return [batch.to(device) for batch in packed * 2]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at", ["vertices", "faces", "edges", "global_mean"])
def test_training_with_graphs_equals_training_without(meshes: list[Operators], device: str, at: Any) -> None:
    plain = network(outputs_at=at).to(device)
    captured = with_graphs(plain, device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9) for m in (plain, captured)]
    for batch in batches_of(meshes, device):
        if device == "cpu" and len(batch) > 1:
            continue  # plain PyTorch reads the sizes of several meshes back
        x, outs = features(batch), []
        for model, optimizer in zip((plain, captured), optimizers, strict=True):
            optimizer.zero_grad()
            outs.append(model(x, batch))
            outs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_interleaved_backward_passes_and_an_exception(meshes: list[Operators], device: str) -> None:
    plain = network().to(device)
    captured = with_graphs(plain, device)
    a, b = (o.to(device) for o in meshes[:2])
    for model in (plain, captured):
        first, second = model(features(a), a), model(features(b), b)
        first.square().mean().backward(retain_graph=True)
        third = model(features(a), a)
        second.sum().backward()
        first.sum().backward()
        with pytest.raises(ZeroDivisionError):
            _ = model(features(b), b) / (1 // 0)
        third.sum().backward()
    assert_same_gradients(plain, captured, atol=1e-5)
    refused(RuntimeError, "second time", third.sum().backward)


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_backward_pass_has_the_dropout_of_the_first(meshes: list[Operators], device: str) -> None:
    """The backward graph overwrites what it reads, so the forward graph is replayed in between."""
    model, operators = with_graphs(network(dropout=0.5), device, emulation=EmulatedGraph), meshes[2].to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    random_state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    for _ in range(2):
        out = model(features(operators), operators)
        expected = random_state()
        first = torch.autograd.grad(out.square().mean(), parameters, retain_graph=True)
        second = torch.autograd.grad(out.square().mean(), parameters, retain_graph=True)
        third = torch.autograd.grad(out.sum(), parameters)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
        assert torch.equal(random_state(), expected)


def test_a_lane_is_free_again_when_its_output_is_gone(meshes: list[Operators]) -> None:
    model = with_graphs(network(), "cpu")
    x = features(meshes[0])
    for _ in range(3 * MAX_LANES):
        model(x, meshes[0])
    loss = None
    for _ in range(3):
        loss = model(x, meshes[0]).sum()  # the old loss lives until the new one is there
        loss.backward()
    gc.collect()
    lanes = vars(model)[GRAPHS].lanes  # nothing public tells how many lanes there are
    assert len(lanes) == 1
    assert not lanes[0].busy


def test_too_many_forward_passes_run_without_graphs_and_say_so(meshes: list[Operators]) -> None:
    model = with_graphs(network(), "cpu")
    x = features(meshes[0])
    with pytest.warns(RuntimeWarning, match="4 forward passes wait") as caught:
        outs = [model(x, meshes[0]) for _ in range(MAX_LANES + 2)]
    assert len(caught) == 1
    plain = network()
    sum(out.sum() for out in outs).backward()
    for _ in outs:
        plain(x, meshes[0]).sum().backward()
    assert_same_gradients(plain, model)


def test_a_changed_parameter_is_an_error_as_without_graphs(meshes: list[Operators]) -> None:
    model = with_graphs(network(), "cpu")
    out = model(features(meshes[0]), meshes[0])
    with torch.no_grad():
        model.last.weight.mul_(2)
    refused(RuntimeError, "changed in place between the forward and the backward pass", out.sum().backward)


def test_eval_and_inference_mode_are_recorded_anew(meshes: list[Operators]) -> None:
    plain, x = network(dropout=0.5), features(meshes[1])
    model = with_graphs(plain, "cpu")
    model(x, meshes[1])
    model.eval()
    expected = plain.eval()(x, meshes[1])
    torch.testing.assert_close(model(x, meshes[1]), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(x, meshes[1]), expected)


def test_large_batches_and_first_visits_run_without_graphs(
    meshes: list[Operators], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of large batches take longer than launching them. Graphs of at most half their size stay."""
    small, large = meshes[1], precompute(trimesh.creation.icosphere(3), k=6)
    middle = precompute(trimesh.creation.uv_sphere(count=[14, 18]), k=6)
    monkeypatch.setattr(graph_sizes, "MAX_BYTES", (large.num_vertices - 1) * 6 * 4)
    assert small.num_vertices < large.num_vertices / 2 - 1 < middle.num_vertices
    plain = network()
    model = with_graphs(plain, "cpu", first_visits=2)
    expected = [*((o, n) for o in (small, middle) for n in (0, 0, 2)), (large, 0), (large, 0), (middle, 0), (middle, 0)]
    for operators, replays in (*expected, (small, 2), (small, 2)):
        x = features(operators)
        plain.zero_grad(), model.zero_grad()
        plain(x, operators).square().mean().backward()
        assert counted_replays(lambda: model(x, operators).square().mean().backward()) == replays  # noqa: B023
        assert_same_gradients(plain, model)


def test_hooks_on_submodules_run_without_graphs_and_say_so(meshes: list[Operators]) -> None:
    model, x = with_graphs(network(), "cpu"), features(meshes[0])
    seen: list[str] = []
    outer = model.register_forward_hook(lambda *_: seen.append("outer"))
    assert counted_replays(lambda: model(x, meshes[0])) == 1
    inner = model.blocks[0].register_forward_hook(lambda *_: seen.append("inner"))
    with pytest.warns(RuntimeWarning, match="a module has hooks"):
        model(x, meshes[0])
    assert seen == ["outer", "inner", "outer"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so once
        model(x, meshes[0])
        inner.remove()
        outer.remove()
        assert counted_replays(lambda: model(x, meshes[0])) == 1


def test_copies_have_graphs_of_their_own(meshes: list[Operators]) -> None:
    model, x = with_graphs(network(), "cpu"), features(meshes[0])
    out = model(x, meshes[0])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.last.bias.add_(1)
        torch.testing.assert_close(other(x, meshes[0]), out + 1)
        torch.testing.assert_close(model(x, meshes[0]), out)
    assert list(model.state_dict()) == list(network().state_dict())
    del model.forward
    assert counted_replays(lambda: model(x, meshes[0])) == 0


def test_wrong_arguments_are_refused_as_without_graphs(meshes: list[Operators]) -> None:
    model, x = with_graphs(network(), "cpu"), features(meshes[0])
    model(x, meshes[0])
    for wrong in (x[:5], x.int(), x.tolist()):
        refused((TypeError, ValueError), "features should", model, wrong, meshes[0])
    refused(ValueError, "'corners'", graphed, network(), outputs_at="corners")
    for wrong in (None, "network.safetensors", DiffusionNet):
        refused(TypeError, f"should be a module such as DiffusionNet, got {type(wrong).__name__}", graphed, wrong)


def test_a_network_without_graphs_on_the_cpu(meshes: list[Operators]) -> None:
    model = graphed(network(), first_visits=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(features(meshes[0]), meshes[0]).sum().backward()


def test_sizes_grow_by_at_most_an_eighth() -> None:
    """Of vertices, also by at most 8192."""
    for count in [*range(1, 3000), 99_999, 1_000_000, 1_048_577]:
        assert count <= round_up(count) <= max(128, count * 9 / 8)
        assert round_up(round_up(count)) == round_up(count)
    assert len({round_up(v) for v in range(2_000, 20_001)}) == 27
    for count in [*range(8192, 300_000, 4093), 65_536, 131_071, 131_072, 999_999, 1_048_576]:
        size = BatchSize(1, count, faces=count).rounded()
        assert count < size.vertices <= count + 8192
        assert size.vertices <= size.faces + size.faces // 8
        assert size.faces == round_up(count)
    assert BatchSize(1, 200_000).rounded().vertices == 204_800
    assert len({BatchSize(1, v).rounded() for v in range(20_000, 200_001, 7)}) == 32


@pytest.mark.usefixtures("tf32")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"gradient": "sparse"}, {"attention_heads": 2}, {"gradient_rotation": "swapped"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_over_fifty_steps_agree(options: dict[str, Any], dtype: torch.dtype) -> None:
    meshes = [precompute(trimesh.creation.icosphere(i), k=16).to("cuda") for i in (2, 3, 4)]
    plain = network(width=32, **options).cuda()
    captured = with_graphs(plain, "cuda", first_visits=1)
    losses = [train(model, meshes, dtype) for model in (plain, captured)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5 if dtype == torch.float32 else 2e-3, atol=1e-5)


def train(model: nn.Module, meshes: list[Operators], dtype: torch.dtype) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    order = torch.Generator().manual_seed(0)
    losses = []
    for step in range(50):
        count = int(torch.randint(1, 4, (), generator=order))
        batch = collate([meshes[i] for i in torch.randint(3, (count,), generator=order).tolist()])
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            out = model(batch.frames[:, 2], batch)
        loss = (out.float() - batch.frames[:, :1, 0]).square().mean()
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        if step % 2:  # gradients of two steps are accumulated
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    return torch.stack(losses).cpu()


@pytest.mark.usefixtures("tf32")
@pytest.mark.gpu
def test_dropout_differs_between_replays() -> None:
    operators = precompute(trimesh.creation.icosphere(3), k=16).to("cuda")
    model, x = graphed(network(width=32, dropout=0.5).cuda(), first_visits=0), operators.frames[:, 2]
    outs = torch.stack([model(x, operators).detach() for _ in range(200)])
    plain = torch.stack([DiffusionNet.forward(model, x, operators).detach() for _ in range(200)])
    assert (outs[0] - outs[1]).abs().max() > 1e-3
    deviation = plain.std(0).mean() / 200**0.5
    assert (outs.mean(0) - plain.mean(0)).abs().mean() < 3 * deviation
    torch.testing.assert_close(outs.std(0).mean(), plain.std(0).mean(), rtol=0.05, atol=0)


@pytest.mark.gpu
def test_a_refused_recording_returns_its_memory() -> None:
    x = torch.ones(2**26, device="cuda")  # 256 MB
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with capturable_stream(), pytest.raises(RuntimeError):
        record(lambda: (x + 1).sum().item())
    forget_recording(x.device)
    freed = x + 1
    del freed
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**22
    with capturable_stream():
        _ = x[:4] + 1
        graph, result = record(lambda: x[:4] + 1)
        graph.replay()
        torch.testing.assert_close(result.clone(), torch.full((4,), 2.0, device="cuda"))


@pytest.mark.usefixtures("tf32")
@pytest.mark.gpu
def test_memory_stays_near_that_of_the_largest_batch() -> None:
    meshes = [precompute(trimesh.creation.icosphere(i), k=32).to("cuda") for i in (3, 4, 5)]
    batches = [collate([meshes[2]] * n + [meshes[1]] * m) for n in range(1, 4) for m in range(4)]
    peaks = []
    for make in (lambda model: model, graphed):
        model = make(network(width=128, blocks=4).cuda())
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        for batch in batches * 3:
            model(batch.frames[:, 2], batch).sum().backward()
            model.zero_grad()
        torch.cuda.empty_cache()
        peaks.append(torch.cuda.max_memory_reserved() - before)
        del model
    assert peaks[1] <= 1.5 * peaks[0]


@pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed", "reentrant"])
def test_checkpointing(meshes: list[Operators], reentrant: bool) -> None:
    plain = network()
    model = with_graphs(plain, "cpu")
    x = features(meshes[1])
    for each in (plain, model):
        given = x.clone().requires_grad_()
        outs = [checkpoint(each, given, o, use_reentrant=reentrant) for o in (meshes[1], meshes[1])]
        sum(out.square().sum() for out in outs).backward()
    assert_same_gradients(plain, model)


def test_distributed_training(meshes: list[Operators], tmp_path: Path) -> None:
    plain = network()
    model = with_graphs(plain, "cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for each in (plain, wrapped) * 2:
            each(features(meshes[2]), meshes[2]).square().sum().backward()
        assert list(wrapped.module.state_dict()) == list(plain.state_dict())
        # If the wrapper is the last owner of the group, PyTorch holds Python's lock while it waits for a thread of
        # Gloo, which may wait for that lock.
        del wrapped, each
    finally:
        torch.distributed.destroy_process_group()
    assert_same_gradients(plain, model)


def test_an_average_of_the_weights(meshes: list[Operators]) -> None:
    model = with_graphs(network(), "cpu")
    x = features(meshes[0])
    model(x, meshes[0])
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        model.last.bias.add_(1)
        average.update_parameters(model)
        expected = network()(x, meshes[0]) + 0.5
        torch.testing.assert_close(average(x, meshes[0]), expected)


@pytest.fixture(scope="module")
def sphere() -> Operators:
    return precompute(trimesh.creation.icosphere(1), k=6).with_gradient_evecs()


class Network(nn.Module):
    """A network with an unused parameter, one of another dtype, and one of an odd size."""

    outputs_at = "vertices"

    def __init__(self) -> None:
        super().__init__()
        self.net = small()
        self.unused = nn.Parameter(torch.zeros(3))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        return (self.net(x, operators) + self.bias) * self.scale


def pair() -> tuple[Network, Network]:
    plain = Network()
    return plain, with_graphs(plain)


def loss(model: nn.Module, operators: Operators) -> Tensor:
    out: Tensor = model(operators.frames[:, 2], operators)
    return out.square().mean()


def nodes(model: nn.Module, operators: Operators) -> list[Any]:
    """The nodes of autograd that stand for the parameters, one for each dtype."""
    node = loss(model, operators).grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
    while "Replay" not in node.name():
        node = node.next_functions[0][0]
    return [each for each, _ in node.next_functions if each is not None]


def test_autograd_grad_of_several_forward_passes(sphere: Operators) -> None:
    found = []
    for model in pair():
        used = [p for p in model.parameters() if p is not model.unused]
        both = loss(model, sphere) + 2 * loss(model, sphere)
        found.append([*torch.autograd.grad(both, used, retain_graph=True), *torch.autograd.grad(both, used[3:5])])
        assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_gradients_of_gradients_are_refused(sphere: Operators) -> None:
    _, model = pair()
    (grad,) = torch.autograd.grad(loss(model, sphere), [model.bias], create_graph=True)
    refused(RuntimeError, "once_differentiable", grad.sum().backward)


def test_hooks_see_the_gradients_of_parameters(sphere: Operators) -> None:
    plain, model = pair()
    loss(model, sphere).backward()  # the hooks come after the nodes of autograd have been made
    model.zero_grad()
    for each in (plain, model):
        called: list[str] = []
        bias = each.bias
        bias.register_hook(lambda grad, called=called: called.append("tensor") or 3 * grad)
        bias.register_post_accumulate_grad_hook(lambda p, called=called: called.append("accumulated"))
        node = bias.view_as(bias).grad_fn.next_functions[0][0]  # as DistributedDataParallel does it
        node.register_hook(lambda *_, called=called: called.append("node"))
        for _ in range(2):
            loss(each, sphere).backward()
        assert sorted(called) == ["accumulated"] * 2 + ["node"] * 2 + ["tensor"] * 2
    assert_same_gradients(plain, model)


def test_frozen_parameters_get_no_gradient(sphere: Operators) -> None:
    plain, model = pair()
    for frozen in (True, False, True):
        for each in (plain, model):
            each.net.first.requires_grad_(not frozen)
            each.zero_grad()
            loss(each, sphere).backward()
        assert (model.net.first.weight.grad is None) == frozen
        assert_same_gradients(plain, model)


def test_gradients_are_not_copied_and_can_be_kept(sphere: Operators) -> None:
    _, model = pair()
    loss(model, sphere).backward()
    kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    floats = [grad for grad in kept.values() if grad.dtype == torch.float32]
    assert len({grad.untyped_storage().data_ptr() for grad in floats}) == 1
    assert all(grad.data_ptr() % 16 == 0 for grad in floats if grad.numel() % 8 == 0)
    before = {name: grad.clone() for name, grad in kept.items()}
    model.zero_grad()
    for _ in range(2):
        (2 * loss(model, sphere)).backward()
    assert all(torch.equal(grad, before[name]) for name, grad in kept.items())
    kept["bias"].add_(1)
    assert all(torch.equal(grad, before[name]) for name, grad in kept.items() if name != "bias")
    assert kept["net.first.weight"]._version == 0


def test_autograd_makes_new_nodes_only_when_it_must(sphere: Operators) -> None:
    _, model = pair()
    first = nodes(model, sphere)
    assert len(first) == 2  # one for each dtype
    assert nodes(model, sphere) == first
    model.eval()
    assert nodes(model, sphere) == first
    with torch.no_grad():
        loss(model, sphere)
    assert nodes(copy.deepcopy(model), sphere) != first
    assert nodes(model, sphere) == first
    model.bias = nn.Parameter(torch.ones(5))
    second = nodes(model, sphere)
    assert not set(second) & set(first)
    model.double().float()  # gives parameters new nodes, which others may watch
    model.scale.data = model.scale.data.double()
    third = nodes(model, sphere)
    assert not set(third) & set(second)
    type(model).forward(model, sphere.frames[:, 2], sphere)
    assert nodes(model, sphere) == third
    inner = model.net.register_forward_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match="a module has hooks"):
        loss(model, sphere)
    inner.remove()
    assert not set(nodes(model, sphere)) & set(third)


def test_parameters_that_are_results_get_gradients(sphere: Operators) -> None:
    found = []
    for model in pair():
        w = torch.ones(5, requires_grad=True)
        for _ in range(2):
            changed = {"bias": 2 * w}
            torch.func.functional_call(model, changed, (sphere.frames[:, 2], sphere)).square().mean().backward()
        found.append(w.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_lazy_parameters(sphere: Operators) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = Network(), nn.LazyLinear(2)

        def forward(self, x: Tensor, operators: Operators) -> Tensor:
            return self.last(self.net(x, operators).float())

    model = with_graphs(Lazy())
    with pytest.warns(RuntimeWarning, match="a module has hooks"):  # that make the lazy parameters
        loss(model, sphere)
    assert counted_replays(lambda: loss(model, sphere).backward()) == 2
    assert model.last.weight.grad is not None
    with torch.no_grad():
        model.last.weight.data = torch.zeros(2, 5)
        torch.testing.assert_close(loss(model, sphere), model.last.bias.square().mean())


@pytest.mark.gpu
def test_steps_on_several_streams() -> None:
    """Autograd warns if nodes of parameters belong to another stream than those of a network."""
    operators = precompute(trimesh.creation.icosphere(3), k=16).to("cuda")
    plain = Network().cuda()
    model = graphed(copy.deepcopy(plain), outputs_at="vertices", first_visits=0)
    side = torch.cuda.Stream()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stream in (torch.cuda.current_stream(), side, torch.cuda.current_stream(), side):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for each in (plain, model):
                    each.zero_grad()
                    loss(each, operators).backward()
            torch.cuda.current_stream().wait_stream(stream)
            assert_same_gradients(plain, model)


@pytest.mark.gpu
def test_a_whole_step_is_recorded_after_steps_with_graphs() -> None:
    operators = precompute(trimesh.creation.icosphere(3), k=16).to("cuda").prepared(torch.float32)
    model = graphed(Network().cuda(), outputs_at="vertices", first_visits=0)

    def step() -> None:
        model.zero_grad()
        loss(model, operators).backward()

    step()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            type(model).forward(model, operators.frames[:, 2], operators).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    for p, grad in zip(model.parameters(), expected, strict=True):
        if grad is not None:
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def spheres() -> list[Operators]:
    """Spheres of 642 and 162 vertices. Their gradients on the basis are not prepared."""
    return [precompute(trimesh.creation.icosphere(i), k=6) for i in (3, 2)]


class Pool:
    """Tells what happens while memory comes from the pool of the graphs."""

    def __init__(self) -> None:
        self.is_open = False
        self.uses = 0
        self.live: set[int] = set()

    @contextmanager
    def allocating_in(self, pool: Any, device: torch.device) -> Iterator[None]:
        self.is_open, self.uses = True, self.uses + 1
        try:
            yield
        finally:
            self.is_open = False

    def live_blocks(self, pool: Any, device: torch.device) -> frozenset[int]:
        return frozenset(self.live)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    emulated = Pool()
    monkeypatch.setattr(lane_module, "allocating_in", emulated.allocating_in)
    monkeypatch.setattr(lane_module, "live_blocks", emulated.live_blocks)
    return emulated


class Once:
    """A graph that is recorded and never replayed. As a CUDA graph, it keeps no function."""

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        function()

    def replay(self) -> None:
        pass


def forward_of(model: nn.Module, recorder: Any = EmulatedGraph) -> GraphedForward:
    return GraphedForward(model, Settings("vertices", 0, recorder=recorder))


def stepped(forward: GraphedForward, operators: Operators) -> Tensor:
    out: Tensor = forward(operators.frames[:, 2], operators)
    out.sum().backward()
    return out


def recordings(forward: GraphedForward) -> list[Recording]:
    return list(forward.lanes[0]._graphs.values())  # nothing public tells what is recorded


@pytest.mark.parametrize("options", [{}, {"gradient": "sparse"}], ids=str)
def test_fields_are_read_before_the_first_call_of_another_size(
    spheres: list[Operators], pool: Pool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool]] = []
    rows = BatchBuffers.rows

    def noted(self: BatchBuffers, name: str, *arguments: Any, **given: Any) -> Tensor:
        made.append((name, pool.is_open))
        return rows(self, name, *arguments, **given)

    monkeypatch.setattr(BatchBuffers, "rows", noted)
    forward = forward_of(small(**options))
    for operators in spheres:
        stepped(forward, operators)
    assert pool.uses == 1  # the first size has no graphs whose memory it could use
    assert made
    assert not any(is_open for _, is_open in made)
    larger, smaller = recordings(forward)
    # Nothing public tells which buffers there are.
    assert list(smaller.inputs.buffers._filled) == list(larger.inputs.buffers._filled)
    assert smaller.inputs.operators.fields_read() == larger.inputs.operators.fields_read()


def test_the_first_call_of_a_kind_takes_its_memory_from_elsewhere(spheres: list[Operators], pool: Pool) -> None:
    """It may leave tensors. A second call, before it is recorded, uses the memory of the graphs if there are any."""
    forward = forward_of(small())
    stepped(forward, spheres[0])
    assert pool.uses == 0
    with torch.no_grad():
        forward(spheres[1].frames[:, 2], spheres[1])
    assert pool.uses == 1
    stepped(forward, spheres[1])
    assert pool.uses == 2


def test_a_first_visit_of_a_larger_batch_runs_after_the_graphs_of_smaller_ones_are_dropped(
    spheres: list[Operators],
) -> None:
    larger, smaller = spheres
    forward = GraphedForward(small(), Settings("vertices", 1, recorder=EmulatedGraph))
    for _ in range(2):
        stepped(forward, smaller)
    assert len(recordings(forward)) == 1
    stepped(forward, larger)
    assert recordings(forward) == []
    for _ in range(2):
        stepped(forward, larger)
        stepped(forward, smaller)
    assert len(recordings(forward)) == 2


class Twos:
    def __init__(self, pool: Pool) -> None:
        self.kept: dict[int, Tensor] = {}
        self.pool = pool

    def __call__(self, size: int) -> Tensor:
        if size not in self.kept:
            self.kept[size] = torch.full((size, 1), 2.0)
            if self.pool.is_open:
                self.pool.live.add(size)
        return self.kept[size]


class Keeping(nn.Module):
    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.net, self.twos = small(), Twos(pool)

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        return self.net(x * self.twos(len(x)), operators)


def test_graphs_that_could_overwrite_a_tensor_are_dropped(pool: Pool) -> None:
    sizes = [precompute(trimesh.creation.icosphere(i), k=6) for i in (4, 3, 2, 1)]
    forward = forward_of(Keeping(pool))
    stepped(forward, sizes[0])
    for i in (1, 2):
        before = recordings(forward)
        stepped(forward, sizes[i])
        assert len(pool.live) == i
        assert not any(old is new for old in before for new in recordings(forward))
        assert len(recordings(forward)) == 1
        stepped(forward, sizes[0])
        assert len(recordings(forward)) == 2
    assert pool.uses == 3  # the second tensor that stays is the last one
    stepped(forward, sizes[3])
    assert len(recordings(forward)) == 3
    assert pool.uses == 3
    assert len(pool.live) == 2


class Made(TorchDispatchMode):
    """Remembers the memory of the tensors that operations make while the pool is open."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.memory: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        views = [result.alias_info is not None for result in op._schema.returns]
        if self.pool.is_open and not all(views):
            made = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
            self.memory += [(str(op), StorageWeakRef(storage)) for storage in made]
        return out


def test_the_first_call_of_a_size_leaves_no_tensor_in_the_pool(pool: Pool) -> None:
    """On kernels. A tensor that stays would make the lane drop its graphs and take more memory."""
    pytest.importorskip("triton")
    forward = forward_of(small(backend="triton", dropout=0.5))
    made = Made(pool)
    mesh = precompute(trimesh.creation.icosphere(0), k=6)
    for operators in (collate([mesh, mesh]), mesh):
        with made:
            stepped(forward, operators)
    assert pool.uses == 1
    assert len(made.memory) > 20
    gc.collect()  # Triton's interpreter keeps arguments of kernels in cycles
    assert [op for op, memory in made.memory if not memory.expired()] == []


def test_graphs_are_dropped_after_an_error(pool: Pool) -> None:
    lane: Lane[int] = Lane(torch.device("cpu"), EmulatedGraph)
    lane.record([lambda: None])
    lane.keep("size", 1)
    with pytest.raises(ZeroDivisionError), lane.memory():
        raise ZeroDivisionError
    assert pool.uses == 1
    assert lane.get("size") is None


def test_tensors_that_wait_for_the_garbage_collector_are_no_reason_to_drop_graphs(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane: Lane[int] = Lane(torch.device("cpu"), EmulatedGraph)
    lane.record([lambda: None])
    lane.keep("size", 1)
    monkeypatch.setattr(gc, "collect", lambda: pool.live.clear())
    with lane.memory():
        pool.live.add(1)
    assert lane.get("size") == 1


@pytest.mark.parametrize("options", [{}, {"gradient": "sparse"}], ids=str)
def test_a_recording_keeps_no_batch_and_is_freed_without_the_garbage_collector(
    spheres: list[Operators], options: dict[str, Any]
) -> None:
    forward = forward_of(small(**options), Once)
    batch = replace(spheres[1])
    gc.collect()
    gc.disable()
    try:
        for operators in (spheres[0], batch):
            stepped(forward, operators)
        found = [weakref.ref(batch)]
        found += [
            weakref.ref(x)
            for r in recordings(forward)
            for x in (r, r.inputs.buffers, r.inputs.buffers.arena, r.forward)
        ]
        del batch, operators
        assert found[0]() is None
        forward.lanes[0].clear()
        assert [ref() for ref in found] == [None] * len(found)
    finally:
        gc.enable()


def test_memory_of_a_failed_call_is_free_before_the_network_runs_without_graphs(spheres: list[Operators]) -> None:
    made: list[weakref.ref[Tensor]] = []

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def forward(self, x: Tensor, operators: Operators) -> Tensor:
            if isinstance(operators, StaticOperators):
                large = torch.zeros(10)
                made.append(weakref.ref(large))
                raise torch.OutOfMemoryError
            assert [each() for each in made] == [None] * len(made)
            return self.net(x, operators)

    gc.disable()
    try:
        with pytest.warns(RuntimeWarning, match="don't fit into the memory"):
            stepped(forward_of(Failing()), spheres[1])
    finally:
        gc.enable()
