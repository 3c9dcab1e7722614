"""Estimate memory, steps, cache and file sizes of a job from its Plan, before anything is encoded.

Memory is counted, not guessed. The model is built on the meta device as training builds it (storage, adapters, gradient
checkpointing) and makes one step at the heaviest bucket with the longest prompt. `dry_run` adds up all bytes that are
alive at one time. Three things are not included: the CUDA context and the reserve of torch's allocator (0.5 to 1.5 GiB
on common systems), and the workspaces of libraries. On a CPU a run reports the peak of the whole process, so Python and
its libraries are included there (`PROCESS_BYTES`).
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import adapters, precision
from ..common.numbers import digits
from ..data.buckets import Bucket, named
from ..data.cache import Cache
from ..data.caption_style import warn_of_sentences
from ..data.images import captions_of_files
from ..errors import Joined, Message
from ..families.base import ModelFamily
from ..precision import stream
from ..precision.dtypes import DTYPES
from ..run import disk_space
from ..settings import Job
from ..training import memory, optim
from ..training.text_encoders import Adapted, checkpoint_, inject_
from . import disk_budget, dry_run
from .disk_budget import count_pixels
from .dry_run import META
from .plan import Plan

GIB = 2**30
PROCESS_BYTES = 680 * 2**20
"""Resident memory of Python with torch, diffusers, transformers and bitsandbytes in a training process on a CPU.

It depends on the machine: the peak of a training on the demo base of sd15, minus the 13 MiB that the estimate gives
model and step, was 595 MiB on 2026-11-23 and 755 MiB on 2026-11-24 with the same versions (constraints.txt, Linux
x86-64). Of the latter, 100 MiB are Triton's, which bitsandbytes imports where it is installed. The constant lies in the
middle, so that both are within 20 % of it."""


@dataclass
class Estimate:
    """Memory, steps and sizes of a job. Memory is in bytes on the device of one process; None if it is unknown."""

    pictures: int
    """number of training images"""
    held_out: int
    """number of images that validation keeps out of training"""
    samples_per_epoch: int
    steps_per_epoch: float
    epochs: float
    heaviest_bucket: Bucket
    """(width, height) in pixels, (width, height, frames) of clips"""
    base_bytes: int
    """the base model on the device, with the buffers for its offloaded part"""
    waiting_bytes: int
    """the part of it that is offloaded to RAM (memory.offload)"""
    adapter_bytes: int
    optimizer_bytes: int
    """moments, masters and float32 gradients"""
    step_bytes: int | None
    """peak of a forward and backward pass, beside the weights and the optimizer"""
    text_bytes: int
    """the largest text encoder; they are loaded one at a time, before the denoiser"""
    vae_bytes: int
    """the VAE, which is loaded before the text encoders"""
    vae_encode_bytes: int | None
    """peak of encoding one image, beside the VAE"""
    vae_decode_bytes: int | None
    """the VAE and the peak of decoding one preview, beside the memory of training; 0 without previews"""
    cache_bytes: int
    """bytes that encoding will add to the cache"""
    file_bytes: dict[str, int]
    """size of each exported file, by its layout"""
    checkpoint_bytes: int
    """size of one checkpoint"""
    writes: list[disk_space.Need]
    """bytes that the job will still write into each folder"""
    device: str
    """"cuda", or "cpu", on which a run measures the whole process"""
    process_bytes: int
    """Python and its libraries, which share the memory of a CPU; 0 on a GPU"""
    notes: list[str] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Bytes on the device for the whole training: base, adapters and optimizer."""
        return self.base_bytes + self.adapter_bytes + self.optimizer_bytes

    @property
    def peaks(self) -> dict[str, int | None]:
        """The peak of each stage on the device, in bytes; on a CPU it includes the process itself."""
        pictures = None if self.vae_encode_bytes is None else self.vae_bytes + self.vae_encode_bytes
        encode = None if pictures is None else max(pictures, self.text_bytes)
        train = None if self.step_bytes is None else self.held_bytes + self.step_bytes
        preview = None if self.vae_decode_bytes is None else self.held_bytes + self.vae_decode_bytes
        stages = {"encode": encode, "train": train, "preview": preview if self.vae_decode_bytes else 0}
        return {name: peak + self.process_bytes if peak else peak for name, peak in stages.items()}

    @property
    def peak_bytes(self) -> int | None:
        """The highest peak of all stages in bytes; None if that of training is unknown."""
        peaks = [peak for peak in self.peaks.values() if peak is not None]
        return None if self.peaks["train"] is None else max(peaks)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as plain JSON types."""
        totals = {"held_bytes": self.held_bytes, "peaks": self.peaks, "peak_bytes": self.peak_bytes}
        return asdict(self) | totals | {"writes": [need.to_json() for need in self.writes]}

    def lines(self) -> list[str]:
        """Return the estimate for the terminal."""

        def gib(num: int | None) -> str:
            return Message("not known") if num is None else f"{num / GIB:.2f} GiB"

        pictures = Message("{count} pictures", count=self.pictures)
        if self.held_out:
            pictures = Message("{line} and {count} held out", line=pictures, count=self.held_out)
        lines: list[str] = [
            Message(
                "steps      {pictures}, {samples} samples = {steps} steps an epoch; {epochs} epochs in all",
                pictures=pictures,
                samples=self.samples_per_epoch,
                steps=digits(self.steps_per_epoch),
                epochs=digits(self.epochs),
            ),
            Message(
                "training   {size} at {bucket}: base {base}, adapter {adapter}, optimizer {optimizer}, a step {step}",
                size=gib(self.peaks["train"]),
                bucket=named(self.heaviest_bucket),
                base=gib(self.base_bytes),
                adapter=gib(self.adapter_bytes),
                optimizer=gib(self.optimizer_bytes),
                step=gib(self.step_bytes),
            ),
        ]
        if self.waiting_bytes:
            lines.append(Message("           {size} of the base wait in main memory", size=gib(self.waiting_bytes)))
        lines.append(
            Message(
                "encoding   {size} before that: the VAE {vae} and {encode} for a picture, then the text encoders one "
                "at a time, {text} at most",
                size=gib(self.peaks["encode"]),
                vae=gib(self.vae_bytes),
                encode=gib(self.vae_encode_bytes),
                text=gib(self.text_bytes),
            )
        )
        if self.vae_decode_bytes != 0:
            size, decode = gib(self.peaks["preview"]), gib(self.vae_decode_bytes)
            lines.append(Message("previews   {size}: decoding takes {decode}", size=size, decode=decode))
        beside = Message("beside these, the CUDA context and torch's reserve take 0.5 to 1.5 GiB")
        if self.process_bytes:
            beside = Message("of each of these, {size} are Python and its libraries", size=gib(self.process_bytes))
        lines.append(Message("           {line}", line=beside))
        lines.append(Message("cache      {size} on disk still to be encoded", size=gib(self.cache_bytes)))
        sizes = ", ".join(f"{layout} {size / 2**20:.1f} MiB" for layout, size in self.file_bytes.items())
        checkpoint = disk_space.amount(self.checkpoint_bytes)
        lines.append(Message("file       {sizes}; a checkpoint {checkpoint}", sizes=sizes, checkpoint=checkpoint))
        needs = [Message("{what} {size}", what=need.what, size=disk_space.amount(need.likely)) for need in self.writes]
        lines.append(Message("disk       {lines}", lines=Joined(", ", needs)))
        problems, warnings = disk_space.shortages(self.writes)
        return [*lines, *(Message("note: {line}", line=line) for line in [*self.notes, *warnings, *problems])]


def estimate(plan: Plan, device: str = "cpu") -> Estimate:
    """Estimate memory, steps and sizes of a job that runs as one process.

    Args:
        device: "cuda" or "cpu", on which the job will run. The family's own device may differ: nothing is computed.
    """
    job, family, images = plan.job, plan.family, plan.images
    buckets = images.buckets
    in_bucket = [sum(placed.example.repeats for placed in members) for members in buckets.values()]
    steps = sum(math.ceil(num / job.train.batch_size) for num in in_bucket) / job.train.accumulate
    heaviest, controls = _find_heaviest_bucket(plan)
    notes: list[str] = []

    denoiser, waiting, buffers = _build_denoiser(job, family)
    denoiser_config: Any = denoiser.config  # of diffusers, a dict
    cond_shapes = family.longest_cond(dict(denoiser_config))
    vae_encode, latents = _measure_vae(family, heaviest, "encode", notes)
    previews = job.preview.width or heaviest[0], job.preview.height or heaviest[1], job.preview.frames
    vae_decode = _measure_vae(family, previews, "decode", notes)[0] if job.preview.prompts else 0
    encoders_trained = _build_text_encoders(job, family)
    adapted = Adapted(denoiser, encoders_trained)
    named = adapters.parameters(adapted)
    num_trained = sum(parameter.numel() for _, parameter in named)
    step = None
    if latents is not None:
        per_side = heaviest[0] // latents[-1]
        sizes = [(latents[0], high // per_side, wide // per_side) for wide, high in controls]
        cond_shapes = cond_shapes | {f"control_{i}": size for i, size in enumerate(sizes)}
        num = _count_in_batch(job, buckets[heaviest])
        try:
            step = _measure_step(job, family, denoiser, latents, cond_shapes, num)
        except dry_run.Undecided as error:
            notes.append(
                Message(
                    "what a step takes is not known before it is tried: {error}; training tries it before step 1",
                    error=error,
                )
            )
        else:  # activations of the text encoders stay until the denoiser's backward pass has ended
            step += sum(_measure_text_step(encoder, num * family.num_chunks) for encoder in encoders_trained.values())
    adapter_bytes = sum(parameter.nbytes for _, parameter in named)
    everything = sum(_count_bytes(tensor) for tensor in (*adapted.parameters(), *adapted.buffers()))
    writes = plan.writes()
    estimated = Estimate(
        pictures=len(images.examples),
        held_out=len(images.held_out),
        samples_per_epoch=sum(in_bucket),
        steps_per_epoch=steps,
        epochs=job.train.steps / steps,
        heaviest_bucket=heaviest,
        base_bytes=everything - adapter_bytes + buffers,
        waiting_bytes=waiting,
        adapter_bytes=adapter_bytes,
        optimizer_bytes=4 * num_trained + optim.state_bytes([p for _, p in named], job.optimizer),
        step_bytes=step,
        text_bytes=max(family.text_bytes().values()),
        vae_bytes=family.vae_bytes(),
        vae_encode_bytes=vae_encode,
        vae_decode_bytes=vae_decode,
        cache_bytes=writes[-1].likely,
        file_bytes=disk_budget.count_file_bytes(job, named),
        checkpoint_bytes=disk_budget.count_checkpoint_bytes(job, named),
        writes=writes,
        device=device,
        process_bytes=PROCESS_BYTES if device == "cpu" else 0,
        notes=[
            *notes,
            *plan.warnings,
            *warn_of_sentences(captions_of_files([*images.examples, *images.held_out]), job.dataset),
        ],
    )
    if _is_text_largest(estimated, job):
        estimated.notes.append(
            Message(
                "encoding the captions takes more memory than training; model.text_storage = 'fp8' halves the "
                "text encoders"
            )
        )
    return estimated


def _is_text_largest(estimated: Estimate, job: Job) -> bool:
    """Return True if unquantized text encoders take more memory than the training, and more than a GiB."""
    text, step = estimated.text_bytes, estimated.step_bytes
    train = step and estimated.held_bytes + step
    return bool(train and text > train and job.model.text_storage == "none" and text > GIB)


def _find_heaviest_bucket(plan: Plan) -> tuple[Bucket, list[tuple[int, int]]]:
    """Return the bucket whose batch has the most pixels, and the (width, height) of the control images in it."""
    buckets = plan.images.buckets
    controls = {bucket: _find_largest_controls(plan.cache, members) for bucket, members in buckets.items()}

    def weigh(bucket: Bucket) -> int:
        pixels = count_pixels(plan.family, bucket) + sum(map(math.prod, controls[bucket]))
        return pixels * _count_in_batch(plan.job, buckets[bucket])

    heaviest = max(buckets, key=lambda bucket: (weigh(bucket), bucket))
    return heaviest, controls[heaviest]


def _find_largest_controls(store: Cache, members: list[Any]) -> list[tuple[int, int]]:
    """Return the (width, height) of the control images of the example with the most control pixels."""
    sizes = [[control.size for control in store.control_crops(placed)] for placed in members]
    return max(sizes, key=lambda candidate: sum(map(math.prod, candidate)))


def _count_in_batch(job: Job, members: list[Any]) -> int:
    return min(job.train.batch_size, sum(placed.example.repeats for placed in members))


def _build_denoiser(job: Job, family: ModelFamily) -> tuple[torch.nn.Module, int, int]:
    """Build the denoiser as training does, on the meta device.

    Returns:
        The denoiser, its bytes that are offloaded to RAM, and the bytes of the buffers on the device for them.
    """
    denoiser = family.empty_denoiser()
    keep, modulation = family.keep_precise, family.modulation
    precision.quantize_(denoiser, job.quantize, keep, family.dtype, modulation, family.file_scale())
    waiting = precision.offload_(denoiser, job.memory.offload)
    sizes = [layer.qweight.nbytes for layer in precision.frozen_layers(denoiser).values() if layer.waits]
    names = family.adapter_names(denoiser, job.adapter.targets)
    adapters.inject(denoiser, job.adapter.model_copy(update={"targets": []}), names, seed=job.seed)
    memory.apply_(denoiser, job.memory.model_copy(update={"compile": "off"}))
    return denoiser.train(), waiting, stream.BUFFERS * max(sizes, default=0)


def _build_text_encoders(job: Job, family: ModelFamily) -> dict[str, torch.nn.Module]:
    """Build the trained text encoders with their adapters as `text_encoders.TextEncoders` does, on the meta device."""
    if not job.adapter.text_encoder:
        return {}
    encoders = family.empty_trained_text()
    inject_(encoders, family, job.adapter, job.seed)
    for encoder in encoders.values():
        if job.memory.gradient_checkpointing:
            checkpoint_(encoder)
        encoder.train()
    return encoders


def _measure_text_step(encoder: torch.nn.Module, num: int) -> int:
    """Measure the peak bytes of a forward and backward pass of a text encoder over `num` chunks of captions."""
    encoder_config: Any = encoder.config  # of transformers
    tokens = torch.zeros(num, encoder_config.max_position_embeddings, dtype=torch.long, device=META)
    with dry_run.on_meta(), dry_run.Tally() as tally:
        encoder(tokens, output_hidden_states=True)[0].sum().backward()
    return tally.most


def _measure_vae(
    family: ModelFamily, bucket: Bucket, operation: str, notes: list[str]
) -> tuple[int | None, tuple[int, ...] | None]:
    """Measure the peak of encoding or decoding one image or clip with the VAE.

    Args:
        family: of the job; its VAE is replaced by one on the meta device meanwhile.
        bucket: (width, height) or (width, height, frames) of the image or clip.
        operation: "encode" or "decode".
        notes: gets a line if the memory cannot be estimated.

    Returns:
        Bytes, and the shape (C, H, W) or (C, F, H, W) of the latents; both None if they cannot be estimated.
    """
    family.vae = family.empty_vae()
    try:
        with dry_run.on_meta():
            width, height, *frames = bucket
            pixels = torch.empty(1, 3, *(num for num in frames if num > 1), height, width, device=META)
            with dry_run.Tally() as tally:
                latents = family.encode_images(pixels)
            if operation == "decode":
                with dry_run.Tally() as tally:
                    family.decode_latents(latents)
    except dry_run.Undecided as error:
        notes.append(Message("the VAE's memory is not known: {error}", error=error))
        return None, None
    finally:
        family.vae = None
    return tally.most, tuple(latents.shape[1:])


def _measure_step(
    job: Job,
    family: ModelFamily,
    denoiser: torch.nn.Module,
    latents: tuple[int, ...],
    cond_shapes: dict[str, tuple[int, ...]],
    num: int,
) -> int:
    """Measure the peak bytes of a forward and backward pass of the denoiser over `num` images.

    Args:
        job: with its sections model and objective.
        family: makes the conditioning and predicts.
        denoiser: on the meta device, with its adapters.
        latents: (C, H, W) or (C, F, H, W) of one image or clip.
        cond_shapes: name -> shape of the conditioning of one image.
        num: batch size.

    Raises:
        Undecided: activations decide what is computed.
    """
    dtype = DTYPES[job.model.dtype]
    # Facts about an image are small tensors of numbers, and stay real.
    facts = family.image_conditioning((64, 64), (0, 0), (64, 64))
    sample = {name: torch.zeros(shape, dtype=dtype) for name, shape in cond_shapes.items()} | facts
    cond = {
        name: tensor.to(META) if tensor.is_floating_point() and name not in facts else tensor
        for name, tensor in family.collate([sample] * num).items()
    }
    objective = family.make_objective(job.objective)
    t_B = objective.sample_t([torch.Generator().manual_seed(0) for _ in range(num)], family.seq_len(latents[1:]))
    latents_BCHW = torch.empty(num, *latents, device=META)
    with dry_run.on_meta(), dry_run.Tally() as tally:
        noisy_BCHW = objective.add_noise(latents_BCHW, latents_BCHW, t_B).to(dtype)
        answer_BCHW = family.predict(denoiser, noisy_BCHW, t_B, cond, job.objective.guidance)
        target_BCHW = objective.target(latents_BCHW, latents_BCHW, t_B)
        objective.loss(answer_BCHW, target_BCHW, t_B).sum().backward()
    return tally.most


def _count_bytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor. A tensor made of others, like torchao's, reports the dtype that it represents."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_count_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()
