"""Count the memory of a training from its Plan, on the meta device: the model as training builds it, and one step.

What a step takes is measured with `dry_run`: all bytes that are alive at one time. The workspaces of libraries and the
reserve of torch's allocator are not included.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import adapters, precision
from ..adapters.attach import attach_beneath_
from ..data.buckets import Bucket
from ..data.cache import Cache
from ..errors import Message
from ..families.base import ModelFamily
from ..precision import blocks, stream
from ..precision.dtypes import DTYPES
from ..settings import Job, split_preview
from ..training import memory, optim
from ..training.shared_blocks import count_shared_bytes
from ..training.text_encoders import Adapted, checkpoint_, inject_
from . import dry_run
from .disk_budget import Named, count_pixels
from .dry_run import META
from .plan import Plan


@dataclass(frozen=True)
class BaseMemory:
    """What the frozen base takes, in bytes."""

    whole_bytes: int
    """all of it; where processes share it, what one of them holds, with the blocks that it gathers"""
    layer_bytes: dict[str, int]
    """the weight of each layer that can be offloaded, in the order of use"""
    blocks: tuple[str, ...] = ()
    """names of the blocks whose offloaded weights are fetched together, as they are compiled"""

    def count(self, share: float) -> tuple[int, int]:
        """Count the bytes with this share offloaded: on the device, with the buffers for it, and in RAM."""
        waiting = {
            name: self.layer_bytes[name] for name in stream.choose_offloaded(self.layer_bytes, share, self.blocks)
        }
        groups = stream.split_by_block(waiting, self.blocks)
        rooms = [blocks.count_place([*group.values()]) for name, group in groups.items() if name]
        # Uncompiled code, such as that of previews, fetches the layers of blocks one after the other.
        buffers = stream.BUFFERS * max(waiting.values(), default=0) + blocks.PLACES * max(rooms, default=0)
        return self.whole_bytes - sum(waiting.values()) + buffers, sum(waiting.values())


@dataclass(frozen=True)
class TrainingMemory:
    """What a training takes, in bytes on the device of one process."""

    base: BaseMemory
    adapter_bytes: int
    optimizer_bytes: int
    """moments, masters and float32 gradients"""
    step_bytes: int | None
    """peak of a forward and backward pass, beside the weights and the optimizer; None if it is unknown"""
    trainable: Named
    """tensors of the adapters by name, on the meta device; see `disk_budget.Named`"""
    note: str = ""
    """why the step is unknown"""

    def count_held(self, share: float) -> int:
        """Count the bytes on the device for the whole training: base, adapters and optimizer."""
        return self.base.count(share)[0] + self.adapter_bytes + self.optimizer_bytes


def measure_base(model: torch.nn.Module, more: int = 0, compiled: Iterable[str] = ()) -> BaseMemory:
    """Measure the frozen part of a model on the meta device.

    Args:
        model: a denoiser, perhaps with text encoders.
        more: bytes that its hooks hold.
        compiled: names of the blocks that are compiled.
    """
    layers = precision.find_frozen_layers(model)
    sizes = {name: layer.qweight.nbytes for name, layer in layers.items()}
    return BaseMemory(_count_frozen(model) + more, sizes, tuple(compiled))


def _count_frozen(model: torch.nn.Module) -> int:
    """Count the bytes of what is not trained."""
    return sum(count_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()) if not tensor.requires_grad)


def _measure_shared_base(denoiser: torch.nn.Module, more: int, world: int) -> BaseMemory:
    """Measure what each of `world` processes holds of a shared denoiser, with so many bytes that are not shared."""
    shared = count_shared_bytes(denoiser, world)
    return BaseMemory(shared.part + shared.gathered + more, {})


def measure_training(plan: Plan, latents: tuple[int, ...] | None, world: int = 1) -> TrainingMemory:
    """Build the models of a job as training does, and measure one step at its heaviest bucket.

    Args:
        plan: of the job.
        latents: shape of the latents of an image in the heaviest bucket, from `measure_vae`; None leaves the step out.
        world: number of processes that train.
    """
    job, family = plan.job, plan.family
    denoiser, encoders = build_denoiser(job, family), build_text_encoders(job, family)
    beneath = 0
    if plan.training_adapter is not None:
        state = {name: tensor.to(META) for name, tensor in plan.training_adapter.state.items()}
        attach_beneath_(denoiser, state, plan.training_adapter.scaling, family.dtype)
        beneath = sum(tensor.numel() for tensor in state.values()) * family.dtype.itemsize
    adapted = Adapted(denoiser, encoders)
    named = adapters.list_trained_parameters(adapted)
    step, note = None, ""
    if latents is not None:
        num = -(-count_in_batch(job, plan.images.buckets[find_heaviest_bucket(plan)[0]]) // world)
        try:
            step = measure_step(job, family, denoiser, latents, find_cond_shapes(plan, denoiser, latents), num)
        except dry_run.Undecided as error:
            note = Message(
                "the memory of a step is known only after a test step: {error}; training tests one before step 1",
                error=error,
            )
        else:  # activations of the text encoders stay until the denoiser's backward pass has ended
            step += sum(measure_text_step(encoder, num * family.num_chunks) for encoder in encoders.values())
    if job.memory.shard_base and world > 1:
        base = _measure_shared_base(denoiser, sum(map(_count_frozen, encoders.values())) + beneath, world)
    else:
        is_compiled = job.memory.compile == "blocks"
        base = measure_base(adapted, beneath, precision.find_blocks(denoiser) if is_compiled else ())
    return TrainingMemory(
        base=base,
        adapter_bytes=sum(parameter.nbytes for _, parameter in named),
        optimizer_bytes=4 * sum(parameter.numel() for _, parameter in named)
        + optim.estimate_state_bytes([parameter for _, parameter in named], job.optimizer),
        step_bytes=step,
        trainable=adapters.list_tensors(adapted),
        note=note,
    )


def find_cond_shapes(plan: Plan, denoiser: torch.nn.Module, latents: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the longest conditioning of an image in the heaviest bucket, whose latents these are."""
    heaviest, controls = find_heaviest_bucket(plan)
    per_side = heaviest[0] // latents[-1]
    sizes = [(latents[0], high // per_side, wide // per_side) for wide, high in controls]
    denoiser_config: Any = denoiser.config  # of diffusers, a dict
    shapes = plan.family.estimate_longest_cond(dict(denoiser_config))
    return shapes | {f"control_{i}": size for i, size in enumerate(sizes)}


def find_heaviest_bucket(plan: Plan) -> tuple[Bucket, list[tuple[int, int]]]:
    """Return the bucket whose batch has the most pixels, and the (width, height) of the control images in it."""
    buckets = plan.images.buckets
    controls = {bucket: _find_largest_controls(plan.cache, members) for bucket, members in buckets.items()}

    def weigh(bucket: Bucket) -> int:
        pixels = count_pixels(plan.family, bucket) + sum(map(math.prod, controls[bucket]))
        return pixels * count_in_batch(plan.job, buckets[bucket])

    heaviest = max(buckets, key=lambda bucket: (weigh(bucket), bucket))
    return heaviest, controls[heaviest]


def _find_largest_controls(store: Cache, members: list[Any]) -> list[tuple[int, int]]:
    """Return the (width, height) of the control images of the example with the most control pixels."""
    sizes = [[control.size for control in store.list_control_crops(placed)] for placed in members]
    return max(sizes, key=lambda candidate: sum(map(math.prod, candidate)))


def count_in_batch(job: Job, members: list[Any]) -> int:
    """Count the samples of the largest batch that a bucket with these members can have."""
    return min(job.train.batch_size, sum(math.ceil(placed.example.repeats) for placed in members))


def build_base(job: Job, family: ModelFamily) -> torch.nn.Module:
    """Build the denoiser without adapters in its storage, on the meta device, with nothing offloaded."""
    denoiser = family.make_empty_denoiser()
    keep, modulation = family.keep_precise, family.modulation
    precision.quantize_(denoiser, job.quantize, keep, family.dtype, modulation, family.read_file_scale())
    return denoiser


def build_denoiser(job: Job, family: ModelFamily) -> torch.nn.Module:
    """Build the denoiser as training does, on the meta device, with nothing offloaded."""
    denoiser = build_base(job, family)
    names = family.choose_adapter_layers(denoiser, job.adapter.targets)
    adapters.inject(denoiser, job.adapter.model_copy(update={"targets": []}), names, seed=job.seed)
    memory.apply_(denoiser, job.memory.model_copy(update={"compile": "off"}))
    return denoiser.train()


def build_text_encoders(job: Job, family: ModelFamily) -> dict[str, torch.nn.Module]:
    """Build the trained text encoders with their adapters as `text_encoders.TextEncoders` does, on the meta device."""
    if not job.adapter.text_encoder:
        return {}
    encoders = family.make_empty_trained_text()
    inject_(encoders, family, job.adapter, job.seed)
    for encoder in encoders.values():
        if job.memory.recomputes:
            checkpoint_(encoder)
        encoder.train()
    return encoders


def measure_preview(plan: Plan, notes: list[str], *, tiled: bool) -> int | None:
    """Measure the peak of decoding one preview of the job; None if it cannot be estimated."""
    section, (width, height, *_) = plan.job.preview, find_heaviest_bucket(plan)[0]
    # Without prompts too, as images may be asked for while it trains.
    sizes = [(table.width or width, table.height or height) for table in [section, *split_preview(section)]]
    bucket = *max(sizes, key=math.prod), section.frames
    return measure_vae(plan.family, bucket, "decode", notes, tiled=tiled)[0]


def measure_text_step(encoder: torch.nn.Module, num: int) -> int:
    """Measure the peak bytes of a forward and backward pass of a text encoder over `num` chunks of captions."""
    encoder_config: Any = encoder.config  # of transformers
    tokens = torch.zeros(num, encoder_config.max_position_embeddings, dtype=torch.long, device=META)
    with dry_run.on_meta(), dry_run.Tally() as tally:
        encoder(tokens, output_hidden_states=True)[0].sum().backward()
    return tally.most


def measure_vae(
    family: ModelFamily, bucket: Bucket, operation: str, notes: list[str], *, tiled: bool = False
) -> tuple[int | None, tuple[int, ...] | None]:
    """Measure the peak of encoding or decoding one image or clip with the VAE.

    Args:
        family: of the job; its VAE is replaced by one on the meta device meanwhile.
        bucket: (width, height) or (width, height, frames) of the image or clip.
        operation: "encode" or "decode".
        notes: gets a line if the memory cannot be estimated.
        tiled: decode in tiles.

    Returns:
        Bytes, and the shape (C, H, W) or (C, F, H, W) of the latents; both None if they cannot be estimated.
    """
    family.vae = family.make_empty_vae()
    try:
        with dry_run.on_meta():
            width, height, *frames = bucket
            pixels = torch.empty(1, 3, *(num for num in frames if num > 1), height, width, device=META)
            with dry_run.Tally() as tally:
                latents = family.encode_images(pixels)
            if operation == "decode":
                with dry_run.Tally() as tally:
                    family.decode_latents(latents, tiled=tiled)
    except dry_run.Undecided as error:
        notes.append(Message("the memory of the VAE could not be estimated: {error}", error=error))
        return None, None
    finally:
        family.vae = None
    return tally.most, tuple(latents.shape[1:])


def measure_step(
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
    facts = family.make_image_conditioning((64, 64), (0, 0), (64, 64))
    sample = {name: torch.zeros(shape, dtype=dtype) for name, shape in cond_shapes.items()} | facts
    cond = {
        name: tensor.to(META) if tensor.is_floating_point() and name not in facts else tensor
        for name, tensor in family.collate([sample] * num).items()
    }
    objective = family.make_objective(job.objective)
    t_B = objective.sample_t(
        [torch.Generator().manual_seed(0) for _ in range(num)], family.count_image_tokens(latents[1:])
    )
    latents_BCHW = torch.empty(num, *latents, device=META)
    with dry_run.on_meta(), dry_run.Tally() as tally:
        noisy_BCHW = objective.add_noise(latents_BCHW, latents_BCHW, t_B).to(dtype)
        answer_BCHW = family.predict(denoiser, noisy_BCHW, t_B, cond, job.objective.guidance)
        target_BCHW = objective.compute_target(latents_BCHW, latents_BCHW, t_B)
        objective.compute_loss(answer_BCHW, target_BCHW, t_B).sum().backward()
    return tally.most


def count_bytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor. A tensor made of others, like torchao's, reports the dtype that it represents."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(count_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()
