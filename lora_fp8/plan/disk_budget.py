"""Estimate how many bytes a job will write: checkpoints, LoRA files, previews, and the cache's missing entries.

The sizes are counted from shapes, on the meta device, before anything is encoded. `run.disk_space` compares them with
the free space.
"""

import math
from pathlib import Path

import torch
from torch import nn

from .. import adapters
from ..data.buckets import Bucket
from ..data.cache import Cache, Missing
from ..errors import Message
from ..families.base import ModelFamily
from ..run.disk_space import Need
from ..settings import Job, split_preview
from ..training import checkpoint, optim, text_encoders
from . import dry_run
from .resolve import get_resolution

FILE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
HEADER_BYTES = 120
"""Bytes of one tensor in the header of a safetensors file, without its name."""
STATE_BYTES = 2**12
"""Bytes of a checkpoint's settings, counters, and names and hashes of a small dataset's files."""
PNG_BYTES_PER_PIXEL = 2
"""Approximate bytes of a preview per pixel: those of a photo as PNG."""

Named = list[tuple[str, nn.Parameter]]
"""Tensors of an adapter by name, on the meta device; those that are not trained require no gradient."""


def count_pixels(family: ModelFamily, bucket: Bucket) -> int:
    """Return width x height, times the number of latent frames for a clip; memory and tokens grow with it."""
    width, height, *frames = bucket
    return width * height * math.prod(map(family.count_latent_frames, frames))


def list_trainable(job: Job, family: ModelFamily) -> Named:
    """Return the tensors of the job's adapters, in the order of `adapters.list_tensors`, on the meta device."""
    layer_names = family.choose_adapter_layers(family.outline, job.adapter.targets)
    section = job.adapter.model_copy(update={"targets": []})
    encoders = family.make_empty_trained_text() if section.text_encoder else {}
    return [
        *adapters.plan_tensors(family.outline, section, layer_names),
        *text_encoders.plan_tensors(encoders, family, section),
    ]


def count_checkpoint_bytes(job: Job, named: Named, world: int = 1) -> int:
    """Count the bytes of one checkpoint: adapters, masters, moments, residuals of the FP8 exchange, and all names.

    Args:
        world: number of processes that train.
    """
    size = sum(parameter.nbytes for _, parameter in named)
    if job.adapter.doubles_rank:  # both ranks, and the start
        size *= 3
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    size += optim.estimate_state_bytes(trained, job.optimizer)
    if job.optimizer.name == "adamw_schedulefree" or job.optimizer.ema_decay:
        # The weights in training, beside those to evaluate, unless masters have them.
        without = job.optimizer.rounding != "master" or job.adapter.dtype == "fp32"
        size += sum(parameter.nbytes for parameter in trained) if without else 0
    if world > 1 and job.train.gradient_exchange == "fp8":
        size += 4 * world * sum(parameter.numel() for parameter in trained)
    # Each name is in both files' headers, and in the state with dtype and count: at least three times. The state of
    # some optimizers has a list of their tensors, which is as long as a header, and a table of numbers.
    names = 3 + optim.count_list_entries(job.optimizer)
    return size + STATE_BYTES + sum(names * (len(name) + HEADER_BYTES) for name, _ in named)


def count_file_bytes(job: Job, named: Named) -> dict[str, int]:
    """Count the bytes of the tensors in each exported file. Returns layout -> bytes."""
    num = sum(parameter.numel() for _, parameter in named) * (2 if job.adapter.doubles_rank else 1)
    return {layout: num * FILE_BYTES[job.export.dtype] for layout in job.export.formats}


def estimate_run(job: Job, named: Named, folder: Path, world: int = 1) -> list[Need]:
    """Estimate the bytes that training adds to its run folder, at the moment when most checkpoints are there.

    Args:
        folder: the run folder; files of an earlier start count as present.
        world: number of processes that train.

    Returns:
        One Need each for checkpoints, LoRA files and previews.
    """
    newest, present = checkpoint.find_newest(folder / "checkpoints"), checkpoint.count_bundles(folder / "checkpoints")
    newest_step = checkpoint.parse_step(newest) if newest else 0
    steps = range(newest_step + 1, job.train.steps + 1)
    saves = sum(step % job.checkpoint.every == 0 or step == job.train.steps for step in steps)
    # A new checkpoint is complete before the oldest one is deleted.
    new_checkpoints = min(saves, max(1, job.checkpoint.keep + 1 - present))
    every = job.export.every
    exports = 1 + sum(step % every == 0 for step in steps[:-1]) if every else 1
    layouts_size = sum(count_file_bytes(job, named).values())
    file_size = layouts_size * exports
    if any((folder / "export").glob("*.safetensors")):  # each is replaced, one after the other
        file_size -= sum(path.stat().st_size for path in (folder / "export").glob("*.safetensors"))
    checkpoint_size = new_checkpoints * count_checkpoint_bytes(job, named, world)
    # The best LoRA is kept twice until a checkpoint is saved, and written at the end unless it is the last one.
    keeps_best = job.validation.keep_best and job.validation.pictures > 0 and saves > 0
    best_size = 2 * sum(parameter.nbytes for _, parameter in named) * keeps_best
    best_size *= 2 if job.adapter.doubles_rank else 1
    place = folder if folder.exists() else folder.parent  # a run folder may be a link to another disk
    return [
        Need(place, Message("checkpoints"), checkpoint_size, checkpoint_size + best_size),
        Need(place, Message("LoRA files"), max(0, file_size), max(0, file_size + layouts_size * keeps_best)),
        Need(place, Message("previews"), 0, _count_preview_bytes(job, steps)),
    ]


def _count_preview_bytes(job: Job, steps: range) -> int:
    """Estimate the bytes of the previews of these steps, and of the sheet with the first and the last."""
    section = job.preview
    side = get_resolution(job)
    pixels = sum((table.width or side) * (table.height or side) * table.frames for table in split_preview(section))
    times = 1 + (section.at_start and steps.start == 1) + 2  # the last, the first, and the sheet's two rows
    times += sum(step % section.every == 0 for step in steps[:-1]) if section.every else 0
    return PNG_BYTES_PER_PIXEL * pixels * times


def find_latents_shape(family: ModelFamily, bucket: Bucket) -> tuple[int, ...] | None:
    """Return the shape of an image's latents (C, H, W) or a clip's (C, F, H, W); None if it cannot be computed."""
    family.vae = family.make_empty_vae()
    try:
        with dry_run.on_meta(), dry_run.Tally():
            width, height, *frames = bucket
            pixels = torch.empty(1, 3, *(num for num in frames if num > 1), height, width, device=dry_run.META)
            return tuple(family.encode_images(pixels).shape[1:])
    except dry_run.Undecided:
        return None
    finally:
        family.vae = None


def estimate_cache(store: Cache, missing: Missing, bucket: Bucket) -> Need:
    """Estimate the bytes that encoding adds to the cache.

    The result is a range: conditioning that is as long as its prompt may be short or long.

    Args:
        store: the cache.
        missing: the entries that are to be encoded.
        bucket: any bucket; latents of other buckets are scaled by their pixels.
    """
    family, itemsize = store.family, store.dtype.itemsize
    encodes_images = missing.images or missing.controls or missing.masks
    latents = find_latents_shape(family, bucket) if encodes_images else None
    per_pixel = 0.0 if latents is None else math.prod(latents) * itemsize / count_pixels(family, bucket)
    pixels = sum(count_pixels(family, placed.bucket) for placed, _ in missing.images)
    pixels += sum(math.prod(control.size) for control, _ in missing.controls)
    # A mask is one channel of one frame's latents.
    per_area = 0.0 if latents is None else math.prod(latents[-2:]) * itemsize / math.prod(bucket[:2])
    masks = sum(math.prod(placed.placement.bucket_wh) for placed, _ in missing.masks)
    pictures = round(pixels * per_pixel + masks * per_area)
    conds = family.estimate_longest_cond(dict(family.outline.config)) if missing.captions else {}
    sizes_by_name = {name: math.prod(shape) * itemsize for name, shape in conds.items()}
    shortest = sum(
        size for name, size in sizes_by_name.items() if not (family.prompts_vary and name == "prompt_embeds")
    )
    captions = len(missing.captions)
    sizes = [pictures + captions * caption_size for caption_size in (shortest, sum(sizes_by_name.values()))]
    return Need(store.root, Message("cache of images and captions"), *sizes)
