"""A training job from its config to a verified file, in the order it happens.

    run(job)
      plan       everything that is known before a weight is loaded, and all problems of the job
      download   what is missing of a base model on a hub
      cache      encoders only: images and captions -> latents and conditioning on disk; encoders freed
      memory     the memory settings that are left to "auto", by the free memory of the device
      load       the denoiser, streamed into its storage; adapters; memory settings
      preflight  one real forward and backward pass at the largest bucket, to see whether it fits
      train      batch -> loss -> backward -> clip -> step; at intervals: log, checkpoint, preview, stop
      finish     write the LoRA files, and verify that they do what training did

The stages are functions; what changes while training is in one small `State` (in `stages/resume.py`), and a checkpoint
holds exactly that. Each random draw is keyed by its purpose (seed, purpose, epoch, sample), so a resumed run draws the
same numbers as one that was never interrupted.
All processes do every stage. Only the main one writes the run folder, and reports how the run ended.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import config
from .common.progress import show_images
from .common.shell import quote_path
from .distributed.processes import Elsewhere, Processes, find_unused_gpus
from .errors import Message, RunFailure, Stopped, UserError
from .plan import plan as planning
from .plan.machine import describe_environment
from .run import REFUSED, Run, StopSignal, disk_space, ownership
from .settings import Job, schedules
from .stages import held_out, tracking
from .stages.cache import Data, cache
from .stages.download import download
from .stages.finish import Result, finish
from .stages.fit_memory import fit_memory
from .stages.load import Loaded, load
from .stages.measure import find_layers_to_move
from .stages.milestones import Milestones, find_missed
from .stages.preflight import preflight
from .stages.progress import Progress
from .stages.resume import State, begin_or_resume, require_resumable, require_same_step
from .stages.same_job import require_same_job
from .stages.session import Bystander, Session, explain_errors
from .stages.step import compute_gradient_, require_finite
from .training import optim
from .training.torch_options import set_torch_options

Echo = Callable[[dict[str, Any]], None]


def run(job: Job, *, resume: bool = False, progress: bool = True, echo: Echo | None = None) -> Result:
    """Run the whole job in `output_dir/name`.

    Args:
        job: with its config.
        resume: continue from the newest complete checkpoint in the run folder.
        progress: show a progress bar on stderr, or a line every ten seconds if stderr is no terminal.
        echo: called with each event that is written to events.jsonl.

    Returns:
        The run, its LoRA files and their reports; without files on processes other than the main one.

    Raises:
        UserError: the config, the files or the machine do not fit; found before training if possible.
        RunFailure: the run failed. The last checkpoint is intact.
        Stopped: a stop was requested. The run is saved and can be resumed.
    """
    processes, stop = Processes(), StopSignal()
    processes.undisturbed = stop.held
    folder = job.run_folder
    with stop.watching():
        try:
            set_torch_options(job.train.threads, deterministic=job.train.deterministic)
            with processes.together():
                if processes.is_main:
                    ownership.require_startable(folder, resume=resume)
                # All problems are reported before a run folder exists.
                count = show_images() if progress and processes.is_main else None
                plan = planning.make(job, processes.device, world=processes.world, resume=resume, progress=count)
                require_same_job(plan, processes)
                warnings = disk_space.require_space(plan.estimate_writes(processes.world)) if processes.is_main else []
            with processes.together():
                text = config.dumps(plan.job)
                run = Run.create(folder, text, resume=resume) if processes.is_main else Bystander(folder)
            run.echo = echo
            if processes.is_main:
                tracking.watch(plan.job.tracking, job.name, text, run)
            session = Session(plan, run, processes, stop, progress and processes.is_main)
            with _log_ending(session, resume):
                run.log_event(
                    "start", resume=resume, processes=processes.world, device=str(processes.device), name=job.name
                )
                run.log_event("environment", **describe_environment(processes.device))
                for warning in [*plan.images.warnings, *plan.warnings, *warnings, *find_unused_gpus()]:
                    session.warn(warning)
                return _run_stages(session, resume)
        except (UserError, RunFailure, Stopped) as error:
            # Each machine has a launcher, and one whose processes all return 0 would wait minutes for the others'.
            if processes.is_first_here or not (processes.all_know or isinstance(error, Elsewhere)):
                raise
            return Result(Bystander(folder), [], [])  # the first process reports it, and its exit code is the job's
        finally:
            processes.leave()


def _run_stages(session: Session, resume: bool) -> Result:
    run, processes = session.run, session.processes
    with session.together():
        if resume:
            require_resumable(session)
        download(session)
    with session.together():
        data = cache(session)
        session.stop_if_asked()
    with session.together():
        session = fit_memory(session)
        moved = find_layers_to_move(session, resume)
        loaded = load(session, moved)
        state = begin_or_resume(session, data, loaded, resume)
        require_same_step(state, run, processes)
        state.series = held_out.read_series(session, data, state.step) if state.step else []
        if resume and processes.is_main:
            run.write_config(config.dumps(session.job))  # accepted only now
        session.stop_if_asked()
    missed = find_missed(session, data, state)
    if missed or not held_out.has_ended(session, state):
        with session.together():
            preflight(session, data, loaded, state)
        fit(session, data, loaded, state, missed)
    if state.series and state.step < session.job.train.steps:
        run.log_event("patience", step=state.step, text=held_out.describe_end(state.series))
    session.stop.at_once = Message(
        "all steps are done and saved; `{command}` writes the files",
        command=f"lora-fp8 resume {quote_path(run.path)}",
    )
    return finish(session, data, loaded, state)


def fit(session: Session, data: Data, loaded: Loaded, state: State, missed: frozenset[str] = frozenset()) -> None:
    """Train from `state.step` to `train.steps`, or until `validation.patience` is exhausted: the loop.

    Args:
        session, data, loaded: of the run.
        state: updated with each step.
        missed: from `find_missed`.
    """
    job, optimizer, gradients = session.job, loaded.optimizer, loaded.exchange.gradients
    steps, milestones = job.train.steps, Milestones(session, data, loaded, state)
    session.run.log_event("stage", stage="train", step=state.step, steps=steps)
    session.stop.at_once = None  # from here on a step is finished and saved first
    milestones.before_first_step(missed)
    with Progress(job.name, state.step, steps, is_shown=session.shows_progress) as progress:
        while not milestones.is_over:
            started = time.perf_counter()
            lr = schedules.compute_learning_rate(state.step, job.schedule, optimizer.base_lr, steps)
            gradient = compute_gradient_(session, data, loaded, state.step + 1, milestones.read_requests)
            norm = optim.clip_(gradients.values, job.train.max_grad_norm)
            require_finite(session, state.step + 1, gradient, norm)
            rate = optimizer.compute_effective_lr(lr)
            optimizer.step(gradients.values, lr, state.step + 1)
            loaded.amax.end_step_(session.processes.reduce_max_)
            state.step += 1

            progress.update(state.step, gradient.loss, rate)
            figures = {"loss": gradient.loss, "lr": rate}
            if loaded.text:
                figures["lr_text_encoder"] = rate * optimizer.text_ratio
            if loaded.cap:
                figures |= loaded.cap.collect_figures()
            seconds = time.perf_counter() - started
            figures |= {"grad_norm": norm, "images_per_s": round(gradient.num_samples / seconds, 3)}
            milestones.after_step(gradient, figures | {"step_s": round(seconds, 4)})


@contextlib.contextmanager
def _log_ending(session: Session, resume: bool) -> Iterator[None]:
    """Log a stop or an error of the block as the end of the run, and close the log.

    A resume with settings that do not fit is refused, and does not change how the run had ended.
    """
    run = session.run
    try:
        with session.stop.recognised(), explain_errors(session):
            yield
    except (Stopped, KeyboardInterrupt) as error:
        with contextlib.suppress(OSError):  # on a full disk the log fails too, and must not hide the reason
            run.log_event("stopped", text=str(error) or Message("interrupted; the newest checkpoint is unchanged"))
        raise
    except Exception as error:
        refused = resume and isinstance(error, UserError) and not run.is_accepted
        with contextlib.suppress(OSError):
            run.log_event(
                REFUSED if refused else "error", text=str(error), kind=type(error.__cause__ or error).__name__
            )
        raise
    finally:
        run.close()
