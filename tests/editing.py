"""What the tests of all families have in common: loaded encoders, and for models that edit one small picture beside
every prompt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from lora_fp8 import settings, verify
from lora_fp8.data.cache import convert_image

NOISE = np.random.default_rng(0).integers(0, 255, (20, 9, 3), dtype=np.uint8)
PICTURE = Image.fromarray(NOISE)


def encode(family: Any, prompts: list[str]) -> list[dict[str, torch.Tensor]]:
    """encode_prompts, with `PICTURE` for the families whose text encoders look at pictures."""
    if family.prompts_see_controls:
        return family.encode_prompts(prompts, [[PICTURE]] * len(prompts))
    return family.encode_prompts(prompts)


def load_probe(path: Path) -> verify.Probe:
    """What `verify.save_probe` wrote, as another program would read it."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    cond = {name.removeprefix("cond."): tensor for name, tensor in tensors.items() if name.startswith("cond.")}
    captions = tuple(json.loads(metadata.get("captions", "[]")))
    guidance = float(metadata["guidance"])
    return verify.Probe(tensors["noisy"], tensors["t"], cond, tensors["prediction"], guidance, captions)


def load_encoders(family: Any) -> None:
    """VAE, tokenizers and text encoders, all at once and to stay: training has one at a time, see `encode_in_turn`."""
    family.load_vae()
    parts = {name: family._load_text_part(name, family.text_storage) for name in family.text_parts}
    family._text_pipeline = family._assemble(**parts)


def shown(family: Any) -> dict[str, torch.Tensor]:
    """What a conditioning has beside the prompt: the latents of `PICTURE`, where the model cannot do without."""
    if not family.controls[0]:
        return {}
    resized = PICTURE.resize(family.compute_control_size(*PICTURE.size), Image.Resampling.LANCZOS)
    return {"control_0": family.encode_images(convert_image(resized))[0]}


def shown_to_pipeline(family: Any) -> dict[str, torch.Tensor]:
    """The same for previews."""
    return {"control_picture_0": torch.from_numpy(NOISE)} if family.controls[0] else {}


def image(family: Any) -> dict[str, Any]:
    """The same as an argument of the pipeline."""
    return {"image": PICTURE} if family.controls[0] else {}


def processor(Family: Any, folder: Any) -> dict[str, Any]:
    """What a pipeline's `from_pretrained` is to be given, as it makes none without torchvision: see `_qwen_edit`."""
    if "processor" not in Family.text_parts:
        return {}
    section = settings.Model(family=Family.name, path=str(folder))
    return {"processor": Family(section, device="cpu", dtype=torch.float32).load_tokenizer("processor")}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' pipelines show control pictures with about 32 x 32 pixels, not 1024 x 1024: miniatures have VAEs that
    only halve the sides."""
    from diffusers.pipelines.flux import pipeline_flux_kontext as kontext
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    preferred = [(4 * (w // 128), 4 * (h // 128)) for w, h in kontext.PREFERRED_KONTEXT_RESOLUTIONS]
    monkeypatch.setattr(kontext, "PREFERRED_KONTEXT_RESOLUTIONS", preferred)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        real = module.calculate_dimensions

        def small(area: float, ratio: float, real: Any = real) -> tuple[Any, ...]:
            width, height, *rest = real(area, ratio)
            return max(4, 4 * (width // 128)), max(4, 4 * (height // 128)), *rest

        monkeypatch.setattr(module, "calculate_dimensions", small)
