"""bf16 and fp16 convolutions on a CPU without instructions for them: calculated in float32, rounded once."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lora_fp8.precision import cpu

SIZES = {"conv1d": (7,), "conv2d": (6, 5), "conv3d": (3, 6, 5)}


class Dtypes(TorchDispatchMode):
    """Note the dtype of each convolution that torch calculates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(function):
            self.seen.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", cpu.HALF)
@pytest.mark.parametrize("name", cpu.NAMES)
def test_values_and_gradients_are_those_of_float32_rounded_once(name: str, dtype: torch.dtype) -> None:
    size, original = SIZES[name], getattr(getattr(F, name), "__wrapped__", getattr(F, name))
    convolution = cpu.calculate_in_float32(original)
    x, weight, bias = torch.randn(2, 4, *size), torch.randn(6, 2, *(3 for _ in size)), torch.randn(6)
    given = [tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias)]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    with Dtypes() as dtypes:
        y = convolution(*given, padding=1, groups=2)
        y.square().sum().backward()
    assert dtypes.seen == {torch.float32} and y.dtype == dtype
    expected = original(*wide, padding=1, groups=2)
    half_step = torch.finfo(dtype).eps / 2  # of a value: float32 adds far less
    torch.testing.assert_close(y.double(), expected, rtol=1.01 * half_step, atol=1e-5)
    expected.backward(2 * y.detach().double())
    for mine, exact in zip(given, wide, strict=True):
        assert mine.grad.dtype == dtype
        assert float((mine.grad - exact.grad).norm() / exact.grad.norm()) < 2 * half_step


def test_other_dtypes_and_devices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(F.conv2d, "__wrapped__", F.conv2d)
    convolution = cpu.calculate_in_float32(original)
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.bfloat16, "meta")):
        x = torch.ones(1, 1, 3, 3, dtype=dtype, device=device)
        with Dtypes() as dtypes:
            assert convolution(x, x).dtype == dtype
        assert dtypes.seen == {dtype}
    with pytest.raises(RuntimeError, match="type"):
        convolution(x.cpu() if x.device.type == "cpu" else torch.ones(1, 1, 3, 3), x.new_ones(1, 1, 3, 3, device="cpu"))


@pytest.mark.parametrize("supported", [True, False])
def test_torch_is_changed_once_and_only_where_bf16_is_slow(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    original = getattr(F.conv2d, "__wrapped__", F.conv2d)
    for name in cpu.NAMES:
        monkeypatch.setattr(F, name, getattr(getattr(F, name), "__wrapped__", getattr(F, name)))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    cpu.install()
    cpu.install()
    assert (F.conv2d is original) == supported
    assert supported or F.conv2d.__wrapped__ is original
