"""Reads single parts of a base model, a VAE or a text encoder, from files without a config.json.

A single-file checkpoint holds its parts under prefixes; ComfyUI's folders hold each part in a file of its own. What a
header states (widths, numbers of layers and heads) becomes config entries here; the rest (activations, position
embeddings) is published once per model and is in `_published`.

Names are those of transformers or diffusers, or of the original code, which diffusers' converters and `NATIVE_UMT5`
translate. This module does not import torch before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Message, UserError, first_few, lacks_weights
from ..lora_files import naming
from ._files import Header, list_blocks, read_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ._weights import WeightFile

VAE_PREFIXES = ("first_stage_model.", "vae.")
"""Prefixes of a VAE's tensors in single-file checkpoints."""
VAE_MARKS = ("decoder.conv_in.weight", "decoder.conv1.weight", "decoder.conv_in.conv.weight")
"""Tensors that only VAEs have: diffusers' and the first Stable Diffusion's name, Wan's, HunyuanVideo's."""

NATIVE_UMT5 = naming.parse_table("""
    token_embedding = shared
    norm = encoder.final_layer_norm
    blocks.# = encoder.block.#
        norm1 = layer.0.layer_norm
        attn = layer.0.SelfAttention
        pos_embedding.embedding = layer.0.SelfAttention.relative_attention_bias
        norm2 = layer.1.layer_norm
        ffn.gate.0 = layer.1.DenseReluDense.wi_0
        ffn.fc1 = layer.1.DenseReluDense.wi_1
        ffn.fc2 = layer.1.DenseReluDense.wo
""")
"""UMT5's names in Wan's own code and in transformers."""

BESIDE = ("spiece_model", "tekken_model", "logit_scale", "decoder.", "final_layer_norm.")
"""Tensors in text encoder files that are no weights of the encoder: tokenizers, and the rest of a whole T5 or CLIP."""


class Source(NamedTuple):
    """Where a part's weights are: all tensors of `file` whose names start with `prefix`."""

    file: WeightFile
    prefix: str

    @property
    def header(self) -> Header:
        """Return the names, without the prefix, and shapes of the part's tensors."""
        return select_below(self.file.header, self.prefix)

    def read_tensors(self) -> dict[str, Tensor]:
        """Read the part's tensors by their names without the prefix. FP8 weights are dequantized to float32."""
        return {name: self.file.read_dequantized(self.prefix + name) for name in self.header}


def select_below(header: Header, prefix: str) -> Header:
    """Return the tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): shape for name, shape in header.items() if name.startswith(prefix)}


def find_vae_prefix(header: Header) -> str | None:
    """Return the prefix of the VAE in a single-file checkpoint, None if it has no VAE."""
    return next((p for p in VAE_PREFIXES if any(f"{p}{mark}" in header for mark in VAE_MARKS)), None)


# -- what a header states ----------------------------------------------------------------------------------------------
def read_config(part_class: str, header: Header) -> dict[str, Any] | None:
    """Return the config entries that a part's header states, None if it is not a part of this class.

    Args:
        part_class: class name in transformers or diffusers.
        header: names, without a prefix, and shapes of the part's tensors.
    """
    read = _READERS.get(part_class)
    return read(header) if read else None


def _read_clip(header: Header, *, projects: bool) -> dict[str, Any] | None:
    if "token_embedding.weight" in (native := select_below(header, "model.")) or "token_embedding.weight" in header:
        return _open_clip(native or header, projects=projects)
    names = select_below(header, "transformer.") or header
    names = select_below(names, "text_model.") or names
    if "embeddings.position_embedding.weight" not in names:
        return None
    tokens, width = names["embeddings.position_embedding.weight"]
    entries = {
        "vocab_size": names["embeddings.token_embedding.weight"][0],
        "hidden_size": width,
        "max_position_embeddings": tokens,
        "num_hidden_layers": len(list_blocks(names, "encoder.layers.#.mlp.fc1.weight")),
        "intermediate_size": names["encoder.layers.0.mlp.fc1.weight"][0],
    }
    projection = (select_below(header, "transformer.") or header).get("text_projection.weight")
    if projects and projection is None:
        return None
    return entries | ({"projection_dim": projection[0]} if projects and projection else {})


def _open_clip(names: Header, *, projects: bool) -> dict[str, Any] | None:
    """Read OpenCLIP's own names. Encoders without a projection were published without the layer that nothing reads."""
    layers = len(list_blocks(names, "transformer.resblocks.#.mlp.c_fc.weight"))
    if not layers or (projects and "text_projection" not in names):
        return None
    tokens, width = names["positional_embedding"]
    entries = {
        "vocab_size": names["token_embedding.weight"][0],
        "hidden_size": width,
        "max_position_embeddings": tokens,
        "num_hidden_layers": layers if projects else layers - 1,
        "intermediate_size": names["transformer.resblocks.0.mlp.c_fc.weight"][0],
    }
    return entries | ({"projection_dim": names["text_projection"][1]} if projects else {})


def _read_t5(header: Header, *, bias_in_each: bool) -> dict[str, Any] | None:
    if "token_embedding.weight" in header and "blocks.0.attn.q.weight" in header:
        header = {_from_native_umt5(name): shape for name, shape in header.items()}
    attention, mlp = "encoder.block.{}.layer.0.SelfAttention.", "encoder.block.0.layer.1.DenseReluDense."
    bias = header.get(attention.format(0) + "relative_attention_bias.weight")
    words = header.get("shared.weight") or header.get("encoder.embed_tokens.weight")
    layers = len(list_blocks(header, attention.format("#") + "q.weight"))
    if bias is None or words is None or not layers:
        return None
    biases = len(list_blocks(header, attention.format("#") + "relative_attention_bias.weight"))
    if biases != (layers if bias_in_each else 1):
        return None
    gated = f"{mlp}wi_0.weight" in header
    return {
        "vocab_size": words[0],
        "d_model": words[1],
        "num_layers": layers,
        "num_heads": bias[1],
        "relative_attention_num_buckets": bias[0],
        "d_kv": header[attention.format(0) + "q.weight"][0] // bias[1],
        "d_ff": header[mlp + ("wi_0.weight" if gated else "wi.weight")][0],
    }


def _from_native_umt5(name: str) -> str:
    return (naming.from_native(NATIVE_UMT5, name) or (name,))[0]


def _read_decoder(header: Header, *, has: tuple[str, ...] = (), lacks: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Read a language model of the Llama kind.

    Args:
        header: see `read_config`.
        has, lacks: endings of the first layer's tensors, or prefixes with a dot at their end, that distinguish it.
    """
    names = header
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
        names = select_below(header, prefix) or names
        if "embed_tokens.weight" in names:
            break
    first = [name.removeprefix("layers.0.") for name in names if name.startswith("layers.0.")]
    if "embed_tokens.weight" not in names or "self_attn.q_proj.weight" not in first:
        return None
    if not all(_has(header, first, mark) for mark in has) or any(_has(header, first, mark) for mark in lacks):
        return None
    words, width = names["embed_tokens.weight"]
    vision = _read_vision(header)
    return {
        **({"vision": vision} if vision else {}),
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": len(list_blocks(names, "layers.#.self_attn.q_proj.weight")),
        "intermediate_size": names["layers.0.mlp.gate_proj.weight"][0],
        "rows_of_queries": names["layers.0.self_attn.q_proj.weight"][0],
        "rows_of_keys": names["layers.0.self_attn.k_proj.weight"][0],
    }


def _read_vision(header: Header) -> dict[str, Any]:
    """Return what the tensors of Qwen's vision tower state; {} if there is none, or of another layout."""
    names = select_below(header, "visual.") or select_below(header, "model.visual.")
    sides = {
        "hidden_size": "patch_embed.proj.weight[0]",
        "depth": "blocks.#.norm1.weight",
        "intermediate_size": "blocks.0.mlp.gate_proj.weight[0]",
        "out_hidden_size": "merger.mlp.2.weight[0]",
    }
    return read_sizes(sides, names, {}) if "merger.mlp.2.weight" in names else {}


def _has(header: Header, first: list[str], mark: str) -> bool:
    if mark.endswith("."):
        return any(name.startswith((mark, f"model.{mark}")) for name in header)
    return mark in first


def _read_kl(header: Header) -> dict[str, Any] | None:
    """Read an AutoencoderKL, in diffusers' names or in those of the first Stable Diffusion."""
    inner = header.get("decoder.conv_in.weight", ())
    original = "encoder.down.0.block.0.conv1.weight" in header
    block = "encoder.down.{}.block.{}" if original else "encoder.down_blocks.{}.resnets.{}"
    levels = list_blocks(header, block.format("#", 0) + ".conv1.weight")
    if len(inner) != 4 or not levels:
        return None
    return {
        "latent_channels": inner[1],
        "block_out_channels": [header[block.format(level, 0) + ".conv1.weight"][0] for level in levels],
        "down_block_types": ["DownEncoderBlock2D"] * len(levels),
        "up_block_types": ["UpDecoderBlock2D"] * len(levels),
        "layers_per_block": len(list_blocks(header, block.format(0, "#") + ".conv1.weight")),
        "use_quant_conv": any(name in header for name in ("quant_conv.weight", "encoder.quant_conv.weight")),
        "use_post_quant_conv": any(
            name in header for name in ("post_quant_conv.weight", "decoder.post_quant_conv.weight")
        ),
    }


def _read_plain_kl(header: Header) -> dict[str, Any] | None:
    return None if "bn.running_mean" in header else _read_kl(header)


def _read_flux2_kl(header: Header) -> dict[str, Any] | None:
    return _read_kl(header) if "bn.running_mean" in header else None


def _read_wan_vae(header: Header) -> dict[str, Any] | None:
    """Read the VAE of Wan and Qwen-Image, in Wan's names or in diffusers'."""
    outer = header.get("encoder.conv1.weight") or header.get("encoder.conv_in.weight") or ()
    inner = header.get("decoder.conv1.weight") or header.get("decoder.conv_in.weight") or ()
    if len(outer) != 5 or len(inner) != 5 or not any(name.endswith(".gamma") for name in header):
        return None
    return {"base_dim": outer[0], "z_dim": inner[1]}


def _make_reader(
    read: Callable[..., dict[str, Any] | None], **options: Any
) -> Callable[[Header], dict[str, Any] | None]:
    return lambda header: read(header, **options)


_READERS: dict[str, Callable[[Header], dict[str, Any] | None]] = {
    "CLIPTextModel": _make_reader(_read_clip, projects=False),
    "CLIPTextModelWithProjection": _make_reader(_read_clip, projects=True),
    "T5EncoderModel": _make_reader(_read_t5, bias_in_each=False),
    "UMT5EncoderModel": _make_reader(_read_t5, bias_in_each=True),
    "LlamaModel": _make_reader(_read_decoder, lacks=("self_attn.q_proj.bias", "self_attn.q_norm.weight", "visual.")),
    "LlamaForCausalLM": _make_reader(
        _read_decoder, lacks=("self_attn.q_proj.bias", "self_attn.q_norm.weight", "visual.")
    ),
    "Qwen3Model": _make_reader(_read_decoder, has=("self_attn.q_norm.weight",), lacks=("visual.",)),
    "Qwen3ForCausalLM": _make_reader(_read_decoder, has=("self_attn.q_norm.weight",), lacks=("visual.",)),
    "Qwen3VLModel": _make_reader(_read_decoder, has=("self_attn.q_norm.weight", "visual.")),
    "Qwen2_5_VLForConditionalGeneration": _make_reader(_read_decoder, has=("self_attn.q_proj.bias", "visual.")),
    "Gemma2Model": _make_reader(
        _read_decoder, has=("pre_feedforward_layernorm.weight",), lacks=("self_attn.q_norm.weight",)
    ),
    "AutoencoderKL": _read_plain_kl,
    "AutoencoderKLFlux2": _read_flux2_kl,
    "AutoencoderKLWan": _read_wan_vae,
    "AutoencoderKLQwenImage": _read_wan_vae,
}
"""Class -> function that reads its header."""


def list_readable() -> tuple[str, ...]:
    """Return the classes whose headers `read_config` can read."""
    return tuple(_READERS)


def with_stated(config: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's published config with the entries that a header states in place of the published ones."""
    text = dict(config.get("text_config") or config)
    entries = dict(entries)
    vision = dict(config.get("vision_config") or {}) | entries.pop("vision", {})
    if "rows_of_queries" in entries:
        size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        entries["num_attention_heads"] = entries.pop("rows_of_queries") // size
        entries["num_key_value_heads"] = entries.pop("rows_of_keys") // size
        if len(text.get("layer_types") or ()) != entries["num_hidden_layers"]:
            text.pop("layer_types", None)  # transformers derives it
    if "text_config" in config:
        return {**config, "text_config": text | entries, "vision_config": vision}
    return text | entries


# -- weights -----------------------------------------------------------------------------------------------------------
@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars inside this context, as they would clutter a training log."""
    import transformers

    logging = transformers.utils.logging
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def read_vae_tensors(source: Source, vae_class: str, vae_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read a VAE's tensors under diffusers' names."""
    from diffusers.loaders import single_file_utils

    header, tensors = source.header, source.read_tensors()
    if (
        "encoder.down_blocks.0.resnets.0.conv1.weight" in header
        or "encoder.conv_in.weight" not in header
        and ("encoder.conv1.weight" not in header)
    ):
        return tensors
    if vae_class in ("AutoencoderKLWan", "AutoencoderKLQwenImage"):
        if "encoder.conv1.weight" not in header:
            return tensors
        return single_file_utils.convert_wan_vae_to_diffusers(tensors)
    if not any(name.startswith("encoder.down.") for name in header):
        return tensors
    moved = {"encoder.quant_conv.": "quant_conv.", "decoder.post_quant_conv.": "post_quant_conv."}
    for old, new in moved.items():
        tensors |= {new + name.removeprefix(old): tensors.pop(name) for name in header if name.startswith(old)}
    beside = {name: tensors.pop(name) for name in header if name.startswith("bn.")}
    return single_file_utils.convert_ldm_vae_checkpoint(tensors, dict(vae_config)) | beside


def build_text_encoder(cls: Any, config: Any, source: Source, dtype: Any) -> nn.Module:
    """Build a text encoder of transformers from a source with transformers' names.

    Args:
        cls: its class.
        config: its config, an object of transformers.
        source: its weights.
        dtype: dtype of the weights; None: no weights are read, and the parameters are on the meta device.

    Raises:
        UserError: weights are missing, or have other sizes than the config says.
    """
    import torch

    header = {name: shape for name, shape in source.header.items() if not name.startswith(BESIDE)}
    names = {name: _from_native_umt5(name) if "token_embedding.weight" in header else name for name in header}
    empty = dtype is None
    state = {}
    for name, new in names.items():
        if empty:
            state[new] = torch.empty(header[name], device="meta")
        else:
            state[new] = source.file.read_dequantized(source.prefix + name).to(dtype)
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    options |= {"device_map": "meta"} if empty else {"dtype": dtype}
    with quiet():
        model, info = cls.from_pretrained(None, config=config, state_dict=state, **options)
    check_loaded(source.file.path, cls, info)
    return model.eval()


def check_loaded(path: Path, cls: Any, info: Mapping[str, Any]) -> None:
    """Check that a part got all its weights, in the sizes of its config.

    Args:
        path: file or folder of the part, for messages.
        cls: the part's class.
        info: what `from_pretrained` reports with `output_loading_info`.

    Raises:
        UserError: weights are missing, or have other sizes.
    """
    if other := sorted(
        str(mismatch if isinstance(mismatch, str) else mismatch[0]) for mismatch in info["mismatched_keys"]
    ):
        raise UserError(
            Message(
                "{path} has weights of other sizes than its config.json: {count} differ, {names}; the weights or "
                "the config belong to another model",
                path=path,
                count=len(other),
                names=first_few(other),
            )
        )
    # transformers fills missing weights with random numbers, and logs it where nobody reads it. Files may leave out a
    # language model's head: nothing here predicts the next token.
    if lost := sorted(key for key in info["missing_keys"] if not re.match(r"lm_head\.", key)):
        raise lacks_weights(path, cls.__name__, len(lost), first_few(lost))
