"""The cache: every image and caption is encoded once, and again only when something about it changes.

One entry is one safetensors file, `<root>/<kind>/<key[:2]>/<key>.safetensors`, with kind "latents" or "conds". The key
is the SHA-256 of everything that the content depends on: the bytes of the image and how it is cropped, or the text of
the caption (and the control images that its encoder sees); the identity of the encoder's files; the dtypes; the version
of the preprocessing below. Nothing therefore has to be invalidated: an edited image has another key and is encoded, all
others keep theirs. Entries of several runs and families share one folder. An unused entry does no harm and stays until
the user asks `prune` to delete it: no run can know what the others will need, so the only sign is the time of last use,
which is the file's mtime.

Every entry is verified: its header has its key and the SHA-256 of its tensors. `fill` looks at the header and the
size, as reading all of a large cache takes minutes, and encodes an entry again that is truncated or has another key.
`latents` and `cond` look at the content too. They refuse an entry that is damaged, and delete it, so that the next
`fill` encodes it again. Entries are written to a temporary file with a unique name and then renamed, so two runs (or
machines) may fill one cache at the same time: they write the same content.

Images and captions are encoded one by one: in a batch, the last bits of one result would depend on its neighbours, and
editing one image would change others.

Clips are encoded as images are, each piece as a whole; its frame numbers are part of the key.

A mask is not encoded, but it is cropped, mirrored and reduced to the size of its image's latents, which the VAE
decides. It is therefore an entry too, of kind "latents".

Shape legend: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import tempfile
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from .. import settings
from ..common import system
from ..common.reading import open_regular, read_bytes
from ..common.writing import write_synced
from ..errors import Message, RunFailure, UserError, reason
from . import clips
from .buckets import UNCHANGED, Placed, compute_control_box, fit, fit_mask, has_same_shape
from .decoding import ImageError, open_image, open_mask, read_clip
from .examples import Control, Example
from .image_edits import ImageEdit

if TYPE_CHECKING:
    from ..families._prompts import Overlong
from .caption_variants import list_dataset_captions, warn_of_truncation
from .prompts import ControlCrop, Prompt, get_text

PREPROCESSING_VERSION = 2
"""Increase it when the same file or text reaches the encoders as other pixels or tokens: it is part of every key."""

METADATA = "lora_fp8"
"""Key in the header of an entry; its value is JSON with kind, key and sha256."""

MOST_HEADER = 1 << 20
"""Largest header of an entry that is read, in bytes; ours have less than a thousand."""

USE_NOTED_EVERY = 3600
"""Minimum seconds between two updates of an entry's time of last use, so that not every read costs a write."""

TEMPORARY_AGE = 3600
"""Seconds after which the writer of a temporary file is taken to have exited."""


def convert_clip(frames: Sequence[Image.Image]) -> Tensor:
    """Convert RGB images of one size to (1, 3, F, H, W) float32 in [-1, 1]."""
    return torch.stack([convert_image(frame) for frame in frames], dim=2)


def convert_image(image: Image.Image) -> Tensor:
    """Convert an RGB image to (1, 3, H, W) float32 in [-1, 1]."""
    values_HWC = torch.from_numpy(np.array(image, dtype=np.uint8))
    return values_HWC.permute(2, 0, 1)[None].to(torch.float32) / 127.5 - 1


class BadEntry(Exception):
    """An entry that failed verification; the message says why."""


@dataclass(frozen=True)
class FillReport:
    """What `fill` did, and which texts are too long for the text encoder.

    Attributes:
        encoded: number of entries that were made.
        reused: number of entries that were there and valid.
        bytes: bytes written.
        texts: number of different captions and prompts that were asked for.
        truncated: the texts whose end the text encoder does not read, cached or not.
    """

    encoded: int
    reused: int
    bytes: int
    texts: int
    truncated: tuple[Overlong, ...] = ()

    def list_warnings(self) -> list[str]:
        """Return the warnings for the user; [] if there are none."""
        return warn_of_truncation(self.truncated, self.texts)


@dataclass(frozen=True)
class Missing:
    """The entries that have to be encoded; False if there are none.

    Attributes:
        images: (image, mirrored).
        captions: captions and prompts.
        reused: number of entries that are there and valid.
        controls: (control image, mirrored).
        masks: (image that the mask belongs to, mirrored).
    """

    images: list[tuple[Placed, bool]]
    captions: list[str | Prompt]
    reused: int
    controls: list[tuple[ControlCrop, bool]]
    masks: list[tuple[Placed, bool]]

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def count(self) -> int:
        """Return the number of entries to encode."""
        return len(self.images) + len(self.captions) + len(self.controls) + len(self.masks)


class Cache:
    """Encoded examples of one family and dataset section.

    Args:
        root: the cache folder; created when the first entry is written.
        family: encode_images, encode_prompts, overlong and encoder_identity are used. If something is missing, `fill`
            loads the VAE and then the text encoders, and frees each.
        section: `[dataset]`: background, flip and control_resolution are read.
        dtype: floating-point tensors are stored in it.
        ram_bytes: entries stay in RAM up to this many bytes; the least recently used are dropped first.
    """

    def __init__(
        self,
        root: str | Path,
        family: Any,
        section: settings.Dataset,
        dtype: torch.dtype = torch.float32,
        *,
        ram_bytes: int = 2 << 30,
    ):
        self.root, self.family, self.section, self.dtype = Path(os.path.expanduser(root)), family, section, dtype
        self.ram_bytes = ram_bytes
        self._ram: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._ram_used = 0
        self._verified: set[str] = set()
        self._identities: dict[str, str] = {}
        self._video: tuple[tuple[Any, ...], clips.Reader] | None = None
        self._clip: tuple[tuple[Any, ...], list[Image.Image]] | None = None
        self._image: tuple[tuple[Path, str], Image.Image] | None = None

    # keys

    def _make_key(self, kind: str, **parts: Any) -> str:
        what = "vae" if kind == "latents" else "text"
        if what not in self._identities:
            self._identities[what] = self.family.compute_encoder_identity(what)
        about = {
            "kind": kind,
            "family": self.family.name,
            "encoder": self._identities[what],
            # The precision that the encoder computes in, and the one that its result is stored in.
            "encoder_dtype": str(self.family.dtype),
            "dtype": str(self.dtype),
            "preprocessing": PREPROCESSING_VERSION,
            **parts,
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def make_image_key(self, placed: Placed, flipped: bool) -> str:
        """Return the key of the latents of an image or a clip."""
        placement, frames = placed.placement, placed.example.frames
        return self._make_key(
            "latents",
            **({"frames": frames} if frames else {}),
            image=placed.example.image_sha256,
            bucket=placement.bucket_wh,
            resized=placement.resized_wh,
            crop=placement.crop_xy,
            background=self.section.background.lower(),
            flip=flipped,
            **placed.change.key_parts,
        )

    def make_control_key(self, control: ControlCrop, flipped: bool) -> str:
        """Return the key of a control image's latents."""
        return self._make_key(
            "latents",
            control=control.control.sha256,
            box=control.box,
            size=control.size,
            background=self.section.background.lower(),
            flip=flipped,
            **control.change.key_parts,
        )

    def make_mask_key(self, placed: Placed, flipped: bool) -> str:
        """Return the key of the mask of an image that has one."""
        placement, mask = placed.placement, placed.example.mask
        return self._make_key(
            "latents",
            mask=mask.sha256,
            alpha=mask.alpha,
            bucket=placement.bucket_wh,
            resized=placement.resized_wh,
            crop=placement.crop_xy,
            flip=flipped,
            **replace(placed.change, colour=()).key_parts,
        )

    def make_caption_key(self, caption: str | Prompt) -> str:
        """Return the key of a caption's conditioning."""
        if isinstance(caption, str):
            return self._make_key("conds", caption=caption)
        return self._make_key(
            "conds",
            caption=caption.text,
            seen=[
                (control.control.sha256, control.box, *([control.change.key_parts] if control.change.key_parts else []))
                for control in caption.seen
            ],
            background=self.section.background.lower(),
            flip=caption.flipped,
        )

    # prompts

    def make_prompt(self, text: str, controls: Sequence[ControlCrop], flipped: bool = False) -> str | Prompt:
        """Return what the conditioning of a text depends on: the text, and any control images that its encoder sees."""
        return Prompt(text, tuple(controls), flipped) if self.family.prompts_see_controls else text

    def list_prompts(self, placed: Sequence[Placed], seed: int) -> list[str | Prompt]:
        """Return all prompts that training may ask for: see `list_dataset_captions`."""
        if not self.family.prompts_see_controls:
            return list(list_dataset_captions([image.example for image in placed], self.section, seed))
        prompts: dict[str | Prompt, None] = {}
        for image in placed:
            controls = self.list_control_crops(image)
            for text in list_dataset_captions([image.example], self.section, seed):
                prompts.update((self.make_prompt(text, controls, flipped), None) for flipped in self._list_flips())
        return list(prompts)

    # control images

    def list_control_crops(self, placed: Placed) -> tuple[ControlCrop, ...]:
        """Return the control images of an example, with the crop and size that the denoiser gets."""
        asked = self.section.control_resolution
        controls = []
        for control in placed.example.controls:
            whole_size = control.width, control.height
            usual = compute_control_box(placed.usual or placed.placement, whole_size)
            cut = usual[2] - usual[0], usual[3] - usual[1]
            size = self.family.compute_control_size(*cut, None if asked == "auto" else asked)
            follows = has_same_shape(placed.placement.original_wh, whole_size)
            change = placed.change if follows else UNCHANGED
            controls.append(ControlCrop(control, compute_control_box(placed.placement, whole_size), size, change))
        return tuple(controls)

    def _list_flips(self) -> tuple[bool, ...]:
        return (False, True) if self.section.flip else (False,)

    def get_entry_path(self, kind: str, key: str) -> Path:
        """Return the path of an entry, whether or not it exists."""
        return self.root / kind / key[:2] / f"{key}.safetensors"

    # filling

    def find_missing(self, placed: Sequence[Placed], captions: Sequence[str | Prompt]) -> Missing:
        """Return the entries that do not exist, are not whole, or are of another key (each is looked at once)."""
        if self._identities or any(self.root.glob("*/*/*.safetensors")):
            return self._find_missing(placed, captions)
        # The cache is empty, whatever the encoders are: their large files need not be hashed to find that out.
        self._identities = {"vae": "any", "text": "any"}
        try:
            return self._find_missing(placed, captions)
        finally:
            self._identities = {}

    def _find_missing(self, placed: Sequence[Placed], captions: Sequence[str | Prompt]) -> Missing:
        flips = self._list_flips()
        images = {self.make_image_key(image, flipped): (image, flipped) for image in placed for flipped in flips}
        all_controls = [control for image in placed for control in self.list_control_crops(image)]
        controls = {
            self.make_control_key(control, flipped): (control, flipped) for control in all_controls for flipped in flips
        }
        masked = [image for image in placed if image.example.mask is not None]
        masks = {self.make_mask_key(image, flipped): (image, flipped) for image in masked for flipped in flips}
        texts = {self.make_caption_key(caption): caption for caption in captions}
        images_left = [images[key] for key in images if not self._has_entry("latents", key)]
        controls_left = [controls[key] for key in controls if not self._has_entry("latents", key)]
        masks_left = [masks[key] for key in masks if not self._has_entry("latents", key)]
        texts_left = [texts[key] for key in texts if not self._has_entry("conds", key)]
        asked = len(images) + len(controls) + len(masks) + len(texts)
        left = len(images_left) + len(controls_left) + len(masks_left) + len(texts_left)
        return Missing(images_left, texts_left, asked - left, controls_left, masks_left)

    def fill(
        self,
        placed: Sequence[Placed],
        captions: Sequence[str | Prompt],
        log: Callable[[int, int], None] | None = None,
    ) -> FillReport:
        """Encode what is missing, image by image and caption by caption. Several processes may do so at the same time.

        Args:
            placed: the examples with their buckets.
            captions: texts from `prompts`, and any others that are needed (previews).
            log: called with (done, total) after every entry, and whenever a text encoder is given a caption.

        Returns:
            What was done, and which texts are too long.

        Raises:
            UserError: the cache folder cannot be written.
            RunFailure: an encoder returned values that are not finite, or a file has changed since the scan; the
                message names it.
        """
        self._remove_leftovers()
        missing = self.find_missing(placed, captions)
        total, done, written = missing.count, 0, 0
        if missing:
            self._check_place()
        if missing.images or missing.controls:
            self.family.load_vae()
        for image, flipped in missing.images:
            written += self._store("latents", self.make_image_key(image, flipped), self._encode_image(image, flipped))
            done += 1
            if log:
                log(done, total)
        self._leave_video()
        for control, flipped in missing.controls:
            written += self._store(
                "latents", self.make_control_key(control, flipped), self._encode_control(control, flipped)
            )
            done += 1
            if log:
                log(done, total)
        if missing.images or missing.controls:
            self.family.free_encoders()  # free the VAE before the text encoders are loaded
        for image, flipped in missing.masks:  # after the images, whose latents give the size
            written += self._store("latents", self.make_mask_key(image, flipped), self._reduce_mask(image, flipped))
            done += 1
            if log:
                log(done, total)

        def encode_caption(caption: str | Prompt) -> dict[str, Tensor]:
            if log:  # also before an entry is done: each text encoder is given a caption in turn
                log(done, total)
            return self._encode_caption(caption)

        if missing.captions:
            for number, cond in self.family.encode_in_turn(
                [partial(encode_caption, caption) for caption in missing.captions]
            ):
                written += self._store("conds", self.make_caption_key(missing.captions[number]), cond)
                done += 1
                if log:
                    log(done, total)
            self.family.free_encoders()
        self._image = None
        # Done each time, as tokenizing is fast: a second run warns again though everything is cached.
        texts = list(dict.fromkeys(map(get_text, captions)))
        truncated = tuple(self.family.find_overlong(texts))
        return FillReport(done, missing.reused, written, len(texts), truncated)

    @torch.no_grad()
    def _encode_image(self, placed: Placed, flipped: bool) -> dict[str, Tensor]:
        example = placed.example
        if example.frames:
            pictures = self._read_placed_clip(placed)
        else:
            picture = self._open_image(example.path, example.image_sha256, example.edit)
            pictures = [fit(picture, placed.placement, placed.change)]
        if flipped:
            pictures = [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for picture in pictures]
        values = convert_image(pictures[0]) if len(pictures) == 1 else convert_clip(pictures)
        return {"latents": self._encode_latents(values, example.path)}

    @torch.no_grad()
    def _encode_control(self, control: ControlCrop, flipped: bool) -> dict[str, Tensor]:
        image = self._open_control(control)
        image = image.resize(control.size, Image.Resampling.LANCZOS)
        if flipped:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return {"latents": self._encode_latents(convert_image(image), control.control.path)}

    def _reduce_mask(self, placed: Placed, flipped: bool) -> dict[str, Tensor]:
        mask = placed.example.mask
        with self._unchanged(mask.path, mask.sha256, mask.edit) as raw:
            greys = fit_mask(open_mask(raw, mask.alpha, mask.edit), placed.placement, placed.change)
        if flipped:
            greys = greys.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mask_HW = torch.from_numpy(np.array(greys, dtype=np.float32)) / 255
        size = self.read_latents(placed, flipped).shape[-2:]
        return {"mask": functional.interpolate(mask_HW[None, None], size=tuple(size), mode="area")[0, 0]}

    def _open_image(self, path: Path, sha256: str, edit: ImageEdit) -> Image.Image:
        """Return a decoded image. It is kept, as its mirrored version and its variants come next."""
        about = path, sha256
        if self._image is None or self._image[0] != about:
            self._image = None  # free it before the next one is decoded
            with self._unchanged(path, sha256, edit) as raw:
                self._image = about, open_image(raw, self.section.background, edit)
        return self._image[1]

    def _open_control(self, control: ControlCrop) -> Image.Image:
        file, (left, top, right, bottom) = control.control, control.box
        image = self._open_image(file.path, file.sha256, file.edit)
        image = control.change.turn(image, ((left + right) / 2, (top + bottom) / 2), Image.Resampling.BICUBIC)
        return control.change.recolour(image.crop(control.box))

    @contextlib.contextmanager
    def _unchanged(self, path: Path, sha256: str, edit: ImageEdit) -> Iterator[io.BytesIO]:
        """Yield the bytes that the scan saw; an error inside the block becomes a RunFailure that names the file."""
        try:
            raw = read_bytes(path)
            # The scan's hash is part of the key; other bytes must not be stored under it.
            if edit.identify(hashlib.sha256(raw).hexdigest()) != sha256:
                raise _make_changed_error(path)
            yield io.BytesIO(raw)
        except (OSError, ImageError) as error:
            raise _make_lost_error(path, error) from error

    def _read_placed_clip(self, placed: Placed) -> list[Image.Image]:
        """Return the frames of a clip, cropped to its bucket. They are kept, as the mirrored version comes next."""
        example = placed.example
        about = (example.path, example.image_sha256, example.frames, placed.placement, placed.change)
        if self._clip is None or self._clip[0] != about:
            self._clip = None  # free them before the next ones are read
            frames = (example.edit.apply(frame) for frame in self._read_clip(example))
            self._clip = about, [fit(frame, placed.placement, placed.change) for frame in frames]
        return self._clip[1]

    def _read_clip(self, example: Example) -> list[Image.Image]:
        try:
            status = example.path.stat()
            about = (example.path, example.image_sha256, status.st_size, status.st_mtime_ns)
            if self._video is None or self._video[0] != about:
                self._leave_video()
                with open_regular(example.path) as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                    if example.edit.identify(sha256) != example.image_sha256:
                        raise _make_changed_error(example.path)
                self._video = about, clips.Reader(example.path)
            if example.path.suffix.lower() in clips.VIDEOS:
                return self._video[1].read(example.frames, example.begins)
            return read_clip(example.path, example.frames, self.section.background)
        except (OSError, ImageError, clips.ClipError) as error:
            raise _make_lost_error(example.path, error) from error

    def _leave_video(self) -> None:
        """Close the video that pieces were read from, and drop its frames."""
        if self._video is not None:
            self._video[1].close()
        self._clip = self._video = None

    def _encode_latents(self, values: Tensor, path: Path) -> Tensor:
        latents_BCHW = self.family.encode_images(values)
        if not torch.isfinite(latents_BCHW).all():
            raise RunFailure(
                Message(
                    "{path}: the VAE output is not finite. Some VAEs overflow in half precision: use model.dtype = "
                    "'fp32' or a repaired VAE; otherwise, the image or the VAE file is damaged",
                    path=path,
                )
            )
        return latents_BCHW[0]

    @torch.no_grad()
    def _encode_caption(self, caption: str | Prompt) -> dict[str, Tensor]:
        if isinstance(caption, str):
            (cond,) = self.family.encode_prompts([caption])
        else:
            pictures = [self._open_control(control) for control in caption.seen]
            if caption.flipped:
                pictures = [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for picture in pictures]
            (cond,) = self.family.encode_prompts([caption.text], [pictures])
        for name, tensor in cond.items():
            if not torch.isfinite(tensor).all():
                raise RunFailure(
                    Message(
                        "caption {text}: the text encoder output {name} is not finite",
                        text=repr(get_text(caption)),
                        name=name,
                    )
                )
        return cond

    def _store(self, kind: str, key: str, tensors: dict[str, Tensor]) -> int:
        """Write one entry. Return its size in bytes."""
        tensors = {
            name: tensor.detach()
            .to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype)
            .contiguous()
            .clone()
            for name, tensor in tensors.items()
        }
        # One value, as safetensors writes several in varying order: an entry that is made twice must have the same
        # bytes.
        about = json.dumps({"kind": kind, "key": key, "sha256": _hash(tensors)})
        data = safetensors.torch.save(tensors, {METADATA: about})
        path = self.get_entry_path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not `atomic_write`: its temporary name is unique on one machine only, and several machines may share a cache.
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            with write_synced(temporary) as file:
                file.write(data)
            system.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._verified.add(key)
        return len(data)

    def _check_place(self) -> None:
        """Raise UserError if entries cannot be written, before time goes into making them."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.root).close()  # an unnamed file, so that nothing stays behind
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # `train` reports a full disk
                raise
            raise UserError(
                Message(
                    "dataset.cache_dir = {path}: the folder cannot be written ({reason}), but encoded images and "
                    "captions are saved there; name another folder",
                    path=repr(str(self.root)),
                    reason=reason(error),
                )
            ) from None

    def _remove_leftovers(self) -> None:
        """Delete temporary files of writers that were killed. Recent ones may belong to a run that is filling now."""
        for temporary in self.root.glob("*/*/.*.tmp"):
            if not _TEMPORARY.fullmatch(temporary.relative_to(self.root).as_posix()):
                continue  # a cache may be in a folder that has other things in it
            try:
                if time.time() - temporary.stat().st_mtime > TEMPORARY_AGE:
                    temporary.unlink(missing_ok=True)
            except FileNotFoundError:
                continue

    # reading

    def _has_entry(self, kind: str, key: str) -> bool:
        """Return True if an entry is there, whole and of this key; its content is verified when it is read."""
        if key in self._verified:
            return True
        path = self.get_entry_path(kind, key)
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, MOST_HEADER)))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
                whole = os.fstat(file.fileno()).st_size == 8 + size + max(ends)
                good = whole and json.loads(header["__metadata__"][METADATA])["key"] == key
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            return False  # what is not there or damaged is encoded again
        if good:
            _record_use(path)
            self._verified.add(key)
        return good

    def _read(self, kind: str, key: str) -> dict[str, Tensor]:
        """Read an entry and verify it. Raises FileNotFoundError or BadEntry."""
        path = self.get_entry_path(kind, key)
        data = path.read_bytes()
        try:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            about = json.loads(header["__metadata__"][METADATA])
            promised = about["key"], about["sha256"]
            tensors = safetensors.torch.load(data)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise BadEntry(Message("{path} is damaged ({error})", path=path, error=error)) from error
        if promised != (key, _hash(tensors)):
            raise BadEntry(Message("{path} does not have the content that its header describes", path=path))
        _record_use(path)
        return tensors

    def _get(self, kind: str, key: str, what: str) -> dict[str, Tensor]:
        if key in self._ram:
            self._ram.move_to_end(key)
            return self._ram[key]
        try:
            tensors = self._read(kind, key)
        except FileNotFoundError:
            raise RunFailure(
                Message(
                    "{name} is no longer in the cache {path}; another program deleted it. Resume the run to encode "
                    "it again",
                    name=what,
                    path=self.root,
                )
            ) from None
        except BadEntry as error:
            with contextlib.suppress(OSError):  # in a cache that is read-only, the owner has to
                self.get_entry_path(kind, key).unlink(missing_ok=True)
            self._verified.discard(key)
            raise RunFailure(
                Message(
                    "the cache entry of {name} is damaged ({why}); resume the run to encode it again",
                    name=what,
                    why=error,
                )
            ) from error
        self._ram[key] = tensors
        self._ram_used += _count_bytes(tensors)
        while self._ram_used > self.ram_bytes and len(self._ram) > 1:
            _, oldest = self._ram.popitem(last=False)
            self._ram_used -= _count_bytes(oldest)
        return tensors

    def read_latents(self, placed: Placed, flipped: bool = False) -> Tensor:
        """Return the latents in the cache's dtype: (C, H, W) of an image in its bucket, (C, F, H, W) of a clip.

        The tensor must not be changed in place.
        """
        return self._get("latents", self.make_image_key(placed, flipped), str(placed.example.path))["latents"]

    def read_mask(self, placed: Placed, flipped: bool = False) -> Tensor | None:
        """Return the loss mask of an image at latent resolution, (H, W) in [0, 1]; None if it has no mask.

        The tensor must not be changed in place.
        """
        if placed.example.mask is None:
            return None
        return self._get("latents", self.make_mask_key(placed, flipped), str(placed.example.mask.path))["mask"]

    def read_controls(self, placed: Placed, flipped: bool = False) -> dict[str, Tensor]:
        """Return the latents (C, H, W) of an example's control images, named control_0, control_1, ..."""
        return {
            f"control_{i}": self._get("latents", self.make_control_key(control, flipped), str(control.control.path))[
                "latents"
            ]
            for i, control in enumerate(self.list_control_crops(placed))
        }

    def read_cond(self, caption: str | Prompt) -> dict[str, Tensor]:
        """Return the conditioning of a caption, without batch dimension. The tensors must not be changed in place."""
        name = Message("caption {text}", text=repr(get_text(caption)))
        return dict(self._get("conds", self.make_caption_key(caption), name))


def decode_preview_controls(controls: Sequence[Control], background: str) -> dict[str, Tensor]:
    """Decode the control images of a preview into the conditioning that `make_pipeline_inputs` reads.

    The pipeline gets the images and resizes them itself, as it will for everybody who uses the LoRA.

    Returns:
        control_picture_0, control_picture_1, ...: uint8 (H, W, 3).
    """
    opened = [np.array(open_image(control.path, background), dtype=np.uint8) for control in controls]
    return {f"control_picture_{i}": torch.from_numpy(picture) for i, picture in enumerate(opened)}


def _record_use(path: Path) -> None:
    """Set the entry's mtime to now, unless it is recent."""
    # The cache may be somebody else's and read-only, so that its entries grow old; and a prune may delete the entry
    # now.
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > USE_NOTED_EVERY:
            os.utime(path)


def _hash(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_TEMPORARY = re.compile(r"(latents|conds)/[0-9a-f]{2}/\.[0-9a-f]{32}\.tmp")


def _count_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _make_changed_error(path: Path) -> RunFailure:
    return RunFailure(Message("{path} changed while the run was starting; start the run again", path=path))


def _make_lost_error(path: Path, error: Exception) -> RunFailure:
    return RunFailure(Message("{path} can no longer be read: {why}", path=path, why=reason(error)))
