"""Find the images of a job, place them in buckets, and keep some out for validation: a part of the Plan."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from ..data import buckets as bucketing
from ..data import control_files, make_permutation, mask_files
from ..data.cache import Cache
from ..data.examples import Example, ScanReport
from ..data.image_variants import list_variants
from ..data.prompts import Prompt, make_whole_crops
from ..errors import Message, UserError
from ..settings import Dataset, Job, Preview, split_preview
from .resolve import get_resolution

Buckets = dict[bucketing.Bucket, list[bucketing.Placed]]


@dataclass(frozen=True)
class PlacedImages:
    """The images of a job, each in its bucket, and those that validation keeps out of training."""

    examples: list[Example]
    """those to train on"""
    held_out: list[Example]
    """those to measure the held-out loss on, each once"""
    buckets: Buckets
    """`examples` by bucket"""
    held_out_buckets: Buckets
    """`held_out` by bucket"""
    section: Dataset
    """`[dataset]`, for the variants of the images"""
    warnings: list[str] = field(default_factory=list)
    """about images, captions and masks"""

    @cached_property
    def placed(self) -> list[bucketing.Placed]:
        """Return all that is cached: `examples` in their buckets, with their variants, then `held_out` as they are."""
        trained = [placed for members in self.buckets.values() for placed in members]
        held_out = [placed for members in self.held_out_buckets.values() for placed in members]
        return [*(variant for placed in trained for variant in list_variants(placed, self.section)), *held_out]


def place_images(job: Job, report: ScanReport) -> PlacedImages:
    """Keep some images out for validation and put all into buckets.

    Args:
        job: with its "auto" sizes resolved.
        report: the images of the job.

    Raises:
        UserError: nothing would be left to train on.
    """
    examples, held_out = split(job, report.examples)
    placed_images = PlacedImages(examples, held_out, place(job, examples), place(job, held_out), job.dataset)
    placed_images.warnings.extend(
        mask_files.warn_of_outside_masks([image for image in placed_images.placed if not image.usual])
    )
    return placed_images


def place(job: Job, examples: list[Example]) -> Buckets:
    """Put every image and clip into its bucket. The job's "auto" sizes must be resolved."""
    section, step = job.dataset, job.dataset.bucket_step
    if step == "auto":
        raise ValueError('dataset.bucket_step is still "auto"; call resolve_auto first')
    placed = bucketing.assign(examples, section, resolution=get_resolution(job), step=step)
    return bucketing.group(placed)


def find_holdout_candidates(job: Job, examples: list[Example]) -> list[str]:
    """Return the hashes of the files that validation may keep out of training: all but regularization images."""
    # Held-out images are chosen by content, not by example. A clip may be cut into pieces, an image may be in two
    # folders, and a folder may be named twice: no copy of a held-out file may be trained on.
    subject_examples = [example for example in examples if not job.dataset.folders[example.folder_index].regularization]
    return list(dict.fromkeys(example.image_sha256 for example in subject_examples))


def split(job: Job, examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """Split the examples into those to train on and those held out for validation (each once), drawn by the seed.

    Raises:
        UserError: nothing would be left to train on.
    """
    num_held_out = job.validation.pictures
    files = find_holdout_candidates(job, examples)
    if num_held_out and num_held_out >= len(files):
        raise UserError(
            Message(
                "validation.pictures = {wanted}: none of {count} images would be left to train on; use fewer",
                wanted=num_held_out,
                count=len(files),
            )
        )
    held_out = {files[number] for number in make_permutation(len(files), "held out", job.seed)[:num_held_out]}
    trained = [example for example in examples if example.image_sha256 not in held_out]
    measured: dict[tuple[str, tuple[int, ...]], Example] = {}
    for example in examples:
        if example.image_sha256 in held_out:
            measured.setdefault((example.image_sha256, example.frames), replace(example, repeats=1))
    return trained, list(measured.values())


def make_preview_prompts(preview: Preview, store: Cache) -> tuple[list[str | Prompt], list[str | Prompt]]:
    """Return the prompts of the previews, and the negative prompt of each, with their control images."""
    tables = split_preview(preview)
    controls = control_files.find_preview_controls(preview, store.section, store.family.controls)[0]
    control_sets = [make_whole_crops(control_set) for control_set in controls] or [()] * len(tables)
    paired = list(zip(tables, control_sets, strict=True))
    prompts = [store.make_prompt(table.prompts[0], control_set) for table, control_set in paired]
    negative_text = store.family.make_negative_text
    return prompts, [store.make_prompt(negative_text(table.negative), control_set) for table, control_set in paired]
