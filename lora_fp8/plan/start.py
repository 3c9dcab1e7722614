"""Read the LoRA files that a job names, as a part of the Plan.

A training starts from that of `adapter.init_from`; that of `model.training_adapter` acts beneath the one being trained.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import adapters, families
from ..adapters import kinds
from ..errors import Message, UserError, first_few, looked_for
from ..families.base import ModelFamily
from ..lora_files import export, layer_names, layouts
from ..settings import Adapter, Job
from .disk_budget import Named


def read_start_values(job: Job, family: ModelFamily, trainable: Named) -> dict[str, Tensor]:
    """Read the tensors of `adapter.init_from`.

    Args:
        trainable: the tensors of the job's adapters, for their names and shapes.

    Returns:
        Parameter name -> float32 tensor, at the job's scaling; {} without `adapter.init_from`.

    Raises:
        UserError: there is no such file, or its base model, kind, rank or layers differ from the job's.
    """
    section = job.adapter
    if not section.init_from:
        return {}
    where = f"adapter.init_from = {section.init_from!r}"
    tensors, scaling, layers = _read(section.init_from, where, family)
    file_kinds = {kinds.detect_kind(parts, layer) for layer, parts in layers.items()}
    if file_kinds != {section.type}:
        kind = " and ".join(sorted(file_kinds))
        raise UserError(
            Message(
                "{key}: this is a {kind}, but adapter.type is {type}; set adapter.type = {other}",
                key=where,
                kind=kind,
                type=repr(section.type),
                other=repr(kind),
            )
        )
    shapes = {name: parameter.shape for name, parameter in trainable}
    layers = {layer: parts for layer, parts in layers.items() if not _is_unread(layer, parts, shapes, family)}
    names = family.choose_adapter_layers(family.outline, section.targets)
    job_ranks = adapters.assign_ranks(section, names)[0]
    _check_ranks(layers, job_ranks, section, where)
    _check_layers(layers, job_ranks, section, family, where)
    own = kinds.compute_scalings(tensors, section)
    values = {
        f"{layer}.{part}": tensor.float() * (scaling[layer] / own[layer] if part in kinds.ZERO_AT_START else 1)
        for layer, parts in layers.items()
        for part, tensor in parts.items()
    }
    misfits = [name for name, value in values.items() if shapes.get(name) != value.shape]
    if misfits:
        raise UserError(
            Message(
                "{key}: the file does not fit this base model: {count} tensors have no matching layer or another "
                "shape, {names}",
                key=where,
                count=len(misfits),
                names=first_few(misfits),
            )
        )
    return values


def read_training_adapter(job: Job, family: ModelFamily) -> export.Adapter | None:
    """Read the LoRA of `model.training_adapter`; None without one.

    Raises:
        UserError: there is no such file, it is no LoRA for this base, or it changes text encoders.
    """
    given = job.model.training_adapter
    if not given:
        return None
    where = f"model.training_adapter = {given!r}"
    tensors, scaling, layers = _read(given, where, family)
    if text := [layer for layer in layers if layer_names.find_text_encoder(layer, family)]:
        raise UserError(
            Message(
                "{key}: the file changes text encoders ({names}), but a training adapter can change the denoiser only",
                key=where,
                names=first_few(text),
            )
        )
    if misfits := layouts.find_misfits(tensors, family):
        raise UserError(
            Message(
                "{key}: {count} of its {total} layers are missing in this base model or have another size, such as "
                "{names}",
                key=where,
                count=len(misfits),
                total=len(layers),
                names=first_few(misfits),
            )
        )
    return export.Adapter(tensors, scaling)


def _read(given: str, where: str, family: ModelFamily) -> "tuple[dict[str, Tensor], dict[str, float], Layers]":
    """Read a LoRA file in internal naming.

    Args:
        given: its path, as the user wrote it.
        where: beginning of the messages.
        family: the base model.

    Returns:
        Its tensors, alpha / rank of each layer, and the tensors by layer.

    Raises:
        UserError: there is no such file, or it is no LoRA of this family.
    """
    path = Path(os.path.expanduser(given))
    if not path.is_file():
        raise UserError(looked_for(path, Message("{setting}: this file does not exist", setting=where)))
    other = ""
    try:
        held, metadata = export.read_adapter(path)
        other = families.read_family_name(metadata)
        tensors, scaling = layouts.from_layout(held, family, family.read_denoiser_config())
        return tensors, scaling, kinds.group_by_layer(tensors)
    except UserError as error:
        if other in ("", family.name):
            raise UserError(Message("{key}: {line}", key=where, line=error)) from None
        raise UserError(
            Message(
                "{key}: this LoRA is for {theirs}, but the base model is {ours}",
                key=where,
                theirs=families.get(other).title,
                ours=family.title,
            )
        ) from None


def _is_unread(layer: str, parts: Mapping[str, Tensor], shapes: Mapping[str, Any], family: ModelFamily) -> bool:
    """Return True for a layer of a text encoder that changes nothing and gets no adapter here.

    sd-scripts writes all layers of a text encoder, also those behind the one that is read (SDXL, `model.clip_skip`).
    """
    return (
        bool(layer_names.find_text_encoder(layer, family))
        and not any(f"{layer}.{part}" in shapes for part in parts)
        and not any(tensor.any() for part, tensor in parts.items() if part in kinds.ZERO_AT_START)
    )


Layers = dict[str, dict[str, Tensor]]
"""The tensors of an adapter: layer -> part -> tensor."""


def _check_ranks(layers: Layers, job_ranks: dict[str, int], section: Adapter, where: str) -> None:
    """Check that the file's layers have the ranks of the job.

    Args:
        layers: the file's tensors.
        job_ranks: rank of each trained layer of the denoiser.
        section: the job's `[adapter]` table, whose rank applies to all other layers.
        where: beginning of the message.

    Raises:
        UserError: a layer has another rank.
    """
    file_ranks = {layer: kinds.read_rank(parts) for layer, parts in layers.items() if kinds.has_rank(parts)}
    wrong = {layer: rank for layer, rank in file_ranks.items() if rank != job_ranks.get(layer, section.rank)}
    if wrong and section.ranks:
        layer, rank = next(iter(wrong.items()))
        raise UserError(
            Message(
                "{setting}: {layer} has rank {rank}, but adapter.rank and adapter.ranks give {own}; {count} layers "
                "differ",
                setting=where,
                rank=rank,
                layer=layer,
                own=job_ranks.get(layer, section.rank),
                count=len(wrong),
            )
        )
    if ranks := sorted(set(wrong.values())):
        raise UserError(
            Message(
                "{setting}: the file has rank {ranks}, but adapter.rank is {own}; set adapter.rank to it, or bring "
                "the file to one rank with `lora-fp8 resize FILE --rank {own} --uniform`",
                setting=where,
                ranks=", ".join(map(str, ranks)),
                own=section.rank,
            )
        )


def _check_layers(layers: Layers, job_ranks: dict[str, int], section: Adapter, family: ModelFamily, where: str) -> None:
    """Check that the job trains all of the file's layers; arguments as in `_check_ranks`.

    Raises:
        UserError: it does not train some of them, which would be lost.
    """
    untrained = [layer for layer in layers if layer not in job_ranks]
    if section.text_encoder:  # their layers are checked when the encoders are loaded
        untrained = [layer for layer in untrained if not layer_names.find_text_encoder(layer, family)]
    if untrained:
        raise UserError(
            Message(
                "{setting}: the file has layers that are not trained here, {names}, and would be lost; leave "
                "adapter.targets and adapter.ranks empty, or set adapter.text_encoder = true for those of text "
                "encoders",
                setting=where,
                names=first_few(untrained),
            )
        )
