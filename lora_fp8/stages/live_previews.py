"""Draw what a user asks for while a run trains: an image at once, and previews of other prompts from now on.

The requests are files in the run folder (`run.preview_requests`). They are acted on between two steps. Nothing that
training depends on is touched: images have their own generators, prompts are encoded by a second set of text encoders,
and the state of the global random generators is restored.
"""

import torch

from .. import precision, settings
from ..config import apply_preview_changes
from ..data.cache import Cache
from ..errors import Joined, Message, RunFailure, UserError
from ..families.base import ModelFamily
from ..plan.resolve import make_family
from ..run import preview_requests
from ..training import memory
from . import previews
from .cache import Data, PreviewPrompts, list_texts, read_preview_prompts, read_preview_section
from .load import Loaded
from .session import Session

ENCODER_MEMORY_FACTOR = 1.25
"""Free GPU memory that encoding a prompt needs, as a multiple of the largest text encoder."""


class LivePreviews:
    """The requests about previews that a run gets while it trains."""

    def __init__(self, session: Session, data: Data, loaded: Loaded) -> None:
        self.session, self.data, self.loaded = session, data, loaded
        self._version = data.preview_version

    def read_requests(self) -> set[str]:
        """Return which requests wait in the run folder, "prompts" and "sample"; only the main process looks."""
        run = self.session.run
        if not self.session.processes.is_main:
            return set()
        changed = preview_requests.read_version(run) != self._version
        return ({"prompts"} if changed else set()) | ({"sample"} if preview_requests.list_samples(run) else set())

    def change_prompts(self, step: int) -> bool:
        """Put the changed `[preview]` table in force. Return True if there are other previews to draw now."""
        session, data = self.session, self.data
        preview, self._version = read_preview_section(session, data.preview)
        if preview == data.preview:
            return False
        prompts = self._encode(preview)
        if prompts is None:
            return False
        data.preview, data.previews = preview, prompts
        changes = preview.model_dump(include=set(preview_requests.KEYS))
        session.run.log_event("previews_changed", step=step, **changes)
        return True

    def draw_samples(self, step: int) -> None:
        """Draw the images that were asked for."""
        session = self.session
        for preview in session.processes.gather(self._take_samples() if session.processes.is_main else [])[0]:
            if (prompts := self._encode(preview)) is None:
                continue
            if self.loaded.text is not None:
                prompts = prompts.encode(self.loaded.text.encode_each)
            self.loaded.free_recordings()
            with session.together(), precision.decoded_compute(self.loaded.denoiser):
                previews.draw_now(session, self.loaded.denoiser, preview, prompts, step)

    def _take_samples(self) -> list[settings.Preview]:
        """Read the requests for an image as `[preview]` tables; one that cannot be drawn is a warning."""
        session, tables = self.session, []
        for changes in preview_requests.take_samples(session.run):
            try:
                prompts = changes.get("prompts")
                if not (isinstance(prompts, list) and prompts):
                    raise UserError(Message("the request is not a JSON object with a list of prompts"))
                # An editing model is shown the control images of the first previews.
                controls = self.data.preview.controls[: len(prompts)]
                preview = self.data.preview.model_copy(update={"controls": controls})
                job = session.job.model_copy(update={"preview": preview})
                tables += settings.split_preview(apply_preview_changes(job, changes))
            except UserError as error:
                what = Joined("; ", error.problems)
                session.warn(Message("a request for an image was ignored: {line}", line=what))
        return tables

    def _encode(self, preview: settings.Preview) -> PreviewPrompts | None:
        """Encode the prompts of a table through the cache. Return None if that failed, which is a warning."""
        session = self.session
        problem: str | None = None
        if session.processes.is_main:
            try:
                self._fill_cache(preview)
            except (UserError, RunFailure, RuntimeError, ValueError, OSError) as error:
                problem = str(error) or type(error).__name__
        problem = session.processes.gather(problem)[0]
        if problem is not None:
            session.warn(Message("the new prompts could not be encoded: {line}", line=problem))
            return None
        with session.together():
            return read_preview_prompts(preview, session.plan.cache)

    def _fill_cache(self, preview: settings.Preview) -> None:
        """Encode prompts that are not in the cache, with text encoders loaded beside the training model."""
        session = self.session
        family, store = session.family, session.plan.cache
        texts = list_texts(preview, store)
        if not store.find_missing([], texts):
            return
        device = _choose_device(family)
        with torch.random.fork_rng([family.device] if family.device.type == "cuda" else []):
            beside = make_family(session.job, device, next(iter(family.bases), None))
            report = Cache(store.root, beside, store.section, store.dtype).fill([], texts)
        for line in report.list_warnings():
            session.warn(line)


def _choose_device(family: ModelFamily) -> torch.device:
    """Choose where to encode a prompt: the CPU if the GPU has no room beside the training."""
    free = memory.count_free_bytes(family.device)
    needed = ENCODER_MEMORY_FACTOR * max(family.count_encoder_bytes().values())
    return family.device if free is None or needed <= free else torch.device("cpu")
