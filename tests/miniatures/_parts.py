"""Parts of many miniatures: small VAEs, small text encoders, working tokenizers, schedulers.

The tokenizers are built with the `tokenizers` library, so that tests encode text as with a real model and need no
network. Their vocabularies cover every string that tests use: CLIP's by bytes, T5's by printable ASCII.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from lora_fp8.families._part_files import quiet


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers inside this context, restore the caller's generator after it, and hide progress bars."""
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        yield


CLIP_TOKENS = 77
T5_TOKENS = 32
"""Token limit of the miniature T5, far below FLUX's 512 for speed; families take the tokenizer's limit."""

_WORDS = ("a", "photo", "of", "cat", "dog", "red", "blue", "the")


def clip_tokenizer() -> CLIPTokenizer:
    """Return a byte-level BPE tokenizer as CLIP's: bytes, bytes that end a word, a few merges, two special tokens."""
    letters = sorted(ByteLevel.alphabet())
    pieces = letters + [f"{c}</w>" for c in letters]
    merges: list[Any] = []  # pairs, which transformers' annotation leaves out
    for word in _WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            pair = (parts[0], parts[1])
            if pair not in merges:
                merges.append(pair)
            parts[:2] = ["".join(pair)]
            if parts[0] not in pieces:
                pieces.append(parts[0])
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_TOKENS)


def t5_tokenizer(tokens: int = T5_TOKENS) -> T5Tokenizer:
    """Return a unigram tokenizer of `tokens` tokens as T5's: printable ASCII, a few words, <pad> 0, </s> 1, <unk> 2."""
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    scores += [(f"▁{word}", -3.0) for word in _WORDS if len(word) > 1]
    scores += [(c, -6.0) for c in string.ascii_letters + string.digits + string.punctuation]
    return T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=tokens)


def clip_text(vocab: CLIPTokenizer, *, projection: int | None = None, width: int = 32) -> torch.nn.Module:
    """Return a CLIP text encoder of two layers; with `projection`, the class of SDXL's second encoder."""
    settings = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=projection or width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=vocab.bos_token_id,
        eos_token_id=vocab.eos_token_id,
        pad_token_id=vocab.pad_token_id,
    )
    return CLIPTextModelWithProjection(settings) if projection else CLIPTextModel(settings)


def clip_pair(vocab: CLIPTokenizer, *widths: int) -> dict[str, Any]:
    """Return two CLIP text encoders with projections and their tokenizers, by the pipelines' names."""
    encoders = [clip_text(vocab, width=width, projection=width) for width in widths]
    names = ("text_encoder", "text_encoder_2")
    return dict(zip(names, encoders, strict=True)) | {"tokenizer": vocab, "tokenizer_2": vocab}


def t5_text(vocab: T5Tokenizer, *, width: int = 32) -> T5EncoderModel:
    """Return a one-layer T5 encoder in the v1.1 variant (gated GELU)."""
    settings = T5Config(
        vocab_size=len(vocab),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=vocab.pad_token_id,
        eos_token_id=vocab.eos_token_id,
    )
    return T5EncoderModel(settings)


def umt5_text(vocab: PreTrainedTokenizerBase, *, width: int = 32, **settings: Any) -> UMT5EncoderModel:
    """Return a one-layer UMT5 encoder."""
    told = UMT5Config(
        vocab_size=len(vocab),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=1,
        num_heads=2,
        pad_token_id=vocab.pad_token_id,
        eos_token_id=vocab.eos_token_id,
        **settings,
    )
    return UMT5EncoderModel(told)


QUARTER = (8, 16, 32)
"""Channels of a VAE whose latents have a quarter of the image's sides: a denoiser then has a quarter of the work."""


def vae(
    *,
    scaling_factor: float,
    shift_factor: float | None = None,
    quant_conv: bool = True,
    channels: tuple[int, ...] = (16, 32),
    attention: bool = True,
) -> AutoencoderKL:
    """Return a VAE with four latent channels; each further entry of `channels` halves the image sides."""
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=channels[0] // 2,
        sample_size=32,
        mid_block_add_attention=attention,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=quant_conv,
        use_post_quant_conv=quant_conv,
    )


def flux_vae(**settings: Any) -> AutoencoderKL:
    """Return a VAE with the normalization of FLUX.1's, which other models use too."""
    return vae(scaling_factor=0.3611, shift_factor=0.1159, quant_conv=False, **settings)


def deep_vae(*, scaling_factor: float) -> AutoencoderDC:
    """Return a deep compression autoencoder with four latent channels that divides the image sides by four."""
    return AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=scaling_factor,
    )


def ddim(**settings: Any) -> DDIMScheduler:
    """Return the scheduler of the first Stable Diffusion models."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        **settings,
    )


def flow_euler(**settings: Any) -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of most flow matching models."""
    return FlowMatchEulerDiscreteScheduler(**settings)


def flow_unipc() -> UniPCMultistepScheduler:
    """Return the scheduler of the flow matching models that sample with UniPC."""
    return UniPCMultistepScheduler(
        flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero"
    )
