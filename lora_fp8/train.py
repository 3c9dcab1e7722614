"""A training job from its config to a verified file, in the order it happens.

    run(job)
      cache      encoders only: pictures and captions -> latents and conditioning on disk; encoders freed
      load       the denoiser, streamed into its storage; adapters beside it; what memory asks for
      preflight  one real forward and backward at the largest bucket: find out now whether it fits
      train      batch -> loss -> backward -> clip -> step; every so often: log, checkpoint, preview, stop?
      finish     the LoRA files, and the proof that they do what training did

Functions and one small `State` (in `resume`); what a checkpoint must hold is exactly what is in it. Everything random
is keyed by what it is for (seed, purpose, step, sample), so a resumed run draws the same numbers as one that was never
interrupted.
All processes do every stage; the main one alone writes the run folder, and tells the user how it ended.
"""

import contextlib
import errno
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from . import adapters, checkpoint, config, families, memory, optim, precision, sample, validate, writes
from .config import Job, UserError, UserErrors
from .data.loader import Batch
from .families.base import ModelFamily
from .finish import Result, export_folder, finish, write_files
from .measure import moved_layers
from .objectives import Objective
from .prepare import (
    DTYPES,
    Data,
    Loaded,
    cache,
    carried,
    load,
    plan,
    preview_conditioning,
    resolve_auto,
    run_folder,
    scan,
)
from .processes import Elsewhere, Gradients, Processes
from .resume import State, last_good, same_step, save_checkpoint, start_values, take_up
from .run import Run, RunFailure, Stopped, StopSignal
from .text_encoders import TextEncoders


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
    stop = StopSignal()
    processes.undisturbed = stop.held
    folder = run_folder(job)
    with stop.watching():
        try:
            return _stages(job, folder, resume, progress, echo, processes, stop)
        except (UserError, RunFailure, Stopped) as error:
            if processes.is_main or not (processes.all_know or isinstance(error, Elsewhere)):
                raise
            return Result(_Bystander(folder), [], [])  # the main process tells it, and its exit code is the job's
        finally:
            processes.leave()


def _stages(
    job: Job,
    folder: Path,
    resume: bool,
    progress: bool,
    echo: Callable[[dict[str, Any]], None] | None,
    processes: Processes,
    stop: StopSignal,
) -> Result:
    _settle(job)
    with processes.together():
        # Before a run folder exists: everything that can be wrong with the pictures, all of it at once.
        Family = families.get(job.model.family)
        family = Family(job.model, device=processes.device, dtype=DTYPES[job.model.dtype])
        text = precision.problem(job.quantize, processes.device, processes.world)
        if text := text or memory.problem(job.memory, processes.device):
            raise UserError(text)
        family.check_parts()
        plan(job, family)
        job = carried(resolve_auto(job, Family), family)
        scanned = scan(job, Family)
        if scanned.problems:
            raise UserErrors(scanned.problems, "dataset")
        if not resume:
            start_values(job, family)  # what is wrong with the LoRA file that it is to go on from
    with processes.together():
        run = Run.create(folder, config.dumps(job), resume=resume) if processes.is_main else _Bystander(folder)
    run.echo = echo
    try:
        with in_words(run, processes.device):
            run.log_event(
                "start", resume=resume, processes=processes.world, device=str(processes.device), name=job.name
            )
            for text in scanned.warnings:
                run.log_event("warning", text=text)
            with stage(run, processes):
                named = writes.trained(job, family) if processes.is_main else []
                written = writes.of_run(job, named, run.path, processes.world)
                data = cache(job, family, scanned.examples, run, processes, written)
                _stop_if_asked(run, stop)
            with stage(run, processes):
                moved = moved_layers(job, family, data, run, processes, resume)
                loaded = load(job, family, run, processes, moved)
                state = take_up(job, family, data, loaded, run, resume)
                same_step(state, run, processes)
                if resume and processes.is_main:
                    run.write_config(config.dumps(job))  # accepted only now
                _stop_if_asked(run, stop)
            if state.step < job.train.steps:
                with stage(run, processes):
                    preflight(job, family, data, loaded, state, run, processes)
                fit(job, family, data, loaded, state, run, processes, stop, progress)
            stop.at_once = f"all steps are done and saved; `lora-fp8 resume {run.path}` writes the files"
            return finish(job, family, data, loaded, state.step, run, processes)
    except (Stopped, KeyboardInterrupt) as error:
        with contextlib.suppress(OSError):  # on a full disk the log fails too, and must not hide why
            run.log_event("stopped", text=str(error) or "interrupted; the newest checkpoint is as it was")
        raise
    except Exception as error:
        with contextlib.suppress(OSError):
            run.log_event("error", text=str(error), kind=type(error.__cause__ or error).__name__)
        raise
    finally:
        run.close()


# ---------------------------------------------------------------------------------------------------------------------
# train


def diffusion_loss(
    family: ModelFamily,
    denoiser: nn.Module,
    objective: Objective,
    batch: Batch,
    guidance: float,
    dtype: torch.dtype,
    text: TextEncoders | None = None,
) -> Tensor:
    """Corrupt the latents, let the denoiser answer, compare: the one loss of every family. -> (B,) float32

    Args:
        text: text encoders that are trained, which read the captions anew; None takes the cache's conditioning.
    """
    device = next(denoiser.parameters()).device
    latents, noise = batch.latents_BCHW.to(device), batch.noise_BCHW.to(device)
    t_B = objective.sample_t(batch.t_generators, family.seq_len(tuple(latents.shape[2:]))).to(device)
    noise = objective.shaped(noise, batch.t_generators)
    noisy = objective.add_noise(latents, noise, t_B)
    cond = {name: tensor.to(device) for name, tensor in batch.cond.items()}
    if text is not None:
        cond = text.cond(batch.captions, cond)
    answer = family.predict(denoiser, noisy.to(dtype), t_B, cond, guidance)
    mask = None if batch.mask_BHW is None else batch.mask_BHW.to(device)
    return objective.loss(answer, objective.target(latents, noise, t_B), t_B, mask)


def preflight(
    job: Job, family: ModelFamily, data: Data, loaded: Loaded, state: State, run: Run, processes: Processes
) -> None:
    """One forward and backward at the heaviest batch: out of memory or a broken base show now, not in an hour.

    With quantize.compute = "auto" each matmul gets a few of them, and the fastest is taken; a resumed run keeps what
    it had, so that it goes on to the bit, wherever the machine can.
    """
    run.log_event("stage", stage="preflight")
    memory.reset_peak(processes.device)
    batch = data.loader.micro(0, data.heaviest, processes.rank, processes.world)

    def attempt() -> None:
        if batch is None:
            return
        losses_B = _losses(job, family, loaded, batch)
        losses_B.sum().backward()
        if not torch.isfinite(losses_B).all():
            raise RunFailure(
                f"the loss is not finite before any training; {_files(batch, losses_B)}; is the base model whole?"
            )

    if job.quantize.compute == "auto":
        able = precision.candidates(job.quantize, processes.device)
        lost = bool(state.compute) and precision.chosen(state.compute, job.quantize)[0] not in able
        if any(processes.gather(lost)):
            text = f"the matmul that the checkpoint had settled on, {state.compute}, is none of this machine's"
            run.log_event("warning", text=f"{text}; the fastest is measured anew")
            state.compute = ""
        state.compute = state.compute or _fastest_compute(job, loaded, attempt, run, processes)
        _switch(job, loaded, state.compute)
    attempt()
    loaded.amax.forget_step_()
    for _, parameter in adapters.parameters(loaded.adapted):
        parameter.grad = None
    fused = {"fused": adapters.num_fused(loaded.denoiser)} if job.quantize.kernels == "triton" else {}
    run.log_event("preflight", peak_gib=round(memory.peak_gib(processes.device), 3), **fused)


def _fastest_compute(job: Job, loaded: Loaded, attempt: Callable[[], None], run: Run, processes: Processes) -> str:
    """Try each matmul on this batch and say what each took; all processes come to the same answer."""
    if not any(layer.compute.startswith("fp8") for layer in loaded.plan.layers):
        return "upcast"
    modes = precision.candidates(job.quantize, processes.device)
    seconds = precision.fastest(modes, lambda mode: _switch(job, loaded, mode), attempt, processes.device)
    total = [sum(each) for each in zip(*processes.gather([seconds[mode] for mode in modes]), strict=True)]
    if min(total) == math.inf:
        raise RunFailure(memory.out_of_memory_advice(processes.device))
    chosen = modes[total.index(min(total))]
    run.log_event("compute", chosen=chosen, seconds={mode: round(seconds[mode], 4) for mode in modes})
    return chosen


def _switch(job: Job, loaded: Loaded, mode: str) -> None:
    compute, section = precision.chosen(mode, job.quantize)
    precision.set_compute_(loaded.denoiser, loaded.plan.with_compute(compute), section)


def fit(
    job: Job,
    family: ModelFamily,
    data: Data,
    loaded: Loaded,
    state: State,
    run: Run,
    processes: Processes,
    stop: StopSignal,
    progress: bool,
) -> None:
    """The loop, from `state.step` to `train.steps`."""
    run.log_event("stage", stage="train", step=state.step, steps=job.train.steps)
    denoiser, optimizer, steps = loaded.denoiser, loaded.optimizer, job.train.steps
    exchange, first = loaded.exchange, state.step + 1
    gradients = exchange.gradients
    full: OSError | None = None  # the disk has no room for the log
    stop.at_once = None

    def draw(step: int) -> None:
        conds, negatives = preview_conditioning(data, loaded)
        with stage(run, processes), precision.decoded_compute(denoiser):
            sample.draw(family, denoiser, conds, negatives, job.preview, job.dataset.resolution, step, run, processes)

    def hold_against_held_out(step: int) -> None:
        with stage(run, processes):
            validate.measure(job, family, data, loaded, step, run, processes)

    # at the start: what the base makes of the held-out pictures, and what it draws, to compare with
    if data.held_out and state.step == 0:
        hold_against_held_out(0)
    if job.preview.prompts and job.preview.at_start and state.step == 0:
        draw(0)

    show = progress and processes.is_main
    bar = tqdm(total=steps, initial=state.step, desc=job.name, unit="step", disable=not show, leave=True)
    with bar:
        while state.step < steps:
            step, started = state.step + 1, time.perf_counter()
            lr = optim.learning_rate(state.step, job.schedule, optimizer.base_lr, steps)
            positions = range(state.step * job.train.accumulate, step * job.train.accumulate)
            num_samples = sum(map(data.loader.total, positions))
            loss_sum, faults, failure = 0.0, [], None
            try:
                loss_sum, faults = accumulate_(gradients, job, family, data, loaded, step, positions, processes)
            except Exception as error:  # told with the sums, for which the other processes are waiting
                failure = error

            # Over all processes, and the mean over the samples of this step: short batches weigh what they hold.
            sent_before = processes.sent
            sums = exchange.mean_(
                num_samples,
                loss=loss_sum,
                failed=failure is not None,
                stop=stop.requested or full is not None or (processes.is_main and run.requested("stop")),
                save=processes.is_main and run.requested("save"),
                preview=processes.is_main and run.requested("preview"),
            )
            sent = processes.sent - sent_before
            if sums["failed"]:
                with stage(run, processes):
                    if failure is not None:
                        raise failure
            loss = sums["loss"] / num_samples
            norm = optim.clip_(gradients.named, job.train.max_grad_norm)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                with stage(run, processes):
                    faults = [fault for found in processes.gather(faults) for fault in found]
                    raise RunFailure(_not_finite(step, loss, norm, faults, run))
            rate = optimizer.effective(lr)
            optimizer.step(gradients.named, lr, step)
            loaded.amax.end_step_(processes.max_)
            state.step = step
            seconds = time.perf_counter() - started

            # once: what the gradients of a step cost each process to send
            if step == first and processes.world > 1:
                run.log_event("exchange", **exchange.cost(sent))

            # every step: one line of figures
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", lr=f"{rate:.2e}", refresh=False)
            if step % job.train.log_every == 0 or step == steps:
                try:
                    run.log_event(
                        "step",
                        step=step,
                        loss=loss,
                        lr=rate,
                        **({"lr_text_encoder": rate * optimizer.text_ratio} if loaded.text else {}),
                        grad_norm=norm,
                        images_per_s=round(num_samples / seconds, 3),
                        vram_gb=round(memory.peak_gib(processes.device), 3),
                    )
                except OSError as error:
                    if error.errno not in checkpoint.FULL:
                        raise
                    full = error  # what was learned is saved first: all stop after the next step

            # every so often, on request, when stopping and at the end: a checkpoint to resume from
            if sums["save"] or sums["stop"] or step % job.checkpoint.every == 0 or step == steps:
                with stage(run, processes):
                    residuals = exchange.collect()
                    if processes.is_main:
                        save_checkpoint(job, family, data, loaded, state, residuals, run)

            # every so often: the LoRA files of now, to try elsewhere; a warm-up's first step has changed nothing yet
            if job.export.every and step % job.export.every == 0 and step < steps and lr:
                with stage(run, processes):
                    if processes.is_main:
                        write_files(
                            job, family, data, adapters.state(loaded.adapted), step, run, export_folder(run, step)
                        )

            # every so often and at the end: the loss on what is kept out of training
            if data.held_out and (step % job.validation.every == 0 or step == steps):
                hold_against_held_out(step)

            # every so often and on request: previews, after the save so that a failing preview loses nothing
            if job.preview.prompts and step < steps:
                if sums["preview"] or (job.preview.every and step % job.preview.every == 0):
                    draw(step)

            # when asked: stop at this boundary
            if sums["stop"] and step < steps:
                with stage(run, processes):
                    if full is not None:
                        raise full
                    raise Stopped(f"saved at step {step}; `lora-fp8 resume {run.path}` goes on")


def accumulate_(
    gradients: Gradients,
    job: Job,
    family: ModelFamily,
    data: Data,
    loaded: Loaded,
    step: int,
    positions: range,
    processes: Processes,
) -> tuple[float, list[str]]:
    """This process's share of the micro-batches of a step: their gradients, summed into `gradients`.

    Returns:
        The sum of the losses of its samples, and a line for each micro-batch whose loss is not finite.
    """
    gradients.zero_()
    loss_sum, faults = 0.0, []
    for micro, position in enumerate(positions):
        batch = data.loader.micro(step, position, processes.rank, processes.world)
        if batch is None:
            continue  # a short batch: the other processes have it
        if job.adapter.dropout:
            # Dropout draws from torch's global generator, inside peft: keyed here, so that resuming draws the same.
            torch.manual_seed(_key(f"dropout|{job.seed}|{step}|{micro}|{processes.rank}"))
        losses_B = _losses(job, family, loaded, batch)
        losses_B.sum().backward()
        gradients.collect_()
        micro_loss = losses_B.detach().sum().item()  # waits for the device: once per micro-batch
        loss_sum += micro_loss
        if not math.isfinite(micro_loss):
            faults.append(_files(batch, losses_B))
    return loss_sum, faults


def _losses(job: Job, family: ModelFamily, loaded: Loaded, batch: Batch) -> Tensor:
    """Of each sample, times the weight of its folder."""
    dtype, guidance = DTYPES[job.model.dtype], job.objective.guidance
    losses_B = diffusion_loss(family, loaded.denoiser, loaded.objective, batch, guidance, dtype, loaded.text)
    return losses_B * torch.tensor(batch.weights, device=losses_B.device)


# ---------------------------------------------------------------------------------------------------------------------
# smaller things


class _Bystander(Run):
    """The run as a process other than the main one has it: it reads requests and writes nothing."""

    def log_event(self, event: str, **fields: Any) -> None:
        pass


@contextlib.contextmanager
def stage(run: Run, processes: Processes) -> Iterator[None]:
    """What all processes do together; what goes wrong on one is told to the others in words."""
    with processes.together(), in_words(run, processes.device):
        yield


@contextlib.contextmanager
def in_words(run: Run, device: torch.device) -> Iterator[None]:
    """What the machine refused (memory, the disk, the network) as one line; anything else as it is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailure(memory.out_of_memory_advice(device)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        room = ""
        if error.errno in (*checkpoint.FULL, errno.EFBIG):
            # The disk that is full; the folder itself may be what has gone.
            full = Path(error.filename or run.path).resolve()
            there = next(path for path in (full, *full.parents) if path.exists())
            room = f"; {shutil.disk_usage(there).free / 2**20:.1f} MiB are free at {there}"
        raise RunFailure(f"{place}{error.strerror or error or type(error).__name__}{room}") from error


def _stop_if_asked(run: Run, stop: StopSignal) -> None:
    if stop.at_once is not None and run.requested("stop"):
        raise Stopped(stop.at_once)


def _settle(job: Job) -> None:
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
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    where = "; ".join(faults) or "no single file (the gradient overflowed)"
    return (
        f"step {step}: {what} is not finite; {where}; nothing was updated; {last_good(run)}. Try a lower optimizer.lr"
    )


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
