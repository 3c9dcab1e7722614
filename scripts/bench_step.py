"""Measure seconds and memory of a training step: this project's modes beside the usual alternatives, in one run.

    python scripts/bench_step.py --size small              on a CPU; most of the time goes into compiling
    python scripts/bench_step.py --models flux             full size, on a GPU
    python scripts/bench_step.py --plan H200               full size without a GPU: bytes, FLOPs and floors only

The networks are diffusers' own classes with random weights. The adapters are the same everywhere (LoRA, bf16), the loss
is a mean square, and the optimizer is torch's AdamW on the adapters. A candidate that raises is a row with its error.

The rounds are interleaved, every second one in reverse order. If all candidates fit beside each other (any size but
full), each turn is followed by one of our bf16 step, and the ratio is of these two, so that other load hits both.

Writes benchmarks/step_<machine>.md and .json; `--plan` writes benchmarks/step_plan_<chip>.md.

The floor is calculated from rates that this run measures on this machine (`--plan`: the chip's data sheet); see
`floor`. It does not include norms, other elementwise work, the adapters' own GEMMs (about 1 %), and launches.
"""

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8 import (
    adapters,
    families,
    precision,
)
from lora_fp8.errors import UserError
from lora_fp8.plan import dry_run
from lora_fp8.plan.training_memory import count_bytes
from lora_fp8.settings import (
    Adapter,
    Memory,
    Optimizer,
    Quantize,
)
from lora_fp8.training import (
    memory,
    optim,
)

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
META = torch.device("meta")
PIXELS = {"full": [512, 1024], "small": [256], "tiny": [64]}
FAMILIES = {"sdxl": "sdxl", "flux": "flux", "qwen": "qwen_image"}


# -- networks of the large models' shapes ------------------------------------------------------------------------------


def make_network(model: str, size: str) -> nn.Module:
    """Make the denoiser on the meta device. full: the real one; small, tiny: fewer, narrower blocks of its kinds."""
    import diffusers

    with init_empty_weights():  # keeps the tensors that a constructor computes
        if model == "sdxl":
            widths, depths = {
                "full": ((320, 640, 1280), (1, 2, 10)),
                "small": ((128, 256, 512), (1, 1, 1)),
                "tiny": ((64, 64, 128), (1, 1, 1)),
            }[size]
            return diffusers.UNet2DConditionModel(
                block_out_channels=widths,
                transformer_layers_per_block=depths,
                sample_size=128,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                layers_per_block=2 if size == "full" else 1,
                attention_head_dim=tuple(width // 64 for width in widths),
                cross_attention_dim=2048,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            )
        heads = {"full": 24, "small": 6, "tiny": 1}[size]
        if model == "flux":
            layers = {} if size == "full" else {"num_layers": 1, "num_single_layers": 1}
            return diffusers.FluxTransformer2DModel(guidance_embeds=True, num_attention_heads=heads, **layers)
        layers = {} if size == "full" else {"num_layers": 2 if size == "small" else 1}
        return diffusers.QwenImageTransformer2DModel(num_attention_heads=heads, **layers)


def make_inputs(model: str, pixels: int, size: str, device: torch.device) -> dict[str, Any]:
    """Make the denoiser's inputs for a square image: the real models' token counts, shorter texts if not full."""
    side = pixels // 16
    text = {"sdxl": 77, "flux": 512, "qwen": 256}[model]
    text = min(text, {"full": 512, "small": 120, "tiny": 32}[size])
    generator = torch.Generator().manual_seed(0)

    def draw_noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, BF16)

    if model == "sdxl":
        added = {"text_embeds": draw_noise(1, 1280), "time_ids": torch.full((1, 6), float(pixels), device=device)}
        sample = draw_noise(1, 4, 2 * side, 2 * side)
        time_1 = torch.tensor([500], device=device)
        return {
            "sample": sample,
            "timestep": time_1,
            "encoder_hidden_states": draw_noise(1, text, 2048),
            "added_cond_kwargs": added,
        }
    found = {
        "hidden_states": draw_noise(1, side * side, 64),
        "timestep": torch.tensor([0.5], device=device, dtype=BF16),
    }
    if model == "flux":
        ids = torch.zeros(side * side, 3, device=device)
        ids[:, 1], ids[:, 2] = torch.arange(side * side) // side, torch.arange(side * side) % side
        found |= {"encoder_hidden_states": draw_noise(1, text, 4096), "pooled_projections": draw_noise(1, 768)}
        found |= {"guidance": torch.tensor([3.5], device=device), "img_ids": ids}
        return found | {"txt_ids": torch.zeros(text, 3, device=device)}
    mask = torch.ones(1, text, dtype=torch.bool, device=device)
    found |= {"encoder_hidden_states": draw_noise(1, text, 3584), "encoder_hidden_states_mask": mask}
    return found | {"img_shapes": [(1, side, side)]}


def make_random_weights(denoiser: nn.Module, device: torch.device) -> Any:
    """Yield (name, tensor) of each weight like a checkpoint: normal, with a size that keeps activations in bounds."""
    generator = torch.Generator(device).manual_seed(0)
    for name, meta in denoiser.state_dict().items():
        fan_in = max(1, meta[0].numel()) if meta.ndim > 1 else 0
        tensor = torch.empty(meta.shape, dtype=BF16, device=device)
        if fan_in:
            yield name, tensor.normal_(std=fan_in**-0.5, generator=generator)
        else:
            yield name, tensor.fill_(1.0 if name.endswith("weight") and "norm" in name else 0.0)


def fill_(denoiser: nn.Module, model: str, size: str, device: torch.device) -> nn.Module:
    """Put random weights into a denoiser as `precision.quantize_` leaves it.

    On the meta device they have only shapes and dtypes.
    """
    if device == META:
        return denoiser.to(device=device, dtype=BF16)
    precision.fill_(denoiser, make_random_weights(make_network(model, size), device), BF16, device)
    return denoiser


def list_adapted_layers(denoiser: nn.Module, model: str) -> list[str]:
    """Return the layers that get a LoRA: the family's target modules."""
    family = families.get(FAMILIES[model])
    return [
        name
        for name, _ in denoiser.named_modules()
        if any(f".{name}".endswith(f".{one}") for one in family.adapter_targets)
        and not any(precision.name_matches(name, one) for one in family.adapter_exclude)
    ]


# -- candidates --------------------------------------------------------------------------------------------------------


Build = Callable[[str, str, torch.device], nn.Module]
"""(model, size, device) -> the denoiser with adapters; on the meta device without values."""


@dataclass(frozen=True)
class Candidate:
    """One way to store and multiply the base."""

    name: str
    build: Build
    rule: str
    """The rule of `floor` that applies."""
    weight_bytes: float
    """Stored bytes per weight."""
    compile: bool = False
    checkpointing: bool = False
    cuda_graphs: bool = False
    autocast: bool = False

    @property
    def ours(self) -> bool:
        """Return True for this trainer, False for a peer."""
        return self.name.startswith("ours")

    @property
    def title(self) -> str:
        """Return the name of the candidate in tables, with its switches."""
        switches = " + compile" * self.compile + " + CUDA graphs" * self.cuda_graphs
        return self.name + switches + " + checkpointing" * self.checkpointing


def make_build(**settings: Any) -> Build:
    """Return a function that builds a model as this trainer does, with these settings of [quantize]."""
    section = Quantize(**settings)

    def build(model: str, size: str, device: torch.device) -> nn.Module:
        if device != META and (text := precision.find_problem(section, device)):
            raise UserError(text)
        denoiser = make_network(model, size)
        family = families.get(FAMILIES[model])
        plan = precision.quantize_(denoiser, section, family.keep_precise, BF16, family.modulation)
        precision.set_compute_(fill_(denoiser, model, size, device), plan, section)
        return with_adapters(denoiser, model)

    return build


def build_plain(model: str, size: str, device: torch.device) -> nn.Module:
    """Build the denoiser in bf16, with random weights and without adapters."""
    denoiser = make_network(model, size)
    precision.quantize_(denoiser, Quantize(storage="bf16"), (), BF16)
    return fill_(denoiser, model, size, device)


def with_adapters(denoiser: nn.Module, model: str) -> nn.Module:
    """Add the same LoRA everywhere with peft. B is not zero, or half of the backward would multiply by zero."""
    adapters.inject(denoiser, Adapter(rank=16, alpha=16), list_adapted_layers(denoiser, model), seed=0)
    for name, parameter in adapters.list_trained_parameters(denoiser):
        if "lora_B" in name and not parameter.is_meta:
            parameter.data.normal_(std=0.01, generator=torch.Generator(parameter.device).manual_seed(0))
    return denoiser


def build_peft_bf16(model: str, size: str, device: torch.device) -> nn.Module:
    """Build peft's LoRA on a bf16 base."""
    return with_adapters(build_plain(model, size, device), model)


def build_layerwise_casting(model: str, size: str, device: torch.device) -> nn.Module:
    """Build diffusers' layerwise casting: FP8 storage, dequantized before each layer."""
    denoiser = build_plain(model, size, device)
    denoiser.enable_layerwise_casting(storage_dtype=E4M3, compute_dtype=BF16)
    return with_adapters(denoiser, model)


def build_torchao_training(model: str, size: str, device: torch.device) -> nn.Module:
    """Build torchao's float8 training, which quantizes a bf16 weight at every step."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    denoiser = build_plain(model, size, device)
    emulate = device.type == "cpu"  # as its own tests do where there are no FP8 tensor cores
    padded = model == "sdxl"  # its weight gradient, which nobody needs here, sums over 77 tokens of text
    convert_to_float8_training(
        denoiser,
        config=Float8LinearConfig(emulate=emulate, pad_inner_dim=padded),
        module_filter_fn=lambda module, name: not any(side % 16 for side in module.weight.shape),
    )
    return with_adapters(denoiser, model)


def build_torchao_weights(model: str, size: str, device: torch.device) -> nn.Module:
    """Build torchao's float8 weights, dequantized in each matmul."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    denoiser = build_plain(model, size, device)
    quantize_(denoiser, Float8WeightOnlyConfig(set_inductor_config=False))  # True would tune every row's compiler
    return with_adapters(denoiser, model)


def build_kohya_cast(model: str, size: str, device: torch.device) -> nn.Module:
    """Do as sd-scripts' fp8_base: cast linear weights without a scale; autocast turns them to bf16 at each use."""
    denoiser = build_plain(model, size, device)
    for module in denoiser.modules():
        if type(module) is nn.Linear:
            module.to(E4M3)
    return with_adapters(denoiser, model)


OURS = [
    ("ours bf16", make_build(storage="bf16"), "bf16", 2.0),
    ("ours fp8 row upcast", make_build(storage="fp8"), "upcast", 1.0),
    ("ours fp8 row fp8", make_build(storage="fp8", compute="fp8"), "fp8", 1.0),
    ("ours fp8 row fp8_forward", make_build(storage="fp8", compute="fp8_forward"), "fp8_forward", 1.0),
    ("ours fp8 unscaled upcast", make_build(storage="fp8", scale="none"), "upcast", 1.0),
    ("ours int8 upcast", make_build(storage="int8"), "upcast", 1.03),
    ("ours nf4 upcast", make_build(storage="nf4"), "upcast", 0.52),
    ("ours fp8 row fp8, triton", make_build(storage="fp8", compute="fp8", kernels="triton"), "fp8", 1.0),
    ("ours fp8 row upcast, torchao", make_build(storage="fp8", backend="torchao"), "kept", 1.0),
]
PEERS = [
    ("diffusers + peft bf16", build_peft_bf16, "bf16", 2.0),
    ("diffusers layerwise casting", build_layerwise_casting, "kept", 1.0),
    ("torchao float8 training", build_torchao_training, "cast", 2.0),
    ("torchao float8 weight-only", build_torchao_weights, "kept", 1.0),
    ("kohya unscaled cast", build_kohya_cast, "kept", 1.0),
]


def list_candidates() -> list[Candidate]:
    """List every mode, with and without checkpointing and compilation; the first three also with CUDA graphs."""
    found = []
    for modes in (OURS, PEERS):
        for checkpointing in (False, True):
            for compile_ in (False, True):
                for name, *how in modes:
                    found.append(Candidate(name, *how, compile_, checkpointing, autocast=name.startswith("kohya")))
    for name, *how in OURS[:3]:
        found.append(Candidate(name, *how, compile=True, cuda_graphs=True))
    return found


# -- one step ----------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Measurements of one candidate. Times are (seconds, seconds of CPU time) of each step, turn by turn."""

    candidate: Candidate
    turns: list[list[tuple[float, float]]] = field(default_factory=list)
    beside: list[list[tuple[float, float]]] = field(default_factory=list)
    """Our bf16 step right after each turn."""
    error: str = ""
    held_bytes: int = 0
    peak_bytes: int = 0
    weight_error: float | None = None
    gemms: int | None = None
    decoded_bytes: int | None = None


class Trainer:
    """A candidate's denoiser, ready to step."""

    def __init__(self, candidate: Candidate, model: str, pixels: int, size: str, device: torch.device) -> None:
        self.device, self.candidate = device, candidate
        section = Memory(
            gradient_checkpointing=candidate.checkpointing,
            compile="blocks" if candidate.compile and candidate.ours else "off",
            cuda_graphs=candidate.cuda_graphs,
        )
        if text := memory.find_problem(section, device):
            raise UserError(text)
        self.denoiser = candidate.build(model, size, device).train()
        memory.apply_(self.denoiser, section)
        if candidate.compile and not candidate.ours:
            self.denoiser.compile_repeated_blocks()  # diffusers' way, as its users call it
        self.inputs = make_inputs(model, pixels, size, device)
        self.parameters = [parameter for _, parameter in adapters.list_trained_parameters(self.denoiser)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5)

    def forward_backward(self) -> None:
        """Compute the gradients of one batch."""
        cast = torch.autocast(self.device.type, BF16) if self.candidate.autocast else contextlib.nullcontext()
        with cast:
            answer = self.denoiser(**self.inputs, return_dict=False)[0]
        answer.float().square().mean().backward()

    def step(self) -> None:
        """Make one optimizer step."""
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time_step(self) -> tuple[float, float]:
        """Run a step. Returns (seconds, seconds of CPU time)."""
        wait(self.device)
        started, worked = time.perf_counter(), time.process_time()
        self.step()
        wait(self.device)
        return time.perf_counter() - started, time.process_time() - worked

    def find_base_layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers that have adapters."""
        layers = {name: module.get_base_layer() for name, module in adapters.find_adapted_layers(self.denoiser).items()}
        return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}

    def count_held_bytes(self) -> int:
        """Bytes of the denoiser's parameters and buffers, adapters included."""
        return sum(map(count_bytes, [*self.denoiser.parameters(), *self.denoiser.buffers()]))

    def count_optimizer_bytes(self) -> int:
        """Bytes of the optimizer's tensors."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in states if isinstance(value, Tensor))


def wait(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class BaseGemms(TorchDispatchMode):
    """Counts matrix products with a base weight, known by its shape, or its (wasted) gradient as an operand."""

    NAMES = ("mm", "addmm", "bmm", "_scaled_mm", "_scaled_mm_v2", "linear")

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.shapes, self.count = {frozenset(shape) for shape in shapes}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in self.NAMES:
            tensors = [one for one in (*args, out) if isinstance(one, Tensor) and one.ndim == 2]
            self.count += any(frozenset(one.shape) in self.shapes and min(one.shape) > 16 for one in tensors)
        return out


def inspect(trainer: Trainer, row: Row, model: str, size: str) -> None:
    """Count GEMMs with base weights, decoded weights kept for backward, bytes and error, in one untimed step each."""
    shapes = [(one.out_features, one.in_features) for one in trainer.find_base_layers().values()]
    known = {frozenset(shape) for shape in shapes}
    row.held_bytes = trainer.count_held_bytes()
    pointers = {get_address(one) for one in (*trainer.denoiser.parameters(), *trainer.denoiser.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and frozenset(tensor.shape) in known and tensor.dtype == BF16:
            if get_address(tensor) not in pointers:
                kept[get_address(tensor)] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.step()
    row.decoded_bytes = sum(kept.values())
    if not trainer.candidate.compile:  # compiled code calls the kernels directly
        with BaseGemms(shapes) as counted:
            trainer.step()
        row.gemms = counted.count
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.step()
        row.peak_bytes = torch.cuda.max_memory_allocated(trainer.device)
    else:
        row.peak_bytes = row.held_bytes + trainer.count_optimizer_bytes() + measure_cpu_peak(trainer.step)
    row.weight_error = measure_weight_error(trainer, model, size)


def measure_weight_error(trainer: Trainer, model: str, size: str) -> float:
    """Return the relative rms error of the weights as they are stored, over all layers with adapters."""
    layers, error, total = trainer.find_base_layers(), 0.0, 0.0
    for name, exact in make_random_weights(make_network(model, size), trainer.device):
        if (layer := layers.get(name.removesuffix(".weight"))) is None or not name.endswith(".weight"):
            continue
        held = layer.weight.detach()
        held = held.dequantize() if hasattr(held, "dequantize") and type(held) is not Tensor else held
        error += (held.float() - exact.float()).square().sum().item()
        total += exact.float().square().sum().item()
    return (error / total) ** 0.5


def get_address(tensor: Tensor) -> int:
    """Return a number that tensors on one storage share."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a subclass without a storage of its own
        return id(tensor)


def measure_cpu_peak(step: Callable[[], None]) -> int:
    """Return the peak bytes of torch's CPU allocator during a step, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# -- the calculated floor ----------------------------------------------------------------------------------------------


def measure_rates(model: str, size: str, pixels: int, device: torch.device) -> dict[str, float]:
    """Measure FLOP/s and bytes/s of this machine at these shapes, one operation at a time; the best of a few."""
    width = {"full": 1280, "small": 512, "tiny": 128}[size] if model == "sdxl" else make_network(model, size).inner_dim
    tokens = (pixels // 16) ** 2
    head = 64 if model == "sdxl" else 128
    a, w = (
        torch.randn(tokens, width, device=device, dtype=BF16),
        torch.randn(4 * width, width, device=device, dtype=BF16),
    )
    q = torch.randn(1, width // head, tokens, head, device=device, dtype=BF16)
    wide = torch.empty(2**27 if device.type == "cuda" else 2**25, dtype=torch.uint8, device=device)
    other = torch.empty_like(wide)
    one = torch.ones((), device=device)
    a8, w8 = a.to(E4M3), w.to(E4M3)
    needs = [tensor.clone().requires_grad_() for tensor in (q, q, q)]
    attend = F.scaled_dot_product_attention
    out = attend(*needs)
    grad = torch.randn_like(out)
    gemm, attention = 2 * tokens * width * 4 * width, 4 * tokens * tokens * width
    found = {
        "gemm_bf16": gemm / time_best(lambda: a @ w.t(), device),
        "attention_forward": attention / time_best(lambda: attend(q, q, q), device),
        "attention_backward": 2.5
        * attention
        / time_best(lambda: torch.autograd.grad(out, needs, grad, retain_graph=True), device),
        "bytes": 2 * wide.nbytes / time_best(lambda: other.copy_(wide), device),
    }
    try:
        run = lambda: torch._scaled_mm(a8, w8.t(), one, one, out_dtype=BF16, use_fast_accum=True)  # noqa: E731
        found["gemm_fp8"] = gemm / time_best(run, device)
    except RuntimeError:
        found["gemm_fp8"] = 0.0  # no FP8 on this device; then there is no floor for it either
    return found


def time_best(function: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Return the shortest of some calls in seconds, after one call to warm up."""
    # On a CPU the time that its threads worked: other programs may have it the rest of the time.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    function()
    taken = []
    for _ in range(repeats):
        wait(device)
        started = clock()
        function()
        wait(device)
        taken.append(clock() - started)
    return min(taken)


@dataclass
class Work:
    """The cost of one forward pass of the bf16 model."""

    linear: float
    convolution: float
    attention: float
    parameters: int
    """Parameters of the quantized linear layers: those with adapters."""

    @property
    def model_flops(self) -> float:
        """Return the FLOPs of a step without recomputation.

        Frozen weights get no gradient, so linear layers cost twice the forward.
        """
        return 2 * (self.linear + self.convolution) + 3.5 * self.attention


FLOOR_RULES = (
    "forward and gradient for x of each linear layer and convolution (with checkpointing the forward twice), no "
    "gradient for frozen weights; attention forward, and 2.5 times its FLOPs backward. Bytes moved per weight beside "
    "those of the GEMM: decoding reads it as held, writes and reads 2 bytes, at each use (in what keeps decoded "
    "weights: at each forward, and 2 bytes read in the backward); fp8 transposes 2 bytes for the backward; a cast of "
    "bf16 to fp8 reads 2 and writes 1 at each use. Without overlap"
)


def compute_floor(
    rule: str, weight_bytes: float, checkpointing: bool, work: Work, rate: dict[str, float]
) -> float | None:
    """Return the least seconds of a step; see `FLOOR_RULES`. None if the device has no rate for it."""
    forwards = 2 if checkpointing else 1
    in_fp8 = {"fp8": forwards + 1, "cast": forwards + 1, "fp8_forward": forwards}.get(rule, 0)
    if in_fp8 and not rate["gemm_fp8"]:
        return None
    seconds = work.convolution * (forwards + 1) / rate["gemm_bf16"]
    seconds += work.attention * (forwards / rate["attention_forward"] + 2.5 / rate["attention_backward"])
    seconds += work.linear * (in_fp8 / rate["gemm_fp8"] if in_fp8 else 0)
    seconds += work.linear * (forwards + 1 - in_fp8) / rate["gemm_bf16"]
    decoded = weight_bytes + 4
    moved = {
        "bf16": 0,
        "upcast": decoded * (forwards + 1),
        "kept": decoded * forwards + 2,
        "fp8": 2,
        "fp8_forward": decoded,
        "cast": 3 * (forwards + 1),
    }[rule]
    return seconds + work.parameters * moved / rate["bytes"]


def measure_work(model: str, pixels: int, size: str) -> Work:
    """Count the work on the meta device."""
    denoiser = build_plain(model, size, META)
    with dry_run.on_meta(), FlopCounterMode(display=False) as counter, torch.no_grad():
        denoiser(**make_inputs(model, pixels, size, META), return_dict=False)
    by_name = {str(key): value for key, value in counter.get_flop_counts()["Global"].items()}

    def sum_flops(*words: str) -> float:
        return float(sum(value for key, value in by_name.items() if any(word in key for word in words)))

    attention, convolution = sum_flops("attention"), sum_flops("convolution")
    linear = float(sum(by_name.values())) - attention - convolution
    layers = [denoiser.get_submodule(name) for name in list_adapted_layers(denoiser, model)]
    return Work(linear, convolution, attention, sum(one.weight.numel() for one in layers if isinstance(one, nn.Linear)))


# -- a step without a device -------------------------------------------------------------------------------------------


def run_dry_step(candidate: Candidate, model: str, pixels: int, size: str) -> dict[str, Any]:
    """Run a step on the meta device: every shape, dtype and layout is checked as in a real one, without computing.

    Bytes are those of a step after the first. FLOPs include adapters, recomputation and wasted gradients.
    """
    candidate = dataclasses.replace(candidate, compile=False, cuda_graphs=False, autocast=False)
    trainer = Trainer(candidate, model, pixels, size, META)
    held = trainer.count_held_bytes()
    with dry_run.on_meta(), dry_run.Tally() as tally:
        trainer.forward_backward()
    trainer.optimizer.step()
    state = trainer.count_optimizer_bytes()
    return {"held_bytes": held, "state_bytes": state, "peak_bytes": held + state + tally.most, "flops": tally.flops}


@dataclass(frozen=True)
class Chip:
    """Figures of NVIDIA's data sheets: dense FLOP/s with float32 accumulation, bytes/s and bytes of memory."""

    bf16: float
    fp8: float
    bandwidth: float
    memory: float

    def list_rates(self) -> dict[str, float]:
        """Return the data sheet's peaks by the names of the measured rates: FLOP/s, and bytes/s."""
        found = dict.fromkeys(("gemm_bf16", "attention_forward", "attention_backward"), self.bf16)
        return found | {"gemm_fp8": self.fp8, "bytes": self.bandwidth}


CHIPS = {
    "H100": Chip(989.4e12, 1978.9e12, 3.35e12, 80e9),  # SXM
    "H200": Chip(989.4e12, 1978.9e12, 4.8e12, 141e9),
    "RTX 4090": Chip(165.2e12, 330.3e12, 1.008e12, 24e9),
}


def render_plan(chip: str, model: str, pixels: int, args: argparse.Namespace) -> list[str]:
    """Return markdown lines with each candidate's dry step."""
    work = measure_work(model, pixels, args.size)
    lines = [
        *render_heading(model, pixels, args.size, work),
        "",
        "| candidate | base held, GB | AdamW state, GB | peak, GB | fits | TFLOP of a step | floor, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in choose_candidates(args.candidates):
        if one.compile:
            continue
        print(f"{model} {pixels}: {one.title}", flush=True)
        least = compute_floor(one.rule, one.weight_bytes, one.checkpointing, work, CHIPS[chip].list_rates())
        try:
            found = run_dry_step(one, model, pixels, args.size)
        except Exception as error:  # as in `measure`: a peer's failure is a result
            lines.append(f"| {one.title} | {shorten_error(error)} | | | | | |")
            continue
        held, state, peak = (found[key] / 1e9 for key in ("held_bytes", "state_bytes", "peak_bytes"))
        fits = "yes" if found["peak_bytes"] < CHIPS[chip].memory else "no"
        lines.append(
            f"| {one.title} | {held:.2f} | {state:.2f} | {peak:.2f} | {fits} | {found['flops'] / 1e12:.3g} | "
            f"{1e3 * least:.3g} |"
        )
    return lines


def render_plan_head(chip: str, command: str) -> list[str]:
    """Return the lines above the tables of a plan."""
    of = CHIPS[chip]
    return [
        f"# Seconds per step, calculated: {chip}",
        "",
        f"{format_today()}; " + ", ".join(f"{key} {value}" for key, value in list_versions().items()) + ".",
        f"`{command}`",
        "",
        "Nothing here was measured on a GPU. Every candidate made a step on the meta device, which checks shapes, "
        "dtypes and the layouts that FP8 kernels need, and counts FLOPs and bytes; what is compiled was not tried, and "
        "moves fewer bytes. Batch 1, LoRA rank 16 in bf16, AdamW states in bf16.",
        f"Floor: {FLOOR_RULES}, at the data sheet's peak: {of.bf16 / 1e12:.0f} TFLOP/s bf16, {of.fp8 / 1e12:.0f} fp8, "
        f"{of.bandwidth / 1e12:.2f} TB/s. No kernel reaches these. fits: in {of.memory / 1e9:.0f} GB.",
        "",
    ]


# -- the run -----------------------------------------------------------------------------------------------------------


def choose_candidates(patterns: Sequence[str]) -> list[Candidate]:
    """Return the candidates whose whole title matches one of the regular expressions."""
    return [one for one in list_candidates() if any(re.fullmatch(pattern, one.title) for pattern in patterns)]


def run_turn(trainer: Trainer, repeats: int) -> list[tuple[float, float]]:
    """Make some steps; return (seconds, CPU seconds) of each."""
    trainer.step()  # the caches are another candidate's
    return [trainer.time_step() for _ in range(repeats)]


class Measurement:
    """The rows of one model at one image size."""

    def __init__(self, model: str, pixels: int, args: argparse.Namespace, device: torch.device) -> None:
        self.model, self.pixels, self.args, self.device = model, pixels, args, device
        self.rows = [Row(one) for one in choose_candidates(args.candidates)]
        self.work = measure_work(model, pixels, args.size)
        self.rates = measure_rates(model, args.size, pixels, device)
        self.peak, self.peak_source = find_peak_flops(args.peak_tflops, device, self.rates)
        self.optimizers = measure_optimizer_bytes(model, args.size, device)

    def run(self, compiled: bool, save: Callable[[], None]) -> None:
        """Run all rounds of the compiled candidates, or of the others.

        Args:
            save: called after each turn.
        """
        rows = [row for row in self.rows if row.candidate.compile == compiled]
        resident = self.args.size != "full"  # all fit beside each other
        reference = self._make_trainer(list_candidates()[0]) if resident and rows else None
        alive: dict[str, Trainer] = {}
        for number in range(self.args.rounds):
            for row in rows if number % 2 == 0 else rows[::-1]:
                if row.error:
                    continue
                name = row.candidate.title
                try:
                    if (trainer := alive.get(name)) is None:
                        trainer = self._make_trainer(row.candidate)
                    if not row.turns:
                        inspect(trainer, row, self.model, self.args.size)
                    if resident:
                        alive[name] = trainer
                    own = run_turn(trainer, self.args.repeats)
                    if reference:
                        row.beside.append(run_turn(reference, self.args.repeats))
                    row.turns.append(own)
                except Exception as error:  # a peer's failure is a result
                    row.error = shorten_error(error)
                    alive.pop(name, None)
                trainer = None
                if not resident:
                    gc.collect()
                    torch.cuda.empty_cache() if self.device.type == "cuda" else None
                told = row.error or f"{row.turns[-1][-1][0]:.3f} s"
                print(f"{self.model} {self.pixels} round {number + 1}: {name}: {told}", flush=True)
                save()
        alive.clear()
        torch._dynamo.reset()
        gc.collect()

    def _make_trainer(self, candidate: Candidate) -> Trainer:
        torch._dynamo.pgo.reset_code_state()  # which shapes vary is learned anew, as in a process of its own
        trainer = Trainer(candidate, self.model, self.pixels, self.args.size, self.device)
        for _ in range(self.args.warmup):
            trainer.step()
        return trainer

    def to_json(self) -> dict[str, Any]:
        """Return the results of this model and size as plain JSON types."""
        bf16 = next((row for row in self.rows if row.candidate.title == "ours bf16" and not row.error), None)
        on_cpu = self.device.type == "cpu"
        return {
            "model": self.model,
            "pixels": self.pixels,
            "size": self.args.size,
            "work": vars(self.work),
            "rates": self.rates,
            "peak_flops": self.peak,
            "peak_source": self.peak_source,
            "optimizer_bytes_per_value": self.optimizers,
            "rows": [summarize_row(row, bf16, self.work, self.rates, self.peak, on_cpu) for row in self.rows],
        }


def find_peak_flops(given: float | None, device: torch.device, rate: dict[str, float]) -> tuple[float, str]:
    """Return the FLOP/s that the MFU refers to, and their source."""
    if given:
        return given * 1e12, "--peak-tflops"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if not any(word in name for word in ("PCIe", "NVL")):  # smaller chips of the same name
        for chip, of in CHIPS.items():
            if chip in name:
                return of.bf16, f"{chip}'s data sheet"
    return rate["gemm_bf16"], "the bf16 GEMM measured in this run"


def measure_optimizer_bytes(model: str, size: str, device: torch.device) -> dict[str, float]:
    """Return the bytes per adapter value that each optimizer keeps beside the bf16 adapter: masters and moments."""
    denoiser = with_adapters(build_plain(model, size, META), model)
    shapes = {name: one.shape for name, one in adapters.list_trained_parameters(denoiser)}
    values = sum(shape.numel() for shape in shapes.values())
    found = {}
    for name in ("adamw", "adamw8bit"):
        for rounding in ("master", "stochastic"):
            params = [
                (key, nn.Parameter(torch.zeros(shape, dtype=BF16, device=device))) for key, shape in shapes.items()
            ]
            optimizer = optim.build(params, Optimizer(name=name, rounding=rounding), base_storage="fp8", seed=0)
            ones = {key: torch.ones(shape, device=device) for key, shape in shapes.items()}
            optimizer.step(optimizer.layout.join(ones), 1e-4, 0)
            found[f"{name}, {rounding}"] = optimizer.count_bytes() / values
    return found


def shorten_error(error: Exception) -> str:
    """Return an error in one short line without paths."""
    if isinstance(error, ImportError):
        name = (error.name or str(error)).split(".")[0]
        return "not installed" if importlib.util.find_spec(name) is None else f"ImportError: {str(error)[:120]}"
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, UserError):
        return text.split(";")[0]
    text = re.sub(r"(/[\w.\-]+){2,}", lambda path: path[0].rsplit("/", 1)[-1], text)
    return f"{type(error).__name__}: {text[:160]}"


def summarize_row(
    row: Row, bf16: Row | None, work: Work, rate: dict[str, float], peak: float, on_cpu: bool
) -> dict[str, Any]:
    """Return the figures of a candidate, beside those of bf16."""
    error = row.error or ("" if row.turns else "not reached: the run ended before its turn")
    found: dict[str, Any] = {"candidate": row.candidate.title, "error": error, "turns": row.turns}
    if error:
        return found
    seconds = [one for own in row.turns for one, _ in own]
    median = statistics.median(seconds)
    worked = statistics.median(one for own in row.turns for _, one in own)
    # Against the bf16 steps right after it; else those of the same round.
    beside = row.beside or (bf16.turns if bf16 else [])

    def compute_ratios(which: int) -> list[float]:
        middle = lambda steps: statistics.median(one[which] for one in steps)  # noqa: E731
        return [middle(own) / middle(other) for own, other in zip(row.turns, beside, strict=False)]

    one = row.candidate
    return found | {
        "beside": row.beside,
        "median": median,
        "cpu_median": worked,
        "fastest": min(seconds),
        "slowest": max(seconds),
        "ratios": compute_ratios(0),
        "ratio": statistics.median(compute_ratios(0)) if beside else None,
        "cpu_ratio": statistics.median(compute_ratios(1)) if beside else None,
        "floor": compute_floor(one.rule, one.weight_bytes, one.checkpointing, work, rate),
        "held_bytes": row.held_bytes,
        "peak_bytes": row.peak_bytes,
        "weight_error": row.weight_error,
        "gemms": row.gemms,
        "decoded_bytes": row.decoded_bytes,
        "mfu": work.model_flops / (worked if on_cpu else median) / peak,
    }


def render_heading(model: str, pixels: int, size: str, work: Work) -> list[str]:
    """Return the lines above a table: the model and the work of a forward pass."""
    return [
        f"## {model}, {pixels} px{'' if size == 'full' else f', {size}'}",
        "",
        f"A forward: {work.linear / 1e12:.3f} TFLOP in linear layers, {work.convolution / 1e12:.3f} in "
        f"convolutions, {work.attention / 1e12:.3f} in attention; {work.parameters / 1e6:.0f} M weights beside "
        "adapters.",
    ]


def render_table(result: dict[str, Any]) -> str:
    """Return the results of one model and size as Markdown."""
    lines = [
        *render_heading(result["model"], result["pixels"], result["size"], Work(**result["work"])),
        "Measured rates: " + ", ".join(f"{key} {value / 1e9:.0f} G/s" for key, value in result["rates"].items()) + ".",
        f"MFU: share of {result['peak_flops'] / 1e12:.3g} TFLOP/s ({result['peak_source']}).",
        "Optimizer, bytes per adapter value: "
        + ", ".join(f"{key} {value:.2f}" for key, value in result["optimizer_bytes_per_value"].items())
        + ".",
        "",
        "| candidate | s/step | fastest - slowest | x ours bf16 | its range | CPU s/step | x ours bf16 | floor, s | "
        "held, MB | peak, MB | weight error | MFU | base GEMMs | decoded kept, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["error"]:
            lines.append(f"| {row['candidate']} | {row['error'].replace('|', '/')} |" + " |" * 12)
            continue
        cells = [
            row["candidate"],
            f"{row['median']:.3f}",
            f"{row['fastest']:.3f} - {row['slowest']:.3f}",
            format_value(row["ratio"], "{:.2f}"),
            f"{min(row['ratios']):.2f} - {max(row['ratios']):.2f}" if row["ratios"] else "-",
            f"{row['cpu_median']:.3f}",
            format_value(row["cpu_ratio"], "{:.2f}"),
            format_value(row["floor"], "{:.3f}"),
            f"{row['held_bytes'] / 1e6:.0f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            format_value(row["weight_error"], "{:.2%}"),
            format_value(row["mfu"], "{:.1%}"),
            format_value(row["gemms"], "{}"),
            format_value(row["decoded_bytes"] and row["decoded_bytes"] / 1e6, "{:.0f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def render_page(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return the markdown file."""
    head = [
        f"# Seconds per step: {facts['machine']}",
        "",
        f"{facts['date']}; " + ", ".join(f"{key} {value}" for key, value in facts["versions"].items()) + ".",
        f"`{facts['command']}`",
        *([f"Conditions: {facts['note']}"] if facts["note"] else []),
        "",
        f"Batch 1, LoRA rank 16 in bf16, random weights; median of {facts['rounds']} rounds of {facts['repeats']} "
        "steps, interleaved. x ours bf16: against our bf16 step right after each turn (full size: of the same round), "
        "median and range over the rounds; its own row shows the noise. On a CPU rates, floor and MFU are in CPU time. "
        "Held: base and adapters. Peak memory: "
        f"{facts['memory']}. Weight error: relative rms, as held. Floor: {FLOOR_RULES}, at the rates measured in this "
        "run.",
        "",
    ]
    return "\n".join(head) + "\n" + "\n\n".join(map(render_table, results)) + "\n"


def format_value(value: Any, form: str) -> str:
    """Format a value; "-" for None."""
    return "-" if value is None else form.format(value)


def get_machine_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return f"{found[1]}, {torch.get_num_threads()} threads"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are compared."""
    found = {"python": platform.python_version()}
    for name in ("torch", "diffusers", "peft", "bitsandbytes", "torchao", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def format_today() -> str:
    """Return the date in UTC as YYYY-MM-DD."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure or plan all candidates of all models, and write the tables."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--pixels", nargs="+", type=int, help="sides of the picture (512 and 1024; small 256, tiny 64)")
    parser.add_argument(
        "--size", choices=tuple(PIXELS), default="full", help="small, tiny: fewer and narrower blocks, shorter texts"
    )
    parser.add_argument("--candidates", nargs="+", default=[".*"], help="regular expressions of whole names")
    parser.add_argument(
        "--plan", choices=tuple(CHIPS), help="measure nothing: a dry step of each, and this chip's floor"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each candidate has its turn")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first turn")
    parser.add_argument("--peak-tflops", type=float, help="what the MFU is a share of (the data sheet's bf16 peak)")
    parser.add_argument("--machine", help="name in the file name (the processor's)")
    parser.add_argument("--note", default="", help="what to say of the conditions")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args(given)
    if unknown := [pattern for pattern in args.candidates if not choose_candidates([pattern])]:
        parser.error(
            f"--candidates {unknown[0]!r} matches none of: {', '.join(one.title for one in list_candidates())}"
        )
    command = shlex.join(["python", "scripts/bench_step.py", *given])
    args.out.mkdir(parents=True, exist_ok=True)
    hide_warnings()
    if args.plan:
        lines = render_plan_head(args.plan, command)
        for model in args.models:
            for pixels in args.pixels or PIXELS[args.size]:
                lines += [*render_plan(args.plan, model, pixels, args), ""]
                text = "\n".join(lines)
                (args.out / f"step_plan_{make_slug(args.plan)}.md").write_text(text, encoding="utf-8")
        print(text)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = get_machine_name(device)
    cpu_memory = "base, adapters and optimizer state, and the most given out at once by torch's allocator in a step"
    facts = {
        "machine": name,
        "date": format_today(),
        "versions": list_versions(),
        "command": command,
        "note": args.note,
        "rounds": args.rounds,
        "repeats": args.repeats,
        "memory": "CUDA allocator" if device.type == "cuda" else cpu_memory,
    }
    torch._dynamo.config.recompile_limit = 256
    path = args.out / f"step_{make_slug(args.machine or name)}"
    measurements: list[Measurement] = []

    def save() -> None:
        """Write the results after each turn, so that they stay whatever ends the run."""
        results = [one.to_json() for one in measurements]
        path.with_suffix(".md").write_text(render_page(facts, results), encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(facts | {"results": results}, indent=1), encoding="utf-8")

    for model in args.models:
        for pixels in args.pixels or PIXELS[args.size]:
            measurements.append(Measurement(model, pixels, args, device))
            measurements[-1].run(compiled=False, save=save)
    for one in measurements:  # last, as compiling takes minutes each
        one.run(compiled=True, save=save)
    print(render_page(facts, [one.to_json() for one in measurements]))


def make_slug(name: str) -> str:
    """Return a name for files: lower case, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def hide_warnings() -> None:
    """Hide the warning of diffusers about casting a whole model, which happens here all the time."""
    from diffusers.utils import logging

    logging.set_verbosity_error()


if __name__ == "__main__":
    main()
