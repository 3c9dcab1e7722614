"""Find and decode the images of a job. This needs no torch, so that a problem with an image is reported at once."""

from collections.abc import Callable

from .. import families
from ..data import images, look_memory
from ..data.examples import ScanReport
from ..settings import Job


def scan(job: Job, progress: Callable[[int, int], None] | None = None) -> ScanReport:
    """Find the images and clips of a job with captions, masks and controls, and the control images of the previews.

    Files that were decoded before are not decoded again; see `data.look_memory`.

    Args:
        job: with its config.
        progress: called with (files done, files in all) while files are decoded.
    """
    Family = families.get(job.model.family)
    memory = look_memory.LookMemory(job.dataset, look_memory.find_default_folder(), progress)
    weight = job.objective.unmasked_weight
    return images.scan(job.dataset, Family.controls, job.preview, Family.clips[1], weight, memory)
