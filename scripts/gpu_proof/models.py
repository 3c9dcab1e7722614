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
from lora_fp8.training.cuda_graphs import Recorder
from lora_fp8.training.torch_options import set_torch_options

from .record import Context, NotHere, Record, read_rows, require_cuda, wait

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
        recorded: forward and backward pass replayed as a CUDA graph.
        keeps_attention: attention is not recomputed.
    """

    title: str
    quantize: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    offload: float = 0.0
    recorded: bool = False
    keeps_attention: bool = False

    @property
    def storage(self) -> str:
        """Return the storage of the base: `quantize.storage`, or its default."""
        return self.quantize.get("storage", "fp8")

    @property
    def name(self) -> str:
        """Return the name of the mode in tables."""
        return (
            self.title
            + " compiled" * self.compiled
            + " recorded" * self.recorded
            + ", attention kept" * self.keeps_attention
        )


PLAIN = Mode("bf16", {"storage": "bf16"})
UPCAST = Mode("fp8 upcast", {"storage": "fp8", "compute": "upcast"})
FP8 = Mode("fp8 matmul", {"storage": "fp8", "compute": "fp8"})
TRITON = Mode("fp8 matmul + triton", {"storage": "fp8", "compute": "fp8", "kernels": "triton"})


def list_variants(mode: Mode, keeps_attention: bool = False) -> list[Mode]:
    """Return a mode compiled and compiled and recorded; if attention is recomputed, also neither and only recorded."""
    mode = replace(mode, keeps_attention=keeps_attention)
    compiled = [replace(mode, compiled=True), replace(mode, compiled=True, recorded=True)]
    return compiled if keeps_attention else [*compiled, mode, replace(mode, recorded=True)]


PROCESSES = (
    list_variants(PLAIN),
    list_variants(FP8),
    [
        *list_variants(UPCAST),
        *(
            replace(UPCAST, title=f"fp8 upcast, offload {share:g}", offload=share, compiled=compiled)
            for share in (0.5, 1.0)
            for compiled in (True, False)
        ),
    ],
    list_variants(FP8, keeps_attention=True),
    list_variants(PLAIN, keeps_attention=True),
    list_variants(TRITON),
)
"""The modes that each process measures, the most important first. The last one may change the base for good."""
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
        self.denoiser = bench_step.make_network(model, size)
        family = families.get(bench_step.FAMILIES[model])
        self.section = settings.Quantize(storage=storage)
        self.keep, self.modulation = family.keep_precise, family.modulation
        # Planned for FP8 matmuls: a plan for "upcast" names no layers for them. `switch_` chooses.
        planned = settings.Quantize(storage=storage, compute="fp8" if storage == "fp8" else "upcast")
        self.plan = precision.quantize_(self.denoiser, planned, self.keep, BF16, self.modulation)
        bench_step.fill_(self.denoiser, model, size, device)
        bench_step.with_adapters(self.denoiser, model).train()
        self.checkpointing = checkpointing
        memory.apply_(self.denoiser, settings.Memory(gradient_checkpointing=checkpointing))
        named = adapters.list_trained_parameters(self.denoiser)
        section = settings.Optimizer(name="adamw8bit")
        if device != META:
            self.optimizer = optim.build(named, section, base_storage=storage, seed=0)
            self.gradients = flat.Gradients(named, self.optimizer.layout)
        self.optimizer_bytes = optim.estimate_state_bytes([one for _, one in named], section)
        self.inputs = bench_step.make_inputs(model, pixels, size, device)
        self.number = 0
        self.recorder: Recorder | None = None
        self.loss = self.norm = torch.zeros(())

    def switch_(self, mode: Mode) -> None:
        """Compute as the mode says from now on.

        Raises:
            NotHere: this machine cannot.
        """
        section = settings.Quantize(**mode.quantize)
        if self.device != META and (text := precision.find_problem(section, self.device)):
            raise NotHere(text)
        if mode.compiled and (text := memory.find_problem(settings.Memory(compile="blocks"), self.device)):
            raise NotHere(text)
        if mode.offload and self.device.type != "cuda":
            raise NotHere("offloading needs a CUDA GPU")
        self.record_(mode.recorded)
        torch._dynamo.reset()
        for module in self.denoiser.modules():
            module._compiled_call_impl = None
        if mode.storage == "fp8":
            precision.set_compute_(self.denoiser, self.plan.with_compute(section.compute), section)
        if mode.offload:
            precision.offload_(self.denoiser, mode.offload, precision.find_blocks(self.denoiser))
        compiled = "blocks" if mode.compiled else "off"
        section = settings.Memory(
            gradient_checkpointing=self.checkpointing, keep_attention=mode.keeps_attention, compile=compiled
        )
        memory.apply_(self.denoiser, section)

    def record_(self, recorded: bool) -> None:
        """Replay passes as CUDA graphs from now on, or do not."""
        if self.recorder is not None:
            self.recorder.forget()
        if recorded:
            require_cuda(self.device)
        self.recorder = Recorder() if recorded else None

    def forward_backward(self) -> None:
        """Run one forward and backward pass, and add its gradients to the sums."""
        self.loss = self.recorder.run(self._run_pass, self.inputs) if self.recorder else self._run_pass(self.inputs)

    def _run_pass(self, inputs: dict[str, Any]) -> torch.Tensor:
        answer = self.denoiser(**inputs, return_dict=False)[0]
        loss = answer.float().square().mean()
        loss.backward()
        if self.device != META:
            self.gradients.collect_()
        return loss.detach()

    def step(self) -> None:
        """Run one step as the trainer does."""
        self.number += 1
        self.gradients.zero_()
        self.forward_backward()
        self.update_()

    def update_(self) -> None:
        """Do what follows the backward pass."""
        self.norm = optim.clip_(self.gradients.values, 1.0)
        self.optimizer.step(self.gradients.values, 1e-9, self.number)

    def count_held_bytes(self) -> int:
        """Return the bytes of base and adapters on the device."""
        tensors = (*self.denoiser.parameters(), *self.denoiser.buffers())
        return sum(bench_step.count_bytes(one) for one in tensors if one.device.type == self.device.type)


def run(record: Record, context: Context) -> None:
    """Measure every mode of every model, as far as time allows."""
    facts = next(row["facts"] for row in read_rows(record.file) if row["stage"] == "facts")
    for wave in list_waves(context, facts.get("memory_gib"), record):
        if context.seconds_left <= 0:
            for task in wave:
                record.write(f"{task.name}: {task.modes[0].title}", None, note="not asked: no time left")
            continue
        prepare_side_by_side(wave, needs_checkpointing(facts.get("memory_gib")), record, context)


@dataclass(frozen=True)
class Task:
    """What one process measures of one model."""

    model: str
    pixels: int
    modes: list[Mode]

    @property
    def name(self) -> str:
        """Begin of the names of its rows."""
        return f"{self.model} {self.pixels}"


def list_waves(context: Context, memory_gib: float | None, record: Record) -> list[list[Task]]:
    """Return which modes of which models are prepared together."""
    if context.toy or memory_gib is None:
        return [[Task(model, pixels, modes) for model, pixels in TOY for modes in (list_variants(PLAIN), PROCESSES[2])]]
    waves: list[list[Task]] = [[]]
    taken = 0
    for model, pixels in ORDER:
        for modes in PROCESSES:
            task = Task(model, pixels, [mode for mode in modes if context.is_asked(f"{model} {pixels}: {mode.name}")])
            if not task.modes:
                continue
            need = NEEDS[model][modes[0].storage == "fp8"] + 2 * modes[0].keeps_attention
            if need > memory_gib - SPARE:
                record.write(f"{task.name}: {modes[0].title}", None, note=f"not asked: needs about {need} GiB")
                continue
            if taken + need > memory_gib - SPARE:
                waves.append([])
                taken = 0
            waves[-1].append(task)
            taken += need
    return [wave for wave in waves if wave]


class Turns:
    """The events between the stage and a process that measures one mode."""

    def __init__(self, system: Any) -> None:
        self.ready = system.Event()
        self.go = [system.Event(), system.Event()]
        self.done = [system.Event(), system.Event()]


def prepare_side_by_side(wave: list[Task], checkpointing: bool, record: Record, context: Context) -> None:
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
        for task, worker, own in zip(wave, workers, turns, strict=True):
            own.go[turn].set()
            while worker.is_alive() and not own.done[turn].wait(0.05) and context.seconds_left > -10:
                pass
            if not own.done[turn].is_set() and turn == 0:
                how = "not done in time" if worker.is_alive() else f"its process ended with {worker.exitcode}"
                record.write(f"{task.name}: {task.modes[0].name}: its process", False, note=how)
    for worker in workers:
        worker.kill()
        worker.join()


def work(task: Task, checkpointing: bool, turns: Turns, file: Path, context: Context) -> None:
    """Build a model, compile it, and measure its modes when it is its turn: the compiled ones, and then the others."""
    set_torch_options()
    record, name, first = Record(file, "models"), task.name, task.modes[0]
    bench = None
    compiled: dict[str, float] | None = None
    with record.guard(f"{name}: {first.name}: preparing"):
        started = time.perf_counter()
        size = "tiny" if context.toy else "full"
        bench = Bench(task.model, task.pixels, size, first.storage, checkpointing, context.device)
        wait(context.device)
        record.write(
            f"{name}: build for {first.name}", None, value=time.perf_counter() - started, unit="s",
            held_bytes=bench.count_held_bytes(), checkpointing=checkpointing,
        )  # fmt: skip
        # As a toy, one compiled mode shows that it works.
        if first.compiled and not (context.toy and first.storage == "bf16"):
            compiled = prepare_compiled(bench, replace(first, recorded=False), context)
    empty_cache(context.device)
    turns.ready.set()

    def ask(mode: Mode, off: dict[str, float] | None = None) -> None:
        record.ask(f"{name}: {mode.name}", lambda: measure(bench, mode, context, off or {}))
        record.ask(f"{name}: {mode.name}: profile", lambda: profile(bench))
        empty_cache(context.device)

    turns.go[0].wait()
    for mode in task.modes:
        if bench is not None and compiled is not None and mode.compiled and not mode.offload:
            ask(mode, {} if mode.recorded else compiled)
    turns.done[0].set()
    turns.go[1].wait()
    for mode in task.modes:
        if bench is not None and (mode.offload or not mode.compiled):  # what is offloaded stays so
            ask(mode)
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
        mode: switched to first, unless it is compiled without offloading: then the model is in it already.
        context: of the stage.
        off: from `prepare_compiled`, or {}.
    """
    begun = time.perf_counter()
    if mode.offload or not mode.compiled:
        bench.switch_(mode)
    empty_cache(context.device)
    if mode.recorded:
        off = off | compare_with_unrecorded(bench)
    memory.reset_peak(context.device)
    for _ in range(3 if mode.offload else 2):  # offload learns the order of use in two steps, recording takes two
        bench.step()
    wait(context.device)
    warmup = time.perf_counter() - begun
    # Updates are too small to show, so every mode should find about the same.
    loss = bench.loss.item()
    gradient = float(bench.norm)
    taken = []
    begun = time.perf_counter()
    while len(taken) < (2 if context.toy else 6) and (len(taken) < 3 or time.perf_counter() - begun < 6):
        started = time.perf_counter()
        bench.step()
        wait(context.device)
        taken.append(time.perf_counter() - started)
    peak = memory.read_peak_gib(context.device)
    if mode.recorded:  # replaying allocates nothing; what the recording holds is reserved
        empty_cache(context.device)
        peak = torch.cuda.memory_reserved(context.device) / 2**30
    facts = {"value": statistics.median(taken), "unit": "s/step", "fastest": min(taken), "slowest": max(taken)}
    facts |= {"warmup_seconds": warmup, "peak_gib": peak, "steps": len(taken)}
    note = f"loss {loss:.4f}, gradient {gradient:.4g}"
    if off:
        note += f", off {'the unrecorded' if mode.recorded else 'eager'}'s by {off['gradient_off']:.3g}"
    if "repeated_off" in off:
        note += f", which is off itself by {off['repeated_off']:.3g} when repeated"
        note += (
            f" and by {off['deterministic_off']:.3g} with deterministic kernels ({off['deterministic_seconds']:.3f} s)"
        )
    facts |= off | {"held_bytes": bench.count_held_bytes(), "loss": loss, "gradient": gradient, "note": note}
    # A wrong gradient has an error of 1 or more; rounding in another order has 0.01 to 0.05.
    return facts | ({"ok": off["gradient_off"] < 0.15} if off else {})


def find_gradient(bench: Bench) -> torch.Tensor:
    """Return the gradient of one pass."""
    bench.gradients.zero_()
    bench.forward_backward()
    return bench.gradients.values.clone()


def compare_with_eager(bench: Bench, mode: Mode) -> dict[str, float]:
    """Switch to a compiled mode and return the relative error of its gradient, against the same mode uncompiled."""
    found = []
    for one in (replace(mode, compiled=False), mode):
        bench.switch_(one)
        found.append(find_gradient(bench))
    return {"gradient_off": ((found[1] - found[0]).norm() / found[0].norm()).item()}


def compare_with_unrecorded(bench: Bench) -> dict[str, float]:
    """Record the pass, and return the relative error of its gradient.

    Also that of repeating the unrecorded pass, as it is and with deterministic kernels, and the seconds of the latter.
    """
    require_cuda(bench.device)
    bench.record_(False)
    exact, again = find_gradient(bench), find_gradient(bench)
    size = exact.norm()
    found = {"repeated_off": ((again - exact).norm() / size).item()}
    set_torch_options(deterministic=True)
    try:
        first = find_gradient(bench)
        wait(bench.device)
        started = time.perf_counter()
        again = find_gradient(bench)
        wait(bench.device)
        found["deterministic_seconds"] = time.perf_counter() - started
        found["deterministic_off"] = ((again - first).norm() / size).item()
    finally:
        set_torch_options()
    bench.record_(True)
    for _ in range(2):
        replayed = find_gradient(bench)
    return found | {"gradient_off": ((replayed - exact).norm() / size).item()}


def profile(bench: Bench) -> dict[str, Any]:
    """Return where one step's time goes: GPU kernels of its two halves by time, their number, and seconds by the clock.

    The seconds are measured without the profiler, which slows down launches.
    """
    require_cuda(bench.device)
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
            "kernels": [[one.key[:90], one.self_device_time_total / 1e6, one.count] for one in kernels[:80]],
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
            kept = [replace(mode, keeps_attention=True) for mode in computes] if checkpointing else []
            for mode in [*computes, *kept]:
                if context.seconds_left > 0:
                    record.ask(
                        f"{model} {pixels}: {mode.name}",
                        lambda m=mode, args=(model, pixels, size, storage, checkpointing): predict_peak(args, m),
                    )


def predict_peak(args: tuple[Any, ...], mode: Mode) -> dict[str, Any]:
    """Return the calculated peak of one mode."""
    bench = Bench(*args, META)
    bench.switch_(mode)
    held = bench.count_held_bytes()
    values = sum(one.numel() for _, one in adapters.list_trained_parameters(bench.denoiser))
    own = bench.optimizer_bytes + 4 * values  # state and masters, and the flat float32 gradient
    with dry_run.on_meta(), dry_run.Tally() as tally:
        bench.forward_backward()
    facts = {"value": (held + own + tally.most) / 2**30, "unit": "GiB"}
    return facts | {"held_bytes": held, "optimizer_bytes": own, "step_bytes": tally.most, "flops": tally.flops}
