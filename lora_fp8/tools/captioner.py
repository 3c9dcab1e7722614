"""Caption images with a model: a vision-language model writes text, or a tagger gives tags.

Accepted models, as a folder or Hugging Face id:

* A model with safetensors of an architecture that is part of transformers: Florence-2 in its `florence-community` form,
  BLIP, Qwen2.5-VL, LLaVA such as JoyCaption, and whatever else AutoModelForImageTextToText knows; for tags also
  multi-label image classifiers.
* A WD tagger, which onnxruntime runs (`wd_tagger`).

Code from a repository is neither downloaded nor run.

Decoding is greedy, so that an image has one caption for a model and prompt. After a stop or a crash, finished captions
are therefore not made again: each is written as soon as it is there, as an edit in the folder's journal
(`data.captions`), and all edits of one captioning run are undone together. A caption that somebody writes meanwhile is
left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from PIL import Image
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from ..common.json_files import read_json
from ..data import caption_text, captions, decoding, image_edits
from ..errors import Message, Plural, Stopped, UserError, UserErrors, about, cannot_read, first_few, lacks_weights
from ..families.sources import Reference
from ..families.sources.description import describe_files
from ..families.sources.download import Progress, Report, download
from ..families.sources.hosts import NoAnswer
from ..families.sources.reference import HUB_ID
from ..precision.dtypes import DTYPES
from ..run import StopSignal
from ..settings import Dataset
from ..stages.progress import DownloadProgress
from . import wd_tagger

PROMPTS = {
    "text": "Describe this image in one paragraph. Say what is seen, not what it may mean.",
    "tags": "List what is seen in this image as short tags, separated by commas. Write the tags only.",
}
FLORENCE_TASK = "<MORE_DETAILED_CAPTION>"
FETCHED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files that are downloaded of a model of transformers: no code, no pickles."""


@dataclass(frozen=True)
class Settings:
    """Which model to caption with, and how.

    Attributes:
        model: folder or Hugging Face id.
        kind: sentences, or tags separated by commas; "" is tags for a tagger, else sentences.
        prompt: the question for the model; "" takes the default of the kind (for Florence-2 its task
            <MORE_DETAILED_CAPTION>).
        overwrite: also caption images that have a caption.
        append: where a caption is there, add the tags that it lacks; for models that write tags.
        trigger: trigger word, prepended if the caption lacks it.
        max_tokens: longest answer.
        threshold: for taggers, the probability from which a tag is taken.
        character_threshold: for WD taggers, the probability from which the name of a character is taken.
        rating: for WD taggers, add the most probable rating as the last tag.
        keep_underscores: for taggers, "long_hair" stays as it is and does not become "long hair".
        exclude: tags to leave out.
        batch_size: images per batch.
        dtype: bf16, fp16 or fp32; "" is bf16 on a GPU, else fp32.
        revision: revision on the Hugging Face hub.
    """

    model: str
    kind: Literal["", "text", "tags"] = ""
    prompt: str = ""
    overwrite: bool = False
    append: bool = False
    trigger: str = ""
    max_tokens: int = 300
    threshold: float = wd_tagger.GENERAL_THRESHOLD
    character_threshold: float = wd_tagger.CHARACTER_THRESHOLD
    rating: bool = False
    keep_underscores: bool = False
    exclude: tuple[str, ...] = ()
    batch_size: int = 1
    dtype: str = ""
    revision: str = ""

    @property
    def group(self) -> str:
        """Return the key of this captioning in the journal; settings that give the same captions have the same key."""
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
    folder: Path,
    settings: Settings,
    echo: Callable[[dict[str, Any]], None] | None = None,
    mask: str = "",
    *,
    shows_progress: bool = False,
) -> Result:
    """Caption the images of a folder.

    Args:
        folder: images, searched with subfolders; captions are written beside them.
        settings: the model and how to use it.
        echo: called with each event (stage, download, captioner, caption, warning and done), in the format of a run's
            events.
        mask: as in `captions.list_caption_files`.
        shows_progress: show the progress of a download on stderr.

    Raises:
        UserError: the folder, the model or the settings cannot be used.
        Stopped: on SIGTERM or Ctrl-C, after the current captions; the same call continues.
    """
    if settings.append and settings.overwrite:
        raise UserError(Message("--append and --overwrite exclude each other; remove one of them"))
    watch = StopSignal()
    with watch.watching():
        watch.at_once = Message("stopped; captions written so far are kept")
        pictures = captions.list_caption_files(folder, mask)
        result = Result()
        with captions.open_journal(folder) as journal:
            waiting = _list_waiting(folder, settings, pictures, result)
            session = _Session(journal, settings, result, echo, image_edits.read(Path(os.path.expanduser(folder))))
            session.log_event("stage", stage="load", total=len(waiting), kept=result.kept)
            if waiting:
                model = session.load_model(shows_progress)
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

    def load_model(self, shows_progress: bool) -> Captioner:
        """Load the model, after a download of what is missing of it, and log what it runs on."""

        def report(progress: Progress) -> None:
            if progress.total:
                self.log_event("download", **progress.to_json())

        with DownloadProgress(self.settings.model, is_shown=shows_progress, report=report) as bar:
            model = load(self.settings, bar.update)
        for warning in model.warnings:
            self.log_event("warning", text=warning)
        self.log_event("captioner", model=self.settings.model, device=model.device)
        return model

    def add_problem(self, problem: str) -> None:
        self.result.problems.append(problem)
        self.log_event("warning", text=problem)


def _list_waiting(folder: Path, settings: Settings, pictures: dict[str, Path], result: Result) -> list[tuple[str, str]]:
    """Return (image, caption file), as relative names, for all images that have to be captioned."""
    root = Path(os.path.expanduser(folder))
    done = captions.find_unchanged_files(folder, settings.group)
    waiting: dict[str, str] = {}  # by caption file: images that share a file get one caption
    for name, path in pictures.items():
        file = path.relative_to(root).as_posix()
        if file in done or (not settings.overwrite and not settings.append and _has_text(path)):
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
                pixels.append(_decode_image(root / name, session.edits.get(name, image_edits.NOTHING)))
                readable.append((name, file))
            except decoding.ImageError as error:
                session.add_problem(about(name, error))
        for (name, file), caption in zip(readable, model.describe(pixels) if pixels else [], strict=True):
            if not caption:
                result.empty += 1
                session.add_problem(Message("{name}: the model returned no text", name=name))
                continue
            if settings.append:
                try:
                    caption = _add_tags(root / file, caption)
                except (OSError, ValueError) as error:  # a caption in an unknown encoding would be lost
                    session.add_problem(about(file, error))
                    continue
            elif not settings.overwrite and _has_text(root / file):
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
                    "{path}: stopped after {done} of {total} images; run the same command again to continue",
                    path=folder,
                    done=done,
                    total=len(waiting),
                )
            )


def _decode_image(path: Path, edit: image_edits.ImageEdit) -> Image.Image:
    """Decode an image as it is trained: turned and cropped."""
    looked = next(decoding.inspect_all([path], Dataset(), lambda _, rgb: rgb, {path: edit}))
    if looked.error:
        raise decoding.ImageError(looked.error)
    return looked.measured


def _flatten(text: str) -> str:
    """Return an answer on one line, without quotation marks around it."""
    return " ".join(text.split()).strip("\"'`").strip()


def _join_tags(tags: Iterable[str], exclude: Sequence[str]) -> str:
    """Return tags as a caption: each once, without those to exclude, which may have spaces or underscores."""
    unwanted = {_normalize_tag(tag) for tag in exclude}
    return ", ".join(dict.fromkeys(tag for tag in tags if tag and _normalize_tag(tag) not in unwanted))


def _add_tags(path: Path, tags: str) -> str:
    """Return the caption in a file, followed by the tags that it lacks; the tags alone if there is no file."""
    try:
        caption = caption_text.read_caption(path).rstrip(", ")
    except FileNotFoundError:
        return tags
    known = {_normalize_tag(tag) for tag in caption.split(",")}
    return ", ".join(filter(None, [caption, *(tag for tag in tags.split(", ") if _normalize_tag(tag) not in known)]))


def _normalize_tag(tag: str) -> str:
    return tag.strip().replace("_", " ").casefold()


def replace_underscores(tag: str) -> str:
    """Return a tag with spaces for underscores ("long_hair"), except an emoticon such as "^_^" or "o_o".

    Emoticons are the tags in which no two letters or digits are next to each other.
    """
    return tag.replace("_", " ") if re.search(r"[^\W_]{2}", tag) else tag


# -------------------------------------------------------------------------------------------------------------- models


class Captioner(ABC):
    """A loaded model.

    Attributes:
        device: what it runs on.
        warnings: what a person should know, one sentence each.
    """

    device: str
    warnings: Sequence[str] = ()

    @abstractmethod
    def describe(self, pictures: list[Image.Image]) -> list[str]:
        """Return one caption per image, without the trigger word; "" where the model has none."""


USED_BY_ALL = {"model", "kind", "overwrite", "trigger", "batch_size", "revision"}
USED_FOR_TAGS = {"append", "exclude"}
USED_BY_TAGGERS = {"threshold", "keep_underscores"} | USED_FOR_TAGS


def _refuse_unused(settings: Settings, used: set[str]) -> None:
    """Raise UserError if settings are given that this model has no use for."""
    unused = [
        f"--{entry.name.replace('_', '-')}"
        for entry in fields(settings)
        if entry.name not in USED_BY_ALL | used and getattr(settings, entry.name) != entry.default
    ]
    if unused:
        raise UserError(
            Message(
                "{model}: this model does not use {options}; remove them",
                model=settings.model,
                options=", ".join(unused),
            )
        )


def _check_tagger(settings: Settings, used: set[str]) -> None:
    """Raise UserError if settings do not suit a tagger, which uses these beside those that all taggers use."""
    if settings.kind == "text":
        raise UserError(Message("{model}: a tagger writes tags; use --kind tags", model=settings.model))
    _refuse_unused(settings, USED_BY_TAGGERS | used)


def load(settings: Settings, report: Report | None = None) -> Captioner:
    """Load the model of these settings.

    Args:
        settings: the model and how to use it.
        report: called with the progress of a download.

    Raises:
        UserError: it is not found, cannot be downloaded, lacks files, or has an architecture that transformers lacks;
            or a setting does not suit it.
        RunFailure: the connection failed again and again.
    """
    if settings.dtype not in ("", *DTYPES):
        raise UserError(
            Message(
                "dtype = {dtype}: there is no such dtype; accepted: {names}",
                dtype=repr(settings.dtype),
                names=", ".join(DTYPES),
            )
        )
    folder = _find_folder(settings, report)
    if wd_tagger.is_tagger(_list_names(folder)):
        return _OnnxTagger(folder, settings)
    kind = _read_model_type(folder, settings.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[settings.dtype or ("bf16" if device == "cuda" else "fp32")]
    try:
        if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            return _Writer(folder, kind, settings, device, dtype)
        return _Classifier(folder, settings, device, dtype)
    except UserError:
        raise
    # Missing files, missing keys, a library that the architecture needs: transformers raises a different error for
    # each.
    except (OSError, ValueError, KeyError, ImportError, AttributeError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            Message(
                "{model}: transformers {version} cannot load it ({why})",
                model=settings.model,
                version=transformers.__version__,
                why=first,
            )
        ) from error


def _find_folder(settings: Settings, report: Report | None) -> Path:
    """Return the folder of the model; what is missing of a model on the hub is downloaded."""
    folder = Path(os.path.expanduser(settings.model))
    if folder.is_dir():
        if settings.revision:
            raise UserError(Message("{model}: a folder has no revision; remove --revision", model=settings.model))
        return folder
    if folder.is_file() or not HUB_ID.fullmatch(settings.model):
        raise UserError(
            Message(
                "{model}: there is no such folder, and this is not a Hugging Face id (OWNER/NAME)", model=settings.model
            )
        )
    reference = Reference("hub", settings.model, repo=settings.model, settings=("--model", "--revision"))
    try:
        described = describe_files(reference, settings.revision, lambda names: _choose_files(names, settings.model))
        fetched = download(described, report)
    except NoAnswer as error:
        raise UserError(
            Message(
                "{model}: the model cannot be downloaded from Hugging Face ({why})", model=settings.model, why=error
            )
        ) from None
    assert fetched.folder is not None  # a repository always has one
    return fetched.folder


def _list_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_file()]


def _choose_files(names: Collection[str], model: str) -> list[str]:
    """Choose the files of a repository that captioning needs. What cannot be used is refused before its download."""
    if wd_tagger.is_tagger(names):
        wd_tagger.require_runtime(model)
        return [wd_tagger.MODEL, wd_tagger.TAGS]
    _require_config(names, model)
    return [name for name in names if any(fnmatch(name, pattern) for pattern in FETCHED)]


def _require_config(names: Collection[str], model: str) -> None:
    """Raise UserError if a folder or repository with these files is no model of transformers."""
    if "config.json" in names:
        return
    if any(name.endswith(".onnx") for name in names):
        raise UserError(
            Message(
                "{model}: it has neither the config.json of a transformers model nor both files of a WD tagger, "
                "{network} and {tags}",
                model=model,
                network=wd_tagger.MODEL,
                tags=wd_tagger.TAGS,
            )
        )
    raise UserError(Message("{model}: it has no config.json of a transformers model", model=model))


def _read_model_type(folder: Path, model: str) -> str:
    """Return the architecture that config.json names; raise UserError if it cannot caption images."""
    _require_config(_list_names(folder), model)
    try:
        kind = read_json(folder / "config.json").get("model_type", "")
    except (ValueError, AttributeError) as error:
        raise cannot_read(folder / "config.json", error) from None
    writes, ticks = (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    if kind == "timm_wrapper" or not kind:
        raise UserError(
            Message(
                "{model}: this is a timm model, which is not supported; choose a model with an architecture of "
                "transformers",
                model=model,
            )
        )
    if kind not in CONFIG_MAPPING_NAMES:
        raise UserError(
            Message(
                "{model}: transformers {version} does not know its architecture {kind}; code that comes with a "
                "model is never run",
                model=model,
                kind=repr(kind),
                version=transformers.__version__,
            )
        )
    if not writes and not ticks:
        raise UserError(
            Message(
                "{model}: a {kind} model does not describe images; choose a vision-language model or a tagger",
                model=model,
                kind=kind,
            )
        )
    return kind


class _Writer(Captioner):
    """A model that writes text about an image."""

    def __init__(self, folder: Path, kind: str, settings: Settings, device: str, dtype: torch.dtype):
        self.settings, self.kind, self.device, self.dtype = settings, kind, device, dtype
        self.writes_tags = settings.kind == "tags"
        _refuse_unused(settings, {"prompt", "max_tokens", "dtype"} | (USED_FOR_TAGS if self.writes_tags else set()))
        if kind == "florence2" and settings.kind == "tags":
            raise UserError(Message("{model}: Florence-2 writes sentences; use --kind text", model=settings.model))
        self.processor = _load_processor(folder, kind)
        self.tokenizer = self.processor.tokenizer
        self.model = _load_whole(transformers.AutoModelForImageTextToText, folder, dtype).to(device)
        self.answers_only = bool(self.model.config.is_encoder_decoder)
        # Decoder-only models continue right after the question, so questions of different lengths are padded on the
        # left.
        self.tokenizer.padding_side = "right" if self.answers_only else "left"
        self.chats = bool(
            getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        )

    def make_question(self) -> str | None:
        """Return the question for each image; None for no question."""
        asked = self.settings.prompt
        if self.kind == "florence2":
            return asked or FLORENCE_TASK
        if not self.chats:
            return asked or None  # BLIP and similar models continue a given beginning
        content = [
            {"type": "image"},
            {"type": "text", "text": asked or PROMPTS["tags" if self.writes_tags else "text"]},
        ]
        template = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        chat = [{"role": "user", "content": content}]
        return template.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    @torch.inference_mode()
    def describe(self, pictures: list[Image.Image]) -> list[str]:
        question = self.make_question()
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
        return [self._clean(text) for text in self.tokenizer.batch_decode(out, skip_special_tokens=True)]

    def _clean(self, answer: str) -> str:
        """Return an answer as a caption: on one line, each tag once."""
        line = _flatten(answer)
        if not self.writes_tags:
            return line
        return _join_tags((tag.strip(" .\"'`") for tag in line.split(",")), self.settings.exclude)


def _load_whole(Model: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Load a model and require all of its weights: transformers fills missing ones with random numbers."""
    model, loading_info = Model.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    learned = {name for name, _ in model.named_parameters()}  # not buffers, which each version computes anew
    if lost := sorted(learned.intersection(loading_info["missing_keys"])):
        raise lacks_weights(folder, type(model).__name__, len(lost), first_few(lost))
    return model.eval()


def _load_processor(folder: Path, kind: str) -> Any:
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


class _OnnxTagger(Captioner):
    """A WD tagger."""

    def __init__(self, folder: Path, settings: Settings):
        _check_tagger(settings, {"character_threshold", "rating"})
        self.settings = settings
        self.tagger = wd_tagger.WdTagger(folder, settings.model)
        self.device, self.warnings = self.tagger.device, self.tagger.warnings
        self.limits = wd_tagger.Limits(settings.threshold, settings.character_threshold, settings.rating)

    def describe(self, pictures: list[Image.Image]) -> list[str]:
        space = (lambda tag: tag) if self.settings.keep_underscores else replace_underscores
        tags = self.tagger.choose_tags(pictures, self.limits)
        return [_join_tags(map(space, names), self.settings.exclude) for names in tags]


class _Classifier(Captioner):
    """An image classifier of transformers that gives each label an independent probability."""

    def __init__(self, folder: Path, settings: Settings, device: str, dtype: torch.dtype):
        self.settings, self.device, self.dtype = settings, device, dtype
        _check_tagger(settings, {"dtype"})
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.problem_type != "multi_label_classification":
            raise UserError(
                Message(
                    "{model}: it sorts images into one of {count} classes and cannot write tags (its config has no "
                    "problem_type = 'multi_label_classification')",
                    model=settings.model,
                    count=config.num_labels,
                )
            )
        self.names = [config.id2label[i] for i in range(config.num_labels)]
        self.processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.model = _load_whole(transformers.AutoModelForImageClassification, folder, dtype).to(device)

    @torch.inference_mode()
    def describe(self, pictures: list[Image.Image]) -> list[str]:
        inputs = self.processor(images=pictures, return_tensors="pt").to(self.device, self.dtype)
        rows = self.model(**inputs).logits.float().sigmoid()
        return [_join_tags(self._choose(row), self.settings.exclude) for row in rows]

    def _choose(self, probabilities: torch.Tensor) -> Iterator[str]:
        """Yield the tags from the threshold on, most probable first."""
        for index in probabilities.argsort(descending=True).tolist():
            if probabilities[index] < self.settings.threshold:
                return
            name = self.names[index]
            yield name if self.settings.keep_underscores else replace_underscores(name)


def raise_problems(result: Result, folder: Path) -> None:
    """Raise UserErrors if images were left without a caption."""
    if result.problems:
        where = Plural(
            "{folder}: {count} caption written, images without", "{folder}: {count} captions written, images without"
        )
        raise UserErrors(result.problems, where(folder=folder, count=result.written))
