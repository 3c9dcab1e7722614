"""The metadata of a LoRA file: what programs and hosts read, and what is told about the run.

No date, absolute path or user name is among them. Sources: ModelSpec 1.0.1 (Stability AI), kohya-ss/sd-scripts'
metadata."""

import hashlib
import json
import math
import os
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomlkit

from .. import __version__, settings
from ..errors import Message, UserError
from .safetensors_file import read_header

MAX_TAGS = 200  # per folder in ss_tag_frequency: clients show two dozen, and headers must stay small
MAX_TAG_BYTES = 256 << 10  # for all folders: whole sentences count as tags, and SDXL's layers take 0.5 MB of the header


@dataclass(frozen=True)
class FolderFacts:
    """A dataset folder, as the file's metadata describe it.

    Attributes:
        name: path of the folder; only its last part is written.
        num_images: images used, not counting repeats.
        repeats: how often each image is used per epoch.
        tags: tag -> number of captions that contain it.
    """

    name: str
    num_images: int
    repeats: float = 1
    tags: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def count(cls, name: str, captions: Iterable[str], repeats: float = 1, separator: str = ",") -> "FolderFacts":
        """Return the facts of a folder, counting the tags of its captions (one caption per image)."""
        captions = list(captions)
        tags = Counter(tag.strip() for caption in captions for tag in caption.split(separator) if tag.strip())
        return cls(name, len(captions), repeats, dict(tags))


@dataclass(frozen=True)
class ExportFacts:
    """Facts about a run for the file's metadata. All of them are written into a file that is meant to be published.

    Attributes:
        name: the job's name; gives the file name, and the title if the config has none.
        steps: optimizer steps done.
        rank: LoRA rank.
        alpha: LoRA alpha, as in the config (before any scaling).
        rank_stabilized: True if the layers are scaled by alpha / sqrt(rank).
        rank_factor: the file's rank as a multiple of `rank`.
        learning_rate: learning rate of the training, after scaling.
        text_encoder_lr: learning rate of the text encoders' adapters; None if they were not trained.
        learning_rate_factor: factor on the configured learning rate for the base's storage.
        seed: the job's seed.
        resolution: (width, height) in pixels.
        folders: the dataset.
        batch_size: images per optimizer step, accumulation included.
        optimizer, schedule, warmup_steps: as in the config.
        storage: storage of the frozen base ("fp8", "none", ...).
        mixed_precision: "bf16" or "no".
        base_name: the base model; of a path, only the last part is written.
        base_hash: sha256 hex over the base's denoiser files.
        architecture: ModelSpec name of the given model's architecture; empty: the family's usual one.
        kind: kind of adapter: "lora", "dora", "lokr", "loha", "oft".
        kind_settings: entries of `ss_network_args` about the kind.
        prediction_type: "epsilon" or "v_prediction"; None for flow matching.
        trigger: the trigger word.
        tags: ModelSpec tags.
        objective: the job's `[objective]` table.
        dropout, max_grad_norm, scale_weight_norms, caption_dropout: as in the config.
        caption_tokens: tokens of the longest caption that is read whole; 0 if `model.caption_tokens` has no effect.
        clip_skip: as in the config; 0 if it has no effect.
        buckets: {(width, height): images}.
        config_toml: the resolved config; of absolute paths, only the last part is written.
        suffix: end of the file name, such as "-best", which the name in programs has too.
    """

    name: str
    steps: int
    rank: int
    alpha: float
    learning_rate: float
    seed: int
    resolution: tuple[int, int]
    learning_rate_factor: float = 1.0
    text_encoder_lr: float | None = None
    architecture: str = ""
    kind: str = "lora"
    kind_settings: Mapping[str, str] = field(default_factory=dict)
    rank_stabilized: bool = False
    rank_factor: int = 1
    folders: tuple[FolderFacts, ...] = ()
    batch_size: int = 1
    optimizer: str = ""
    schedule: str = ""
    warmup_steps: int = 0
    storage: str = ""
    mixed_precision: str = "bf16"
    base_name: str = ""
    base_hash: str = ""
    prediction_type: str | None = None
    trigger: str = ""
    tags: tuple[str, ...] = ()
    dropout: float = 0.0
    objective: settings.Objective = field(default_factory=settings.Objective)
    max_grad_norm: float = 0.0
    scale_weight_norms: float = 0.0
    caption_dropout: float = 0.0
    caption_tokens: int = 0
    clip_skip: int = 0
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    config_toml: str = ""
    suffix: str = ""

    @property
    def alpha_in_file(self) -> float:
        """Return the alpha of layers of the rank `rank_in_file`, for programs that all compute alpha / rank."""
        alpha = self.alpha * math.sqrt(self.rank) if self.rank_stabilized else self.alpha
        return alpha * self.rank_factor

    @property
    def rank_in_file(self) -> int:
        """Return the rank of the file's layers."""
        return self.rank * self.rank_factor

    @property
    def output_name(self) -> str:
        """Return the file name without layout and extension."""
        return make_slug(self.name) + self.suffix


def make_slug(name: str) -> str:
    """Return a file name that every shell, host and prompt syntax accepts: letters, digits, `.`, `_`, `-`.

    Letters of every script are kept, but for accents of Latin letters. It has at most 160 bytes.
    """
    plain = "".join(map(_without_accent, unicodedata.normalize("NFKC", name)))
    plain = "".join(letter if letter in "._-" or unicodedata.category(letter)[0] in "LNM" else "/" for letter in plain)
    plain = re.sub("/+", "-", plain).strip("-._")[:80].strip("-._")
    plain = plain.encode()[:160].decode(errors="ignore").strip("-._")  # a file name has at most 255 bytes
    return plain or "lora-" + hashlib.sha256(name.encode()).hexdigest()[:8]


def _without_accent(letter: str) -> str:
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return plain or letter


COMFYUI = "https://github.com/comfyanonymous/ComfyUI"
IMPLEMENTATIONS = {  # kohya naming -> ModelSpec's identifier for the source of the module names
    "native": COMFYUI,
    "diffusers_underscored": "diffusers",
    "sgm_unet": "https://github.com/Stability-AI/generative-models",
    "bfl_flux": "https://github.com/black-forest-labs/flux",
}


def find_implementation(family: Any, layout: str) -> str:
    """Return ModelSpec's identifier for the source of the module names in a file of this layout."""
    return {"diffusers": "diffusers", "comfy": COMFYUI}.get(layout) or IMPLEMENTATIONS[family.kohya_naming]


LYCORIS = {"lokr": "lokr", "loha": "loha", "oft": "diag-oft"}
"""Kinds of adapter of LyCORIS -> its name of the algorithm."""


def choose_network_module(family: Any, kind: str) -> str:
    """Return kohya's name of the module that trains this kind of adapter."""
    if kind in LYCORIS:
        return "lycoris.kohya"
    return family.kohya_module


def is_alpha_baked(layout: str, kind: str) -> bool:
    """Return True if alpha / rank is multiplied into the weights of such a file, which then has no alpha."""
    return layout == "diffusers" or (layout == "comfy" and kind not in LYCORIS)


LOADING = (  # what a program needs to recognize the file and use it
    *("format", "modelspec.sai_model_spec", "modelspec.architecture", "modelspec.implementation", "modelspec.title"),
    *("modelspec.resolution", "modelspec.prediction_type", "ss_network_module", "ss_network_dim", "ss_network_alpha"),
    *("ss_base_model_version", "ss_v2", "ss_clip_skip", "lora_fp8_layout"),
)
OWN_WORDS = (  # what authors write about the LoRA, and the base; nothing about images and settings
    *("modelspec.implementation_version", "modelspec.author", "modelspec.description", "modelspec.license"),
    *("modelspec.trigger_phrase", "modelspec.tags", "ss_network_args", "ss_output_name", "ss_sd_model_name"),
    *("ss_resolution", "ss_training_comment", "lora_fp8_version", "lora_fp8_alpha", "lora_fp8_base_hash"),
    "lora_fp8_rank_stabilized",
)
LEVELS = {"none": LOADING, "private": (*LOADING, *OWN_WORDS)}


def build_metadata(family: Any, section: settings.Export, facts: ExportFacts, layout: str) -> dict[str, str]:
    """Return a file's metadata: ModelSpec, the `ss_*` keys of kohya that clients read, and the config.

    There is no date, path or user name in it. `section.metadata` decides how much is written; `write_file` adds the
    hashes at every level.
    """
    width, height = facts.resolution
    tags = [*facts.tags, *(tag for tag in dict.fromkeys(("lora", facts.kind)) if tag not in facts.tags)]
    epoch_size = round(sum(folder.num_images * folder.repeats for folder in facts.folders))
    epochs = math.ceil(facts.steps * facts.batch_size / epoch_size) if epoch_size else 0
    folders = _name_folders(facts.folders)
    written: dict[str, Any] = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{facts.architecture or family.modelspec_architecture}/lora",
        "modelspec.implementation": find_implementation(family, layout),
        "modelspec.implementation_version": f"lora_fp8/{__version__}",
        "modelspec.title": section.title or facts.name,
        "modelspec.resolution": f"{width}x{height}",
        "modelspec.author": section.author,
        "modelspec.description": section.description,
        "modelspec.license": section.license,
        "modelspec.trigger_phrase": facts.trigger,
        "modelspec.tags": ", ".join(tags),
        "modelspec.prediction_type": (facts.prediction_type or "").replace("v_prediction", "v"),
        "ss_network_module": choose_network_module(family, facts.kind),
        "ss_network_dim": facts.rank_in_file,
        # If the scaling is multiplied into the weights, the file behaves as with alpha = rank: a program that reads
        # alpha here must not scale a second time.
        "ss_network_alpha": float(facts.rank_in_file) if is_alpha_baked(layout, facts.kind) else facts.alpha_in_file,
        "ss_network_args": _to_json(facts.kind_settings),
        "ss_network_dropout": facts.dropout,
        "ss_base_model_version": family.kohya_base_version,
        "ss_v2": str(family.kohya_base_version.startswith("sd_v2")),  # A1111 sorts by it
        "ss_output_name": facts.output_name,
        "ss_sd_model_name": get_basename(facts.base_name),
        "ss_learning_rate": facts.learning_rate,
        "ss_unet_lr": facts.learning_rate,
        "ss_text_encoder_lr": "" if facts.text_encoder_lr is None else facts.text_encoder_lr,
        "ss_optimizer": facts.optimizer,
        "ss_lr_scheduler": facts.schedule,
        "ss_lr_warmup_steps": facts.warmup_steps,
        "ss_steps": facts.steps,
        "ss_max_train_steps": facts.steps,
        "ss_epoch": epochs,
        "ss_num_epochs": epochs,
        "ss_num_train_images": epoch_size,
        "ss_total_batch_size": facts.batch_size,
        "ss_resolution": f"({width}, {height})",
        "ss_seed": facts.seed,
        "ss_mixed_precision": facts.mixed_precision,
        "ss_fp8_base": str(facts.storage == "fp8"),
        "ss_max_grad_norm": facts.max_grad_norm,
        "ss_scale_weight_norms": facts.scale_weight_norms or "",
        **_describe_noise(facts.objective),
        "ss_caption_dropout_rate": facts.caption_dropout,
        # Programs offer the file's clip skip to their users; without a setting, sd-scripts writes "None".
        "ss_clip_skip": facts.clip_skip or "",
        "ss_max_token_length": facts.caption_tokens or "",
        "ss_training_comment": section.description,
        "ss_dataset_dirs": _to_json(
            {name: {"n_repeats": f.repeats, "img_count": f.num_images} for name, f in folders.items()}
        ),
        "ss_tag_frequency": _format_tag_frequency(folders),
        "ss_bucket_info": _format_bucket_info(facts.buckets),
        "ss_enable_bucket": str(bool(facts.buckets)),
        "lora_fp8_version": __version__,
        "lora_fp8_layout": layout,
        "lora_fp8_storage": facts.storage,
        "lora_fp8_alpha": facts.alpha,
        "lora_fp8_rank_stabilized": "True" if facts.rank_stabilized else "",
        "lora_fp8_learning_rate_factor": facts.learning_rate_factor,
        "lora_fp8_base_hash": facts.base_hash,
        "lora_fp8_config": without_paths(facts.config_toml),
    }
    kept_keys = LEVELS.get(section.metadata, tuple(written))
    return {key: str(value) for key, value in written.items() if value != "" and key in kept_keys}


def _describe_noise(section: settings.Objective) -> dict[str, Any]:
    """Return sd-scripts' keys of noise and loss weights; "" for what is off there is left out."""
    weighs = section.weighting != "debiased"
    return {
        "ss_min_snr_gamma": (weighs and section.min_snr_gamma) or "None",
        "ss_debiased_estimation": "" if weighs else "True",
        "ss_noise_offset": section.noise_offset or "",
        "ss_multires_noise_iterations": section.pyramid_noise or "",
        "ss_multires_noise_discount": section.pyramid_discount if section.pyramid_noise else "",
        "ss_ip_noise_gamma": section.input_noise or "",
        "ss_zero_terminal_snr": "True" if section.zero_terminal_snr else "",
    }


def read_config(path: Path) -> str:
    """Return the config that a LoRA file was trained with, as TOML; of paths only the last part is left.

    Raises:
        UserError: it is not a safetensors file, or holds no config.
    """
    config = read_header(path).metadata.get("lora_fp8_config")
    if not config:
        raise UserError(
            Message(
                "{path}: the file contains no config (another program wrote it, or export.metadata was not public)",
                path=path,
            )
        )
    return config


def _format_bucket_info(buckets: Mapping[tuple[int, int], int]) -> str:
    """Return buckets with the number of their images, as JSON."""
    rows = [{"resolution": list(size), "count": count} for size, count in sorted(buckets.items())]
    return _to_json({"buckets": {str(i): row for i, row in enumerate(rows)}})


def _name_folders(folders: tuple[FolderFacts, ...]) -> dict[str, FolderFacts]:
    """Return the folders by the last part of their path; a second folder of the same name gets a number."""
    named: dict[str, FolderFacts] = {}
    for folder in folders:
        name, number = get_basename(folder.name), 2
        while name in named:
            name, number = f"{get_basename(folder.name)} ({number})", number + 1
        named[name] = folder
    return named


def _format_tag_frequency(folders: Mapping[str, FolderFacts]) -> str:
    """Return as many of each folder's most frequent tags as fit, as JSON; "" if not even one each fits."""
    most = MAX_TAGS
    while most:
        text = _to_json({name: _select_frequent(folder.tags, most) for name, folder in folders.items()})
        if len(text.encode()) <= MAX_TAG_BYTES:
            return text
        most //= 2
    return ""


def _select_frequent(tags: Mapping[str, int], most: int) -> dict[str, int]:
    return dict(sorted(tags.items(), key=lambda item: (-item[1], item[0]))[:most])


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=False)


HOMES = re.compile(r"(?:(?:/home|/Users|[A-Za-z]:[\\/]Users)[\\/][^\\/]+|~[^\\/]*)[\\/]*")
"""Matches home folders, whose last part is a user's name."""


def get_basename(path: str) -> str:
    """Return the last part of any system's path, "~" for a home folder; a hub id `owner/name` loses its owner."""
    if HOMES.fullmatch(path) or (path and os.path.abspath(os.path.expanduser(path)) == os.path.expanduser("~")):
        return "~"
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] if path.rstrip("\\/") else ""


@lru_cache(maxsize=8)
def without_paths(toml: str) -> str:
    """Return a config without comments, in which paths outside the job's folder are reduced to their last part.

    Absolute paths of any system, `~/...`, file URLs and `../...` reveal the machine and often its owner.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list):
            return [clean(item) for item in value]
        if isinstance(value, str) and "\n" not in value:
            leads_out = re.match(r"/|~|[A-Za-z]:[\\/]|\\\\|file:", value) or ".." in re.split(r"[\\/]", value)
            return get_basename(value) if leads_out else value
        return value

    return tomlkit.dumps(clean(tomllib.loads(toml))) if toml else ""
