"""Stage 3: time a training step of the large models with random weights, mode by mode, and compare the predictions.

Compiling a mode takes most of a minute, all of it on the CPU. So as many modes as fit into the GPU's memory are built
and compiled side by side, each in a process of its own, and then measured one after the other. The compiled modes come
first. The step is the trainer's own: gradients summed in one flat vector, clipped, and applied by the 8-bit AdamW.
"""

import gc
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
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
OFFLOADED = [Mode(f"fp8 upcast, offload {share:g}", UPCAST.quantize, offload=share) for share in (0.5, 1.0)]
MODES = (PLAIN, FP8, UPCAST, TRITON)
"""Modes, the most important first. Each is measured compiled and uncompiled."""
NEEDS = {"flux": (27, 16), "sdxl": (8, 6), "qwen": (44, 25)}
"""GiB that a process takes with the base in bf16 and in FP8, its CUDA context included (H100, 2026-11)."""
SPARE = 4
"""GiB that are left free beside all processes."""
PREPARING = 120.0
"""Seconds after which a mode that is not ready yet is measured last, if at all."""


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
    facts = next(row["facts"] for row in read_rows(record.file) if row["stage"] == "facts")
    for wave in list_waves(facts.get("memory_gib"), context.toy, record):
        if context.seconds_left <= 0:
            for model, pixels, mode in wave:
                record.write(f"{model} {pixels}: {mode.title}", None, note="not asked: no time left")
            continue
        side_by_side(wave, needs_checkpointing(facts.get("memory_gib")), record, context)


def list_waves(memory_gib: float | None, toy: bool, record: Record) -> list[list[tuple[str, int, Mode]]]:
    """Return which modes of which models are prepared together."""
    if toy or memory_gib is None:
        return [[(model, pixels, mode) for model, pixels in TOY for mode in (PLAIN, UPCAST)]]
    waves: list[list[tuple[str, int, Mode]]] = [[]]
    taken = 0
    for model, pixels in ORDER:
        for mode in MODES:
            need = NEEDS[model][mode.storage == "fp8"]
            if need > memory_gib - SPARE:
                record.write(f"{model} {pixels}: {mode.title}", None, note=f"not asked: needs about {need} GiB")
                continue
            if taken + need > memory_gib - SPARE:
                waves.append([])
                taken = 0
            waves[-1].append((model, pixels, mode))
            taken += need
    return [wave for wave in waves if wave]


class Turns:
    """The events between the stage and a process that measures one mode."""

    def __init__(self, system: Any) -> None:
        self.ready = system.Event()
        self.go = [system.Event(), system.Event()]
        self.done = [system.Event(), system.Event()]


def side_by_side(wave: list[tuple[str, int, Mode]], checkpointing: bool, record: Record, context: Context) -> None:
    """Prepare these modes in processes of their own, then let one after the other be measured."""
    # A fork is quicker but cannot use a GPU that its parent has looked at.
    system: Any = multiprocessing.get_context("fork" if context.device.type == "cpu" else "spawn")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(wave)))
    turns = [Turns(system) for _ in wave]
    workers = [
        system.Process(target=work, args=(one, checkpointing, own, record.file, context), daemon=True)
        for one, own in zip(wave, turns, strict=True)
    ]
    for worker in workers:
        worker.start()
    started = time.monotonic()
    while any(worker.is_alive() and not own.ready.is_set() for worker, own in zip(workers, turns, strict=True)):
        if context.seconds_left <= 0 or time.monotonic() - started > PREPARING:
            break
        time.sleep(0.05)
    for turn in range(2):
        for (model, pixels, mode), worker, own in zip(wave, workers, turns, strict=True):
            own.go[turn].set()
            while worker.is_alive() and not own.done[turn].wait(0.05) and context.seconds_left > -10:
                pass
            if not own.done[turn].is_set() and turn == 0:
                how = "not done in time" if worker.is_alive() else f"its process ended with {worker.exitcode}"
                record.write(f"{model} {pixels}: {mode.title}: its process", False, note=how)
    for worker in workers:
        worker.kill()
        worker.join()


def work(one: tuple[str, int, Mode], checkpointing: bool, turns: Turns, file: Path, context: Context) -> None:
    """Build a model, compile it in this mode, and measure it when it is its turn: compiled, and then all else."""
    set_torch_options()
    model, pixels, mode = one
    record, name = Record(file, "models"), f"{model} {pixels}"
    bench = None
    compiled: dict[str, float] | None = None
    with record.guard(f"{name}: {mode.title}: preparing"):
        started = time.perf_counter()
        bench = Bench(model, pixels, "tiny" if context.toy else "full", mode.storage, checkpointing, context.device)
        wait(context.device)
        record.write(
            f"{name}: build {mode.storage} for {mode.title}", None, value=time.perf_counter() - started, unit="s",
            held_bytes=bench.held_bytes(), checkpointing=checkpointing,
        )  # fmt: skip
        if not (context.toy and mode.storage == "bf16"):  # as a toy, one compiled mode shows that it works
            compiled = prepare_compiled(bench, replace(mode, compiled=True), context)
    empty_cache(context.device)
    turns.ready.set()

    def ask(mode: Mode, off: dict[str, float] | None = None) -> None:
        record.ask(f"{name}: {mode.name}", lambda: measure(bench, mode, context, off or {}))
        record.ask(f"{name}: {mode.name}: profile", lambda: profile(bench))
        empty_cache(context.device)

    turns.go[0].wait()
    if bench is not None and compiled is not None:
        ask(replace(mode, compiled=True), compiled)
    turns.done[0].set()
    turns.go[1].wait()
    if bench is not None:
        ask(mode)
        for offloaded in OFFLOADED if mode == UPCAST else ():  # last: what was moved to RAM stays there
            ask(offloaded)
    turns.done[1].set()


def prepare_compiled(bench: Bench, mode: Mode, context: Context) -> dict[str, float]:
    """Compile, and compare with the same mode uncompiled. Returns facts for the mode's row."""
    started = time.perf_counter()
    off = compare_with_eager(bench, mode)
    for _ in range(2):
        bench.step()
    wait(context.device)
    return off | {"compile_seconds": time.perf_counter() - started}


def needs_checkpointing(memory_gib: float | None) -> bool:
    """Return True on a GPU that cannot hold the activations of the largest model."""
    return memory_gib is not None and memory_gib < 100


def measure(bench: Bench, mode: Mode, context: Context, off: dict[str, float]) -> dict[str, Any]:
    """Return the median time of a step and its peak memory.

    Args:
        bench: the model.
        mode: switched to first, unless it is compiled: then the model is in it already.
        context: of the stage.
        off: from `prepare_compiled`, or {}.
    """
    begun = time.perf_counter()
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
