"""Estimate memory, steps, cache and file sizes of a job from its Plan, before anything is encoded.

Memory is counted, not guessed. The model is built on the meta device as training builds it (storage, adapters, gradient
checkpointing) and makes one step at the heaviest bucket with the longest prompt. `dry_run` adds up all bytes that are
alive at one time. Three things are not included: the CUDA context and the reserve of torch's allocator (0.5 to 1.5 GiB
on common systems), and the workspaces of libraries. On a CPU a run reports the peak of the whole process, so Python and
its libraries are included there (`PROCESS_BYTES`).
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..common.numbers import format_bytes, format_digits
from ..data.buckets import Bucket, format_bucket
from ..data.caption_style import warn_of_sentences
from ..data.images import list_file_captions
from ..data.repeats import average_epochs, share_out
from ..errors import Joined, Message, Plural
from ..run import disk_space
from ..settings import Job
from . import disk_budget, training_memory
from .memory_choice import choose_memory
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
    samples_per_epoch: float
    """number of images that an epoch trains on, repeats counted; on average over the epochs"""
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
        """Return the bytes on the device for the whole training: base, adapters and optimizer."""
        return self.base_bytes + self.adapter_bytes + self.optimizer_bytes

    @property
    def peaks(self) -> dict[str, int | None]:
        """Return the peak of each stage on the device, in bytes; on a CPU it includes the process itself.

        None if it is unknown. That of previews is 0 if there are none.
        """
        peaks: dict[str, int | None] = {"encode": None, "train": None, "preview": None}
        if self.vae_encode_bytes is not None:
            pictures = self.vae_bytes + self.vae_encode_bytes
            peaks["encode"] = self.process_bytes + max(pictures, self.text_bytes)
        if self.step_bytes is not None:
            peaks["train"] = self.process_bytes + self.held_bytes + self.step_bytes
        if self.vae_decode_bytes == 0:
            peaks["preview"] = 0
        elif self.vae_decode_bytes is not None:
            peaks["preview"] = self.process_bytes + self.held_bytes + self.vae_decode_bytes
        return peaks

    @property
    def peak_bytes(self) -> int | None:
        """Return the highest peak of all stages in bytes; None if that of training is unknown."""
        peaks = [peak for peak in self.peaks.values() if peak is not None]
        return None if self.peaks["train"] is None else max(peaks)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as plain JSON types."""
        totals = {"held_bytes": self.held_bytes, "peaks": self.peaks, "peak_bytes": self.peak_bytes}
        return asdict(self) | totals | {"writes": [need.to_json() for need in self.writes]}

    def format_lines(self) -> list[str]:
        """Return the estimate for the terminal."""

        def format_known(num: int | None) -> str:
            return Message("unknown") if num is None else format_bytes(num)

        pictures = Plural("{count} image", "{count} images")(count=self.pictures)
        if self.held_out:
            pictures = Message("{line} and {count} held out", line=pictures, count=self.held_out)
        lines: list[str] = [
            Message(
                "steps      {pictures}, {samples} samples = {steps} steps per epoch; {epochs} epochs in total",
                pictures=pictures,
                samples=format_digits(self.samples_per_epoch),
                steps=format_digits(self.steps_per_epoch),
                epochs=format_digits(self.epochs),
            ),
            Message(
                "training   {size} at {bucket}: base {base}, adapter {adapter}, optimizer {optimizer}, a step {step}",
                size=format_known(self.peaks["train"]),
                bucket=format_bucket(self.heaviest_bucket),
                base=format_known(self.base_bytes),
                adapter=format_known(self.adapter_bytes),
                optimizer=format_known(self.optimizer_bytes),
                step=format_known(self.step_bytes),
            ),
        ]
        if self.waiting_bytes:
            lines.append(
                Message("           {size} of the base are offloaded to RAM", size=format_known(self.waiting_bytes))
            )
        lines.append(
            Message(
                "encoding   {size} before training: the VAE {vae} and {encode} per image, then the text encoders "
                "one at a time, at most {text}",
                size=format_known(self.peaks["encode"]),
                vae=format_known(self.vae_bytes),
                encode=format_known(self.vae_encode_bytes),
                text=format_known(self.text_bytes),
            )
        )
        if self.vae_decode_bytes != 0:
            size, decode = format_known(self.peaks["preview"]), format_known(self.vae_decode_bytes)
            lines.append(Message("previews   {size}: decoding takes {decode}", size=size, decode=decode))
        beside = Message("in addition, the CUDA context and PyTorch's reserve take 0.5 to 1.5 GiB")
        if self.process_bytes:
            beside = Message(
                "each of these includes {size} for Python and its libraries", size=format_known(self.process_bytes)
            )
        lines.append(Message("           {line}", line=beside))
        lines.append(Message("cache      {size} still to be written to disk", size=format_known(self.cache_bytes)))
        sizes = ", ".join(f"{layout} {format_bytes(size)}" for layout, size in self.file_bytes.items())
        checkpoint = format_bytes(self.checkpoint_bytes)
        lines.append(Message("file       {sizes}; a checkpoint {checkpoint}", sizes=sizes, checkpoint=checkpoint))
        needs = [Message("{what} {size}", what=need.what, size=format_bytes(need.likely)) for need in self.writes]
        lines.append(Message("disk       {lines}", lines=Joined(", ", needs)))
        problems, warnings = disk_space.find_shortages(self.writes)
        return [*lines, *(Message("note: {line}", line=line) for line in [*self.notes, *warnings, *problems])]


def estimate(plan: Plan, device: str = "cpu", free: int | None = None, world: int = 1) -> Estimate:
    """Estimate memory, steps and sizes of a job.

    Args:
        plan: of the job.
        device: "cuda" or "cpu", on which the job will run. The family's own device may differ: nothing is computed.
        free: free bytes of that GPU, for settings that are left to "auto"; None if there is none here.
        world: number of processes that will train; memory is that of one of them.
    """
    choice = choose_memory(plan, free, world)
    preview = plan.job.preview.model_copy(update={"tiled": choice.tiled})
    job = plan.job.model_copy(update={"memory": choice.section, "preview": preview})
    plan = replace(plan, job=job)
    family, images = plan.family, plan.images
    buckets = images.buckets
    shares = share_out(images.examples, job.seed)
    groups = [[shares[placed.example.uid] for placed in members] for members in buckets.values()]
    samples, batches = average_epochs(groups, job.train.batch_size)
    steps = batches / job.train.accumulate
    heaviest = training_memory.find_heaviest_bucket(plan)[0]
    notes: list[str] = []

    vae_encode, latents = training_memory.measure_vae(family, heaviest, "encode", notes)
    vae_decode = training_memory.measure_preview(plan, notes, tiled=choice.tiled) if job.preview.prompts else 0
    training = choice.training or training_memory.measure_training(plan, latents, world)
    notes += filter(None, [training.note])
    base, waiting = training.base.count(job.memory.share_in_ram)
    writes = plan.estimate_writes(world)
    estimated = Estimate(
        pictures=len(images.examples),
        held_out=len(images.held_out),
        samples_per_epoch=samples,
        steps_per_epoch=steps,
        epochs=job.train.steps / steps,
        heaviest_bucket=heaviest,
        base_bytes=base,
        waiting_bytes=waiting,
        adapter_bytes=training.adapter_bytes,
        optimizer_bytes=training.optimizer_bytes,
        step_bytes=training.step_bytes,
        text_bytes=max(family.count_encoder_bytes().values()),
        vae_bytes=family.count_vae_bytes(),
        vae_encode_bytes=vae_encode,
        vae_decode_bytes=vae_decode,
        cache_bytes=writes[-1].likely,
        file_bytes=disk_budget.count_file_bytes(job, training.trainable),
        checkpoint_bytes=disk_budget.count_checkpoint_bytes(job, training.trainable),
        writes=writes,
        device=device,
        process_bytes=PROCESS_BYTES if device == "cpu" else 0,
        notes=[
            *_describe_sharing(job, world),
            *choice.format_lines(),
            *filter(None, [choice.format_warning()]),
            *notes,
            *plan.warnings,
            *warn_of_sentences(list_file_captions([*images.examples, *images.held_out]), job.dataset),
        ],
    )
    if _is_text_largest(estimated, job):
        estimated.notes.append(
            Message(
                "encoding the captions takes more memory than training; model.text_storage = 'fp8' halves the "
                "memory of the text encoders"
            )
        )
    return estimated


def _describe_sharing(job: Job, world: int) -> list[str]:
    """Say how the memory of the base is counted with memory.shard_base."""
    if not job.memory.shard_base:
        return []
    if world == 1:
        return [
            Message(
                "memory.shard_base: a single process has the whole base in its memory; --processes 2 estimates the "
                "memory of each of two processes"
            )
        ]
    return [
        Message(
            "memory.shard_base: the value for the base is the part in each of {count} processes, including the "
            "blocks that it gathers",
            count=world,
        )
    ]


def _is_text_largest(estimated: Estimate, job: Job) -> bool:
    """Return True if unquantized text encoders take more memory than the training, and more than a GiB."""
    text, step = estimated.text_bytes, estimated.step_bytes
    train = step and estimated.held_bytes + step
    return bool(train and text > train and job.model.text_storage == "none" and text > GIB)
