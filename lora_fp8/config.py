"""Every setting of a job, declared once, and the strict way from TOML text to a checked `Job`.

One TOML table = one section = one frozen pydantic model below; one line a setting: name, type, default, bounds,
description.
From this one declaration come the check, the commented file of `lora-fp8 new` and later the web form.

* A **config** is complete and describes one job. A **preset** is partial and is laid under it.
  Precedence, merged in `_merge` and nowhere else: defaults < presets (in the order named) < config < `--set key=value`.
  The word "auto" means that the family or the objective decides; the run prints what was decided.
* Nothing is silently ignored: an unknown key, a wrong type, a wrong value and a contradiction are all errors, and a bad
  file reports all of them at once, each with its path, what was given, what is accepted, and "did you mean".

Layer 0: no torch here, so that `lora-fp8 --help`, `check` and the web page start at once.
"""

import copy
import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError

PRESET_FOLDER = Path(__file__).resolve().parent.parent / "presets"
Location = tuple[Any, ...]
"""Where a setting is: ("dataset", "folders", 0, "path")."""
SCALES = {
    "fp8": ("row", "tensor", "1x64", "1x128", "128x128", "none"),
    "int8": ("1x128", "1x64", "row"),
    "nf4": ("64",),
}
"""The scales that each quantized storage knows, the one that "auto" tries first in front."""
TORCHAO_LACKS = ("none", "128x128")
"""Scales of fp8 that torchao's weight-only tensors have no granularity for."""
MAX_SEED = 2**32 - 1  # what every tool that shows or takes a seed can hold


class UserError(Exception):
    """Something the user gave is wrong: one clear line, exit code 2, no traceback."""


class UserErrors(UserError):
    """Several things are wrong; all are reported at once.

    Args:
        problems: one line each.
        where: the file (or other source) that they were found in.
    """

    def __init__(self, problems: list[str], where: str = ""):
        self.problems, self.where = problems, where
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{where}: {count}" if where else count, *(f"  {p}" for p in problems)]))


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no guessing between types ("8" is not 8), no nan and no inf."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def setting(default: Any, description: str, *, when: dict[str, tuple[Any, ...]] | None = None, **bounds: Any) -> Any:
    """One setting: its default, its description (shown as help everywhere), its bounds (pydantic's ge, gt, le, lt).

    `when` tells where it can have an effect: other settings, each with the values that it needs; no values mean any
    but empty ones. "family.NAME" is one of the family's `families.traits`. A form may leave it out elsewhere. What is
    refused or warned about is decided by the rules below.
    """
    return Field(default=default, description=description, json_schema_extra={"when": when} if when else None, **bounds)


QUANTIZED: dict[str, tuple[Any, ...]] = {"quantize.storage": ("fp8", "int8", "nf4")}
FP8_MATMUL: dict[str, tuple[Any, ...]] = {
    "quantize.storage": ("fp8",),
    "quantize.compute": ("fp8", "fp8_forward", "auto"),
}
DRAWN: dict[str, tuple[Any, ...]] = {"preview.prompts": ()}
CLIPS: dict[str, tuple[Any, ...]] = {"family.clips": (True,)}
DIFFUSION: dict[str, tuple[Any, ...]] = {"family.objective": ("Diffusion",)}
FLOW: dict[str, tuple[Any, ...]] = {"family.objective": ("FlowMatching",)}


class Model(Section):
    """The base model that is frozen and adapted."""

    family: str = Field(description="Architecture, such as sd15, sdxl, flux or qwen_image; the README lists them all.")
    path: str = Field(
        description="Base model: Hugging Face id, diffusers folder, single .safetensors file, or 'demo' (bundled)."
    )
    components: str = setting(
        "", "Diffusers folder with the VAE, text encoders and tokenizers that a single file lacks."
    )
    revision: str = setting("", "Branch, tag or commit on the hub; empty means the default branch.")
    dtype: Literal["bf16", "fp32"] = setting("bf16", "Compute dtype, and storage of the parts that are not quantized.")
    text_storage: Literal["none", "fp8", "int8", "nf4"] = setting(
        "none",
        "Storage of the text encoders while captions are encoded; fp8 takes half the memory of bf16, nf4 a third.",
    )


class Quantize(Section):
    """How the frozen base is held in memory, and how it is multiplied."""

    storage: Literal["fp8", "int8", "nf4", "bf16", "none"] = setting(
        "fp8", "fp8: e4m3; int8; nf4: 4 bits, as QLoRA; bf16: not quantized; none: not quantized, held in model.dtype."
    )
    backend: Literal["own", "torchao", "te"] = setting(
        "own",
        "Whose layers: own; torchao: its weight-only tensors; te: TransformerEngine's FP8 layers, on CUDA only.",
        when=QUANTIZED,
    )
    scale: Literal["auto", "row", "tensor", "1x64", "1x128", "128x128", "none"] = setting(
        "auto",
        "Weights that share a scale; auto: row for fp8, 1x128 for int8; none: fp8 as kohya's fp8_base.",
        when={"quantize.storage": ("fp8", "int8")},
    )
    modulation: Literal["auto", "fp8", "int8", "nf4", "bf16"] = setting(
        "auto", "Storage of layers that see one row per image; auto: int8, which has the least error.", when=QUANTIZED
    )
    keep: list[str] = setting(
        [], "Further module names to keep in model.dtype, beside the family's precise parts.", when=QUANTIZED
    )
    override: list[str] = setting([], "Storage of single layers, such as 'ff.net.2 = int8 1x128' or 'to_q = bf16'.")
    sensitivity: Literal["off", "auto"] = setting(
        "off",
        "auto: measure each layer on the job's pictures, hold those above sensitivity_bound in int8 or bf16.",
        when=QUANTIZED,
    )
    sensitivity_bound: float = setting(
        0.05,
        "Largest relative error of a layer's output; fp8 itself costs up to 0.04, int8 0.01, nf4 0.1.",
        ge=0,
        lt=1,
        when={"quantize.sensitivity": ("auto",)},
    )
    compute: Literal["upcast", "fp8", "fp8_forward", "auto"] = setting(
        "upcast",
        "upcast: weights decoded, matmul in model.dtype; fp8: matmul in FP8; auto: the fastest, measured.",
        when={"quantize.storage": ("fp8",)},
    )
    recipe: Literal["current", "delayed", "block", "mxfp8"] = setting(
        "current",
        "Scales in an FP8 matmul: of this step, of the last steps, of 1x128 blocks, of 1x32 (te only).",
        when=FP8_MATMUL,
    )
    fast_accum: bool = setting(
        True, "Let the forward FP8 matmul add up in fewer bits, as Hopper does it fastest.", when=FP8_MATMUL
    )
    kernels: Literal["torch", "triton"] = setting(
        "torch",
        "triton: own kernels around the FP8 matmul (not measured on a GPU yet); compute = auto tries both.",
        when=FP8_MATMUL,
    )
    fp8_min_features: int = setting(
        512, "Layers with a side below this are not multiplied in FP8.", ge=0, when=FP8_MATMUL
    )
    fp8_exclude: list[str] = setting([], "Module names that are held in fp8 but not multiplied in it.", when=FP8_MATMUL)


class Adapter(Section):
    """The trainable part."""

    type: Literal["lora", "dora", "lokr", "loha"] = setting(
        "lora", "lora; dora: LoRA with a length for each row of the weight; lokr, loha: LyCORIS' products."
    )
    rank: int = setting(16, "Size of the low-rank update; larger learns more and weighs more.", ge=1, le=1024)
    factor: int = setting(
        8,
        "LoKr: size of the first matrix wherever it divides the layer's; smaller weighs more; 0: the root.",
        when={"adapter.type": ("lokr",)},
        ge=0,
    )
    decompose_both: bool = setting(
        False,
        "LoKr: the first matrix is of low rank as well, where the rank is below half its side.",
        when={"adapter.type": ("lokr",)},
    )
    alpha: float = setting(16.0, "Update strength; the update is scaled by alpha / rank.", gt=0)
    dropout: float = setting(0.0, "Probability of dropping an adapter input while training.", ge=0, lt=1)
    targets: list[str] = setting([], "Module name endings to adapt, such as 'to_q'; empty means the family's choice.")
    dtype: Literal["bf16", "fp32"] = setting("bf16", "Dtype of the adapter weights while training.")
    text_encoder: bool = setting(
        False,
        "Train the CLIP text encoders too, all of them: sd15, sd2, sdxl, sd3, flux, flux_kontext (not T5).",
        when={"family.text_encoder": (True,)},
    )


class Folder(Section):
    """One folder of pictures: a [[dataset.folders]] table."""

    path: str = Field(
        description="Folder with images and .txt (or .caption) files beside them; searched with subfolders."
    )
    repeats: int = setting(1, "How often each image is seen per epoch.", ge=1)
    trigger: str = setting("", "Trigger word of this folder; empty means dataset.trigger.")
    control: str = setting(
        "", "For editing models: folder with a control picture of the same name (or name_1, name_2) for each image."
    )


class Dataset(Section):
    """Pictures, captions, buckets and the cache of encoded examples."""

    folders: list[Folder] = setting([], "The picture folders.")
    resolution: int | Literal["auto"] = setting(
        "auto", "Side of the square with the training area; auto: the family's own."
    )
    buckets: bool = setting(True, "Group images by aspect ratio; false crops everything to a square.")
    bucket_step: int | Literal["auto"] = setting("auto", "Bucket sides are multiples of this many pixels.")
    max_aspect: float = setting(2.0, "Widest aspect ratio of a bucket.", ge=1, le=8, when={"dataset.buckets": (True,)})
    upscale: bool = setting(
        True, "Enlarge images that are smaller than their bucket; false gives them smaller buckets."
    )
    flip: bool = setting(False, "Mirror half of the samples; not for text, logos or asymmetric characters.")
    frames: list[int] = setting(
        [],
        "Lengths that video clips are trained at, in frames, such as [17, 33]; a clip takes the longest that fits.",
        when=CLIPS,
    )
    fps: float | Literal["auto"] = setting(
        "auto",
        "Frames a second that clips are brought to; auto: those that the model draws.",
        when=CLIPS | {"dataset.frames": ()},
    )
    clip: Literal["head", "middle", "chunks"] = setting(
        "head",
        "Which part of a longer clip: its beginning, its middle, or as many pieces as fit.",
        when=CLIPS | {"dataset.frames": ()},
    )
    control_resolution: int | Literal["auto"] = setting(
        "auto",
        "Side of the square with the area of control pictures; auto: as the model's pipeline shows them.",
        when={"family.controls": (True,)},
    )
    background: str = setting("#ffffff", "Colour under transparent images, as #rrggbb.", pattern="^#[0-9a-fA-F]{6}$")
    trigger: str = setting("", "Trigger word, put in front of captions that lack it.")
    missing_caption: Literal["error", "trigger", "skip"] = setting("error", "What an image without a caption means.")
    caption_dropout: float = setting(0.0, "Probability that a sample is shown without its caption.", ge=0, le=1)
    shuffle_tags: bool = setting(False, "Shuffle comma-separated tags, differently each time.")
    keep_tokens: int = setting(
        1, "The first N tags stay in place when shuffling.", ge=0, when={"dataset.shuffle_tags": (True,)}
    )
    tag_separator: str = setting(",", "What separates tags.", min_length=1, when={"dataset.shuffle_tags": (True,)})
    caption_variants: int = setting(
        8, "Shuffled versions of each caption held in the cache.", ge=1, le=64, when={"dataset.shuffle_tags": (True,)}
    )
    cache_dir: str = setting("cache", "Folder of encoded images and captions, shared by all runs.")
    max_pixels: int = setting(64_000_000, "Images with more pixels are refused.", ge=4096)


class Train(Section):
    """The loop."""

    steps: int = setting(1500, "Optimizer steps.", ge=1)
    batch_size: int = setting(1, "Images per micro-batch, over all processes together.", ge=1)
    accumulate: int = setting(1, "Micro-batches per step; their gradients are summed in float32.", ge=1)
    max_grad_norm: float = setting(1.0, "Clip the gradient to this norm; 0 turns clipping off.", ge=0)
    threads: int = setting(
        0, "CPU threads for torch; 0 keeps torch's choice. Bitwise repeats need the same number.", ge=0
    )
    gradient_exchange: Literal["fp32", "fp8"] = setting(
        "fp32", "Between processes; fp8: a quarter of the bytes, and what rounding leaves out is sent with later steps."
    )
    log_every: int = setting(1, "Write a step event every so many steps.", ge=1)


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw8bit", "adamw"] = setting("adamw8bit", "adamw8bit: bitsandbytes; adamw: torch, for comparison.")
    lr: float = setting(1e-4, "Learning rate before lr_scale.", gt=0, lt=1)
    lr_scale: Literal["auto", "none"] | float = setting(
        "auto", "Factor on the rate: auto (1.4 on an FP8 base, else 1), none, or a number."
    )
    text_encoder_lr: Literal["auto"] | float = setting(
        "auto",
        "Rate of adapter.text_encoder; lr_scale leaves it alone. auto: half of lr.",
        when={"adapter.text_encoder": (True,)},
    )
    weight_decay: float = setting(0.01, "Decoupled weight decay.", ge=0)
    beta1: float = setting(0.9, "Decay of the first moment.", ge=0, lt=1)
    beta2: float = setting(0.999, "Decay of the second moment.", ge=0, lt=1)
    eps: float = setting(1e-8, "Added to the denominator.", gt=0)
    rounding: Literal["master", "stochastic", "nearest"] = setting(
        "master",
        "How bf16 adapters keep small updates: float32 masters, stochastic rounding, or not at all (nearest).",
        when={"adapter.dtype": ("bf16",)},
    )


class Schedule(Section):
    """The learning rate over the steps; a pure function of the step."""

    name: Literal["constant", "cosine", "linear"] = setting("constant", "Shape after the warm-up.")
    warmup: int | float = setting(0, "Warm-up: a whole number of steps, or a fraction of all steps below 1.", ge=0)
    min_lr: float = setting(
        0.0,
        "Where cosine and linear end, as a fraction of the rate.",
        ge=0,
        le=1,
        when={"schedule.name": ("cosine", "linear")},
    )


class Objective(Section):
    """What the denoiser is asked to predict, and at which noise levels."""

    min_snr_gamma: float = setting(
        0.0, "Min-SNR loss weighting (Hang et al. 2023) for diffusion models; 0 is off.", ge=0, when=DIFFUSION
    )
    timesteps: Literal["auto", "uniform", "logit_normal"] = setting(
        "auto", "Distribution of the noise level.", when=FLOW
    )
    shift: float | Literal["auto"] = setting(
        "auto", "Flow matching: timestep shift; auto depends on the resolution.", when=FLOW
    )
    t_min: float = setting(
        0.0, "Least noise that is trained, as a share of all noise; 0 is a clean picture.", ge=0, lt=1
    )
    t_max: float = setting(
        1.0, "Most noise that is trained; 1 is noise alone. Wan 2.2's low-noise expert: 0.875.", gt=0, le=1
    )
    guidance: float = setting(
        1.0,
        "Embedded guidance shown to guidance-distilled models while training.",
        ge=0,
        when={"family.guidance": (True,)},
    )


class Memory(Section):
    """What is traded for memory."""

    gradient_checkpointing: bool = setting(
        True, "Recompute activations in the backward pass: less memory, about 40 % slower."
    )
    compile: Literal["off", "blocks"] = setting(
        "off", "blocks: torch.compile for the denoiser's repeated blocks; first steps take minutes."
    )
    cuda_graphs: bool = setting(
        False,
        "Replay compiled blocks as CUDA graphs: less waiting for launches, more memory.",
        when={"memory.compile": ("blocks",)},
    )


class Preview(Section):
    """Images made while training, always from the same seed."""

    prompts: list[str] = setting([], "What to draw; empty makes no previews.")
    controls: list[str] = setting(
        [],
        "For editing models: the control picture of each prompt; a folder stands for all pictures in it.",
        when=DRAWN | {"family.controls": (True,)},
    )
    negative: str = setting("", "Negative prompt.", when=DRAWN | {"family.negative": (True,)})
    every: int = setting(0, "Draw every so many steps; 0 draws only at the start and at the end.", ge=0, when=DRAWN)
    at_start: bool = setting(True, "Draw before the first step, to compare with.", when=DRAWN)
    steps: int = setting(20, "Denoising steps.", ge=1, le=500, when=DRAWN)
    guidance: float | Literal["auto"] = setting("auto", "Guidance scale; auto: the family's usual one.", when=DRAWN)
    width: int = setting(0, "Pixels; 0 means the training resolution.", ge=0, when=DRAWN)
    height: int = setting(0, "Pixels; 0 means the training resolution.", ge=0, when=DRAWN)
    frames: int = setting(1, "Frames of each preview; 1 draws a picture, more a clip.", ge=1, when=DRAWN | CLIPS)
    seed: int = setting(42, "Seed of the first preview; the next ones count up.", ge=0, le=MAX_SEED, when=DRAWN)


class Validation(Section):
    """The loss on pictures that are kept out of training: it turns up when the LoRA begins to learn them by heart."""

    every: int = setting(0, "Measure every so many steps, at the start and at the end; 0 never.", ge=0)
    pictures: int = setting(
        0, "Pictures kept out of training and measured on, drawn from all folders by the seed.", ge=0
    )


class Checkpoint(Section):
    """What is kept to go on training."""

    every: int = setting(250, "Save every so many steps.", ge=1)
    keep: int = setting(
        2, "Newest checkpoints kept; at least 2, because the newest may be the one being written.", ge=2
    )


class Export(Section):
    """The LoRA file."""

    formats: list[Literal["auto", "diffusers", "comfy", "kohya"]] = setting(
        ["auto"],
        "Key layouts to write, a file each: kohya is read by A1111, Forge, ComfyUI and InvokeAI, comfy by ComfyUI; "
        "auto is what most programs read of this architecture.",
    )
    dtype: Literal["bf16", "fp16", "fp32"] = setting("bf16", "Dtype in the file.")
    title: str = setting("", "Display name in the file; empty means the job's name.")
    author: str = setting("", "Author in the file.")
    description: str = setting("", "Description in the file.")
    license: str = setting("", "Licence in the file.")
    metadata: Literal["public", "private", "none"] = setting(
        "public",
        "What the file tells of its training: public is all but paths; private nothing of pictures and settings; none "
        "only what programs need to load it.",
    )
    verify: bool = setting(True, "Load the file into a clean pipeline and compare it with the training model.")


class Job(Section):
    """The whole typed config of one training."""

    name: str = setting("my-lora", "Name of the run folder and of the file.", min_length=1, max_length=120)
    output_dir: str = setting("runs", "Folder that the run folder is made in.")
    seed: int = setting(0, "Seed of the data order, noise and initial weights.", ge=0, le=MAX_SEED)
    preset: list[str] = setting([], "Presets laid under this file: names in presets/, or paths.")
    model: Model
    quantize: Quantize = Quantize()
    adapter: Adapter = Adapter()
    dataset: Dataset = Dataset()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    objective: Objective = Objective()
    memory: Memory = Memory()
    preview: Preview = Preview()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    export: Export = Export()


# ---------------------------------------------------------------------------------------------------------------------
# From text to a Job


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Job:
    """Read a config file, lay it over its presets, apply `--set` overrides, check everything.

    Args:
        path: a TOML file.
        overrides: `section.key=value` texts; the value is TOML (`train.steps=500`), or a bare word taken as a string.

    Raises:
        UserError, UserErrors: with every problem of the file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; `lora-fp8 new {path}` writes one") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; give the TOML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return loads(text, overrides, where=str(path), folder=path.parent)


def loads(text: str, overrides: list[str] | tuple[str, ...] = (), where: str = "config", folder: Path = Path()) -> Job:
    """As `load`, from TOML text; `folder` is where presets given as relative paths are looked for."""
    given = _parse_toml(text, where)
    problems: list[str] = []
    assignments = _parse_overrides(overrides, problems)
    data: dict[str, Any] = {}
    presets = {name: _read_preset(name, folder, problems) for name in _preset_names(given, assignments)}
    for preset in presets.values():
        _merge(data, preset)
    _merge(data, given)
    for keys, value in assignments:
        _assign(data, keys, value, problems)
    job, found = _validate(data)
    problems += [line + _origin(location, given, presets, assignments) for location, line in found]
    if problems:
        raise UserErrors(problems, where)
    assert job is not None
    return job


def layers(text: str, where: str = "config", folder: Path = Path()) -> list[tuple[str, dict[str, Any]]]:
    """What a TOML text is made of, unchecked: (name, tables) of each preset that can be read, last the text's own, "".

    Raises:
        UserError: the text is not TOML. A preset that cannot be read is left out; `loads` tells why.
    """
    given = _parse_toml(text, where)
    unread: list[str] = []
    found = [(name, _read_preset(name, folder, unread)) for name in dict.fromkeys(_preset_names(given, []))]
    return [*found, ("", given)]


def preset_names() -> list[str]:
    """The bundled presets, by name."""
    return sorted(p.stem for p in PRESET_FOLDER.glob("*.toml"))


def dumps(job: Job) -> str:
    """The resolved job as TOML that `loads` turns into the same job; presets are already merged and no longer named."""
    data = job.model_dump()
    data["preset"] = []
    return tomlkit.dumps(data)


def commented(job: Job) -> str:
    """The job as a TOML file for people: every setting with its description and what it accepts, grouped by section."""
    lines: list[str] = []

    def section(model: Section, title: str, double: bool = False) -> None:
        doc = (type(model).__doc__ or "").strip().splitlines()[0]
        if title:
            lines.extend(["", f"[[{title}]]" if double else f"[{title}]", f"# {doc}"])
        inner: list[tuple[str, Any]] = []
        for name, field in type(model).model_fields.items():
            value = getattr(model, name)
            if isinstance(value, Section) or (name == "folders" and isinstance(value, list)):
                inner.append((name, value))
                continue
            choices = accepted(field)
            lines.append(
                f"{name} = {tomlkit.item(value).as_string()}  # {field.description}{choices and f' ({choices})'}"
            )
        for name, value in inner:
            for item in value if isinstance(value, list) else [value]:
                section(item, f"{title}.{name}" if title else name, isinstance(value, list))

    section(job, "")
    return "\n".join(lines).strip() + "\n"


def accepted(field: Any) -> str:
    """What a setting accepts, in words, when that is a list of choices or bounds; empty otherwise."""
    choices = _choices(field.annotation)
    bounds = []
    for item in field.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if hasattr(item, attribute):
                bounds.append(f"{sign} {getattr(item, attribute)}")
    if choices and not _number_allowed(field.annotation):
        return " | ".join(choices)
    return ", ".join(([" | ".join(choices) + " | a number"] if choices else []) + bounds)


# ---------------------------------------------------------------------------------------------------------------------
# The steps of loading


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    # A number of 5,000 digits is a plain ValueError of int(), brackets nested a thousand deep a RecursionError.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid TOML: {error}") from None


def _parse_overrides(overrides: list[str] | tuple[str, ...], problems: list[str]) -> list[tuple[list[str], Any]]:
    assignments = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(f"--set {text}: expected key=value, such as --set train.steps=500")
            continue
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            parsed = value.strip()  # a bare word: --set model.family=flux
        assignments.append((key.strip().split("."), parsed))
    return assignments


def _preset_names(given: dict[str, Any], assignments: list[tuple[list[str], Any]]) -> list[str]:
    names = given.get("preset", [])
    for keys, value in assignments:
        if keys == ["preset"]:
            names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return []  # its type is reported by the validation
    return [name for name in names if isinstance(name, str)]


def _read_preset(name: str, folder: Path, problems: list[str]) -> dict[str, Any]:
    path = folder / name if name.endswith(".toml") else PRESET_FOLDER / f"{name}.toml"
    try:
        found = path.is_file()
    except OSError:  # a name too long for the file system
        found = False
    if not found:
        hint = _did_you_mean(name, preset_names())
        problems.append(
            f"preset: no preset {_shown(name)}{hint}; accepted: {', '.join(preset_names())}, "
            "or the path of a .toml file"
        )
        return {}
    try:
        data = _parse_toml(path.read_text(encoding="utf-8-sig"), f"preset {name}")
    except (UserError, OSError, UnicodeDecodeError) as error:
        problems.append(str(error))
        return {}
    if "preset" in data:
        problems.append(f"preset {name}: a preset cannot name presets; name them in the config")
        data.pop("preset")
    return data


def _merge(under: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay `over` on `under` in place; tables are merged key by key, everything else is replaced."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _merge(under[key], value)
        else:
            under[key] = copy.deepcopy(value)  # what is merged later must not reach into the preset that this came from


def _assign(data: dict[str, Any], keys: list[str], value: Any, problems: list[str]) -> None:
    node: Any = data
    for i, key in enumerate(keys[:-1]):
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                problems.append(f"--set {'.'.join(keys)}: {'.'.join(keys[:i])} has {len(node)} entries, counted from 0")
                return
            node = node[int(key)]
        else:
            node = node.setdefault(key, {})
        if not isinstance(node, (dict, list)):
            problems.append(f"--set {'.'.join(keys)}: {'.'.join(keys[: i + 1])} is a value, not a table")
            return
    if isinstance(node, list):
        problems.append(f"--set {'.'.join(keys)}: give the entry's setting too, such as dataset.folders.0.repeats=2")
        return
    if keys == ["preset"] and isinstance(value, str):
        value = [value]
    if not keys[-1]:
        problems.append(f"--set {'.'.join(keys)}: the key is incomplete")
        return
    node[keys[-1]] = value


def _validate(data: dict[str, Any]) -> tuple[Job | None, list[tuple[Location, str]]]:
    """Check types, bounds and contradictions; returns the job (None if anything is wrong) and (place, line) of each."""
    problems: list[tuple[Location, str]] = []
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        # Each arm of a union complains; the last is the widest (int | float, a choice | a number) and says most.
        lines: dict[Location, str] = {}
        for item in error.errors(include_url=False):
            location = _real_location(item["loc"], data)
            lines[location] = _say(item, location)
        wrong = list(lines)
        problems += lines.items()
        # Contradictions are looked for in what remains, so that they are reported in the same go. A rule that reads a
        # setting which is wrong already would only repeat it, or judge by its default.
        names = [".".join(map(str, location)) for location in wrong]
        for keys, line in _contradictions(Job.model_validate(_repaired(data, wrong))):
            if not any(f"{key}.".startswith(f"{n}.") or n.startswith(f"{key}.") for key in keys for n in names):
                problems.append((tuple(keys[0].split(".")), line))
        return None, problems
    problems += [(tuple(keys[0].split(".")), line) for keys, line in _contradictions(job)]
    return (None if problems else job), problems


def _origin(
    location: Location, given: dict[str, Any], presets: dict[str, dict[str, Any]], assignments: list[Any]
) -> str:
    """Where a wrong setting was written, when that is not the file itself."""

    def holds(node: Any, parts: Location) -> bool:
        for part in parts:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and str(part).isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                return False
        return bool(parts)

    key = ".".join(map(str, location))
    if any(f"{key}.".startswith(f"{'.'.join(keys)}.") for keys, _ in assignments):
        return " (from --set)"
    if holds(given, location):
        return ""
    return next((f" (from preset {name})" for name in reversed(presets) if holds(presets[name], location)), "")


def _contradictions(job: Job) -> list[tuple[tuple[str, ...], str]]:
    """What is wrong although each setting by itself is fine: (the settings that were looked at, line)."""
    found: list[tuple[tuple[str, ...], str]] = []

    def say(key: str, text: str, *looked_at: str) -> None:
        found.append(((key, *looked_at), f"{key}: {text}"))

    from .families import available  # imports no torch

    families = available()
    if job.model.family not in families:
        hint = _did_you_mean(job.model.family, families)
        say("model.family", f"unknown family {_shown(job.model.family)}{hint}; accepted: {' | '.join(families)}")
    for key, text in _quantize_contradictions(job.quantize, job.model.dtype):
        say(key, text, "quantize.storage", "quantize.compute", "quantize.backend", "model.dtype")
    for key, text in _memory_contradictions(job.memory, job.quantize):
        say(key, text, "memory", "quantize.compute", "quantize.recipe", "quantize.backend")
    if not job.model.path:
        say("model.path", "is empty; give a Hugging Face id, a diffusers folder, a .safetensors file or 'demo'")
    if not job.dataset.folders:
        say("dataset.folders", "no picture folder given; add a [[dataset.folders]] table with a path")
    for i, folder in enumerate(job.dataset.folders):
        if not folder.path:
            say(f"dataset.folders.{i}.path", "is empty")
    if isinstance(job.dataset.resolution, int) and not 16 <= job.dataset.resolution <= 8192:
        say("dataset.resolution", f"must lie between 16 and 8192 pixels, got {job.dataset.resolution}")
    if isinstance(job.dataset.bucket_step, int) and not 8 <= job.dataset.bucket_step <= 512:
        say("dataset.bucket_step", f"must lie between 8 and 512 pixels, got {job.dataset.bucket_step}")
    if isinstance(job.dataset.control_resolution, int) and not 32 <= job.dataset.control_resolution <= 8192:
        say("dataset.control_resolution", f"must lie between 32 and 8192 pixels, got {job.dataset.control_resolution}")
    if job.model.family in families:
        for key, text in _control_contradictions(job):
            say(key, text, "model.family", "dataset.folders", "preview.prompts", "preview.controls")
        for key, text in _clip_contradictions(job):
            say(key, text, "model.family")
    if job.dataset.missing_caption == "trigger" and not job.dataset.trigger:
        without = [str(i) for i, folder in enumerate(job.dataset.folders) if not folder.trigger]
        if without:
            say(
                "dataset.missing_caption",
                "'trigger' needs dataset.trigger or a trigger in every folder",
                "dataset.trigger",
                "dataset.folders",
            )
    if isinstance(job.optimizer.lr_scale, float) and not 0 < job.optimizer.lr_scale <= 100:
        say("optimizer.lr_scale", f"must be above 0 and at most 100, got {job.optimizer.lr_scale:g}")
    if isinstance(job.optimizer.text_encoder_lr, float) and not 0 < job.optimizer.text_encoder_lr < 1:
        say(
            "optimizer.text_encoder_lr",
            f"must be above 0 and below 1, got {job.optimizer.text_encoder_lr:g}; adapter.text_encoder = false leaves "
            "the text encoders as they are",
        )
    if isinstance(job.schedule.warmup, int) and job.schedule.warmup >= job.train.steps and job.schedule.warmup:
        say(
            "schedule.warmup",
            f"{job.schedule.warmup} steps, but train.steps is {job.train.steps}; use fewer, or a fraction",
            "train.steps",
        )
    if isinstance(job.schedule.warmup, float) and job.schedule.warmup >= 1:
        say(
            "schedule.warmup",
            f"a fraction must be below 1, got {job.schedule.warmup:g}; whole steps are written without a point",
        )
    if isinstance(job.objective.shift, float) and job.objective.shift <= 0:
        say("objective.shift", f"must be above 0, got {job.objective.shift:g}")
    if job.objective.t_min >= job.objective.t_max:
        say(
            "objective.t_min",
            f"{job.objective.t_min:g} leaves nothing below objective.t_max = {job.objective.t_max:g}; it must be less",
            "objective.t_max",
        )
    if isinstance(job.preview.guidance, float) and job.preview.guidance < 0:
        say("preview.guidance", f"must be at least 0, got {job.preview.guidance:g}")
    for key in ("width", "height"):
        if getattr(job.preview, key) % 16:
            say(f"preview.{key}", f"must be a multiple of 16 pixels, got {getattr(job.preview, key)}")
    if job.validation.every and not job.validation.pictures:
        say("validation.pictures", "is 0, so that validation.every has nothing to measure on; keep out 2, or a tenth")
    if job.validation.pictures and not job.validation.every:
        say("validation.every", "is 0, so that validation.pictures would be kept out for nothing; say how often")
    if not job.export.formats:
        say("export.formats", "is empty; accepted: auto | diffusers | comfy | kohya")
    if "auto" in job.export.formats and len(job.export.formats) > 1:
        say("export.formats", "auto chooses the layouts and cannot stand beside others")
    if len(set(job.export.formats)) != len(job.export.formats):
        say("export.formats", "names a format twice")
    if len(set(job.preset)) != len(job.preset):
        say("preset", "names a preset twice")
    paths = {"output_dir": job.output_dir, "model.path": job.model.path, "model.components": job.model.components}
    paths |= {"dataset.cache_dir": job.dataset.cache_dir}
    paths |= {f"dataset.folders.{i}.path": folder.path for i, folder in enumerate(job.dataset.folders)}
    paths |= {f"dataset.folders.{i}.control": folder.control for i, folder in enumerate(job.dataset.folders)}
    paths |= {f"preview.controls.{i}": path for i, path in enumerate(job.preview.controls)}
    for key, path in paths.items():
        if "\0" in path:
            say(key, f"{_shown(path)} cannot be a path")
    if any(c in "/\\" or not c.isprintable() for c in job.name) or job.name.strip() in ("", ".", ".."):
        say("name", f"{_shown(job.name)} cannot name a folder; use letters, digits, '-' and '_'")
    return found


def _control_contradictions(job: Job) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) where the family takes no control pictures, or cannot do without."""
    from .families import available, facts

    fewest, most = (known := facts(job.model.family)).get("controls", (0, 0))
    title, prompts, controls = known["title"], len(job.preview.prompts), len(job.preview.controls)
    for i, folder in enumerate(job.dataset.folders):
        key = f"dataset.folders.{i}.control"
        if folder.control and not most:
            editing = " | ".join(name for name in available() if "controls" in facts(name))
            yield key, f"{title} is shown no control pictures; leave it out, or use an editing model: {editing}"
        elif not folder.control and fewest:
            yield key, f"{title} edits pictures, and needs a control picture for each; name the folder that has them"
    if controls and not most:
        yield "preview.controls", f"{title} is shown no control pictures; leave it out"
    elif prompts and fewest and not controls or controls and controls != prompts:
        yield "preview.controls", f"has {controls} entries for {prompts} in preview.prompts; give one for each prompt"


def _clip_contradictions(job: Job) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) where the family takes no clips, or none of these lengths."""
    from .families import available, facts

    known = facts(job.model.family)
    title, (step, _) = known["title"], known.get("clips", (0, 0))
    lengths = {"dataset.frames": job.dataset.frames, "preview.frames": [job.preview.frames]}
    if not step:
        takers = " | ".join(name for name in available() if "clips" in facts(name))
        for key, given in lengths.items():
            if given != ([] if key == "dataset.frames" else [1]):
                yield key, f"{title} draws pictures; leave it out, or use a family that draws clips: {takers}"
        return
    for key, given in lengths.items():
        for one in given:
            if one < 1 or (one - 1) % step:
                near = max(1, round((one - 1) / step) * step + 1)
                yield key, f"{title} takes clips of 1, {step + 1}, {2 * step + 1} ... frames; got {one}, near is {near}"
    if len(set(job.dataset.frames)) != len(job.dataset.frames):
        yield "dataset.frames", "names a length twice"
    if isinstance(job.dataset.fps, float) and not 1 <= job.dataset.fps <= 120:
        yield "dataset.fps", f"must lie between 1 and 120 frames a second, got {job.dataset.fps:g}"


def parse_override(entry: str) -> tuple[str, str, str] | None:
    """A line of quantize.override as (layer name, storage, scale); scale "" is the storage's own. None: it is none."""
    match = re.fullmatch(r"\s*(\S+)\s*=\s*(\S+)(?:\s+(\S+))?\s*", entry)
    name, storage, scale = match.groups(default="") if match else ("", "", "")
    known = storage == "bf16" and not scale or storage in SCALES and scale in ("", *SCALES[storage])
    return (name, storage, scale) if known else None


def _quantize_contradictions(section: Quantize, dtype: str) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) of a [quantize] table whose settings exclude each other."""
    storage, scale, compute, recipe = section.storage, section.scale, section.compute, section.recipe
    if storage == "bf16" and dtype != "bf16":
        yield "quantize.storage", f"'bf16' contradicts model.dtype = {dtype!r}; use 'none' to hold it in model.dtype"
    for entry in section.override:
        if parse_override(entry) is None:
            kinds = ", ".join(f"{kind} {'|'.join(scales)}" for kind, scales in SCALES.items())
            yield "quantize.override", f"{_shown(entry)} is not 'NAME = STORAGE [SCALE]'; storages: bf16, {kinds}"
    if scale != "auto" and storage in SCALES and scale not in SCALES[storage]:
        accepted_here = " | ".join(("auto", *(one for one in SCALES[storage] if storage != "nf4")))
        yield "quantize.scale", f"{scale!r} is not known with quantize.storage = {storage!r}; accepted: {accepted_here}"
    yield from _backend_contradictions(section)
    if section.backend != "own":
        return
    if recipe == "mxfp8":
        yield "quantize.recipe", "'mxfp8' needs quantize.backend = 'te'; or use 'current', 'delayed' or 'block'"
    if compute in ("fp8", "fp8_forward"):
        if storage in ("int8", "nf4"):
            yield "quantize.compute", f"{compute!r} needs quantize.storage = 'fp8', not {storage!r}; or use 'upcast'"
        fitting = ("128x128",) if recipe == "block" else ("row", "tensor")
        if storage == "fp8" and scale not in ("auto", *fitting):
            yield (
                "quantize.scale",
                f"{scale!r} has no FP8 matmul with quantize.recipe = {recipe!r}; "
                f"use {' or '.join(map(repr, fitting))}, or quantize.compute = 'upcast'",
            )
    if section.kernels == "triton" and recipe != "current" and compute != "upcast":
        yield "quantize.kernels", f"'triton' has no recipe {recipe!r}; use quantize.recipe = 'current', or 'torch'"
    if recipe == "block" and compute != "upcast" and scale == "auto":
        yield "quantize.scale", "quantize.recipe = 'block' multiplies weights with scale = '128x128'; set it"


def _backend_contradictions(section: Quantize) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) where another library's layers cannot do what the section asks for."""
    backend, own = section.backend, "or quantize.backend = 'own'"
    if backend == "own" or section.storage not in SCALES:
        return
    if section.sensitivity != "off":
        yield (
            "quantize.sensitivity",
            f"{section.sensitivity!r} needs quantize.backend = 'own'; use 'off', and put what `lora-fp8 precision` "
            "says into quantize.override",
        )
    if section.kernels == "triton":
        yield "quantize.kernels", f"'triton' is for this project's own layers; use 'torch', {own}"
    if backend == "te":
        if section.storage != "fp8":
            yield "quantize.storage", f"TransformerEngine holds FP8 only, not {section.storage!r}; use 'fp8', {own}"
        if section.compute != "fp8":
            yield "quantize.compute", f"TransformerEngine multiplies in FP8, not {section.compute!r}; use 'fp8', {own}"
        if section.scale != "auto":
            yield "quantize.scale", f"quantize.recipe decides TransformerEngine's scales; use 'auto', {own}"
        if not section.fast_accum:
            yield "quantize.fast_accum", f"TransformerEngine decides how it adds up; leave it at true, {own}"
        return
    if section.compute != "upcast":
        yield (
            "quantize.compute",
            f"torchao's weight-only tensors are decoded, which {section.compute!r} is not; use 'upcast', {own}",
        )
    if section.recipe != "current":
        yield "quantize.recipe", f"torchao's weight-only tensors have no FP8 matmul; leave it at 'current', {own}"
    asked = [("quantize.storage", section.storage, section.scale), ("quantize.modulation", section.modulation, "")]
    asked += [("quantize.override", storage, scale) for _, storage, scale in map(_parsed, section.override)]
    for key, storage, scale in asked:
        if storage == "nf4":
            yield key, f"torchao has no weight-only 'nf4'; use 'fp8' or 'int8', {own}"
        elif storage == "fp8" and scale in TORCHAO_LACKS:
            accepted_here = " | ".join(one for one in SCALES["fp8"] if one not in TORCHAO_LACKS)
            key = "quantize.scale" if key == "quantize.storage" else key
            yield key, f"torchao has no fp8 with scale {scale!r}; accepted: {accepted_here}; {own}"


def _parsed(entry: str) -> tuple[str, str, str]:
    return parse_override(entry) or ("", "", "")


def _memory_contradictions(section: Memory, quantize: Quantize) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) of a [memory] table whose settings exclude each other or what [quantize] asks for."""
    if quantize.backend == "te":
        if section.compile == "blocks":
            # A block is compiled as one graph, and TransformerEngine's layers are left out of graphs.
            yield "memory.compile", "'blocks' excludes quantize.backend = 'te'; use 'off', or quantize.backend = 'own'"
        if section.gradient_checkpointing and quantize.recipe == "delayed":
            # The history moves on when the forward ends: the recomputation would multiply with other scales.
            yield (
                "memory.gradient_checkpointing",
                "true excludes quantize.recipe = 'delayed' of quantize.backend = 'te'; use false, or another recipe",
            )
    elif section.compile == "blocks" and quantize.recipe == "delayed" and quantize.compute != "upcast":
        # Its history is written while the gradient is computed, which a compiled backward may reorder or leave out.
        yield (
            "memory.compile",
            "'blocks' excludes quantize.recipe = 'delayed'; use quantize.recipe = 'current', or memory.compile = 'off'",
        )
    if section.cuda_graphs and section.compile == "off":
        yield "memory.cuda_graphs", "true records compiled blocks, and memory.compile is 'off'; use 'blocks'"
    if section.cuda_graphs and section.gradient_checkpointing:
        # The backward would replay the forward's recording while what it gave the first time is still needed.
        yield "memory.cuda_graphs", "true needs memory.gradient_checkpointing = false"


# ---------------------------------------------------------------------------------------------------------------------
# pydantic's errors in words for people; the only place that knows their codes


def _shown(value: Any) -> str:
    """What was given, on one line of bearable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"


def _dotted(location: Location) -> str:
    # A key in quotes may hold anything, line breaks too.
    parts = [p if str(p).isprintable() and len(str(p)) <= 80 else _shown(p) for p in location]
    return ".".join(map(str, parts))


def _say(item: dict[str, Any], location: Location) -> str:
    key = _dotted(location)
    kind, context = item["type"], item.get("ctx", {})
    given = _shown(item.get("input"))
    field = _field(location)
    choices = _choices(field.annotation) if field is not None else []
    if kind == "extra_forbidden":
        return f"{key}: unknown setting{_suggest(location)}"
    if kind == "missing":
        model = _model_at(location)
        what = (model.__doc__ if model is not None else field.description if field is not None else "") or ""
        return f"{key}: required. {what}".strip()
    if choices and kind != "list_type":
        hint = _did_you_mean(item["input"], choices) if isinstance(item["input"], str) else ""
        more = " | a number" if field is not None and _number_allowed(field.annotation) else ""
        return f"{key}: expected {' | '.join(choices)}{more}, got {given}{hint}"
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        words = {
            "greater_than_equal": "at least",
            "greater_than": "more than",
            "less_than_equal": "at most",
            "less_than": "less than",
        }
        limit = context.get("ge", context.get("gt", context.get("le", context.get("lt"))))
        limit = f"{limit:g}" if isinstance(limit, float) else limit  # pydantic makes 1.0 of 1
        return f"{key}: must be {words[kind]} {limit}, got {given}"
    if kind == "string_pattern_mismatch":
        return f"{key}: expected a colour such as #ffffff, got {given}"
    if kind in ("string_too_short", "string_too_long"):
        limit = f"at least {context['min_length']}" if "min_length" in context else f"at most {context['max_length']}"
        return f"{key}: must be {limit} characters long, got {given}"
    expected = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text in quotes",
        "list_type": "a list in [ ]",
        "dict_type": "a table",
        "model_type": "a table",
        "model_attributes_type": "a table",
    }.get(kind)
    if expected is None:
        return f"{key}: {item['msg']}, got {given}"
    return f"{key}: expected {expected}, got {given}"


def _real_location(location: Location, data: dict[str, Any]) -> Location:
    """pydantic appends the arm of a union (`float`, `literal[...]`) to the path; keep only what is in the file."""
    node: Any = data
    real: list[Any] = []
    for part in location:
        inside_model = _model_at(tuple(real)) is not None
        if isinstance(node, dict) and (part in node or inside_model):
            real.append(part)
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            real.append(part)
            node = node[part] if part < len(node) else None
        else:
            break
    return tuple(real)


def _model_at(location: Location) -> type[Section] | None:
    model: Any = Job
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, Section) else None
        if field is None:
            return None
        inner = [
            a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type) and issubclass(a, Section)
        ]
        model = inner[0] if inner else None
        if model is None:
            return None
    return model


def _field(location: Location) -> Any:
    named = [part for part in location if not isinstance(part, int)]
    if not named:
        return None
    model = _model_at(tuple(named[:-1]))
    return model.model_fields.get(named[-1]) if model is not None else None


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    return [c for a in get_args(annotation) for c in _choices(a)]


def _number_allowed(annotation: Any) -> bool:
    return any(a in (int, float) for a in get_args(annotation))


def _suggest(location: Location) -> str:
    """The table that has a setting of exactly this name, or the nearest setting in this table or in any."""
    model, name = _model_at(location[:-1]), str(location[-1])
    names = list(model.model_fields) if model is not None else []
    prefix = _dotted(location[:-1])
    homes = [s for s in Job.model_fields if (m := _model_at((s,))) is not None and name in m.model_fields]
    if homes:
        return f", did you mean {homes[0]}.{name}?"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f", did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    everywhere = {f"{s}.{n}": n for s in Job.model_fields if (m := _model_at((s,))) is not None for n in m.model_fields}
    near = difflib.get_close_matches(name, list(everywhere.values()), n=1, cutoff=0.75)
    if near:
        return f", did you mean {next(k for k, v in everywhere.items() if v == near[0])}?"
    return f"; accepted here: {', '.join(names)}" if names else ""


def _did_you_mean(given: str, names: list[str]) -> str:
    near = difflib.get_close_matches(str(given)[:80].lower(), names, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def _repaired(data: dict[str, Any], wrong: list[Location]) -> dict[str, Any]:
    """A deep copy without the entries at these places, and with empty text where something required is then missing."""

    def copied(node: Any, here: Location) -> Any:
        if isinstance(node, dict):
            table = {k: copied(v, (*here, k)) for k, v in node.items() if (*here, k) not in wrong}
            model = _model_at(here)
            for name, field in model.model_fields.items() if model is not None else ():
                if field.is_required() and name not in table:
                    table[name] = copied({}, (*here, name)) if _model_at((*here, name)) is not None else ""
            return table
        if isinstance(node, list):
            # A table that is none is emptied, not left out: the numbers of those after it must not change.
            keep = _model_at(here) is not None
            entries = [((*here, i), v) for i, v in enumerate(node) if keep or (*here, i) not in wrong]
            return [copied({} if place in wrong else v, place) for place, v in entries]
        return node

    return copied(data, ())
