"""The first stage: encode images and captions into the cache.

The encoders are loaded, used and freed before the denoiser arrives, so that the two never need memory at the same time.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..data import buckets as bucketing
from ..data import images
from ..data.cache import Cache, plain_captions, preview_pictures, text_of, truncation_warnings
from ..data.loader import Item, Loader
from ..errors import Stopped
from ..families.base import Cond
from ..plan.disk_budget import volume
from ..plan.plan import Plan
from ..run import Run
from .session import Session


@dataclass
class Data:
    """What the cache stage leaves to the others."""

    loader: Loader
    heaviest: int  # number of the micro-batch with the most pixels, for the preflight and the probe
    held_out: Loader | None  # what validation measures on: one picture a batch, the same each time
    preview_conds: list[Cond]
    preview_negatives: list[Cond] | None  # for each of these
    preview_texts: tuple[list[str], str]  # what these two were encoded from
    fingerprint: str
    files: dict[str, str]  # what a checkpoint keeps of each file, to say which of them changed


def cache(session: Session) -> Data:
    """Encode every image and caption that is not in the cache yet; the encoders leave before the denoiser arrives.

    Raises:
        Stopped: somebody asked for it. RunFailure: see `Cache.fill`.
    """
    plan, run, processes = session.plan, session.run, session.processes
    job, family, placed, store = plan.job, plan.family, plan.images, plan.cache
    section = job.dataset
    run.log_event("stage", stage="cache")
    # Every process encodes its share; entries are whole or absent, so that one made twice does no harm.
    report = store.fill(processes.share(placed.placed), processes.share(plan.texts), log=_every_two_seconds(run))
    reports = processes.gather(report)
    run.log_event("cache", **{key: sum(getattr(one, key) for one in reports) for key in ("encoded", "reused", "bytes")})
    truncated = list(dict.fromkeys(one for each in reports for one in each.truncated))
    for line in truncation_warnings(truncated, len({text_of(text) for text in plan.texts})):
        session.warn(line)

    loader = Loader(placed.buckets, store, family, section, seed=job.seed, batch_size=job.train.batch_size)
    run.log_event(
        "data",
        images=len(placed.examples),
        held_out=len(placed.held_out),
        masked=sum(one.mask is not None for one in placed.examples),
        samples_per_epoch=loader.samples_per_epoch,
        steps_per_epoch=loader.batches_per_epoch / job.train.accumulate,
        buckets={bucketing.named(bucket): len(members) for bucket, members in placed.buckets.items()},
    )
    trained = [one for members in placed.buckets.values() for one in members]
    fingerprint = json.dumps([_fingerprint(one, section.folders[one.example.folder_index].weight) for one in trained])
    conds, negatives = _preview_conds(plan)
    held_out = None
    if placed.held_out:
        plain = plain_captions(section).model_copy(update={"flip": False})
        held_out = Loader(placed.held_out_buckets, store, family, plain, seed=job.seed, batch_size=1)
    return Data(
        loader=loader,
        heaviest=max(range(loader.batches_per_epoch), key=lambda i: _pixels(store, loader.batch_at(i))),
        held_out=held_out,
        preview_conds=conds,
        preview_negatives=negatives or None,
        preview_texts=(job.preview.prompts, family.negative_text(job.preview.negative)),
        fingerprint=hashlib.sha256(fingerprint.encode()).hexdigest(),
        files=manifest([*placed.examples, *placed.held_out]),
    )


def _preview_conds(plan: Plan) -> tuple[list[Cond], list[Cond]]:
    """Read from the cache what previews are drawn from: prompts with their control images, and negative prompts."""
    job, store = plan.job, plan.cache
    controls = images.preview_controls(job.preview, job.dataset, plan.family.controls)[0]
    shown = [preview_pictures(each, job.dataset.background) for each in controls] or [{}] * len(job.preview.prompts)
    drawn, guided_away = plan.preview_prompts
    negatives = [store.cond(prompt) for prompt in guided_away]
    if not job.preview.negative:
        negatives = [one for one in map(plan.family.without_negative, negatives) if one is not None]
    return [store.cond(prompt) | each for prompt, each in zip(drawn, shown, strict=True)], negatives


def _every_two_seconds(run: Run) -> Callable[[int, int], None]:
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if run.requested("stop"):
            raise Stopped("stopped before the first step; what was cached stays cached")
        if time.monotonic() - last >= 2:
            last = time.monotonic()
            run.log_event("progress", stage="cache", done=done, total=total)

    return tell


def manifest(examples: Sequence[images.Example]) -> dict[str, str]:
    """Name in the dataset -> the beginnings of the hashes of image and caption."""
    return {
        one.file_uid: f"{one.image_sha256[:12]} {hashlib.sha256(one.caption.encode()).hexdigest()[:12]}"
        for one in examples
    }


def _fingerprint(one: bucketing.Placed, weight: float) -> list[Any]:
    example = one.example
    controls = [control.sha256 for control in example.controls]
    facts = [one.uid, example.image_sha256, example.caption, example.repeats, one.placement.bucket_wh]
    facts += [controls] if controls else []
    facts += [example.frames] if example.frames else []
    facts += [f"mask {example.mask.sha256} {example.mask.alpha}"] if example.mask else []
    return [*facts, f"weight {weight:g}"] if weight != 1 else facts


def _pixels(store: Cache, items: list[Item]) -> int:
    first = items[0].placed
    controls = sum(math.prod(shown.size) for shown in store.shown(first))
    return len(items) * (volume(store.family, first.bucket) + controls)
