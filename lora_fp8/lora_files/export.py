"""Writes and reads LoRA files. `layouts` decides the names of the tensors, `export_metadata` the header.

File names are `<slug>_<layout>.safetensors`, where the slug is the job's name without accents and without characters
that are special in prompts and shells; the metadata keep the full name. The step with the lowest held-out loss is
`<slug>-best_<layout>.safetensors`: the plain name is that of the last step, as with kohya and OneTrainer, so that what
fetches a finished LoRA by its name gets the same as before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..adapters import kinds
from ..common.text import quote
from ..common.writing import make_folder
from ..errors import Message, RunFailure, Template, UserError, first_few
from ..precision.dtypes import DTYPES
from . import header as adapter_header
from .export_metadata import ExportFacts, build_metadata
from .layouts import (
    rename_kohya_halves,
    to_layout,
)
from .safetensors_file import read, write_file

KEPT_WIDE = (".alpha", ".lora_magnitude_vector")
"""Suffixes of tensors that are float32 in every file. alpha is a setting; DoRA's magnitudes scale whole rows of the
base, which bf16 would change by 0.4 %."""
MAX_HEADER = 1 << 20  # bytes; hosts refuse large headers, ours are far smaller


@dataclass(frozen=True)
class Adapter:
    """A trained adapter.

    Attributes:
        state: tensors in internal naming (see `layouts`).
        scaling: alpha / rank, one for all modules or `{module path: scaling}`.
    """

    state: Mapping[str, Tensor]
    scaling: Mapping[str, float] | float = 1.0


def write(
    adapter: Adapter,
    family: Any,
    denoiser_config: Mapping[str, Any],
    section: settings.Export,
    facts: ExportFacts,
    folder: Path,
) -> list[Path]:
    """Write the trained adapter, one file per layout in `section.formats`.

    Args:
        adapter: the adapter.
        family: the ModelFamily or its class (its naming and identifiers are read).
        denoiser_config: the denoiser's diffusers config.
        section: the job's `[export]` table.
        facts: facts about the run for the metadata.
        folder: created if it is missing; files of the same name are replaced as a whole.

    Returns:
        The files, in the order of `section.formats`.

    Raises:
        RunFailure: the adapter holds NaN or infinity, was never trained (B is zero), or does not fit fp16.
        UserError: the kohya layout has no name for a trained module.
    """
    _refuse_broken(adapter.state, Message("the trained adapter"), section.dtype)
    make_folder(folder)
    contents = {}
    for layout in dict.fromkeys(section.formats):  # all layouts are prepared before any is written
        tensors = to_layout(adapter.state, adapter.scaling, family, denoiser_config, layout)
        dtype = DTYPES[section.dtype]
        contents[layout] = {k: v if k.endswith(KEPT_WIDE) else v.to(dtype) for k, v in tensors.items()}
        name = Message("the {layout} file in {dtype}", layout=layout, dtype=section.dtype)
        _refuse_broken(contents[layout], name, section.dtype)
    paths = []
    for layout, tensors in contents.items():
        path = folder / f"{facts.output_name}_{layout}.safetensors"
        write_file(path, tensors, build_metadata(family, section, facts, layout), hashes=True)
        paths.append(path)
    return paths


UNREAD = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
"""Dtypes of scales and of packed weights, with which torch cannot compute."""


def read_adapter(path: Path, *, sound: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file that should be an adapter, as `read` does.

    alpha in the header (see `header`) becomes tensors and is removed from the metadata: code that writes these tensors
    again writes alpha with them, or has multiplied it into the weights.

    Args:
        path: the file.
        sound: refuse an adapter that has no effect or is broken. False: only describe the file, accept broken ones.

    Raises:
        UserError: also if tensors cannot belong to an adapter: they are empty, of integers, an alpha that is not a
            single number, or have unprintable names. With `sound`, also for NaN, infinity, and an alpha of 0 in all
            layers.
    """
    tensors, metadata = read(path)
    words = {rename_kohya_halves(name): tensor for name, tensor in tensors.items()}
    try:
        tensors |= adapter_header.read_alphas(words, metadata, kinds.ALL_PARTS)
    except UserError as error:
        raise UserError(Message("{key}: {line}", key=path, line=error)) from None
    metadata.pop(adapter_header.KEY, None)
    for what, wrong in _find_unusable(tensors).items():
        if wrong:
            raise UserError(
                Message(
                    "{path}: the file cannot be used as a LoRA, because it has {what}: {names}",
                    path=path,
                    what=what,
                    names=first_few([quote(name) for name in sorted(wrong)]),
                )
            )
    if sound:
        _check_sound(tensors, path)
    return tensors, metadata


def _find_unusable(tensors: Mapping[str, Tensor]) -> dict[Message, list[str]]:
    """Return the names of the tensors that cannot belong to an adapter, by what is wrong with them."""
    alphas = {name: tensor for name, tensor in tensors.items() if name.endswith(".alpha")}
    weights = {name: tensor for name, tensor in tensors.items() if name not in alphas}
    return {
        Message("names that cannot be printed"): [name for name in tensors if not name.isprintable()],
        Message("empty tensors"): [name for name, tensor in tensors.items() if not tensor.numel()],
        Message("an alpha that is not a single number"): [
            n for n, alpha in alphas.items() if alpha.numel() > 1 or alpha.is_complex()
        ],
        Message("whole or complex numbers"): [
            name for name, weight in weights.items() if not weight.is_floating_point()
        ],
        Message("numbers of an unsupported type"): [name for name, tensor in tensors.items() if tensor.dtype in UNREAD],
    }


def _check_sound(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Check that an adapter has an effect.

    Raises:
        UserError: it holds NaN or infinity, or alpha is 0 in all layers.
    """
    if wrong := find_nonfinite(tensors):
        raise UserError(
            Message(
                "{path}: the file cannot be used as a LoRA, because it has NaN or infinity: {names}",
                path=path,
                names=first_few([quote(name) for name in wrong]),
            )
        )
    alphas = [tensor for name, tensor in tensors.items() if name.endswith(".alpha")]
    if alphas and not any(map(float, alphas)):
        raise UserError(Message("{path}: alpha is 0 in all layers, so the file has no effect", path=path))


def find_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the tensors that hold NaN or infinity."""
    # torch.isfinite does not support every float8 dtype.
    wide = ((name, tensor.float() if tensor.dtype.itemsize == 1 else tensor) for name, tensor in tensors.items())
    return sorted(name for name, tensor in wide if not torch.isfinite(tensor).all())


def _refuse_broken(tensors: Mapping[str, Tensor], what: Message, dtype: str) -> None:
    """Raise RunFailure for NaN, infinity or B of zero; `what` names the adapter or the file."""
    if wrong := find_nonfinite(tensors):
        template = Template("{name} has NaN or infinity in {names}")
        if dtype == "fp16":
            template = Template("{name} has NaN or infinity in {names}; write it in bf16 or fp32 (export.dtype)")
        raise RunFailure(template(name=what, names=first_few(wrong)))
    is_up = (".lora_up.weight", *(f".{part}" for part in kinds.ZERO_AT_START))
    wrong = sorted(name for name, tensor in tensors.items() if name.endswith(is_up) and not tensor.any())
    if wrong:
        raise RunFailure(
            Message(
                "{name} is zero in {names}: these layers were never trained, so the file would have no effect there",
                name=what,
                names=first_few(wrong),
            )
        )
    if not any(name.endswith(is_up) for name in tensors):
        raise RunFailure(Message("{name} is empty: there is nothing to write", name=what))
