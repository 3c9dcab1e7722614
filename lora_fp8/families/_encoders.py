"""The encoders of `ModelFamily`: its VAE, tokenizers and text encoders, from the model's files.

A VAE and text encoders stand in folders of their own, or in a single file beside the denoiser. diffusers' own
converters read those.
"""

from __future__ import annotations

import gc
import importlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint, create_diffusers_clip_model_from_ldm
from torch import Tensor, nn

from lora_fp8 import config
from lora_fp8.config import UserError, UserErrors
from lora_fp8.layouts import first_few, text_layer
from lora_fp8.precision import Format, name_matches, quantize_

from . import _files, _in_turn

MOST_TOKENS = 1 << 20
TEXT_PRECISE = ("lm_head", "text_projection", "visual")
"""Name parts of the layers of text encoders that are not quantized: outputs, which are small or unused."""


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside: loading a text encoder is not worth a bar in a training log."""
    logging = transformers.utils.logging
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


class Encoders:
    """Loading, and what it takes, one encoder at a time; and what tells one file of an encoder from another."""

    vae: nn.Module | None
    _text_pipeline: diffusers.DiffusionPipeline | None
    _tokenizers: dict[str, Any]

    def load_vae(self) -> None:
        """The VAE alone, which previews need for decoding."""
        if self.vae is not None:
            return
        cls = getattr(diffusers, self.vae_class)
        prefix = self._vae_prefix()
        if prefix:
            vae = _files.built(cls, self.folder / "vae" / "config.json")
            vae.load_state_dict(self._convert_vae(prefix, dict(vae.config)))  # copies, and so widens to float32
        else:
            vae = self._from_pretrained(cls, "diffusion_pytorch_model", "vae", dtype=torch.float32)
        self.vae = vae.to(self.device).eval().requires_grad_(False)

    def empty_vae(self) -> nn.Module:
        """The VAE on the meta device: all shapes, no memory."""
        cls = getattr(diffusers, self.vae_class)
        with torch.device("meta"):
            return _files.built(cls, self.folder / "vae" / "config.json").eval().requires_grad_(False)

    def check_parts(self) -> None:
        """That denoiser, scheduler, VAE, tokenizers and text encoders are what their configs say: as they will be
        loaded, but by their headers, without a weight being read. What a single file holds is seen when it is loaded.

        Raises:
            UserErrors: all that cannot be used, a line each.
        """
        tokenizers = [partial(self._check_limit, name) for name in self.text_parts if self._is_tokenizer(name)]
        encoders = [
            partial(self._from_pretrained, *self._text_class(name), name, device_map="meta")
            for name in self._text_encoders()
            if not self._has_text(name)
        ]
        problems = []
        for look in (self._check_denoiser, self._check_scheduler, self._check_vae_sizes, *tokenizers, *encoders):
            try:
                look()
            except UserError as error:
                problems += getattr(error, "problems", [str(error)])
        if problems:
            raise UserErrors(list(dict.fromkeys(problems))) if len(set(problems)) > 1 else UserError(problems[0])

    def tokenizer(self, name: str) -> Any:
        """One of the tokenizers of `text_parts`, or the processor that makes a picture ready for a text encoder: small,
        so it is loaded when first asked for and kept."""
        if name not in self._tokenizers:
            cls, folder = self._named_class(name), self.folder / name
            try:
                self._tokenizers[name] = cls.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # transformers and tokenizers raise many kinds for files that are not whole
                raise UserError(f"{folder} cannot be read ({_files.in_short(error)}); download it again") from error
        return self._tokenizers[name]

    def in_turn(self, asks: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
        """(number, what it returns) of each of these functions, which call `encode_prompts`, with one text encoder in
        memory at a time. They are called several times: see `_in_turn`. Needs nothing loaded."""
        encoders = self._text_encoders()
        turns = _in_turn.Turns(
            encoders,
            partial(self._load_text_part, storage=self.text_storage),
            _give_back_memory,
            self.device,
            self.dtype,
        )
        tokenizers = {name: self.tokenizer(name) for name in self.text_parts if self._is_tokenizer(name)}
        if len(encoders) > 1:
            self._text_pipeline = self._assemble(**tokenizers, **turns.standins)
            yield from turns.ask(asks)
        else:  # as it is, whatever the pipeline does with it
            (name,) = encoders
            self._text_pipeline = self._assemble(**tokenizers, **{name: turns.load(name)})
            yield from enumerate(ask() for ask in asks)

    def free_encoders(self) -> None:
        """Drop VAE and text encoders and give their memory back."""
        self.vae = self._text_pipeline = None
        _give_back_memory()

    @property
    def text_pipeline(self) -> diffusers.DiffusionPipeline:
        """The diffusers pipeline with the text encoders in it and no denoiser, for its `encode_prompt`."""
        if self._text_pipeline is None:
            raise RuntimeError("encode_prompts outside of in_turn")
        return self._text_pipeline

    def vae_bytes(self) -> int:
        """What the VAE takes, by its file's header."""
        prefix = self._vae_prefix()
        if prefix:
            vae = {k: v for k, v in self._header.items() if k.startswith(prefix)}
        else:
            (path, *_) = _files.weight_files(self.folder / "vae", "diffusion_pytorch_model")
            vae = _files.read_header(path)
        return sum(map(math.prod, vae.values())) * torch.float32.itemsize

    def text_bytes(self) -> dict[str, int]:
        """What each text encoder takes while captions are encoded, by the headers of their files."""
        found = {}
        for name in self._text_encoders():
            if self._has_text(name):
                headers = [{k: v for k, v in self._header.items() if k.startswith(self.checkpoint_text[name])}]
            else:
                headers = list(
                    map(_files.read_header, _files.weight_files(self.folder / name, self._text_class(name)[1]))
                )
            found[name] = sum(self._text_bytes(key, shape) for header in headers for key, shape in header.items())
        return found

    def _text_bytes(self, key: str, shape: tuple[int, ...]) -> int:
        """A tensor of a text encoder, as it is held."""
        is_linear = len(shape) == 2 and key.endswith(".weight") and not re.search("embed|shared|relative|wte|wpe", key)
        kept = any(name_matches(key.removesuffix(".weight"), part) for part in TEXT_PRECISE)
        if self.text_storage == "none" or not is_linear or kept:
            return math.prod(shape) * self.dtype.itemsize
        forms = [Format(self.text_storage, scale) for scale in config.SCALES[self.text_storage]]
        return next(form for form in forms if not form.problem(shape)).num_bytes(shape)

    def trained_text_parts(self) -> dict[str, Any]:
        """The text encoders that can be trained and their tokenizers, loaded anew, and not quantized."""
        pairs = [(encoder.replace("text_encoder", "tokenizer"), encoder) for encoder in self.trained_text]
        return {name: self._load_text_part(name, "none") for pair in pairs for name in pair}

    def empty_trained_text(self) -> dict[str, nn.Module]:
        """The text encoders of `trained_text` on the meta device, in the model's dtype: all shapes, no memory."""
        found = {}
        for name in self.trained_text:
            cls = self._text_class(name)[0]
            with torch.device("meta"):
                encoder = cls(cls.config_class.from_pretrained(self.folder / name, local_files_only=True))
            found[name] = encoder.to(self.dtype).requires_grad_(False)
        return found

    def trained_text_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, CPU tensor) of all that the text encoders of `trained_text` hold, one encoder at a time.

        Names are those of an adapter's modules with `.weight` or `.bias` behind.
        """
        for name in self.trained_text:
            for path, tensor in self._load_text_part(name, "none").state_dict().items():
                yield text_layer(name, path), tensor.cpu()

    def trained_text_pipeline(self) -> diffusers.DiffusionPipeline:
        """A pipeline of `trained_text_parts` and nothing else, for `encode_with`."""
        return self._assemble(**self.trained_text_parts())

    def encoder_identity(self, what: str) -> str:
        """SHA-256 over the files that decide what "vae" or "text" encoders answer: weights, configs, tokenizers."""
        if what == "vae":
            files = self._config_and_weights("vae", "diffusion_pytorch_model", from_checkpoint=bool(self._vae_prefix()))
        elif what == "text":
            files = []
            for name in self.text_parts:
                if self._is_tokenizer(name):
                    kinds = (".json", ".txt", ".jinja", ".model")  # a chat's template is part of what is encoded
                    found = sorted(p for p in (self.folder / name).iterdir() if p.suffix in kinds)
                    files += [(f"{name}/{p.name}", p) for p in found]
                else:
                    stem = self._text_class(name)[1]
                    files += self._config_and_weights(name, stem, from_checkpoint=self._has_text(name))
        else:
            raise ValueError(f"encoder_identity({what!r}): 'vae' or 'text'")
        digest = _files.digest(files)
        quantized = what == "text" and self.text_storage != "none"
        return f"{digest} {self.text_storage}" if quantized else digest

    def _is_tokenizer(self, name: str) -> bool:
        return "tokenizer" in name or name == "processor"

    def _text_encoders(self) -> list[str]:
        return [name for name in self.text_parts if not self._is_tokenizer(name)]

    def _text_class(self, name: str) -> tuple[Any, str]:
        """The class of a text part, and what its weights are called: some are networks of diffusers."""
        cls = self._named_class(name)
        return cls, "model" if issubclass(cls, transformers.PreTrainedModel) else "diffusion_pytorch_model"

    def _named_class(self, name: str) -> Any:
        module, _, wanted = self.text_parts[name].rpartition(".")
        if module:
            return getattr(importlib.import_module(module), wanted)
        return getattr(transformers if hasattr(transformers, wanted) else diffusers, wanted)

    def _load_text_part(self, name: str, storage: str) -> Any:
        if self._is_tokenizer(name):
            return self.tokenizer(name)
        cls, stem = self._text_class(name)
        if self._has_text(name):
            encoder = self._convert_text(cls, name)
        else:
            encoder = self._from_pretrained(cls, stem, name, dtype=self.dtype)
        if storage != "none":
            # T5 names its `wo` here, which transformers itself holds in float32 beside float16 only.
            encoder._keep_in_fp32_modules = ()
            quantize_(encoder, config.Quantize(storage=storage), TEXT_PRECISE, self.dtype)
            return encoder.to(self.device).eval()
        return encoder.to(self.device, self.dtype).eval().requires_grad_(False)

    def _check_vae_sizes(self) -> None:
        """That the VAE's config describes one, and its own file."""
        self.empty_vae()
        if not self._vae_prefix():
            cls = getattr(diffusers, self.vae_class)
            self._from_pretrained(cls, "diffusion_pytorch_model", "vae", device_map="meta")

    def _check_limit(self, name: str) -> None:
        """That this tokenizer can be read, and tells how many tokens are read, where nothing else does."""
        tokenizer = self.tokenizer(name)
        limit = getattr(tokenizer, "model_max_length", 1)  # a processor has none
        fits = isinstance(limit, int | float) and limit > 0
        # Where its config does not say, transformers has a number of thirty digits.
        if fits and "CLIP" in self.text_parts[name]:
            fits = limit <= MOST_TOKENS
        elif fits and name in self.judge_length_by:
            fits = self.token_limit(name) <= MOST_TOKENS
        if not fits:
            raise UserError(
                f"{self.folder / name / 'tokenizer_config.json'} does not say how many tokens the text encoder reads "
                f"(model_max_length is {limit!r}); download it again"
            )

    def _from_pretrained(self, cls: Any, stem: str, name: str, **options: Any) -> Any:
        files = _files.weight_files(self.folder / name, stem)
        for path in files:
            _files.read_header(path)
        options |= {"variant": _files.variant(files), "use_safetensors": True, "local_files_only": True}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # those are told below
        try:
            with quiet():
                model, told = cls.from_pretrained(self.folder / name, **options)
        except Exception as error:  # diffusers and transformers raise many kinds for what does not fit together
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None):
                raise  # the machine's
            raise UserError(
                f"{self.folder / name} cannot be loaded as a {cls.__name__} ({_files.in_short(error)}); its config.json"
                " is not whole, or is of another version"
            ) from error
        if other := sorted(str(one if isinstance(one, str) else one[0]) for one in told["mismatched_keys"]):
            raise UserError(
                f"{self.folder / name} has weights of other sizes than its config.json says: {len(other)} differ, "
                f"{first_few(other)}; it is another model's, or the config is"
            )
        # transformers fills what is missing with random numbers, and says so where nobody hears it. A language model's
        # head may be: files leave it out, as nothing here asks for the next word.
        if lost := sorted(key for key in told["missing_keys"] if not key.startswith("lm_head.")):
            raise UserError(
                f"{self.folder / name} has not all weights of a {cls.__name__}: {len(lost)} are missing, "
                f"{first_few(lost)}; it is another model's, or not whole"
            )
        return model

    def _config_and_weights(self, name: str, stem: str, *, from_checkpoint: bool = False) -> list[tuple[str, Path]]:
        part = self.folder / name
        if from_checkpoint and self.checkpoint:
            weights = [("checkpoint", self.checkpoint)]
        else:
            weights = [(f"{name}/{p.name}", p) for p in _files.weight_files(part, stem)]
        return [(f"{name}/config.json", part / "config.json"), *weights]

    def _vae_prefix(self) -> str | None:
        return next((p for p in ("first_stage_model.", "vae.") if f"{p}decoder.conv_in.weight" in self._header), None)

    def _has_text(self, name: str) -> bool:
        prefix = self.checkpoint_text.get(name)
        return prefix is not None and any(k.startswith(prefix) for k in self._header)

    def _tensors_with(self, prefix: str) -> dict[str, Tensor]:
        assert self._file is not None
        return {k: self._file.decoded(k) for k in self._header if k.startswith(prefix)}

    def _convert_vae(self, prefix: str, vae_config: dict[str, Any]) -> dict[str, Tensor]:
        return convert_ldm_vae_checkpoint(self._tensors_with(prefix), vae_config)

    def _convert_text(self, cls: Any, name: str) -> nn.Module:
        tensors = self._tensors_with(self.checkpoint_text[name])
        # A buffer of old versions of transformers, which new ones compute.
        tensors = {k: v for k, v in tensors.items() if not k.endswith(".position_ids")}
        return create_diffusers_clip_model_from_ldm(
            cls, tensors, subfolder=name, config=str(self.folder), torch_dtype=self.dtype
        )


def _give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
