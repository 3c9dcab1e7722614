"""A family's released model without its files, for estimates of a base model whose host cannot be asked.

`Released` behaves like the family of a downloaded base as far as memory and sizes go: the denoiser is that of
`reference_config` (or of a known base of another size), the VAE that of `_published`, and text encoders are counted
from `text_millions`. The few configs that families read are put into a folder in the user's cache, which is named after
their content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import settings
from ..errors import Message
from . import _components, _published
from .base import ModelFamily
from .sources import BaseDescription, known_bases
from .sources.known_bases import KnownBase

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]

TOKENS = {"CLIPTokenizer": 77}
"""Tokens that a tokenizer's encoder reads where the family states none; other encoders read `MOST_TOKENS`."""
MOST_TOKENS = 512
CHARACTERS = 4
"""Characters of a token, about, in the texts that templates put around a prompt."""


def make(
    Family: type[ModelFamily],
    model: settings.Model,
    base: BaseDescription,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> ModelFamily:
    """Return a family object with the released sizes, and with a warning that says so.

    Args:
        Family: the family that the job names.
        model: the job's `[model]` table.
        base: what is known of the base; its reference chooses among the released sizes.
        device, dtype: see `ModelFamily`.
    """
    return type("Released", (Released, Family), {})(model, device=device, dtype=dtype, base=base)


def find_known(Family: type[ModelFamily], base: BaseDescription) -> KnownBase | None:
    """Return the known base that stands for this one: itself, or else the family's usual one; None without any."""
    own = known_bases.get(base.reference.repo)
    if own and own.family == Family.name:
        return own
    return next(iter(known_bases.list_of_family(Family.name)), None)


class Released(ModelFamily):
    """What is known of a released model without its files; made together with a family by `make`."""

    def __init__(
        self,
        model: settings.Model,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        prediction: str = "auto",
        zero_snr: bool = False,
        base: BaseDescription | None = None,
    ):
        import torch

        assert base is not None
        self.device, self.dtype = torch.device(device), dtype
        self.read_text_settings(model)
        self.has_training_adapter = bool(model.training_adapter)
        self.given_prediction, self.given_zero_snr = prediction, zero_snr
        self.bases, self.known = (base,), find_known(type(self), base)
        self.checkpoint = self.vae = self._text_pipeline = self._file = None
        self.absent, self._header, self._part_files, self._tokenizers = {}, {}, {}, {}
        self.folder = _components.write_configs(self.name, _list_configs(type(self), self.known), {})
        what = self.known.title if self.known else self.title
        note = Message(
            "model.path = {name} could not be looked up ({why}). This estimate uses the published sizes of {title}; "
            "the files of your base model may differ",
            name=repr(model.path),
            why=base.unanswered,
            title=what,
        )
        self.warnings = [note, *self.list_caveats()]

    def get_base_name(self) -> str:
        """Return the name of the base that could not be looked up."""
        reference = self.bases[0].reference
        return (reference.file or reference.repo or reference.name).rpartition("/")[2]

    def count_missing_bytes(self) -> int:
        """Return the published bytes of all weights."""
        return self.known.total_bytes if self.known else 0

    def check_parts(self) -> None:
        """Check nothing: there are no files."""

    def read_file_scale(self) -> str:
        """Return "": released models are not quantized."""
        return ""

    def compute_encoder_identity(self, what: str) -> str:
        """Return a name that no files have, so that nothing in a cache counts as encoded."""
        return f"{what} of the released {self.name}"

    def count_vae_bytes(self) -> int:
        """Return the bytes that the released VAE takes in memory."""
        return 4 * sum(parameter.numel() for parameter in self.make_empty_vae().parameters())

    def count_encoder_bytes(self) -> dict[str, int]:
        """Return the bytes of the largest text encoder, by its published number of parameters."""
        return {"largest": count_text_bytes(type(self), self.text_storage, self.known)}

    def _make_text_config(self, name: str, config_class: Any) -> Any:
        """Return the published config of a text encoder."""
        return config_class(**self.published[name])

    def load_tokenizer(self, name: str) -> Any:
        """Return what counts tokens roughly, with the released tokenizer's limit."""
        kind = self.text_parts[name].rpartition(".")[2]
        return _Counter(self.prompt_tokens or TOKENS.get(kind, MOST_TOKENS), is_clip=kind in TOKENS)


def _find_largest_text(base: KnownBase) -> float:
    return max(size for part, size in base.gigabytes.items() if part.startswith("text_encoder"))


class _Counter:
    """Stands for a tokenizer: its limit, and about how many tokens a template has."""

    def __init__(self, limit: int, *, is_clip: bool):
        self.model_max_length = TOKENS["CLIPTokenizer"] if is_clip else limit

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str) -> list[int]:
        return [0] * (len(text) // CHARACTERS)

    def apply_chat_template(self, messages: list[Config], **options: Any) -> str:
        return "\0"


def _list_configs(Family: type[ModelFamily], known: KnownBase | None) -> dict[str, Config]:
    """Return the configs that families read, by their path in a diffusers folder."""
    sizes = {entry: None if value == "" else value for entry, value in (known.sizes if known else {}).items()}
    scheduler = Family.published.get("scheduler") or _published.choose_scheduler(Family.objective)
    return {
        Family.index_name: {"_class_name": Family.pipeline_class, **Family.published.get("index", {})},
        f"{Family.denoiser_name}/config.json": {**Family.reference_config, **sizes},
        "scheduler/scheduler_config.json": scheduler,
        "vae/config.json": _published.find_released_vae(Family),
    }


def count_text_bytes(Family: type[ModelFamily], storage: str, known: KnownBase | None = None) -> int:
    """Return the bytes of a family's largest text encoder in this storage; `known` may have another one than usual."""
    from ..precision import Format

    everything, embeddings = (num * 10**6 for num in Family.text_millions)
    size = 2 * everything
    if storage != "none":
        side = 4096
        form = Format(storage, settings.SCALES[storage][0])
        size = 2 * embeddings + (everything - embeddings) * form.count_bytes((side, side)) // side**2
    usual = next(iter(known_bases.list_of_family(Family.name)), None)
    if known and usual and known.sizes:
        size = round(size * _find_largest_text(known) / _find_largest_text(usual))
    return size
