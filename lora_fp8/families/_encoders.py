"""The encoders of `ModelFamily`: its VAE, tokenizers and text encoders, loaded from the model's files.

A VAE and text encoders have folders of their own, or are inside a single file together with the denoiser. diffusers'
own converters read the latter.
"""

from __future__ import annotations

import gc
import importlib
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .. import settings
from ..errors import Message, UserError, first_few
from . import _components, _files, _part_files
from ._facts import Facts
from ._part_files import quiet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .base import ModelFamily

ORIGINAL_CLIPS = ("cond_stage_model.", "conditioner.")
"""Prefixes of text encoders in the original code of Stable Diffusion, which diffusers' converters read."""
TEXT_PRECISE = ("lm_head", "text_projection", "visual")
"""Name parts of text encoder layers that are not quantized: output layers, which are small or unused."""


class Encoders(Facts):
    """Loads the encoders, estimates their memory, and identifies their files."""

    @abstractmethod
    def _assemble(self, **parts: Any) -> Any:
        """Build the pipeline with these parts and None for the others."""

    def load_vae(self) -> None:
        """Load the VAE on its own; previews need it for decoding."""
        import diffusers
        import torch

        if self.vae is not None:
            return
        cls = getattr(diffusers, self.vae_class)
        if source := self._find_source("vae"):
            vae = _files.build_from_config(cls, self.folder / "vae" / "config.json")
            tensors = _part_files.read_vae_tensors(source, self.vae_class, dict(vae.config))
            _fill_vae_(vae, tensors, source.file.path)  # copying widens to float32
        else:
            vae = self._from_pretrained(cls, "diffusion_pytorch_model", "vae", dtype=torch.float32)
        self.vae = vae.to(self.device).eval().requires_grad_(False)

    def make_empty_vae(self) -> nn.Module:
        """Return the VAE on the meta device: all shapes, no memory."""
        import diffusers
        import torch
        from diffusers.models.modeling_utils import no_init_weights

        cls = getattr(diffusers, self.vae_class)
        with torch.device("meta"), no_init_weights():
            return _files.build_from_config(cls, self.folder / "vae" / "config.json").eval().requires_grad_(False)

    def load_tokenizer(self, name: str) -> Any:
        """Return a tokenizer of `text_parts`, or the processor that prepares images for a text encoder.

        They are small, so each is loaded on first use and kept.
        """
        if name not in self._tokenizers:
            cls, folder = self._import_class(name), self.folder / name
            try:
                self._tokenizers[name] = cls.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # transformers and tokenizers raise many types for incomplete files
                raise UserError(
                    Message(
                        "{path} cannot be read ({why}); download it again", path=folder, why=_files.shorten_error(error)
                    )
                ) from error
        return self._tokenizers[name]

    def encode_in_turn(self, asks: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
        """Yield (index, result) of functions that call `encode_prompts`, with one text encoder in memory at a time.

        Each function is called several times: see `_in_turn`. Nothing needs to be loaded before.
        """
        from . import _in_turn

        encoders = self._list_text_encoders()
        turns = _in_turn.Turns(
            encoders,
            partial(self._load_text_part, storage=self.text_storage),
            _give_back_memory,
            self.device,
            self.dtype,
        )
        tokenizers = {name: self.load_tokenizer(name) for name in self.text_parts if self._is_tokenizer(name)}
        if len(encoders) > 1:
            self._text_pipeline = self._assemble(**tokenizers, **turns.standins)
            yield from turns.ask(asks)
        else:  # a single encoder is used directly, without a stand-in
            (name,) = encoders
            self._text_pipeline = self._assemble(**tokenizers, **{name: turns.load(name)})
            yield from enumerate(ask() for ask in asks)

    def free_encoders(self) -> None:
        """Drop the VAE and the text encoders, and release their memory."""
        self.vae = self._text_pipeline = None
        _give_back_memory()

    @property
    def text_pipeline(self) -> Any:
        """Return the diffusers pipeline with the text encoders in it and no denoiser, for its `encode_prompt`."""
        if self._text_pipeline is None:
            raise RuntimeError("encode_prompts outside of encode_in_turn")
        return self._text_pipeline

    def count_vae_bytes(self) -> int:
        """Return the bytes that the VAE takes in memory, by its file's header."""
        import torch

        if source := self._find_source("vae"):
            vae = source.header
        else:
            (path, *_) = self._find_weight_files("vae", "diffusion_pytorch_model")
            vae = _files.read_header(path, self.absent)
        return sum(map(math.prod, vae.values())) * torch.float32.itemsize

    def count_encoder_bytes(self) -> dict[str, int]:
        """Return the bytes that each text encoder takes while captions are encoded, by the files' headers."""
        sizes = {}
        for name in self._list_text_encoders():
            if source := self._find_source(name):
                beside = _part_files.BESIDE
                headers = [{k: shape for k, shape in source.header.items() if not k.startswith(beside)}]
            else:
                files = self._find_weight_files(name, self._find_text_class(name)[1])
                headers = [_files.read_header(path, self.absent) for path in files]
            sizes[name] = sum(
                self._count_tensor_bytes(key, shape) for header in headers for key, shape in header.items()
            )
        return sizes

    def _count_tensor_bytes(self, key: str, shape: tuple[int, ...]) -> int:
        """Return the bytes of a text encoder's tensor as it is stored in memory."""
        from ..precision import Format, name_matches

        is_linear = key.endswith(".weight") and not re.search("embed|shared|relative|wte|wpe", key)
        kept = any(name_matches(key.removesuffix(".weight"), part) for part in TEXT_PRECISE)
        if self.text_storage == "none" or len(shape) != 2 or not is_linear or kept:
            return math.prod(shape) * self.dtype.itemsize
        rows, columns = shape
        forms = [Format(self.text_storage, scale) for scale in settings.SCALES[self.text_storage]]
        return next(form for form in forms if not form.find_problem((rows, columns))).count_bytes((rows, columns))

    def load_trained_text_parts(self) -> dict[str, Any]:
        """Load the trainable text encoders, unquantized, and their tokenizers, as new objects."""
        pairs = [(encoder.replace("text_encoder", "tokenizer"), encoder) for encoder in self.trained_text]
        return {name: self._load_text_part(name, "none") for pair in pairs for name in pair}

    def make_empty_trained_text(self) -> dict[str, nn.Module]:
        """Return the text encoders of `trained_text` on the meta device, in the model's dtype."""
        import torch

        encoders = {}
        for name in self.trained_text:
            cls = self._find_text_class(name)[0]
            with torch.device("meta"):
                encoder = cls(self._make_text_config(name, cls.config_class))
            encoders[name] = encoder.to(self.dtype).requires_grad_(False)
        return encoders

    def _make_text_config(self, name: str, config_class: Any) -> Any:
        """Return the config of a text encoder of this base."""
        return config_class.from_pretrained(self.folder / name, local_files_only=True)

    def read_trained_text_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, CPU tensor) of the weights and biases of `trained_text`'s encoders, one encoder at a time.

        Names are those of adapter modules, with ".weight" or ".bias" appended.
        """
        from ..lora_files.layer_names import make_text_layer_name

        for name in self.trained_text:
            for path, tensor in self._load_text_part(name, "none").state_dict().items():
                yield make_text_layer_name(name, path), tensor.cpu()

    def make_trained_text_pipeline(self) -> Any:
        """Return a pipeline that holds only what `load_trained_text_parts` returns, for `encode_with`."""
        return self._assemble(**self.load_trained_text_parts())

    def compute_encoder_identity(self, what: str) -> str:
        """Return the SHA-256 of the files that determine the outputs of the "vae" or "text" encoders.

        These are weights, configs and tokenizers. Settings of the text encoders that are not the usual ones follow it.
        """
        if what == "vae":
            files = self._list_config_and_weights("vae", "diffusion_pytorch_model")
        elif what == "text":
            files = []
            for name in self.text_parts:
                if self._is_tokenizer(name):
                    kinds = (".json", ".txt", ".jinja", ".model")  # a chat template is part of what is encoded
                    settings_files = sorted(p for p in (self.folder / name).iterdir() if p.suffix in kinds)
                    files += [(f"{name}/{p.name}", p) for p in settings_files]
                else:
                    stem = self._find_text_class(name)[1]
                    files += self._list_config_and_weights(name, stem)
        else:
            raise ValueError(f"compute_encoder_identity({what!r}): 'vae' or 'text'")
        digest = _files.compute_digest(files, self.absent)
        if what == "vae":
            return digest
        unusual = {
            self.text_storage: self.text_storage != "none",
            f"{self.num_chunks} chunks": self.num_chunks > 1,
            f"clip skip {self.clip_skip}": self.clip_skip > 1,
            "prompt weights": self.prompt_weights,
        }
        return " ".join([digest, *(name for name, holds in unusual.items() if holds)])

    def _is_tokenizer(self, name: str) -> bool:
        return _components.is_tokenizer(name)

    def _list_text_encoders(self) -> list[str]:
        return [name for name in self.text_parts if not self._is_tokenizer(name)]

    def _find_text_class(self, name: str) -> tuple[Any, str]:
        """Return the class of a text part and the stem of its weight files; some parts are diffusers models."""
        import transformers

        cls = self._import_class(name)
        return cls, "model" if issubclass(cls, transformers.PreTrainedModel) else "diffusion_pytorch_model"

    def _import_class(self, name: str) -> Any:
        import diffusers
        import transformers

        module, _, wanted = self.text_parts[name].rpartition(".")
        if module:
            return getattr(importlib.import_module(module), wanted)
        return getattr(transformers if hasattr(transformers, wanted) else diffusers, wanted)

    def _load_text_part(self, name: str, storage: str) -> Any:
        from ..precision import quantize_

        if self._is_tokenizer(name):
            return self.load_tokenizer(name)
        cls, stem = self._find_text_class(name)
        if source := self._find_source(name):
            encoder: Any = self._convert_text(cls, name, source)
        else:
            encoder = self._from_pretrained(cls, stem, name, dtype=self.dtype)
        if storage != "none":
            # For T5 it lists `wo`, which transformers itself keeps in float32 only if the rest is float16.
            encoder._keep_in_fp32_modules = ()
            # Convolutions are those of image parts, which are not read, or small.
            section = settings.Quantize.model_validate({"storage": storage, "convolutions": "bf16"})
            quantize_(encoder, section, TEXT_PRECISE, self.dtype)
            return encoder.to(self.device).eval()
        return encoder.to(self.device, self.dtype).eval().requires_grad_(False)

    def _from_pretrained(self, cls: Any, stem: str, name: str, **options: Any) -> Any:
        import torch

        files = self._find_weight_files(name, stem)
        on_meta = options.get("device_map") == "meta"
        for path in files:
            if not on_meta:
                _files.require_here(path)
            _files.read_header(path, self.absent)
        is_here = all(path.is_file() for path in files)
        options |= {"variant": _files.find_variant(files), "use_safetensors": True, "local_files_only": True}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported below, with our message
        try:
            with quiet():
                if is_here:
                    model, loading_info = cls.from_pretrained(self.folder / name, **options)
                else:
                    model, loading_info = self._from_headers(cls, self.folder / name, files)
        except Exception as error:  # diffusers and transformers raise many types for files that do not match
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None):
                raise  # the machine's fault, not the files'
            raise UserError(
                Message(
                    "{path} cannot be loaded as a {kind} ({why}); its config.json is incomplete, or belongs to "
                    "another version",
                    path=self.folder / name,
                    kind=cls.__name__,
                    why=_files.shorten_error(error),
                )
            ) from error
        _part_files.check_loaded(self.folder / name, cls, loading_info)
        return model

    def _from_headers(self, cls: Any, folder: Path, files: Sequence[Path]) -> tuple[Any, dict[str, Any]]:
        """Build a model on the meta device from its config, and compare it with headers, as from_pretrained does.

        Returns:
            The model, and the names that are missing or have another size.
        """
        import torch
        import transformers
        from diffusers.models.modeling_utils import no_init_weights

        entries = {key: entry for path in files for key, entry in _files.read_entries(path, self.absent)[0].items()}
        tensors = {key: torch.empty(entry.shape, device="meta") for key, entry in entries.items()}
        if issubclass(cls, transformers.PreTrainedModel):
            config = cls.config_class.from_pretrained(folder, local_files_only=True)
            options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            return cls.from_pretrained(None, config=config, state_dict=tensors, device_map="meta", **options)
        with torch.device("meta"), no_init_weights():
            model = cls.from_config(cls.load_config(folder, local_files_only=True))
        model._fix_state_dict_keys_on_load(tensors)  # attention layers of old VAEs
        wanted = model.state_dict()
        other = [key for key, tensor in tensors.items() if key in wanted and wanted[key].shape != tensor.shape]
        return model, {"mismatched_keys": other, "missing_keys": wanted.keys() - tensors.keys()}

    def _find_weight_files(self, name: str, stem: str) -> list[Path]:
        """Return the weight files of a part, those that are not downloaded yet too; see `_files.find_weight_files`."""
        return _files.find_weight_files(self.folder / name, stem, self.absent)

    def _list_config_and_weights(self, name: str, stem: str) -> list[tuple[str, Path]]:
        part, source = self.folder / name, self._find_source(name)
        if source and source.file is self._file:
            weights = [("checkpoint", source.file.path)]
        elif source:
            weights = [(f"{name} file", source.file.path)]
        else:
            weights = [(f"{name}/{p.name}", p) for p in self._find_weight_files(name, stem)]
        return [(f"{name}/config.json", part / "config.json"), *weights]

    def _find_source(self, name: str) -> _part_files.Source | None:
        """Return where a part's weights are in a file of its own or in the single file; None: in the folder."""
        if name in self._part_files:
            file = self._part_files[name]
            return _part_files.Source(file, (_part_files.find_vae_prefix(file.header) or "") if name == "vae" else "")
        if self._file is None:
            return None
        prefix = _components.find_prefix(cast("type[ModelFamily]", type(self)), name, self._header)
        return None if prefix is None else _part_files.Source(self._file, prefix)

    def _convert_text(self, cls: Any, name: str, source: _part_files.Source) -> nn.Module:
        if not source.prefix.startswith(ORIGINAL_CLIPS):
            config = cls.config_class.from_pretrained(self.folder / name, local_files_only=True)
            return _part_files.build_text_encoder(cls, config, source, self.dtype)
        from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm

        tensors = {source.prefix + name: tensor for name, tensor in source.read_tensors().items()}
        # A buffer saved by old versions of transformers; new ones compute it.
        tensors = {k: v for k, v in tensors.items() if not k.endswith(".position_ids")}
        return create_diffusers_clip_model_from_ldm(
            cls, tensors, subfolder=name, config=str(self.folder), torch_dtype=self.dtype
        )


def _fill_vae_(vae: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    wrong = [name for name, shape in wanted.items() if name not in tensors or tuple(tensors[name].shape) != shape]
    if wrong:
        raise UserError(
            Message(
                "{path} does not have the weights of the {kind} in its config.json: {count} are missing or have "
                "other sizes, {names}",
                path=path,
                kind=type(vae).__name__,
                count=len(wrong),
                names=first_few(wrong),
            )
        )
    vae.load_state_dict({name: tensors[name] for name in wanted})


def _give_back_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
