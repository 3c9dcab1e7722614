"""The bar that counts: what somebody else sees who loads the file with plain diffusers, in a process without lora_fp8.

Each family with every layout that diffusers reads of it, and each way to hold a base: a LoRA is trained, and a script
that knows only diffusers loads base and file, prompts with the text, and has to draw the training model's preview
(PSNR >= 40 dB). One process of that script draws the pictures of all cases. Where the base was held in FP8, the
script's base carries the decoded FP8 weights, saved by us as a plain diffusers folder; the gap to the published base is
in the run's report.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import miniatures
import numpy as np
import pytest
import torch
from editing import load_encoders
from PIL import Image

from lora_fp8 import config, families, precision, train

STRANGER = """
import json, sys
import torch, diffusers

torch.set_num_threads(1)
for ask in json.load(open(sys.argv[1], encoding="utf-8")):
    dtype = getattr(torch, ask["dtype"])
    pipe = diffusers.DiffusionPipeline.from_pretrained(ask["base"], torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    vae = pipe.vae
    for picture, file in ask["files"].items():
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
        pipe.image_processor.postprocess(pixels, output_type="pil")[0].save(picture)
        vae.to(dtype)
        if file:
            pipe.unload_lora_weights()
assert not any(name.split(".")[0] == "lora_fp8" for name in sys.modules), "lora_fp8 was imported"
"""

PROMPT, SIDE, GUIDANCE = "a red cat on a chair", 32, 4.0


def psnr(one: Path, other: Path) -> float:
    a, b = (np.asarray(Image.open(p).convert("RGB"), dtype=np.float64) for p in (one, other))
    error = np.mean((a - b) ** 2)
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


def stranger(folder: Path, questions: list[dict[str, Any]]) -> None:
    """Run the plain diffusers script in `folder` on all questions; it draws each picture that one names."""
    script, question = folder / "stranger.py", folder / "question.json"
    script.write_text(STRANGER, encoding="utf-8")
    question.write_text(json.dumps(questions), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name, question.name], capture_output=True, text=True, encoding="utf-8", cwd=folder
    )
    assert done.returncode == 0, done.stderr[-2000:]


def widen(base: Path) -> None:
    """Give the FLUX miniature a transformer as wide as the released one, of one block each.

    diffusers converts kohya's FLUX names at this width only: the sizes of the released model are written into it.
    """
    small = diffusers.FluxTransformer2DModel.load_config(base / "transformer")
    wide = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128, "num_attention_heads": 24}
    transformer = diffusers.FluxTransformer2DModel.from_config({**small, **wide, "axes_dims_rope": (16, 56, 56)})
    shutil.rmtree(base / "transformer")
    transformer.save_pretrained(base / "transformer")


CASES = {
    "sd15": {"family": "sd15", "storage": "none", "layouts": ["diffusers", "kohya"]},
    "sdxl in fp8": {"family": "sdxl", "storage": "fp8", "layouts": ["diffusers", "kohya"]},
    "flux in fp8": {"family": "flux", "storage": "fp8", "layouts": ["diffusers"]},
    # Half a billion weights: CPUs without instructions for bf16 multiply them eight times as fast in float32.
    "flux as wide as released": {
        "family": "flux",
        "storage": "none",
        "layouts": ["diffusers", "kohya"],
        "dtype": "fp32",
    },
}


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Train every case that is asked, and let the stranger draw. Returns each case's folder of pictures and preview."""
    root = tmp_path_factory.mktemp("stranger")
    pictures = root / "pictures"
    pictures.mkdir()
    for i in range(3):
        noise = np.random.default_rng(i).integers(0, 256, (38, 32 + 10 * i, 3), dtype=np.uint8)
        Image.fromarray(noise).save(pictures / f"{i}.png")
        (pictures / f"{i}.txt").write_text(f"thing {i}", encoding="utf-8")
    asked = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}
    trained = {case: train_case(root / case.replace(" ", "-"), pictures, **CASES[case]) for case in sorted(asked)}
    stranger(root, [question for question, _ in trained.values()])
    return {case: (root / case.replace(" ", "-"), preview) for case, (_, preview) in trained.items()}


def train_case(
    folder: Path, pictures: Path, *, family: str, storage: str, layouts: list[str], dtype: str = "bf16"
) -> tuple[dict[str, Any], Path]:
    """Train one case in `folder`. Returns what to ask the stranger, and the preview that training drew."""
    Family = families.get(family)
    wide = dtype == "fp32"
    steps = 2 if wide else 6  # of a preview
    base = folder / "base"
    miniatures.save(Family.name, base)
    if wide:
        widen(base)
    job = config.loads(
        f"""
        name = "job"
        output_dir = {json.dumps(str(folder / "runs"))}
        [model]
        family = "{family}"
        path = {json.dumps(str(base))}
        dtype = "{dtype}"
        [quantize]
        storage = "{storage}"
        [adapter]
        rank = 4
        alpha = 6.0   # not the rank: a forgotten scale shows
        [dataset]
        resolution = {SIDE}
        bucket_step = {min(Family.bucket_multiple, 64)}
        cache_dir = {json.dumps(str(folder / "cache"))}
        [[dataset.folders]]
        path = {json.dumps(str(pictures))}
        [train]
        steps = {2 if wide else 12}
        batch_size = {1 if wide else 2}
        threads = 1
        [optimizer]
        lr = {0.01 if wide else 0.005}
        [export]
        formats = {json.dumps(layouts)}
        verify = {"false" if wide else "true"}
        [preview]
        prompts = ["{PROMPT}"]
        steps = {steps}
        guidance = {GUIDANCE}
        """
    )
    result = train.run(job, progress=False)
    preview = result.run.samples / f"step-{job.train.steps:06d}-0.png"

    seen = base
    model = Family(job.model, device="cpu", dtype=torch.bfloat16)
    if storage == "fp8":  # the base as training saw it, as a plain diffusers folder
        seen = folder / "decoded"
        shutil.copytree(base, seen)
        denoiser = model.make_empty_denoiser()
        precision.quantize_(denoiser, job.quantize, model.keep_precise, torch.bfloat16, model.modulation)
        precision.fill_(denoiser, model.read_denoiser_tensors(), dtype=torch.bfloat16)
        plain = getattr(diffusers, model.denoiser_class).from_config(model.read_denoiser_config()).to(torch.bfloat16)
        plain.load_state_dict(dict(precision.dequantize_tensors(denoiser)))
        shutil.rmtree(seen / model.denoiser_name)
        plain.save_pretrained(seen / model.denoiser_name)

    call = {"prompt": PROMPT, "num_inference_steps": steps, "guidance_scale": GUIDANCE, "height": SIDE, "width": SIDE}
    if family == "flux":
        load_encoders(model)
        call["max_sequence_length"] = model.max_sequence_length
    files = {str(folder / "without.png"): ""}
    files |= {
        str(folder / f"{layout}.png"): str(next(p for p in result.files if p.stem.endswith(layout)))
        for layout in layouts
    }
    dtypes = {"bf16": "bfloat16", "fp32": "float32"}
    return {"base": str(seen), "dtype": dtypes[dtype], "files": files, "seed": 42, "call": call}, preview


@pytest.mark.parametrize("case", CASES)
def test_a_stranger_draws_our_preview(case: str, drawn: dict[str, tuple[Path, Path]]) -> None:
    folder, preview = drawn[case]
    assert psnr(folder / "without.png", preview) < 40, "the LoRA changes nothing that could be seen"
    for layout in CASES[case]["layouts"]:
        assert psnr(folder / f"{layout}.png", preview) >= 40, layout
