"""Caption images with a model: a vision-language model writes text, or a tagger gives tags; both through transformers.

Accepted models: a folder or Hugging Face id with safetensors, of an architecture that is part of transformers
(Florence-2 in its `florence-community` form, BLIP, Qwen2.5-VL, LLaVA such as JoyCaption, and whatever else
AutoModelForImageTextToText knows; for tags also multi-label image classifiers). Code from a repository is neither
fetched nor run. WD14 taggers are published for timm and onnxruntime, which this project does not use: they are refused
with a message that says so.

Decoding is greedy, so that an image has one caption for a model and prompt. After a stop or a crash, finished captions
are therefore not made again: each is written as soon as it is there, as an edit in the folder's journal
(`data.captions`), and all edits of one captioning run are undone together. A caption that somebody writes meanwhile is
left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
import transformers
from PIL import Image
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from ..common.reading import MOST_JSON, parse_json, read_bytes
from ..errors import Message, Stopped, UserError, UserErrors, about, cannot_read, first_few, lacks_weights
from ..precision.dtypes import DTYPES
from ..run import StopSignal
from ..settings import Dataset
from . import caption_text, captions, decoding, image_edits

PROMPTS = {
    "text": "Describe this image in one paragraph. Say what is seen, not what it may mean.",
    "tags": "List what is seen in this image as short tags, separated by commas. Write the tags only.",
}
FLORENCE_TASK = "<MORE_DETAILED_CAPTION>"
FETCHED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files that are downloaded from a repository: no code, no pickles."""


@dataclass(frozen=True)
class Settings:
    """Which model to caption with, and how.

    Attributes:
        model: folder or Hugging Face id.
        kind: sentences, or tags separated by commas.
        prompt: the question for the model; "" takes the default of the kind (for Florence-2 its task
            <MORE_DETAILED_CAPTION>).
        overwrite: also caption images that have a caption.
        trigger: trigger word, prepended if the caption lacks it.
        max_tokens: longest answer.
        threshold: for taggers, the probability from which a tag is taken.
        exclude: tags to leave out.
        batch_size: images per batch.
        dtype: bf16, fp16 or fp32; "" is bf16 on a GPU, else fp32.
        revision: revision on the Hugging Face hub.
    """

    model: str
    kind: Literal["text", "tags"] = "text"
    prompt: str = ""
    overwrite: bool = False
    trigger: str = ""
    max_tokens: int = 300
    threshold: float = 0.35
    exclude: tuple[str, ...] = ()
    batch_size: int = 1
    dtype: str = ""
    revision: str = ""

    @property
    def group(self) -> str:
        """Key of this captioning in the journal; settings that give the same captions have the same key."""
        values = {**vars(self), "batch_size": 0, "overwrite": False}
        return "caption " + hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Result:
    """The outcome of a captioning.

    Attributes:
        written: number of captions written.
        kept: number of captions that were there already.
        empty: number of images for which the model returned nothing.
        problems: the images left without a caption, and why.
    """

    written: int = 0
    kept: int = 0
    empty: int = 0
    problems: list[str] = field(default_factory=list)


def run(
    folder: Path, settings: Settings, echo: Callable[[dict[str, Any]], None] | None = None, mask: str = ""
) -> Result:
    """Caption the images of a folder.

    Args:
        folder: images, searched with subfolders; captions are written beside them.
        settings: the model and how to use it.
        echo: called with each event (stage, caption, warning and done), in the format of a run's events.
        mask: as in `captions.listed`.

    Raises:
        UserError: the folder, the model or the settings cannot be used.
        Stopped: on SIGTERM or Ctrl-C, after the current captions; the same call continues.
    """
    watch = StopSignal()
    with watch.watching():
        watch.at_once = Message("stopped; captions that were written stay")
        pictures = captions.listed(folder, mask)
        result = Result()
        with captions.open_journal(folder) as journal:
            waiting = _waiting(folder, settings, pictures, result)
            session = _Session(journal, settings, result, echo, image_edits.read(Path(os.path.expanduser(folder))))
            session.log_event("stage", stage="load", total=len(waiting), kept=result.kept)
            if waiting:
                model = load(settings)
                watch.at_once = None
                session.log_event("stage", stage="caption", total=len(waiting), kept=result.kept)
                _caption(session, model, waiting, watch)
        session.log_event(
            "done", written=result.written, kept=result.kept, empty=result.empty, problems=result.problems
        )
    return result


@dataclass(frozen=True)
class _Session:
    """One captioning of a folder: what it writes to, and whom it informs."""

    journal: captions.Journal
    settings: Settings
    result: Result
    echo: Callable[[dict[str, Any]], None] | None
    edits: dict[str, image_edits.ImageEdit]

    def log_event(self, event: str, **fields: Any) -> None:
        if self.echo is not None:
            self.echo({"t": round(time.time(), 3), "event": event, **fields})

    def add_problem(self, problem: str) -> None:
        self.result.problems.append(problem)
        self.log_event("warning", text=problem)


def _waiting(folder: Path, settings: Settings, pictures: dict[str, Path], result: Result) -> list[tuple[str, str]]:
    """Return (image, caption file), as relative names, for all images that have to be captioned."""
    root = Path(os.path.expanduser(folder))
    done = captions.standing(folder, settings.group)
    waiting: dict[str, str] = {}  # by caption file: images that share a file get one caption
    for name, path in pictures.items():
        file = path.relative_to(root).as_posix()
        if file in done or (not settings.overwrite and _has_text(path)):
            result.kept += 1
        else:
            waiting.setdefault(file, name)
    return [(name, file) for file, name in waiting.items()]


def _has_text(path: Path) -> bool:
    """Return True if there is a caption; one in an unknown encoding counts, as it must not be lost."""
    try:
        return bool(caption_text.read_caption(path))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _caption(session: _Session, model: Captioner, waiting: list[tuple[str, str]], watch: StopSignal) -> None:
    journal, settings, result = session.journal, session.settings, session.result
    folder, done = journal.folder, 0
    root = Path(os.path.expanduser(folder))
    for start in range(0, len(waiting), settings.batch_size):
        batch, pixels = waiting[start : start + settings.batch_size], []
        readable = []
        for name, file in batch:
            try:
                pixels.append(_pixels(root / name, session.edits.get(name, image_edits.NOTHING)))
                readable.append((name, file))
            except decoding.ImageError as error:
                session.add_problem(about(name, error))
        for (name, file), text in zip(readable, model.describe(pixels) if pixels else [], strict=True):
            caption = _cleaned(text, settings)
            if not caption:
                result.empty += 1
                session.add_problem(Message("{name}: the model had no words for it", name=name))
                continue
            if not settings.overwrite and _has_text(root / file):
                result.kept += 1  # somebody wrote a caption while the model was running
                continue
            caption = caption_text.with_trigger(caption, settings.trigger)
            edit = captions.assign(folder, {file: caption}, Message("captions by {model}", model=settings.model))
            result.problems += edit.problems
            if edit.changes:
                captions.apply(folder, edit, group=settings.group, journal=journal)
            result.written += not edit.problems
            session.log_event("caption", file=name, text=caption, done=done + len(batch), total=len(waiting))
        done += len(batch)
        if watch.requested:
            raise Stopped(
                Message(
                    "{path}: stopped after {done} of {total} pictures; the same command goes on",
                    path=folder,
                    done=done,
                    total=len(waiting),
                )
            )


def _pixels(path: Path, edit: image_edits.ImageEdit) -> Image.Image:
    """Decode an image as it is trained: turned and cropped."""
    looked = next(decoding.look_all([path], Dataset(), lambda _, rgb: rgb, {path: edit}))
    if looked.error:
        raise decoding.ImageError(looked.error)
    return looked.measured


def _cleaned(text: str, settings: Settings) -> str:
    """Return the answer as a caption: on one line, each tag once."""
    line = " ".join(text.split()).strip("\"'`").strip()
    if settings.kind == "text":
        return line
    tags = [tag.strip(" .\"'`") for tag in line.split(",")]
    unwanted = {tag.casefold() for tag in settings.exclude}
    return ", ".join(dict.fromkeys(tag for tag in tags if tag and tag.casefold() not in unwanted))


# -------------------------------------------------------------------------------------------------------------- models


class Captioner(ABC):
    """A loaded model."""

    @abstractmethod
    def describe(self, pictures: list[Image.Image]) -> list[str]:
        """Return one text per image."""


def load(settings: Settings) -> Captioner:
    """Load the model of these settings.

    Raises:
        UserError: it is not found, cannot be downloaded, lacks files, or has an architecture that transformers lacks.
    """
    if settings.dtype not in ("", *DTYPES):
        raise UserError(
            Message("dtype = {dtype}: accepted are {names}", dtype=repr(settings.dtype), names=", ".join(DTYPES))
        )
    folder = _folder(settings)
    kind = _model_type(folder, settings.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[settings.dtype or ("bf16" if device == "cuda" else "fp32")]
    try:
        if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            return _Writer(folder, kind, settings, device, dtype)
        return _Tagger(folder, settings, device, dtype)
    except UserError:
        raise
    # Missing files, missing keys, a library that the architecture needs: transformers raises a different error for
    # each.
    except (OSError, ValueError, KeyError, ImportError, AttributeError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            Message(
                "{model}: cannot be loaded by transformers {version} ({why})",
                model=settings.model,
                version=transformers.__version__,
                why=first,
            )
        ) from error


def _folder(settings: Settings) -> Path:
    folder = Path(os.path.expanduser(settings.model))
    if folder.is_dir():
        return folder
    is_path = folder.is_absolute() or settings.model.startswith(("~", "."))
    if folder.is_file() or settings.model.count("/") != 1 or is_path:
        raise UserError(Message("{model}: no such folder, and no Hugging Face id (OWNER/NAME)", model=settings.model))
    try:
        fetched = huggingface_hub.snapshot_download(
            settings.model, revision=settings.revision or None, allow_patterns=list(FETCHED)
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            Message("{model}: cannot be fetched from the hub ({why})", model=settings.model, why=first)
        ) from None
    return Path(fetched)


def _model_type(folder: Path, model: str) -> str:
    """Return the architecture that config.json names; raise UserError if it cannot caption images."""
    if not (folder / "config.json").is_file():
        if any(folder.glob("*.onnx")):
            raise UserError(
                Message(
                    "{model}: no config.json of a transformers model in it (an ONNX file is there: taggers for "
                    "onnxruntime are not read)",
                    model=model,
                )
            )
        raise UserError(Message("{model}: no config.json of a transformers model in it", model=model))
    try:
        kind = parse_json(read_bytes(folder / "config.json", MOST_JSON)).get("model_type", "")
    except (ValueError, AttributeError) as error:
        raise cannot_read(folder / "config.json", error) from None
    writes, ticks = (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    if kind == "timm_wrapper" or not kind:
        raise UserError(
            Message("{model}: made for timm, which is not used here; choose a model of transformers' own", model=model)
        )
    if kind not in CONFIG_MAPPING_NAMES:
        raise UserError(
            Message(
                "{model}: its architecture {kind} is unknown to transformers {version}; code that comes with a "
                "model is never run",
                model=model,
                kind=repr(kind),
                version=transformers.__version__,
            )
        )
    if not writes and not ticks:
        raise UserError(
            Message(
                "{model}: a {kind} model does not describe pictures; choose a vision-language model or a tagger",
                model=model,
                kind=kind,
            )
        )
    return kind


class _Writer(Captioner):
    """A model that writes text about an image."""

    def __init__(self, folder: Path, kind: str, settings: Settings, device: str, dtype: torch.dtype):
        self.settings, self.kind, self.device, self.dtype = settings, kind, device, dtype
        if kind == "florence2" and settings.kind == "tags":
            raise UserError(Message("{model}: Florence-2 writes sentences; use --kind text", model=settings.model))
        self.processor = _processor(folder, kind)
        self.tokenizer = self.processor.tokenizer
        self.model = _whole(transformers.AutoModelForImageTextToText, folder, dtype).to(device)
        self.answers_only = bool(self.model.config.is_encoder_decoder)
        # Decoder-only models continue right after the question, so questions of different lengths are padded on the
        # left.
        self.tokenizer.padding_side = "right" if self.answers_only else "left"
        self.chats = bool(
            getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        )

    def question(self) -> str | None:
        """Return the question for each image; None for no question."""
        asked = self.settings.prompt
        if self.kind == "florence2":
            return asked or FLORENCE_TASK
        if not self.chats:
            return asked or None  # BLIP and similar models continue a given beginning
        content = [{"type": "image"}, {"type": "text", "text": asked or PROMPTS[self.settings.kind]}]
        template = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        chat = [{"role": "user", "content": content}]
        return template.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    @torch.inference_mode()
    def describe(self, pictures: list[Image.Image]) -> list[str]:
        question = self.question()
        asked = {} if question is None else {"text": [question] * len(pictures), "padding": True}
        if self.chats:
            asked["add_special_tokens"] = False  # the template already has them
            given: Sequence[Any] = [[picture] for picture in pictures]
        else:
            given = pictures
        inputs = self.processor(images=given, return_tensors="pt", **asked).to(self.device, self.dtype)
        out = self.model.generate(**inputs, max_new_tokens=self.settings.max_tokens, do_sample=False, num_beams=1)
        if self.chats and not self.answers_only:
            out = out[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.tokenizer.batch_decode(out, skip_special_tokens=True)]


def _whole(Model: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Load a model and require all of its weights: transformers fills missing ones with random numbers."""
    model, loading_info = Model.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    learned = {name for name, _ in model.named_parameters()}  # not buffers, which each version computes anew
    if lost := sorted(learned.intersection(loading_info["missing_keys"])):
        raise lacks_weights(folder, type(model).__name__, len(lost), first_few(lost))
    return model.eval()


def _processor(folder: Path, kind: str) -> Any:
    """Load the model's processor; leave out the video part, if it has one, as that needs torchvision."""
    Processor = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(kind) or "", None)
    if Processor is None or "video_processor" not in Processor.get_attributes():
        return transformers.AutoProcessor.from_pretrained(folder)
    # The check would import torchvision to find that None is not a video processor.
    Pictures = type(Processor.__name__, (Processor,), {"check_argument_for_proper_class": lambda *_: None})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pixels = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return Pictures(
        image_processor=pixels, tokenizer=tokenizer, video_processor=None, chat_template=tokenizer.chat_template
    )


class _Tagger(Captioner):
    """A classifier that gives each label an independent probability."""

    def __init__(self, folder: Path, settings: Settings, device: str, dtype: torch.dtype):
        self.settings, self.device, self.dtype = settings, device, dtype
        if settings.kind != "tags":
            raise UserError(Message("{model}: a tagger writes tags; use --kind tags", model=settings.model))
        if settings.prompt:
            raise UserError(
                Message("{model}: a tagger is not asked anything; leave out --prompt", model=settings.model)
            )
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.problem_type != "multi_label_classification":
            raise UserError(
                Message(
                    "{model}: sorts pictures into one of {count} classes, which makes no tags (its config has no "
                    "problem_type = 'multi_label_classification')",
                    model=settings.model,
                    count=config.num_labels,
                )
            )
        self.names = [config.id2label[i] for i in range(config.num_labels)]
        self.processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.model = _whole(transformers.AutoModelForImageClassification, folder, dtype).to(device)

    @torch.inference_mode()
    def describe(self, pictures: list[Image.Image]) -> list[str]:
        inputs = self.processor(images=pictures, return_tensors="pt").to(self.device, self.dtype)
        return [", ".join(self._tags(row)) for row in self.model(**inputs).logits.float().sigmoid()]

    def _tags(self, probabilities: torch.Tensor) -> Iterator[str]:
        """Yield the tags above the threshold, most probable first, with spaces for underscores ("long_hair").

        Names of at most three characters stay as they are: they may be emoticons such as "^_^".
        """
        for index in probabilities.argsort(descending=True).tolist():
            if probabilities[index] < self.settings.threshold:
                return
            name = self.names[index]
            yield name.replace("_", " ") if len(name) > 3 else name


def problems(result: Result, folder: Path) -> None:
    """Raise UserErrors if images were left without a caption."""
    if result.problems:
        where = Message("{folder}: {count} captions written, pictures without", folder=folder, count=result.written)
        raise UserErrors(result.problems, where)
