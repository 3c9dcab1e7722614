"""The cache stage: encode images and captions into the cache.

The encoders are loaded, used and freed before the denoiser is loaded, so that both never need memory at the same time.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import settings
from ..config import apply_preview_changes
from ..data import buckets as bucketing
from ..data import cache_cleanup, control_files
from ..data.cache import Cache, decode_preview_controls
from ..data.caption_variants import disable_caption_variants, warn_of_truncation
from ..data.examples import Example
from ..data.image_variants import disable_image_variants
from ..data.loader import Loader
from ..data.prompts import Prompt, get_text
from ..errors import Joined, Message, Stopped, UserError
from ..families.base import Cond
from ..plan.disk_budget import count_pixels, estimate_cache
from ..plan.placement import make_preview_prompts
from ..plan.plan import Plan
from ..run import Run, preview_requests
from ..run.signals import STOPPED_EARLY
from .preview_scores import PreviewScores
from .progress import StageProgress
from .session import Session


@dataclass(frozen=True)
class PreviewPrompts:
    """The prompts of the previews, encoded, in the order of `preview.prompts`."""

    tables: list[settings.Preview]
    """the `[preview]` table of each, from `split_preview`"""
    negative_texts: list[str]
    """the negative prompt of each, as it is encoded"""
    conds: list[Cond]
    """unbatched conditioning of each prompt"""
    negatives: list[Cond | None]
    """the same of the negative prompt of each, for classifier-free guidance; None: the pipeline makes its own"""

    @property
    def texts(self) -> list[str]:
        """Return the prompts, without options."""
        return [table.prompts[0] for table in self.tables]

    def encode(self, encode: Callable[[Sequence[str], list[Cond]], list[Cond]]) -> "PreviewPrompts":
        """Encode the texts anew, with trained text encoders.

        Args:
            encode: takes texts and their cached conditioning, and returns the new conditioning.
        """
        negatives = [
            None if cond is None else encode([text], [cond])[0]
            for text, cond in zip(self.negative_texts, self.negatives, strict=True)
        ]
        return replace(self, conds=encode(self.texts, self.conds), negatives=negatives)


@dataclass
class Data:
    """The result of the cache stage, for the later stages."""

    loader: Loader
    heaviest: int  # number of the micro-batch with the most pixels, for the preflight and the probe
    held_out: Loader | None  # the images that validation measures on, one a batch, the same each time
    held_out_fingerprint: str  # of what the held-out loss depends on besides the LoRA
    preview: settings.Preview  # the table in force: a user may change it while the run trains
    preview_version: tuple[int, ...]  # of the file with the changes, from `preview_requests.read_version`
    previews: PreviewPrompts  # its prompts
    fingerprint: str
    scores: PreviewScores
    files: dict[str, str]  # from `make_manifest`, for a checkpoint to name the files that changed


def _describe_examples(examples: Sequence[Example], folders: Sequence[settings.Folder]) -> dict[str, Any]:
    """Return what the log says of sizes, captions and folders. Of a folder, only the last part of its path is kept."""
    by_size = sorted(((example.width, example.height) for example in examples), key=lambda size: size[0] * size[1])
    counts = Counter(example.folder_index for example in examples)
    return {
        "smallest": by_size[0],
        "largest": by_size[-1],
        "captioned": sum(bool(example.caption.strip()) for example in examples),
        "distinct_captions": len({example.caption for example in examples}),
        "folders": [
            {"name": Path(folder.path).name, "images": counts[number], "repeats": folder.repeats}
            for number, folder in enumerate(folders)
        ],
    }


def cache(session: Session) -> Data:
    """Encode every image and caption that is not in the cache yet, then free the encoders.

    Raises:
        Stopped: a stop was requested.
        RunFailure: see `Cache.fill`.
    """
    plan, run, processes = session.plan, session.run, session.processes
    job, family, placed, store = plan.job, plan.family, plan.images, plan.cache
    section = job.dataset
    run.log_event("stage", stage="cache")
    # Every process encodes its share. Entries are complete or absent, so encoding one twice is harmless.
    preview, version = read_preview_section(session)
    texts = plan.texts if preview == job.preview else list(dict.fromkeys([*plan.texts, *list_texts(preview, store)]))
    if processes.is_main and section.cache_limit != "none":
        _make_room(session, section.cache_limit * 2**30, texts)
    report = store.fill(
        processes.select_share(placed.placed), processes.select_share(texts), log=_make_progress_log(run)
    )
    reports = processes.gather(report)
    counts = ("encoded", "reused", "bytes")
    run.log_event("cache", **{key: sum(getattr(report, key) for report in reports) for key in counts})
    truncated = list(dict.fromkeys(text for report in reports for text in report.truncated))
    for line in warn_of_truncation(truncated, len({get_text(text) for text in texts})):
        session.warn(line)

    loader = Loader(placed.buckets, store, family, section, seed=job.seed, batch_size=job.train.batch_size)
    run.log_event(
        "data",
        images=len(placed.examples),
        held_out=len(placed.held_out),
        masked=sum(example.mask is not None for example in placed.examples),
        **_describe_examples(placed.examples, section.folders),
        samples_per_epoch=loader.samples_per_epoch,
        steps_per_epoch=loader.batches_per_epoch / job.train.accumulate,
        buckets={bucketing.format_bucket(bucket): len(members) for bucket, members in placed.buckets.items()},
    )
    held_out = None
    if placed.held_out:
        plain = disable_image_variants(disable_caption_variants(section))
        held_out = Loader(placed.held_out_buckets, store, family, plain, seed=job.seed, batch_size=1)
    return Data(
        loader=loader,
        heaviest=loader.find_heaviest(lambda image: _count_pixels(store, image)),
        held_out=held_out,
        held_out_fingerprint=hash_held_out(plan),
        preview=preview,
        preview_version=version,
        previews=read_preview_prompts(preview, store),
        fingerprint=hash_images(plan),
        scores=PreviewScores(),
        files=make_manifest([*placed.examples, *placed.held_out]),
    )


def _make_room(session: Session, limit: float, texts: Sequence[str | Prompt]) -> None:
    """Keep the cache below `limit` bytes, with what this run is going to add; warn where that is impossible."""
    store, placed = session.plan.cache, session.plan.images
    missing = store.find_missing(placed.placed, texts)  # the entries that this run needs now count as used just now
    added = estimate_cache(store, missing, min(placed.buckets)).likely
    if store.root.is_dir():
        if deleted := cache_cleanup.shrink(store.root, limit - added):
            session.run.log_event("cache_shrunk", deleted=len(deleted), bytes=sum(entry.bytes for entry in deleted))
        added += sum(entry.bytes for entry in cache_cleanup.list_entries(store.root))
    if added > limit:
        session.warn(
            Message(
                "dataset.cache_limit = {limit}: the cache will take up to {size} GiB, because entries used in the "
                "last 24 hours are not deleted; raise the limit",
                limit=f"{limit / 2**30:g}",
                size=f"{added / 2**30:.3g}",
            )
        )


def read_preview_section(
    session: Session, former: settings.Preview | None = None
) -> tuple[settings.Preview, tuple[int, ...]]:
    """Return the `[preview]` table in force: that of the job, with what a user has changed since the run began.

    Args:
        session: of the run. The main process reads its folder, and all get the same.
        former: the table that stays in force if the changes cannot be used, which is a warning; None: the job's.

    Returns:
        The table, and the version of the file with the changes.
    """
    preview, version = former or session.job.preview, preview_requests.read_version(session.run)
    if session.processes.is_main:
        try:
            preview = apply_preview_changes(session.job, preview_requests.read_changes(session.run))
        except UserError as error:
            session.warn(Message("the previews are unchanged: {line}", line=Joined("; ", error.problems)))
    return session.processes.gather((preview, version))[0]


def list_texts(preview: settings.Preview, store: Cache) -> list[str | Prompt]:
    """Return the prompts and negative prompts of previews, each once."""
    prompts, negatives = make_preview_prompts(preview, store)
    return list(dict.fromkeys([*prompts, *negatives]))


def read_preview_prompts(preview: settings.Preview, store: Cache) -> PreviewPrompts:
    """Read the conditioning of previews from the cache: prompts with control images, and negative prompts."""
    dataset, family = store.section, store.family
    controls = control_files.find_preview_controls(preview, dataset, family.controls)[0]
    prompts, negative_prompts = make_preview_prompts(preview, store)
    control_sets = [decode_preview_controls(paths, dataset.background) for paths in controls] or [{}] * len(prompts)
    tables = settings.split_preview(preview)
    negatives = [
        store.read_cond(prompt) if table.negative else family.make_default_negative(store.read_cond(prompt))
        for table, prompt in zip(tables, negative_prompts, strict=True)
    ]
    conds = [store.read_cond(prompt) | control_set for prompt, control_set in zip(prompts, control_sets, strict=True)]
    return PreviewPrompts(tables, [family.make_negative_text(table.negative) for table in tables], conds, negatives)


def _make_progress_log(run: Run) -> Callable[[int, int], None]:
    """Make a function that logs the progress of encoding, and raises Stopped if that is requested."""
    progress = StageProgress(run, "cache")

    def log_progress(done: int, total: int) -> None:
        if run.take_request("stop"):
            raise Stopped(STOPPED_EARLY)
        progress.update(done, total)

    return log_progress


def make_manifest(examples: Sequence[Example]) -> dict[str, str]:
    """Describe each file by the first 12 hex digits of the hashes of image and caption. Returns file name -> both."""
    return {
        example.file_uid: f"{example.image_sha256[:12]} {hashlib.sha256(example.caption.encode()).hexdigest()[:12]}"
        for example in examples
    }


def _make_fingerprint(placed: bucketing.Placed, weight: float) -> list[Any]:
    """List everything about an image that changes the training. Values at their defaults are left out."""
    example = placed.example
    controls = [control.sha256 for control in example.controls]
    facts = [placed.uid, example.image_sha256, example.caption, example.repeats, placed.placement.bucket_wh]
    facts += [controls] if controls else []
    facts += [example.frames] if example.frames else []
    facts += [f"mask {example.mask.sha256} {example.mask.alpha}"] if example.mask else []
    place = placed.placement
    if place.crop_xy != bucketing.compute_crop(place.original_wh, place.bucket_wh)[1]:  # it follows the mask
        facts += [f"crop {place.crop_xy}"]
    return [*facts, f"weight {weight:g}"] if weight != 1 else facts


def hash_images(plan: Plan) -> str:
    """Hash the images that are trained, in their buckets, with their captions and repeats."""
    weights = [folder.weight for folder in plan.job.dataset.folders]
    facts = [
        _make_fingerprint(image, weights[image.example.folder_index])
        for members in plan.images.buckets.values()
        for image in members
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def hash_held_out(plan: Plan) -> str:
    """Hash the held-out images in their buckets and the settings of the loss; two losses of one hash are comparable."""
    images = [_make_fingerprint(image, 1) for members in plan.images.held_out_buckets.values() for image in members]
    job = plan.job
    facts = [images, job.seed, job.objective.model_dump(mode="json")]
    encoding: list[tuple[settings.Section, str]] = [
        *((job.model, name) for name in ("caption_tokens", "prompt_weights", "clip_skip")),
        *((job.dataset, name) for name in ("background", "control_resolution")),
    ]
    # Values at their defaults are left out, which keeps the hashes of earlier runs.
    unusual = {
        name: value
        for section, name in encoding
        if (value := getattr(section, name)) != type(section).model_fields[name].default
    }
    text = json.dumps([*facts, unusual] if unusual else facts)
    return hashlib.sha256(text.encode()).hexdigest()


def _count_pixels(store: Cache, image: bucketing.Placed) -> int:
    """Count the pixels of an image, its control images included."""
    controls = sum(math.prod(control.size) for control in store.list_control_crops(image))
    return count_pixels(store.family, image.bucket) + controls
