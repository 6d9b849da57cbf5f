"""What operators remember, and how they move: none of it is stale. Flat buffers, and copies to a GPU."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from operator_checks import assert_same, tiny_operators

from diffnet import DiffusionNet, DiffusionNetBlock
from diffnet.geometry import Operators, collate, operators
from diffnet.geometry.store import transfer
from diffnet.geometry.store.codec import GPU_ALIGNMENT as ALIGNMENT, layout
from diffnet.ops import Pattern

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = torch.float16
LATER = ("evecs", "laplacian", "gradient", "frames", "faces")


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the CPU remember, as a GPU with enough memory does."""
    monkeypatch.setattr(operators, "has_room", lambda size, device: True)


def fresh() -> list[Operators]:
    return [replace(o) for o in tiny_operators()]


def unpacked(batch: Operators) -> set[str]:
    return {name for name in LATER if name not in batch.__dict__}


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float64])
def test_prepared_equals_the_two_steps(remembering: None, dtype: torch.dtype) -> None:
    (o, *_) = fresh()
    expected = o.with_gradient_evecs().with_basis_dtype(dtype)
    for _ in range(2):
        found = o.prepared(dtype)
        assert found.evecs.dtype == found.gradient_evecs.dtype == dtype
        assert_same(found, expected)
    assert o.prepared(dtype) is found
    assert found.prepared(dtype) is found
    assert o.evecs.dtype == torch.float32  # for descriptors
    assert o.gradient_evecs is None


def test_when_blocks_take_gradients_on_the_basis() -> None:
    (o, *_) = fresh()
    pushed = o.with_gradient_evecs()
    for options, without, given in (
        ({}, False, True),  # on the CPU; on a GPU always
        ({"gradient": "spectral"}, True, True),
        ({"gradient": "sparse"}, False, False),
        ({"gradient_features": False, "gradient": "spectral"}, False, False),
        ({"diffusion": "implicit"}, False, False),
    ):
        block = DiffusionNetBlock(4, **options)
        assert (block.on_basis(o), block.on_basis(pushed)) == (without, given), options


def test_half_of_the_memory_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    assert [operators.has_room(size, gpu) for size in (10, 30, 31)] == [True, True, False]
    assert not operators.has_room(0, torch.device("cpu"))
    (o, *_) = fresh()
    assert o.prepared(HALF) is not o.prepared(HALF)  # the CPU remembers nothing


def test_prepared_is_not_remembered_where_it_would_be_wrong(remembering: None) -> None:
    (o, *_) = fresh()
    learned = replace(o, evecs=o.evecs.clone().requires_grad_())
    for _ in range(2):  # each call has its own graph
        learned.prepared(torch.float32).gradient_evecs.sum().backward()
    assert learned.evecs.grad is not None
    on_basis = o.with_gradient_evecs()
    torch.func.grad(lambda x: (on_basis.prepared(HALF).evecs * x).sum())(torch.ones(()))
    # The private attribute shows what is remembered. `prepared` would compute it.
    assert on_basis._preparations is learned._preparations is None


def test_prepared_notices_changes(remembering: None) -> None:
    (o, *_) = fresh()
    o = replace(o, evecs=o.evecs.clone())
    before = o.prepared(HALF)
    o.evecs.neg_()
    assert torch.equal(o.prepared(HALF).evecs, -before.evecs)
    other = replace(o, evecs=-o.evecs)
    assert torch.equal(other.prepared(HALF).evecs, -o.prepared(HALF).evecs)


def test_preparations_made_in_inference_mode_serve_training(remembering: None) -> None:
    packed = collate(fresh())
    with torch.inference_mode():
        packed.prepared(torch.float32)
    model = DiffusionNet(3, 2, width=4, blocks=1, gradient="spectral", backend="torch")
    model(torch.randn(84, 3), packed).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    (o, *_) = fresh()
    model = DiffusionNet(3, 2, width=4, blocks=1, outputs_at="edges")
    with torch.inference_mode():
        model(torch.randn(o.num_vertices, 3), o)
    model(torch.randn(o.num_vertices, 3), o).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_preparations_end_with_their_operators(remembering: None) -> None:
    (o, *_) = fresh()
    found = weakref.ref(o.prepared(HALF))
    assert found() is not None
    del o
    gc.collect()
    assert found() is None


def test_copies_have_no_preparations(remembering: None) -> None:
    (o, *_) = fresh()
    o.prepared(HALF)
    for other in (pickle.loads(pickle.dumps(o)), copy.deepcopy(o), copy.copy(o), o.to(dtype=torch.float64), replace(o)):
        assert other._preparations is None
        assert other.lengths == o.lengths
        assert torch.equal(other.evecs.float(), o.evecs)


def test_collate_packs_preparations(remembering: None) -> None:
    each = fresh()
    for o in each:
        o.prepared(HALF)
    each[0].prepared(torch.float32)  # the others lack it
    packed = collate(each)
    assert set(packed._preparations) == {HALF}
    assert unpacked(packed) == set(LATER)
    found, expected = packed.prepared(HALF), collate(fresh()).prepared(HALF)
    assert unpacked(packed) == set(LATER)
    assert_same(found, expected)
    # Both read the same packed field.
    assert found.gradient is packed.gradient


def test_fields_are_packed_when_first_read() -> None:
    packed = collate(fresh())
    assert unpacked(packed) == set(LATER)
    assert packed.k == 10
    assert (len(packed), packed.num_vertices, packed.face_lengths) == (4, 84, (80, 4, 12, 0))
    assert "vertices=84, faces=96" in repr(packed)
    assert packed.evecs is packed.evecs
    assert packed.laplacian is packed.laplacian
    assert not unpacked(replace(packed))
    with pytest.raises(AttributeError, match="'Operators' object has no attribute 'gradients'"):
        packed.gradients  # noqa: B018


def test_batches_with_gradients_are_packed_at_once() -> None:
    a, b, *_ = fresh()
    a = replace(a, evecs=a.evecs.clone().requires_grad_())
    packed = collate([a, b])
    assert not unpacked(packed)
    with torch.no_grad():
        packed.frames  # noqa: B018
    packed.evecs.sum().backward()
    assert a.evecs.grad is not None


def test_pickled_batches_are_packed_and_small() -> None:
    packed = collate(fresh())
    size = len(pickle.dumps(packed))
    again = pickle.loads(pickle.dumps(packed))
    assert not unpacked(again)
    assert_same(again, packed)
    views = packed.split()  # their tensors are parts of the tensors of the batch
    assert len(pickle.dumps(views[1])) < size / 4


def compiled_graphs(model: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.fx.GraphModule]]:
    """The compiled model, and the graphs that it compiles."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    return torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True), graphs


def test_a_compiled_network_takes_a_batch_that_is_not_packed_yet() -> None:
    torch.manual_seed(0)
    network = DiffusionNet(3, 2, width=4, blocks=1, gradient="sparse", backend="torch", dropout=0.0)

    def model(x: torch.Tensor, batch: Operators) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return network(x, batch)

    x = torch.randn(84, 3)
    compiled, graphs = compiled_graphs(model)
    expected = model(x, collate(fresh()))
    for _ in range(3):  # new batches and old ones share what was compiled
        batch = collate(fresh())
        for _ in range(2):
            # The CPU path rounds to bfloat16 at other places than the reference, which is compiled.
            error = torch.linalg.norm(compiled(x, batch) - expected) / torch.linalg.norm(expected)
            assert error <= 2**-7
    assert len(graphs) <= 2


def test_replaced_fields_drop_what_was_found() -> None:
    """`edges` and `lengths` of operators, transposes of patterns."""
    (o, *_) = fresh()
    assert len(o.edges) == 120
    assert len(replace(o, faces=o.faces[:1]).edges) == 3
    packed = collate(fresh())
    assert packed.lengths == (42, 4, 8, 30)
    one = replace(packed, ptr=packed.ptr[[0, 1, 4]], face_ptr=packed.face_ptr[[0, 1, 4]], evals=packed.evals[:2])
    assert one.lengths == (42, 42)
    assert one.face_lengths == (80, 16)
    pattern = Pattern(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), 2).prepare()
    flipped = Pattern(pattern.indptr, torch.tensor([1, 0]), 2)
    assert flipped.transpose[0].indices.tolist() == [1, 0]
    assert flipped.transpose[1].tolist() == [1, 0]


def test_a_compiled_network_uses_what_is_remembered(remembering: None) -> None:
    network = DiffusionNet(3, 2, width=4, blocks=1, gradient="spectral", backend="torch", dropout=0.0)
    x, batch = torch.randn(84, 3), collate(fresh())
    compiled, graphs = compiled_graphs(network)
    for products in (True, False):
        torch.testing.assert_close(compiled(x, batch), network(x, replace(batch)))
        assert ("spmm" in graphs[-1].code) == products
        batch.prepared(torch.float32)


# ---- flat buffers: their layout, writing them in pieces, and reading tensors from them ----


def mixed_tensors() -> list[torch.Tensor]:
    """All dtypes of operators, odd sizes, an empty tensor, and one that is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(5, 7, generator=generator),
        torch.arange(3),
        torch.empty(0, 3, dtype=torch.int64),
        torch.arange(1001, dtype=torch.int32),
        torch.randn(4, 6, generator=generator).mT,
        torch.randn(3, generator=generator).bfloat16(),
        torch.eye(3).expand(11, 3, 3),
        torch.tensor(2.5, dtype=torch.float64),
    ]


def assert_equal(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for copied, x in zip(copies, tensors, strict=True):
        assert copied.is_contiguous()
        assert copied.dtype == x.dtype
        assert copied.device == x.device
        assert torch.equal(copied, x)


def test_views_of_a_buffer_have_their_own_versions() -> None:
    """Otherwise writing to one field would spoil what autograd has saved of another."""
    tensors = [torch.zeros(3), torch.zeros(4)]
    offsets, size = layout(x.nbytes for x in tensors)
    a, b = transfer.views(torch.zeros(size, dtype=torch.uint8), tensors, offsets)
    before = a._version, b._version  # PyTorch has no public name for the counter that autograd compares
    a.add_(1)
    assert (a._version, b._version) == (before[0] + 1, before[1])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary memory in place of pinned memory, so that the same code copies from the CPU to the CPU."""
    monkeypatch.setattr(transfer, "empty_pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_pinned_buffer_is_copied_at_once(no_gpu: None, mode: type) -> None:
    tensors = mixed_tensors()
    outside, with_gradient = torch.zeros(3), torch.zeros(2, requires_grad=True)
    with mode():
        buffer, sources = transfer.pinned([*tensors, with_gradient.detach()])
        assert_equal(sources[:-1], tensors)
        copy_of = transfer.copies_of(buffer, torch.device("cpu"))
        copies = [copy_of(x) for x in sources]
        assert_equal(copies[:-1], tensors)
        assert copy_of(outside) is outside  # it is on that device already
    assert len(buffer) == layout(x.nbytes for x in [*tensors, with_gradient])[1]
    (of_sources,) = {x.untyped_storage().data_ptr() for x in sources}
    (of_copies,) = {x.untyped_storage().data_ptr() for x in copies}
    assert of_sources == buffer.data_ptr() != of_copies
    if mode is not torch.inference_mode:
        assert copy_of(sources[-1].requires_grad_()).requires_grad


def test_pinned_operators_are_copied_at_once(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a tensor has been found or replaced since. Operators derived from them are copied as others are."""
    source = collate(tiny_operators())
    pinned = source.pin_memory()
    pinned.edges  # noqa: B018, found after `pin_memory`
    pinned.mass.mul_(2)
    pinned.evals.data = pinned.evals * 3
    copies_of = Mock(side_effect=lambda buffer, _: transfer.copies_of(buffer, torch.device("cpu")))
    monkeypatch.setattr(operators, "existing_device", torch.device)
    monkeypatch.setattr(operators, "copies_of", copies_of)
    monkeypatch.setattr(operators, "to_gpu", lambda tensors, device, non_blocking: tensors)
    moved = pinned.to("cuda", non_blocking=True)
    copies_of.assert_called_once()
    assert_same(moved, replace(source, mass=2 * source.mass, evals=3 * source.evals))
    assert torch.equal(moved.edges, source.edges)
    for name in ("laplacian", "gradient"):
        ours, theirs = getattr(moved, name).pattern, getattr(source, name).pattern
        assert torch.equal(ours.transpose[1], theirs.transpose[1])
    for other in (replace(pinned), pinned.with_gradient_evecs(), copy.copy(pinned), moved):
        other.to("cuda", non_blocking=True)
    pinned.to("cuda", torch.float64, non_blocking=True)
    copies_of.assert_called_once()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("least", "largest"), [(1, 700), (1000, 1000), (1000, 5000), (10**6, 10**6)])
def test_copying_pieces(no_gpu: None, monkeypatch: pytest.MonkeyPatch, least: int, largest: int, direct: bool) -> None:
    """The same code with the CPU in place of the GPU, in pieces of several sizes."""
    monkeypatch.setattr(transfer, "MIN_PIECE", least)
    monkeypatch.setattr(transfer, "MAX_PIECE", largest)
    tensors, cpu = mixed_tensors(), torch.device("cpu")
    assert all(offset % ALIGNMENT == 0 for offset in layout(x.nbytes for x in tensors)[0])

    with ThreadPoolExecutor(1) as pool:
        copy_all = partial(transfer.to_gpu, tensors, cpu, non_blocking=True)
        copies = copy_all() if direct else pool.submit(copy_all).result()
    assert_equal(copies, tensors)
    assert len({x.untyped_storage().data_ptr() for x in copies}) == 1
    assert copies[0].data_ptr() != tensors[0].data_ptr()


@pytest.fixture
def without_waiting() -> Iterator[None]:
    """Every wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def same_on_gpu(moved: Operators, source: Operators) -> bool:
    pairs = [(moved.evecs, source.evecs), (moved.frames, source.frames), (moved.ptr, source.ptr)]
    for name in ("laplacian", "gradient"):
        ours, theirs = getattr(moved, name), getattr(source, name)
        pairs += [(ours.values, theirs.values), (ours.pattern.indices, theirs.pattern.indices)]
        pairs += [(ours.pattern.transpose[1], theirs.pattern.transpose[1])]
    return all(a.is_cuda and torch.equal(a.cpu(), b) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_operators_on_a_gpu_share_one_buffer(monkeypatch: pytest.MonkeyPatch, pin: bool, non_blocking: bool) -> None:
    monkeypatch.setattr(transfer, "MIN_PIECE", 5000)
    packed = collate(tiny_operators())
    moved = (packed.pin_memory() if pin else packed).to("cuda", non_blocking=non_blocking)
    assert len({x.untyped_storage().data_ptr() for x in (moved.mass, moved.evecs, moved.frames)}) == 1
    assert moved.evecs.data_ptr() % ALIGNMENT == 0
    assert same_on_gpu(moved, packed)
    wide = packed.to("cuda", torch.float64)
    assert wide.evecs.dtype == wide.laplacian.values.dtype == torch.float64
    assert wide.faces.dtype == torch.int64


@pytest.mark.gpu
def test_pinned_memory_is_not_reused_too_early() -> None:
    """Many copies in a row, while the GPU is busy."""
    sources = [[torch.full((300_000,), float(i)), torch.full((7,), i)] for i in range(40)]
    torch.cuda._sleep(50_000_000)
    moved = [transfer.to_gpu(x, torch.device("cuda"), non_blocking=True) for x in sources]
    for i, (a, b) in enumerate(moved):
        assert (a == i).all()
        assert (b == i).all()


@pytest.mark.gpu
def test_transfers_and_batches_do_not_wait(without_waiting: None) -> None:
    each = [o.to("cuda", non_blocking=True) for o in tiny_operators()]
    for o in each:
        o.prepared(torch.bfloat16)
    batch = collate(each)
    for name in ("evecs", "laplacian", "gradient", "frames", "faces"):
        getattr(batch, name)
    batch.prepared(torch.bfloat16)


@pytest.mark.gpu
def test_a_gpu_prepares_once() -> None:
    each = [o.to("cuda") for o in tiny_operators()]
    model = DiffusionNet(3, 2, width=16, blocks=2, dropout=0.0).cuda()
    batch, x = collate(each), torch.randn(84, 3, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = model(x, batch)
    # The private attribute shows that the network has prepared the batch. `prepared` would do it now.
    assert set(batch._preparations) == {torch.bfloat16}
    found = batch.prepared(torch.bfloat16)
    assert batch.prepared(torch.bfloat16) is found
    with torch.autocast("cuda", torch.bfloat16):
        again = model(x, batch.with_gradient_evecs().with_basis_dtype(torch.bfloat16))
    assert torch.equal(out, again)
    assert batch.evecs.dtype == torch.float32
    # All meshes have the preparation, so the next batch starts with it.
    for o in each:
        o.prepared(torch.bfloat16)
    torch.testing.assert_close(collate(each).prepared(torch.bfloat16).gradient_evecs, found.gradient_evecs)


@pytest.mark.gpu
def test_nothing_is_remembered_while_a_graph_is_recorded() -> None:
    (o, *_) = (o.to("cuda") for o in tiny_operators())
    expected = o.with_gradient_evecs().with_basis_dtype(torch.bfloat16)  # also compiles the kernel
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        recorded = o.prepared(torch.bfloat16)
    assert o.prepared(torch.bfloat16) is not recorded
    assert torch.equal(o.prepared(torch.bfloat16).gradient_evecs, expected.gradient_evecs)
