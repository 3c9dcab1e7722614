"""Stage 2: measure the speed of the GEMMs, and of the memory passes around them, at the shapes of the large models."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lora_fp8 import precision, settings
from lora_fp8.precision import formats, matmul

from .numerics import BACKENDS
from .record import Context, Record, require_cuda, wait

SHAPES = {
    # model, layer: tokens M, output features N, input features K, at 1024 px
    "flux attention": (4608, 3072, 3072),
    "flux feed-forward up": (4608, 12288, 3072),
    "flux feed-forward down": (4608, 3072, 12288),
    "flux single out": (4608, 3072, 15360),
    "sdxl attention, inner": (1024, 1280, 1280),
    "sdxl feed-forward up, inner": (1024, 10240, 1280),
    "sdxl text key": (77, 1280, 2048),
    "qwen feed-forward up": (4096, 12288, 3072),
    "wan attention": (8190, 5120, 5120),
    "wan feed-forward up": (8190, 13824, 5120),
    "flux2 fused in": (4608, 55296, 6144),
}
TOY = {"toy": (48, 64, 96)}
ATTENTION = {"flux": (24, 4608, 128), "sdxl, outer": (10, 4096, 64), "wan": (40, 8190, 128)}
"""Model -> heads, tokens, and width of a head, of self-attention at 1024 px."""
ATTENTION_TOY = {"toy": (2, 48, 32)}
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


def run(record: Record, context: Context) -> None:
    """Time every operation at every shape, the most important shapes first."""
    for name, shape in (TOY if context.toy else SHAPES).items():
        for operation, (function, work, unit) in list_operations(*shape, context.device).items():
            if not context.is_asked(f"{name}: {operation}"):
                continue
            if context.seconds_left <= 0:
                record.write(f"{name}: {operation}", None, note="not asked: no time left")
                continue
            record.ask(
                f"{name}: {operation}", lambda *_, f=function, w=work, u=unit, s=shape: time_it(f, w, u, s, context)
            )
    for name, size in (ATTENTION_TOY if context.toy else ATTENTION).items():
        for backend, kernel in BACKENDS.items():
            if context.seconds_left > 0 and context.is_asked(f"attention, {name}: {backend}"):
                record.ask(
                    f"attention, {name}: {backend}, forward and backward",
                    lambda s=size, k=kernel: time_attention(s, k, context),
                )


def time_attention(size: tuple[int, int, int], kernel: SDPBackend, context: Context) -> dict[str, Any]:
    """Return the rate of attention with one of torch's kernels: 3.5 times the forward's FLOPs."""
    require_cuda(context.device)
    heads, tokens, width = size
    shape = (1, tokens, heads, width)
    tensors = [torch.randn(shape, device=context.device, dtype=BF16).transpose(1, 2).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, heads, tokens, width, device=context.device, dtype=BF16)

    def run_both() -> None:
        with sdpa_kernel(kernel):
            torch.nn.functional.scaled_dot_product_attention(*tensors).backward(grad)

    return time_it(run_both, 3.5 * 4 * tokens**2 * heads * width, "TFLOP/s", size, context)


def list_operations(
    num_tokens: int, num_out: int, num_in: int, device: torch.device
) -> dict[str, tuple[Callable[[], Any], float, str]]:
    """Return each operation as (function, work, unit): FLOPs with "TFLOP/s", bytes moved at least with "GB/s"."""
    x = torch.randn(num_tokens, num_in, device=device, dtype=BF16)
    grad = torch.randn(num_tokens, num_out, device=device, dtype=BF16)
    w = torch.randn(num_out, num_in, device=device, dtype=BF16) * num_in**-0.5
    parts = formats.encode(w)
    x8 = x.to(E4M3)
    flops = 2.0 * num_tokens * num_out * num_in
    size_x, size_y, size_w = x.numel(), grad.numel(), w.numel()
    found: dict[str, tuple[Callable[[], Any], float, str]] = {
        "GEMM bf16": (lambda: x @ w.t(), flops, "TFLOP/s"),
        "GEMM fp8 fast": (lambda: matmul.multiply_unscaled(x8, parts[0], BF16, True), flops, "TFLOP/s"),
        "GEMM fp8 precise": (lambda: matmul.multiply_unscaled(x8, parts[0], BF16, False), flops, "TFLOP/s"),
        "decode W": (lambda: formats.decode(parts, "fp8", BF16), 3.0 * size_w, "GB/s"),
        "quantize x, torch": (lambda: matmul.quantize(x), 3.0 * size_x, "GB/s"),
        "transpose W, torch": (lambda: matmul.transpose(parts[0]), 2.0 * size_w, "GB/s"),
        "epilogue, torch": (lambda: apply_torch_epilogue(grad, x, parts[1]), 4.0 * size_y, "GB/s"),
        "encode W": (lambda: formats.encode(w), 3.0 * size_w, "GB/s"),
    }
    if not precision.find_problem(settings.Quantize(compute="fp8", kernels="triton"), device) and device.type == "cuda":
        from lora_fp8.precision import kernels

        x_scale = torch.rand(num_tokens, 1, device=device)
        low, up = (
            torch.randn(num_tokens, 16, device=device, dtype=BF16),
            torch.randn(num_out, 16, device=device).to(BF16),
        )
        found |= {
            "quantize x, triton": (lambda: kernels.quantize_rows(x), 3.0 * size_x, "GB/s"),
            "quantize dY with W's scale, triton": (lambda: kernels.quantize_rows(grad, parts[1]), 3.0 * size_y, "GB/s"),
            "transpose W, triton": (lambda: kernels.transpose_bytes(parts[0]), 2.0 * size_w, "GB/s"),
            "epilogue with LoRA, triton": (
                lambda: kernels.apply_epilogue(grad, x_scale, parts[1], None, low, up, 1.0, BF16),
                4.0 * size_y,
                "GB/s",
            ),
        }
    return found


def apply_torch_epilogue(sum_MN: Tensor, x_MK: Tensor, scale: Tensor) -> Tensor:
    """Apply both scales as `matmul` does without kernels."""
    y_MN = sum_MN.to(torch.float32) * x_MK[:, :1].to(torch.float32)
    return (y_MN * scale.view(1, -1)).to(BF16)


def time_it(
    function: Callable[[], Any], work: float, unit: str, shape: tuple[int, int, int], context: Context
) -> dict[str, Any]:
    """Return the median rate of repeated calls, launched together so that the CPU does not limit them."""
    repeats, bundle = (3, 1) if context.toy else (5, 10)
    for _ in range(2):
        function()
    taken = []
    for _ in range(repeats):
        wait(context.device)
        started = time.perf_counter()
        for _ in range(bundle):
            function()
        wait(context.device)
        taken.append((time.perf_counter() - started) / bundle)
    seconds = statistics.median(taken)
    rate = work / seconds / (1e12 if unit == "TFLOP/s" else 1e9)
    return {"value": rate, "unit": unit, "microseconds": 1e6 * seconds, "shape": shape}
