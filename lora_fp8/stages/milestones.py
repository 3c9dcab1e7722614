"""Between two steps: write figures, checkpoints and LoRA files, measure the held-out loss, draw previews, stop.

The checkpoint comes first, so that no step is lost if anything after it fails.
"""

from .. import adapters, precision, settings
from ..common.shell import quote_path
from ..errors import Message, Stopped
from ..run import Run
from ..settings import Job, schedules
from ..training import checkpoint, memory, optim
from . import held_out, previews, validate
from .cache import Data
from .finish import get_export_folder, write_files
from .live_previews import LivePreviews
from .load import Loaded, encode_preview_prompts
from .resume import State, save_checkpoint
from .session import Session
from .step import Gradient


class Milestones:
    """The work that is due before the first step and after each step of a training."""

    def __init__(self, session: Session, data: Data, loaded: Loaded, state: State) -> None:
        self.session, self.data, self.loaded, self.state = session, data, loaded, state
        self._log_is_full: OSError | None = None
        self._first_step = state.step + 1
        self._live_previews = LivePreviews(session, data, loaded)
        self._has_ended = held_out.has_ended(session, state)  # since the newest validation

    @property
    def is_over(self) -> bool:
        """Return True if all steps are done, or `validation.patience` is exhausted."""
        return self._has_ended or self.state.step >= self.session.job.train.steps

    def read_requests(self) -> frozenset[str]:
        """Read the requests to this process for the end of this step, of `step.REQUESTS`."""
        session = self.session
        names = ("stop", "save", "preview") if session.processes.is_main else ()
        asked = {name for name in names if session.run.take_request(name)} | self._live_previews.read_requests()
        if session.stop.requested or self._log_is_full is not None:
            asked.add("stop")
        return frozenset(asked)

    def before_first_step(self, missed: frozenset[str]) -> None:
        """Do what the last run of this job missed; at step 0, also measure the base model and draw its previews."""
        job, step = self.session.job, self.state.step
        if "export" in missed:
            self.export(step)
        if "validation" in missed or (self.data.held_out and step == 0):
            self.validate(step)
        if "preview" in missed or (self.data.preview.prompts and job.preview.at_start and step == 0):
            if not self.draw(step):
                self._stop(step)

    def after_step(self, gradient: Gradient, figures: dict[str, float]) -> None:
        """Do what is due after the step of `state`.

        Args:
            gradient: of the step, with the requests.
            figures: of the step, for the log.

        Raises:
            Stopped: a stop was requested, and everything is saved.
        """
        job, step, requests = self.session.job, self.state.step, gradient.requests
        steps = job.train.steps
        logs = step % job.train.log_every == 0 or step == steps
        saves = bool(requests & {"save", "stop"}) or step % job.checkpoint.every == 0 or step == steps
        if step == self._first_step and self.session.processes.world > 1:
            self.session.run.log_event("exchange", **self.loaded.exchange.describe_cost(gradient.sent))
        if logs:
            self._log(step, figures)
        if saves:
            self.save()
        if is_export_due(job, step):
            self.export(step)
        if is_validation_due(job, self.data, step):
            self.validate(step)
        if self.is_over and step < steps:
            if not logs:
                self._log(step, figures)
            if not saves:
                self.save()
        changed = "prompts" in requests and self._live_previews.change_prompts(step)
        # Who stops does not wait for previews that may take minutes: resuming draws them, see `find_missed`.
        is_due = "stop" not in requests and is_preview_due(job, self.data.preview, step)
        is_due = is_due or changed or "preview" in requests
        if self.data.preview.prompts and is_due and not self.is_over and not self.draw(step):
            requests |= {"stop"}
            if not saves:
                self.save()
        if "sample" in requests:
            with self.loaded.optimizer.evaluation():
                self._live_previews.draw_samples(step)
        if "stop" in requests and not self.is_over:
            self._stop(step)

    def _stop(self, step: int) -> None:
        """Raise Stopped, or the error that has filled the disk; there is a checkpoint of this step."""
        with self.session.together():
            if self._log_is_full is not None:
                raise self._log_is_full
            raise Stopped(
                Message(
                    "saved at step {step}; `{command}` continues",
                    step=step,
                    command=f"lora-fp8 resume {quote_path(self.session.run.path)}",
                )
            )

    def _log(self, step: int, figures: dict[str, float]) -> None:
        vram_gb = round(memory.read_peak_gib(self.session.processes.device), 3)
        try:
            self.session.run.log_event("step", step=step, **figures, vram_gb=vram_gb)
        except OSError as error:
            if error.errno not in checkpoint.FULL:
                raise
            self._log_is_full = error  # a checkpoint is saved first: all processes stop after the next step

    def save(self) -> None:
        """Write a checkpoint to resume from."""
        with self.loaded.optimizer.evaluation(), self.session.together():
            residuals = self.loaded.exchange.collect()
            if self.session.processes.is_main:
                save_checkpoint(self.session, self.data, self.loaded, self.state, residuals)
                held_out.prune(self.session, self.state.series)

    def export(self, step: int) -> None:
        """Write the LoRA files of this step."""
        with self.loaded.optimizer.evaluation(), self.session.together():
            if self.session.processes.is_main:
                folder = get_export_folder(self.session.run, step)
                write_files(self.session, adapters.copy_state(self.loaded.adapted), step, folder)

    def validate(self, step: int) -> None:
        """Measure the loss on the held-out images, and keep the LoRA if it is the best one so far."""
        with self.loaded.optimizer.evaluation(), self.session.together():
            measurement = validate.measure(self.session, self.data, self.loaded, step)
            if measurement is not None:
                held_out.record(self.session, self.data, self.loaded, self.state, measurement)
                self._has_ended = held_out.has_ended(self.session, self.state)

    def draw(self, step: int) -> bool:
        """Draw previews. Return False if a stop was requested meanwhile: they are drawn when the run is resumed.

        At step 0 all of them are drawn, as there is no checkpoint to resume from.
        """
        with self.loaded.optimizer.evaluation():
            prompts = encode_preview_prompts(self.data, self.loaded)
            self.loaded.free_recordings()
            model, section = self.loaded.denoiser, self.data.preview
            with self.session.together(), precision.decoded_compute(model):
                is_stopped = self._is_stop_requested if step > 0 else None
                try:
                    drawn = previews.draw(self.session, model, section, prompts, step, is_stopped=is_stopped)
                except previews.StoppedDrawing:  # in all processes, so it is no error to tell them
                    return False
        self.data.scores.score(self.session, drawn, prompts.texts, step)
        return True

    def _is_stop_requested(self) -> bool:
        is_main = self.session.processes.is_main  # which alone reads requests, as after a step
        return self.session.stop.requested or (is_main and self.session.run.take_request("stop"))


def is_export_due(job: Job, step: int) -> bool:
    """Return True if the LoRA files of this step are due. At learning rate 0 (warmup) the step changed nothing."""
    steps = job.train.steps
    due = job.export.every and 0 < step < steps and step % job.export.every == 0
    return bool(due and schedules.compute_learning_rate(step - 1, job.schedule, optim.resolve_lr(job.optimizer), steps))


def is_validation_due(job: Job, data: Data, step: int) -> bool:
    """Return True if the held-out loss is due after this step."""
    return bool(data.held_out) and (step % job.validation.every == 0 or step == job.train.steps)


def is_preview_due(job: Job, preview: settings.Preview, step: int) -> bool:
    """Return True if previews are due after this step by the table in force; the last ones are drawn by `finish`."""
    return bool(preview.prompts and preview.every) and step < job.train.steps and step % preview.every == 0


def find_missed(session: Session, data: Data, state: State) -> frozenset[str]:
    """Find the events that are due at the step of a checkpoint and are missing in the run's log.

    If a process was killed right after a checkpoint, LoRA files, held-out loss and previews of that step are missing.
    Step 0 has no checkpoint.

    Returns:
        A part of {"export", "validation", "preview"}.
    """
    job, step = session.job, state.step
    if not step:
        return frozenset()
    due = {
        "export": is_export_due(job, step),
        "validation": is_validation_due(job, data, step),
        "preview": is_preview_due(job, data.preview, step),
    }
    logged = _find_logged(session.run, step)
    if not any(measurement.step == step for measurement in state.series):
        logged.discard("validation")
    # All processes use the main one's answer: the others might already read what it logs next.
    missed = frozenset(event for event, is_due in due.items() if is_due and event not in logged)
    return session.processes.gather(missed)[0]


def _find_logged(run: Run, step: int) -> set[str]:
    """Return the names of the events that a run has logged for a step."""
    events, folder = run.read_events(), get_export_folder(run, step)
    logged = {event["event"] for event in events if event.get("step") == step}
    return logged | {event["event"] for event in events if folder in (run.path / str(event.get("path"))).parents}
