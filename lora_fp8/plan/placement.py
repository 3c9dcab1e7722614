"""Find the images of a job, place them in buckets, and keep some out for validation."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from ..data import buckets as bucketing
from ..data import images, permutation
from ..data.cache import Cache, Prompt, whole
from ..errors import UserError
from ..families.base import ModelFamily
from ..settings import Job

Buckets = dict[bucketing.Bucket, list[bucketing.Placed]]


@dataclass(frozen=True)
class PlacedImages:
    """The images of a job, each in its bucket, and those that validation keeps out of training."""

    examples: list[images.Example]
    """to train on"""
    held_out: list[images.Example]
    """to measure on, each once"""
    buckets: Buckets
    """of `examples`"""
    held_out_buckets: Buckets
    """of `held_out`"""
    warnings: list[str] = field(default_factory=list)
    """about images, captions and masks"""

    @cached_property
    def placed(self) -> list[bucketing.Placed]:
        """`examples` and `held_out`, placed, bucket by bucket."""
        both = self.buckets, self.held_out_buckets
        return [one for buckets in both for members in buckets.values() for one in members]


def place_images(job: Job, report: images.ScanReport) -> PlacedImages:
    """Keep some images out for validation and put all into buckets; the job's "auto" sizes are resolved.

    Raises:
        UserError: nothing would be left to train on.
    """
    examples, held_out = split(job, report.examples)
    found = PlacedImages(examples, held_out, place(job, examples), place(job, held_out))
    found.warnings.extend(images.outside_masks(found.placed))
    return found


def scan(job: Job, Family: type[ModelFamily]) -> images.ScanReport:
    """Every picture and clip of a job with what belongs to it, and the previews' control pictures."""
    return images.scan(job.dataset, Family.controls, job.preview, Family.clips[1], job.objective.unmasked_weight)


def place(job: Job, examples: list[images.Example]) -> Buckets:
    """Put every image and clip into its bucket; the job's "auto" sizes are resolved."""
    section = job.dataset
    placed = bucketing.assign(examples, section, resolution=section.resolution, step=section.bucket_step)
    return bucketing.group(placed)


def may_be_held_out(job: Job, examples: list[images.Example]) -> list[str]:
    """The hashes of the files that validation may keep out of training, none of a folder for regularization."""
    # Contents, not examples: of a clip that is cut into pieces, a picture that lies in two folders or a folder that is
    # named twice, nothing may be trained on where it is held out.
    own = [one for one in examples if not job.dataset.folders[one.folder_index].regularization]
    return list(dict.fromkeys(example.image_sha256 for example in own))


def split(job: Job, examples: list[images.Example]) -> tuple[list[images.Example], list[images.Example]]:
    """What is trained on, and what is kept out of it for validation, each once, drawn by the seed.

    Raises:
        UserError: nothing would be left to train on.
    """
    wanted = job.validation.pictures
    files = may_be_held_out(job, examples)
    if wanted and wanted >= len(files):
        raise UserError(
            f"validation.pictures = {wanted}: of {len(files)} pictures none would be left to train on; use fewer"
        )
    held_out = {files[number] for number in permutation(len(files), "held out", job.seed)[:wanted]}
    trained = [example for example in examples if example.image_sha256 not in held_out]
    kept: dict[tuple[str, tuple[int, ...]], images.Example] = {}
    for example in examples:
        if example.image_sha256 in held_out:
            kept.setdefault((example.image_sha256, example.frames), replace(example, repeats=1))
    return trained, list(kept.values())


def preview_prompts(job: Job, store: Cache) -> tuple[list[str | Prompt], list[str | Prompt]]:
    """What the previews are drawn from, and what each is guided away from."""
    prompts, guided_away = job.preview.prompts, store.family.negative_text(job.preview.negative)
    controls = images.preview_controls(job.preview, job.dataset, store.family.controls)[0]
    shown = [whole(each) for each in controls] or [()] * len(prompts)
    drawn = [store.prompt(prompt, each) for prompt, each in zip(prompts, shown, strict=True)]
    return drawn, [store.prompt(guided_away, each) for each in shown]
