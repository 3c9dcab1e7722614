"""Training text encoders together with the denoiser: their adapters, and the conditioning computed for each batch.

Without `adapter.text_encoder`, prompts are encoded once, into the cache, and the encoders are freed. With it, the CLIPs
of `family.trained_text` stay in memory, frozen and in the model's dtype, with a LoRA on the linears of their layers.
They encode each batch's captions again and receive the denoiser's gradient. Conditioning that they do not compute (T5's
embeddings of SD 3 and FLUX.1, SDXL's sizes) still comes from the cache, and the order of the data and the random draws
are unchanged. Previews and verification use the encoders as they are at that step.

Shape suffixes: B batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import adapters, settings
from ..errors import Message
from ..families.base import CLIP_LAYERS, Cond, ModelFamily
from ..lora_files.layer_names import make_text_layer_name


class TextEncoders:
    """The text encoders of a job that trains them.

    Attributes:
        pipeline: diffusers pipeline with the encoders and their tokenizers, which encodes the prompts.
        encoders: the encoders by the pipeline's names.
        injected: reports of `adapters.inject`, one per encoder.
    """

    def __init__(self, family: ModelFamily, section: settings.Adapter, seed: int) -> None:
        """Load the encoders and inject their adapters.

        Args:
            family: family of the model.
            section: the job's `[adapter]` table; `targets` and `ranks` are for the denoiser and not used here.
            seed: keys the initial values, together with the layers' names.
        """
        self.family = family
        self.pipeline = family.make_trained_text_pipeline()
        self.encoders: dict[str, nn.Module] = {name: getattr(self.pipeline, name) for name in family.trained_text}
        self.injected = inject_(self.encoders, family, section, seed)

    def checkpoint_(self) -> None:
        """Recompute activations in the backward pass, as `memory.apply_` does for the denoiser."""
        for encoder in self.encoders.values():
            checkpoint_(encoder)

    def count_bytes(self) -> int:
        """Return the bytes that the encoders take while training, without their adapters."""
        return sum(
            parameter.nbytes
            for encoder in self.encoders.values()
            for parameter in encoder.parameters()
            if not parameter.requires_grad
        )

    def format_lines(self) -> list[str]:
        """Return a line for the log about the memory that they take."""
        return [
            Message(
                "text encoders that stay loaded: {names} ({size} MiB, plus the memory of their backward pass)",
                names=", ".join(self.encoders),
                size=f"{self.count_bytes() / 2**20:.1f}",
            )
        ]

    def train(self, mode: bool = True) -> None:
        """Switch all encoders to training or evaluation mode."""
        for encoder in self.encoders.values():
            encoder.train(mode)

    def encode(self, prompts: Sequence[str], cond: Cond) -> Cond:
        """Replace the trained encoders' part of a batch's conditioning with their present output, with gradient.

        Args:
            prompts: the batch's prompts.
            cond: the batch's collated conditioning from the cache.
        """
        return _encode(self.family, self.pipeline, prompts, cond)

    def encode_each(self, prompts: Sequence[str], conds: Sequence[Cond]) -> list[Cond]:
        """Encode as the function `encode_each` does, with these encoders as they are now."""
        return encode_each(self.family, self.pipeline, prompts, conds)


def inject_(
    encoders: Mapping[str, nn.Module], family: Any, section: settings.Adapter, seed: int
) -> list[adapters.InjectReport]:
    """Add adapters to the linears of these text encoders, given by the pipeline's names."""
    section = section.model_copy(update={"targets": [], "ranks": {}})
    return [
        adapters.inject(
            encoder,
            section,
            list_adapted_layers(family, name, encoder),
            seed,
            called=partial(make_text_layer_name, name),
        )
        for name, encoder in encoders.items()
    ]


def plan_tensors(
    encoders: Mapping[str, nn.Module], family: Any, section: settings.Adapter
) -> list[tuple[str, nn.Parameter]]:
    """Return the tensors that `inject_` would add to these text encoders, as they are named in a LoRA file."""
    section = section.model_copy(update={"targets": [], "ranks": {}})
    return [
        named
        for name, encoder in encoders.items()
        for named in adapters.plan_tensors(
            encoder, section, list_adapted_layers(family, name, encoder), called=partial(make_text_layer_name, name)
        )
    ]


def checkpoint_(encoder: nn.Module) -> None:
    """Switch on non-reentrant gradient checkpointing in a transformers model, in place."""
    name = "activation_checkpointing_enable"
    if not hasattr(encoder, name):
        name = "gradient_checkpointing_enable"  # its name until transformers 5.23
    getattr(encoder, name)({"use_reentrant": False})


def encode_each(family: ModelFamily, pipeline: Any, prompts: Sequence[str], conds: Sequence[Cond]) -> list[Cond]:
    """Encode prompts with a pipeline's text encoders, one by one as for the cache, without gradient and dropout.

    Args:
        family: family of the model.
        pipeline: holds the family's trained text encoders.
        prompts: the prompts.
        conds: conditioning of the same prompts from the cache.
    """
    encoded = []
    for prompt, cond in zip(prompts, conds, strict=True):
        batch = encode_batch(family, pipeline, [prompt], {name: tensor[None] for name, tensor in cond.items()})
        encoded.append({name: tensor[0] for name, tensor in batch.items()})
    return encoded


@torch.no_grad()
def encode_batch(family: ModelFamily, pipeline: Any, prompts: Sequence[str], cond: Cond) -> Cond:
    """Encode as `TextEncoders.encode` does, with any pipeline: no gradient, no dropout, result on the CPU."""
    encoders = [getattr(pipeline, name) for name in family.trained_text]
    were_training = [encoder.training for encoder in encoders]
    try:
        for encoder in encoders:
            encoder.eval()
        return {name: tensor.cpu() for name, tensor in _encode(family, pipeline, prompts, cond).items()}
    finally:
        for encoder, was_training in zip(encoders, were_training, strict=True):
            encoder.train(was_training)


def _encode(family: ModelFamily, pipeline: Any, prompts: Sequence[str], cond: Cond) -> Cond:
    with _silent_tokenizers():  # prompts that are too long were reported when the cache was filled
        return family.encode_with(pipeline, list(prompts), cond)


def list_adapted_layers(family: Any, name: str, encoder: nn.Module) -> list[str]:
    """Return the full names, in the encoder, of the layers that get an adapter."""
    ends = tuple(f".{end}" for end in CLIP_LAYERS)
    paths = [path for path, module in encoder.named_modules() if path.endswith(ends) and isinstance(module, nn.Linear)]
    numbers = sorted({_parse_layer_number(path) for path in paths})
    unread = family.trained_text[name].unread + family.clip_skip - 1
    read = set(numbers[: len(numbers) - unread])
    return [path for path in paths if _parse_layer_number(path) in read]


def _parse_layer_number(path: str) -> int:
    return int(path.partition("encoder.layers.")[2].partition(".")[0])


class Adapted(nn.Module):
    """A denoiser and its text encoders as one model for `adapters`, whose layers are named as in LoRA files.

    The denoiser's layers keep their own names; those of text encoders follow `layer_names.make_text_layer_name`.
    """

    def __init__(self, denoiser: nn.Module, encoders: dict[str, nn.Module]) -> None:
        super().__init__()
        self.denoiser, self.encoders = denoiser, nn.ModuleDict(encoders)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules of the denoiser, then those of the encoders under their names in a LoRA file."""
        yield from self.denoiser.named_modules(*args, **kwargs)
        for name, encoder in self.encoders.items():
            for path, module in encoder.named_modules(*args, **kwargs):
                yield make_text_layer_name(name, path), module


def find_problem(section: settings.Adapter, Family: type[ModelFamily]) -> str:
    """Return why this family cannot train what the section asks for; "" if it can."""
    if section.text_encoder and section.type != "lora":
        return Message(
            "adapter.text_encoder = true: text encoders can be trained as LoRA only, but adapter.type is {type}; "
            "use adapter.type = 'lora', or false",
            type=repr(section.type),
        )
    if not section.text_encoder or Family.trained_text:
        return ""
    return Message(
        "adapter.text_encoder = true: diffusers cannot read a LoRA of {title}'s text encoder, so it is not trained; "
        "use false",
        title=Family.title,
    )


@contextmanager
def _silent_tokenizers() -> Iterator[None]:
    """Hide diffusers' warnings about truncated prompts inside this context; otherwise they would come at every step."""
    logger = logging.getLogger("diffusers.pipelines")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
