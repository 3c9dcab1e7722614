"""What the miniatures of Qwen-Image-Edit and -Plus share: a processor, and attention that tests can see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLImageProcessorPil

from lora_fp8 import families

from . import _qwen

_WORDS = (
    "key features input color texture objects background then explain how user text instruction should alter or modify "
    "image Generate new that meets requirements while maintaining consistency with original where appropriate Picture "
    "'s ),"
).split()


def wake_(denoiser: Any) -> None:
    """Enlarge the attention's weights: random attention changes little, and tests must see whether images are used."""

    with torch.no_grad():
        for block in denoiser.transformer_blocks:
            for layer in (block.attn.to_v, block.attn.to_out[0]):
                layer.weight.mul_(3)


def make_parts() -> dict[str, Any]:
    vocab = _qwen.tokenizer(_WORDS, ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"))
    return {
        "scheduler": _qwen.scheduler(),
        "vae": _qwen.vae(),
        "text_encoder": _qwen.qwen25_vl(vocab),
        "tokenizer": vocab,
        "processor": None,
    }


def save(name: str, parts: dict[str, Any], folder: Path) -> None:
    """Save the parts as a pipeline folder with a processor, as the released models have one."""
    families.get(name).get_pipeline_type()(**parts).save_pretrained(folder, safe_serialization=True)
    for part in (Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 16384), parts["tokenizer"]):
        part.save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
