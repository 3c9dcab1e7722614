"""No option that is not wired: every setting is flipped, and what it is for must change.

One short run on a miniature is the baseline; each flip is the same run with one setting changed. What a run leaves is
taken apart into observables (losses, tensors, previews ...), and each row of the table says which of them must differ,
and which must not. The baseline of each family is run twice: without a flip nothing differs, so a difference is the
flip's. Settings whose right values are plain to say are set together, see `test_what_the_changed_values_are`.

The table is held against the declarations in settings.py: a new setting without a row fails here.
"""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import diffusers.models.attention
import miniatures
import pytest
import safetensors
import torch
from diffusers import UNet2DConditionModel
from graph_emulation import Graph, graph
from original_code import ldm_names
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from lora_fp8 import config, families, precision, run, train
from lora_fp8.adapters import kinds
from lora_fp8.distributed import exchange
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.families import _latents
from lora_fp8.plan import disk_budget, resolve
from lora_fp8.plan.start import read_start_values
from lora_fp8.precision import kernels, matmul, stream
from lora_fp8.settings import Job, Section
from lora_fp8.stages import load as load_stage
from lora_fp8.stages import tracking
from lora_fp8.stages.session import Session
from lora_fp8.training import memory

BASE = (
    "train.steps=4",
    "train.batch_size=2",
    "optimizer.lr=1e-2",
    "checkpoint.every=2",
    "export.dtype=fp32",  # bf16 would round small changes away
)
FEW = ("adapter.targets=['to_q', 'to_k', 'net.0.proj']",)
"""Layers of each kind in each part of a model; adapters beside all would double the time of a run."""
SHOWN = ("preview.prompts=['a cat']",)
SHUFFLED = ("dataset.shuffle_tags=true", "dataset.keep_tokens=0")

LOKR = ("adapter.type=lokr", "adapter.rank=1", "export.formats=['kohya']")
PRODIGY = ("optimizer.name=prodigy", "optimizer.lr=auto")
FOUND = (*PRODIGY, "optimizer.d_coef=64.0")  # so that it finds something in four steps
IN_FP8 = ("quantize.compute=fp8", "quantize.fp8_min_features=0")


@dataclasses.dataclass(frozen=True)
class Flip:
    """One row: what is set, which observables must change, which must not, and what differs from BASE on both sides."""

    value: str
    changes: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    family: str = "sd15"


TRAINING = ("losses", "tensors")
ASIDE = ("losses", "tensors", "rates")  # what must not move when something beside the training is set

FLIPS = {
    "seed": Flip("7", TRAINING),
    "model.dtype": Flip("fp32", TRAINING),
    "model.text_storage": Flip("int8", ("losses", "tensors", "encoded"), ("shapes", "rates", "storage", "buckets")),
    # Captions of the pictures have fewer than 75 tokens; empty chunks are read nevertheless, as in sd-scripts.
    "model.caption_tokens": Flip("225", (*TRAINING, "encoded"), ("shapes", "rates", "storage", "buckets")),
    "model.prompt_weights": Flip(
        "true", (*TRAINING, "encoded"), ("shapes", "rates", "storage", "buckets"), ("dataset.trigger='(zobi:1.5)'",)
    ),
    "model.clip_skip": Flip("2", (*TRAINING, "encoded"), ("shapes", "rates", "storage", "buckets")),
    "quantize.storage": Flip("none", (*TRAINING, "storage", "rates")),  # and lr_scale = "auto" with it
    "quantize.backend": Flip("torchao", (*TRAINING, "storage"), ("shapes", "rates")),
    "quantize.keep": Flip("['to_q']", (*TRAINING, "storage"), ("shapes", "rates")),
    "quantize.scale": Flip("tensor", (*TRAINING, "storage"), ("shapes", "rates")),
    "quantize.modulation": Flip("bf16", (*TRAINING, "storage"), ("shapes", "rates"), family="flux"),
    "quantize.convolutions": Flip("bf16", (*TRAINING, "storage"), ("shapes", "rates")),
    "quantize.override": Flip("{'to_q' = 'int8'}", (*TRAINING, "storage"), ("shapes", "rates")),
    "quantize.sensitivity": Flip(
        "auto", (*TRAINING, "storage"), ("shapes", "rates"), ("quantize.sensitivity_bound=0.01",)
    ),
    "quantize.sensitivity_bound": Flip(
        "0.01", (*TRAINING, "storage"), ("shapes", "rates"), ("quantize.sensitivity=auto",)
    ),
    "quantize.compute": Flip(
        "fp8_forward", (*TRAINING, "storage"), ("shapes", "rates"), ("quantize.fp8_min_features=0",)
    ),
    "quantize.recipe": Flip("delayed", TRAINING, ("shapes", "rates", "storage"), IN_FP8),
    "quantize.fp8_min_features": Flip("9999", (*TRAINING, "storage"), ("shapes", "rates"), IN_FP8),
    "quantize.fp8_exclude": Flip("['to_q']", (*TRAINING, "storage"), ("shapes", "rates"), IN_FP8),
    "adapter.type": Flip("loha", ("shapes", "losses"), under=("export.formats=['kohya']",)),
    "adapter.factor": Flip("2", ("shapes", "losses"), under=LOKR),
    "adapter.block_size": Flip("8", ("shapes", "losses"), under=("adapter.type=oft", "export.formats=['kohya']")),
    "adapter.decompose_both": Flip("true", ("shapes", "losses"), under=LOKR),
    "adapter.rank": Flip("8", ("shapes", "losses")),
    "adapter.ranks": Flip("{'attn2' = 8, 'mid_block' = 2}", ("shapes", "losses")),
    "adapter.alpha": Flip("16.0", TRAINING, ("shapes",)),
    "adapter.rank_stabilized": Flip("true", TRAINING, ("shapes",)),
    "adapter.dropout": Flip("0.5", TRAINING, ("shapes", "rates")),
    "adapter.rank_dropout": Flip("0.5", TRAINING, ("shapes", "rates")),
    "adapter.rank_dropout_scale": Flip(
        "true",
        TRAINING,
        ("shapes", "rates"),
        ("adapter.rank_dropout=0.5", "adapter.type=loha", "export.formats=['kohya']"),
    ),
    "adapter.module_dropout": Flip("0.1", TRAINING, ("shapes", "rates")),
    "adapter.scale_weight_norms": Flip("0.01", ("losses", "tensors"), ("norms_1", "rates", "shapes")),
    "adapter.init": Flip("gaussian", TRAINING, ("rates", "shapes")),
    "adapter.freeze_a": Flip("true", ("losses", "tensors"), ("losses_1", "rates", "shapes")),
    "adapter.targets": Flip("['to_q']", ("shapes", "losses")),
    "adapter.dtype": Flip("fp32", TRAINING, ("shapes",)),
    "adapter.text_encoder": Flip("true", ("shapes", "losses"), ("encoded", "samples", "buckets", "rates")),
    "dataset.folders.0.repeats": Flip("1.5", ("losses", "samples")),
    "dataset.folders.0.trigger": Flip("zibo", ("losses", "encoded")),
    "dataset.folders.0.prefix": Flip("so good,", ("losses", "encoded"), ("buckets", "samples", "rates")),
    "dataset.folders.0.suffix": Flip("so bad", ("losses", "encoded"), ("buckets", "samples", "rates")),
    # A trigger that no other row has; what it then encodes, captions as they are, the others have encoded already.
    "dataset.folders.0.regularization": Flip("true", ("losses",), ("buckets", "samples"), ("dataset.trigger=zubi",)),
    "dataset.folders.0.resolution": Flip("80", ("losses", "encoded", "buckets")),
    # One picture's own transparency: the others are trained whole, so that nothing but its mask is encoded.
    "dataset.folders.0.mask": Flip("alpha", (*TRAINING, "encoded"), ("rates", "samples", "buckets")),
    "dataset.folders.0.weight": Flip("0.5", TRAINING, ("rates", "samples", "buckets")),
    "dataset.resolution": Flip("64", ("losses", "encoded", "buckets")),
    "dataset.buckets": Flip("false", ("losses", "encoded", "buckets")),
    "dataset.bucket_step": Flip("24", ("losses", "buckets")),
    "dataset.max_aspect": Flip("1.5", ("losses", "buckets")),
    "dataset.upscale": Flip("false", ("losses", "encoded", "buckets")),
    "dataset.flip": Flip("true", ("losses", "encoded"), ("buckets", "samples")),
    "dataset.random_crop": Flip("true", ("losses", "encoded"), ("buckets", "samples", "rates")),
    "dataset.zoom": Flip("0.5", ("losses", "encoded"), ("buckets", "samples", "rates")),
    "dataset.rotate": Flip("10.0", ("losses", "encoded"), ("buckets", "samples", "rates")),
    "dataset.color_jitter": Flip("0.3", ("losses", "encoded"), ("buckets", "samples", "rates")),
    "dataset.image_variants": Flip(
        "2", ("losses",), ("buckets", "samples", "rates"), under=("dataset.rotate=10.0", "dataset.zoom=0.3")
    ),
    "dataset.background": Flip("#00ff00", ("losses", "encoded"), ("buckets",)),
    "dataset.trigger": Flip("zobi", ("losses", "encoded", "metadata"), ("buckets",)),
    "dataset.class_word": Flip("dog", ("losses", "encoded"), ("buckets",), ("dataset.trigger=zobi",)),
    "dataset.caption_dropout": Flip("1.0", ("losses",), ("buckets", "samples")),
    "dataset.shuffle_tags": Flip("true", ("losses", "encoded"), ("buckets",)),
    "dataset.tag_dropout": Flip("0.6", ("losses", "encoded"), ("buckets", "samples")),
    "dataset.caption_lines": Flip("one", ("losses", "encoded"), ("buckets", "samples")),
    "dataset.wildcards": Flip("true", ("losses", "encoded"), ("buckets", "samples")),
    "dataset.keep_tokens": Flip("2", ("losses",), ("buckets",), under=SHUFFLED),
    "dataset.keep_separator": Flip("g, ", ("losses",), ("buckets", "samples", "rates"), under=SHUFFLED),
    "dataset.tag_separator": Flip("-", ("losses",), ("buckets",), under=SHUFFLED),
    "dataset.caption_variants": Flip("2", ("losses",), ("buckets",), under=SHUFFLED),
    "train.steps": Flip("3", ("checkpoints", "losses", "tensors")),
    "train.batch_size": Flip("1", TRAINING),
    "train.accumulate": Flip("2", TRAINING),
    "train.max_grad_norm": Flip("1e-9", ("tensors",), ("norms_1", "rates")),
    "optimizer.name": Flip("lion8bit", ("tensors",), ("norms_1", "rates")),
    "optimizer.arguments": Flip(
        "{betas = [0.5, 0.9]}", ("tensors",), ("norms_1", "rates"), ("optimizer.name=torch.optim.NAdam",)
    ),
    "optimizer.lr": Flip("5e-3", ("tensors", "rates")),
    "optimizer.lr_scale": Flip("none", ("tensors", "rates")),
    "optimizer.text_encoder_lr": Flip(
        "1e-4", ("losses", "tensors"), ("norms_1", "rates", "shapes"), ("adapter.text_encoder=true",)
    ),
    "optimizer.lrs": Flip("{'attn2' = 0.1}", ("losses", "tensors"), ("norms_1", "rates", "shapes")),
    "optimizer.loraplus_lr_ratio": Flip("16.0", ("losses", "tensors"), ("norms_1", "rates", "shapes")),
    "optimizer.d0": Flip("1e-5", ("tensors", "rates"), ("norms_1",), PRODIGY),
    "optimizer.growth_rate": Flip("1.01", ("tensors",), ("norms_1",), FOUND),
    "optimizer.decouple": Flip("false", ("tensors",), ("norms_1",), (*FOUND, "optimizer.weight_decay=0.9")),
    "optimizer.d_coef": Flip("64.0", ("tensors", "rates"), ("norms_1",), PRODIGY),
    "optimizer.safeguard_warmup": Flip("false", ("tensors", "rates"), ("norms_1",), FOUND),
    "optimizer.use_bias_correction": Flip("false", ("tensors",), ("norms_1",), FOUND),
    "optimizer.weight_decay": Flip("0.9", ("tensors",), ("norms_1", "rates")),
    "optimizer.beta1": Flip("0.5", ("tensors",), ("norms_1", "rates")),
    "optimizer.beta2": Flip("0.9", ("tensors",), ("norms_1", "rates")),
    "optimizer.eps": Flip("1e-2", ("tensors",), ("norms_1", "rates")),
    "optimizer.rounding": Flip("nearest", ("tensors",), ("norms_1", "rates")),
    "optimizer.ema_decay": Flip("0.9", ("tensors",), ("losses", "rates", "shapes")),
    "schedule.name": Flip("linear", ("tensors", "rates")),
    "schedule.warmup": Flip("2", ("tensors", "rates")),
    "schedule.cycles": Flip("2", ("tensors", "rates"), under=("schedule.name=cosine_with_restarts",)),
    "schedule.power": Flip("3.0", ("tensors", "rates"), under=("schedule.name=polynomial",)),
    "schedule.decay": Flip("0.9", ("tensors", "rates"), under=("schedule.name=wsd", "schedule.min_lr=0.1")),
    "schedule.decay_shape": Flip("1-sqrt", ("tensors", "rates"), under=("schedule.name=wsd", "schedule.decay=3")),
    "schedule.rex_d": Flip("0.9", ("tensors", "rates"), under=("schedule.name=rex",)),
    "schedule.points": Flip(
        "{'0' = 0.5, '1.0' = 1.0}", ("tensors", "rates"), under=("schedule.name=points", "schedule.points={'0' = 1.0}")
    ),
    "schedule.min_lr": Flip("0.5", ("tensors", "rates"), under=("schedule.name=cosine",)),
    "objective.prediction": Flip(
        "v", (*TRAINING, "previews", "prediction_type"), ("rates", "samples", "buckets"), SHOWN
    ),
    "objective.loss": Flip("huber", TRAINING, ("rates", "samples")),
    "objective.huber_delta": Flip("0.5", TRAINING, ("rates", "samples"), ("objective.loss=smooth_l1",)),
    "objective.huber_schedule": Flip("exponential", TRAINING, ("rates", "samples"), ("objective.loss=huber",)),
    "objective.huber_scale": Flip(
        "0.2", TRAINING, ("rates", "samples"), ("objective.loss=pseudo_huber", "objective.huber_schedule=exponential")
    ),
    "objective.min_snr_gamma": Flip("1.0", TRAINING, ("rates", "samples")),
    "objective.weighting": Flip("debiased", TRAINING, ("rates", "samples")),
    "objective.noise_offset": Flip("0.5", TRAINING, ("rates", "samples")),
    "objective.pyramid_noise": Flip("6", TRAINING, ("rates", "samples")),
    "objective.pyramid_discount": Flip("0.9", TRAINING, ("rates", "samples"), ("objective.pyramid_noise=4",)),
    "objective.input_noise": Flip("0.5", TRAINING, ("rates", "samples")),
    "objective.zero_terminal_snr": Flip(
        "true", (*TRAINING, "previews"), ("rates", "samples", "buckets"), (*SHOWN, "objective.prediction=v")
    ),
    "objective.unmasked_weight": Flip(
        "0.9", TRAINING, ("rates", "samples", "buckets", "encoded"), ("dataset.folders.0.mask=alpha",)
    ),
    "objective.normalize_mask": Flip(
        "true", TRAINING, ("rates", "samples", "buckets", "encoded"), ("dataset.folders.0.mask=alpha",)
    ),
    "objective.prior_for_class": Flip(
        "5.0", TRAINING, ("rates", "samples", "buckets", "encoded"), ("dataset.class_word=dog", "dataset.trigger=zobi")
    ),
    "objective.timesteps": Flip("uniform", TRAINING, ("rates", "samples"), family="flux"),
    "objective.logit_mean": Flip("2.0", TRAINING, ("rates", "samples"), ("objective.timesteps=logit_normal",)),
    "objective.logit_std": Flip("3.0", TRAINING, ("rates", "samples"), ("objective.timesteps=logit_normal",)),
    "objective.mode_scale": Flip("-0.9", TRAINING, ("rates", "samples"), ("objective.timesteps=mode",)),
    "objective.beta_alpha": Flip("9.0", TRAINING, ("rates", "samples"), ("objective.timesteps=beta",)),
    "objective.beta_beta": Flip("9.0", TRAINING, ("rates", "samples"), ("objective.timesteps=beta",)),
    "objective.even_timesteps": Flip("true", TRAINING, ("rates", "samples")),
    "objective.shift": Flip("9.0", TRAINING, ("rates", "samples"), family="flux"),
    "objective.t_min": Flip("0.9", TRAINING, ("rates", "samples")),
    "objective.t_max": Flip("0.1", TRAINING, ("rates", "samples"), family="flux"),
    "objective.guidance": Flip("4.0", TRAINING, ("rates", "samples"), family="flux"),
    "memory.gradient_checkpointing": Flip("true", ("blocks",), ("losses_1", "shapes", "rates")),
    "preview.prompts": Flip("['a dog']", ("previews",), ASIDE, SHOWN),
    "preview.negative": Flip("blue", ("previews",), ASIDE, SHOWN),
    "preview.steps": Flip("3", ("previews",), ASIDE, SHOWN),
    "preview.guidance": Flip("2.0", ("previews",), ASIDE, SHOWN),
    "preview.seed": Flip("43", ("previews",), ASIDE, SHOWN),
    "validation.every": Flip("1", ("validated",), ASIDE, under=("validation.every=2", "validation.pictures=1")),
    "validation.pictures": Flip(
        "2", ("validated", "samples", *TRAINING), ("rates", "shapes"), ("validation.every=2", "validation.pictures=1")
    ),
    "validation.keep_best": Flip("false", ("checkpoints",), ASIDE, ("validation.every=1", "validation.pictures=1")),
    "validation.patience": Flip(
        "1",
        ("logged", "tensors"),
        ("losses_1", "shapes"),
        ("validation.every=1", "validation.pictures=1", "optimizer.lr=0.9"),
    ),
    "export.metadata": Flip("none", ("author",), ASIDE, under=("export.author='Somebody'",)),
    "export.verify": Flip("true", ("verified",), ASIDE),
}

OWN_TEST = {
    "name": "test_what_the_changed_values_are",
    "train.log_every": "test_what_the_changed_values_are",
    "preview.every": "test_what_the_changed_values_are",
    "preview.at_start": "test_what_the_changed_values_are",
    "preview.width": "test_what_the_changed_values_are",
    "preview.height": "test_what_the_changed_values_are",
    "checkpoint.every": "test_what_the_changed_values_are",
    "checkpoint.keep": "test_what_the_changed_values_are",
    "tracking.to": "test_tracking_reaches_the_trackers",
    "tracking.project": "test_tracking_reaches_the_trackers",
    "tracking.run_name": "test_tracking_reaches_the_trackers",
    "tracking.log_images": "test_tracking_reaches_the_trackers",
    "export.formats": "test_what_the_changed_values_are",
    "export.every": "test_what_the_changed_values_are",
    "export.dtype": "test_what_the_changed_values_are",
    "export.title": "test_what_the_changed_values_are",
    "export.author": "test_what_the_changed_values_are",
    "export.description": "test_what_the_changed_values_are",
    "export.license": "test_what_the_changed_values_are",
    "output_dir": "test_output_dir_and_cache_dir_are_where_things_go",
    "dataset.cache_dir": "test_output_dir_and_cache_dir_are_where_things_go",
    "dataset.cache_limit": "test_the_cache_is_kept_below_its_limit",
    "preset": "test_preset",
    "model.family": "test_family_and_path_choose_the_base",
    "model.path": "test_family_and_path_choose_the_base",
    "model.components": "test_components",
    "model.files": "test_components",
    "model.revision": "test_revision",
    "model.training_adapter": "test_a_training_adapter_changes_what_training_sees",
    "adapter.init_from": "test_init_from",
    "quantize.fast_accum": "test_fast_accum_reaches_the_kernel",
    "quantize.kernels": "test_kernels_reach_the_layers",
    "dataset.folders.0.path": "test_folder_path",
    "dataset.folders.0.control": "test_control_pictures",
    "dataset.control_resolution": "test_control_pictures",
    "preview.controls": "test_control_pictures",
    "dataset.frames": "test_clips",
    "dataset.fps": "test_clips",
    "dataset.clip": "test_clips",
    "preview.frames": "test_clips",
    "dataset.missing_caption": "test_missing_caption",
    "dataset.follow_mask": "test_crops_follow_the_mask",
    "dataset.max_pixels": "test_max_pixels",
    "train.threads": "test_threads",
    "train.deterministic": "test_deterministic_kernels",
    "train.gradient_exchange": "test_gradient_exchange_reaches_the_exchange",
    "objective.prior_outside_masks": "test_the_bases_prediction_is_a_target",
    "objective.prior_for_regularization": "test_the_bases_prediction_is_a_target",
    "memory.shard_base": "test_sharing_the_base_reaches_the_loading",
    "memory.offload": "test_offload_has_bytes_wait_and_changes_none_that_is_trained",
    "preview.tiled": "test_tiles_reach_the_previews",
    "preview.score_model": "test_the_score_model_is_looked_for",
    "memory.compile": "test_compile_reaches_the_blocks",
    "memory.keep_attention": "test_kept_attention_is_computed_once",
    "memory.cuda_graphs": "test_cuda_graphs_replay_the_passes",
}


def settings(model: type[Section] = Job, where: str = "") -> Iterator[str]:
    """Every setting that can be written into a config, as "section.name"."""
    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type)]
        sections = [a for a in inner if issubclass(a, Section)]
        if sections:
            number = "0." if get_origin(field.annotation) is list else ""
            yield from settings(sections[0], f"{where}{name}.{number}")
        else:
            yield f"{where}{name}"


def test_no_setting_is_left_out() -> None:
    known, declared = {*FLIPS, *OWN_TEST}, set(settings())
    assert not declared - known, f"settings without a row: {sorted(declared - known)}"
    assert not known - declared, f"rows without a setting: {sorted(known - declared)}"
    assert not FLIPS.keys() & OWN_TEST.keys()
    assert all(callable(globals().get(test)) for test in OWN_TEST.values())


# ------------------------------------------------------------------------------------------------------- running things


@pytest.fixture(scope="module")
def gallery(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared pictures and a half transparent one, for the background."""
    folder = tmp_path_factory.mktemp("gallery") / "pictures"
    shutil.copytree(pictures, folder)
    image = Image.new("RGBA", (48, 48), (200, 30, 30, 255))
    image.paste((0, 0, 0, 0), (0, 0, 24, 48))
    image.save(folder / "transparent.png")
    (folder / "transparent.txt").write_text("a cup, {red|blue},\non nothing", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def observe(
    make_job: Callable[..., Job], gallery: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """observe("seed=1"): run BASE and FEW with these overrides and take apart what it left."""
    # A cache of its own: what other tests have encoded would not be encoded here.
    cache = tmp_path_factory.mktemp("cache")
    mine = (f"dataset.cache_dir='{cache}'", f"dataset.folders=[{{path='{gallery}'}}]", *BASE, *FEW)

    def observe(*overrides: str, family: str = "sd15") -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        job = make_job(folder, *mine, *overrides, family=family)
        blocks = 0

        def count(module: torch.nn.Module, *_: Any) -> None:
            nonlocal blocks
            blocks += type(module).__name__ == "BasicTransformerBlock" and module.training

        # Before the call, not after: recomputing stops in the middle of a block, as soon as it has what it needs.
        hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
        try:
            result = train.run(job, progress=False)
        finally:
            hook.remove()
        return observables(result.run) | {"blocks": blocks}

    return observe


def observables(of: run.Run) -> dict[str, Any]:
    """What a run left, taken apart; each entry can be compared with another run's."""
    events: dict[str, list[dict[str, Any]]] = {}
    for event in of.read_events():
        events.setdefault(event["event"], []).append(event)
    steps = events["step"]
    found: dict[str, Any] = {
        "losses": [e["loss"] for e in steps],
        "losses_1": steps[0]["loss"],
        "rates": [e["lr"] for e in steps],
        "norms_1": steps[0]["grad_norm"],
        "logged": [e["step"] for e in steps],
        "validated": [(e["step"], e["bands"]) for e in events.get("validation", [])],
        "encoded": events["cache"][0]["encoded"],
        "samples": events["data"][0]["samples_per_epoch"],
        "buckets": events["data"][0]["buckets"],
        "storage": events["model"][0]["storage"],
        "base": [events["model"][0]["base"], events["model"][0]["base_sha256"]],
        "checkpoints": sorted(p.name for p in of.checkpoints.iterdir()),
        "exports": sorted(p.name for p in of.export.iterdir()),
        "verified": of.verify_file.exists(),
        "drawn": sorted(p.name for p in of.samples.glob("step-*.png")),
        "previews": {},
        "clips": {path.name: Image.open(path).n_frames for path in of.samples.glob("*.webp")},
        "sizes": [],
        "tensors": {},
        "shapes": {},
        "dtypes": set(),
    }
    for path in sorted(of.samples.glob("step-*.png")):
        with Image.open(path) as image:
            found["previews"][path.name] = hashlib.sha256(image.tobytes()).hexdigest()
            found["sizes"].append(image.size)
    for path in sorted(of.export.glob("*_kohya.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # not a dict
                tensor = file.get_tensor(name)
                found["shapes"][name] = list(tensor.shape)
                found["dtypes"].add(str(tensor.dtype))
                found["tensors"][name] = hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()
        # Only what is not a copy of the config: that would differ whether or not a setting does anything.
        found["metadata"] = {k: v for k, v in metadata.items() if k.startswith("modelspec.trigger")}
        for what in ("title", "author", "description", "license", "prediction_type"):
            found[what] = metadata.get(f"modelspec.{what}")
    return found


@pytest.fixture(scope="module")
def baseline(observe: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """baseline(under, family): the run without the flip, as if all that it takes had been encoded before."""
    made: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}

    def baseline(under: tuple[str, ...], family: str) -> dict[str, Any]:
        if (under, family) not in made:
            # It fills the cache: from here on a flip that encodes anything shows.
            made[under, family] = observe(*under, family=family) | {"encoded": 0}
        return made[under, family]

    return baseline


# ------------------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_without_a_flip_nothing_changes(
    baseline: Callable[..., dict[str, Any]], observe: Callable[..., dict[str, Any]], family: str
) -> None:
    """From what was just encoded and from the cache: the second run encodes nothing."""
    before, again = baseline(SHOWN, family), observe(*SHOWN, family=family)
    assert [name for name in before if before[name] != again[name]] == []
    assert len(before["losses"]) == 4 and len(before["previews"]) == 2
    assert before["checkpoints"] == ["step-000002", "step-000004"] and len(before["buckets"]) > 2


@pytest.mark.parametrize("key", FLIPS)
def test_the_setting_does_what_it_is_for(
    key: str, baseline: Callable[..., dict[str, Any]], observe: Callable[..., dict[str, Any]]
) -> None:
    flip = FLIPS[key]
    before = baseline(flip.under, flip.family)
    after = observe(*flip.under, f"{key}={flip.value}", family=flip.family)
    unmoved = [name for name in flip.changes if before[name] == after[name]]
    assert not unmoved, f"{key} = {flip.value} changed nothing of {unmoved}: {[before[name] for name in unmoved]}"
    moved = [name for name in flip.keeps if before[name] != after[name]]
    assert not moved, f"{key} = {flip.value} also changed {moved}"


def test_what_the_changed_values_are(
    baseline: Callable[..., dict[str, Any]], observe: Callable[..., dict[str, Any]]
) -> None:
    """Different is not yet right: where the right value is plain to say, it is said."""
    before = baseline((), "sd15")
    assert before["rates"] == pytest.approx([1.4e-2] * 4)  # lr_scale = "auto" on an FP8 base
    lighter = observe(
        *SHOWN,
        "optimizer.lr_scale=3.0",
        "schedule.name=linear",
        "dataset.folders.0.weight=0.5",
        "preview.at_start=false",
        "export.formats=['kohya']",
        "export.every=2",
        "export.dtype=fp16",
    )
    assert lighter["rates"] == pytest.approx([3e-2, 2.25e-2, 1.5e-2, 0.75e-2])
    assert lighter["losses_1"] == pytest.approx(before["losses_1"] / 2, rel=1e-6)
    assert lighter["norms_1"] == pytest.approx(before["norms_1"] / 2, rel=1e-2)
    assert before["dtypes"] == {"torch.float32"} and lighter["dtypes"] == {"torch.float16", "torch.float32"}  # alpha
    assert lighter["drawn"] == ["step-000004-0.png"]
    assert lighter["exports"] == ["lora_kohya.safetensors", "step-000002"]
    after = observe(
        *SHOWN,
        "preview.width=80",
        "preview.height=32",
        "preview.every=3",
        "checkpoint.every=1",
        "checkpoint.keep=3",
        "train.log_every=3",
        "export.author=Somebody",
        "export.description=Words",
        "export.license=CC0",
        "export.title=Title",
        "name=thing",
    )
    assert set(after["sizes"]) == {(80, 32)}
    assert after["drawn"] == [f"step-{step:06d}-0.png" for step in (0, 3, 4)]
    assert after["checkpoints"] == ["step-000002", "step-000003", "step-000004"]
    # What is set beside the training does not move it.
    assert after["logged"] == [3, 4] and after["tensors"] == before["tensors"]
    assert (after["losses"], after["rates"]) == (before["losses"][2:], before["rates"][2:])
    assert [after[what] for what in ("author", "description", "license", "title")] == [
        "Somebody",
        "Words",
        "CC0",
        "Title",
    ]
    assert after["exports"] == ["thing_diffusers.safetensors", "thing_kohya.safetensors"]
    assert before["title"] == "lora" and before["author"] is None


# ------------------------------------------------------------------------------- settings with a test of their own


def test_output_dir_and_cache_dir_are_where_things_go(job: Callable[..., Job], tmp_path: Path) -> None:
    run_ = train.run(
        job(f"output_dir='{tmp_path / 'here'}'", f"dataset.cache_dir='{tmp_path / 'there'}'", "train.steps=1"),
        progress=False,
    ).run
    assert run_.path == tmp_path / "here" / "lora" and list(run_.export.glob("*.safetensors"))
    assert len(list((tmp_path / "there" / "latents").rglob("*.safetensors"))) == 5
    assert list((tmp_path / "there" / "conds").rglob("*.safetensors"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "there"]


def test_the_cache_is_kept_below_its_limit(job: Callable[..., Job], tmp_path: Path) -> None:
    """What is unused for longest goes, what this run needs stays, and the run says if that is more than the limit."""
    cached = f"dataset.cache_dir='{tmp_path / 'cache'}'"

    def run_with(name: str, *more: str) -> tuple[list[dict[str, Any]], set[Path]]:
        made = job(cached, "train.steps=1", f"name='{name}'", f"output_dir='{tmp_path}'", *more)
        events = train.run(made, progress=False).run.read_events()
        return events, {path for path in (tmp_path / "cache").rglob("*.safetensors")}

    _, first = run_with("first")
    for path in first:
        os.utime(path, (0, 0))
    events, both = run_with("second", "dataset.background='#102030'")
    assert both > first and not [event for event in events if event["event"] == "cache_shrunk"]
    old = {path for path in first if path.stat().st_mtime == 0}
    assert old and old < first  # the captions were used again
    size = sum(path.stat().st_size for path in both - old) / 2**30
    for path in first:
        os.utime(path, (0, 0))
    events, left = run_with("third", "dataset.background='#102030'", f"dataset.cache_limit={size}")
    (shrunk,) = [event for event in events if event["event"] == "cache_shrunk"]
    assert left == both - old and shrunk["deleted"] == len(old)
    (made,) = [event for event in events if event["event"] == "cache"]
    assert made["encoded"] == 0
    assert "cache_limit" not in str([event for event in events if event["event"] == "warning"])
    events, left = run_with("fourth", "dataset.background='#102030'", f"dataset.cache_limit={size / 2}")
    assert left == both - old
    assert "dataset.cache_limit = " in str([event for event in events if event["event"] == "warning"])


def test_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 77", encoding="utf-8")
    text = "model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}"
    assert config.loads(text, ["preset=['mine.toml']"], folder=tmp_path).train.steps == 77
    assert config.loads(text, folder=tmp_path).train.steps != 77


def test_family_and_path_choose_the_base(
    baseline: Callable[..., dict[str, Any]], observe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    before = baseline((), "sd15")
    miniatures.save("sd15", tmp_path / "other", seed=1)
    after = observe(f"model.path='{tmp_path / 'other'}'")
    assert before["base"][0] == after["base"][0] == families.get("sd15").title
    assert before["base"][1] != after["base"][1] and before["losses"] != after["losses"] and after["encoded"] > 0
    other = baseline((), "flux")
    assert other["base"][0] == families.get("flux").title and not other["shapes"].keys() & before["shapes"].keys()


def test_components(job: Callable[..., Job], tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A single file takes what it lacks from them, and from the files of parts, whose VAE gives other latents."""
    unet = load_file(next((tiny("sd15") / "unet").glob("*.safetensors")))
    names = ldm_names(unet, layers_per_block=1)
    single = tmp_path / "model.safetensors"
    save_file({names[name]: tensor for name, tensor in unet.items()}, single)

    def losses(name: str, *given: str) -> list[float]:
        result = train.run(job(f"name='{name}'", f"model.path='{single}'", "train.steps=1", *given), progress=False)
        return [event["loss"] for event in result.run.read_events() if event["event"] == "step"]

    for given, expected in (
        ("auto", "has no vae (AutoencoderKL), text_encoder (CLIPTextModel). Name their files in [model.files]"),
        ("/nowhere", "model.components = '/nowhere' is not a folder"),
    ):
        with pytest.raises(UserError) as caught:
            losses("refused", f"model.components='{given}'")
        assert expected in str(caught.value)
    components = f"model.components='{tiny('sd15')}'"
    vae = load_file(tiny("sd15") / "vae" / "diffusion_pytorch_model.safetensors")
    save_file({name: tensor + 0.1 for name, tensor in vae.items()}, tmp_path / "vae.safetensors")
    plain = losses("plain", components)
    other = losses("other", components, f"model.files={{vae='{tmp_path / 'vae.safetensors'}'}}")
    assert plain and plain != other


def test_revision(
    job: Callable[..., Job], tiny: Callable[[str], Path], hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
    hub.use(monkeypatch, tmp_path / "home")
    hub.add("somebody/base", tiny("sd15"), revisions={"v2"})
    with pytest.raises(UserError, match="was not found|does not exist"):
        train.run(job("model.path=somebody/base", "train.steps=1"), progress=False)
    train.run(job("model.path=somebody/base", "model.revision=v2", "train.steps=1"), progress=False)
    assert any("/revision/v2" in request.path for request in hub.seen())


def test_a_training_adapter_changes_what_training_sees(job: Callable[..., Job]) -> None:
    short = ("train.steps=2", "preview.prompts=[]", "export.verify=false", "optimizer.lr=0.01")
    first = train.run(job(*short), progress=False)
    given = f"model.training_adapter='{first.files[0]}'"
    second = train.run(job(*short, given, "name=second"), progress=False)
    losses = [
        next(event["loss"] for event in of.run.read_events() if event["event"] == "step") for of in (first, second)
    ]
    assert losses[0] != losses[1]


def test_init_from(job: Callable[..., Job], tmp_path: Path) -> None:
    """A run that goes on from a file begins where the run that wrote it ended, whatever layout and alpha."""
    held = (*BASE, *SHOWN, "validation.pictures=1", "validation.every=4")
    first = train.run(job(*held, "adapter.targets=['to_q', 'to_k']", "adapter.alpha=8.0"), progress=False)
    kohya, diffusers_ = sorted(first.files, reverse=True)
    given = (*held, f"adapter.init_from='{kohya}'", "adapter.alpha=2.0")
    second = train.run(job(*given, "train.steps=1", "name=second"), progress=False)
    ended, begins = (
        [
            event
            for event in of.run.read_events()
            if event["event"] in ("validation", "preview") and event["step"] == step
        ]
        for of, step in ((first, 4), (second, 0))
    )
    assert {e["event"]: e.get("bands") for e in ended} == {e["event"]: e.get("bands") for e in begins}
    drawn = [Image.open(of.run.samples / f"step-00000{step}-0.png").tobytes() for of, step in ((first, 4), (second, 0))]
    assert drawn[0] == drawn[1]
    (warned,) = [e["text"] for e in second.run.read_events() if e["event"] == "warning" and "init_from" in e["text"]]
    assert "start from the base" in warned and "proj_in" in warned and "lora_B" not in warned

    def values(*overrides: str, family: str = "sd15", file: Path = kohya) -> dict[str, torch.Tensor]:
        mine = job(*overrides, f"adapter.init_from='{file}'", family=family)
        base = resolve.make_family(mine)
        return read_start_values(mine, base, disk_budget.list_trainable(mine, base))

    for layer, ours in kinds.group_by_layer(values("adapter.alpha=8.0")).items():
        others = kinds.group_by_layer(values("adapter.alpha=8.0", file=diffusers_))[layer]
        torch.testing.assert_close(kinds.compute_delta(ours, 1.0), kinds.compute_delta(others, 1.0))
    for overrides, line in (
        (("adapter.rank=8",), "the file has rank 4, but adapter.rank is 8; set adapter.rank"),
        (("adapter.type=dora",), "this is a lora, but adapter.type is 'dora'"),
        (("adapter.targets=['to_q']",), r"to_k.*would be lost"),
    ):
        with pytest.raises(UserError, match=line):
            values(*overrides)
    with pytest.raises(UserError, match="adapter.init_from = .*: this LoRA is for Stable Diffusion 1.5, but the"):
        values(family="flux")
    tensors, wider = load_file(diffusers_), tmp_path / "wider.safetensors"
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = torch.cat([tensors[name]] * 2, dim=1)  # as of a base whose captions are encoded twice as wide
    save_file(tensors, wider)
    with pytest.raises(UserError, match="does not fit this base model: 1 tensors .*lora_A"):
        values(file=wider)
    with pytest.raises(UserError, match="this file does not exist"):
        train.run(job(f"adapter.init_from='{tmp_path / 'none'}'", "name=third"), progress=False)
    assert not (Path(job().output_dir) / "third").exists()


def test_folder_path(
    baseline: Callable[..., dict[str, Any]], observe: Callable[..., dict[str, Any]], gallery: Path, tmp_path: Path
) -> None:
    for path in gallery.glob("[ab].*"):
        shutil.copy(path, tmp_path)
    after = observe(f"dataset.folders.0.path='{tmp_path}'")
    assert after["samples"] == 2 and baseline((), "sd15")["samples"] == 6
    # The same bytes at another place: nothing of them is encoded again.
    assert after["encoded"] == 0


def test_control_pictures(
    observe: Callable[..., dict[str, Any]], gallery: Path, small_controls: None, tmp_path: Path
) -> None:
    for path in [*gallery.glob("*.png"), *gallery.glob("*.jpg")]:
        Image.open(path).convert("RGB").rotate(180).save(tmp_path / f"{path.stem}.png")
    given = (f"dataset.folders=[{{path='{gallery}', control='{tmp_path}'}}]",)
    plain = observe(*SHOWN, family="flux_kontext")
    shown = observe(*given, *SHOWN, family="flux_kontext")
    assert shown["losses"] != plain["losses"] and shown["encoded"] == 6
    larger = observe(*given, "dataset.control_resolution=48", family="flux_kontext")
    assert larger["losses"] != shown["losses"] and larger["encoded"] == 6
    drawn = observe(*given, *SHOWN, f"preview.controls=['{tmp_path / 'a.png'}']", family="flux_kontext")
    assert drawn["losses"] == shown["losses"] and drawn["previews"].keys() == shown["previews"].keys()
    assert len(shown["previews"]) == 2
    assert all(drawn["previews"][name] != shown["previews"][name] for name in shown["previews"])


def test_clips(observe: Callable[..., dict[str, Any]], gallery: Path, tmp_path: Path) -> None:
    """One clip of 12 frames, 0.72 s, beside a picture."""
    frames = [Image.new("RGB", (48, 48), (20 * number, 0, 0)) for number in range(12)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=60)
    (tmp_path / "clip.txt").write_text("it turns red", encoding="utf-8")
    for name in ("a.png", "a.txt"):
        shutil.copy(gallery / name, tmp_path)
    # All targets: diffusers reads a Wan file only with an adapter beside each layer of an attention.
    given = (f"dataset.folders=[{{path='{tmp_path}'}}]", "train.steps=1", "train.batch_size=1", "adapter.targets=[]")
    clip = (*given, "dataset.frames=[5, 9]")
    drawn = observe(*clip, *SHOWN, "preview.frames=5", "export.verify=true", family="wan")
    assert drawn["buckets"] == {"48x48": 1, "48x48x9": 1} and drawn["verified"]
    assert drawn["drawn"] == ["step-000000-0.png", "step-000001-0.png"]
    assert drawn["clips"] == {"step-000000-0.webp": 5, "step-000001-0.webp": 5}
    first = observe(*given, family="wan")
    assert first["buckets"] == {"48x48": 2} and first["encoded"] == 1 and not first["clips"]
    slow = observe(*clip, "dataset.fps=8", family="wan")
    assert slow["buckets"] == {"48x48": 1, "48x48x5": 1} and slow["encoded"] == 1
    cut = observe(*given, "dataset.frames=[5]", "dataset.clip=chunks", family="wan")
    assert cut["buckets"] == {"48x48": 1, "48x48x5": 2} and cut["samples"] == 3


def test_missing_caption(observe: Callable[..., dict[str, Any]], gallery: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    shutil.copytree(gallery, folder)
    (folder / "a.txt").unlink()
    here = f"dataset.folders.0.path='{folder}'"
    with pytest.raises(UserError, match=r"a\.png has no caption"):
        observe(here)
    assert observe(here, "dataset.missing_caption=skip")["samples"] == 5
    named = observe(here, "dataset.missing_caption=trigger", "dataset.trigger=zibo")
    assert named["samples"] == 6 and named["encoded"] > 0


def test_max_pixels(observe: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"more than dataset\.max_pixels = 4,600"):
        observe("dataset.max_pixels=4600")
    assert observe("dataset.max_pixels=4608", "train.steps=1")["samples"] == 6  # 96 x 48


def test_threads(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    train.run(job("train.threads=3", "train.steps=1"), progress=False)
    assert asked == [3]
    train.run(job("train.threads=0", "train.steps=1", "name=second"), progress=False)
    assert asked == [3]  # 0 leaves torch's choice alone


def test_tracking_reaches_the_trackers(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each tracker then does with it is asked in test_tracking.py."""
    calls: list[Any] = []

    class Tracker:
        name = "wandb"

        def __init__(self, project: str, **given: Any) -> None:
            calls.append((project, given["name"]))

        start = finish = store_init_configuration = log = lambda self, *_, **__: None

        def log_images(self, values: dict[str, Any], step: int) -> None:
            calls.append((step, *values))

    monkeypatch.setitem(tracking.TRACKERS, "wandb", Tracker)
    monkeypatch.setattr("lora_fp8.plan.plan.require_packages", lambda section: None)
    short = ("train.steps=1", "preview.prompts=['a cat']", "preview.steps=1")
    train.run(job(*short), progress=False)
    assert calls == []
    on = "tracking.to=['wandb']"
    train.run(job(*short, on, "name=second"), progress=False)
    assert calls == [("lora-fp8", "second"), (0, "previews/1"), (1, "previews/1")]
    calls.clear()
    own = ("tracking.project=foxes", "tracking.run_name=red", "tracking.log_images=false")
    train.run(job(*short, on, *own, "name=third"), progress=False)
    assert calls == [("foxes", "red")]


def test_gradient_exchange_reaches_the_exchange(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone there is nothing to exchange, so what is asked for is looked at; test_exchange.py has two processes."""
    asked: list[str] = []
    real = exchange.build
    monkeypatch.setattr(exchange, "build", lambda kind, *more: asked.append(kind) or real(kind, *more))
    train.run(job("train.gradient_exchange=fp8", "train.steps=1"), progress=False)
    train.run(job("train.steps=1", "name=second"), progress=False)
    assert asked == ["fp8", "fp32"]


def test_sharing_the_base_reaches_the_loading(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone there is nothing to share, so who is asked to is looked at; test_shard_base.py has two processes."""
    asked: list[bool] = []
    real = load_stage.load_base
    monkeypatch.setattr(
        load_stage, "load_base", lambda *given: asked.append(given[4] is not None) or real(*given[:4], None)
    )
    monkeypatch.setattr(load_stage, "_describe_sharing", lambda *given: [])
    wide = property(lambda session: session.memory.shard_base)
    monkeypatch.setattr(Session, "shares_base", wide)
    train.run(job("memory.shard_base=true", "train.steps=1"), progress=False)
    train.run(job("train.steps=1", "name=second"), progress=False)
    assert asked == [True, False]


def test_fast_accum_reaches_the_kernel(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU adds up the same either way, so what the kernel is asked for is looked at."""
    asked: list[bool] = []
    real = matmul.multiply_unscaled
    monkeypatch.setattr(matmul, "multiply_unscaled", lambda *given: asked.append(given[3]) or real(*given))
    train.run(job(*IN_FP8, "train.steps=1"), progress=False)
    assert asked.count(True) > 0 and asked.count(False) > 0  # forward, backward
    asked.clear()
    train.run(job(*IN_FP8, "train.steps=1", "quantize.fast_accum=false", "name=second"), progress=False)
    assert asked.count(True) == 0 and asked.count(False) > 0


def test_kernels_reach_the_layers(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """They need a GPU, so the first call of one is looked at; test_kernels.py tells what they compute."""
    with pytest.raises(UserError, match="not a cpu"):
        train.run(job(*IN_FP8, "quantize.kernels=triton"), progress=False)
    monkeypatch.setattr(precision, "find_problem", lambda *_: "")
    asked: list[torch.Size] = []

    def quantize_rows(x_MK: torch.Tensor) -> None:
        asked.append(x_MK.shape)
        raise UserError("reached")

    monkeypatch.setattr(kernels, "quantize_rows", quantize_rows)
    with pytest.raises(UserError, match="reached"):
        train.run(job(*IN_FP8, "quantize.kernels=triton", "name=second"), progress=False)
    assert len(asked) == 1
    train.run(job(*IN_FP8, "train.steps=1", "name=third"), progress=False)
    assert len(asked) == 1


def test_offload_has_bytes_wait_and_changes_none_that_is_trained(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, as_if_on_a_gpu: list[stream.Courier]
) -> None:
    with pytest.raises(UserError, match="a cpu has no memory of its own"):
        train.run(job("memory.offload=0.5"), progress=False)
    monkeypatch.setattr(memory, "find_problem", lambda *_: "")
    kept = train.run(job("name=kept"), progress=False)
    assert not as_if_on_a_gpu
    moved = train.run(job("memory.offload=0.5", "name=moved"), progress=False)
    # The bytes of the files but for what they say of themselves: the tensors behind the header.
    for one, other in zip(kept.files, moved.files, strict=True):
        ours, theirs = (load_file(file) for file in (one, other))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    (courier,) = as_if_on_a_gpu
    assert courier.early > 5 * courier.late > 0
    (told,) = [event for event in moved.run.read_events() if event["event"] == "model"]
    assert "offloaded to RAM" in " ".join(told["memory"])


def test_the_score_model_is_looked_for(job: Callable[..., Job], tmp_path: Path) -> None:
    """What it computes is in tests/test_preview_scores.py."""
    with pytest.raises(UserError, match="preview.score_model = 'no/model': there is no such folder"):
        train.run(job("preview.prompts=['a']", "preview.score_model=no/model"), progress=False)


def test_tiles_reach_the_previews(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_latents, "TILE", 32)
    drawn = {}
    for tiled in ("false", "true", "auto"):
        settings = (
            "train.steps=1",
            "preview.prompts=['a']",
            "preview.at_start=false",
            "preview.steps=1",
            "export.verify=true",
        )
        result = train.run(job(*settings, f"preview.tiled={tiled}", f"name=run-{tiled}"), progress=False)
        with Image.open(result.run.samples / "step-000001-0.png") as image:
            drawn[tiled] = image.tobytes()
    assert drawn["true"] != drawn["false"] == drawn["auto"], "a CPU needs no tiles"


def test_deterministic_kernels(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has them for GPUs, and refuses an operation that has none: this one on a CPU too."""
    short = ("train.steps=1", "export.verify=false", "preview.prompts=[]")
    real = UNet2DConditionModel.forward

    def scattered(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sample = sample.clone().put_(torch.tensor([0]), torch.zeros(1, dtype=sample.dtype), accumulate=False)
        return real(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", scattered)
    train.run(job(*short), progress=False)
    with pytest.raises(
        RunFailure, match="put_, which this model uses, has no deterministic kernel; use train.deterministic"
    ):
        train.run(job(*short, "train.deterministic=true", "name=second"), progress=False)
    assert torch.are_deterministic_algorithms_enabled()
    train.run(job(*short, "name=third"), progress=False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_kept_attention_is_computed_once(job: Callable[..., Job]) -> None:
    class Count(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.num += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            return func(*args, **(kwargs or {}))

    short = ("train.steps=1", "export.verify=false", "preview.prompts=[]", "memory.gradient_checkpointing=true")
    counts = []
    for number, kept in enumerate(("true", "false", "true")):
        Count.num = 0
        with Count():
            train.run(job(*short, f"memory.keep_attention={kept}", f"name=run{number}"), progress=False)
        counts.append(Count.num)
    assert counts[1] == 2 * counts[2] > 0  # the first run also encodes


def test_cuda_graphs_replay_the_passes(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has none they are refused; more: test_cuda_graphs.py."""
    with pytest.raises(UserError, match="a cpu has no CUDA graphs"):
        train.run(job("memory.cuda_graphs=true"), progress=False)
    monkeypatch.setattr(memory, "find_problem", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(Graph, "made", [])
    train.run(job("memory.cuda_graphs=true", "train.steps=1"), progress=False)
    assert any(made.replays for made in Graph.made)


def test_compile_reaches_the_blocks(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating code takes a minute, so what the blocks are asked is looked at; test_compile.py compiles them."""
    asked: list[bool] = []
    real = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: asked.append(fullgraph) or real(function, backend="eager", fullgraph=fullgraph),
    )
    train.run(job("memory.compile=blocks", "train.steps=1"), progress=False)
    assert asked and all(asked)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("flux", ("objective.min_snr_gamma=5.0",)),
        ("sd15", ("preview.steps=7", "preview.prompts=[]")),
        ("sd15", ("train.gradient_exchange=fp8",)),
        ("sd15", ("memory.shard_base=true",)),
        ("sd15", ("model.revision=v2",)),
        ("sd15", ("model.components=somewhere",)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_setting_that_has_no_effect_is_a_warning(
    job: Callable[..., Job], family: str, overrides: tuple[str, ...]
) -> None:
    """Nothing is silently ignored: a run says it once. All settings, without runs: test_unused."""
    done = train.run(job(*overrides, "train.steps=1", family=family), progress=False).run
    warned = [event["text"] for event in done.read_events() if event["event"] == "warning"]
    key = overrides[0].split("=")[0]
    assert len([text for text in warned if key in text and "no effect" in text]) == 1, warned


def test_crops_follow_the_mask(observe: Callable[..., Any], tmp_path: Path) -> None:
    image = Image.new("RGBA", (96, 48), (200, 30, 30, 255))
    image.paste((0, 0, 0, 0), (0, 0, 72, 48))
    image.save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a cup", encoding="utf-8")
    masked = f"dataset.folders=[{{path='{tmp_path}', mask='alpha'}}]", "dataset.buckets=false"
    before, after = observe(*masked), observe(*masked, "dataset.follow_mask=true")
    assert after["encoded"] == 2, "the image and its mask; its caption is in the cache"
    assert before["losses"] != after["losses"]
    assert all(before[same] == after[same] for same in ("rates", "buckets", "samples"))


def test_the_blocks_that_are_counted_exist() -> None:
    assert hasattr(diffusers.models.attention, "BasicTransformerBlock")


def test_the_bases_prediction_is_a_target(observe: Callable[..., Any], gallery: Path, tmp_path: Path) -> None:
    """Of regularization images beside others, and outside the masks of all images."""
    both = f"dataset.folders=[{{path='{gallery}'}}, {{path='{gallery}', regularization=true}}]"
    for number, side in enumerate((48, 64)):
        image = Image.new("RGBA", (side, side), (200, 30, 30, 255))
        image.paste((0, 0, 0, 0), (0, 0, side // 2, side))
        image.save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("a cup", encoding="utf-8")
    masked = f"dataset.folders=[{{path='{tmp_path}', mask='alpha'}}]"
    for folders, setting in ((both, "prior_for_regularization=true"), (masked, "prior_outside_masks=5.0")):
        before, after = observe(folders), observe(folders, f"objective.{setting}")
        for seen in TRAINING:
            assert before[seen] != after[seen], f"{setting} changes no {seen}"
        assert before["rates"] == after["rates"] and before["buckets"] == after["buckets"]
