"""Text encoders that are trained beside the denoiser: their adapters, and the conditioning of each batch, made live.

Without `adapter.text_encoder` prompts are encoded once, into the cache, and the encoders leave the memory. With it the
CLIPs of `family.trained_text` stay, frozen and in the model's dtype, with a LoRA beside every linear of their layers,
and answer each batch's captions anew, with the gradient that the denoiser hands back. What they do not say (T5's
embeddings of SD 3 and FLUX.1, the sizes of SDXL) is the cache's, as ever; so are the order of the data and what is
drawn for a sample. Previews and the proof ask the encoders as they are at that step.

Shape suffixes: B batch.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from . import adapters, config
from .families.base import CLIP_LAYERS, Cond, ModelFamily
from .layouts import text_layer


class TextEncoders:
    """The text encoders of a job that trains them.

    Attributes:
        pipeline: diffusers' pipeline with them and their tokenizers, whose way of asking them it is.
        encoders: by the pipeline's names.
    """

    def __init__(self, family: ModelFamily, section: config.Adapter, seed: int) -> None:
        """Load them and inject their adapters.

        Args:
            section: `targets` and `ranks` are of the denoiser, and not read.
            seed: with the layers' names, keys the start values.
        """
        self.family = family
        self.pipeline = family.trained_text_pipeline()
        self.encoders: dict[str, nn.Module] = {name: getattr(self.pipeline, name) for name in family.trained_text}
        self.injected = inject_(self.encoders, family, section, seed)

    def checkpoint_(self) -> None:
        """Recompute activations in the backward pass, as `memory.apply_` has the denoiser do."""
        for encoder in self.encoders.values():
            checkpoint_(encoder)

    def num_bytes(self) -> int:
        """Held by them while training, adapters left out."""
        return sum(
            parameter.nbytes
            for encoder in self.encoders.values()
            for parameter in encoder.parameters()
            if not parameter.requires_grad
        )

    def lines(self) -> list[str]:
        """For people: what they hold."""
        held = f"{self.num_bytes() / 2**20:.1f} MiB and what their backward pass needs"
        return [f"text encoders that stay loaded: {', '.join(self.encoders)} ({held})"]

    def train(self, mode: bool = True) -> None:
        for encoder in self.encoders.values():
            encoder.train(mode)

    def cond(self, prompts: Sequence[str], cond: Cond) -> Cond:
        """A batch's conditioning with what they say of its prompts now, and the gradient of that.

        Args:
            cond: the same batch's from the cache, collated.
        """
        return _encode(self.family, self.pipeline, prompts, cond)

    def answers(self, prompts: Sequence[str], conds: Sequence[Cond]) -> list[Cond]:
        """As `answers`: of these encoders as they are now."""
        return answers(self.family, self.pipeline, prompts, conds)


def inject_(
    encoders: Mapping[str, nn.Module], family: Any, section: config.Adapter, seed: int
) -> list[adapters.InjectReport]:
    """Adapters beside the linears of these text encoders, by the pipeline's names."""
    section = section.model_copy(update={"targets": [], "ranks": []})
    return [
        adapters.inject(encoder, section, adapted_layers(family, name, encoder), seed, called=partial(text_layer, name))
        for name, encoder in encoders.items()
    ]


def checkpoint_(encoder: nn.Module) -> None:
    old = getattr(encoder, "gradient_checkpointing_enable", None)  # its name until transformers 5.23
    getattr(encoder, "activation_checkpointing_enable", old)({"use_reentrant": False})


def answers(family: ModelFamily, pipeline: Any, prompts: Sequence[str], conds: Sequence[Cond]) -> list[Cond]:
    """What a pipeline's text encoders say of prompts, one by one as the cache has it, without gradient and dropout.

    Args:
        conds: of the same prompts, from the cache.
    """
    found = []
    for prompt, cond in zip(prompts, conds, strict=True):
        batch = answer(family, pipeline, [prompt], {name: tensor[None] for name, tensor in cond.items()})
        found.append({name: tensor[0] for name, tensor in batch.items()})
    return found


@torch.no_grad()
def answer(family: ModelFamily, pipeline: Any, prompts: Sequence[str], cond: Cond) -> Cond:
    """As `TextEncoders.cond`, of any pipeline with the family's text encoders: no gradient, no dropout, on the CPU."""
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
    with _silent_tokenizers():  # the cache has told of prompts that are too long
        return family.encode_with(pipeline, list(prompts), cond)


def adapted_layers(family: Any, name: str, encoder: nn.Module) -> list[str]:
    """Full names, in the encoder, of the layers that get an adapter."""
    ends = tuple(f".{end}" for end in CLIP_LAYERS)
    found = [path for path, module in encoder.named_modules() if path.endswith(ends) and isinstance(module, nn.Linear)]
    numbers = sorted({_layer_number(path) for path in found})
    unread = family.trained_text[name].unread
    read = set(numbers[: len(numbers) - unread])
    return [path for path in found if _layer_number(path) in read]


def _layer_number(path: str) -> int:
    return int(path.partition("encoder.layers.")[2].partition(".")[0])


class Adapted(nn.Module):
    """A denoiser and the text encoders beside it as one model, for `adapters`: each layer is called as in LoRA files.

    The denoiser's by their own names, the text encoders' by `layouts.text_layer`.
    """

    def __init__(self, denoiser: nn.Module, encoders: dict[str, nn.Module]) -> None:
        super().__init__()
        self.denoiser, self.encoders = denoiser, nn.ModuleDict(encoders)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.denoiser.named_modules(*args, **kwargs)
        for name, encoder in self.encoders.items():
            for path, module in encoder.named_modules(*args, **kwargs):
                yield text_layer(name, path), module


def problem(section: config.Adapter, Family: type[ModelFamily]) -> str:
    """Why this family cannot train what the section asks for; "" where it can."""
    if section.text_encoder and section.type != "lora":
        return (
            "adapter.text_encoder = true: text encoders are trained as LoRA only, and adapter.type is "
            f"{section.type!r}; use adapter.type = 'lora', or false"
        )
    if not section.text_encoder or Family.trained_text:
        return ""
    return (
        f"adapter.text_encoder = true: no LoRA of {Family.title}'s text encoder is read by diffusers, so none is "
        "trained; use false"
    )


@contextmanager
def _silent_tokenizers() -> Iterator[None]:
    """Inside, diffusers' pipelines do not warn of prompts that they cut: asked at every step they would each time."""
    logger = logging.getLogger("diffusers.pipelines")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
