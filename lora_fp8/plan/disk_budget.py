"""What a job will write, in bytes: checkpoints, LoRA files, previews, and the cache's missing entries.

Counted from shapes alone, on the meta device, before anything is encoded; `run.disk_space` compares it with the room.
"""

import math
from pathlib import Path

import torch
from torch import nn

from .. import adapters
from ..data.buckets import Bucket
from ..data.cache import Cache, Missing
from ..families.base import ModelFamily
from ..run.disk_space import Need
from ..settings import Job
from ..training import checkpoint, optim
from ..training.text_encoders import Adapted, inject_
from . import dry_run

FILE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ENTRY = 120
"""Bytes that safetensors' header takes for one tensor, beside its name."""
STATE = 2**12
"""The rest of a bundle: settings, counters, and the names and hashes of a small dataset's files."""
PER_PIXEL = 2
"""Bytes of a preview for each of its pixels, about: a photo as PNG."""

Named = list[tuple[str, nn.Parameter]]


def volume(family: ModelFamily, bucket: Bucket) -> int:
    """Pixels of a bucket, those of a clip as often as its latents have frames: what memory and tokens go by."""
    width, height, *frames = bucket
    return width * height * math.prod(map(family.latent_frames, frames))


def trained(job: Job, family: ModelFamily) -> Named:
    """The parameters that the job trains, as `adapters.parameters` lists them, on the meta device."""
    denoiser = family.empty_denoiser()
    names = family.adapter_names(denoiser, job.adapter.targets)
    adapters.inject(denoiser, job.adapter.model_copy(update={"targets": []}), names, seed=job.seed)
    encoders = family.empty_trained_text() if job.adapter.text_encoder else {}
    inject_(encoders, family, job.adapter, job.seed)
    return adapters.parameters(Adapted(denoiser, encoders))


def checkpoint_bytes(job: Job, named: Named, world: int = 1) -> int:
    """One bundle: adapters, masters, moments, what the exchange owes, and the names of it all.

    Args:
        world: processes that train.
    """
    size = sum(parameter.nbytes for _, parameter in named)
    size += optim.state_bytes([parameter for _, parameter in named], job.optimizer)
    if world > 1 and job.train.gradient_exchange == "fp8":
        size += 4 * world * sum(parameter.numel() for _, parameter in named)
    # Each name is in both files' headers, and with its dtype and its count in the state: three times at least.
    return size + STATE + sum(3 * (len(name) + ENTRY) for name, _ in named)


def file_bytes(job: Job, named: Named) -> dict[str, int]:
    """Tensors of each exported file, by its layout."""
    num = sum(parameter.numel() for _, parameter in named)
    return {layout: num * FILE_BYTES[job.export.dtype] for layout in job.export.formats}


def of_run(job: Job, named: Named, folder: Path, world: int = 1) -> list[Need]:
    """What training writes into its run folder from now on: its checkpoints as many as lie there at one time.

    Args:
        folder: of the run; what it holds of an earlier start is not written again.
    """
    newest, lying = checkpoint.newest(folder / "checkpoints"), checkpoint.count(folder / "checkpoints")
    begun = checkpoint.step_of(newest) if newest else 0
    steps = range(begun + 1, job.train.steps + 1)
    saves = sum(step % job.checkpoint.every == 0 or step == job.train.steps for step in steps)
    # One is written beside those that are kept, and removes the oldest afterwards.
    more = min(saves, max(1, job.checkpoint.keep + 1 - lying))
    every = job.export.every
    exports = 1 + sum(step % every == 0 for step in steps[:-1]) if every else 1
    written = sum(file_bytes(job, named).values()) * exports
    if any((folder / "export").glob("*.safetensors")):  # they are replaced, one after the other
        written -= sum(path.stat().st_size for path in (folder / "export").glob("*.safetensors"))
    saved = more * checkpoint_bytes(job, named, world)
    place = folder if folder.exists() else folder.parent  # which is the setting; a run may be a link to another disk
    return [
        Need(place, "checkpoints", saved, saved),
        Need(place, "LoRA files", max(0, written), max(0, written)),
        Need(place, "previews", 0, _previews(job, steps)),
    ]


def _previews(job: Job, steps: range) -> int:
    """About what the previews of these steps take, and the sheet that shows the first and the last."""
    section = job.preview
    side = job.dataset.resolution
    pixels = (section.width or side) * (section.height or side) * section.frames * len(section.prompts)
    times = 1 + (section.at_start and steps.start == 1) + 2  # the last, the first, and the sheet's two rows
    times += sum(step % section.every == 0 for step in steps[:-1]) if section.every else 0
    return PER_PIXEL * pixels * times


def _latents_shape(family: ModelFamily, bucket: Bucket) -> tuple[int, ...] | None:
    """(C, H, W) of a picture's latents in this bucket, (C, F, H, W) of a clip's; None where it cannot be reckoned."""
    family.vae = family.empty_vae()
    try:
        with dry_run.on_meta(), dry_run.Tally():
            width, height, *frames = bucket
            pixels = torch.empty(1, 3, *(num for num in frames if num > 1), height, width, device=dry_run.META)
            return tuple(family.encode_images(pixels).shape[1:])
    except dry_run.Undecided:
        return None
    finally:
        family.vae = None


def of_cache(store: Cache, missing: Missing, bucket: Bucket) -> Need:
    """What encoding adds to the cache's disk; where conditioning is as long as its prompt, that may be little or much.

    Args:
        bucket: any one; the latents of all others are to it as their pixels are.
    """
    family, itemsize = store.family, store.dtype.itemsize
    pictured = missing.images or missing.controls or missing.masks
    latents = _latents_shape(family, bucket) if pictured else None
    per_pixel = 0.0 if latents is None else math.prod(latents) * itemsize / volume(family, bucket)
    pixels = sum(volume(family, one.bucket) for one, _ in missing.images)
    pixels += sum(math.prod(shown.size) for shown, _ in missing.controls)
    # A mask is one channel of one frame's latents.
    per_area = 0.0 if latents is None else math.prod(latents[-2:]) * itemsize / math.prod(bucket[:2])
    masks = sum(math.prod(one.placement.bucket_wh) for one, _ in missing.masks)
    pictures = round(pixels * per_pixel + masks * per_area)
    conds = family.longest_cond(dict(family.empty_denoiser().config)) if missing.captions else {}
    whole = {name: math.prod(shape) * itemsize for name, shape in conds.items()}
    least = sum(size for name, size in whole.items() if not (family.prompts_vary and name == "prompt_embeds"))
    captions = len(missing.captions)
    sizes = [pictures + captions * each for each in (least, sum(whole.values()))]
    return Need(store.root, "cached pictures and captions", *sizes)
