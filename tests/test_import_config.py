"""Moving in: files of every tool in its own format -> our settings, with an account of every key.

Judged by: the keys as tomllib, json and yaml read them here; transformers' schedules and the arithmetic of the other
tools' documents, computed in the test; `config.loads`.
"""

import inspect
import itertools
import json
import math
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import came_pytorch
import diffusers
import miniatures
import prodigyopt
import pytest
import schedulefree
import torch
import transformers
import yaml
from PIL import Image

from lora_fp8 import adapters, cli, config, families, importing
from lora_fp8.adapters.targets import choose_layers
from lora_fp8.data import buckets
from lora_fp8.errors import UserError
from lora_fp8.importing import dataset_settings, import_draft, readers, source_files, target_modules
from lora_fp8.lora_files import layer_names
from lora_fp8.objectives import Diffusion, FlowMatching
from lora_fp8.settings import Adapter, Job, Optimizer, Preview, schedules, split_preview
from lora_fp8.training import optim

EXAMPLES = Path(__file__).parent / "data" / "import"
WRITTEN_FILES = EXAMPLES.parent / "import_written"
"""What further examples become, read by hand line by line, and the keys that are told of."""
PICTURES = {"10_zibo cat": (5, False), "plain": (7, True), "reg": (2, True)}
TOOLS = {
    "sd_scripts_flux.toml": "sd-scripts",
    "sd_scripts_train.sh": "sd-scripts",
    "sd_scripts_dataset.toml": "sd-scripts",
    "sd_scripts_sd15.toml": "sd-scripts",
    "fluxgym_train.sh": "sd-scripts",  # what fluxgym writes
    "kohya_ss_flux.json": "kohya_ss",
    "kohya_ss_sdxl.json": "kohya_ss",
    "kohya_ss_lokr.json": "kohya_ss",
    "lora_scripts_preset.toml": "lora-scripts",
    "lora_scripts_sd.toml": "lora-scripts",
    "lora_scripts_sdxl.toml": "lora-scripts",
    "musubi_qwen.toml": "musubi-tuner",
    "musubi_dataset.toml": "musubi-tuner",
    "musubi_wan.sh": "musubi-tuner",
    "musubi_zimage.sh": "musubi-tuner",
    "musubi_wan_dataset.toml": "musubi-tuner",
    "diffusion_pipe_flux.toml": "diffusion-pipe",
    "diffusion_pipe_dataset.toml": "diffusion-pipe",
    "diffusion_pipe_wan.toml": "diffusion-pipe",
    "diffusion_pipe_sdxl.toml": "diffusion-pipe",
    "ai_toolkit_flux.yaml": "ai-toolkit",
    "ai_toolkit_qwen.yaml": "ai-toolkit",
    "ai_toolkit_sdxl.yaml": "ai-toolkit",
    "onetrainer_sdxl.json": "onetrainer",
    "onetrainer_sd15_old.json": "onetrainer",
    "onetrainer_chroma.json": "onetrainer",
    "simpletuner_flux.json": "simpletuner",
    "simpletuner_sdxl.json": "simpletuner",
    "simpletuner_kontext.json": "simpletuner",
    "simpletuner_backend.json": "simpletuner",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, with the folders of pictures that they name: 5 without captions, 7 with, 2 to leave out."""
    root = tmp_path_factory.mktemp("import") / "files"
    shutil.copytree(EXAMPLES, root)
    for name, (count, captions) in PICTURES.items():
        folder = root / "pictures" / name
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8)).save(folder / f"{i}.png")
            if captions:
                (folder / f"{i}.txt").write_text("a picture", encoding="utf-8")
    return root


@pytest.fixture
def bring(here: Path) -> Callable[..., importing.Import]:
    """bring("x.toml"): the import of one of the examples."""
    return lambda name, **more: importing.import_file(here / name, **more)


def settings(made: importing.Import) -> dict[str, Any]:
    """What our file holds, as TOML reads it."""
    return tomllib.loads(importing.to_toml(made))


def entries(made: importing.Import) -> list[import_draft.Entry]:
    """What is told of each key of the file."""
    told = [*made.mapped, *made.differs, *made.no_counterpart, *made.unknown]
    return [entry for entry in told if entry.key != target_modules.LAYERS]  # that is of no key


def keys(found: list[import_draft.Entry]) -> set[str]:
    return {entry.key for entry in found}


def leaves(data: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of everything in a file that is not a table, read without the code under test."""
    if isinstance(data, dict) and data:
        for name, value in data.items():
            yield from leaves(value, f"{prefix}{str(name).removeprefix('--')}.")
    elif isinstance(data, list) and data and all(isinstance(one, dict) for one in data):
        for i, value in enumerate(data):
            yield from leaves(value, f"{prefix}{i}.")
    else:
        yield prefix.removesuffix(".").removeprefix("config.process.0.")


def read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


REFERRED = {
    "sd_scripts_flux.toml": ["sd_scripts_dataset.toml"],
    "musubi_qwen.toml": ["musubi_dataset.toml"],
    "musubi_wan.sh": ["musubi_wan_dataset.toml"],
    "diffusion_pipe_flux.toml": ["diffusion_pipe_dataset.toml"],
    "onetrainer_sdxl.json": ["onetrainer_concepts.json", "onetrainer_samples.json"],
    "simpletuner_flux.json": ["simpletuner_backend.json"],
    "fluxgym_train.sh": ["fluxgym_dataset.toml"],
    "musubi_zimage.sh": ["musubi_dataset.toml"],
    "diffusion_pipe_wan.toml": ["diffusion_pipe_wan_dataset.toml"],
    "diffusion_pipe_sdxl.toml": ["diffusion_pipe_dataset.toml"],
    "simpletuner_sdxl.json": ["simpletuner_backend.json"],
    "simpletuner_kontext.json": ["simpletuner_kontext_backend.json"],
}


# ------------------------------------------------------------------------------------------------ whose file it is


@pytest.mark.parametrize(("name", "tool"), TOOLS.items())
def test_the_tool_is_recognised_from_the_file(bring: Callable[..., importing.Import], name: str, tool: str) -> None:
    made = bring(name)
    assert made.tool.name == tool and made.why and not made.why.startswith("--from")
    counts = Counter(TOOLS.values())
    assert counts.keys() == importing.TOOLS.keys() and min(counts.values()) >= 3


def test_a_file_that_could_be_of_two_tools_is_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("network_dim = 8\nlearning_rate = 1e-4\nmax_train_steps = 100\n", encoding="utf-8")
    with pytest.raises(UserError, match="sd-scripts or musubi-tuner. Name the trainer with --from"):
        importing.import_file(path)
    for tool in ("sd-scripts", "musubi-tuner"):
        made = importing.import_file(path, tool)
        assert made.tool.name == tool and settings(made)["adapter"]["rank"] == 8
    with pytest.raises(UserError, match="--from: kohya is not a known trainer. Choose one of sd-scripts, kohya_ss"):
        importing.import_file(path, "kohya")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", "steps = 3", "not a settings file of a known trainer"),
        ("a.toml", "steps = ", "not valid TOML"),
        ("a.json", '{"a": 1,}', "not valid JSON: line 1"),
        ("a.yaml", "a: [1", "not valid YAML"),
        ("a.json", "[1, 2]", "not a settings file of a known trainer"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.ini", "[x]\ny=1", "expected a .toml, .json, .yaml"),
        ("a.sh", "python cache.py --dit x", "no command runs a training script"),
        ("a.yaml", "job: extension\nconfig: {process: []}", "expected one process"),
        ("a.toml", "pretrained_model_name_or_path = 'x'\nlearning_rate = 'fast'", "'fast' is not a number"),
    ],
)
def test_what_is_not_understood_is_one_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        importing.import_file(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, backslashes, and a .bat with ^ at the ends of its lines."""
    text = 'pretrained_model_name_or_path = "E:\\\\models\\\\sd_xl_base_1.0.safetensors"\r\nnetwork_dim = 8\r\n'
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "a.toml").write_bytes(text.encode(encoding))
        made = settings(importing.import_file(tmp_path / "a.toml"))
        assert made["model"]["path"] == "E:\\models\\sd_xl_base_1.0.safetensors" and made["adapter"]["rank"] == 8
    command = (
        'accelerate launch sdxl_train_network.py ^\r\n --pretrained_model_name_or_path="E:\\m\\a b.safetensors" ^\r\n'
    )
    (tmp_path / "b.bat").write_bytes(b"@echo off\r\n" + command.encode() + b" --network_dim 4 --fp8_base\r\n")
    made = settings(importing.import_file(tmp_path / "b.bat"))
    assert made["model"]["path"] == "E:\\m\\a b.safetensors" and made["adapter"]["rank"] == 4
    assert made["model"]["family"] == "sdxl" and made["quantize"]["storage"] == "fp8"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.sh", ["rank=24  # of the adapter", 'export MODEL="my models/a.safetensors"', "$rank", "${MODEL}"]),
        ("a.ps1", ["$rank = 24 # 网络维度", '$model = "my models/a.safetensors"', "$rank", "$model"]),
        ("a.bat", ["set rank=24", 'set "MODEL=my models/a.safetensors"', "%rank%", "%MODEL%"]),
    ],
)
def test_variables_of_a_script_are_put_in(tmp_path: Path, name: str, lines: list[str]) -> None:
    rank, model = lines[2:]
    command = f'accelerate launch sdxl_train_network.py --network_dim={rank} "--pretrained_model_name_or_path={model}" '
    extra = "%extra%" if name == "a.bat" else "$extra"
    (tmp_path / name).write_text("\n".join([*lines[:2], f"{command}--seed 7 {extra}"]), encoding="utf-8")
    made = importing.import_file(tmp_path / name)
    found = settings(made)
    assert (found["adapter"]["rank"], found["model"]["path"], found["seed"]) == (24, "my models/a.safetensors", 7)
    assert any(note.startswith(extra) for note in made.notes)


# -------------------------------------------------------------------------------------- what each of the files becomes

JOINT_ATTENTION = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
JOINT_ATTENTION += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
FLUX_BLOCKS = [*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp"]
FLUX_BLOCKS += ["proj_out", "norm1.linear", "norm1_context.linear", "norm.linear"]
"""The linear layers of FLUX' blocks; tests/test_import_targets.py holds them against the model."""
WRITTEN: dict[str, dict[str, Any]] = {
    "sd_scripts_flux.toml": {
        "tracking": {"to": ["wandb"], "project": "foxes", "run_name": "red"},
        "name": "my-flux-lora",
        "output_dir": "output",
        "seed": 42,
        "model": {
            "family": "flux",
            "path": "models/flux1-dev.safetensors",
            "files": {
                "vae": "models/ae.safetensors",
                "text_encoder": "models/clip_l.safetensors",
                "text_encoder_2": "models/t5xxl_fp16.safetensors",
            },
            "dtype": "bf16",
        },
        "quantize": {"storage": "fp8"},
        "adapter": {"type": "lora", "rank": 16, "alpha": 8.0, "targets": FLUX_BLOCKS},
        "dataset": {
            "resolution": 1024,
            "buckets": True,
            "bucket_step": 32,
            "max_aspect": 3.0,
            "flip": True,
            "color_jitter": 0.05,
            "caption_dropout": 0.1,
            "shuffle_tags": True,
            "keep_tokens": 2,
            "folders": [
                {"path": "pictures/10_zibo cat", "repeats": 3, "trigger": "zibo cat"},
                {"path": "pictures/plain"},
                {"path": "pictures/reg", "repeats": 11, "regularization": True},
            ],
        },
        # 5 x 3 + 7 = 22 samples and as many for regularization, 22 batches of 2, 11 steps of 2 batches, 10 epochs
        "train": {"steps": 110, "batch_size": 2, "accumulate": 2, "max_grad_norm": 1.0},
        "optimizer": {
            "name": "adamw8bit",
            "lr": 2e-4,
            "lr_scale": "none",
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.99,
        },
        "schedule": {"name": "cosine", "warmup": 0.05},
        "objective": {"timesteps": "logit_normal", "shift": 3.1582, "guidance": 1.0},
        "memory": {"gradient_checkpointing": True, "offload": 0.47},
        "preview": {
            "prompts": ["a zibo cat on a table", "a zibo cat at night"],
            "negative": "blurry, text",
            "every": 250,
            "at_start": False,
            "steps": 24,
            "guidance": 3.5,
            "width": 1024,
            "height": 768,
            "seed": 7,
        },
        "checkpoint": {"every": 22},
        "export": {"every": 22, "dtype": "bf16"},
    },
    "sd_scripts_train.sh": {
        "name": "my lora-v2",
        "output_dir": "output",
        "seed": 1234567890123 % 2**32,
        "model": {"family": "sdxl", "path": "stabilityai/stable-diffusion-xl-base-1.0", "dtype": "bf16"},
        "quantize": {"storage": "bf16"},
        "adapter": {
            "type": "lora",
            "rank": 32,
            "ranks": {"conv1": 8, "conv2": 8, "downsamplers.0.conv": 8, "upsamplers.0.conv": 8},
            "alpha": 16.0,
            "targets": [
                *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q", "attn2.to_k"),
                *("attn2.to_v", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
                *("conv1", "conv2", "downsamplers.0.conv", "upsamplers.0.conv", "conv_shortcut", "time_emb_proj"),
            ],
            "text_encoder": True,
        },
        "dataset": {
            "resolution": 1024,
            "buckets": True,
            "max_aspect": 8.0,
            "upscale": False,
            "missing_caption": "trigger",
            "shuffle_tags": True,
            "keep_tokens": 1,
            "folders": [{"path": "pictures/10_zibo cat", "repeats": 10, "trigger": "zibo cat"}],
        },
        # 50 samples on two GPUs, 4 epochs
        "train": {"steps": 100, "batch_size": 2},
        "optimizer": {
            "name": "prodigy",
            "lr": 1.0,
            "lr_scale": "none",
            "safeguard_warmup": False,
            "use_bias_correction": False,
            "decouple": True,
            "weight_decay": 0.01,
        },
        "schedule": {"name": "cosine_with_restarts", "warmup": 0, "cycles": 3},
        "objective": {"min_snr_gamma": 5.0},
        "memory": {"gradient_checkpointing": False},
        "checkpoint": {"every": 25},
        "export": {"every": 25},
    },
    "kohya_ss_flux.json": {
        "name": "flux-page",
        "output_dir": "E:\\output",
        "seed": 42,
        "model": {
            "family": "flux",
            "path": "E:\\models\\flux1\\flux1-dev.safetensors",
            "files": {
                "vae": "E:\\models\\vae\\ae.safetensors",
                "text_encoder": "E:\\models\\clip\\clip_l.safetensors",
                "text_encoder_2": "E:\\models\\clip\\t5xxl_fp16.safetensors",
            },
            "dtype": "bf16",
        },
        "quantize": {"storage": "fp8"},
        "adapter": {"type": "lora", "rank": 8, "alpha": 8.0, "dropout": 0.0, "targets": FLUX_BLOCKS},
        "dataset": {
            "resolution": 768,
            "buckets": True,
            "bucket_step": 64,
            "max_aspect": 8.0,
            "upscale": True,
            "flip": False,
            "caption_dropout": 0.0,
            "shuffle_tags": False,
            "folders": [{"path": "E:\\pictures"}],
        },
        "train": {"steps": 4000, "batch_size": 1, "accumulate": 1, "max_grad_norm": 0.5},
        "optimizer": {"name": "adamw8bit", "lr": 4e-4, "lr_scale": "none"},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "objective": {"timesteps": "logit_normal", "shift": 1.0, "guidance": 3.5},
        "memory": {"gradient_checkpointing": True},
        "preview": {
            "prompts": ["a man with a funny hat", "a dog"],
            "every": 200,
            "at_start": False,
            "steps": 20,
            "width": 768,
            "height": 768,
        },
        "checkpoint": {"every": 500},
        "export": {"every": 500, "dtype": "bf16"},
    },
    "lora_scripts_preset.toml": {
        "seed": 1337,
        "model": {"family": "flux", "path": "./sd-models/flux1-dev.safetensors", "dtype": "bf16"},
        "quantize": {"storage": "fp8"},
        "adapter": {"type": "lora", "rank": 32, "alpha": 16.0, "targets": FLUX_BLOCKS},
        "dataset": {
            "resolution": 768,
            "buckets": True,
            "max_aspect": 8.0,
            "bucket_step": 32,
            "upscale": False,
            "folders": [{"path": "./train/aki"}],
        },
        "train": {"steps": "TODO", "batch_size": 1},
        "optimizer": {"name": "adamw8bit", "lr": 1e-4, "lr_scale": "none", "weight_decay": 0.02},
        "schedule": {"name": "cosine", "warmup": 0},
        "objective": {"timesteps": "logit_normal", "shift": 1.0, "guidance": 1.0},
        "memory": {"gradient_checkpointing": True},
        "export": {"dtype": "bf16"},
    },
    "musubi_qwen.toml": {
        "name": "my-qwen-lora",
        "output_dir": "/data/output",
        "seed": 42,
        "model": {
            "family": "qwen_image",
            "path": "/models/qwen_image_bf16.safetensors",
            "files": {"vae": "/models/qwen_vae.safetensors", "text_encoder": "/models/qwen_2.5_vl_7b.safetensors"},
            "dtype": "bf16",
        },
        "quantize": {"storage": "fp8", "scale": "1x64"},
        "adapter": {
            "type": "lora",
            "rank": 32,
            "alpha": 16.0,
            # As its pattern for the modulation matches no layer, musubi-tuner adapts that too.
            "targets": [*families.get("qwen_image").adapter_targets, "img_mod.1", "txt_mod.1"],
        },
        "dataset": {
            "resolution": 704,
            "buckets": True,
            "max_aspect": 4.0,
            "upscale": True,
            "folders": [{"path": "pictures/10_zibo cat", "repeats": 2}, {"path": "pictures/plain"}],
        },
        # 5 x 2 + 7 = 17 samples, 4 epochs
        "train": {"steps": 68, "batch_size": 1},
        "optimizer": {"name": "adamw8bit", "lr": 1e-4, "lr_scale": "none", "loraplus_lr_ratio": 4.0},
        "schedule": {"name": "constant", "warmup": 50},
        "objective": {"timesteps": "logit_normal", "shift": "scheduler"},
        "memory": {"gradient_checkpointing": True, "offload": 0.27},
        "checkpoint": {"every": 17},
        "export": {"every": 17},
    },
    "musubi_wan.sh": {
        "tracking": {"to": ["tensorboard"]},
        "name": "wan-cat",
        "output_dir": "output",
        "seed": 42,
        "model": {
            "family": "wan",
            "path": "models/wan2.1_t2v_1.3B_bf16.safetensors",
            "files": {"vae": "models/wan_2.1_vae.safetensors"},
            "dtype": "bf16",
        },
        "quantize": {"storage": "fp8", "scale": "1x64"},
        "adapter": {"type": "lora", "rank": 32, "alpha": 32.0},
        "dataset": {
            "resolution": 640,
            "buckets": True,
            "max_aspect": 4.0,
            "upscale": False,
            "frames": [1, 25, 45],
            "clip": "chunks",
            "folders": [{"path": "pictures/10_zibo cat", "repeats": 3}, {"path": "pictures/plain"}],
        },
        "train": {"steps": 1200, "batch_size": 1, "accumulate": 2, "max_grad_norm": 0.5},
        "optimizer": {"name": "adamw8bit", "lr": 0.0002, "lr_scale": "none"},
        "schedule": {"name": "constant", "warmup": 0},
        "objective": {"timesteps": "logit_normal", "shift": 3.0, "t_min": 0.0, "t_max": 0.9},
        "memory": {"gradient_checkpointing": True},
        "preview": {
            "prompts": ["a zibo cat on a table", "a zibo cat at night"],
            "negative": "blurry, text",
            "every": 200,
            "at_start": True,
            "steps": 24,
            "width": 1024,
            "height": 768,
            "seed": 7,
        },
        "checkpoint": {"every": 200},
        "export": {"every": 200},
    },
    "diffusion_pipe_flux.toml": {
        "tracking": {"to": ["wandb"], "project": "x"},
        "name": "my_flux",
        "output_dir": "/data/runs/my_flux",
        "model": {"family": "flux", "path": "/models/FLUX.1-dev", "dtype": "bf16"},
        "quantize": {"storage": "fp8"},
        "adapter": {"type": "lora", "rank": 32, "alpha": 32.0, "dtype": "bf16", "targets": FLUX_BLOCKS},
        "dataset": {
            "resolution": 1024,
            "buckets": True,
            "max_aspect": 2.5,
            "shuffle_tags": True,
            "keep_tokens": 0,
            "tag_separator": ",",
            "caption_variants": 10,
            "folders": [
                {"path": "pictures/10_zibo cat", "repeats": 5, "resolution": 512},
                {"path": "pictures/10_zibo cat", "repeats": 5},
                {"path": "pictures/plain", "resolution": 512, "mask": "pictures/masks"},
                {"path": "pictures/plain", "mask": "pictures/masks"},
            ],
        },
        # 5 x 5 + 7 = 32 samples at two resolutions, 4 of them a step, 20 epochs
        "train": {"steps": 320, "batch_size": 2, "accumulate": 2, "max_grad_norm": 1.0},
        "optimizer": {
            "name": "adamw8bit",
            "lr": 2e-5,
            "lr_scale": "none",
            "weight_decay": 0.01,
            "beta1": 0.9,
            "beta2": 0.99,
        },
        "schedule": {"name": "constant", "warmup": 100},
        "objective": {"unmasked_weight": 0.0, "timesteps": "logit_normal", "shift": "scheduler"},
        "memory": {"gradient_checkpointing": True, "offload": 0.53},
        "checkpoint": {"every": 80},
        "export": {"every": 80, "dtype": "bf16"},
    },
    "ai_toolkit_flux.yaml": {
        "tracking": {"to": ["wandb"], "project": "foxes", "run_name": "red"},
        "name": "my_first_flux_lora_v1",
        "output_dir": "output",
        "model": {"family": "flux", "path": "black-forest-labs/FLUX.1-dev", "dtype": "bf16"},
        "quantize": {"storage": "fp8"},
        "adapter": {"type": "lora", "rank": 16, "alpha": 16.0, "targets": FLUX_BLOCKS},
        "dataset": {
            "resolution": 1024,
            "max_aspect": 8.0,
            "upscale": False,
            "trigger": "p3r5on",
            "caption_dropout": 0.05,
            "shuffle_tags": False,
            "folders": [{"path": "pictures/plain", "resolution": side} for side in (512, 768, 1024)],
        },
        "train": {"steps": 2000, "batch_size": 1, "accumulate": 4},
        "optimizer": {"name": "adamw8bit", "lr": 1e-4, "lr_scale": "none", "eps": 1e-6, "ema_decay": 0.99},
        "schedule": {"name": "constant", "warmup": 0},
        "objective": {"timesteps": "logit_normal", "shift": 1.0},
        "memory": {"gradient_checkpointing": True},
        "preview": {
            "prompts": ["p3r5on holding a sign", "a horse at a night club"],
            "every": 250,
            "steps": 20,
            "guidance": 4.0,
            "width": 1024,
            "height": 1024,
            "seed": 42,
        },
        "checkpoint": {"every": 250, "keep": 4},
        "export": {"every": 250, "dtype": "fp16"},
    },
    "onetrainer_sdxl.json": {
        "tracking": {"to": ["tensorboard"]},
        "name": "my-sdxl-lora",
        "model": {"family": "sdxl", "path": "stabilityai/stable-diffusion-xl-base-1.0", "dtype": "bf16"},
        "quantize": {"storage": "fp8"},
        "adapter": {"type": "lora", "rank": 32, "alpha": 16.0, "dtype": "fp32"},
        "dataset": {
            "resolution": 1024,
            "buckets": True,
            "max_aspect": 4.0,
            "flip": False,
            "caption_lines": "one",
            "caption_dropout": 0.1,
            "shuffle_tags": True,
            "keep_tokens": 1,
            "tag_separator": ",",
            "folders": [{"path": "pictures/10_zibo cat", "repeats": 3}],
        },
        # 15 samples, 4 batches of 4, 2 steps, 30 epochs
        "train": {"steps": 60, "batch_size": 4, "accumulate": 2, "max_grad_norm": 1.0},
        "optimizer": {
            "name": "adamw8bit",
            "lr": 3e-4,
            "lr_scale": math.sqrt(8),
            "weight_decay": 0.02,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
        },
        "schedule": {"name": "cosine", "warmup": 0.1, "min_lr": 0.05},
        "objective": {"min_snr_gamma": 5.0, "noise_offset": 0.05},
        "memory": {"gradient_checkpointing": True},
        "preview": {
            "prompts": ["a zibo cat"],
            "negative": "blurry",
            "every": 4,
            "at_start": False,
            "steps": 25,
            "guidance": 6.5,
            "width": 1024,
            "height": 1024,
            "seed": 42,
        },
        "export": {"every": 100, "dtype": "bf16"},
    },
    "onetrainer_sd15_old.json": {
        "tracking": {"to": ["tensorboard"]},
        "name": "lora",
        "model": {"family": "sd15", "path": "stable-diffusion-v1-5/stable-diffusion-v1-5", "dtype": "bf16"},
        "quantize": {"storage": "bf16"},
        "adapter": {"type": "lora", "rank": 16, "alpha": 1.0, "text_encoder": True},
        "dataset": {"resolution": 512, "buckets": True, "max_aspect": 4.0, "folders": [{"path": "TODO"}]},
        "train": {"steps": "TODO", "batch_size": 4, "accumulate": 1},
        "optimizer": {
            "name": "adamw",
            "lr": 2e-4,
            "lr_scale": "none",
            "weight_decay": 0.01,
            "text_encoder_lr": 3e-4,
        },
        "schedule": {"name": "constant", "warmup": 200},
        "objective": {"noise_offset": 0.05},
        "export": {"dtype": "fp16"},
    },
    "simpletuner_flux.json": {
        "tracking": {"to": ["wandb"]},
        "name": "my-flux",
        "output_dir": "output",
        "seed": 42,
        "model": {"family": "flux", "path": "black-forest-labs/FLUX.1-dev", "dtype": "bf16"},
        "quantize": {"storage": "fp8", "compute": "fp8"},
        "adapter": {"type": "lora", "rank": 16, "alpha": 16.0, "targets": JOINT_ATTENTION},
        "dataset": {
            "caption_lines": "one",
            "resolution": 1024,
            "max_aspect": 8.0,
            "buckets": True,
            "caption_dropout": 0.1,
            "shuffle_tags": True,
            "keep_tokens": 1,
            "tag_separator": ",",
            "caption_variants": 3,
            "folders": [{"path": "pictures/10_zibo cat", "repeats": 3}],
        },
        # 5 pictures shown once and twice more: 15 samples, 8 batches of 2, 4 steps, 6 epochs
        "train": {"steps": 24, "batch_size": 2, "accumulate": 2},
        "optimizer": {"name": "adamw", "lr": 1e-4, "lr_scale": 2.0, "weight_decay": 0.02},
        "schedule": {"name": "linear", "warmup": 23, "min_lr": 0.01},
        "objective": {"timesteps": "logit_normal", "shift": 3.0},
        "memory": {"gradient_checkpointing": True},
        "preview": {
            "prompts": ["zibo holds a sign"],
            "every": 50,
            "at_start": False,
            "steps": 16,
            "guidance": 3.5,
            "width": 1024,
            "height": 1024,
            "seed": 42,
        },
        "checkpoint": {"every": 100, "keep": 5},
        "export": {"every": 100},
    },
}


DATA = "sd_scripts_dataset.toml: datasets.0"
LAYERS = target_modules.LAYERS  # sd-scripts trains q, k and v of FLUX as one LoRA
REPORTED: dict[str, tuple[str, str]] = {  # the keys that differ; those that have no counterpart although they are on
    "sd_scripts_flux.toml": (
        f"training.fp8_base|{DATA}.subsets.0.class_tokens|{DATA}.resolution|sd_scripts_dataset.toml: general.flip_aug"
        f"|{DATA}.subsets.1.flip_aug|{DATA}.min_bucket_reso|{DATA}.max_bucket_reso|training.max_train_epochs"
        f"|saving.save_every_n_epochs|{DATA}.subsets.2.is_reg|training.blocks_to_swap|{DATA}.subsets.1.color_aug|{LAYERS}",
        "dataset.resolution|network.network_args|saving.sample_sampler|saving.huggingface_token",
    ),
    "sd_scripts_train.sh": (
        "bucket_no_upscale|mixed_precision|train_data_dir|train_batch_size|num_processes|max_train_epochs|learning_rate"
        "|save_every_n_epochs|seed|output_name|network_args",
        "full_fp16|huggingface_token",
    ),
    "kohya_ss_flux.json": (
        f"fp8_base|train_data_dir|min_bucket_reso|max_bucket_reso|save_every_n_steps|sample_prompts|{LAYERS}",
        "wandb_api_key|max_grad_norm|huggingface_token|save_every_n_epochs",
    ),
    "lora_scripts_preset.toml": (
        f"data.bucket_no_upscale|data.fp8_base|data.train_data_dir|{LAYERS}",
        "data.max_train_epochs",
    ),
    "lora_scripts_sd.toml": (
        "mixed_precision|train_data_dir|min_bucket_reso|max_bucket_reso|conv_dim|conv_alpha",
        "max_train_epochs|save_every_n_epochs|sample_every_n_epochs|sample_sampler",
    ),
    "musubi_qwen.toml": (
        "musubi_dataset.toml: general.resolution|training.max_train_epochs|output.save_every_n_epochs"
        "|training.timestep_sampling|training.blocks_to_swap",
        "musubi_dataset.toml: datasets.0.cache_directory|musubi_dataset.toml: datasets.1.cache_directory",
    ),
    "musubi_wan.sh": (
        "musubi_wan_dataset.toml: general.bucket_no_upscale|"
        "musubi_wan_dataset.toml: general.resolution|musubi_wan_dataset.toml: datasets.0.target_frames"
        "|save_every_n_steps|min_timestep|max_timestep",
        "t5|musubi_wan_dataset.toml: datasets.0.cache_directory|musubi_wan_dataset.toml: datasets.1.cache_directory",
    ),
    "diffusion_pipe_flux.toml": (
        "model.transformer_dtype|micro_batch_size_per_gpu|epochs|optimizer.type|save_every_n_epochs"
        "|diffusion_pipe_dataset.toml: min_ar|blocks_to_swap"
        "|diffusion_pipe_dataset.toml: max_ar|diffusion_pipe_dataset.toml: num_ar_buckets",
        "checkpoint_every_n_minutes",
    ),
    "ai_toolkit_flux.yaml": (
        "model.quantize|save.save_every|save.max_step_saves_to_keep",
        "save.hf_repo_id|meta.name|meta.version",
    ),
    "onetrainer_sdxl.json": (
        "unet.weight_dtype|onetrainer_concepts.json: 0.include_subdirectories|epochs|save_every|save_every_unit"
        "|sample_after|sample_after_unit",
        "backup_after|backup_after_unit|cache_dir|onetrainer_concepts.json: 0.image.enable_crop_jitter",
    ),
    "onetrainer_sd15_old.json": ("train_dtype", "epochs|cache_dir"),
    "simpletuner_flux.json": (
        "base_model_precision|simpletuner_backend.json: 0.resolution"
        "|simpletuner_backend.json: 0.crop|num_train_epochs|optimizer|optimizer_config|checkpoint_step_interval",
        "|".join(
            f"simpletuner_backend.json: {key}"
            for key in ("1.id", "1.type", "1.aws_bucket_name", "1.aws_access_key_id", "1.aws_secret_access_key")
            + ("1.repeats", "0.minimum_image_size")
        )
        + "|grad_clip_method|max_grad_norm|push_to_hub|hub_token",
    ),
}


for path in sorted(WRITTEN_FILES.glob("*.toml")):
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    REPORTED[path.stem] = tuple("|".join(content["reported"][kind]) for kind in ("differs", "lacking"))
    WRITTEN[path.stem] = {name: value for name, value in content.items() if name != "reported"}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written(bring: Callable[..., importing.Import], name: str) -> None:
    assert settings(bring(name)) == WRITTEN[name]


@pytest.mark.parametrize("name", REPORTED)
def test_what_is_reported(bring: Callable[..., importing.Import], name: str) -> None:
    made = bring(name)
    differs, lacking = (set(filter(None, group.split("|"))) for group in REPORTED[name])
    assert keys(made.differs) == differs
    assert keys([entry for entry in made.no_counterpart if not entry.off]) == lacking
    assert not made.unknown
    assert all(entry.note for entry in [*made.differs, *made.no_counterpart])


# ---------------------------------------------------------------------------------------------- no key is lost


def expected_keys(here: Path, name: str) -> list[str]:
    found = list(leaves(read(here / name)))
    for other in REFERRED.get(name, []):
        found += [f"{other}: {key}" for key in leaves(read(here / other))]
    return found


@pytest.mark.parametrize("name", [name for name in TOOLS if not name.endswith(".sh")])
def test_every_key_is_accounted_for_exactly_once(bring: Callable[..., importing.Import], here: Path, name: str) -> None:
    told = [entry.key for entry in entries(bring(name))]
    extra = [key for key in told if key.startswith(("additional_parameters: ", "ui_custom_params: "))]
    assert sorted(set(told) - set(extra)) == sorted(expected_keys(here, name))
    assert len(told) == len(set(told))


@pytest.mark.parametrize("name", [name for name in TOOLS if name.endswith(".sh")])
def test_every_option_of_a_command_is_accounted_for(
    bring: Callable[..., importing.Import], here: Path, name: str
) -> None:
    text = (here / name).read_text(encoding="utf-8").split("accelerate launch")[1]
    options = [word.split("=")[0].removeprefix("--") for word in text.split() if word.startswith("--")]
    for other in REFERRED.get(name, []):
        options += [f"{other}: {key}" for key in leaves(read(here / other))]
    told = [entry.key for entry in entries(bring(name))]
    assert sorted(told) == sorted(options)


def places(data: Any) -> Iterator[dict[str, Any]]:
    """Every table of a file."""
    if isinstance(data, dict):
        yield data
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from places(value)


RELEASED = {
    "ai-toolkit": """
        job config.name type training_folder device network.type network.linear network.linear_alpha save.dtype
        save.save_every save.max_step_saves_to_keep datasets.0.folder_path datasets.0.caption_ext
        datasets.0.caption_dropout_rate datasets.0.shuffle_tokens datasets.0.cache_latents_to_disk datasets.0.resolution
        train.batch_size train.cache_text_embeddings train.steps train.gradient_accumulation train.train_unet
        train.train_text_encoder train.gradient_checkpointing train.noise_scheduler train.optimizer train.lr train.dtype
        model.name_or_path model.arch model.quantize model.qtype model.quantize_te model.qtype_te model.low_vram
        sample.sampler sample.sample_every sample.width sample.height sample.prompts sample.neg sample.seed
        sample.walk_seed sample.guidance_scale sample.sample_steps meta.name meta.version save.save_format
        train.timestep_type train.content_or_style train.loss_type train.optimizer_params.weight_decay
        train.lr_scheduler train.diff_output_preservation train.diff_output_preservation_multiplier
        train.diff_output_preservation_class train.switch_boundary_every train.unload_text_encoder
        train.ema_config.use_ema train.ema_config.ema_decay train.skip_first_sample train.disable_sampling
        logging.log_every logging.use_ui_logger model.model_kwargs sample.samples.0.prompt""",
    "onetrainer": """
        base_model_name batch_size learning_rate model_type output_model_format resolution attention_mechanism compile
        transformer.train transformer.weight_dtype text_encoder.train text_encoder.weight_dtype training_method
        vae.weight_dtype train_dtype weight_dtype output_dtype timestep_distribution layer_filter layer_filter_preset
        quantization.layer_filter quantization.layer_filter_preset noising_weight""",
    "simpletuner": """
        base_model_precision caption_dropout_probability checkpoint_step_interval checkpoints_total_limit
        compress_disk_cache data_backend_config disable_bucket_pruning gradient_checkpointing hub_model_id
        ignore_final_epochs learning_rate lora_rank lora_type lr_scheduler lr_warmup_steps max_grad_norm max_train_steps
        minimum_image_size mixed_precision model_family model_flavour model_type num_eval_images num_train_epochs
        optimizer output_dir pretrained_model_name_or_path push_checkpoints_to_hub push_to_hub quantize_via report_to
        resolution resolution_type resume_from_checkpoint seed skip_file_discovery tracker_project_name tracker_run_name
        train_batch_size use_ema vae_batch_size validation_adapter_strength validation_guidance
        validation_guidance_rescale validation_negative_prompt validation_num_inference_steps validation_prompt
        validation_prompt_library validation_resolution validation_seed validation_steps flow_schedule_shift
        grad_clip_method lora_alpha lycoris_config validation_disable_unconditional""",
    "kohya_ss": """
        LoRA_type adaptive_noise_scale additional_parameters block_alphas block_dims block_lr_zero_threshold
        bucket_no_upscale bucket_reso_steps cache_latents cache_latents_to_disk caption_dropout_every_n_epochs
        caption_dropout_rate caption_extension clip_skip color_aug conv_alpha conv_alphas conv_dim conv_dims
        decompose_both dim_from_weights down_lr_weight enable_bucket epoch factor flip_aug full_fp16
        gradient_accumulation_steps gradient_checkpointing keep_tokens learning_rate lora_network_weights lr_scheduler
        lr_scheduler_num_cycles lr_scheduler_power lr_warmup max_data_loader_n_workers max_resolution max_timestep
        max_token_length max_train_epochs mem_eff_attn mid_lr_weight min_snr_gamma min_timestep mixed_precision
        module_dropout multires_noise_discount multires_noise_iterations network_alpha network_dim network_dropout
        no_token_padding noise_offset noise_offset_type num_cpu_threads_per_process optimizer optimizer_args
        persistent_data_loader_workers prior_loss_weight random_crop rank_dropout save_every_n_epochs save_every_n_steps
        save_last_n_steps save_last_n_steps_state save_precision scale_v_pred_loss_like_noise_pred scale_weight_norms
        sdxl sdxl_cache_text_encoder_outputs sdxl_no_half_vae seed shuffle_caption stop_text_encoder_training
        text_encoder_lr train_batch_size train_on_input training_comment unet_lr unit up_lr_weight use_cp log_with v2
        v_parameterization vae_batch_size weighted_captions xformers LyCORIS_preset ae async_upload bypass_mode clip_l
        constrain conv_block_alphas conv_block_dims dataset_config debiased_estimation_loss discrete_flow_shift dora_wd
        dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph extra_accelerate_launch_args
        flux1_cache_text_encoder_outputs flux1_cache_text_encoder_outputs_to_disk flux1_checkbox fp8_base full_bf16
        gpu_ids guidance_scale highvram huber_c huber_schedule huggingface_path_in_repo huggingface_repo_id
        huggingface_repo_type huggingface_repo_visibility huggingface_token ip_noise_gamma
        ip_noise_gamma_random_strength log_config log_tracker_config log_tracker_name logging_dir loraplus_lr_ratio
        loraplus_text_encoder_lr_ratio loraplus_unet_lr_ratio loss_type lowvram lr_scheduler_args lr_scheduler_type
        main_process_port masked_loss max_bucket_reso max_grad_norm max_train_steps metadata_author metadata_description
        metadata_license metadata_tags metadata_title min_bucket_reso model_list model_prediction_type multi_gpu
        network_weights noise_offset_random_strength num_machines num_processes output_dir output_name
        pretrained_model_name_or_path rank_dropout_scale reg_data_dir rescaled resume resume_from_huggingface
        sample_every_n_epochs sample_every_n_steps sample_prompts sample_sampler save_as_bool save_model_as save_state
        save_state_on_train_end save_state_to_huggingface split_mode t5xxl t5xxl_max_token_length timestep_sampling
        train_blocks train_data_dir train_norm use_scalar use_tucker v_pred_like_loss vae wandb_api_key
        wandb_run_name""",
    "lora-scripts": """
        metadata.name metadata.version metadata.author metadata.description data.network_module data.lycoris_algo
        data.conv_dim data.conv_alpha data.train_norm data.lokr_factor""",
    "diffusion-pipe": """
        output_dir dataset epochs micro_batch_size_per_gpu pipeline_stages gradient_accumulation_steps gradient_clipping
        warmup_steps eval_every_n_epochs eval_before_first_step eval_micro_batch_size_per_gpu
        eval_gradient_accumulation_steps save_every_n_epochs checkpoint_every_n_minutes activation_checkpointing
        partition_method save_dtype caching_batch_size steps_per_print video_clip_mode model.type model.transformer_path
        model.vae_path model.llm_path model.clip_path model.dtype model.transformer_dtype model.timestep_sample_method
        adapter.type adapter.rank adapter.dtype optimizer.type optimizer.lr optimizer.betas optimizer.weight_decay
        optimizer.eps monitoring.enable_wandb monitoring.wandb_api_key monitoring.wandb_tracker_name
        monitoring.wandb_run_name resolutions enable_ar_bucket min_ar max_ar num_ar_buckets frame_buckets
        directory.0.path directory.0.num_repeats""",
}
"""Keys of files that the tools come with (examples, presets), lists by their first entry: Qwen-Image, Z-Image; Krea 2
and Chroma; Krea 2 and FLUX.2 Klein; a LoKr of SDXL and FLUX.1; a LoKr; HunyuanVideo."""


@pytest.mark.parametrize("tool", RELEASED)
def test_every_key_of_the_tools_own_examples_is_known(tool: str) -> None:
    table = importing.TOOLS[tool]
    unknown = []
    for key in RELEASED[tool].split():
        key = table.aliases.get(key, key)
        if not any(table.find_rule(prefix + key) for prefix in ("", table.prefix, "data.")):
            unknown.append(key)
    assert not unknown


SCHEMAS = tomllib.loads((EXAMPLES.parent / "import_keys.toml").read_text(encoding="utf-8"))
LEAST = {
    "sd-scripts": {"pretrained_model_name_or_path": "sd_xl_base_1.0.safetensors", "network_module": "networks.lora"},
    "musubi-tuner": {"dit": "x", "network_module": "networks.lora_wan"},
    "onetrainer": {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "x"},
}
OF_A_FOLDER = {"image_dir", "image_directory", "video_directory", "control_directory"}
"""Mean something in a dataset's table only."""


def with_key(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tables with one more value in them; "a.0.b" is in the first table of the list a."""
    made = json.loads(json.dumps(data))
    place, parts = made, re.sub(r"\.0\.", ".", key).split(".")
    for part in parts[:-1]:
        place = place.setdefault(part, [{}] if f"{part}.0." in key else {})
        place = place[0] if isinstance(place, list) else place
    place[parts[-1]] = value
    return made


@pytest.mark.parametrize("tool", SCHEMAS)
def test_every_setting_that_a_trainer_knows_is_mapped_or_told_by_name(tool: str, tmp_path: Path) -> None:
    """Each alone, at several values: in the table, told once under its name, with a reason that is its own."""
    table, unknown, idle = importing.TOOLS[tool], [], []
    for key in SCHEMAS[tool].split():
        unknown += [key] if table.find_rule(table.aliases.get(key, key)) is None else []
        found = []
        for value in (3, 0.5, "0.5", "abc", True, ["a=1"]):
            kind = "json" if tool == "onetrainer" else "toml"
            source = source_files.Source(tmp_path / f"x.{kind}", kind, with_key(LEAST[tool], key, value))
            try:
                made = importing.convert(source, table, "")
            except UserError as error:
                assert "\n" not in str(error)
                continue
            told = [entry for entry in entries(made) if entry.key == key]
            assert len(told) == 1, key
            found.append((told[0], told[0] in [*made.mapped, *made.differs]))
        nothing = [entry for entry, _ in found if "no effect with the other settings" in entry.note]
        if nothing and not any(used for _, used in found) and key not in OF_A_FOLDER:
            idle.append(key)
    assert (unknown, idle) == ([], [])


@pytest.mark.parametrize("name", [name for name in TOOLS if not name.endswith(".sh")])
def test_a_key_that_no_table_has_is_told(here: Path, name: str) -> None:
    """In every table of every example. Tables that are nobody's business as a whole hold no surprise."""
    source = source_files.read_source(here / name)
    tool, why = importing.recognise(source)
    told = 0
    for table in places(source.data):
        table["surprise_of_tomorrow"] = 7
        made = importing.convert(source, tool, why)
        del table["surprise_of_tomorrow"]
        found = [entry for entry in entries(made) if entry.key.endswith("surprise_of_tomorrow")]
        assert len(found) == 1 and found[0].value in ("7", readers.HIDDEN)
        told += found[0] in made.unknown
    assert told >= 1


@pytest.mark.parametrize("name", ["sd_scripts_flux.toml", "kohya_ss_flux.json", "onetrainer_sdxl.json"])
def test_a_value_of_any_kind_is_accounted_for_or_refused(here: Path, name: str) -> None:
    source = source_files.read_source(here / name)
    tool, why = importing.recognise(source)
    counts = {"accounted": 0, "refused": 0}
    for table in list(places(source.data)):
        for key, value in list(table.items()):
            if isinstance(value, dict):
                continue
            for strange in ("", True, -1, "nonsense", ["a=b"]):
                table[key] = strange
                try:
                    told = [entry.key for entry in entries(importing.convert(source, tool, why))]
                    assert any(one.split(".")[-1] == key or one == key for one in told) and len(told) == len(set(told))
                    counts["accounted"] += 1
                except UserError as error:
                    assert "\n" not in str(error)
                    counts["refused"] += 1
            table[key] = value
    assert counts["accounted"] > 3 * counts["refused"] > 0


EXTREME = (0, "0", -1e9, 10**400, "1" * 400, "1e200,1e200", [0], {"a": 0})


@pytest.mark.parametrize("name", TOOLS)
def test_no_number_and_no_shape_of_a_value_ends_in_a_traceback(here: Path, name: str) -> None:
    source = source_files.read_source(here / name)
    tool, why = importing.recognise(source)
    for number, table in enumerate(places(source.data)):
        for key, value in list(table.items()):
            table[key] = EXTREME[(number + len(key)) % len(EXTREME)]
            for _ in range(2):  # of each key two of them; the fuzzing in tests/fuzz has the rest
                try:
                    importing.to_toml(importing.convert(source, tool, why))
                except UserError as error:
                    assert "\n" not in str(error)
                table[key] = EXTREME[(number + 5 * len(key) + 3) % len(EXTREME)]
            table[key] = value


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("sd_scripts_flux.toml", "min_bucket_reso", "0"),
        ("sd_scripts_flux.toml", "bucket_reso_steps", 0),
        ("sd_scripts_flux.toml", "resolution", "9" * 400),
        ("sd_scripts_flux.toml", "resolution", "1e200,1e200"),
        ("simpletuner_backend.json", "resolution", -1e9),
        ("simpletuner_backend.json", "split_on", "?"),
        ("lora_scripts_preset.toml", "metadata", 0),
        ("lora_scripts_preset.toml", "data", 0),
    ],
)
def test_a_value_that_cannot_be_reckoned_with_is_told(here: Path, file: str, key: str, value: Any) -> None:
    source = source_files.read_source(here / file)
    tool, why = importing.recognise(source)
    for table in places(source.data):
        if key in table or key == "bucket_reso_steps":
            table[key] = value
    try:
        importing.convert(source, tool, why)
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("tool", importing.TOOLS)
def test_a_file_without_a_table_is_refused(tmp_path: Path, tool: str) -> None:
    for name, text in (("a.json", "[]"), ("b.json", "7"), ("c.yaml", ""), ("d.yaml", "- 1\n- 2\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="no table of settings|no settings that|of a known trainer"):
            importing.import_file(tmp_path / name, tool)


@pytest.mark.parametrize("tool", importing.TOOLS.values(), ids=importing.TOOLS)
def test_the_tables_name_settings_that_exist(tool: import_draft.Tool) -> None:
    for key, rule in tool.rules.items():
        if rule.to:
            section, _, name = rule.to.rpartition(".")
            model = Job.model_fields[section].annotation if section else Job
            assert name in model.model_fields, f"{tool.name}: {key} -> {rule.to}"
        assert rule.kind not in ("none", "idle", "differs") or rule.note, f"{tool.name}: {key} says no reason"
    unknown = [key for key in tool.defaults if tool.find_rule(key) is None]
    assert not unknown and all(tool.rules.get(name) for name in tool.aliases.values())


# --------------------------------------------------------------------------------------------- the same training


STEPS = ["train.steps=1500"]
"""For a file that counts epochs of images that are not here: the number of steps is left to be filled in."""


def find_problems(made: importing.Import) -> list[str]:
    """Why our file would not load, apart from steps that cannot be counted."""
    return [
        line
        for line in importing.find_problems(made)
        if line != "train.steps: this setting must still be filled in (TODO)"
    ]


def job_of(made: importing.Import) -> Job:
    return config.loads(importing.to_toml(made), STEPS if made.settings["train"].get("steps") == "TODO" else [])


RATES = {
    "sd_scripts_flux.toml": 2e-4,
    "sd_scripts_train.sh": 1.0,  # 1e-4 there, as a factor on what Prodigy finds
    "kohya_ss_flux.json": 4e-4,
    "lora_scripts_preset.toml": 1e-4,
    "musubi_wan.sh": 2e-4,
    "diffusion_pipe_flux.toml": 2e-5,
    "ai_toolkit_flux.yaml": 1e-4,
    "onetrainer_sdxl.json": 3e-4 * math.sqrt(4 * 2),
    "onetrainer_sd15_old.json": 2e-4,
    "simpletuner_flux.json": 1e-4 * math.sqrt(1 * 2 * 2),
    **{"sd_scripts_sd15.toml": 5e-4, "fluxgym_train.sh": 8e-4, "kohya_ss_sdxl.json": 3e-4, "kohya_ss_lokr.json": 1e-4},
    **{"lora_scripts_sdxl.toml": 5e-5, "musubi_zimage.sh": 1e-4, "diffusion_pipe_wan.toml": 5e-5},
    **{"diffusion_pipe_sdxl.toml": 4e-5, "ai_toolkit_qwen.yaml": 1e-4, "ai_toolkit_sdxl.yaml": 2e-4},
    **{"onetrainer_chroma.json": 3e-4, "simpletuner_sdxl.json": 2e-4, "simpletuner_kontext.json": 1e-4},
}


@pytest.mark.parametrize("name", RATES)
def test_the_effective_rate_is_theirs(bring: Callable[..., importing.Import], name: str) -> None:
    """On FP8, where ours would otherwise multiply it by 1.4."""
    job = job_of(bring(name))
    assert job.optimizer.lr * optim.resolve_lr_factor(job.optimizer, "fp8") == pytest.approx(RATES[name])


@pytest.mark.parametrize("name", [name for name in WRITTEN])
def test_our_file_loads(bring: Callable[..., importing.Import], name: str) -> None:
    made = bring(name)
    if made.settings["model"]["family"] not in families.list_families():
        assert importing.find_problems(made) and any("model.family" in text for text in made.todo)
        return
    assert find_problems(made) == []
    dumped = job_of(made).model_dump()
    for section, values in made.settings.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if key != "folders" and value != "TODO":
                assert dumped[section][key] == value


def kohya(tmp_path: Path, text: str) -> importing.Import:
    path = tmp_path / "kohya.toml"
    model = 'pretrained_model_name_or_path = "black-forest-labs/FLUX.1-dev"\nnetwork_module = "networks.lora_flux"\n'
    path.write_text(model + text, encoding="utf-8")
    return importing.import_file(path)


def test_what_is_around_captions_and_the_mark_of_fixed_tags(tmp_path: Path) -> None:
    """sd-scripts: prefix + " " + caption + " " + suffix; keep_tokens_separator has an effect with shuffle_caption."""
    data = """
[general]
keep_tokens_separator = "|||"
shuffle_caption = true
caption_suffix = "best"
[[datasets]]
[[datasets.subsets]]
image_dir = "a"
caption_prefix = "zibo, "
[[datasets.subsets]]
image_dir = "b"
is_reg = true
"""
    (tmp_path / "data.toml").write_text(data, encoding="utf-8")
    made = kohya(tmp_path, "dataset_config = 'data.toml'\n")
    first, second = settings(made)["dataset"]["folders"]
    assert (first["prefix"], first["suffix"], "trigger" in first) == ("zibo,", "best", False)
    assert ("prefix" in second, second["suffix"]) == (False, "best")
    assert settings(made)["dataset"]["keep_separator"] == "|||"
    lost = {entry.key.split(".")[-1] for entry in made.no_counterpart if not entry.off}
    assert not lost & {"caption_prefix", "caption_suffix", "keep_tokens_separator"}
    (tmp_path / "a" / "5_x").mkdir(parents=True)
    text = "train_data_dir = 'a'\ncaption_prefix = 'zibo'\nkeep_tokens_separator = '|||'\n"
    made = kohya(tmp_path, text)
    assert [folder["prefix"] for folder in settings(made)["dataset"]["folders"]] == ["zibo"]
    assert "keep_separator" not in settings(made)["dataset"]  # nothing is shuffled: the mark is text there


@pytest.mark.parametrize("given", [75, 100, 150, 225, 255])
def test_captions_have_as_many_chunks_as_in_sd_scripts(tmp_path: Path, given: int) -> None:
    """Its strategy_base.py begins a chunk at each of these positions, of `given` tokens with BOS and EOS."""
    length = given + 2
    chunks = len(range(1, length - 77 + 2, 75)) if length > 77 else 1
    for model in ("runwayml/stable-diffusion-v1-5", "stabilityai/stable-diffusion-xl-base-1.0"):
        path = tmp_path / "a.toml"
        path.write_text(f'pretrained_model_name_or_path = "{model}"\nmax_token_length = {given}\n', encoding="utf-8")
        made = importing.import_file(path, "sd-scripts")
        assert settings(made)["model"]["caption_tokens"] == 75 * chunks
        assert "max_token_length" in {entry.key for entry in made.mapped}


@pytest.mark.parametrize(
    ("tool", "model", "line", "expected"),
    [
        ("sd-scripts", "runwayml/stable-diffusion-v1-5", "clip_skip = 2", 2),
        ("sd-scripts", "runwayml/stable-diffusion-v1-5", "", None),
        ("sd-scripts", "runwayml/stable-diffusion-v1-5", "clip_skip = 0", None),
        ("sd-scripts", "stabilityai/stable-diffusion-xl-base-1.0", "clip_skip = 2", None),  # ignored there
        ("lora-scripts", "runwayml/stable-diffusion-v1-5", "", 2),  # its page's default
        ("lora-scripts", "runwayml/stable-diffusion-v1-5", "clip_skip = 1", 1),
    ],
)
def test_clip_skip_counts_as_in_sd_scripts(
    tmp_path: Path, tool: str, model: str, line: str, expected: int | None
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'pretrained_model_name_or_path = "{model}"\n{line}\n', encoding="utf-8")
    made = importing.import_file(path, tool)
    assert settings(made)["model"].get("clip_skip") == expected
    lost = [entry.key for entry in made.no_counterpart if not entry.off]
    assert ("clip_skip" in lost) == (line == "clip_skip = 0")
    assert settings(made)["model"].get("caption_tokens") == (225 if tool == "lora-scripts" else None)


@pytest.mark.parametrize(("kind", "expected"), [("STABLE_DIFFUSION_15", 2), ("STABLE_DIFFUSION_XL_10_BASE", None)])
def test_onetrainers_layer_skip_begins_at_0(tmp_path: Path, kind: str, expected: int | None) -> None:
    """Its models take hidden_states[-(1 + skip)], and SDXL's [-(2 + skip)], which is not done here."""
    path = tmp_path / "a.json"
    for skip in (0, 1):
        data = {"model_type": kind, "training_method": "LORA", "base_model_name": "a", "text_encoder_layer_skip": skip}
        path.write_text(json.dumps(data), encoding="utf-8")
        made = importing.import_file(path, "onetrainer")
        assert settings(made)["model"].get("clip_skip") == (expected and skip + 1)
        lost = [entry.key for entry in made.no_counterpart if not entry.off]
        assert ("text_encoder_layer_skip" in lost) == (skip == 1 and expected is None)


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_the_weight_of_regularization_pictures(tmp_path: Path, weight: float) -> None:
    made = kohya(tmp_path, f'train_data_dir = "a"\nreg_data_dir = "not/here"\nprior_loss_weight = {weight}')
    plain, regular = settings(made)["dataset"]["folders"]
    assert regular == {"path": "not/here", "regularization": True, **({"weight": weight} if weight else {})}
    assert "weight" not in plain
    told = made.mapped if weight else made.no_counterpart
    assert "prior_loss_weight" in {one.key for one in told if not one.off}


@pytest.mark.parametrize(
    ("name", "warmup", "more"),
    [
        ("constant", 10, {}),
        ("constant_with_warmup", 10, {}),
        ("linear", 10, {}),
        ("cosine", 0.1, {}),
        ("cosine_with_restarts", 5, {"num_cycles": 1}),
        ("cosine_with_restarts", 5, {"num_cycles": 3}),
        ("polynomial", 0, {"power": 1.0, "lr_end": 0.0}),
        ("polynomial", 12, {"power": 2.5, "lr_end": 0.0}),
        ("cosine_with_min_lr", 10, {"min_lr_rate": 0.25}),
        ("warmup_stable_decay", 10, {"num_decay_steps": 20}),
        ("warmup_stable_decay", 0, {"num_decay_steps": 15, "min_lr_ratio": 0.25}),
    ],
)
def test_the_rate_of_every_step_is_that_of_their_schedule(
    tmp_path: Path, name: str, warmup: float, more: dict[str, Any]
) -> None:
    lines = [f'lr_scheduler = "{name}"', f"lr_warmup_steps = {warmup}", "max_train_steps = 60", "learning_rate = 1e-3"]
    theirs = {"num_cycles": "lr_scheduler_num_cycles", "power": "lr_scheduler_power"}
    theirs |= dict.fromkeys(("min_lr_rate", "min_lr_ratio"), "lr_scheduler_min_lr_ratio")
    theirs["num_decay_steps"] = "lr_decay_steps"
    lines += [f"{theirs[key]} = {value}" for key, value in more.items() if key in theirs]
    job = kohya(tmp_path, "\n".join(lines))
    found = config.loads(importing.to_toml(job))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    steps = int(warmup * 60) if warmup < 1 else warmup
    schedule = transformers.get_scheduler(name, optimizer, steps, 60, scheduler_specific_kwargs=more)
    for step in range(60):
        ours = schedules.compute_learning_rate(step, found.schedule, found.optimizer.lr, found.train.steps)
        assert ours == pytest.approx(schedule.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        schedule.step()


def test_rex_and_a_decay_as_a_share(tmp_path: Path) -> None:
    """OneTrainer's and musubi-tuner's REX has d = 0.9, where the paper has 1/2; the decay may be a share."""
    path = tmp_path / "a.json"
    data = {"model_type": "STABLE_DIFFUSION_15", "training_method": "LORA", "base_model_name": "a"}
    data |= {"learning_rate_scheduler": "REX", "learning_rate_warmup_steps": 0, "learning_rate_min_factor": 0.1}
    path.write_text(json.dumps(data), encoding="utf-8")
    found = job_of(importing.import_file(path, "onetrainer")).schedule
    for step in range(11):
        left, d = 1 - step / 10, 0.9
        expected = 0.1 + 0.9 * left / ((1 - d) + d * left)
        assert schedules.compute_learning_rate(step, found, 1.0, 10) == pytest.approx(expected, rel=1e-12)
    base = "max_train_steps = 60\nlearning_rate = 1e-3\nlr_scheduler = 'warmup_stable_decay'\n"
    made = settings(kohya(tmp_path, f"{base}lr_decay_steps = 0.25\nlr_scheduler_num_cycles = 2"))["schedule"]
    assert (made["name"], made["decay"]) == ("wsd", 0.25)
    made = kohya(tmp_path, f"{base}lr_scheduler_num_cycles = 1")
    assert settings(made)["schedule"]["name"] == "constant"
    assert any("the schedule is constant" in one.note for one in made.mapped)


@pytest.mark.parametrize(
    ("side", "small", "large"),
    [(512, 256, 1024), (512, 320, 1024), (1024, 256, 2048), (1024, 512, 1536), (768, 256, 1024)],
)
def test_the_widest_bucket_is_theirs(tmp_path: Path, side: int, small: int, large: int) -> None:
    """kohya's buckets: all sides that are multiples of 64 between two limits, up to the area."""
    sides = range(small, large + 1, 64)
    theirs = [(w, min(large, side**2 // w // 64 * 64)) for w in sides]
    widest = max(max(w / h, h / w) for w, h in theirs if h >= small)
    limits = f"min_bucket_reso = {small}\nmax_bucket_reso = {large}\nenable_bucket = true\nbucket_reso_steps = 64\n"
    made = kohya(tmp_path, f'resolution = "{side},{side}"\n{limits}')
    assert settings(made)["dataset"]["max_aspect"] == min(8, widest)


def test_pictures_that_are_not_enlarged_keep_their_shape(here: Path, tmp_path: Path) -> None:
    """sd-scripts' BucketManager: with no_upscale a bucket is the picture's own size, rounded down to a step."""
    for lines, side in (('resolution = "512,512"\n', 512), ('resolution = "1024,1024"\nmax_bucket_reso = 768\n', 1024)):
        made = kohya(tmp_path, f"enable_bucket = true\nbucket_no_upscale = true\n{lines}")
        data = settings(made)["dataset"]
        assert data["upscale"] is False and data["max_aspect"] == 8
        step = data.get("bucket_step", 64)
        placed = buckets.place((1600, 400), side, step, max_aspect=data["max_aspect"], upscale=False)
        assert placed.bucket_wh[0] / placed.bucket_wh[1] == pytest.approx(4, abs=0.5)
        assert "bucket_no_upscale" in keys(made.differs) and "same training: no" in importing.describe_verdict(made)
    made = kohya(tmp_path, "bucket_no_upscale = true\n")  # without enable_bucket it is ignored
    assert "upscale" not in settings(made)["dataset"] and "max_aspect" not in settings(made)["dataset"]
    assert "bucket_no_upscale" in {entry.key for entry in made.no_counterpart if entry.off}


@pytest.mark.parametrize("side", [512, 720, 1024])
def test_the_widest_bucket_of_musubi(here: Path, tmp_path: Path, side: int) -> None:
    """Its buckets: widths of 16 pixels from half the resolution's side up to the side, and the same upright."""
    widths = range(side // 2 // 16 * 16, side + 16, 16)
    widest = max(side * side // width // 16 * 16 / width for width in widths)
    path = tmp_path / "data.toml"
    path.write_text(
        f'[general]\nresolution = {side}\nenable_bucket = true\n[[datasets]]\nimage_directory = "a"\n', encoding="utf-8"
    )
    assert settings(importing.import_file(path))["dataset"]["max_aspect"] == pytest.approx(widest, rel=1e-3)


@pytest.mark.parametrize("name", ["ai_toolkit_sdxl.yaml", "simpletuner_sdxl.json"])
def test_buckets_of_any_shape_are_kept(bring: Callable[..., importing.Import], name: str) -> None:
    """ai-toolkit and SimpleTuner make a bucket of every aspect ratio: nothing is cut at our default, 2."""
    made = bring(name)
    assert settings(made)["dataset"]["max_aspect"] == 8
    assert any("max_aspect = 8" in entry.to and "keeps the aspect ratio" in entry.note for entry in made.defaults)


def test_the_widest_bucket_of_onetrainer(here: Path, tmp_path: Path) -> None:
    """mgds' AspectBucketing has ratios up to 1:4."""
    for value, expected in ((True, 4.0), (None, 4.0), (False, None)):
        page = read(here / "onetrainer_sdxl.json") | {"aspect_ratio_bucketing": value}
        page = {key: entry for key, entry in page.items() if entry is not None}
        (tmp_path / "o.json").write_text(json.dumps(page), encoding="utf-8")
        assert settings(importing.import_file(tmp_path / "o.json"))["dataset"].get("max_aspect") == expected


@pytest.mark.parametrize(
    ("given", "shape", "shift"),
    [
        ("timestep_sampling = 'sigmoid'", "logit_normal", 1.0),
        ("timestep_sampling = 'uniform'\ndiscrete_flow_shift = 2.0", "uniform", 1.0),
        ("timestep_sampling = 'shift'\ndiscrete_flow_shift = 2.5", "logit_normal", 2.5),
        ("timestep_sampling = 'flux_shift'", "logit_normal", "scheduler"),
        ("timestep_sampling = 'sigma'\nweighting_scheme = 'none'\ndiscrete_flow_shift = 2.0", "uniform", 2.0),
        ("timestep_sampling = 'sigma'\nweighting_scheme = 'logit_normal'", "logit_normal", 3.0),
        ("", "uniform", 3.0),  # sd-scripts' defaults
    ],
)
def test_kohyas_ways_to_draw_a_timestep(tmp_path: Path, given: str, shape: str, shift: float | str) -> None:
    found = settings(kohya(tmp_path, given))["objective"]
    assert (found["timesteps"], found["shift"]) == (shape, shift)


@pytest.mark.parametrize(
    ("given", "expected", "where"),
    [
        ("fp8_base = true", {"storage": "fp8"}, "differs"),
        ("fp8_base_unet = true", {"storage": "fp8"}, "differs"),
        ("fp8_base = true\nfp8_scaled = true", {"storage": "fp8", "scale": "1x64"}, "mapped"),
        ("fp8_base = false", {"storage": "bf16"}, ""),
    ],
)
def test_kohyas_fp8(tmp_path: Path, given: str, expected: dict[str, str], where: str) -> None:
    made = kohya(tmp_path, f"mixed_precision = 'bf16'\n{given}")
    assert settings(made)["quantize"] == expected
    if where:
        found = {entry.key: entry for entry in getattr(made, where)}[given.split(" =")[0]]
        assert where == "mapped" or "quantize.scale = 'none' is the exact equivalent" in found.note
    # The exact equivalent that the line names is one that our config takes.
    assert config.loads(importing.to_toml(made), ["quantize.scale='none'"] if where == "differs" else [])


def test_an_optimizer_that_finds_its_rate_leaves_a_todo(tmp_path: Path) -> None:
    made = kohya(tmp_path, "optimizer_type = 'DAdaptAdam'\nlearning_rate = 1.0\nmixed_precision = 'bf16'")
    assert "lr = 0.0001  # TODO: choose a learning rate for AdamW8bit; 1.0 is for DAdaptAdam" in importing.to_toml(made)
    assert not find_problems(made)


def test_prodigy_and_lion_of_every_trainer(here: Path, tmp_path: Path) -> None:
    """Each as its package takes it; what a file leaves out is the package's own."""
    args = ["decouple=True", "d_coef=2", "safeguard_warmup=True", "weight_decay=0.01"]
    text = f"optimizer_type = 'Prodigy'\nlearning_rate = 1.0\ntext_encoder_lr = 1.0\noptimizer_args = {args}\n"
    made = kohya(tmp_path, text)
    theirs = {"name": "prodigy", "lr_scale": "none"}
    own = {"d_coef": 2.0, "safeguard_warmup": True, "use_bias_correction": False, "weight_decay": 0.01}
    own |= {"decouple": True}
    assert settings(made)["optimizer"] == theirs | own | {"lr": 1.0}
    assert {"optimizer_type", "optimizer_args", "learning_rate", "text_encoder_lr"} <= keys(made.mapped)
    usual = inspect.signature(prodigyopt.Prodigy).parameters
    plain = {key: usual[key].default for key in ("safeguard_warmup", "use_bias_correction")} | {"weight_decay": 0.0}
    assert plain["weight_decay"] == usual["weight_decay"].default
    assert inspect.signature(bitsandbytes.optim.Lion8bit).parameters["weight_decay"].default == 0

    made = kohya(tmp_path, "optimizer_type = 'Prodigy'\nlearning_rate = 1e-4\nunet_lr = 0.8\ntext_encoder_lr = 0.3")
    assert settings(made)["optimizer"] == theirs | plain | {"lr": 0.8}
    assert "text_encoder_lr" in keys(made.no_counterpart)
    made = kohya(tmp_path, "use_lion_optimizer = true\nlearning_rate = 2e-5\nnetwork_train_unet_only = true")
    lion = {"name": "lion8bit", "lr": 2e-5, "lr_scale": "none", "weight_decay": 0.0}
    assert settings(made)["optimizer"] == lion and "use_lion_optimizer" in keys(made.differs)

    def changed(name: str, *pairs: tuple[str, str]) -> importing.Import:
        text = (here / name).read_text(encoding="utf-8")
        for before, after in pairs:
            assert before in text, before
            text = text.replace(before, after)
        path = here / f"changed_{name}"
        path.write_text(text, encoding="utf-8")
        return importing.import_file(path)

    made = changed("ai_toolkit_flux.yaml", ('"adamw8bit"', "Prodigy"))
    assert settings(made)["optimizer"] == theirs | plain | {"lr": 1.0, "eps": 1e-6, "ema_decay": 0.99}  # takes 1 itself
    assert "config.process.0.train.lr" in {*keys(made.mapped)} or "train.lr" in {*keys(made.mapped)}
    made = changed("simpletuner_flux.json", ('"adamw_bf16"', '"prodigy"'), ("weight_decay=0.02,decouple_lr=True", ""))
    (differs,) = [entry for entry in made.differs if entry.key == "optimizer"]
    assert differs.note == "this trainer uses the package of Prodigy's authors instead of SimpleTuner's own build"
    made = changed("diffusion_pipe_flux.toml", ("'AdamW8bitKahan'", "'Prodigy'\nd_coef = 0.5"), ("lr = 2e-5", "lr = 1"))
    assert settings(made)["optimizer"]["d_coef"] == 0.5 and settings(made)["optimizer"]["lr"] == 1.0
    made = changed(
        "onetrainer_sdxl.json",
        ('"ADAMW_8BIT"', '"PRODIGY", "d_coef": 3.0, "use_bias_correction": true, "decouple": true'),
    )
    found = settings(made)["optimizer"]
    assert (found["name"], found["d_coef"], found["use_bias_correction"]) == ("prodigy", 3.0, True)
    assert found["safeguard_warmup"] is False and not find_problems(made)
    for growth, expected in (("inf", "unlimited"), ("1.02", 1.02)):
        made = kohya(tmp_path, f"optimizer_type = 'Prodigy'\noptimizer_args = ['d0=1e-5', 'growth_rate={growth}']")
        found = settings(made)["optimizer"]
        assert (found["d0"], found["growth_rate"]) == (1e-5, expected) and "optimizer_args" in keys(made.mapped)


@pytest.mark.parametrize(
    ("theirs", "ours", "where"),
    [
        ("AdaFactor", "adafactor", "differs"),  # relative_step is on unless the arguments say otherwise
        ("AdamWScheduleFree", "adamw_schedulefree", "mapped"),
        ("schedulefree.AdamWScheduleFree", "adamw_schedulefree", "mapped"),
        ("CAME", "came", "mapped"),
        ("bitsandbytes.optim.AdEMAMix8bit", "ademamix8bit", "mapped"),
        ("Muon", "muon", "differs"),
    ],
)
def test_the_newer_optimizers_of_kohya(tmp_path: Path, theirs: str, ours: str, where: str) -> None:
    text = f"optimizer_type = '{theirs}'\nlearning_rate = 3e-4\nlr_scheduler = 'cosine'\nlr_warmup_steps = 10"
    made = kohya(tmp_path, text)
    found = settings(made)
    assert found["optimizer"]["name"] == ours and found["optimizer"]["lr"] == 3e-4
    assert "optimizer_type" in keys(getattr(made, where))
    free = ours == "adamw_schedulefree"  # sd-scripts gives it no schedule
    assert found["schedule"]["name"] == ("constant" if free else "cosine")
    assert ("lr_scheduler" in keys(made.no_counterpart)) == free
    job = job_of(made)
    judge = {
        "adafactor": transformers.optimization.Adafactor,
        "adamw_schedulefree": schedulefree.AdamWScheduleFree,
        "came": came_pytorch.CAME,
        "ademamix8bit": bitsandbytes.optim.AdEMAMix8bit,
    }
    if ours in judge:  # what the file leaves out is the package's own
        assert job.optimizer.weight_decay == inspect.signature(judge[ours]).parameters["weight_decay"].default


def test_a_class_of_kohya_is_the_class_here(tmp_path: Path) -> None:
    args = '["betas=0.9,0.8,0.95", "weight_decay=0.1", "weight_decouple=True"]'
    made = kohya(tmp_path, f"optimizer_type = 'pytorch_optimizer.Adan'\nlearning_rate = 3e-4\noptimizer_args = {args}")
    assert {"optimizer_type", "optimizer_args", "learning_rate"} <= keys(made.mapped)
    section = job_of(made).optimizer
    assert (section.name, section.lr) == ("pytorch_optimizer.Adan", 3e-4)
    assert section.arguments == {"betas": [0.9, 0.8, 0.95], "weight_decay": 0.1, "weight_decouple": True}
    optim.try_out(section)
    made = kohya(tmp_path, "optimizer_type = 'a.B'\noptimizer_args = ['betas=nan', 'eps=1e-8', 'x=None']")
    assert settings(made)["optimizer"]["arguments"] == {"eps": 1e-8}
    assert any("betas=nan, x=None" in entry.note for entry in made.differs)


def test_an_adafactor_with_a_fixed_rate_is_the_same(tmp_path: Path) -> None:
    fixed = '["relative_step=False", "scale_parameter=False", "warmup_init=False", "weight_decay=0.1"]'
    made = kohya(tmp_path, f"optimizer_type = 'adafactor'\nlearning_rate = 3e-4\noptimizer_args = {fixed}")
    assert {"optimizer_type", "optimizer_args", "learning_rate"} <= keys(made.mapped)
    assert settings(made)["optimizer"]["weight_decay"] == 0.1 and not any("optimizer" in line for line in made.todo)
    made = kohya(
        tmp_path, f"optimizer_type = 'adafactor'\noptimizer_args = {fixed.replace('scale_parameter=F', 'x=F')}"
    )
    assert "optimizer_type" in keys(made.differs) and any("optimizer.lr" in line for line in made.todo)


def block_of(name: str, sdxl: bool) -> int:
    """Which number of block_dims belongs to a layer, by kohya's name of it, as its scripts count them."""
    if sdxl:
        part, number = re.match(r"lora_unet_(input_blocks|middle_block|output_blocks)_(\d+)_", name).groups()
        return {"input_blocks": 1, "middle_block": 10, "output_blocks": 13}[part] + int(number)
    if found := re.match(r"lora_unet_(down|up)_blocks_(\d+)_attentions_(\d+)_", name):
        return {"down": 1, "up": 13}[found[1]] + 3 * int(found[2]) + int(found[3])
    return 12


@pytest.mark.parametrize(("family", "count"), [("sd15", 25), ("sdxl", 23)])
def test_ranks_by_block(tmp_path: Path, family: str, count: int) -> None:
    """Every layer of a UNet of full size gets the rank that kohya's scripts give the layer of its kohya name."""
    deep = {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": 1,
        "use_linear_projection": True,
    }
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**(deep if family == "sdxl" else {}))
    Family = families.get(family)
    dims = [4 + number for number in range(count)]
    path = tmp_path / "kohya.toml"

    def bring(*more: str) -> importing.Import:
        base_ = {
            "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
            "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
        }
        lines = [f'pretrained_model_name_or_path = "{base_[family]}"', 'network_module = "networks.lora"']
        lines += ["network_dim = 8", "network_alpha = 4", "network_train_unet_only = true", *more]
        path.write_text("\n".join(lines), encoding="utf-8")
        return importing.import_file(path, "sd-scripts")

    told = ",".join(map(str, dims))
    halves = ",".join(str(dim / 2) for dim in dims)
    made = bring(f'network_args = ["block_dims={told}", "block_alphas={halves}"]')
    assert "network_args" in keys(made.mapped) and not find_problems(made)
    section = Adapter(**settings(made)["adapter"])
    names = Family.choose_adapter_layers(unet)
    ranks, _ = adapters.assign_ranks(section, names)
    name_of, _ = layer_names.get_rule(Family, dict(unet.config), "kohya")
    assert len(names) > 100 and ranks == {name: dims[block_of(name_of(name)[0], family == "sdxl")] for name in names}
    assert section.alpha / section.rank == 0.5
    other = bring(f'network_args = ["block_dims={told}"]')  # alpha is 4 in every block there
    assert "network_args" in keys(other.differs) and settings(other)["adapter"]["ranks"] == section.ranks
    # A block of rank 0 is not trained; nor is one whose rate is not above the threshold.
    first = min(block_of(name_of(name)[0], family == "sdxl") for name in names)
    shape = [0.0 if number == first else dim / 2 for number, dim in enumerate(dims)]
    zero = ",".join("0" if number == first else str(dim) for number, dim in enumerate(dims))
    left_out = bring(f'network_args = ["block_dims={zero}", "block_alphas={",".join(map(str, shape))}"]')
    assert "network_args" in keys(left_out.mapped) and not importing.find_problems(left_out)
    ranks, _ = adapters.assign_ranks(Adapter(**settings(left_out)["adapter"]), names)
    blocks = {name: block_of(name_of(name)[0], family == "sdxl") for name in names}
    assert ranks == {name: dims[number] for name, number in blocks.items() if number != first}
    outer, inner = (12, 1) if family == "sd15" else (9, 3)
    args = [
        f"down_lr_weight={','.join(['0.5'] * 3)}",
        f"mid_lr_weight={','.join(['2'] * inner)}",
        "up_lr_weight=sine+.05",
    ]
    rated = bring(f"network_args = {json.dumps([*args, 'block_lr_zero_threshold=0.06'])}")
    assert "network_args" in keys(rated.mapped) and not importing.find_problems(rated)
    up = [math.sin(math.pi * i / (outer - 1) / 2) + 0.05 for i in range(outer)]
    theirs = [0.5] * 3 + [1.0] * (outer - 3) + [2.0] * inner + [rate if rate > 0.06 else 0 for rate in up]
    theirs = [1.0, *theirs, 1.0] if family == "sdxl" else theirs
    assert len(theirs) == count
    ranks, _ = adapters.assign_ranks(Adapter(**settings(rated)["adapter"]), names)
    assert set(ranks) == {name for name in names if theirs[blocks[name]]}
    found, _ = optim.find_lr_factors(Optimizer(**settings(rated)["optimizer"]), list(ranks))
    assert len(set(theirs)) > 8
    for name in ranks:
        assert found.get(name, 1.0) == pytest.approx(theirs[blocks[name]], rel=1e-6)
    prodigy = bring(f"network_args = {json.dumps(args)}", 'optimizer_type = "Prodigy"', "learning_rate = 1")
    assert "network_args" in keys(prodigy.no_counterpart) and not importing.find_problems(prodigy)


@pytest.mark.parametrize(
    ("args", "double", "single"),
    [
        (["train_blocks=single"], set(), set(range(38))),
        (["train_blocks=double"], set(range(19)), set()),
        (["train_single_block_indices=7,20"], set(range(19)), {7, 20}),
        (["train_double_block_indices=none", "train_single_block_indices=0-2,30-37"], set(), {0, 1, 2, *range(30, 38)}),
        (["train_double_block_indices=1-18", "train_single_block_indices=all"], set(range(1, 19)), set(range(38))),
        (["train_blocks=single", "train_single_block_indices=9"], set(), {9}),
        (["train_single_block_indices=38"], None, None),
    ],
)
def test_chosen_blocks_of_flux(tmp_path: Path, args: list[str], double: set[int] | None, single: set[int]) -> None:
    """At every layer of a FLUX.1 of full depth."""
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6))
    names = families.get("flux").choose_adapter_layers(model)
    made = kohya(tmp_path, f"network_dim = 8\nnetwork_args = {json.dumps(args)}")
    assert not find_problems(made)
    if double is None:
        assert "network_args" in keys(made.no_counterpart) and "ranks" not in settings(made)["adapter"]
        return
    assert "network_args" in keys(made.mapped)
    ranks, notes = adapters.assign_ranks(Adapter(**settings(made)["adapter"]), names)
    kinds = {"transformer_blocks": double, "single_transformer_blocks": single}
    assert set(ranks) == {name for name in names if int(name.split(".")[1]) in kinds[name.split(".")[0]]}
    assert set(ranks.values()) == {8} and not notes


@pytest.mark.parametrize(
    ("args", "ratio", "exact"),
    [
        ("loraplus_lr_ratio=16", 16, True),
        ("loraplus_unet_lr_ratio=8", 8, False),
        ("loraplus_lr_ratio=4', 'loraplus_text_encoder_lr_ratio=2", 4, False),
        ("loraplus_text_encoder_lr_ratio=2", None, False),
    ],
)
def test_kohyas_lora_plus(tmp_path: Path, args: str, ratio: float | None, exact: bool) -> None:
    made = kohya(tmp_path, f"network_args = ['{args}']")
    assert settings(made)["optimizer"].get("loraplus_lr_ratio") == ratio and not find_problems(made)
    lists = {"mapped": made.mapped, "differs": made.differs, "none": made.no_counterpart}
    told = next(name for name, found in lists.items() if "network_args" in keys(found))
    assert told == ("mapped" if exact else "none" if ratio is None else "differs")
    prodigy = kohya(tmp_path, f"network_args = ['{args}']\noptimizer_type = 'Prodigy'")
    assert "network_args" in keys(prodigy.no_counterpart) and not importing.find_problems(prodigy)


@pytest.mark.parametrize(("kind", "own"), [("LyCORIS/LoCon", "dora"), ("Standard", "lora")])
def test_dora_of_kohyas_page(here: Path, tmp_path: Path, kind: str, own: str) -> None:
    """The page stores dora_wd for every type of LoRA; it is used, and reported as used, with LyCORIS only."""
    data = read(here / "kohya_ss_sdxl.json") | {"LoRA_type": kind, "dora_wd": True}
    (tmp_path / "page.json").write_text(json.dumps(data), encoding="utf-8")
    made = importing.import_file(tmp_path / "page.json")
    assert settings(made)["adapter"]["type"] == own
    assert ("dora_wd" in keys(made.mapped)) == (own == "dora")
    assert "dora_wd" not in keys([entry for entry in made.no_counterpart if not entry.off])


def test_network_arguments_beside_converted_ones_are_reported(tmp_path: Path) -> None:
    """Arguments without a counterpart are listed also where a setting was made from another argument."""
    made = kohya(tmp_path, "network_args = ['loraplus_lr_ratio=4', 'conv_dim=8', 'unheard_of=1', 'rank_dropout=0.1']")
    assert settings(made)["optimizer"]["loraplus_lr_ratio"] == 4 and "network_args" in keys(made.mapped)
    (left,) = (entry for entry in made.no_counterpart if entry.key == "network_args")
    assert json.loads(left.value) == ["conv_dim=8", "unheard_of=1"] and left.note and not left.off
    unknown = tmp_path / "unknown.toml"
    unknown.write_text(
        "pretrained_model_name_or_path = 'm.safetensors'\nnetwork_module = 'networks.lora'\n"
        "network_args = ['loraplus_lr_ratio=4', 'block_dims=2,2']\n",
        encoding="utf-8",
    )
    assert any("block_dims=2,2" in line for line in importing.import_file(unknown).todo)


@pytest.mark.parametrize(
    ("only", "without"),
    [
        (["transformer.single_transformer_blocks."], []),
        ([], ["transformer.single_transformer_blocks."]),
        (["attn"], ["transformer_blocks.0", "to_k"]),
        (["add_", "ff.net.0"], []),
        (["transformer.transformer_blocks.0.attn.to_q", ".proj_mlp"], []),
    ],
)
def test_parts_of_names_that_are_trained(here: Path, tmp_path: Path, only: list[str], without: list[str]) -> None:
    """ai-toolkit looks for a word in "transformer." and the name; OneTrainer in the name."""
    Family = families.get("flux")
    with torch.device("meta"):
        model = getattr(diffusers, Family.denoiser_class)(**miniatures.get_config(Family.name))
    names = Family.choose_adapter_layers(model)
    data = read(here / "ai_toolkit_flux.yaml")
    network = data["config"]["process"][0]["network"]
    network["network_kwargs"] = {"only_if_contains": only, "ignore_if_contains": without}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    made = importing.import_file(tmp_path / "a.yaml")
    ranks, _ = adapters.assign_ranks(Adapter(**settings(made)["adapter"]), names)
    full = {name: f"transformer.{name}" for name in names}
    theirs = [name for name in names if not only or any(word in full[name] for word in only)]
    theirs = [name for name in theirs if not any(word in full[name] for word in without)]
    assert 0 < len(theirs) < len(names) and list(ranks) == theirs and not find_problems(made)
    if not without and not any(word.startswith("transformer.") for word in only):
        page = read(here / "onetrainer_chroma.json") | {"layer_filter": ", ".join(only)}
        (tmp_path / "page.json").write_text(json.dumps(page), encoding="utf-8")
        made = importing.import_file(tmp_path / "page.json")
        ranks, _ = adapters.assign_ranks(Adapter(**settings(made)["adapter"]), names)
        assert list(ranks) == [name for name in names if any(word in name for word in only)]


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("given", ["constant", "exponential", "snr", ""])
@pytest.mark.parametrize("kind", ["huber", "smooth_l1"])
def test_the_huber_loss_of_kohyas_scripts(tmp_path: Path, kind: str, given: str, family: str) -> None:
    """Ours, built from the import, against the formulas of sd-scripts' source at 16 noise levels."""
    path = tmp_path / "train.toml"
    text = f"pretrained_model_name_or_path = 'x'\nloss_type = '{kind}'\nhuber_c = 0.2\nhuber_scale = 1.5\n"
    path.write_text(text + (f"huber_schedule = '{given}'" if given else ""), encoding="utf-8")
    made = importing.import_file(path, "sd-scripts", family)
    schedule, exact = given or "snr", family == "sdxl" or given in ("constant", "exponential")
    assert "loss_type" in keys(made.mapped if exact else made.differs)
    section = job_of(made).objective
    t_B = torch.arange(30, 1000, 60)
    sigma_B = (1 / diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
               .alphas_cumprod[t_B] - 1).sqrt()  # fmt: skip
    theirs = {"constant": torch.full(t_B.shape, 0.3), "exponential": torch.exp(math.log(0.2) * t_B / 1000) * 1.5}
    theirs["snr"] = (1 - 0.2) / (1 + sigma_B) ** 2 + 0.2 if family == "sdxl" else theirs["constant"]
    c_B, error_B = theirs[schedule], torch.linspace(-2, 2, len(t_B))
    wanted_B = 2 * (torch.sqrt(error_B**2 + c_B**2) - c_B) * (c_B if kind == "huber" else 1)
    if family == "sdxl":
        scheduler = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
        objective, times_B = Diffusion(scheduler, section), t_B
    else:
        objective, times_B = FlowMatching({}, section), t_B / 1000
    mine_B = objective.compute_loss(error_B.view(-1, 1, 1, 1), torch.zeros(len(t_B), 1, 1, 1), times_B)
    torch.testing.assert_close(mine_B, wanted_B, rtol=1e-4, atol=1e-6)


def test_each_folder_keeps_its_resolution_and_weight(here: Path, tmp_path: Path) -> None:
    """As kohya's documents advise: one folder in several datasets, of a size each."""
    sets = "".join(
        f"[[datasets]]\nresolution = {side}\n[[datasets.subsets]]\nimage_dir = 'a'\nnum_repeats = {n}\n"
        for n, side in enumerate((512, 768, "[1024, 1024]"), 1)
    )
    (tmp_path / "set.toml").write_text(sets, encoding="utf-8")
    made = kohya(tmp_path, f"dataset_config = '{(tmp_path / 'set.toml').as_posix()}'\nresolution = '640,640'")
    folders = [{"path": "a", "resolution": 512}, {"path": "a", "repeats": 2, "resolution": 768}]
    folders += [{"path": "a", "repeats": 3}]
    assert settings(made)["dataset"]["folders"] == folders and settings(made)["dataset"]["resolution"] == 1024
    assert not [key for key in keys(made.differs) if "resolution" in key]
    data = read(here / "ai_toolkit_sdxl.yaml")
    sets = data["config"]["process"][0]["datasets"]
    before = len(settings(importing.import_file(here / "ai_toolkit_sdxl.yaml"))["dataset"]["folders"])
    sets[0]["loss_multiplier"] = 0.25
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    found = settings(importing.import_file(tmp_path / "a.yaml"))["dataset"]["folders"]
    weighed = [folder.get("weight", 1.0) for folder in found]
    assert len(found) == before and weighed[:2] == [0.25, 0.25] and 0.25 not in weighed[2:]  # the first, at two sizes
    data["config"]["process"][0]["datasets"] = [
        {"folder_path": "a", "resolution": 768},
        {"folder_path": "b", "resolution": [1024]},
        {"folder_path": "c"},  # 512 there
    ]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    made = importing.import_file(tmp_path / "a.yaml")
    found = settings(made)["dataset"]
    assert [folder.get("resolution", found["resolution"]) for folder in found["folders"]] == [768, 1024, 512]
    assert "datasets.2.resolution" in keys(made.defaults) and "datasets.0.resolution" in keys(made.mapped)
    concepts = [{"path": "a", "loss_weight": 0.5}, {"path": "b", "image": {"enable_resolution_override": True,
                 "resolution_override": "640"}}]  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(concepts), encoding="utf-8")
    page = read(here / "onetrainer_sdxl.json") | {"concept_file_name": str(tmp_path / "c.json")}
    (tmp_path / "page.json").write_text(json.dumps(page), encoding="utf-8")
    data = settings(importing.import_file(tmp_path / "page.json"))["dataset"]
    assert data["folders"] == [{"path": "a", "weight": 0.5}, {"path": "b", "resolution": 640}]
    assert data["resolution"] == 1024


def test_variants_of_pictures(here: Path, tmp_path: Path) -> None:
    """OneTrainer's changes of pictures, where several versions of each are cached."""
    first = {"enable_crop_jitter": False, "enable_random_rotate": True, "random_rotate_max_angle": 7.5}
    second = first | {
        "enable_random_brightness": True,
        "random_brightness_max_strength": 0.1,
        "enable_random_hue": True,
    }
    second |= {"enable_random_contrast": True, "random_contrast_max_strength": 0.2, "random_hue_max_strength": 0.1}

    def brought(concepts: list[dict[str, Any]]) -> importing.Import:
        (tmp_path / "c.json").write_text(json.dumps(concepts), encoding="utf-8")
        page = read(here / "onetrainer_sdxl.json") | {"concept_file_name": str(tmp_path / "c.json")}
        (tmp_path / "page.json").write_text(json.dumps(page), encoding="utf-8")
        return importing.import_file(tmp_path / "page.json")

    made = brought([{"path": name, "image_variations": 6, "image": second} for name in "ab"])
    data = settings(made)["dataset"]
    names = ("random_crop", "rotate", "color_jitter", "image_variants", "zoom")
    assert [data.get(name) for name in names] == [False, 7.5, 0.2, 6, None]
    assert {"c.json: 0.image.enable_random_contrast", "c.json: 1.image.random_contrast_max_strength"} <= keys(
        made.differs
    )
    assert "c.json: 0.image.enable_random_hue" in keys([entry for entry in made.no_counterpart if not entry.off])
    data = settings(brought([{"path": "a", "image_variations": 3, "image": {}}]))["dataset"]
    assert data["caption_lines"] == "one"  # of several lines of a caption, it draws one each time
    assert (data["random_crop"], data["image_variants"]) == (True, 3)  # its default is to jitter the crop
    made = brought([{"path": "a", "image": second}])  # one version of each picture is cached
    assert not set(names) & set(settings(made)["dataset"])
    lost = keys([entry for entry in made.no_counterpart if not entry.off])
    assert {"c.json: 0.image.enable_random_rotate", "c.json: 0.image.enable_random_brightness"} <= lost


@pytest.mark.parametrize("crops", [True, False])
def test_random_crops(tmp_path: Path, crops: bool) -> None:
    (tmp_path / "1_cat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "1_cat" / "a.png")
    word = str(crops).lower()
    text = f"train_data_dir = '{tmp_path.as_posix()}'\nrandom_crop = {word}\ncolor_aug = {word}\n"
    data = settings(kohya(tmp_path, text))["dataset"]
    assert (data.get("random_crop"), data.get("color_jitter")) == ((True, 0.05) if crops else (None, None))
    page = {"datasets": [{"folder_path": "a", "random_crop": crops}]}
    text = yaml.safe_dump({"job": "extension", "config": {"process": [{"type": "sd_trainer"} | page]}})
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    assert settings(importing.import_file(tmp_path / "a.yaml"))["dataset"].get("random_crop") is (crops or None)


def test_of_two_intervals_one_is_told(tmp_path: Path) -> None:
    """kohya's previews heed the epochs alone; its files are saved at both."""
    folder = tmp_path / "3_cat"
    folder.mkdir()
    for i in range(4):
        Image.new("RGB", (8, 8)).save(folder / f"{i}.png")
    text = f"train_data_dir = '{tmp_path.as_posix()}'\nsample_prompts = 'a cat'\n"
    for name in ("sample", "save"):
        text += f"{name}_every_n_steps = 5\n{name}_every_n_epochs = 2\n"
    made = kohya(tmp_path, text)
    found = settings(made)
    assert found["preview"]["every"] == 2 * 3 * 4 and found["checkpoint"]["every"] == 5
    lost = {entry.key for entry in made.no_counterpart if not entry.off}
    assert "save_every_n_epochs" in lost and not lost & {"sample_every_n_steps", "sample_every_n_epochs"}


@pytest.mark.parametrize(("chosen", "offset"), [("Original", 0.05), ("Multires", None), ("", 0.05)])
def test_the_pages_choice_of_noise_counts(here: Path, tmp_path: Path, chosen: str, offset: float | None) -> None:
    page = read(here / "kohya_ss_sdxl.json") | {"noise_offset": 0.05, "multires_noise_iterations": 6}
    page |= {"noise_offset_type": chosen}
    (tmp_path / "page.json").write_text(json.dumps(page), encoding="utf-8")
    made = importing.import_file(tmp_path / "page.json")
    assert settings(made).get("objective", {}).get("noise_offset") == offset
    assert settings(made)["objective"].get("pyramid_noise") == (None if chosen == "Original" else 6)


@pytest.mark.parametrize(("key", "family"), [("edit", "qwen_image_edit"), ("edit_plus", "qwen_image_edit_plus")])
def test_musubis_flags_of_editing_models(tmp_path: Path, key: str, family: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"accelerate launch qwen_image_train_network.py --dit a.safetensors --{key}", encoding="utf-8")
    assert settings(importing.import_file(path))["model"]["family"] == family


def test_onetrainers_frames_are_of_models_that_draw_clips(here: Path, tmp_path: Path) -> None:
    for kind, frames in (("HUNYUAN_VIDEO", [25]), ("STABLE_DIFFUSION_XL_10_BASE", None)):
        page = read(here / "onetrainer_sdxl.json") | {"model_type": kind, "frames": "25"}
        (tmp_path / "page.json").write_text(json.dumps(page), encoding="utf-8")
        made = importing.import_file(tmp_path / "page.json")
        assert settings(made)["dataset"].get("frames") == frames
        assert "frames" in keys(made.differs if frames else [entry for entry in made.no_counterpart if entry.off])


@pytest.mark.parametrize(("shift", "kind"), [(1.0, "UNIFORM"), (3.0, "UNIFORM"), (3.0, "LOGIT_NORMAL")])
def test_onetrainers_range_of_noise(here: Path, tmp_path: Path, shift: float, kind: str) -> None:
    page = read(here / "onetrainer_chroma.json") | {"min_noising_strength": 0.2, "max_noising_strength": 0.5}
    page |= {"timestep_distribution": kind, "timestep_shift": shift, "dynamic_timestep_shifting": False}
    (tmp_path / "page.json").write_text(json.dumps(page), encoding="utf-8")
    made = importing.import_file(tmp_path / "page.json")
    section = job_of(made).objective
    if kind != "UNIFORM":
        assert {"min_noising_strength", "max_noising_strength"} <= keys(made.differs)
        return
    generator = torch.Generator().manual_seed(0)
    theirs = 200 + 300 * torch.rand(20000, generator=generator)  # ModelSetupNoiseMixin._get_timestep_discrete
    theirs = shift * theirs / ((shift - 1) * theirs + 1000)
    drawn = FlowMatching({}, section).sample_t([torch.Generator().manual_seed(i) for i in range(4000)], 1024)
    for share in (0.02, 0.25, 0.5, 0.75, 0.98):
        assert drawn.quantile(share).item() == pytest.approx(theirs.quantile(share).item(), abs=0.01)


@pytest.mark.parametrize(("value", "expected"), [(True, "join"), (False, "one")])
def test_lines_of_simpletuners_captions(here: Path, tmp_path: Path, value: bool, expected: str) -> None:
    """Its documentation of dataloaders: text files are split by newlines unless disable_multiline_split is set."""
    shutil.copytree(here, tmp_path / "copy")
    backend = tmp_path / "copy" / "simpletuner_backend.json"
    tables = json.loads(backend.read_text(encoding="utf-8"))
    for table in tables:
        table["disable_multiline_split"] = value
    backend.write_text(json.dumps(tables), encoding="utf-8")
    made = importing.import_file(tmp_path / "copy" / "simpletuner_flux.json")
    assert settings(made)["dataset"]["caption_lines"] == expected


def test_losses_and_captions_that_vary(here: Path, tmp_path: Path) -> None:
    made = kohya(tmp_path, "caption_tag_dropout_rate = 0.1\nkeep_tokens = 2\nenable_wildcard = true")
    found = settings(made)
    varied = ("tag_dropout", "keep_tokens", "wildcards", "caption_lines")
    assert [found["dataset"][name] for name in varied] == [0.1, 2, True, "one"]
    path = tmp_path / "concepts.json"
    concepts = json.loads((here / "onetrainer_concepts.json").read_text(encoding="utf-8"))
    drop = {"tag_dropout_enable": True, "tag_dropout_mode": "RANDOM", "tag_dropout_probability": 0.3}
    concepts[0]["text"] = concepts[0].get("text", {}) | drop
    path.write_text(json.dumps(concepts), encoding="utf-8")
    page = json.loads((here / "onetrainer_sdxl.json").read_text(encoding="utf-8"))
    page |= {"concept_file_name": str(path), "mse_strength": 0.0, "huber_strength": 1.0, "huber_delta": 0.5}
    (tmp_path / "page.json").write_text(json.dumps(page), encoding="utf-8")
    made = importing.import_file(tmp_path / "page.json")
    found = settings(made)
    assert (found["objective"]["loss"], found["objective"]["huber_delta"]) == ("huber", 0.5)
    assert found["dataset"]["tag_dropout"] == 0.3 and not find_problems(made)


def test_kohyas_defaults_are_written_where_ours_differ(tmp_path: Path) -> None:
    """A file that says nothing still trains at rank 4, alpha 1 and a rate of 2e-6 there."""
    made = kohya(tmp_path, "")
    found = settings(made)
    # The text encoders are trained at the same rate, where the architecture has some that can be.
    assert found["adapter"].pop("targets") == FLUX_BLOCKS
    assert found["adapter"] == {"type": "lora", "rank": 4, "alpha": 1.0, "text_encoder": True}
    assert found["optimizer"]["text_encoder_lr"] == 2e-6
    assert (found["optimizer"]["lr"], found["train"]["steps"], found["dataset"]["buckets"]) == (2e-6, 1600, False)
    assert {"network_dim", "network_alpha", "learning_rate", "max_train_steps"} <= keys(made.defaults)


def test_folders_named_10_name(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set" / "4_zibo cat"
    shutil.copytree(here / "pictures" / "plain", folder)
    shutil.copytree(here / "pictures" / "plain", tmp_path / "set" / "no number")
    made = kohya(tmp_path, 'train_data_dir = "set"\nmax_train_epochs = 3\ntrain_batch_size = 2')
    assert made.settings["dataset"]["folders"] == [{"path": "set/4_zibo cat", "repeats": 4}]
    assert made.settings["train"]["steps"] == 3 * math.ceil(7 * 4 / 2)
    assert any("no number" in note for note in made.notes)
    missing = kohya(tmp_path, 'train_data_dir = "elsewhere"\nmax_train_epochs = 3')
    assert "[[dataset.folders]]  # TODO: add one [[dataset.folders]] for each subfolder" in importing.to_toml(missing)
    assert any(text.startswith("train.steps: 3 epochs") for text in missing.todo)


def as_kohya_shows(repeats: list[int], trained: int) -> list[int]:
    """How often sd-scripts shows each regularization picture in an epoch: once around by the folders' numbers, then
    once more each until there are as many as are trained on."""
    counts, first = [0] * len(repeats), True
    while sum(counts) < trained:
        for i, own in enumerate(repeats):
            if sum(counts) < trained:
                counts[i] += own if first else 1
        first = False
    return counts


@pytest.mark.parametrize("num", [3, 30, 40, 100])
def test_regularization_pictures_in_folders_named_1_class(here: Path, tmp_path: Path, num: int) -> None:
    shutil.copytree(here / "pictures" / "plain", tmp_path / "set" / "4_zibo cat")  # 7 pictures with captions
    shutil.copytree(here / "pictures" / "reg", tmp_path / "reg" / "2_dog")  # 2 with captions
    shutil.copytree(here / "pictures" / "reg", tmp_path / "reg" / "no number")
    (tmp_path / "reg" / "1_cat").mkdir()
    for i in range(num):
        Image.new("RGB", (8, 8)).save(tmp_path / "reg" / "1_cat" / f"{i}.png")
    given = 'train_data_dir = "set"\nreg_data_dir = "reg"\nprior_loss_weight = 0.5\n'
    made = kohya(tmp_path, given + "max_train_epochs = 3\ntrain_batch_size = 2")
    theirs = as_kohya_shows([1] * num + [2, 2], trained=7 * 4)
    repeats = round(sum(theirs) / len(theirs), 4)
    regular = {"repeats": repeats} if repeats != 1 else {}
    regular |= {"regularization": True, "weight": 0.5}
    assert made.settings["dataset"]["folders"] == [
        {"path": "set/4_zibo cat", "repeats": 4},
        {"path": "reg/1_cat", **regular},
        {"path": "reg/2_dog", **regular},
    ]
    assert made.settings["train"]["steps"] == 3 * (7 * 4 + sum(theirs)) / 2
    # What the folder's name says of the class is the caption of pictures without one there.
    assert [text for text in made.todo if "caption" in text] == [
        f"dataset.folders: reg/1_cat: {num} images need a caption file; kohya uses 'cat' as their caption"
    ]
    assert any("reg/no number: kohya skips this folder" in note for note in made.notes)
    told = [note for note in made.notes if f"there are {num + 2} regularization images" in note]
    assert bool(told) == (num >= 30) == (0 in theirs)
    # Both count as much, and theirs as well.
    ours = [sum(images * folder.get("repeats", 1) for folder, images in zip(part, counts, strict=True))
            for part, counts in ((made.settings["dataset"]["folders"][:1], [7]),
                                 (made.settings["dataset"]["folders"][1:], [num, 2]))]  # fmt: skip
    assert sum(theirs) == 28 and ours[0] == pytest.approx(ours[1], rel=1e-3)
    assert any(entry.key == "reg_data_dir" for entry in made.differs)
    for path in (tmp_path / "set").glob("*/*.txt"):
        path.unlink()
    for i in range(num):
        (tmp_path / "reg" / "1_cat" / f"{i}.txt").write_text("a cat", encoding="utf-8")
    made = kohya(tmp_path, given)  # none of the subject's pictures has a caption, all of the others have
    assert made.settings["dataset"]["missing_caption"] == "trigger"
    assert made.settings["dataset"]["folders"][0]["trigger"] == "zibo cat" and not made.todo


@pytest.mark.parametrize(
    ("given", "written"),
    [((1, 1), (1, 1)), ((3, 2), (3, 2)), ((0.5, 1.25), (0.5, 1.25)), ((0.04, 1), (0.04, 1)), ((1 / 3, 1), (0.3333, 1))],
)
def test_parts_of_repeats_stay_and_so_do_the_steps(
    tmp_path: Path, given: tuple[float, float], written: tuple[float, float]
) -> None:
    """OneTrainer and diffusion-pipe count parts of an image, as we do."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(60):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
            (tmp_path / name / f"{number}.txt").write_text("x", encoding="utf-8")
    concepts = [{"path": str(tmp_path / name), "balancing": part} for name, part in zip("ab", given, strict=True)]
    (tmp_path / "c.json").write_text(json.dumps(concepts), encoding="utf-8")
    data = {"concept_file_name": str(tmp_path / "c.json"), "model_type": "STABLE_DIFFUSION_15", "epochs": 4}
    (tmp_path / "o.json").write_text(json.dumps(data | {"training_method": "LORA", "batch_size": 2}), encoding="utf-8")
    tables = "".join(
        f"[[directory]]\npath = '{tmp_path / name}'\nnum_repeats = {float(part)}\n"
        for name, part in zip("ab", given, strict=True)
    )
    (tmp_path / "d.toml").write_text(f"resolutions = [512]\n{tables}", encoding="utf-8")
    (tmp_path / "p.toml").write_text(
        f"dataset = '{tmp_path / 'd.toml'}'\nepochs = 4\nmicro_batch_size_per_gpu = 2\n"
        "[model]\ntype = 'sdxl'\ncheckpoint_path = 'x'\n[adapter]\ntype = 'lora'\nrank = 4\n",
        encoding="utf-8",
    )
    for tool, file in (("onetrainer", "o.json"), ("diffusion-pipe", "p.toml")):
        made = importing.import_file(tmp_path / file, tool)
        folders = made.settings["dataset"]["folders"]
        assert tuple(folder.get("repeats", 1) for folder in folders) == written, tool
        assert abs(made.settings["train"]["steps"] - 4 * 60 * sum(given) / 2) <= 4, (tool, made.settings["train"])
    concepts = [concept | {"balancing": 90, "balancing_strategy": "SAMPLES"} for concept in concepts]
    (tmp_path / "c.json").write_text(json.dumps(concepts), encoding="utf-8")
    made = importing.import_file(tmp_path / "o.json", "onetrainer")
    assert [folder["repeats"] for folder in made.settings["dataset"]["folders"]] == [1.5, 1.5]
    assert made.settings["train"]["steps"] == 4 * 180 / 2 and not [
        e for e in made.no_counterpart if "balancing" in e.key
    ]


def test_prompt_files_of_every_kind(tmp_path: Path) -> None:
    def of(name: str, content: str) -> dict[str, Any]:
        (tmp_path / name).write_text(content, encoding="utf-8")
        return settings(kohya(tmp_path, f'sample_prompts = "{name}"\nsample_every_n_steps = 9'))["preview"]

    rows = [{"prompt": "a -- b", "negative_prompt": "c", "width": 512, "height": 640, "seed": 3, "sample_steps": 7}]
    expected = {"prompts": ["a -- b"], "negative": "c", "every": 9, "at_start": False, "steps": 7, "width": 512}
    expected |= {"height": 640, "seed": 3}
    assert of("p.json", json.dumps(rows)) == expected
    table = "[prompt]\nwidth = 512\nheight = 640\nsample_steps = 7\n[[prompt.subset]]\nprompt = 'a -- b'\nseed = 3\n"
    assert of("p.toml", table + "negative_prompt = 'c'\n") == expected
    assert of("p.txt", "# no\na -- b --n c --w 512 --h 640 --d 3 --s 7 --l 1\n\n") == expected


def test_flags_of_kohyas_prompts_are_read_whatever_their_case(tmp_path: Path) -> None:
    """sd-scripts cuts at every " --" and matches with re.IGNORECASE; ai-toolkit compares the flag as it is."""
    lines = ["a cat --W 512 --D 2 --N blurry --w=64 --AR 16:9", "a dog --h 640 --Foo"]
    (tmp_path / "p.txt").write_text("\n".join(lines), encoding="utf-8")
    made = kohya(tmp_path, 'sample_prompts = "p.txt"')
    assert settings(made)["preview"]["prompts"] == ["a cat --n blurry --w 512 --d 2", "a dog --h 640"]
    (entry,) = [entry for entry in made.differs if entry.key == "sample_prompts"]
    assert "this trainer does not use these prompt options: --w=64, --AR, --Foo" in entry.note
    (tmp_path / "p.json").write_text(json.dumps(["a cat --W 512", {"prompt": "a dog"}, 3]), encoding="utf-8")
    made = kohya(tmp_path, 'sample_prompts = "p.json"')
    assert settings(made)["preview"]["prompts"] == ["a cat --w 512", "a dog"]
    assert any("p.json, prompt 3 is not a prompt" in entry.note for entry in made.differs)


def test_a_value_of_a_prompt_that_cannot_be_used_is_left_out_and_told_where(here: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("# first\na cat --D 20.5 --s 9 --w 512\na dog --s 900 --w big\n", encoding="utf-8")
    made = kohya(tmp_path, 'sample_prompts = "p.txt"')
    assert settings(made)["preview"]["prompts"] == ["a cat --w 512 --s 9", "a dog"]
    (entry,) = [entry for entry in made.differs if entry.key == "sample_prompts"]
    assert "p.txt, line 2: --D was left out: '20.5' is not a whole number" in entry.note
    assert "p.txt, line 3: --w was left out: 'big' is not a number" in entry.note
    assert "p.txt, line 3: --s was left out: the maximum is 500" in entry.note
    rows = [{"prompt": "a cat", "sample_steps": "many"}, {"prompt": "a dog", "guidance_scale": "hot"}]
    (tmp_path / "p.json").write_text(json.dumps(rows), encoding="utf-8")
    (entry,) = [e for e in kohya(tmp_path, 'sample_prompts = "p.json"').differs if e.key == "sample_prompts"]
    assert "p.json, prompt 1: sample_steps was left out" in entry.note
    assert "p.json, prompt 2: guidance_scale was left out" in entry.note
    text = (here / "ai_toolkit_flux.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    data["config"]["process"][0]["sample"]["prompts"] = ["a cat", "a dog --w wide"]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    made = importing.import_file(tmp_path / "a.yaml")
    assert any("sample.prompts.1: --w was left out" in entry.note for entry in made.differs)


@pytest.mark.parametrize("prompt", ["a dog --n x --w=64", "a dog --ar 16:9", "--v 6"])
def test_text_of_other_tools_is_no_option_here(here: Path, tmp_path: Path, prompt: str) -> None:
    """SimpleTuner, OneTrainer and kohya's tables have no options in a prompt."""
    page = read(here / "simpletuner_sdxl.json") | {"validation_prompt": prompt, "validation_disable": False}
    samples = [{"prompt": prompt, "negative_prompt": f"b {prompt}"}, {"prompt": "b", "negative_prompt": "c"}]
    rows = [{"prompt": prompt}]
    (tmp_path / "s.json").write_text(json.dumps(page), encoding="utf-8")
    (tmp_path / "samples.json").write_text(json.dumps(samples), encoding="utf-8")
    page = read(here / "onetrainer_sdxl.json") | {"sample_definition_file_name": str(tmp_path / "samples.json")}
    (tmp_path / "o.json").write_text(json.dumps(page), encoding="utf-8")
    (tmp_path / "p.json").write_text(json.dumps(rows), encoding="utf-8")
    for made in (
        importing.import_file(tmp_path / "s.json"),
        importing.import_file(tmp_path / "o.json"),
        kohya(tmp_path, 'sample_prompts = "p.json"'),
    ):
        (first, *_) = split_preview(Preview(**settings(made)["preview"]))
        words = prompt.replace(" --", " -").removeprefix("-")
        assert first.prompts[0].endswith(words) and "--" not in first.negative
        assert not [line for line in importing.find_problems(made) if "preview" in line]
        assert any("one hyphen was removed" in entry.note for entry in made.differs)


# -------------------------------------------------------------------------------------------------- TODOs and secrets


def test_what_the_file_does_not_say_keeps_ours_from_loading(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("pretrained_model_name_or_path = 'models/mine.safetensors'\nnetwork_dim = 8\n", encoding="utf-8")
    made = importing.import_file(path)
    assert 'family = "TODO"  # TODO: the file does not name the architecture' in importing.to_toml(made)
    assert any(line.startswith("model.family: unknown architecture 'TODO'") for line in importing.find_problems(made))
    chosen = importing.import_file(path, family="sdxl")
    assert settings(chosen)["model"]["family"] == "sdxl" and not importing.find_problems(chosen)
    named = tmp_path / "b.toml"
    named.write_text("pretrained_model_name_or_path = 'x/sd_xl_base_1.0.safetensors'\n", encoding="utf-8")
    found = importing.import_file(named)
    assert settings(found)["model"]["family"] == "sdxl" and any("check it" in text for text in found.todo)


def test_a_todo_of_a_setting_that_is_not_written_is_in_our_file(tmp_path: Path) -> None:
    made = kohya(tmp_path, "blocks_to_swap = 10")
    (todo,) = [text for text in made.todo if text.startswith("memory.offload: ")]
    assert "offload" not in settings(made).get("memory", {}) and f"# TODO: {todo}" in importing.to_toml(made)


def test_strange_files_are_refused_and_soon(tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    for text, told in (
        ("x" * 500_000 + " " * 500_000, "no command runs"),  # a pattern that takes its square takes hours
        (f"network_dim = 0x{'f' * 5000}", "not valid TOML"),
        (f"network_dim = 1\n{'a.' * 2000}a = 1", "a key has more than 20 parts"),
        ('{"network_dim": ' + '{"a":' * 2000 + "1" + "}" * 2001, "nested too deeply"),
    ):
        path = path.with_suffix(".sh" if text[0] == "x" else ".json" if text[0] == "{" else ".toml")
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=told):
            importing.import_file(path, "" if path.suffix == ".sh" else "sd-scripts")
    path.with_suffix(".toml").write_text(f"network_dim = inf\nnetwork_alpha = {[1] * 999}", encoding="utf-8")
    todo = importing.import_file(path.with_suffix(".toml"), "sd-scripts").todo
    assert "adapter.rank: the value is not a finite number" in todo and all(len(line) < 400 for line in todo)


def test_a_base_that_is_not_opened_is_told(tmp_path: Path) -> None:
    for name in ("old.ckpt", "small.gguf"):
        path = tmp_path / "a.toml"
        path.write_text(f"pretrained_model_name_or_path = 'models/{name}'\nv2 = false\n", encoding="utf-8")
        made = importing.import_file(path, family="sd15")
        assert settings(made)["model"]["path"] == f"models/{name}"
        assert any(text.startswith("model.path: ") for text in made.todo), name


def test_the_short_ending_of_fluxgym_needs_nothing_to_do(bring: Callable[..., importing.Import]) -> None:
    made = bring("fluxgym_train.sh")
    files = settings(made)["model"]
    assert files["path"].endswith("flux1-dev.sft") and files["files"]["vae"] == "/opt/fluxgym/models/vae/ae.sft"
    assert not [text for text in made.todo if text.startswith("model.")]


def everything_said(made: importing.Import) -> str:
    return "\n".join([importing.to_toml(made), *importing.report(made), json.dumps(importing.to_json(made))])


@pytest.mark.parametrize("name", TOOLS)
def test_no_token_is_shown(bring: Callable[..., importing.Import], name: str) -> None:
    said = everything_said(bring(name))
    assert "canary" not in said.lower() and "0123456789abcdef0123" not in said
    if name in ("sd_scripts_flux.toml", "onetrainer_sdxl.json", "simpletuner_flux.json"):
        assert readers.HIDDEN in said


@pytest.mark.parametrize(
    "line",
    [
        "my_new_api_key = 'CANARY'",
        "hf_token = 'CANARY'",
        "nested = {auth_token = 'CANARY'}",
        "training_comment = 'hf_CANARYcanaryCANARYcanary'",
        "metadata_description = 'see https://me:CANARY@example.org/x'",
        "logging_dir = 'x --wandb_api_key CANARY y'",
        "something = 'password=CANARY'",
    ],
)
def test_a_token_anywhere_is_hidden(tmp_path: Path, line: str) -> None:
    said = everything_said(kohya(tmp_path, line))
    assert "CANARY" not in said and readers.HIDDEN in said


def test_what_only_looks_like_a_token_is_shown(tmp_path: Path) -> None:
    folder = "models--a--b/snapshots/0123456789abcdef0123456789abcdef01234567"
    text = f"keep_tokens = 3\nshuffle_caption = true\nmax_token_length = 225\noutput_dir = '{folder}'\n"
    made = kohya(tmp_path, text)
    assert readers.HIDDEN not in everything_said(made) and settings(made)["output_dir"] == folder


def test_a_default_of_two_keys_is_listed_once(tmp_path: Path) -> None:
    """Kohya's smallest and largest side of a bucket become one setting."""
    made = kohya(tmp_path, 'resolution = "1024,1024"\nenable_bucket = true\n')
    lines = importing.report(made)
    (title,) = (number for number, line in enumerate(lines) if line.startswith("defaults of sd-scripts"))
    listed = [line.strip() for line in itertools.takewhile(lambda line: line.startswith("  "), lines[title + 1 :])]
    assert listed.count("dataset.max_aspect = 4") == 1 and lines[title].endswith(f"({len(listed)})")


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """ask(...): `lora-fp8 import-config ...` -> exit code, what it printed, what it complained of."""

    def ask(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["lora-fp8", "import-config", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return ask


def test_the_command(
    ask: Callable[..., tuple[int, str, str]], here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(here / "ai_toolkit_flux.yaml")
    written = tmp_path / "ai_toolkit_flux.lora-fp8.toml"
    assert (code, err) == (0, "") and f"{written.name} written" in out
    assert config.load(written).train.steps == 2000
    for title in ("converted (", "different meaning (3)", "no counterpart (3)", "defaults of ai-toolkit that were"):
        assert title in out
    before = written.read_bytes()
    code, out, err = ask(here / "ai_toolkit_flux.yaml")
    assert code == 2 and "exists already" in err and not out and written.read_bytes() == before
    code, out, err = ask(here / "lora_scripts_preset.toml", "--output", "deep/er/x.toml", "--json")
    answer = json.loads(out)
    assert (
        code == 0
        and not answer["loads"]
        and [text.split(":")[0] for text in answer["todo"]] == ["dataset.folders", "train.steps"]
    )
    assert answer["tool"] == "lora-scripts" and answer["output"] == "deep/er/x.toml"
    assert answer["settings"] == settings(importing.import_file(here / "lora_scripts_preset.toml"))
    counts = [len(answer[name]) for name in ("mapped", "differs", "no_counterpart", "unknown")]
    assert sum(counts) == len(expected_keys(here, "lora_scripts_preset.toml")) + 1 and not counts[3]  # and the layers
    code, out, err = ask(here / "prompts.txt")
    assert code == 2 and not out and err.count("\n") == 1 and not (tmp_path / "prompts.lora-fp8.toml").exists()


def test_families_are_those_of_this_version(
    bring: Callable[..., importing.Import], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of families grows; the importer asks for it each time."""
    renamed = families.get("qwen_image")
    monkeypatch.setattr(families, "list_families", lambda: ["flux", "sd15"])
    made = bring("musubi_qwen.toml")
    assert 'family = "qwen_image"  # network_module' in importing.to_toml(made)
    assert any("this version does not support qwen_image" in text for text in made.todo)
    assert any("unknown architecture 'qwen_image'" in line for line in importing.find_problems(made))
    monkeypatch.setattr(families, "list_families", lambda: ["qwen"])
    monkeypatch.setattr(families, "get", lambda name: renamed)
    made = bring("musubi_qwen.toml")
    assert settings(made)["model"]["family"] == "qwen" and not find_problems(made)


@pytest.mark.parametrize(
    ("line", "family", "expected"),
    [
        ("clip_skip = 2", "sd15", ("model", "clip_skip", 2)),
        ("weighted_captions = true", "sdxl", ("model", "prompt_weights", True)),
        ("max_token_length = 225", "sdxl", ("model", "caption_tokens", 225)),
        ("text_encoder_lr = 5e-5", "sdxl", ("optimizer", "text_encoder_lr", 5e-5)),
        ('vae = "vae.safetensors"', "sdxl", ("model", "files", {"vae": "vae.safetensors"})),
        ("blocks_to_swap = 8\nfp8_base = true", "flux", ("memory", "offload", None)),
        ("discrete_flow_shift = 2.5", "flux", ("objective", "shift", 2.5)),
        ('network_args = ["block_dims=' + ",".join(["8"] * 23) + '"]', "sdxl", ("adapter", "ranks", None)),
        ('network_args = ["train_double_block_indices=0-3"]', "flux", ("adapter", "ranks", None)),
    ],
)
def test_what_depends_on_the_family_waits_for_it(
    tmp_path: Path, line: str, family: str, expected: tuple[str, str, Any]
) -> None:
    """sd-scripts' own files do not name the architecture: what only it decides is a TODO, and not lost."""
    path = tmp_path / "train.toml"
    text = 'pretrained_model_name_or_path = "base.safetensors"\nnetwork_module = "networks.lora"\nnetwork_dim = 16\n'
    path.write_text(f"{text}{line}\n", encoding="utf-8")
    made = importing.import_file(path, "sd-scripts")
    assert settings(made)["model"]["family"] == "TODO"
    key = line.partition(" ")[0]
    (todo,) = [text for text in made.todo if text.endswith("Import again with --family NAME")]
    assert f"{key} = " in todo and todo.partition(": ")[2] in importing.to_toml(made)
    (entry,) = [entry for entry in made.no_counterpart if entry.key == key]
    assert "depends on the architecture" in entry.note and not entry.off
    made = importing.import_file(path, "sd-scripts", family)
    section, name, value = expected
    assert name in settings(made)[section] and value in (None, settings(made)[section][name])
    assert not [text for text in made.todo if "--family NAME" in text]


def test_a_dataset_without_its_training_keeps_what_only_some_families_take(tmp_path: Path) -> None:
    path = tmp_path / "data.toml"
    rows = ['[[datasets]]\nvideo_directory = "clips"\ntarget_frames = [1, 25]\nframe_extraction = "head"\n']
    rows += ['[[datasets]]\nimage_directory = "after"\ncontrol_directory = "before"\n']
    path.write_text("".join(rows), encoding="utf-8")
    data = settings(importing.import_file(path, "musubi-tuner"))["dataset"]
    assert data["frames"] == [1, 25] and data["folders"][1]["control"] == "before"


# ------------------------------------------------------------------------------------------------- text encoders


@pytest.mark.parametrize(
    ("text", "trained", "rate"),
    [
        ("", True, 2e-6),
        ("learning_rate = 1e-4", True, 1e-4),
        ("unet_lr = 1e-4", True, 2e-6),
        ("text_encoder_lr = 5e-5", True, 5e-5),
        ("text_encoder_lr = 0", False, None),
        ("network_train_unet_only = true\ntext_encoder_lr = 5e-5", False, None),
        ("cache_text_encoder_outputs = true", False, None),
    ],
)
def test_kohyas_text_encoders(tmp_path: Path, text: str, trained: bool, rate: float | None) -> None:
    found = settings(kohya(tmp_path, text))
    assert found["adapter"].get("text_encoder", False) is trained
    assert found["optimizer"].get("text_encoder_lr") == rate


def test_ai_toolkits_text_encoder(here: Path, tmp_path: Path) -> None:
    text = (here / "ai_toolkit_flux.yaml").read_text(encoding="utf-8")
    path = tmp_path / "ai_toolkit_flux.yaml"
    path.write_text(text.replace("train_text_encoder: false", "train_text_encoder: true"), encoding="utf-8")
    found = settings(importing.import_file(path))
    assert found["adapter"]["text_encoder"] is True
    assert found["optimizer"]["text_encoder_lr"] == found["optimizer"]["lr"]


KOHYA_SET = """
[[datasets]]
alpha_mask = true
[[datasets.subsets]]
image_dir = "pictures/plain"
conditioning_data_dir = "masks"
[[datasets.subsets]]
image_dir = "pictures/10_zibo cat"
"""
AI_TOOLKIT_SETS = [
    {"folder_path": "pictures/plain", "mask_path": "masks", "mask_min_value": 0.2},
    {"folder_path": "pictures/plain", "mask_path": "masks", "alpha_mask": True, "mask_min_value": 0.2},
    {"folder_path": "pictures/plain", "mask_min_value": 0.7},
]
SIMPLETUNER_SETS = [
    {"id": "a", "type": "local", "instance_data_dir": "pictures/plain", "conditioning_data": "b"},
    {"id": "b", "type": "local", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "m"},
    {"id": "c", "type": "local", "instance_data_dir": "pictures/10_zibo cat", "conditioning_data": "d"},
    {
        "id": "d",
        "type": "local",
        "dataset_type": "conditioning",
        "conditioning_type": "canny",
        "instance_data_dir": "n",
    },
]


def test_masks_of_every_tool(here: Path, tmp_path: Path) -> None:
    """What each makes of them is told in its own documents and sources; see docs/moving-in.md."""
    here = shutil.copytree(here, tmp_path / "files")

    def made(name: str, change: Callable[[Any], None]) -> tuple[list[str], Any, importing.Import]:
        path = here / name
        if path.suffix == ".toml":
            path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            data = read(path)
            change(data)
            path.write_text(json.dumps(data), encoding="utf-8")  # which is YAML, too
        found = importing.import_file(path)
        ours = settings(found)
        folders = [folder.get("mask", "") for folder in ours["dataset"]["folders"]]
        return folders, ours.get("objective", {}).get("unmasked_weight"), found

    # kohya's: a folder where masked_loss asks for it, and transparency wherever alpha_mask does
    (here / "sd_scripts_dataset.toml").write_text(KOHYA_SET, encoding="utf-8")
    folders, weight, found = made("sd_scripts_flux.toml", lambda text: text)
    assert (folders, weight) == (["alpha", "alpha"], 0.0)
    lacking = [entry.key for entry in found.no_counterpart if not entry.off]
    assert any(key.endswith("conditioning_data_dir") for key in lacking), "it is a ControlNet's without masked_loss"
    folders, weight, found = made("sd_scripts_flux.toml", lambda text: f"masked_loss = true\n{text}")
    assert (folders, weight) == (["masks", "alpha"], 0.0)
    assert {"masked_loss"} <= keys(found.mapped)
    # OneTrainer's: beside the pictures; its masks are not counted as pictures
    Image.new("L", (8, 8)).save(here / "pictures" / "plain" / "0-masklabel.png")
    folders, weight, found = made(
        "onetrainer_sdxl.json",
        lambda data: data.update(masked_training=True, unmasked_weight=0.3, normalize_masked_area_loss=True),
    )
    assert (set(folders), weight) == ({"*-masklabel"}, 0.3)
    assert {"unmasked_weight"} <= keys(found.differs) and {"normalize_masked_area_loss"} <= keys(found.mapped)
    draft = import_draft.Draft(found.tool, source_files.read_source(here / "onetrainer_sdxl.json"), "", "sdxl")
    folder = dataset_settings.count_images(draft, import_draft.Folder("pictures/plain", mask="*-masklabel"), deep=True)
    assert folder.images == 7
    # ai-toolkit's: transparency counts before a folder; its loss is divided by the area
    folders, weight, found = made(
        "ai_toolkit_flux.yaml", lambda data: data["config"]["process"][0].update(datasets=AI_TOOLKIT_SETS)
    )
    assert (folders, weight) == (["masks", "alpha", ""], 0.2)
    assert {"datasets.0.mask_path", "datasets.1.alpha_mask"} <= keys(found.mapped)
    # SimpleTuner's: a backend of its own, which another names
    (here / "simpletuner_backend.json").write_text(json.dumps(SIMPLETUNER_SETS), encoding="utf-8")
    folders, weight, found = made("simpletuner_flux.json", lambda data: None)
    assert (folders, weight) == (["m", ""], 0.0)
    assert not [line for line in found.todo if "'b'" in line] and [line for line in found.todo if "'d'" in line]


def test_what_keeps_the_base_is_carried_over(here: Path, tmp_path: Path) -> None:
    """Differential output preservation, prior-prediction concepts and regularization data: the base as the target."""
    here = shutil.copytree(here, tmp_path / "files")

    def made(name: str, change: Callable[[Any], None]) -> tuple[dict[str, Any], importing.Import]:
        data = read(here / name)
        change(data)
        (here / name).write_text(json.dumps(data), encoding="utf-8")
        found = importing.import_file(here / name)
        return settings(found), found

    def preserve(data: Any) -> None:
        process = data["config"]["process"][0]
        process["trigger_word"] = "zibo"
        process["train"] |= {
            "diff_output_preservation": True,
            "diff_output_preservation_class": "cat",
            "diff_output_preservation_multiplier": 0.5,
        }

    ours, found = made("ai_toolkit_flux.yaml", preserve)
    assert ours["dataset"]["class_word"] == "cat" and ours["objective"]["prior_for_class"] == 0.5
    assert "train.diff_output_preservation" in keys(found.mapped)

    concepts = read(here / "onetrainer_concepts.json")
    concepts[0]["type"] = "PRIOR_PREDICTION"
    (here / "onetrainer_concepts.json").write_text(json.dumps(concepts), encoding="utf-8")
    masked = {"masked_training": True, "masked_prior_preservation_weight": 0.25}
    ours, found = made("onetrainer_sdxl.json", lambda data: data.update(masked))
    assert ours["objective"]["prior_for_regularization"] is True and ours["objective"]["prior_outside_masks"] == 0.25
    assert ours["dataset"]["folders"][0]["regularization"] is True
    backend = SIMPLETUNER_SETS[0] | {"is_regularisation_data": True, "conditioning_data": None}
    (here / "simpletuner_backend.json").write_text(json.dumps([backend]), encoding="utf-8")
    ours, found = made("simpletuner_flux.json", lambda data: None)
    assert ours["dataset"]["folders"][0]["regularization"] is True
    assert ours["objective"]["prior_for_regularization"] is True


SD_SCRIPTS = "pretrained_model_name_or_path = 'x'\n"


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            "sdxl",
            "multires_noise_iterations = 8\nmultires_noise_discount = 0.2\nip_noise_gamma = 0.1",
            {"pyramid_noise": 8, "pyramid_discount": 0.2, "input_noise": 0.1},
        ),
        (
            "sdxl",
            "v_parameterization = true\nzero_terminal_snr = true",
            {"prediction": "v", "zero_terminal_snr": True},
        ),
        ("sdxl", "debiased_estimation_loss = true", {"weighting": "debiased"}),
        (
            "flux",
            "timestep_sampling = 'sigmoid'\nsigmoid_scale = 0.5",
            {"timesteps": "logit_normal", "logit_std": 0.5, "shift": 1.0},
        ),
        (
            "flux",
            "timestep_sampling = 'shift'\ndiscrete_flow_shift = 3.1\nsigmoid_scale = 2.0",
            {"timesteps": "logit_normal", "logit_std": 2.0, "shift": 3.1},
        ),
        (
            "flux",
            "timestep_sampling = 'sigma'\nweighting_scheme = 'logit_normal'\nlogit_mean = -0.5\nlogit_std = 1.5",
            {"timesteps": "logit_normal", "logit_mean": -0.5, "logit_std": 1.5},
        ),
        (
            "flux",
            "timestep_sampling = 'sigma'\nweighting_scheme = 'mode'\nmode_scale = 0.8",
            {"timesteps": "mode", "mode_scale": 0.8},
        ),
    ],
)
def test_noise_and_timesteps_of_sd_scripts(tmp_path: Path, family: str, text: str, expected: dict[str, Any]) -> None:
    path = tmp_path / "train.toml"
    path.write_text(SD_SCRIPTS + text, encoding="utf-8")
    made = importing.import_file(path, "sd-scripts", family)
    assert {line.partition(" ")[0] for line in text.splitlines()} <= keys(made.mapped)
    assert expected.items() <= settings(made)["objective"].items()
    assert job_of(made).objective


@pytest.mark.parametrize(
    ("kind", "weight", "bias", "expected"),
    [
        ("LOGIT_NORMAL", 0.5, -0.3, {"timesteps": "logit_normal", "logit_mean": -0.3, "logit_std": 1.5}),
        ("HEAVY_TAIL", 0.9, 0.0, {"timesteps": "mode", "mode_scale": 0.9}),
        ("COS_MAP", 0.0, 0.0, {"timesteps": "cosmap"}),
    ],
)
@pytest.mark.parametrize("page", ["onetrainer_chroma.json", "onetrainer_sdxl.json"])
def test_onetrainers_distributions(
    here: Path, tmp_path: Path, page: str, kind: str, weight: float, bias: float, expected: dict[str, Any]
) -> None:
    given = read(here / page) | {"timestep_distribution": kind, "noising_weight": weight, "noising_bias": bias}
    given |= {"timestep_shift": 1.0, "dynamic_timestep_shifting": False}
    (tmp_path / "page.json").write_text(json.dumps(given), encoding="utf-8")
    made = importing.import_file(tmp_path / "page.json")
    assert "timestep_distribution" in keys(made.mapped)
    assert expected.items() <= settings(made)["objective"].items()


def test_onetrainers_weight_and_terminal_snr(here: Path, tmp_path: Path) -> None:
    given = read(here / "onetrainer_sdxl.json") | {"loss_weight_fn": "DEBIASED_ESTIMATION"}
    given |= {"force_v_prediction": True, "rescale_noise_scheduler_to_zero_terminal_snr": True}
    (tmp_path / "page.json").write_text(json.dumps(given), encoding="utf-8")
    made = importing.import_file(tmp_path / "page.json")
    section = settings(made)["objective"]
    assert section["weighting"] == "debiased" and section["zero_terminal_snr"] is True
    assert "loss_weight_fn" in keys(made.differs)  # for v their formula is another


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"flow_sigmoid_scale": 0.7}, {"timesteps": "logit_normal", "logit_std": 0.7}),
        (
            {"flow_use_beta_schedule": True, "flow_beta_schedule_alpha": 3.0, "flow_beta_schedule_beta": 1.5},
            {"timesteps": "beta", "beta_alpha": 3.0, "beta_beta": 1.5},
        ),
    ],
)
def test_simpletuners_distributions(
    here: Path, tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    shutil.copytree(here, tmp_path / "copy")
    path = tmp_path / "copy" / "simpletuner_flux.json"
    path.write_text(json.dumps(read(path) | {"flow_use_uniform_schedule": False} | given), encoding="utf-8")
    made = importing.import_file(path)
    assert given.keys() <= keys(made.mapped)
    assert expected.items() <= settings(made)["objective"].items()


@pytest.mark.parametrize(
    ("file", "given", "decay", "exact"),
    [
        ("onetrainer_sdxl.json", {"ema": "GPU", "ema_decay": 0.99, "ema_update_step_interval": 1}, 0.99, True),
        ("onetrainer_sdxl.json", {"ema": "CPU", "ema_decay": 0.99, "ema_update_step_interval": 5}, 0.997992, False),
        ("simpletuner_flux.json", {"use_ema": True, "ema_decay": 0.99}, 0.99, True),
        ("simpletuner_flux.json", {"use_ema": True}, 0.995, True),
    ],
)
def test_moving_averages(
    here: Path, tmp_path: Path, file: str, given: dict[str, Any], decay: float, exact: bool
) -> None:
    """An update of 1 - d each n steps forgets as fast as one of 1 - d^(1/n) each step."""
    shutil.copytree(here, tmp_path / "copy")
    path = tmp_path / "copy" / file
    page = {key: value for key, value in read(path).items() if not key.startswith("ema_")}
    path.write_text(json.dumps(page | given), encoding="utf-8")
    made = importing.import_file(path)
    assert settings(made)["optimizer"]["ema_decay"] == pytest.approx(decay, abs=1e-6)
    assert given.keys() <= keys(made.mapped if exact else made.differs)


def test_ai_toolkits_moving_average(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here, tmp_path / "copy")
    path = tmp_path / "copy" / "ai_toolkit_flux.yaml"
    page = yaml.safe_load(path.read_text(encoding="utf-8"))
    page["config"]["process"][0]["train"]["ema_config"] = {"use_ema": True, "ema_decay": 0.97}
    path.write_text(yaml.safe_dump(page), encoding="utf-8")
    assert settings(importing.import_file(path))["optimizer"]["ema_decay"] == 0.97


NETWORK = "pretrained_model_name_or_path = 'm.safetensors'\nnetwork_dim = 16\nnetwork_alpha = 8\n"


def unet_of(family: str) -> torch.nn.Module:
    """The UNet at full size, on the meta device."""
    with torch.device("meta"):
        return diffusers.UNet2DConditionModel.from_config({**families.get(family).reference_config})


@pytest.mark.parametrize(
    ("family", "module", "count"),
    [
        ("sdxl", "networks.lora", 788),  # sd-scripts: 722, and 66 with conv_dim
        ("sdxl", "lycoris.kohya", 792),  # and conv_in, conv_out, two of the time embedding
        ("sd15", "networks.lora", 278),
    ],
)
def test_convolutions_are_the_layers_that_kohya_adapts(tmp_path: Path, family: str, module: str, count: int) -> None:
    text = f"{NETWORK}network_module = '{module}'\nnetwork_args = ['conv_dim=4', 'conv_alpha=2']\n"
    (tmp_path / "kohya.toml").write_text(text, encoding="utf-8")
    made = importing.import_file(tmp_path / "kohya.toml", "sd-scripts", family)
    assert "network_args" in keys(made.mapped), "alpha / rank is the same for both"
    given = settings(made)
    unet = unet_of(family)
    ranks, told = choose_layers(unet, Adapter(**given["adapter"]), [])
    assert len(ranks) == count and not told
    kernels = {name: getattr(unet.get_submodule(name), "kernel_size", (1, 1)) for name in ranks}
    assert all(rank == (4 if kernels[name] == (3, 3) else 16) for name, rank in ranks.items())


def test_lycoris_adapts_convolutions_unless_its_preset_leaves_them_out(tmp_path: Path) -> None:
    def adapter(arguments: str, module: str = "lycoris.kohya") -> dict[str, Any]:
        path = tmp_path / "kohya.toml"
        path.write_text(f"{NETWORK}network_module = '{module}'\nnetwork_args = [{arguments}]\n", encoding="utf-8")
        return settings(importing.import_file(path, "sd-scripts", "sdxl"))["adapter"]

    assert "conv1" in adapter("'algo=loha'")["targets"] and "ranks" not in adapter("'algo=loha'")
    assert adapter("'algo=loha', 'conv_dim=0'").get("targets") == adapter("'algo=loha'")["targets"], "0: as network_dim"
    assert adapter("'algo=lokr', 'preset=attn-mlp'")["targets"] == list(families.get("sdxl").adapter_targets)
    assert "targets" not in adapter("'algo=diag-oft'")
    for plain in ("", "'conv_dim=0'", "'conv_alpha=1'"):
        assert "targets" not in adapter(plain, "networks.lora")
