"""The bar that counts: what somebody else sees who loads the file with plain diffusers, in a process without lora_fp8.

For each family, both layouts, with the base held in bf16 and in FP8: a LoRA is trained, and a script that knows only
diffusers loads base and file, prompts with the text, and has to draw the training model's preview (PSNR >= 40 dB).
Where the base was held in FP8, the script's base carries the decoded FP8 weights, saved by us as a plain diffusers
folder; the gap to the published base is in the run's report.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from editing import load_encoders
from PIL import Image

from lora_fp8 import config, families, precision, train

STRANGER = """
import json, sys
import torch, diffusers

ask = json.load(open(sys.argv[1], encoding="utf-8"))
torch.set_num_threads(1)
pipe = diffusers.DiffusionPipeline.from_pretrained(ask["base"], torch_dtype=torch.bfloat16)
pipe.set_progress_bar_config(disable=True)
vae = pipe.vae
for name, file in ask["files"].items():
    if file:
        pipe.load_lora_weights(file)
    generator = torch.Generator("cpu").manual_seed(ask["seed"])
    latents = pipe(**ask["call"], generator=generator, output_type="latent").images
    # The VAE in float32, as everybody runs it who has seen SDXL's overflow.
    vae.to(torch.float32)
    if latents.ndim == 3:
        latents = pipe._unpack_latents(latents, ask["call"]["height"], ask["call"]["width"], pipe.vae_scale_factor)
    latents = latents.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0)
    pixels = vae.decode(latents, return_dict=False)[0].detach()
    pipe.image_processor.postprocess(pixels, output_type="pil")[0].save(name + ".png")
    vae.to(torch.bfloat16)
    if file:
        pipe.unload_lora_weights()
assert not any(name.split(".")[0] == "lora_fp8" for name in sys.modules), "lora_fp8 was imported"
"""

PROMPT, SIDE, STEPS, GUIDANCE = "a red cat on a chair", 64, 6, 4.0


def psnr(one: Path, other: Path) -> float:
    a, b = (np.asarray(Image.open(p).convert("RGB"), dtype=np.float64) for p in (one, other))
    error = np.mean((a - b) ** 2)
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


def stranger(folder: Path, base: Path, files: dict[str, str], extra: dict[str, int]) -> None:
    """Run the plain diffusers script in `folder`; it draws one picture per file, named after its key."""
    script, question = folder / "stranger.py", folder / "question.json"
    script.write_text(STRANGER, encoding="utf-8")
    call = {"prompt": PROMPT, "num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "height": SIDE, "width": SIDE}
    ask = {"base": str(base), "files": files, "seed": 42, "call": call | extra}
    question.write_text(json.dumps(ask), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name, question.name], capture_output=True, text=True, encoding="utf-8", cwd=folder
    )
    assert done.returncode == 0, done.stderr[-2000:]


def widen(base: Path) -> None:
    """Give the FLUX miniature a transformer as wide as the released one, of one block each.

    diffusers converts kohya's FLUX names at this width only: the sizes of the released model are written into it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # half a billion weights: in float32 they would take four times as long
    try:
        small = diffusers.FluxTransformer2DModel.load_config(base / "transformer")
        wide = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128, "num_attention_heads": 24}
        transformer = diffusers.FluxTransformer2DModel.from_config({**small, **wide, "axes_dims_rope": (16, 56, 56)})
    finally:
        torch.set_default_dtype(before)
    shutil.rmtree(base / "transformer")
    transformer.save_pretrained(base / "transformer")


CASES = [(name, storage, False) for name in ("sd15", "sdxl", "flux") for storage in ("none", "fp8")]


@pytest.mark.parametrize(("name", "storage", "wide"), [*CASES, ("flux", "none", True)])
def test_a_stranger_draws_our_preview(name, storage, wide, tmp_path):
    Family = families.get(name)
    base = tmp_path / "base"
    Family.tiny(base)
    if wide:
        widen(base)
    layouts = ["diffusers", "kohya"] if name != "flux" or wide else ["diffusers"]
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for i in range(3):
        noise = np.random.default_rng(i).integers(0, 256, (70, 64 + 20 * i, 3), dtype=np.uint8)
        Image.fromarray(noise).save(pictures / f"{i}.png")
        (pictures / f"{i}.txt").write_text(f"thing {i}", encoding="utf-8")
    job = config.loads(
        f"""
        name = "job"
        output_dir = {json.dumps(str(tmp_path / "runs"))}
        [model]
        family = "{name}"
        path = {json.dumps(str(base))}
        [quantize]
        storage = "{storage}"
        [adapter]
        rank = 4
        alpha = 6.0   # not the rank: a forgotten scale shows
        [dataset]
        resolution = {SIDE}
        bucket_step = {min(Family.bucket_multiple, 64)}
        cache_dir = {json.dumps(str(tmp_path / "cache"))}
        [[dataset.folders]]
        path = {json.dumps(str(pictures))}
        [train]
        steps = {4 if wide else 12}
        batch_size = 2
        threads = 1
        [optimizer]
        lr = 5e-3
        [export]
        formats = {json.dumps(layouts)}
        verify = {"false" if wide else "true"}
        [preview]
        prompts = ["{PROMPT}"]
        steps = {STEPS}
        guidance = {GUIDANCE}
        """
    )
    result = train.run(job, progress=False)
    preview = result.run.samples / f"step-{job.train.steps:06d}-0.png"

    seen = base
    if storage == "fp8":  # the base as training saw it, as a plain diffusers folder
        seen = tmp_path / "decoded"
        shutil.copytree(base, seen)
        family = Family(job.model, device="cpu", dtype=torch.bfloat16)
        denoiser = family.empty_denoiser()
        precision.quantize_(denoiser, job.quantize, family.keep_precise, torch.bfloat16, family.modulation)
        precision.fill_(denoiser, family.denoiser_tensors(), dtype=torch.bfloat16)
        plain = getattr(diffusers, family.denoiser_class).from_config(family.denoiser_config()).to(torch.bfloat16)
        plain.load_state_dict(precision.decoded_state_dict(denoiser))
        shutil.rmtree(seen / family.denoiser_name)
        plain.save_pretrained(seen / family.denoiser_name)

    extra = {}
    if name == "flux":
        family = Family(job.model, device="cpu", dtype=torch.bfloat16)
        load_encoders(family)
        extra["max_sequence_length"] = family.max_sequence_length
    files = {"without": ""}
    files |= {layout: str(next(p for p in result.files if p.stem.endswith(layout))) for layout in layouts}
    stranger(tmp_path, seen, files, extra)
    assert psnr(tmp_path / "without.png", preview) < 40, "the LoRA changes nothing that could be seen"
    for layout in layouts:
        assert psnr(tmp_path / f"{layout}.png", preview) >= 40, layout
