"""Measure how much quantization changes the base model, and which layers need a better storage.

    report(job)                the figures of `lora-fp8 precision`
    find_layers_to_move(...)   the decision of quantize.sensitivity = "auto" at the start of a job

Both use the job's own images and captions as training shows them (the first few of epoch 0, with their noise), at five
noise levels. The unquantized and the quantized base model are loaded one after the other, never together. "auto" does
not need the unquantized one: a GPU that holds the quantized model is large enough for the measurement.

The bound of "auto" is on single layers. The error of the prediction would be the better measure, but needs the whole
unquantized model in memory, which may not fit where a model is quantized. The error of a layer needs only its weights.
It does not depend on the order of moves, so each layer takes the cheapest storage within the bound, and only layers
above the bound move. `report` shows the effect on the prediction.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import precision, settings
from ..common.progress import show_images
from ..data.loader import Loader
from ..distributed.processes import Processes
from ..errors import Joined, Message, Plural, RunFailure, UserError
from ..families.base import Cond, ModelFamily
from ..plan import plan as planning
from ..precision import report as layerwise
from ..run import Run
from ..settings import Job
from ..training import checkpoint
from ..training.torch_options import set_torch_options
from .cache import cache
from .load import add_moved_layers, load_base
from .session import Session, UnwrittenRun

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels, from 0 (clean) to 1 (noise)."""
NUM_PICTURES = 4
"""Images to measure on, by default."""


@dataclass(frozen=True)
class Question:
    """One image at one noise level, as the training step gives it to the denoiser."""

    label: str
    noisy_BCHW: Tensor
    t_B: Tensor
    cond: Cond
    guidance: float

    def ask(self, family: ModelFamily, denoiser: nn.Module) -> Tensor:
        """Let the denoiser predict. Returns the prediction, float32 on the CPU.

        Raises:
            RunFailure: the prediction is not finite.
        """
        noisy, t, cond = self.noisy_BCHW, self.t_B, self.cond
        device = next(denoiser.parameters()).device
        cond = {name: tensor.to(device) for name, tensor in cond.items()}
        with torch.no_grad():
            answer = family.predict(denoiser, noisy.to(device, family.dtype), t.to(device), cond, self.guidance)
        if not answer.isfinite().all():
            raise RunFailure(
                Message(
                    "the denoiser's prediction is not finite at {place}; check that the base model file is complete",
                    place=self.label,
                )
            )
        return answer.float().cpu()


@dataclass(frozen=True)
class Report:
    """The figures of `lora-fp8 precision`. All errors are relative rms; 0.03 is 3 %."""

    base: str
    storage: str
    """summary of the plan"""
    bound: float
    """quantize.sensitivity_bound"""
    override: dict[str, str]
    """quantize.override, with the moved layers"""
    moved: list[str]
    """the lines of it that quantize.sensitivity = "auto" added"""
    pictures: int
    layers: list[layerwise.LayerError]
    """the worst first"""
    prediction: dict[str, float]
    """noise level -> error of the prediction against the unquantized base, with dequantized weights"""
    multiplied: dict[str, float]
    """the same with FP8 matmuls; empty if the job uses none"""

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as plain JSON types."""
        layers = [asdict(layer) | {"damage": layer.damage} for layer in self.layers]
        return {key: getattr(self, key) for key in self.__dataclass_fields__} | {"layers": layers}

    def format_lines(self) -> list[str]:
        """Return the report as text."""
        lines: list[str] = [
            f"{self.base}: {self.storage}",
            Plural(
                "measured with {count} image at {levels} noise levels",
                "measured with {count} images at {levels} noise levels",
            )(count=self.pictures, levels=len(LEVELS)),
        ]
        if self.moved:
            lines.append(
                Message(
                    "quantize.sensitivity = 'auto' changed the storage of {count} layers: {lines}",
                    count=len(self.moved),
                    lines=Joined("; ", self.moved),
                )
            )
        lines += ["", Message("error of each layer, and of all layers of each storage format:")]
        lines += [*layerwise.format_table(self.layers), *layerwise.format_totals(self.layers)]
        plain = Message("error of the prediction, compared with the unquantized base model:")
        multiplied = Message("error of the prediction with FP8 matmuls, compared with the unquantized base model:")
        for heading, errors in ((plain, self.prediction), (multiplied, self.multiplied)):
            if errors:
                lines += ["", heading]
                lines += ["  ".join(f"{label}: {100 * error:.3g} %" for label, error in errors.items())]
        return [*lines, "", *layerwise.format_advice(self.layers, self.bound, self.override)]


def measure_precision(
    job: Job,
    *,
    num_pictures: int = NUM_PICTURES,
    whole: bool = True,
    echo: Callable[[dict[str, Any]], None] | None = None,
) -> Report:
    """Measure the base model as this job would quantize it. Writes nothing but cached images and captions.

    Args:
        job: with its config.
        num_pictures: images to measure on.
        whole: compare predictions too; the unquantized base model must then fit into memory.
        echo: called with each event.

    Raises:
        UserError: the job has a problem, or no layer is quantized.
        RunFailure: a prediction is not finite, or the memory is too small.
    """
    processes = Processes()
    set_torch_options(job.train.threads, deterministic=job.train.deterministic)  # the arithmetic is that of training
    plan = planning.make(job, processes.device, progress=show_images() if processes.is_main else None)
    if not plan.layers.quantized:
        raise UserError(
            Message(
                "quantize.storage = {storage}: no layer is quantized, so there is nothing to measure; choose a "
                "storage format, such as --set quantize.storage=fp8",
                storage=repr(job.quantize.storage),
            )
        )
    plan.family.fetch_weights()
    session = Session(plan, UnwrittenRun(echo), processes)
    for text in [*plan.images.warnings, *plan.warnings]:
        session.warn(text)
    cache(session)
    moved = find_layers_to_move(session, resume=False)
    try:
        return _measure(session, moved, num_pictures, whole)
    except torch.cuda.OutOfMemoryError:
        raise RunFailure(
            Message("out of memory; use --layers-only, which loads only the quantized base model")
            if whole
            else Message("out of memory; use --pictures 1, or a smaller dataset.resolution")
        ) from None


def find_layers_to_move(session: Session, resume: bool) -> list[str]:
    """Find the layers that quantize.sensitivity = "auto" moves to a better storage.

    The images and captions must be in the cache. A resumed run takes the lines of its checkpoint and measures nothing.
    Of several processes the main one measures, and all get its lines.

    Returns:
        Lines to add to quantize.override; [] with "off".

    Raises:
        ValueError: NaN or infinity in a layer, naming it.
        RunFailure: a prediction is not finite; the measurement failed on the main process.
    """
    run, processes = session.run, session.processes
    if session.job.quantize.sensitivity == "off":
        return []
    if resume and (newest := checkpoint.read_latest(run.checkpoints)[0]) is not None:
        return newest.state.get("moved", [])
    lines: list[str] = []
    if processes.is_main and session.plan.layers.quantized:
        run.log_event("stage", stage="sensitivity")
        lines = _format_lines(_choose_storages(session))
    return processes.gather(lines)[0]


def make_questions(session: Session, num_pictures: int = NUM_PICTURES) -> list[Question]:
    """Make questions from the first images of the training, at each noise level.

    The images are loaded one by one, so that the batch size changes nothing.
    """
    job, family = session.job, session.family
    objective = family.make_objective(job.objective)
    loader = Loader(session.plan.images.buckets, session.plan.cache, family, job.dataset, seed=job.seed, batch_size=1)
    questions = []
    for index in range(min(num_pictures, math.ceil(loader.batches_per_epoch))):
        batch = loader.take_batch(0, index)
        assert batch is not None  # one process, which has every sample
        for level in LEVELS:
            t_B, label = objective.convert_level(level)
            noisy = objective.add_noise(batch.latents_BCHW, batch.noise_BCHW, t_B)
            questions.append(Question(label, noisy, t_B, batch.cond, job.objective.guidance))
    return questions


# -- inside ------------------------------------------------------------------------------------------------------------


def _choose_storages(session: Session) -> dict[str, str]:
    """Choose a better storage for each layer above the bound; layers set by quantize.override stay.

    The errors are measured again after each round of moves, because the inputs of a layer change a little with the
    layers before it. The bound then holds for the model as it will be trained. Each round moves at least one layer, and
    a layer can move twice, so the rounds end.

    Returns:
        Layer -> storage, of the moved layers.
    """
    job, family = session.job, session.family
    section, questions = job.quantize, make_questions(session)
    storages: dict[str, str] = {}
    added: dict[str, int] = {}
    first_errors: list[layerwise.LayerError] = []
    while True:
        errors = _measure_held_errors(
            family, add_moved_layers(section, _format_lines(storages)), session.memory.share_in_ram, questions
        )
        first_errors = first_errors or errors
        fixed, movable = _find_above_bound(errors, section)
        if not movable:
            break
        if stuck := [layer.name for layer in movable if storages.get(layer.name) == layer.better]:
            raise RuntimeError(f"{stuck[0]} was moved to {storages[stuck[0]]} and is not held so")
        storages |= {layer.name: layer.better for layer in movable}
        added |= {layer.name: layer.better_bytes for layer in movable}
    storages = {layer.name: storages[layer.name] for layer in first_errors if layer.name in storages}  # the worst first
    session.run.log_event(
        "sensitivity",
        bound=section.sensitivity_bound,
        layers=len(first_errors),
        worst_before=first_errors[0].damage,
        worst=max((layer.damage for layer in errors), default=0.0),  # a layer in bf16 is not among them: its error is 0
        moved=_format_lines(storages),
        added_bytes=sum(added[layer.name] - layer.num_bytes for layer in first_errors if layer.name in storages),
    )
    _warn_of_moves(session.run, section, fixed, len(storages), len(first_errors))
    return storages


def _find_above_bound(
    errors: Sequence[layerwise.LayerError], section: settings.Quantize
) -> tuple[list[layerwise.LayerError], list[layerwise.LayerError]]:
    """Find the layers above the bound. Returns those whose storage the user set, and those that may be moved."""
    above = [layer for layer in errors if layer.better]
    fixed = [layer for layer in above if any(precision.name_matches(layer.name, entry) for entry in section.override)]
    return fixed, [layer for layer in above if layer not in fixed]


def _warn_of_moves(
    run: Run, section: settings.Quantize, fixed: Sequence[layerwise.LayerError], num_moved: int, num_layers: int
) -> None:
    """Warn of layers that stay above the bound, and of a bound that moves most layers.

    Args:
        run: takes the warnings.
        section: the job's `[quantize]` table.
        fixed: layers above the bound whose storage the user set.
        num_moved, num_layers: how many layers were moved, and how many there are.
    """
    for layer in fixed:
        run.log_event(
            "warning",
            text=Message(
                "{layer} stays {storage} as quantize.override requires, although its error of {found} is above "
                "quantize.sensitivity_bound = {bound}",
                layer=layer.name,
                storage=layer.storage,
                found=f"{layer.damage:.3g}",
                bound=f"{section.sensitivity_bound:g}",
            ),
        )
    if num_moved > num_layers / 2:
        run.log_event(
            "warning",
            text=Message(
                "quantize.sensitivity moved {moved} of {total} layers: quantize.sensitivity_bound = {bound} is "
                "below the error of {storage} itself; raise it, or use quantize.storage = 'int8'",
                moved=num_moved,
                total=num_layers,
                bound=f"{section.sensitivity_bound:g}",
                storage=section.storage,
            ),
        )


def _format_lines(storages: dict[str, str]) -> list[str]:
    return [f"^{name} = {storage}" for name, storage in storages.items()]


def _measure_held_errors(
    family: ModelFamily, section: settings.Quantize, offload: float, questions: Sequence[Question]
) -> list[layerwise.LayerError]:
    """Load the base model as training does, measure its layers, and free it."""
    denoiser, *_ = load_base(family, section, offload)
    errors = _measure_layer_errors(family, denoiser.eval(), section, questions)
    del denoiser
    _free_memory(family.device)
    return errors


def _measure_layer_errors(
    family: ModelFamily, denoiser: nn.Module, section: settings.Quantize, questions: Sequence[Question]
) -> list[layerwise.LayerError]:
    inputs = layerwise.capture_inputs(denoiser, [partial(question.ask, family, denoiser) for question in questions])
    tensors = family.read_denoiser_tensors()
    return layerwise.measure_layer_errors(denoiser, tensors, inputs, family.dtype, section.sensitivity_bound)


def _measure(session: Session, moved: list[str], num_pictures: int, whole: bool) -> Report:
    job, family, run = session.job, session.family, session.run
    questions = make_questions(session, num_pictures)
    expected: list[Tensor] = []
    if whole:
        run.log_event("stage", stage=Message("the unquantized base"))
        unquantized, *_ = load_base(family, settings.Quantize(storage="none"))
        expected = [question.ask(family, unquantized.eval()) for question in questions]
        del unquantized
        _free_memory(family.device)
    run.log_event("stage", stage=Message("the quantized base"))
    section = add_moved_layers(job.quantize, moved)
    denoiser, plan, _ = load_base(family, section, job.memory.share_in_ram)
    errors = _measure_layer_errors(family, denoiser.eval(), section, questions)
    prediction, multiplied = {}, {}
    if whole:
        with precision.decoded_compute(denoiser):
            prediction = _compute_errors_by_level(
                questions, expected, [question.ask(family, denoiser) for question in questions]
            )
        if any(layer.compute != "upcast" for layer in plan.quantized):
            multiplied = _compute_errors_by_level(
                questions, expected, [question.ask(family, denoiser) for question in questions]
            )
    return Report(
        base=family.title,
        storage=plan.format_summary(),
        bound=section.sensitivity_bound,
        override=section.override,
        moved=moved,
        pictures=len(questions) // len(LEVELS),
        layers=errors,
        prediction=prediction,
        multiplied=multiplied,
    )


def _compute_errors_by_level(
    questions: Sequence[Question], expected: Sequence[Tensor], measured: Sequence[Tensor]
) -> dict[str, float]:
    """Compute the relative error over all images together. Returns noise level -> error."""
    question_labels = [question.label for question in questions]

    def select(label: str, answers: Sequence[Tensor]) -> Tensor:
        pairs = zip(answers, question_labels, strict=True)
        return torch.cat([answer.flatten() for answer, question_label in pairs if question_label == label])

    labels = dict.fromkeys(question_labels)
    return {
        label: layerwise.compute_relative_error(select(label, measured), select(label, expected)) for label in labels
    }


def _free_memory(device: torch.device) -> None:
    """Free the memory of a denoiser without references; its modules refer to each other, so only gc frees them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
