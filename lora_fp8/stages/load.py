"""The load stage: load the denoiser into its storage, inject the adapters, and build the optimizer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from .. import adapters, precision, settings
from ..adapters import kinds
from ..adapters.attach import attach_beneath_
from ..distributed import exchange
from ..distributed.exchange import Exchange
from ..distributed.processes import Processes
from ..errors import Message
from ..families.base import ModelFamily
from ..lora_files.export import Adapter
from ..lora_files.layer_names import find_text_encoder
from ..objectives import Objective
from ..training import memory, optim
from ..training.cuda_graphs import Recorder
from ..training.flat import Gradients
from ..training.norm_cap import NormCap
from ..training.text_encoders import Adapted, TextEncoders
from .cache import Data, PreviewPrompts
from .progress import StageProgress
from .session import Session

Loadable = precision.Weight | precision.Rows


@dataclass
class Loaded:
    """The result of the load stage, for the later stages; `finish` frees the training model after its last use."""

    denoiser: nn.Module
    objective: Objective
    optimizer: optim.AdapterOptimizer
    layers: precision.Plan  # storage and matmul of each layer of the base model
    amax: precision.AmaxHistory  # the history of the delayed recipe
    exchange: Exchange  # averages the gradient over the processes
    moved: list[str]  # lines that quantize.sensitivity = "auto" added to quantize.override
    text: TextEncoders | None = None  # the trained text encoders
    recorder: Recorder | None = None  # of CUDA graphs
    cap: NormCap | None = None  # of adapter.scale_weight_norms

    @property
    def adapted(self) -> nn.Module:
        """Return all modules with adapters, for `adapters`."""
        return self.denoiser if self.text is None else Adapted(self.denoiser, self.text.encoders)

    def free_recordings(self) -> None:
        """Free the memory of recorded passes, before other work needs as much."""
        if self.recorder is not None:
            self.recorder.forget()


def load_base(
    family: ModelFamily,
    section: settings.Quantize,
    offload: float = 0.0,
    report: Callable[[int, int], None] = lambda done, total: None,
    sharing: Processes | None = None,
    is_compiled: bool = False,
) -> tuple[nn.Module, precision.Plan, int]:
    """Load the denoiser into the storage of the section, on the family's device.

    Args:
        family: whose denoiser.
        section: the job's `[quantize]` table.
        offload: share of the frozen weights to keep in RAM, from 0 to 1.
        report: called with the numbers of loaded and of all weights.
        sharing: the processes among which the frozen weights are split; None: each holds all of them.
        is_compiled: the denoiser's blocks will be compiled.

    Returns:
        The denoiser, storage and matmul of each layer, and the bytes that are offloaded to RAM.
    """
    denoiser = family.make_empty_denoiser()
    total = len(denoiser.state_dict())
    keep, modulation = family.keep_precise, family.modulation
    plan = precision.quantize_(denoiser, section, keep, family.dtype, modulation, family.read_file_scale())
    waiting = precision.offload_(denoiser, offload, precision.find_blocks(denoiser) if is_compiled else ())
    keeper = None
    tensors: Iterator[tuple[str, Loadable]] = family.read_denoiser_tensors()
    if sharing is not None:
        from ..distributed import sharding  # imports torch's FSDP, which takes time

        sharding.shard_(denoiser, sharing)
        keeper = sharding.PartKeeper(denoiser, sharing)
        tensors = family.read_denoiser_rows(keeper.choose_rows)
    tensors = _count_tensors(tensors, lambda done: report(done, total))
    precision.fill_(denoiser, tensors, dtype=family.dtype, device=family.device, filled=keeper)
    if keeper is not None:
        keeper.share_scales_()
    precision.set_compute_(denoiser, plan, section)  # again: its history needs the loaded weights
    return denoiser, plan, waiting


def _count_tensors(
    tensors: Iterator[tuple[str, Loadable]], report: Callable[[int], None]
) -> Iterator[tuple[str, Loadable]]:
    """Report the number of each tensor after it was consumed; only one is in memory, as in the stream."""
    done = 0
    for named in tensors:
        yield named
        del named  # otherwise it would stay in memory while the stream reads the next one
        done += 1
        report(done)


def add_moved_layers(section: settings.Quantize, moved: Sequence[str]) -> settings.Quantize:
    """Return the section with the lines of `measure.find_layers_to_move` added after the user's own."""
    added = {name: storage for name, storage in settings.parse_lines(moved).items() if name not in section.override}
    return section.model_copy(update={"override": section.override | added})


def load(session: Session, moved: Sequence[str] = ()) -> Loaded:
    """Load the denoiser into its storage, inject the adapters, and build the optimizer.

    Args:
        session: of the run.
        moved: from `measure.find_layers_to_move`.
    """
    job, family, run = session.job, session.family, session.run
    run.log_event("stage", stage="load")
    progress = StageProgress(run, "load")
    section = add_moved_layers(job.quantize, moved)
    sharing = session.processes if session.shares_base else None
    denoiser, layers, waiting = load_base(
        family, section, session.memory.share_in_ram, progress.update, sharing, session.memory.compile == "blocks"
    )
    names = family.choose_adapter_layers(denoiser, job.adapter.targets)
    beneath = session.plan.training_adapter
    with session.processes.passing():  # some adapters start from the base's weights
        injected = adapters.inject(denoiser, job.adapter.model_copy(update={"targets": []}), names, seed=job.seed)
        if beneath is not None:
            attach_beneath_(denoiser, beneath.state, beneath.scaling, family.dtype)
    applied = memory.apply_(denoiser, session.memory, is_random=job.adapter.is_random)
    denoiser.train()
    encoders = TextEncoders(family, job.adapter, job.seed) if job.adapter.text_encoder else None
    if encoders is not None:
        if session.memory.recomputes:
            encoders.checkpoint_()
        encoders.train()

    objective = family.make_objective(job.objective)
    adapted = denoiser if encoders is None else Adapted(denoiser, encoders.encoders)
    named = adapters.list_trained_parameters(adapted)
    optimizer = optim.build(
        named,
        job.optimizer,
        base_storage=job.quantize.storage,
        seed=job.seed,
        of_text=[name for name, _ in named if find_text_encoder(name, family)],
    )
    for start in adapters.find_frozen_starts(adapted).values():
        session.processes.broadcast_(start)  # the same decomposition everywhere, on GPUs of several kinds too
    cap = None
    if job.adapter.scale_weight_norms:
        cap = NormCap(
            job.adapter.scale_weight_norms, dict(adapters.list_tensors(adapted)), adapters.read_scalings(adapted)
        )
        optimizer.limit_with(cap)
    reports = [injected, *(encoders.injected if encoders else [])]
    recorder = Recorder() if job.memory.cuda_graphs else None
    for report in reports:
        for line in report.warnings:
            session.warn(line)
    run.log_event(
        "model",
        base=family.title,
        prediction=family.get_prediction(),
        base_sha256=family.compute_base_identity(),
        storage=layers.format_summary(),
        adapters=sum(report.num_modules for report in reports),
        trainable=sum(report.num_parameters for report in reports),
        memory=[
            *applied.format_lines(),
            *_describe_waiting(waiting),
            *_describe_sharing(denoiser, sharing),
            *_describe_beneath(beneath),
            *(encoders.format_lines() if encoders else []),
            *(recorder.format_lines() if recorder else []),
            *optimizer.format_lines(),
        ],
        lr=optim.resolve_lr(job.optimizer),
        lr_factor=optimizer.lr_factor,
        lr_effective=optimizer.base_lr,
        **({"lr_text_encoder": optimizer.base_lr * optimizer.text_ratio} if encoders else {}),
    )
    gradients = Gradients(named, optimizer.layout)
    exchanged = exchange.build(job.train.gradient_exchange, gradients, session.processes)
    amax = precision.make_amax_history(denoiser)
    return Loaded(denoiser, objective, optimizer, layers, amax, exchanged, list(moved), encoders, recorder, cap)


def _describe_beneath(beneath: Adapter | None) -> list[str]:
    if beneath is None:
        return []
    layers = len(kinds.group_by_layer(beneath.state))
    return [Message("a training adapter is applied to {count} layers, during training only", count=layers)]


def _describe_waiting(waiting: int) -> list[str]:
    return (
        [Message("{size} GiB of the frozen weights are offloaded to RAM", size=f"{waiting / 2**30:.2f}")]
        if waiting
        else []
    )


def _describe_sharing(denoiser: nn.Module, sharing: Processes | None) -> list[str]:
    if sharing is None:
        return []
    from ..distributed.sharding import count_local_bytes

    part, whole = (f"{size / 2**30:.2f}" for size in count_local_bytes(denoiser))
    return [
        Message(
            "{count} processes share the base model: each stores {part} of {whole} GiB",
            count=sharing.world,
            part=part,
            whole=whole,
        )
    ]


def encode_preview_prompts(data: Data, loaded: Loaded) -> PreviewPrompts:
    """Return the prompts of the previews; trained text encoders encode them anew."""
    return data.previews if loaded.text is None else data.previews.encode(loaded.text.encode_each)
