"""Seconds and memory of a training step: this project's modes beside what a user would take instead, in one run.

    python scripts/bench_step.py --small                                  a few minutes on a CPU
    python scripts/bench_step.py --models flux --peak-tflops 989          full size, on a GPU

The networks are diffusers' own classes with random weights, the adapters the same everywhere (LoRA, bf16), the loss a
mean square, the optimizer torch's AdamW on the adapters. Each candidate is timed once per round and the rounds are
interleaved, so that what else the machine does hits all alike. A candidate that raises is a row with its error.

Writes benchmarks/step_<machine>.md and .json.

The floor is calculated, from rates that this run measures on this machine; see `floor`. What is not in it: norms, other
elementwise work, the adapters' own GEMMs (about 1 %), launches.
"""

import argparse
import contextlib
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8 import adapters, config, families, memory, precision  # noqa: E402

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
QWEN_TARGETS = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
)
KEEP = {  # what stays in bf16 in our modes; of the families, where there is one
    "qwen": (("img_in", "txt_in", "time_text_embed", "norm_out", "^proj_out"), ("img_mod", "txt_mod")),
}


# -- networks of the large models' shapes ------------------------------------------------------------------------------


def network(model: str, small: bool) -> nn.Module:
    """The denoiser on the meta device; small: the layers' shapes shrunk, and a few blocks of them."""
    import diffusers

    with init_empty_weights():  # keeps the tensors that a constructor computes
        if model == "sdxl":
            sizes = {"block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10)}
            if small:
                sizes = {"block_out_channels": (160, 320, 640), "transformer_layers_per_block": (1, 1, 2)}
            return diffusers.UNet2DConditionModel(
                **sizes,
                sample_size=128,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                layers_per_block=1 if small else 2,
                attention_head_dim=tuple(width // 64 or 1 for width in sizes["block_out_channels"]),
                cross_attention_dim=2048,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            )
        if model == "flux":
            sizes = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 12} if small else {}
            return diffusers.FluxTransformer2DModel(guidance_embeds=True, **sizes)
        sizes = {"num_layers": 2, "num_attention_heads": 12} if small else {}
        return diffusers.QwenImageTransformer2DModel(**sizes)


def inputs(model: str, pixels: int, small: bool, device: torch.device) -> dict[str, Any]:
    """What the denoiser takes for one square picture: the real models' token counts, shorter texts if small."""
    side = pixels // 16
    text = {"sdxl": 77, "flux": 512, "qwen": 256}[model]
    text = min(text, 120) if small else text
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, BF16)

    if model == "sdxl":
        added = {"text_embeds": noise(1, 1280), "time_ids": torch.full((1, 6), float(pixels), device=device)}
        sample = noise(1, 4, 2 * side, 2 * side)
        time_1 = torch.tensor([500], device=device)
        return {
            "sample": sample,
            "timestep": time_1,
            "encoder_hidden_states": noise(1, text, 2048),
            "added_cond_kwargs": added,
        }
    found = {"hidden_states": noise(1, side * side, 64), "timestep": torch.tensor([0.5], device=device, dtype=BF16)}
    if model == "flux":
        ids = torch.zeros(side * side, 3, device=device)
        ids[:, 1], ids[:, 2] = torch.arange(side * side) // side, torch.arange(side * side) % side
        found |= {"encoder_hidden_states": noise(1, text, 4096), "pooled_projections": noise(1, 768)}
        found |= {"guidance": torch.tensor([3.5], device=device), "img_ids": ids}
        return found | {"txt_ids": torch.zeros(text, 3, device=device)}
    mask = torch.ones(1, text, dtype=torch.bool, device=device)
    found |= {"encoder_hidden_states": noise(1, text, 3584), "encoder_hidden_states_mask": mask}
    return found | {"img_shapes": [(1, side, side)]}


def random_weights(denoiser: nn.Module, device: torch.device) -> Any:
    """(name, tensor) for each weight, as a checkpoint's stream: normal, of a size that keeps activations in bounds."""
    generator = torch.Generator(device).manual_seed(0)
    for name, meta in denoiser.state_dict().items():
        fan_in = max(1, meta[0].numel()) if meta.ndim > 1 else 0
        tensor = torch.empty(meta.shape, dtype=BF16, device=device)
        if fan_in:
            yield name, tensor.normal_(std=fan_in**-0.5, generator=generator)
        else:
            yield name, tensor.fill_(1.0 if name.endswith("weight") and "norm" in name else 0.0)


def targets(model: str) -> tuple[str, ...]:
    return QWEN_TARGETS if model == "qwen" else families.get(model).adapter_targets


# -- candidates --------------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """One way to hold and multiply the base."""

    name: str
    build: Callable[[str, bool, torch.device], nn.Module]
    floor: str
    """which rule of `floor` applies"""
    compile: bool = False
    checkpointing: bool = False
    autocast: bool = False

    @property
    def title(self) -> str:
        return self.name + " + compile" * self.compile + " + checkpointing" * self.checkpointing


def ours(**settings: Any) -> Callable[[str, bool, torch.device], nn.Module]:
    def build(model: str, small: bool, device: torch.device) -> nn.Module:
        denoiser = network(model, small)
        keep, modulation = KEEP.get(model) or (families.get(model).keep_precise, families.get(model).modulation)
        section = config.Quantize(**settings)
        plan = precision.quantize_(denoiser, section, keep, BF16, modulation)
        precision.fill_(denoiser, random_weights(network(model, small), device), BF16, device)
        precision.set_compute_(denoiser, plan, section)
        return with_adapters(denoiser, model)

    return build


def plain(model: str, small: bool, device: torch.device) -> nn.Module:
    denoiser = network(model, small)
    precision.quantize_(denoiser, config.Quantize(storage="bf16"), (), BF16)
    precision.fill_(denoiser, random_weights(network(model, small), device), BF16, device)
    return denoiser


def with_adapters(denoiser: nn.Module, model: str) -> nn.Module:
    """The same LoRA everywhere, by peft; B is not zero, or half of the backward would multiply zeros."""
    excluded = () if model == "qwen" else families.get(model).adapter_exclude
    wanted = [
        name
        for name, _ in denoiser.named_modules()
        if any(f".{name}".endswith(f".{one}") for one in targets(model))
        and not any(precision.name_matches(name, one) for one in excluded)
    ]
    adapters.inject(denoiser, config.Adapter(rank=16, alpha=16), wanted, seed=0)
    for name, parameter in adapters.parameters(denoiser):
        if "lora_B" in name:
            parameter.data.normal_(std=0.01, generator=torch.Generator(parameter.device).manual_seed(0))
    return denoiser


def layerwise_casting(model: str, small: bool, device: torch.device) -> nn.Module:
    denoiser = plain(model, small, device)
    denoiser.enable_layerwise_casting(storage_dtype=E4M3, compute_dtype=BF16)
    return with_adapters(denoiser, model)


def torchao_training(model: str, small: bool, device: torch.device) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    denoiser = plain(model, small, device)
    emulate = device.type == "cpu"  # as its own tests do where there are no FP8 tensor cores
    convert_to_float8_training(
        denoiser,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda module, name: not any(side % 16 for side in module.weight.shape),
    )
    return with_adapters(denoiser, model)


def torchao_weight_only(model: str, small: bool, device: torch.device) -> nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    denoiser = plain(model, small, device)
    quantize_(denoiser, Float8WeightOnlyConfig())
    return with_adapters(denoiser, model)


def kohya_cast(model: str, small: bool, device: torch.device) -> nn.Module:
    """sd-scripts' fp8_base: linear weights cast without a scale, and autocast turns them to bf16 at each use."""
    denoiser = plain(model, small, device)
    for module in denoiser.modules():
        if type(module) is nn.Linear:
            module.to(E4M3)
    return with_adapters(denoiser, model)


def candidates() -> list[Candidate]:
    modes = [
        ("ours bf16", ours(storage="bf16"), "bf16"),
        ("ours fp8 row upcast", ours(storage="fp8"), "upcast"),
        ("ours fp8 row fp8", ours(storage="fp8", compute="fp8"), "fp8"),
        ("ours fp8 row fp8_forward", ours(storage="fp8", compute="fp8_forward"), "fp8_forward"),
        ("ours int8 upcast", ours(storage="int8"), "upcast"),
        ("ours nf4 upcast", ours(storage="nf4"), "upcast"),
    ]
    switches = [(compile_, keep) for keep in (False, True) for compile_ in (False, True)]
    found = [Candidate(*mode, *switch) for switch in switches for mode in modes]
    bf16 = lambda *place: with_adapters(plain(*place), place[0])  # noqa: E731
    for compile_, checkpointing in switches:
        found.append(Candidate("diffusers + peft bf16", bf16, "bf16", compile_, checkpointing))
        found.append(Candidate("diffusers layerwise casting", layerwise_casting, "upcast", compile_, checkpointing))
        found.append(Candidate("torchao float8 training", torchao_training, "fp8", compile_, checkpointing))
        found.append(Candidate("torchao float8 weight-only", torchao_weight_only, "upcast", compile_, checkpointing))
        found.append(Candidate("kohya unscaled cast", kohya_cast, "upcast", compile_, checkpointing, autocast=True))
    return found


# -- one step ----------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What was measured of one candidate."""

    candidate: Candidate
    turns: list[list[float]] = field(default_factory=list)
    """seconds of each step, round by round"""
    error: str = ""
    held_bytes: int = 0
    peak_bytes: int = 0
    gemms: int | None = None
    decoded_bytes: int | None = None


class Trainer:
    """A candidate's denoiser, ready to step."""

    def __init__(self, candidate: Candidate, model: str, pixels: int, small: bool, device: torch.device) -> None:
        self.device, self.candidate = device, candidate
        self.denoiser = candidate.build(model, small, device).train()
        ours_ = candidate.name.startswith("ours")
        section = config.Memory(
            gradient_checkpointing=candidate.checkpointing, compile="blocks" if candidate.compile and ours_ else "off"
        )
        memory.apply_(self.denoiser, section)
        if candidate.compile and not ours_:
            self.denoiser.compile_repeated_blocks()  # diffusers' way, as its users call it
        self.inputs = inputs(model, pixels, small, device)
        self.parameters = [parameter for _, parameter in adapters.parameters(self.denoiser)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5)

    def step(self) -> None:
        cast = torch.autocast(self.device.type, BF16) if self.candidate.autocast else contextlib.nullcontext()
        with cast:
            answer = self.denoiser(**self.inputs, return_dict=False)[0]
        answer.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> float:
        wait(self.device)
        started = time.perf_counter()
        self.step()
        wait(self.device)
        return time.perf_counter() - started

    def base_weights(self) -> list[tuple[int, int]]:
        """(N, K) of each linear layer that adapters stand beside."""
        layers = [module.get_base_layer() for module in adapters.modules(self.denoiser).values()]
        return [(one.out_features, one.in_features) for one in layers if isinstance(one, nn.Linear)]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class BaseGemms(TorchDispatchMode):
    """Counts matrix products that a base weight, known by its shape, is an operand of, or its (wasted) gradient."""

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


def inspect(trainer: Trainer, row: Row) -> None:
    """GEMMs with base weights, decoded weights kept for backward, and bytes: one step each, not timed."""
    shapes = trainer.base_weights()
    known = {frozenset(shape) for shape in shapes}
    owned = [*trainer.denoiser.parameters(), *trainer.denoiser.buffers()]
    row.held_bytes = sum(map(num_bytes, owned))
    pointers = {address(one) for one in owned}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and frozenset(tensor.shape) in known and tensor.dtype == BF16:
            if address(tensor) not in pointers:
                kept[address(tensor)] = tensor.nbytes
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
        row.peak_bytes = row.held_bytes + peak_on_cpu(trainer.step)


def num_bytes(tensor: Tensor) -> int:
    """What a tensor takes; one that is made of others, as torchao's are, says the dtype that it stands for."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(num_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without a storage of its own
        return id(tensor)


def peak_on_cpu(step: Callable[[], None]) -> int:
    """The most bytes that torch's CPU allocator gave out at one time during a step, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# -- the calculated floor ----------------------------------------------------------------------------------------------


def rates(model: str, small: bool, pixels: int, device: torch.device) -> dict[str, float]:
    """FLOP/s and bytes/s that this machine reaches on these shapes, one operation at a time; the best of a few."""
    width = {"sdxl": 640 if small else 1280, "flux": 1536 if small else 3072, "qwen": 1536 if small else 3072}[model]
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
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(*needs)
    grad = torch.randn_like(out)
    gemm, attention = 2 * tokens * width * 4 * width, 4 * tokens * tokens * width
    found = {
        "gemm_bf16": gemm / best(lambda: a @ w.t(), device),
        "attention_forward": attention / best(lambda: attend(q, q, q), device),
        "attention_backward": 2.5
        * attention
        / best(lambda: torch.autograd.grad(out, needs, grad, retain_graph=True), device),
        "bytes": 2 * wide.nbytes / best(lambda: other.copy_(wide), device),
    }
    try:
        run = lambda: torch._scaled_mm(a8, w8.t(), one, one, out_dtype=BF16, use_fast_accum=True)  # noqa: E731
        found["gemm_fp8"] = gemm / best(run, device)
    except RuntimeError:
        found["gemm_fp8"] = 0.0  # no FP8 on this device; then there is no floor for it either
    return found


def best(function: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    function()
    taken = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        function()
        wait(device)
        taken.append(time.perf_counter() - started)
    return min(taken)


@dataclass
class Work:
    """What one forward of the bf16 model costs."""

    linear: float
    convolution: float
    attention: float
    parameters: int
    """of the linear layers that are quantized: those that adapters stand beside"""

    @property
    def model_flops(self) -> float:
        """Of a step without recomputation: frozen weights get no gradient, so linear layers cost twice the forward."""
        return 2 * (self.linear + self.convolution) + 3.5 * self.attention


FLOOR_RULES = (
    "forward and gradient for x of each linear layer and convolution (with checkpointing the forward twice), no "
    "gradient for frozen weights; attention forward, and 2.5 times its FLOPs backward; upcast reads and writes 5 bytes "
    "per weight and use (e4m3 in, bf16 out and in again); fp8 moves 2 bytes per weight to transpose it for the "
    "backward. At the rates measured in this run, without overlap"
)


def floor(rule: str, checkpointing: bool, work: Work, rate: dict[str, float]) -> float | None:
    """Seconds that a step takes at least; see `FLOOR_RULES`."""
    forwards = 2 if checkpointing else 1
    seconds = work.convolution * (forwards + 1) / rate["gemm_bf16"]
    seconds += work.attention * (forwards / rate["attention_forward"] + 2.5 / rate["attention_backward"])
    in_fp8 = {"fp8": forwards + 1, "fp8_forward": forwards}.get(rule, 0)
    if in_fp8 and not rate["gemm_fp8"]:
        return None
    seconds += work.linear * (in_fp8 / rate["gemm_fp8"] if in_fp8 else 0)
    seconds += work.linear * (forwards + 1 - in_fp8) / rate["gemm_bf16"]
    decodes = {"upcast": forwards + 1, "fp8_forward": 1}.get(rule, 0)
    moved = work.parameters * (5 * decodes + (2 if rule == "fp8" else 0))
    return seconds + moved / rate["bytes"]


def measure_work(model: str, pixels: int, small: bool, device: torch.device) -> Work:
    trainer = Trainer(candidates()[0], model, pixels, small, device)
    counted = lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)  # noqa: E731
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which torch 2.13's counter does not know
    with FlopCounterMode(display=False, custom_mapping={kernel: counted}) as counter, torch.no_grad():
        trainer.denoiser(**trainer.inputs, return_dict=False)
    by_name = {str(key): value for key, value in counter.get_flop_counts()["Global"].items()}

    def total(*words: str) -> float:
        return float(sum(value for key, value in by_name.items() if any(word in key for word in words)))

    attention, convolution = total("attention"), total("convolution")
    if not attention:  # a kernel that the counter does not know
        raise RuntimeError(f"no attention was counted: {by_name}")
    linear = float(sum(by_name.values())) - attention - convolution
    return Work(linear, convolution, attention, sum(n * k for n, k in trainer.base_weights()))


# -- the run -----------------------------------------------------------------------------------------------------------


def measure(model: str, pixels: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    work, rate = measure_work(model, pixels, args.small, device), rates(model, args.small, pixels, device)
    chosen = [one for one in candidates() if any(re.fullmatch(pattern, one.title) for pattern in args.candidates)]
    rows = [Row(one) for one in chosen]
    alive: dict[str, Trainer] = {}
    for number in range(args.rounds):
        for row in rows:
            if row.error:
                continue
            name = row.candidate.title
            try:
                trainer = alive.get(name) or Trainer(row.candidate, model, pixels, args.small, device)
                if name not in alive:
                    for _ in range(args.warmup):
                        trainer.step()
                if number == 0:
                    inspect(trainer, row)
                trainer.step()  # the caches are another candidate's
                row.turns.append([trainer.timed() for _ in range(args.repeats)])
                if args.small:  # all fit beside each other
                    alive[name] = trainer
            except Exception as error:  # a peer's failure is a result
                row.error = in_few_words(error)
            trainer = None
            if not args.small:
                gc.collect()
                torch.cuda.empty_cache() if device.type == "cuda" else None
            print(
                f"{model} {pixels} round {number + 1}: {name}: {row.error or f'{row.turns[-1][-1]:.3f} s'}", flush=True
            )
    alive.clear()
    torch._dynamo.reset()
    gc.collect()
    bf16 = next((row for row in rows if row.candidate.title == "ours bf16" and not row.error), None)
    return {
        "model": model,
        "pixels": pixels,
        "small": args.small,
        "work": vars(work),
        "rates": rate,
        "rows": [summary(row, bf16, work, rate, args) for row in rows],
    }


def in_few_words(error: Exception) -> str:
    if isinstance(error, ImportError):
        name = (error.name or str(error)).split(".")[0]
        return "not installed" if importlib.util.find_spec(name) is None else f"ImportError: {str(error)[:120]}"
    text = " ".join(str(error).split()) or "no message"
    text = re.sub(r"(/[\w.\-]+){2,}", lambda path: path[0].rsplit("/", 1)[-1], text)
    return f"{type(error).__name__}: {text[:120]}"


def summary(row: Row, bf16: Row | None, work: Work, rate: dict[str, float], args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"candidate": row.candidate.title, "error": row.error, "turns": row.turns}
    if row.error:
        return found
    seconds = [one for turn in row.turns for one in turn]
    median = statistics.median(seconds)
    # Against the same round's bf16: what else the machine does changes from round to round.
    pairs = zip(row.turns, bf16.turns, strict=True) if bf16 else ()
    ratios = [statistics.median(own) / statistics.median(other) for own, other in pairs]
    return found | {
        "median": median,
        "fastest": min(seconds),
        "slowest": max(seconds),
        "ratio": statistics.median(ratios) if ratios else None,
        "ratios": ratios,
        "floor": floor(row.candidate.floor, row.candidate.checkpointing, work, rate),
        "held_bytes": row.held_bytes,
        "peak_bytes": row.peak_bytes,
        "gemms": row.gemms,
        "decoded_bytes": row.decoded_bytes,
        "mfu": work.model_flops / median / (args.peak_tflops * 1e12) if args.peak_tflops else None,
    }


def table(result: dict[str, Any]) -> str:
    work, rate = result["work"], result["rates"]
    lines = [
        f"## {result['model']}, {result['pixels']} px{', small' if result['small'] else ''}",
        "",
        f"A forward: {work['linear'] / 1e12:.3f} TFLOP in linear layers, {work['convolution'] / 1e12:.3f} in "
        f"convolutions, {work['attention'] / 1e12:.3f} in attention; {work['parameters'] / 1e6:.0f} M weights beside "
        "adapters.",
        "Measured rates: " + ", ".join(f"{key} {value / 1e9:.0f} G/s" for key, value in rate.items()) + ".",
        "",
        "| candidate | s/step | fastest - slowest | x ours bf16, same round | floor, s | held, MB | peak, MB | MFU | "
        "base GEMMs | decoded kept, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "median" not in row:
            lines.append(f"| {row['candidate']} | {row['error'].replace('|', '/')} | | | | | | | | |")
            continue
        cells = [
            row["candidate"],
            f"{row['median']:.3f}",
            f"{row['fastest']:.3f} - {row['slowest']:.3f}",
            shown(row["ratio"], "{:.2f}"),
            shown(row["floor"], "{:.3f}"),
            f"{row['held_bytes'] / 1e6:.0f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            shown(row["mfu"], "{:.1%}"),
            shown(row["gemms"], "{}"),
            shown(row["decoded_bytes"] and row["decoded_bytes"] / 1e6, "{:.0f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The markdown file."""
    head = [
        f"# Seconds per step: {facts['machine']}",
        "",
        f"{facts['date']}; " + ", ".join(f"{key} {value}" for key, value in facts["versions"].items()) + ".",
        f"`{facts['command']}`",
        *([f"Conditions: {facts['note']}"] if facts["note"] else []),
        "",
        f"Batch 1, LoRA rank 16 in bf16, random weights; median of {facts['rounds']} rounds of {facts['repeats']} "
        f"steps, interleaved. Peak memory: {facts['memory']}. Floor: {FLOOR_RULES}.",
        "",
    ]
    return "\n".join(head) + "\n" + "\n\n".join(map(table, results)) + "\n"


def shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return f"{found[1]}, {torch.get_num_threads()} threads"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "diffusers", "peft", "bitsandbytes", "torchao", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("sdxl", "flux", "qwen"), default=["sdxl", "flux", "qwen"])
    parser.add_argument("--pixels", nargs="+", type=int, help="sides of the picture (512 and 1024; 256 if small)")
    parser.add_argument("--small", action="store_true", help="fewer and narrower blocks, shorter texts: for a CPU")
    parser.add_argument("--candidates", nargs="+", default=[".*"], help="regular expressions of whole names")
    parser.add_argument("--rounds", type=int, default=3, help="how often each candidate has its turn")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first turn")
    parser.add_argument(
        "--peak-tflops", type=float, help="the device's bf16 peak, for the MFU; without it there is none"
    )
    parser.add_argument("--machine", help="name in the file name (the processor's)")
    parser.add_argument("--note", default="", help="what to say of the conditions")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = machine_name(device)
    slug = args.machine or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    facts = {
        "machine": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "command": shlex.join(["python", "scripts/bench_step.py", *sys.argv[1:]]),
        "note": args.note,
        "rounds": args.rounds,
        "repeats": args.repeats,
        "peak_tflops": args.peak_tflops,
        "memory": "CUDA allocator" if device.type == "cuda" else "weights held + most given out by torch's allocator",
    }
    torch._dynamo.config.recompile_limit = 256
    results: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        for pixels in args.pixels or ([256] if args.small else [512, 1024]):
            results.append(measure(model, pixels, args, device))
            text = page(facts, results)  # after each: whatever ends the run, what was measured is there
            (args.out / f"step_{slug}.md").write_text(text, encoding="utf-8")
            (args.out / f"step_{slug}.json").write_text(
                json.dumps(facts | {"results": results}, indent=1), encoding="utf-8"
            )
    print(text)


if __name__ == "__main__":
    main()
