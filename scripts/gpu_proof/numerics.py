"""Stage 1: compare every function that has another code path on a GPU with float64 or with the CPU."""

import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import bench_step
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lora_fp8 import adapters, precision, settings
from lora_fp8.errors import RunFailure
from lora_fp8.precision import formats, matmul, stream
from lora_fp8.precision.conv import FrozenConv2d
from lora_fp8.precision.formats import Format
from lora_fp8.precision.linear import FrozenLinear
from lora_fp8.stages.session import Session, explain_errors
from lora_fp8.training import memory, optim
from lora_fp8.training.cuda_graphs import Recorder
from lora_fp8.training.flat import Gradients

from .record import Context, NotHere, Record, require_cuda, wait

SCALED = [Format("fp8", scale) for scale in ("row", "tensor", "none", "1x64", "1x128", "128x128")]
SCALED += [Format("int8", scale) for scale in ("row", "1x64", "1x128")]
NF4 = Format("nf4", "1x64")
N, K = 384, 512
BF16 = torch.bfloat16
STEP = {torch.float32: 2.0**-22, BF16: 2.0**-8, torch.float16: 2.0**-11}
"""Rounding step of a dtype, relative to the value."""

Question = Callable[[Context], dict[str, Any]]
QUESTIONS: dict[str, Question] = {}


def question(name: str) -> Callable[[Question], Question]:
    """Register a question under the name of its row."""

    def register(function: Question) -> Question:
        QUESTIONS[name] = function
        return function

    return register


def run(record: Record, context: Context) -> None:
    """Ask every question."""
    for name, function in QUESTIONS.items():
        if not context.is_asked(name):
            continue
        if context.seconds_left <= 0:
            record.write(name, None, note="not asked: no time left")
            continue
        record.ask(name, lambda function=function: function(context))


# -- tools -------------------------------------------------------------------------------------------------------------


def make_random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the same normal numbers on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weight() -> Tensor:
    """Return an (N, K) weight whose rows differ in size by six orders of magnitude, with a row of zeros."""
    weight_NK = make_random(N, K) * torch.logspace(-4, 2, N)[:, None]
    weight_NK[7] = 0.0
    return weight_NK


def compute_error(answer: Tensor, exact: Tensor) -> float:
    """Return |answer - exact| / |exact|, both in float64 on the CPU."""
    answer, exact = answer.detach().double().cpu(), exact.detach().double().cpu()
    return ((answer - exact).norm() / exact.norm()).item()


def check_limit(value: float, limit: float, unit: str = "relative error", note: str = "") -> dict[str, Any]:
    """Return the facts of a row that is right up to a limit."""
    return {"ok": bool(value <= limit), "value": value, "limit": limit, "unit": unit, "note": note}


def compare_pairs(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return the facts of a row that is right if all pairs are bit-identical."""
    differing = []
    for name, (one, other) in pairs.items():
        one, other = one.detach().cpu(), other.detach().cpu()
        if one.shape != other.shape or not torch.equal(one, other):
            count = (one != other).sum().item() if one.shape == other.shape else "shape"
            differing.append(f"{name}: {count} of {one.numel()}")
    return {
        "ok": not differing,
        "note": f"{len(pairs)} compared" + "; differ: " * bool(differing) + ", ".join(differing),
    }


def make_layer(form: Format, context: Context) -> FrozenLinear:
    """Return a frozen layer with the same random weight everywhere."""
    torch.manual_seed(0)
    return FrozenLinear.from_linear(nn.Linear(K, N), BF16, form=form).to(context.device)


def forward_backward(module: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the answer and the gradient for x."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


def require_triton(context: Context) -> None:
    """Raise NotHere if the Triton kernels cannot run on the device."""
    require_cuda(context.device)
    section = settings.Quantize(compute="fp8", kernels="triton")
    if text := precision.find_problem(section, context.device):
        raise NotHere(text)


def require_fp8(context: Context, recipe: str = "current") -> None:
    """Raise NotHere if the device cannot multiply in FP8 with this recipe."""
    section = settings.Quantize(compute="fp8", recipe=recipe, scale="128x128" if recipe == "block" else "auto")
    if text := precision.find_problem(section, context.device):
        raise NotHere(text)


# -- weights -----------------------------------------------------------------------------------------------------------


@question("encode: the bytes and scales of the CPU")
def check_encode(context: Context) -> dict[str, Any]:
    """Compare quantizing on the device with quantizing on the CPU."""
    pairs = {}
    for form in SCALED:
        there = formats.encode(make_weight().to(context.device), form)
        for part, one, other in zip(("bytes", "scale"), there, formats.encode(make_weight(), form), strict=True):
            pairs[f"{form} {part}"] = (one, other)
    return compare_pairs(pairs)


@question("decode: all 254 finite e4m3 codes, and int8, rounded once from float32")
def check_decode(context: Context) -> dict[str, Any]:
    """Compare dequantized codes with float64."""
    pairs = {}
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    bytes_NK = torch.stack([codes, codes.flip(0)])
    scale = torch.tensor([[0.0123456789], [7.7e-4]])
    values = {"fp8": bytes_NK.view(torch.float8_e4m3fn).double(), "int8": bytes_NK.view(torch.int8).double()}
    for storage, exact in values.items():
        for dtype in (torch.float32, BF16, torch.float16):
            # e4m3 times float32 is exact in float64: rounded to float32 here, then to the dtype.
            expected = (exact * scale.double()).float().to(dtype)
            parts = (bytes_NK.to(context.device), scale.to(context.device))
            pairs[f"{storage} to {dtype}"] = (formats.decode(parts, storage, dtype), expected)
    return compare_pairs(pairs)


@question("nf4: decoded on the device as on the CPU, from the same bytes")
def check_nf4_decode(context: Context) -> dict[str, Any]:
    """Compare dequantized nf4 values with the CPU's."""
    parts = formats.encode(make_weight(), NF4)
    there = formats.decode(tuple(part.to(context.device) for part in parts), "nf4", torch.float32)
    return check_limit(compute_error(there, formats.decode(parts, "nf4", torch.float32)), 1e-6)


@question("nf4: weight error when encoded on the device (bell-shaped weights)")
def check_nf4_encode(context: Context) -> dict[str, Any]:
    """Compare a weight after nf4 with the weight before."""
    exact = make_random(N, K) * 0.02
    parts = formats.encode(exact.to(context.device), NF4)
    return check_limit(compute_error(formats.decode(parts, "nf4", torch.float32), exact), 0.10)


# -- layers ------------------------------------------------------------------------------------------------------------


@question("upcast: answer and gradient equal F.linear with the decoded weight, bit for bit")
def check_upcast(context: Context) -> dict[str, Any]:
    """Compare a frozen layer's output and gradient with `F.linear` on its dequantized weight."""
    pairs = {}
    x, grad = (
        make_random(2, 77, K, dtype=BF16).to(context.device),
        make_random(2, 77, N, dtype=BF16, seed=1).to(context.device),
    )
    for form in [*SCALED, NF4]:
        frozen = make_layer(form, context)
        y, grad_x = forward_backward(frozen, x, grad)
        plain = frozen.weight
        expected = forward_backward(lambda x, plain=plain, frozen=frozen: F.linear(x, plain, frozen.bias), x, grad)
        pairs |= {f"{form} y": (y, expected[0]), f"{form} grad": (grad_x, expected[1])}
    return compare_pairs(pairs)


@question("upcast: a frozen convolution's answer and gradient against torch's with the decoded weight in float64")
def check_convolution(context: Context) -> dict[str, Any]:
    """Compare frozen convolutions with torch's convolution and its autograd in float64; bf16 rounds by 0.4 %."""
    worst = 0.0
    x = make_random(2, 64, 33, 31, dtype=BF16).to(context.device)
    for form in (Format("int8", "1x64"), Format("fp8", "row"), NF4):
        for stride, padding in ((1, 1), (2, 1)):
            torch.manual_seed(0)
            plain = nn.Conv2d(64, 96, 3, stride, padding)
            frozen = FrozenConv2d.from_conv(plain, BF16, form=form).to(context.device)
            exact = nn.Conv2d(64, 96, 3, stride, padding).double().requires_grad_(False)
            exact.weight.copy_(frozen.weight)
            exact.bias.copy_(frozen.bias)
            grad = torch.ones_like(frozen(x))
            expected = forward_backward(exact, x.cpu().double(), grad.cpu().double())
            answers = forward_backward(frozen, x, grad)
            worst = max(worst, *map(compute_error, answers, expected))
    return check_limit(worst, 0.005)


@question("upcast: bytes kept for backward beside x and the layer's own")
def count_saved_bytes(context: Context) -> dict[str, Any]:
    """Count the bytes that autograd keeps beside the layer's own tensors and its input."""
    most = 0
    for form in [*SCALED, NF4]:
        frozen = make_layer(form, context)
        x = make_random(77, K, dtype=BF16).to(context.device).requires_grad_()
        own = {one.untyped_storage().data_ptr() for one in (*frozen.parameters(), *frozen.buffers(), x)}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            frozen(x)
        most = max(most, sum(kept.values()))
    return check_limit(most, 0, "bytes")


@question("_scaled_mm: unit scales against float64, precise accumulation")
def check_scaled_mm(context: Context) -> dict[str, Any]:
    """Compare the FP8 matmul with float64."""
    return measure_scaled_mm(context, fast=False, limit=0.003)


@question("_scaled_mm: unit scales against float64, fast accumulation")
def check_scaled_mm_fast(context: Context) -> dict[str, Any]:
    """Compare the FP8 matmul with fast accumulation with float64."""
    return measure_scaled_mm(context, fast=True, limit=0.01)


def measure_scaled_mm(context: Context, fast: bool, limit: float) -> dict[str, Any]:
    """Check the error of scaled_mm. bf16 rounds to 0.17 % (rms); anything beyond that comes from the accumulation."""
    require_fp8(context)
    worst, where = 0.0, ""
    for tokens in (1, 16, 77, 512, 1111):
        a = make_random(tokens, 3072).to(torch.float8_e4m3fn).to(context.device)
        w = make_random(1024, 3072, seed=1).to(torch.float8_e4m3fn).to(context.device)
        answer = matmul.multiply_unscaled(a, w.view(torch.uint8), BF16, fast)
        found = compute_error(answer, a.cpu().double() @ w.cpu().double().T)
        if found > worst or math.isnan(found):
            worst, where = found, f"M = {tokens}"
    return check_limit(worst, limit, note=f"worst at {where}")


def ask_fp8_layer(context: Context, compute: str, recipe: str) -> dict[str, Any]:
    """Compare a layer's FP8 output and gradient with float64 on its dequantized weight."""
    require_fp8(context, recipe)
    form = Format("fp8", "128x128" if recipe == "block" else "row")
    frozen = make_layer(form, context)
    frozen.set_compute_(compute, recipe)
    x, grad = make_random(2, 77, K, dtype=BF16), make_random(2, 77, N, dtype=BF16, seed=1)
    y, grad_x = forward_backward(frozen, x.to(context.device), grad.to(context.device))
    weight_NK = frozen.weight.double().cpu()
    exact_y = F.linear(x.double(), weight_NK, frozen.bias.double().cpu())
    found = max(compute_error(y, exact_y), compute_error(grad_x, grad.double() @ weight_NK))
    # Two e4m3 operands: 2.65 % (row scales) of which the weight's are not counted here.
    return check_limit(found, 0.045, note="the larger of answer and gradient, against the decoded weight")


for _compute in ("fp8", "fp8_forward"):
    for _recipe in ("current", "delayed", "block"):
        QUESTIONS[f"layer: compute {_compute}, recipe {_recipe}"] = lambda context, compute=_compute, recipe=_recipe: (
            ask_fp8_layer(context, compute, recipe)
        )


@question("layer: a row with NaN or infinity answers NaN, and no other row does")
def check_broken_rows(context: Context) -> dict[str, Any]:
    """Check that only rows with NaN or infinity become NaN."""
    require_fp8(context)
    frozen = make_layer(Format("fp8", "row"), context)
    frozen.set_compute_("fp8")
    x = make_random(32, K, dtype=BF16)
    x[3, 5], x[9, 0] = float("nan"), float("inf")
    broken = frozen(x.to(context.device)).isnan().any(dim=1).cpu().nonzero()[:, 0].tolist()
    return {"ok": broken == [3, 9], "note": f"rows {broken}"}


# -- Triton kernels ----------------------------------------------------------------------------------------------------


@question("triton quantize_rows: torch's bytes and scales")
def check_triton_quantize(context: Context) -> dict[str, Any]:
    """Compare the kernel that quantizes rows with torch's operations."""
    require_triton(context)
    from lora_fp8.precision import kernels

    pairs = {}
    for shape in ((5, 33), (300, 3072), (8, 15360), (4, 55296)):
        for dtype in (torch.float32, BF16, torch.float16):
            x = (make_random(*shape) * torch.logspace(-2, 2, shape[0])[:, None]).to(dtype).to(context.device)
            factor = (make_random(shape[1], seed=2).abs() + 0.1).to(context.device).view(-1, 1)
            for name, folded in {"": x, " folded": x * factor.view(1, -1)}.items():
                values, scale = kernels.quantize_rows(x, factor if name else None)
                expected, expected_scale = matmul.quantize(folded)
                pairs[f"{shape} {dtype}{name}"] = (values.view(torch.uint8), expected.view(torch.uint8))
                pairs[f"{shape} {dtype}{name} scale"] = (scale, expected_scale)
    return compare_pairs(pairs)


@question("triton transpose_bytes: torch's")
def check_triton_transpose(context: Context) -> dict[str, Any]:
    """Compare the kernel that transposes bytes with torch."""
    require_triton(context)
    from lora_fp8.precision import kernels

    pairs = {}
    for shape in ((3000, 1111), (128, 128), (1, 5), (9216, 3072)):
        original = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        pairs[str(shape)] = (kernels.transpose_bytes(original.to(context.device)), original.t().contiguous())
    return compare_pairs(pairs)


@question("triton epilogue: within one rounding of float64")
def check_triton_epilogue(context: Context) -> dict[str, Any]:
    """Compare the epilogue's kernel with float64."""
    require_triton(context)
    from lora_fp8.precision import kernels

    worst = 0.0
    for dtype, step in STEP.items():
        for rank in (1, 16, 64, 100):
            sums = make_random(300, 1000).to(torch.float32 if dtype == torch.float16 else dtype).to(context.device)
            a_scale, w_scale = (
                make_random(300, 1, seed=1).to(context.device),
                make_random(1000, 1, seed=2).to(context.device),
            )
            bias = make_random(1000, seed=3).to(context.device)
            h = make_random(300, rank, seed=4).to(dtype).to(context.device)
            b = make_random(1000, rank, seed=5).to(dtype).to(context.device)
            exact = sums.double() * a_scale.double() * w_scale.double().T + bias.double() + h.double() @ b.double().T
            y = kernels.apply_epilogue(sums, a_scale, w_scale, bias, h, b, 1.0, dtype)
            excess = ((y.double() - exact).abs() - 1e-4) / (step * exact.abs() + 1e-12)
            worst = max(worst, excess.max().item())
    return check_limit(worst, 1.0, "rounding steps beyond 1e-4")


@question("triton layers: eager, against torch's kernels")
def check_triton_eager(context: Context) -> dict[str, Any]:
    """Compare a network on the kernels with one on torch's operations, without compilation."""
    return compare_triton_network(context, compiled=False)


@question("triton layers: as custom operators under torch.compile")
def check_triton_compiled(context: Context) -> dict[str, Any]:
    """Compare a network on the kernels with one on torch's operations, compiled."""
    return compare_triton_network(context, compiled=True)


def compare_triton_network(context: Context, compiled: bool) -> dict[str, Any]:
    """Compare two adapted layers with and without the kernels: outputs and all gradients."""
    require_triton(context)
    results = []
    for kernels in ("torch", "triton"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(context.device)
        section = settings.Quantize(compute="fp8", kernels=kernels, fp8_min_features=0)
        precision.quantize_(model, section, (), BF16)
        adapters.inject(model, settings.Adapter(rank=16, alpha=16), ["0", "2"], seed=0)
        fill_adapters(model)
        x = make_random(3, 100, 256, dtype=BF16).to(context.device).requires_grad_()
        y = (torch.compile(model, fullgraph=True) if compiled and kernels == "triton" else model)(x)
        y.float().square().sum().backward()
        results.append(
            [y.detach(), x.grad, *[parameter.grad for _, parameter in adapters.list_trained_parameters(model)]]
        )
    worst = max(compute_error(got, expected) for expected, got in zip(*results, strict=True))
    return check_limit(worst, 0.03, note="worst of the answer and all gradients")


def fill_adapters(model: nn.Module) -> None:
    """Fill B with random values. It starts at zero, and half of the backward would multiply by zero."""
    for name, parameter in adapters.list_trained_parameters(model):
        if "lora_B" in name:
            parameter.data.copy_(make_random(*parameter.shape, seed=len(name)) * 0.1)


# -- optimizer ---------------------------------------------------------------------------------------------------------


def make_parameters(device: torch.device) -> list[tuple[str, nn.Parameter]]:
    """Return three parameters in bf16, with the same values at every call."""
    shapes = {"down": (16, 1024), "up": (1024, 16), "small": (4, 8)}
    return [(name, nn.Parameter((make_random(*shape) * 0.01).to(BF16).to(device))) for name, shape in shapes.items()]


def make_gradients(step: int, device: torch.device) -> dict[str, Tensor]:
    """Return a step's gradients of `parameters`, with the same values at every call."""
    return {
        name: make_random(*one.shape, seed=step * 7 + number).to(device)
        for number, (name, one) in enumerate(make_parameters(torch.device("cpu")))
    }


def make_optimizer(named: list[tuple[str, nn.Parameter]], rounding: str = "master") -> optim.AdapterOptimizer:
    """Return the 8-bit optimizer of these parameters."""
    section = settings.Optimizer(name="adamw8bit", rounding=rounding, lr=1e-3)
    return optim.build(named, section, base_storage="fp8", seed=0)


@question("bitsandbytes AdamW8bit: 20 updates, against torch's AdamW in float32")
def check_adamw8bit(context: Context) -> dict[str, Any]:
    """Compare twenty steps of the 8-bit optimizer with AdamW in float64."""
    named = make_parameters(context.device)
    found = make_optimizer(named)
    exact = {name: nn.Parameter(one.detach().double().cpu()) for name, one in named}
    start = {name: one.detach().clone() for name, one in exact.items()}
    section = settings.Optimizer(name="adamw8bit")
    reference = torch.optim.AdamW(
        exact.values(), lr=1e-3, betas=(section.beta1, optim.resolve_beta2(section)), eps=section.eps,
        weight_decay=section.weight_decay,
    )  # fmt: skip
    for step in range(1, 21):
        found.step(found.layout.join(make_gradients(step, context.device)), 1e-3, step)
        for name, one in exact.items():
            one.grad = make_gradients(step, torch.device("cpu"))[name].double()
        reference.step()
    tensors, _ = found.copy_state()
    moved = [
        compute_error(tensors[f"{name}/master"].double() - start[name], exact[name] - start[name]) for name in exact
    ]
    return check_limit(max(moved), 0.08, note="error of the movement, worst of three tensors")


@question("bitsandbytes AdamW8bit: saved, loaded, and the next update the same to the bit")
def check_adamw8bit_reload(context: Context) -> dict[str, Any]:
    """Compare the step after reloading the optimizer with the step without."""
    pairs = {}
    for rounding in ("master", "stochastic"):
        named = make_parameters(context.device)
        first = make_optimizer(named, rounding)
        for step in range(1, 6):
            first.step(first.layout.join(make_gradients(step, context.device)), 1e-3, step)
        tensors, facts = first.copy_state()
        again = [(name, nn.Parameter(one.detach().clone())) for name, one in named]
        second = make_optimizer(again, rounding)
        second.load_state(tensors, facts)
        for one in (first, second):
            one.step(one.layout.join(make_gradients(6, context.device)), 1e-3, 6)
        pairs |= {f"{rounding} {name}": (one, other) for (name, one), (_, other) in zip(named, again, strict=True)}
        states = first.copy_state()[0], second.copy_state()[0]
        pairs |= {f"{rounding} {key}": (states[0][key], states[1][key]) for key in {**states[0], **states[1]}}
    return compare_pairs(pairs)


@question("stochastic rounding: the mean is kept")
def check_stochastic(context: Context) -> dict[str, Any]:
    """Measure how often stochastic rounding rounds up, against the exact share."""
    # A quarter of the way from 1 to the next bf16 value, 1 + 2^-7: a quarter of 2^20 draws go up, within 5 sigma.
    values = torch.full((2**20,), 1.0 + 2.0**-9, device=context.device)
    rounded = optim.round_stochastically(values, torch.Generator(context.device).manual_seed(0))
    share = (rounded.float() > 1.0).double().mean().item()
    return check_limit(abs(share - 0.25), 5 * math.sqrt(0.25 * 0.75 / 2**20), "off the expected share")


@question("stochastic rounding: the same seed gives the same bits")
def check_stochastic_seeded(context: Context) -> dict[str, Any]:
    """Check that one seed rounds to the same bits."""
    values = make_random(2**16).to(context.device)
    one, other = (optim.round_stochastically(values, torch.Generator(context.device).manual_seed(5)) for _ in range(2))
    return compare_pairs({"bits": (one, other)})


# -- memory ------------------------------------------------------------------------------------------------------------


@question("offload: answers and gradients of 20 steps the same to the bit")
def check_offload(context: Context) -> dict[str, Any]:
    """Compare steps with offloaded weights with steps without."""
    require_cuda(context.device)
    pairs = {}
    for compute in ("upcast", "fp8"):
        if compute == "fp8":
            require_fp8(context)
        results = [run_offloaded_steps(share, compute, context.device) for share in (0.0, 0.5, 1.0)]
        for share, found in zip((0.5, 1.0), results[1:], strict=True):
            for number, pair in enumerate(zip(found, results[0], strict=True)):
                pairs[f"{compute} {share} {number}"] = pair
    courier = stream._couriers[torch.device("cuda", torch.cuda.current_device())]
    facts = compare_pairs(pairs)
    return facts | {"note": f"{facts['note']}; copies early {courier.early}, late {courier.late}"}


def run_offloaded_steps(share: float, compute: str, device: torch.device) -> list[Tensor]:
    """Return all adapter gradients of 20 checkpointed steps, with a share of the frozen bytes offloaded to RAM."""
    torch.manual_seed(0)
    widths = (512, 1024, 2048, 512, 1024, 512)
    pairs = zip(widths, widths[1:], strict=False)
    model = nn.Sequential(*(FrozenLinear.from_linear(nn.Linear(*pair), BF16) for pair in pairs))
    for one in model:
        one.set_compute_(compute)
    precision.offload_(model, share)
    adapters.inject(model, settings.Adapter(rank=4, alpha=4), [str(index) for index in range(len(model))], seed=0)
    fill_adapters(model)
    model.to(device)
    found = []
    for seed in range(20):
        x = make_random(64, widths[0], dtype=BF16, seed=seed).to(device).requires_grad_()
        model.zero_grad()
        half = len(model) // 2
        y = checkpoint(model[half:], checkpoint(model[:half], x, use_reentrant=False), use_reentrant=False)
        y.float().square().mean().backward()
        found += [parameter.grad.clone() for _, parameter in adapters.list_trained_parameters(model)]
    return found


@question("offload: compiled blocks give the same gradients over 6 steps")
def check_compiled_offload(context: Context) -> dict[str, Any]:
    """Compare compiled steps with offloaded weights with those without; attention's backward may round otherwise."""
    require_cuda(context.device)
    pairs = {}
    for checkpointing in (True, False):
        results = [run_compiled_steps(share, checkpointing, context.device) for share in (0.0, 0.5, 1.0)]
        for share, found in zip((0.5, 1.0), results[1:], strict=True):
            for number, pair in enumerate(zip(found, results[0], strict=True)):
                pairs[f"recomputed {checkpointing} {share} {number}"] = pair
    return compare_pairs(pairs)


def run_compiled_steps(share: float, checkpointing: bool, device: torch.device) -> list[Tensor]:
    """Return all adapter gradients of 6 steps of compiled blocks, with a share of the frozen bytes offloaded to RAM."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack().to(BF16)
    precision.quantize_(model, settings.Quantize(), (), BF16)
    precision.offload_(model, share, precision.find_blocks(model))
    names = [name for name, one in model.named_modules() if isinstance(one, FrozenLinear)]
    adapters.inject(model, settings.Adapter(rank=4, alpha=4), names, seed=0)
    fill_adapters(model)
    model.to(device).train()
    memory.apply_(model, settings.Memory(gradient_checkpointing=checkpointing, compile="blocks"))
    found = []
    for seed in range(6):
        x = make_random(64, 1024, dtype=BF16, seed=seed).to(device).requires_grad_()
        model.zero_grad()
        model(x).float().square().mean().backward()
        found += [parameter.grad.clone() for _, parameter in adapters.list_trained_parameters(model)]
    return found


class StackBlock(nn.Module):
    """A block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what the layers make of it."""
        return x + self.narrow(nn.functional.silu(self.wide(x)))


class Stack(nn.Module):
    """Six blocks, recomputed as diffusers' models recompute theirs."""

    _repeated_blocks = ("StackBlock",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StackBlock() for _ in range(6))
        self.recompute: Any = None

    def enable_gradient_checkpointing(self, recompute: Any) -> None:
        """Take the function that runs a block so that it is recomputed."""
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x) if self.recompute is None else self.recompute(block, x)
        return x


@question("compile: no decoded weight is kept between forward and backward")
def check_compiled_memory(context: Context) -> dict[str, Any]:
    """Check that a compiled model keeps no dequantized weight for its backward pass."""
    require_cuda(context.device)
    width, depth = 2048, 8
    kept = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        linears = [nn.Linear(width, width) for _ in range(depth)]
        model = nn.ModuleList(FrozenLinear.from_linear(one, BF16) for one in linears).to(context.device)
        if compiled:
            for block in model:
                block.compile(fullgraph=True)
        x = make_random(64, width, dtype=BF16).to(context.device).requires_grad_()
        for _ in range(2):  # the first compiles
            wait(context.device)
            before = torch.cuda.memory_allocated(context.device)
            y = x
            for block in model:
                y = block(y)
            wait(context.device)
            kept[compiled] = torch.cuda.memory_allocated(context.device) - before
            y.float().mean().backward()
            del y
    # One decoded weight is 8 MiB; activations of a layer are 0.25 MiB.
    return check_limit(
        (kept[True] - kept[False]) / 2**20, 1.0, "MiB more than eager", f"eager keeps {kept[False] / 2**20:.1f} MiB"
    )


@question("out of memory: an exception, one sentence, and the GPU is usable afterwards")
def check_out_of_memory(context: Context) -> dict[str, Any]:
    """Check the advice after running out of memory, and that the device works afterwards."""
    require_cuda(context.device)
    total = torch.cuda.get_device_properties(context.device).total_memory
    processes = SimpleNamespace(world=1, device=context.device)
    job = settings.Job(model=settings.Model(family="flux", path="demo"))
    session: Any = SimpleNamespace(job=job, memory=job.memory, processes=processes)
    session.describe_full_memory = partial(Session.describe_full_memory, session)
    try:
        with explain_errors(session):
            torch.empty(2 * total, dtype=torch.uint8, device=context.device)
        return {"ok": False, "note": "twice the GPU's memory could be allocated"}
    except RunFailure as error:
        text = str(error)
    usable = torch.ones(1000, device=context.device).sum().item() == 1000
    return {"ok": usable and "GiB" in text, "note": text}


# -- attention ---------------------------------------------------------------------------------------------------------

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LENGTHS = ((16, 16), (48, 48), (64, 77), (192, 192), (333, 333), (1024, 77), (1088, 1088))
"""Tokens of queries and keys: miniatures, SDXL's texts, and lengths between the tiles of the kernels."""


def attend(
    backend: SDPBackend | None, lengths: tuple[int, int], heads: int, masked: bool, device: torch.device
) -> list[Tensor]:
    """Return the answer of attention and its gradients for q, k and v; without a backend exact, in float64."""
    dtype = torch.float64 if backend is None else BF16
    tensors = [
        # As diffusers passes them: heads beside tokens in memory, and only then exchanged.
        make_random(1, length, heads, 128, dtype=BF16, seed=seed).to(device, dtype).transpose(1, 2).requires_grad_()
        for seed, length in enumerate((lengths[0], lengths[1], lengths[1]))
    ]
    mask = torch.ones(1, 1, 1, lengths[1], dtype=torch.bool, device=device) if masked else None
    if masked:
        mask[..., -lengths[1] // 4 :] = False
        mask = mask.expand(1, heads, lengths[0], lengths[1])
    grad = make_random(1, lengths[0], heads * 128, dtype=BF16, seed=9).to(device, dtype)
    with sdpa_kernel(backend or SDPBackend.MATH):
        y = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
        y.transpose(1, 2).flatten(2).backward(grad)
    return [y, *(tensor.grad for tensor in tensors)]


def ask_attention(context: Context, name: str) -> dict[str, Any]:
    """Compare one backend's answers and gradients with float64, at all lengths, with and without a mask."""
    require_cuda(context.device)
    wrong, worst, refused = [], 0.0, 0
    for lengths in LENGTHS:
        for heads in (1, 10):
            for masked in (False, True):
                exact = attend(None, lengths, heads, masked, context.device)
                try:
                    found = attend(BACKENDS[name], lengths, heads, masked, context.device)
                except RuntimeError as reason:
                    if "No available kernel" not in str(reason):
                        raise
                    refused += 1
                    continue
                off = [compute_error(one, other) for one, other in zip(found, exact, strict=True)]
                if not max(off) < 0.03:
                    each = " ".join(f"{value:.2g}" for value in off)
                    wrong.append(f"{lengths[0]}x{lengths[1]}, {heads} heads{', mask' * masked}: {each}")
                worst = max([worst, *(value for value in off if value < 0.03)])
    note = f"{refused} refused; the right ones are off by at most {worst:.2g}"
    return {"ok": not wrong, "value": len(wrong), "unit": "wrong", "note": "; ".join([note, *wrong])}


for _name in BACKENDS:
    QUESTIONS[f"attention, {_name}: answer and gradients against float64"] = lambda context, name=_name: ask_attention(
        context, name
    )


@question("attention, flash: the same bits each time")
def check_repeated_attention(context: Context) -> dict[str, Any]:
    """Compare the gradients of two equal backward passes, and of two with torch's deterministic kernels; time both."""
    require_cuda(context.device)
    generator = torch.Generator(context.device).manual_seed(0)
    shape = (1, 24, 4608, 128)
    tensors = [
        torch.randn(shape, device=context.device, dtype=BF16, generator=generator).requires_grad_() for _ in range(3)
    ]

    def run() -> list[Tensor]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(*tensors)
        return list(torch.autograd.grad(y, tensors, torch.ones_like(y)))

    same, seconds = {}, {}
    for name, deterministic in (("as it is", False), ("deterministic", True)):
        torch.use_deterministic_algorithms(deterministic)
        try:
            same[name] = all(map(torch.equal, run(), run()))
            wait(context.device)
            started = time.perf_counter()
            for _ in range(20):
                run()
            wait(context.device)
            seconds[name] = (time.perf_counter() - started) / 20
        finally:
            torch.use_deterministic_algorithms(False)
    words = [
        f"{name}: {'the same bits' if same[name] else 'other bits'}, {1e3 * seconds[name]:.2f} ms" for name in same
    ]
    return {"ok": same["deterministic"], "same": same, "milliseconds": seconds, "note": "; ".join(words)}


# -- compiled: last, because compiling takes long ----------------------------------------------------------------------


def run_flux_steps(device: torch.device, compiled: bool, recorded: bool) -> list[dict[str, Tensor]]:
    """Return the adapters' gradients of a miniature FLUX without updates: six passes of two sizes, in turn."""
    torch._dynamo.reset()
    section = settings.Memory(compile="blocks" if compiled else "off")
    model = bench_step.make_build(storage="fp8")("flux", "tiny", device).train()
    memory.apply_(model, section)
    gradients = Gradients(adapters.list_trained_parameters(model))
    recorder = Recorder()

    def run(inputs: dict[str, Tensor]) -> Tensor:
        y = model(**inputs, return_dict=False)[0]
        loss = y.float().square().mean()
        loss.backward()
        gradients.collect_()
        return loss.detach()

    found = []
    for number in range(6):
        gradients.zero_()
        inputs = bench_step.make_inputs("flux", (64, 96)[number % 2], "tiny", device)
        inputs["hidden_states"] *= 1 + 0.25 * number
        loss = recorder.run(run, inputs) if recorded else run(inputs)
        found.append({"loss": loss, "gradient": gradients.values.clone()})
    if recorded and recorder.count != 2:
        raise AssertionError(f"{recorder.count} recordings instead of 2")
    return found


def compare_steps(context: Context, *, compiled: bool, recorded: bool, cudnn: bool = False) -> dict[str, Any]:
    """Compare a compiled or recorded FLUX with the same model run plainly: the losses, and all gradients as one."""
    require_cuda(context.device)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        exact = run_flux_steps(context.device, False, False)
        found = run_flux_steps(context.device, compiled, recorded)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    off = {key: max(compute_error(a[key], b[key]) for a, b in zip(found, exact, strict=True)) for key in exact[0]}
    same = all(torch.equal(a["gradient"], b["gradient"]) for a, b in zip(found, exact, strict=True))
    note = f"loss {off['loss']:.3g}, gradient {off['gradient']:.3g}" + ", the same bits" * same
    return check_limit(max(off.values()), 0.05, note=note)


@question("recorded: passes of two sizes replayed as CUDA graphs, against unrecorded")
def check_recorded(context: Context) -> dict[str, Any]:
    """Compare a model replayed from CUDA graphs with the same model unrecorded."""
    return compare_steps(context, compiled=False, recorded=True)


@question("compile: a FLUX block as eager, attention without cuDNN")
def check_compiled(context: Context) -> dict[str, Any]:
    """Compare a compiled model with the same model uncompiled, as training runs it."""
    return compare_steps(context, compiled=True, recorded=False)


@question("compile and record: a FLUX block as eager, attention without cuDNN")
def check_compiled_and_recorded(context: Context) -> dict[str, Any]:
    """Compare a compiled model replayed from CUDA graphs with the same model run plainly."""
    return compare_steps(context, compiled=True, recorded=True)


@question("compile: a FLUX block as eager, attention with cuDNN")
def check_compiled_cudnn(context: Context) -> dict[str, Any]:
    """Compare a compiled model with the same model uncompiled, with torch's own choice for attention."""
    return compare_steps(context, compiled=True, recorded=False, cudnn=True)
