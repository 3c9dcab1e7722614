"""The second stage: the denoiser in its storage, adapters beside it, and the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .. import adapters, precision, settings
from ..distributed import exchange
from ..distributed.exchange import Exchange
from ..families.base import Cond, ModelFamily
from ..lora_files.layouts import text_encoder_of
from ..objectives import Objective
from ..training import memory, optim
from ..training.text_encoders import Adapted, TextEncoders
from .cache import Data
from .session import Session


@dataclass
class Loaded:
    """What the load stage leaves to the others; `finish` empties it once the training model has said all it knows."""

    denoiser: nn.Module
    objective: Objective
    optimizer: optim.AdapterOptimizer
    layers: precision.Plan  # how each layer of the base is held and multiplied
    amax: precision.AmaxHistory  # what the delayed recipe remembers
    exchange: Exchange  # how the processes come to one gradient
    moved: list[str]  # lines that quantize.sensitivity = "auto" has added to quantize.override
    text: TextEncoders | None = None  # those that are trained beside it

    @property
    def adapted(self) -> nn.Module:
        """All that has adapters, for `adapters`."""
        return self.denoiser if self.text is None else Adapted(self.denoiser, self.text.encoders)


def base(
    family: ModelFamily, section: settings.Quantize, offload: float = 0.0
) -> tuple[nn.Module, precision.Plan, int]:
    """The denoiser in the storage that the section asks for, on the family's device, how each layer is held, and how
    many of its bytes wait in main memory."""
    denoiser = family.empty_denoiser()
    keep, modulation = family.keep_precise, family.modulation
    plan = precision.quantize_(denoiser, section, keep, family.dtype, modulation, family.file_scale())
    waiting = precision.offload_(denoiser, offload)
    precision.fill_(denoiser, family.denoiser_tensors(), dtype=family.dtype, device=family.device)
    precision.set_compute_(denoiser, plan, section)  # again: what it remembers needs the weights to be there
    return denoiser, plan, waiting


def with_moved(section: settings.Quantize, moved: Sequence[str]) -> settings.Quantize:
    """The section with the lines of `measure.moved_layers`, which come after the user's own."""
    added = {name: storage for name, storage in settings.table_of_lines(moved).items() if name not in section.override}
    return section.model_copy(update={"override": section.override | added})


def load(session: Session, moved: Sequence[str] = ()) -> Loaded:
    """Load the denoiser into its storage, with the adapters beside it and the optimizer that steps them.

    Args:
        moved: from `measure.moved_layers`.
    """
    job, family, run = session.job, session.family, session.run
    run.log_event("stage", stage="load")
    denoiser, layers, waiting = base(family, with_moved(job.quantize, moved), job.memory.offload)
    names = family.adapter_names(denoiser, job.adapter.targets)
    injected = adapters.inject(denoiser, job.adapter.model_copy(update={"targets": []}), names, seed=job.seed)
    applied = memory.apply_(denoiser, job.memory)
    denoiser.train()
    encoders = TextEncoders(family, job.adapter, job.seed) if job.adapter.text_encoder else None
    if encoders is not None:
        if job.memory.gradient_checkpointing:
            encoders.checkpoint_()
        encoders.train()

    objective = family.make_objective(job.objective)
    named = adapters.parameters(denoiser if encoders is None else Adapted(denoiser, encoders.encoders))
    optimizer = optim.build(
        named,
        job.optimizer,
        base_storage=job.quantize.storage,
        seed=job.seed,
        of_text=[name for name, _ in named if text_encoder_of(name, family)],
    )
    reports = [injected, *(encoders.injected if encoders else [])]
    for report in reports:
        for line in report.warnings:
            session.warn(line)
    run.log_event(
        "model",
        base=family.title,
        prediction=family.predicts(),
        base_sha256=family.base_identity(),
        storage=layers.summary(),
        adapters=sum(report.num_modules for report in reports),
        trainable=sum(report.num_parameters for report in reports),
        memory=[*applied.lines(), *_waiting_lines(waiting), *(encoders.lines() if encoders else [])],
        lr=optim.lr(job.optimizer),
        lr_factor=optimizer.lr_factor,
        lr_effective=optimizer.base_lr,
        **({"lr_text_encoder": optimizer.base_lr * optimizer.text_ratio} if encoders else {}),
    )
    exchanged = exchange.build(job.train.gradient_exchange, named, session.processes)
    amax = precision.amax_history(denoiser)
    return Loaded(denoiser, objective, optimizer, layers, amax, exchanged, list(moved), encoders)


def _waiting_lines(waiting: int) -> list[str]:
    return [f"{waiting / 2**30:.2f} GiB of the frozen weights wait in main memory"] if waiting else []


def preview_conditioning(data: Data, loaded: Loaded) -> tuple[list[Cond], list[Cond] | None]:
    """What previews are drawn from: prompts, and what to guide away from, as trained text encoders read them now."""
    if loaded.text is None:
        return data.preview_conds, data.preview_negatives
    prompts, guided_away = data.preview_texts
    negatives = data.preview_negatives
    if negatives is not None:
        negatives = loaded.text.answers([guided_away] * len(negatives), negatives)
    return loaded.text.answers(prompts, data.preview_conds), negatives
