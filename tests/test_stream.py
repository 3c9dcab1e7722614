"""Frozen bytes that are offloaded to RAM: which are, that none is read or overwritten too early, and their order.

There is no GPU where these tests usually run. A simulated one carries a copy out only when somebody waits for it, as
late as a real one may.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_fp8 import adapters, precision, settings
from lora_fp8.errors import UserError
from lora_fp8.precision import FrozenLinear, stream

WIDTHS = (64, 128, 64, 192, 64, 64, 256, 64)


def model(
    form: precision.Format, share: float, dtype: torch.dtype = torch.bfloat16, compute: str = "upcast"
) -> nn.Module:
    """Frozen layers of several sizes with adapters; `share` of the bytes waits."""
    torch.manual_seed(0)
    pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
    found = nn.Sequential(*(FrozenLinear.from_linear(nn.Linear(*pair), dtype, form=form) for pair in pairs))
    for layer in found:
        layer.set_compute_(compute)
    precision.offload_(found, share)
    adapters.inject(found, settings.Adapter(rank=4, alpha=4), [str(i) for i in range(len(found))], seed=0)
    for name, parameter in adapters.list_trained_parameters(found):
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return found


def steps(found: nn.Module, num: int, checkpointed: bool, device: str = "cpu") -> list[Tensor]:
    """The adapters' gradients of each step, and at last the answer."""
    results = []
    for seed in range(num):
        x = torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
        x.requires_grad_()
        found.zero_grad()
        if checkpointed:
            y = checkpoint(found[3:], checkpoint(found[:3], x, use_reentrant=False), use_reentrant=False)
        else:
            y = found(x)
        y.square().sum().backward()
        results += [parameter.grad.clone() for _, parameter in adapters.list_trained_parameters(found)]
    return [*results, y.detach()]


class Gpu:
    """A copying stream whose copies happen when somebody waits for them, and a journal of what was asked for."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], Any]] = []
        self.waited: list[Any] = []

    class Event:
        gpu: "Gpu"

        def record(self, where: Any) -> None:
            self.copies = len(self.gpu.pending) if where is self.gpu else None

    def wait_event(self, event: Any) -> None:
        """The copying stream waits for what was computed."""
        assert event.copies is None
        self.waited.append(event)

    def run(self, num: int) -> None:
        for copy in self.pending[:num]:
            copy()
        self.pending[:num] = [lambda: None] * num


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, as_if_on_a_gpu: list[stream.Courier]) -> Iterator[Gpu]:
    found = Gpu()
    monkeypatch.setattr(Gpu.Event, "gpu", found, raising=False)
    computing = type("Computing", (), {"wait_event": lambda self, event: found.run(event.copies)})()
    real = Tensor.copy_
    monkeypatch.setattr(torch.cuda, "Event", Gpu.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.run(len(found.pending)))
    monkeypatch.setattr(
        Tensor,
        "copy_",
        lambda to, what, non_blocking=False: (
            found.pending.append(lambda: real(to, what)) or to if non_blocking else real(to, what)
        ),
    )
    ready = stream.Courier
    monkeypatch.setattr(stream, "Courier", lambda device: _with_stream(ready(device), found))
    yield found


def _with_stream(courier: stream.Courier, gpu: Gpu) -> stream.Courier:
    courier.copying = gpu
    return courier


def test_what_waits_is_the_share_that_was_asked_for_and_spread() -> None:
    sizes = {f"{i}": 100 + i % 3 for i in range(60)}
    assert stream.choose_offloaded(sizes, 0.0) == [] and stream.choose_offloaded(sizes, 1.0) == list(sizes)
    for share in (0.1, 1 / 3, 0.5, 0.8):
        names = stream.choose_offloaded(sizes, share)
        assert sum(sizes[name] for name in names) == pytest.approx(share * sum(sizes.values()), abs=102)
        gaps = [int(b) - int(a) for a, b in zip(names, names[1:], strict=False)]
        assert max(gaps) - min(gaps) <= 1  # never a row of them beside a row of none
    assert stream.choose_offloaded({"large": 1000, "small": 10}, 0.3) == ["small"]


def test_alike_blocks_have_the_same_layers_in_ram() -> None:
    """Or each of them would be compiled by itself."""
    kinds = {"blocks": {"q": 30, "up": 100, "down": 110}, "single": {"q": 70, "out": 50}}
    blocks = [f"{kind}.{number}" for kind in kinds for number in range(11)]  # "blocks.1" begins as "blocks.10" does
    sizes = {f"{block}.ff.{name}": size for block in blocks for name, size in kinds[block.split(".")[0]].items()}
    sizes |= {"first": 90, "last": 90}
    for share in (0.3, 0.5, 1.0):
        names = stream.choose_offloaded(sizes, share, blocks)
        inside = [[name.removeprefix(block) for name in names if name.startswith(f"{block}.")] for block in blocks]
        assert inside[:11] == [inside[0]] * 11 and inside[11:] == [inside[11]] * 11
        assert names == [name for name in sizes if name in names]
        halves = 11 * (110 + 70) / 2 + 90 / 2  # a block is off by half of its largest layer at most
        assert sum(sizes[name] for name in names) == pytest.approx(share * sum(sizes.values()), abs=halves)


@pytest.mark.parametrize("storage", ["fp8 row", "fp8 1x64", "int8 row", "nf4 1x64", "fp8_forward", "fp8"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_answers_and_gradients_are_the_same_to_the_bit(gpu: Gpu, storage: str, checkpointed: bool) -> None:
    # Planted: no wait for the copy; buffers that are used again at once; the next one's bytes under this one's name.
    compute = storage if storage.startswith("fp8_") or storage == "fp8" else "upcast"
    form = precision.Format(*storage.split()) if compute == "upcast" else precision.FP8_ROW
    expected = steps(model(form, 0.0, compute=compute), 4, checkpointed)
    for share in (0.5, 1.0):
        got = steps(model(form, share, compute=compute), 4, checkpointed)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert gpu.waited  # buffers are used in turn: before one is filled again, what was computed from it is waited for


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_order_is_learned_in_two_steps(as_if_on_a_gpu: list[stream.Courier], checkpointed: bool) -> None:
    found = model(precision.FP8_ROW, 1.0)
    steps(found, 2, checkpointed)
    (courier,) = as_if_on_a_gpu
    late, early = courier.late, courier.early
    steps(found, 3, checkpointed)
    assert courier.late == late and courier.early - early == 3 * len(found) * (3 if checkpointed else 2)
    with torch.no_grad():  # previews in between, in an order of their own
        found(torch.zeros(2, WIDTHS[0], dtype=torch.bfloat16))
    steps(found, 1, checkpointed)
    late = courier.late
    steps(found, 2, checkpointed)
    assert courier.late == late


class InBlocks(nn.Module):
    """The same layers as `model`, in blocks whose weights are fetched together, as those of compiled blocks are."""

    _repeated_blocks = ("Sequential",)

    def __init__(self, found: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(*found[:2]), nn.Sequential(*found[2:5]), nn.Sequential(*found[5:])])
        self.weights: precision.BlockStream | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.weights is None:
                x = block(x)
                continue
            with self.weights.fetched(block):
                x = block(x)
            self.weights.fetch_before_backward(block, (x, {"none": None}))
        return x


def test_blocks_are_neither_read_nor_overwritten_too_early(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks in two places: the first and the last take turns in one."""
    expected = steps(model(precision.FP8_ROW, 0.0), 4, checkpointed=False)
    found = InBlocks(model(precision.FP8_ROW, 1.0))
    found.weights = precision.BlockStream(found)
    stream._couriers.clear()  # of peft, which looked at the weights
    real = found.weights._make_places
    monkeypatch.setattr(found.weights, "_make_places", lambda: (real(), setattr(found.weights, "_copying", gpu)))
    got = steps(found, 4, checkpointed=False)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert gpu.waited and not stream._couriers
    assert found.weights.early > found.weights.late > 0


def test_the_first_copies_wait_for_what_is_computed_in_their_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out the memory of a freed tensor at once, though a GPU that is behind may yet write into it."""
    found = InBlocks(model(precision.FP8_ROW, 1.0))
    weights = precision.BlockStream(found)
    stream._couriers.clear()
    real, before = weights._make_places, []
    monkeypatch.setattr(weights, "_make_places", lambda: (real(), setattr(weights, "_copying", gpu)))
    monkeypatch.setattr(
        weights, "_copy", lambda number, copy=weights._copy: (copy(number), before.append(gpu.waited[:]))
    )
    with torch.no_grad():
        for number, block in enumerate(found.blocks[:2], 1):
            with weights.fetched(block):
                assert len(before) == number and len(before[-1]) == number


def test_moves_leave_what_waits_where_it_is_and_nothing_keeps_a_copy() -> None:
    layer = FrozenLinear.from_linear(nn.Linear(64, 96), torch.float32)
    expected = layer.weight.clone()
    layer.wait_()
    assert layer.waits and "qweight" not in dict(layer.named_parameters())
    place = layer.qweight.data_ptr()
    layer.to(torch.bfloat16).to("cpu")
    assert layer.qweight.data_ptr() == place and layer.qweight.dtype == torch.uint8
    assert torch.equal(layer.weight, expected.bfloat16())
    moved = layer.to("meta")
    assert moved.scale.is_meta and moved.qweight.data_ptr() == place and moved.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["upcast", "fp8", "fp8_forward"])
def test_on_a_gpu(compute: str) -> None:
    results = []
    for share in (0.0, 0.5, 1.0):
        found = model(precision.FP8_ROW, share, compute=compute).cuda()
        assert {layer.qweight.device.type for layer in precision.find_frozen_layers(found).values() if layer.waits} <= {
            "cpu"
        }
        results.append(steps(found, 20, checkpointed=True, device="cuda"))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "other",
    ["quantize.storage=none", "quantize.storage=bf16", "quantize.backend=torchao", "memory.shard_base=true"],
)
def test_what_it_excludes_is_told(job: Callable[..., settings.Job], other: str) -> None:
    with pytest.raises(UserError, match=rf"memory\.offload: 0\.5 excludes {other.partition('=')[0]} = "):
        job("memory.offload=0.5", other)
