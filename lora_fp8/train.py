"""A training job from its config to a verified file, in the order it happens.

    run(job)
      cache      encoders only: pictures and captions -> latents and conditioning on disk; encoders freed
      load       the denoiser, streamed into its storage; adapters beside it; what memory asks for
      preflight  one real forward and backward at the largest bucket: find out now whether it fits
      train      batch -> loss -> backward -> clip -> step; every so often: log, checkpoint, preview, stop?
      finish     the LoRA files, and the proof that they do what training did

Functions and one small `State`; what a checkpoint must hold is exactly what is in it. Everything random is keyed by
what it is for (seed, purpose, step, sample), so a resumed run draws the same numbers as one that was never interrupted.
"""

import contextlib
import hashlib
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from . import adapters, checkpoint, config, families, memory, optim, precision, sample
from .config import Job, UserError, UserErrors
from .data import images
from .data.loader import Batch
from .families.base import ModelFamily
from .finish import Result, finish
from .objectives import Objective
from .prepare import DTYPES, Data, Loaded, cache, load, plan, resolve_auto
from .processes import Processes
from .run import Run, RunFailure, Stopped


@dataclass
class State:
    """What moves while training; with the adapter's and the optimizer's tensors it is the whole checkpoint."""

    step: int = 0
    compute: str = ""  # the matmul that quantize.compute = "auto" has settled on


def run(
    job: Job, *, resume: bool = False, progress: bool = True, echo: Callable[[dict[str, Any]], None] | None = None
) -> Result:
    """Do the whole job in `output_dir/name`.

    Args:
        resume: go on from the newest whole checkpoint in the run folder.
        progress: show a progress bar on stderr.
        echo: is shown each event that goes into events.jsonl, to print it.

    Raises:
        UserError: something given is wrong; found before training where possible.
        RunFailure: it failed while running. The last checkpoint is intact.
        Stopped: it was asked to stop, has saved, and can be resumed.
    """
    processes = Processes()
    _settle(job, processes)
    folder = Path(job.output_dir) / job.name
    # Before a run folder exists: everything that can be wrong with the pictures, all of it at once.
    Family = families.get(job.model.family)
    family = Family(job.model, device=processes.device, dtype=DTYPES[job.model.dtype])
    if text := precision.problem(job.quantize, processes.device):
        raise UserError(text)
    plan(job, family)
    job = resolve_auto(job, Family)
    scanned = images.scan(job.dataset)
    if scanned.problems:
        raise UserErrors(scanned.problems, "dataset")

    run = Run.create(folder, config.dumps(job), resume=resume) if processes.is_main else _Bystander(folder)
    run.echo = echo
    stop = StopSignal()
    try:
        with stop.watching():
            run.log_event(
                "start", resume=resume, processes=processes.world, device=str(processes.device), name=job.name
            )
            for text in scanned.warnings:
                run.log_event("warning", text=text)
            data = cache(job, family, scanned.examples, run, processes)
            loaded = load(job, family, run, processes)
            state = _take_up(job, data, loaded, run, resume)
            if resume and processes.is_main:
                run.write_config(config.dumps(job))  # accepted only now
            if state.step < job.train.steps:
                preflight(job, family, data, loaded, state, run, processes)
                fit(job, family, data, loaded, state, run, processes, stop, progress)
            stop.at_once = f"all steps are done and saved; `lora-fp8 resume {run.path}` writes the files"
            if not processes.is_main:
                return Result(run, [], [])
            return finish(job, family, data, loaded, state.step, run)
    except (Stopped, KeyboardInterrupt) as error:
        run.log_event("stopped", text=str(error))
        raise
    except Exception as error:
        told = _in_words(error, run, processes.device)
        with contextlib.suppress(OSError):  # on a full disk the log fails too, and must not hide why
            run.log_event("error", text=str(told), kind=type(error).__name__)
        if told is error:
            raise
        raise told from error
    finally:
        run.close()
        processes.close()


# ---------------------------------------------------------------------------------------------------------------------
# train


def diffusion_loss(
    family: ModelFamily, denoiser: nn.Module, objective: Objective, batch: Batch, guidance: float, dtype: torch.dtype
) -> Tensor:
    """Corrupt the latents, let the denoiser answer, compare: the one loss of every family. -> (B,) float32"""
    device = next(denoiser.parameters()).device
    latents, noise = batch.latents_BCHW.to(device), batch.noise_BCHW.to(device)
    t_B = objective.sample_t(batch.t_generators, family.seq_len(tuple(latents.shape[-2:]))).to(device)
    noisy = objective.add_noise(latents, noise, t_B)
    cond = {name: tensor.to(device) for name, tensor in batch.cond.items()}
    answer = family.predict(denoiser, noisy.to(dtype), t_B, cond, guidance)
    return objective.loss(answer, objective.target(latents, noise, t_B), t_B)


def preflight(
    job: Job, family: ModelFamily, data: Data, loaded: Loaded, state: State, run: Run, processes: Processes
) -> None:
    """One forward and backward at the heaviest batch: out of memory or a broken base show now, not in an hour.

    With quantize.compute = "auto" each matmul gets a few of them, and the fastest is taken; a resumed run keeps what
    it had, so that it goes on to the bit.
    """
    run.log_event("stage", stage="preflight")
    memory.reset_peak(processes.device)
    batch = data.loader.micro(0, data.heaviest, processes.rank, processes.world)

    def attempt() -> None:
        if batch is None:
            return
        losses_B = diffusion_loss(
            family, loaded.denoiser, loaded.objective, batch, job.objective.guidance, DTYPES[job.model.dtype]
        )
        losses_B.sum().backward()
        if not torch.isfinite(losses_B).all():
            raise RunFailure(
                f"the loss is not finite before any training; {_files(batch, losses_B)}; is the base model whole?"
            )

    if job.quantize.compute == "auto":
        state.compute = state.compute or _fastest_compute(job, loaded, attempt, run, processes)
        _switch(job, loaded, state.compute)
    attempt()
    loaded.amax.forget_step_()
    for _, parameter in adapters.parameters(loaded.denoiser):
        parameter.grad = None
    run.log_event("preflight", peak_gib=round(memory.peak_gib(processes.device), 3))


def _fastest_compute(job: Job, loaded: Loaded, attempt: Callable[[], None], run: Run, processes: Processes) -> str:
    """Try each matmul on this batch and say what each took; all processes come to the same answer."""
    if not any(layer.compute.startswith("fp8") for layer in loaded.plan.layers):
        return "upcast"
    modes = precision.candidates(job.quantize, processes.device)
    seconds = precision.fastest(modes, lambda mode: _switch(job, loaded, mode), attempt, processes.device)
    total = processes.sum_(torch.tensor([seconds[mode] for mode in modes], device=processes.device)).tolist()
    if min(total) == math.inf:
        raise RunFailure(memory.out_of_memory_advice(processes.device))
    chosen = modes[total.index(min(total))]
    run.log_event("compute", chosen=chosen, seconds={mode: round(seconds[mode], 4) for mode in modes})
    return chosen


def _switch(job: Job, loaded: Loaded, compute: str) -> None:
    precision.set_compute_(loaded.denoiser, loaded.plan.with_compute(compute), job.quantize)


def fit(
    job: Job,
    family: ModelFamily,
    data: Data,
    loaded: Loaded,
    state: State,
    run: Run,
    processes: Processes,
    stop: "StopSignal",
    progress: bool,
) -> None:
    """The loop, from `state.step` to `train.steps`."""
    run.log_event("stage", stage="train", step=state.step, steps=job.train.steps)
    denoiser, objective, optimizer = loaded.denoiser, loaded.objective, loaded.optimizer
    named = adapters.parameters(denoiser)
    gradients = Gradients(named)
    dtype = DTYPES[job.model.dtype]
    stop.at_once = None

    def draw(step: int) -> None:
        conds, negative = data.preview_conds, data.preview_negative
        with precision.decoded_compute(denoiser):
            sample.draw(family, denoiser, conds, negative, job.preview, job.dataset.resolution, step, run)

    # at the start (main process): what the base draws, to compare with
    if processes.is_main and job.preview.prompts and job.preview.at_start and state.step == 0:
        draw(0)

    bar = tqdm(
        total=job.train.steps,
        initial=state.step,
        desc=job.name,
        unit="step",
        disable=not (progress and processes.is_main),
        leave=True,
    )
    while state.step < job.train.steps:
        step, started = state.step + 1, time.perf_counter()
        lr = optim.learning_rate(state.step, job.schedule, optimizer.base_lr, job.train.steps)
        gradients.zero_()
        loss_sum, num_samples, faults = 0.0, 0, []
        for micro in range(job.train.accumulate):
            position = state.step * job.train.accumulate + micro
            num_samples += data.loader.total(position)
            batch = data.loader.micro(step, position, processes.rank, processes.world)
            if batch is None:
                continue  # a short batch: the other processes have it
            if job.adapter.dropout:
                # Dropout draws from torch's global generator, inside peft: keyed here, so that resuming draws the same.
                torch.manual_seed(_key(f"dropout|{job.seed}|{step}|{micro}|{processes.rank}"))
            losses_B = diffusion_loss(family, denoiser, objective, batch, job.objective.guidance, dtype)
            losses_B.sum().backward()
            gradients.collect_()
            micro_loss = losses_B.detach().sum().item()  # waits for the device: once per micro-batch
            loss_sum += micro_loss
            if not math.isfinite(micro_loss):
                faults.append(_files(batch, losses_B))

        # Sums over all processes, then the mean over the samples of this step: short batches weigh what they hold.
        gradients.extra[:] = torch.tensor(
            [loss_sum, float(stop.requested or (processes.is_main and run.requested("stop")))]
        )
        processes.sum_(gradients.flat)
        loss, stopping = float(gradients.extra[0]) / num_samples, bool(gradients.extra[1])
        gradients.scale_(1 / num_samples)
        norm = optim.clip_(gradients.named, job.train.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RunFailure(_not_finite(step, loss, norm, faults, run))
        optimizer.step(gradients.named, lr, step)
        loaded.amax.end_step_(processes.max_)
        state.step = step
        seconds = time.perf_counter() - started

        # every step: one line of figures
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}", refresh=False)
        if step % job.train.log_every == 0 or step == job.train.steps:
            run.log_event(
                "step",
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                images_per_s=round(num_samples / seconds, 3),
                vram_gb=round(memory.peak_gib(processes.device), 3),
            )

        # every so often, on request, when stopping and at the end (main process): a checkpoint to resume from
        asked = processes.is_main and run.requested("save")
        due = asked or step % job.checkpoint.every == 0 or stopping or step == job.train.steps
        if processes.is_main and due:
            save_checkpoint(job, data, loaded, state, run)

        # every so often and on request (main process): previews, after the save so that a failing preview loses nothing
        if processes.is_main and job.preview.prompts and step < job.train.steps:
            asked = run.requested("preview")
            if asked or (job.preview.every and step % job.preview.every == 0):
                draw(step)

        # when asked: stop at this boundary
        if stopping and step < job.train.steps:
            bar.close()
            raise Stopped(f"saved at step {step}; `lora-fp8 resume {run.path}` goes on")
    bar.close()


class Gradients:
    """Float32 sums of the adapters' gradients, one flat vector with a view per parameter.

    bf16 gradients of single micro-batches are added up in float32: adding them in bf16 loses up to 4e-3 of them.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]]):
        self.parameters = named
        size = sum(parameter.numel() for _, parameter in named)
        # Two more places travel with the sum over processes: the loss, and whether anybody wants to stop.
        self.flat = torch.zeros(size + 2, dtype=torch.float32, device=named[0][1].device)
        self.extra = self.flat[size:]
        views = torch.split(self.flat[:size], [parameter.numel() for _, parameter in named])
        self.named = {name: view.view(parameter.shape) for (name, parameter), view in zip(named, views, strict=True)}

    def zero_(self) -> None:
        self.flat.zero_()

    def collect_(self) -> None:
        """Add what backward left in `.grad` and clear it."""
        for name, parameter in self.parameters:
            if parameter.grad is not None:
                self.named[name].add_(parameter.grad)  # float32 += bf16: exact conversion, float32 sum
                parameter.grad = None

    def scale_(self, factor: float) -> None:
        self.flat.mul_(factor)


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


def save_checkpoint(job: Job, data: Data, loaded: Loaded, state: State, run: Run) -> None:
    """One whole bundle at this step."""
    tensors, scalars = loaded.optimizer.state()
    tensors |= loaded.amax.tensors()
    content = {
        "step": state.step,
        "compute": state.compute,
        "optimizer": scalars,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    content |= _fingerprints(job, data)
    path = checkpoint.save(run.checkpoints, adapters.state(loaded.denoiser), tensors, content, keep=job.checkpoint.keep)
    run.log_event("checkpoint", step=state.step, path=str(path.relative_to(run.path)))


def _take_up(job: Job, data: Data, loaded: Loaded, run: Run, resume: bool) -> State:
    """Where to begin: at 0, or where the newest whole checkpoint ends."""
    if not resume:
        return State()
    found, skipped = checkpoint.latest(run.checkpoints)
    for line in skipped:
        run.log_event("warning", text=line)
    if found is None:
        run.log_event("warning", text="there is no checkpoint yet; training begins at step 0")
        return State()
    before, now = found.state, _fingerprints(job, data)
    refused = [
        f"{key}: was {before['pinned'][key]}, is {value}"
        for key, value in now["pinned"].items()
        if before["pinned"][key] != value
    ]
    if refused:
        raise UserErrors(refused, f"{found.path} cannot go on with another")
    for key, value in now["settings"].items():
        was = before["settings"].get(key)
        if was != value:
            run.log_event(
                "warning",
                text=f"changed since the checkpoint, applies from now on: {key}: {was} -> {value}",
            )
    if before["data"] != now["data"]:
        run.log_event(
            "warning",
            text="the pictures, captions or buckets changed since the checkpoint, and the order of samples with them",
        )
    if found.step > job.train.steps:
        raise UserError(
            f"{found.path} is at step {found.step}, but train.steps is {job.train.steps}; raise train.steps to go on"
        )
    adapters.load_state_(loaded.denoiser, found.adapter)
    tensors = dict(found.optimizer)
    loaded.amax.load_({name: tensors.pop(name) for name in list(tensors) if name.startswith("amax.")})
    loaded.optimizer.load_state(tensors, before["optimizer"])
    run.log_event("resume", step=found.step, checkpoint=found.path.name)
    return State(found.step, before.get("compute", ""))


def _fingerprints(job: Job, data: Data) -> dict[str, Any]:
    """What a checkpoint remembers of the job: settings that may not change, settings that may, and the data."""
    flat = {
        f"{s}.{k}": v
        for s, section in job.model_dump().items()
        if isinstance(section, dict)
        for k, v in section.items()
    }
    flat["seed"] = job.seed
    pinned = (
        "model.family",
        "quantize.storage",
        "quantize.recipe",
        "adapter.type",
        "adapter.rank",
        "adapter.alpha",
        "adapter.targets",
        "adapter.dtype",
    )
    pinned += ("optimizer.name", "optimizer.rounding", "seed")
    watched = ("train.", "optimizer.", "schedule.", "objective.", "model.", "quantize.", "adapter.")
    return {
        "pinned": {key: flat[key] for key in pinned},
        "settings": {k: v for k, v in flat.items() if k.startswith(watched) and k not in pinned},
        "data": data.fingerprint,
    }


# ---------------------------------------------------------------------------------------------------------------------
# smaller things


class StopSignal:
    """SIGTERM and Ctrl-C: while training, finish the step, save, exit; before and after, there is nothing to save.

    `at_once` is what to say when stopping at once, or None while a step's end is to be waited for.

    A second signal while one is pending ends the process in the ordinary way.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once: str | None = "stopped before the first step; what was cached stays cached"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            before = {number: signal.signal(number, self._received) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread of the process: whoever runs us there handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _received(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        if self.at_once is not None:
            raise Stopped(self.at_once)
        print("\nstopping after this step; press Ctrl-C again to end at once", file=sys.stderr)


class _Bystander(Run):
    """The run as a process other than the main one has it: it reads requests and writes nothing."""

    def log_event(self, event: str, **fields: Any) -> None:
        pass


def _settle(job: Job, processes: Processes) -> None:
    if job.train.threads:
        torch.set_num_threads(job.train.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False


def _files(batch: Batch, losses_B: Tensor) -> str:
    bad = [
        str(path) for path, loss in zip(batch.paths, losses_B.detach().tolist(), strict=True) if not math.isfinite(loss)
    ]
    return "files: " + ", ".join(bad)


def _not_finite(step: int, loss: float, norm: float, faults: list[str], run: Run) -> str:
    kept = sorted(p.name for p in (run.path / "checkpoints").glob("step-*"))
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    where = "; ".join(faults) or (
        "no single file (the gradient overflowed)" if math.isfinite(loss) else "files: on another process"
    )
    last = f"last good checkpoint: {kept[-1]}" if kept else "no checkpoint yet"
    return f"step {step}: {what} is not finite; {where}; nothing was updated; {last}. Try a lower optimizer.lr"


def _in_words(error: Exception, run: Run, device: torch.device) -> Exception:
    """What the machine refused (memory; a full disk while caching, logging, exporting) as one line; else as it is."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return RunFailure(memory.out_of_memory_advice(device))
    if not isinstance(error, OSError):
        return error
    place = f"{error.filename}: " if error.filename else ""
    free = shutil.disk_usage(run.path).free / 2**20
    return RunFailure(f"{place}{error.strerror or error}; {free:.1f} MiB are free at {run.path}")


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
