"""Stage 3: time a training step of the large models with random weights, mode by mode, and compare the predictions.

Each storage is built once: the bf16 base first, then the FP8 base, on which the modes are switched in place. The step
is the trainer's own: gradients summed in one flat vector, clipped, and applied by the 8-bit AdamW.
"""

import gc
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import bench_step
import torch

from lora_fp8 import adapters, families, precision, settings
from lora_fp8.plan import dry_run
from lora_fp8.training import flat, memory, optim
from lora_fp8.training.torch_options import set_torch_options

from .record import Context, NotHere, Record, need_cuda, read_rows, wait

BF16 = torch.bfloat16
META = torch.device("meta")
TOY = (("flux", 64),)
ORDER = (("flux", 1024), ("sdxl", 1024), ("qwen", 1024))


@dataclass(frozen=True)
class Mode:
    """One way to store and multiply the base.

    Attributes:
        quantize: settings of `[quantize]`.
        compiled: torch.compile of the repeated blocks.
        offload: share of the frozen bytes that is offloaded to RAM.
    """

    title: str
    quantize: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    offload: float = 0.0

    @property
    def storage(self) -> str:
        """Storage of the base: `quantize.storage`, or its default."""
        return self.quantize.get("storage", "fp8")

    @property
    def name(self) -> str:
        """Name of the mode in tables."""
        return self.title + " compiled" * self.compiled


PLAIN = Mode("bf16", {"storage": "bf16"})
UPCAST = Mode("fp8 upcast", {"storage": "fp8", "compute": "upcast"})
FP8 = Mode("fp8 matmul", {"storage": "fp8", "compute": "fp8"})
TRITON = Mode("fp8 matmul + triton", {"storage": "fp8", "compute": "fp8", "kernels": "triton"})
MODES = [Mode(one.title, one.quantize, compiled=True) for one in (PLAIN, FP8, TRITON, UPCAST)]
MODES += [PLAIN, FP8, TRITON, UPCAST]
# Last on their build: bytes that were moved to main memory stay there. "auto" of memory.offload does not exist yet.
MODES += [Mode(f"fp8 upcast, offload {share:g}", UPCAST.quantize, offload=share) for share in (0.5, 1.0)]


class Bench:
    """A denoiser with adapters and the trainer's optimizer, ready to step in any mode of one storage."""

    def __init__(self, model: str, pixels: int, size: str, storage: str, checkpointing: bool, device: torch.device):
        self.model, self.device = model, device
        self.denoiser = bench_step.network(model, size)
        family = families.get(bench_step.FAMILIES[model])
        self.section = settings.Quantize(storage=storage)
        self.keep, self.modulation = family.keep_precise, family.modulation
        # Planned for FP8 matmuls: a plan for "upcast" names no layers for them. `switch_` chooses.
        planned = settings.Quantize(storage=storage, compute="fp8" if storage == "fp8" else "upcast")
        self.plan = precision.quantize_(self.denoiser, planned, self.keep, BF16, self.modulation)
        bench_step.fill_(self.denoiser, model, size, device)
        bench_step.with_adapters(self.denoiser, model).train()
        if checkpointing:
            self.denoiser.enable_gradient_checkpointing()
        named = adapters.parameters(self.denoiser)
        section = settings.Optimizer(name="adamw8bit")
        if device != META:
            self.optimizer = optim.build(named, section, base_storage=storage, seed=0)
            self.gradients = flat.Gradients(named, self.optimizer.layout)
        self.optimizer_bytes = optim.state_bytes([one for _, one in named], section)
        self.inputs = bench_step.inputs(model, pixels, size, device)
        self.number = 0
        self.loss = self.norm = torch.zeros(())

    def switch_(self, mode: Mode) -> None:
        """Compute as the mode says from now on.

        Raises:
            NotHere: this machine cannot.
        """
        section = settings.Quantize(**mode.quantize)
        if self.device != META and (text := precision.problem(section, self.device)):
            raise NotHere(text)
        if mode.compiled and (text := memory.problem(settings.Memory(compile="blocks"), self.device)):
            raise NotHere(text)
        if mode.offload and self.device.type != "cuda":
            raise NotHere("offloading needs a CUDA GPU")
        torch._dynamo.reset()
        for module in self.denoiser.modules():
            module._compiled_call_impl = None
        if mode.storage == "fp8":
            precision.set_compute_(self.denoiser, self.plan.with_compute(section.compute), section)
        if mode.offload:
            precision.offload_(self.denoiser, mode.offload)
        if mode.compiled:
            memory.apply_(self.denoiser, settings.Memory(gradient_checkpointing=False, compile="blocks"))

    def forward_backward(self) -> None:
        """Run one forward and backward pass."""
        answer = self.denoiser(**self.inputs, return_dict=False)[0]
        self.loss = answer.float().square().mean()
        self.loss.backward()

    def step(self) -> None:
        """Run one step as the trainer does."""
        self.number += 1
        self.gradients.zero_()
        self.forward_backward()
        self.update_()

    def update_(self) -> None:
        """Do what follows the backward pass."""
        self.gradients.collect_()
        self.norm = optim.clip_(self.gradients.values, 1.0)
        self.optimizer.step(self.gradients.values, 1e-9, self.number)

    def held_bytes(self) -> int:
        """Return the bytes of base and adapters on the device."""
        tensors = (*self.denoiser.parameters(), *self.denoiser.buffers())
        return sum(bench_step.num_bytes(one) for one in tensors if one.device.type == self.device.type)


def run(record: Record, context: Context) -> None:
    """Measure every mode of every model, as far as time allows."""
    set_torch_options()
    size = "tiny" if context.toy else "full"
    facts = next(row["facts"] for row in read_rows(record.file) if row["stage"] == "facts")
    checkpointing = needs_checkpointing(facts.get("memory_gib"))
    for model, pixels in TOY if context.toy else ORDER:
        for storage in ("bf16", "fp8"):
            modes = [mode for mode in MODES if mode.storage == storage]
            if context.toy:  # compiling takes most of the time: one mode shows that it works
                modes = [mode for mode in modes if not mode.compiled or mode.title == UPCAST.title]
            if context.seconds_left <= 0:
                for mode in modes:
                    record.write(f"{model} {pixels}: {mode.name}", None, note="not asked: no time left")
                continue
            bench = None
            with record.guard(f"{model} {pixels}: build {storage}"):
                started = time.perf_counter()
                bench = Bench(model, pixels, size, storage, checkpointing, context.device)
                wait(context.device)
                record.write(
                    f"{model} {pixels}: build {storage}", None, value=time.perf_counter() - started, unit="s",
                    held_bytes=bench.held_bytes(), checkpointing=checkpointing,
                )  # fmt: skip
            for mode in modes if bench else ():
                if context.seconds_left <= 0:
                    record.write(f"{model} {pixels}: {mode.name}", None, note="not asked: no time left")
                    continue
                record.ask(f"{model} {pixels}: {mode.name}", lambda b=bench, m=mode: measure(b, m, context))
                record.ask(f"{model} {pixels}: {mode.name}: profile", lambda b=bench: profile(b))
                empty_cache(context.device)
            del bench
            empty_cache(context.device)


def needs_checkpointing(memory_gib: float | None) -> bool:
    """Return True on a GPU that cannot hold the activations of the largest model."""
    return memory_gib is not None and memory_gib < 100


def measure(bench: Bench, mode: Mode, context: Context) -> dict[str, Any]:
    """Return the median time of a step and its peak memory."""
    begun = time.perf_counter()
    off = compare_with_eager(bench, mode) if mode.compiled else {}
    if not mode.compiled:
        bench.switch_(mode)
    for _ in range(3 if mode.offload else 2):  # offload learns the order of use in two steps
        bench.step()
    wait(context.device)
    warmup = time.perf_counter() - begun
    # Updates are too small to show, so every mode should find about the same.
    loss = bench.loss.item()
    gradient = float(bench.norm)
    empty_cache(context.device)
    memory.reset_peak(context.device)
    taken = []
    begun = time.perf_counter()
    while len(taken) < (2 if context.toy else 6) and (len(taken) < 3 or time.perf_counter() - begun < 6):
        started = time.perf_counter()
        bench.step()
        wait(context.device)
        taken.append(time.perf_counter() - started)
    facts = {"value": statistics.median(taken), "unit": "s/step", "fastest": min(taken), "slowest": max(taken)}
    facts |= {"warmup_seconds": warmup, "peak_gib": memory.peak_gib(context.device), "steps": len(taken)}
    note = f"loss {loss:.4f}, gradient {gradient:.4g}"
    if off:
        note += f", off eager's by {off['gradient_off']:.3g}"
    facts |= off | {"held_bytes": bench.held_bytes(), "loss": loss, "gradient": gradient, "note": note}
    # A wrong gradient has an error of 1 or more; rounding in another order has 0.01 to 0.05.
    return facts | ({"ok": off["gradient_off"] < 0.15} if off else {})


def compare_with_eager(bench: Bench, mode: Mode) -> dict[str, float]:
    """Switch to a compiled mode and return the relative error of its gradient, against the same mode uncompiled."""
    found = []
    for one in (replace(mode, compiled=False), mode):
        bench.switch_(one)
        bench.gradients.zero_()
        bench.forward_backward()
        bench.gradients.collect_()
        found.append(bench.gradients.values.clone())
    return {"gradient_off": ((found[1] - found[0]).norm() / found[0].norm()).item()}


def profile(bench: Bench) -> dict[str, Any]:
    """Return where one step's time goes: GPU kernels of its two halves by time, their number, and seconds by the clock.

    The seconds are measured without the profiler, which slows down launches.
    """
    need_cuda(bench.device)
    halves = {"backward": bench.forward_backward, "update": bench.update_}
    seconds: dict[str, list[float]] = {name: [] for name in halves}
    for _ in range(3):
        bench.number += 1
        bench.gradients.zero_()
        for name, half in halves.items():
            wait(bench.device)
            started = time.perf_counter()
            half()
            wait(bench.device)
            seconds[name].append(time.perf_counter() - started)
    facts: dict[str, Any] = {}
    bench.number += 1
    bench.gradients.zero_()
    for name, half in halves.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            half()
            wait(bench.device)
        kernels = [one for one in found.key_averages() if one.self_device_time_total > 0]
        kernels.sort(key=lambda one: -one.self_device_time_total)
        facts[name] = {
            "seconds": statistics.median(seconds[name]),
            "gpu_seconds": sum(one.self_device_time_total for one in kernels) / 1e6,
            "launches": sum(one.count for one in kernels),
            "kernels": [[one.key[:90], one.self_device_time_total / 1e6, one.count] for one in kernels[:16]],
        }
    busy = sum(half["gpu_seconds"] for half in facts.values())
    words = [f"{name} {half['seconds']:.3f} s, {half['launches']} launches" for name, half in facts.items()]
    return {"value": busy, "unit": "s on the GPU", "note": "; ".join(words), **facts}


def empty_cache(device: torch.device) -> None:
    """Return unused GPU memory, so that fragments of one mode do not count for the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def predict(record: Record, context: Context) -> None:
    """Calculate each eager mode's peak memory on the meta device: base, adapters, optimizer and the step itself."""
    size = "tiny" if context.toy else "full"
    facts = next(row["facts"] for row in read_rows(record.file) if row["stage"] == "facts")
    checkpointing = needs_checkpointing(facts.get("memory_gib"))
    for model, pixels in TOY if context.toy else ORDER:
        for storage, computes in (("bf16", [PLAIN]), ("fp8", [UPCAST, FP8])):
            for mode in computes:
                if context.seconds_left > 0:
                    record.ask(
                        f"{model} {pixels}: {mode.name}",
                        lambda m=mode, args=(model, pixels, size, storage, checkpointing): predicted(args, m),
                    )


def predicted(args: tuple[Any, ...], mode: Mode) -> dict[str, Any]:
    """Return the calculated peak of one mode."""
    bench = Bench(*args, META)
    bench.switch_(mode)
    held = bench.held_bytes()
    values = sum(one.numel() for _, one in adapters.parameters(bench.denoiser))
    own = bench.optimizer_bytes + 4 * values  # state and masters, and the flat float32 gradient
    with dry_run.on_meta(), dry_run.Tally() as tally:
        bench.forward_backward()
    facts = {"value": (held + own + tally.most) / 2**30, "unit": "GiB"}
    return facts | {"held_bytes": held, "optimizer_bytes": own, "step_bytes": tally.most, "flops": tally.flops}
