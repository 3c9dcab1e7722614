"""Every setting of a job, declared once.

One TOML table = one section = one frozen pydantic model below. A setting is one declaration: name, type with bounds,
default, help, when it has an effect, and its names in other trainers. The check, the commented file of `lora-fp8 new`,
the web form, the warnings about unused settings and docs/settings.md are made from it.

Which settings exclude each other is in config/relations.py; config/loading.py turns TOML into a `Job`.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import Message

SCALES = {
    "fp8": ("row", "tensor", "1x64", "1x128", "128x128", "none"),
    "int8": ("1x128", "1x64", "row"),
    "nf4": ("64",),
}
"""The scales that each quantized storage knows, the one that "auto" tries first in front."""
TORCHAO_LACKS = ("none", "128x128")
"""Scales of fp8 that torchao's weight-only tensors have no granularity for."""
STORAGES = (
    "bf16",
    *(name for kind, scales in SCALES.items() for name in (kind, *(f"{kind} {scale}" for scale in scales))),
)
Storage = Literal[STORAGES]  # type: ignore[valid-type]  # pydantic reads the tuple
"""A storage, with a scale if it is not the storage's own."""
OPTIMIZERS = (
    "adamw8bit",
    "adamw",
    "lion8bit",
    "prodigy",
    "adafactor",
    "adamw_schedulefree",
    "came",
    "muon",
    "ademamix8bit",
)
CLASS = "package.Class"
"""What stands for any class in a `when` of optimizer.name."""
MOST_RANK = 1024
MOST_LR = 10.0  # the factor of prodigy; the rate of any other optimizer is below 1
MAX_SEED = 2**32 - 1  # what every tool that shows or takes a seed can hold


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no guessing between types ("8" is not 8), no nan and no inf."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Except(tuple[Any, ...]):
    """The values of a `when` that the other setting must not have."""


def setting(
    default: Any,
    description: str,
    *,
    when: dict[str, tuple[Any, ...]] | None = None,
    also: str = "",
    names: str = "",
    place: str = "",
    **bounds: Any,
) -> Any:
    """Declare a setting: its default (... if it must be given), its help, and its bounds (pydantic's ge, gt, le, lt).

    Args:
        when: what the setting needs to have an effect: other settings, each with the values that they must have.
            No values mean any but empty ones, `Except` all but these, and of "one | other" either will do.
            "dataset.folders.NAME" is what the folders that have it say. The other keys are facts: "family.NAME" is
            one of `families.get_traits`, the rest are in `FACTS`. A form leaves the setting out where it has no effect,
            and every command warns of one that is set there (`config.find_unused_settings`).
        also: its names in other trainers that differ from ours, such as "kohya: network_dim; ai-toolkit: linear".
            What stands behind a name converts its value to ours. "kohya" is sd-scripts and what shares its names:
            kohya_ss, lora-scripts, musubi-tuner.
        names: what the names in a table are; "" are layers.
        place: what of this machine it names, if it does: "file", "folder", "file or folder"; see `paths`. A setting
            that may also be a word or a Hugging Face id names one where it is neither.
    """
    elsewhere = dict(pair.split(": ") for pair in also.split("; ")) if also else {}
    extra: dict[str, Any] = {"when": when or {}, "also": elsewhere, "place": place}
    extra |= {"names": names} if names else {}
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


FACTS = {
    "base.single_file": Message("model.path is a whole model, not a single file"),
    "base.on_hub": Message("model.path is a local path"),
    "base.guidance": Message("this model has no guidance embedding"),
    "layers.fp8": Message("no layer can use an FP8 matmul"),
    "layers.modulation": Message("this model has no modulation layers"),
    "layers.convolutions": Message("this model has no convolutions"),
    "masks.matter": Message("objective.unmasked_weight = 1 gives the area outside the masks its full weight"),
    "run.several_processes": Message("the job runs in one process"),
}
"""What a `when` may need beside settings and the family's traits, each with the reason where it does not hold.

A fact is true or false once the base's headers, its layers or the processes are known, and counts as true before.
`masks.matter` follows from several settings."""
QUANTIZED: dict[str, tuple[Any, ...]] = {"quantize.storage": ("fp8", "int8", "nf4")}
FP8_MATMUL: dict[str, tuple[Any, ...]] = {
    "quantize.storage": ("fp8",),
    "quantize.compute": ("fp8", "fp8_forward", "auto"),
}
FP8_LAYERS: dict[str, tuple[Any, ...]] = FP8_MATMUL | {"layers.fp8": (True,)}
DRAWN: dict[str, tuple[Any, ...]] = {"preview.prompts": ()}
CLIPS: dict[str, tuple[Any, ...]] = {"family.clips": (True,)}
DIFFUSION: dict[str, tuple[Any, ...]] = {"family.objective": ("Diffusion",)}
FLOW: dict[str, tuple[Any, ...]] = {"family.objective": ("FlowMatching",)}
BY_RATE: dict[str, tuple[Any, ...]] = {"optimizer.name": Except(("prodigy",))}
PRODIGY: dict[str, tuple[Any, ...]] = {"optimizer.name": ("prodigy",)}
FALLING = ("cosine", "cosine_with_restarts", "linear", "polynomial", "wsd", "rex")
"""Schedules that end at `schedule.min_lr`."""
HUBER: dict[str, tuple[Any, ...]] = {"objective.loss": ("huber", "smooth_l1", "pseudo_huber", "pseudo_smooth_l1")}
TAGGED: dict[str, tuple[Any, ...]] = {"dataset.shuffle_tags | dataset.tag_dropout": ()}
VARIED: dict[str, tuple[Any, ...]] = {
    "dataset.shuffle_tags | dataset.tag_dropout | dataset.wildcards | dataset.caption_lines": Except(
        (False, 0.0, "join", "first")
    )
}
CHANGED_IMAGES: dict[str, tuple[Any, ...]] = {
    "dataset.random_crop | dataset.zoom | dataset.rotate | dataset.color_jitter": Except((False, 0.0))
}
WITH_METADATA: dict[str, tuple[Any, ...]] = {"export.metadata": ("public", "private")}
MASKED: dict[str, tuple[Any, ...]] = {"dataset.folders.mask": ()}


def is_class(name: str) -> bool:
    """Return True if `optimizer.name` is a class of some package and none of `OPTIMIZERS`."""
    return "." in name


class Model(Section):
    """The frozen base model."""

    family: str = setting(..., "Model architecture, such as sd15, sdxl, flux or qwen_image. The README lists them all.")
    path: str = setting(
        ...,
        "Base model: Hugging Face id (owner/name), diffusers folder, .safetensors file, or 'demo' (bundled).",
        also="kohya: pretrained_model_name_or_path, dit; ai-toolkit: name_or_path; OneTrainer: base_model_name; "
        "diffusion-pipe: diffusers_path, transformer_path",
        place="file or folder",
    )
    components: str = setting(
        "auto",
        "Source of what a single-file base model lacks. auto: files in ComfyUI's folders around it, and the released "
        "model's configs and tokenizers (a few MB). Or a diffusers folder, Hugging Face id or modelscope:owner/name.",
        when={"base.single_file": (True,)},
        place="folder",
    )
    files: dict[str, str] = setting(
        {},
        "Files of single parts, such as {text_encoder_2 = 't5xxl_fp8_scaled.safetensors', vae = 'ae.safetensors'}. "
        "They replace those of the base model.",
        also="kohya: vae, clip_l, clip_g, t5xxl, text_encoder",
        place="folder",
    )
    revision: str = setting(
        "", "Branch, tag or commit on Hugging Face; empty: the default branch.", when={"base.on_hub": (True,)}
    )
    dtype: Literal["bf16", "fp32"] = setting(
        "bf16",
        "Compute dtype. Parts that are not quantized are also stored in it.",
        also="kohya: mixed_precision; OneTrainer: train_dtype",
    )
    training_adapter: str = setting(
        "",
        "For distilled base models: a LoRA file that acts beneath the one being trained, in training only. Previews "
        "and LoRA files are without it, so that the base keeps drawing in few steps.",
        also="ai-toolkit: assistant_lora_path",
        place="file",
    )
    text_storage: Literal["none", "fp8", "int8", "nf4"] = setting(
        "none",
        "Storage format of the text encoders while captions are encoded. fp8 needs half the memory of bf16, nf4 a "
        "third.",
        also="kohya: fp8_t5, fp8_llm; ai-toolkit: quantize_te; SimpleTuner: text_encoder_1_precision",
    )
    caption_tokens: int = setting(
        75,
        "Maximum caption length in tokens: 75, 150 or 225. CLIP reads 75; longer captions are encoded in chunks of 75, "
        "which are concatenated.",
        ge=75,
        le=225,
        multiple_of=75,
        when={"family.long_captions": (True,)},
        also="kohya: max_token_length",
    )
    prompt_weights: bool = setting(
        False,
        "Read weights in captions and prompts, in the notation of A1111: (word:1.2), (word), [word]. A backslash "
        "before a bracket makes it text.",
        when={"family.long_captions": (True,)},
        also="kohya: weighted_captions",
    )
    clip_skip: int = setting(
        1,
        "Hidden layer of CLIP that is used, counted from the end: 1 is the last layer, 2 the one before it, as most "
        "anime models need. SDXL always uses the latter.",
        ge=1,
        le=12,
        when={"family.clip_skip": (True,)},
        also="kohya: clip_skip; OneTrainer: text_encoder_layer_skip",
    )


class Quantize(Section):
    """Storage and matmul precision of the frozen base model."""

    storage: Literal["fp8", "int8", "nf4", "bf16", "none"] = setting(
        "fp8",
        "Storage format of the frozen weights: fp8 (e4m3), int8, nf4 (4 bits, as in QLoRA), bf16 (not quantized), "
        "or none (not quantized, stored in model.dtype).",
        also="kohya: fp8_base; ai-toolkit: quantize; OneTrainer: weight_dtype; SimpleTuner: base_model_precision; "
        "diffusion-pipe: transformer_dtype",
    )
    backend: Literal["own", "torchao", "te"] = setting(
        "own",
        "Implementation of the quantized layers: own (this program), torchao (weight-only), or te "
        "(TransformerEngine FP8, CUDA only).",
        when=QUANTIZED,
    )
    scale: Literal["auto", "row", "tensor", "1x64", "1x128", "128x128", "none"] = setting(
        "auto",
        "Group of weights that share one scale. auto: row for fp8 (an fp8 base model keeps its own), 1x128 for "
        "int8. none: no scales, like kohya's fp8_base.",
        when={"quantize.storage": ("fp8", "int8")},
        also="kohya: fp8_scaled",
    )
    modulation: Literal["auto", "fp8", "int8", "nf4", "bf16"] = setting(
        "auto",
        "Storage format of the modulation layers, which process one row per image. auto: int8, which has the "
        "smallest error.",
        when=QUANTIZED | {"layers.modulation": (True,)},
    )
    convolutions: Literal["auto", "fp8", "int8", "nf4", "bf16"] = setting(
        "auto",
        "Storage format of the convolutions, which are always dequantized to be computed. auto: int8, which has the "
        "smallest error.",
        when=QUANTIZED | {"layers.convolutions": (True,)},
    )
    keep: list[str] = setting(
        [],
        "Names of modules that stay unquantized (in model.dtype), in addition to the architecture's own precise parts.",
        when=QUANTIZED,
    )
    override: dict[str, Storage] = setting(
        {}, "Storage format of single layers, such as {'ff.net.2' = 'int8 1x128', 'to_q' = 'bf16'}.", when=QUANTIZED
    )
    sensitivity: Literal["off", "auto"] = setting(
        "off",
        "Error measurement before training. auto: measure each layer on your images, and store layers above "
        "sensitivity_bound in int8 or bf16.",
        when=QUANTIZED,
    )
    sensitivity_bound: float = setting(
        0.05,
        "Maximum relative error of a layer's output. For comparison: up to 0.04 for fp8, 0.01 for int8, 0.1 for nf4.",
        ge=0,
        lt=1,
        when=QUANTIZED | {"quantize.sensitivity": ("auto",)},
    )
    compute: Literal["upcast", "fp8", "fp8_forward", "auto"] = setting(
        "upcast",
        "Precision of the base model's matmuls. upcast: dequantize the weights and multiply in model.dtype. fp8: "
        "multiply in FP8. fp8_forward: FP8 in the forward pass only. auto: measure and use the fastest.",
        when={"quantize.storage": ("fp8",), "layers.fp8": (True,)},
    )
    recipe: Literal["current", "delayed", "block", "mxfp8"] = setting(
        "current",
        "How the scales of an FP8 matmul are chosen: from this step (current), from recent steps (delayed), per "
        "1x128 block (block), or per 1x32 block (mxfp8, te only).",
        when=FP8_LAYERS,
    )
    fast_accum: bool = setting(
        True,
        "Fast accumulation: add up forward FP8 matmuls in fewer bits, which is fastest on Hopper GPUs.",
        when=FP8_LAYERS,
    )
    kernels: Literal["torch", "triton"] = setting(
        "torch",
        "Kernels around the FP8 matmul. triton: this program's own (not faster where measured). compute = 'auto' "
        "tries both.",
        when=FP8_LAYERS,
    )
    fp8_min_features: int = setting(
        512,
        "Minimum layer width for FP8 matmul. Layers with a smaller side are not multiplied in FP8.",
        ge=0,
        when=FP8_MATMUL,
    )
    fp8_exclude: list[str] = setting(
        [], "Names of modules that are stored in fp8 but not multiplied in FP8.", when=FP8_MATMUL
    )


BY_RANK: dict[str, tuple[Any, ...]] = {"adapter.type": Except(("oft",))}
"""When a rank has an effect."""


class Adapter(Section):
    """The adapter (LoRA) that is trained."""

    type: Literal["lora", "dora", "lokr", "loha", "oft"] = setting(
        "lora",
        "Adapter type: lora, dora (LoRA with a trained magnitude per weight row), lokr, loha or oft (from LyCORIS; oft "
        "is its diag-oft).",
        also="kohya: network_module, lycoris_algo; SimpleTuner: lora_type",
    )
    rank: int = setting(
        16,
        "Rank of the low-rank update (kohya: network_dim). A higher rank can learn more but makes a larger file.",
        when=BY_RANK,
        ge=1,
        le=MOST_RANK,
        also="kohya: network_dim; ai-toolkit: linear; OneTrainer: lora_rank; SimpleTuner: lora_rank",
    )
    factor: int = setting(
        8,
        "LoKr factor: size of the first matrix, where it divides the layer's size. A smaller factor makes a larger "
        "file. 0: the factors closest to the square root.",
        when={"adapter.type": ("lokr",)},
        ge=0,
        also="ai-toolkit: lokr_factor",
    )
    block_size: int = setting(
        32,
        "OFT block size: each rotation mixes so many output features of a layer, or the next smaller number that "
        "divides them. A larger block can learn more but makes a larger file.",
        when={"adapter.type": ("oft",)},
        ge=2,
        le=MOST_RANK,
    )
    decompose_both: bool = setting(
        False,
        "LoKr: also make the first matrix low-rank where the rank is below half its side.",
        when={"adapter.type": ("lokr",)},
    )
    ranks: dict[str, Annotated[int, Field(ge=0, le=MOST_RANK)]] = setting(
        {},
        "Ranks of single layers or blocks, such as {'down_blocks.0' = 4, 'attn2' = 32}; 0: not trained. The first "
        "match counts. Alpha is adjusted so that alpha / rank is the same for all layers.",
    )
    alpha: float = setting(
        16.0,
        "Strength of the LoRA (kohya: network_alpha). Its weights are multiplied by alpha / rank.",
        when=BY_RANK,
        gt=0,
        also="kohya: network_alpha; ai-toolkit: linear_alpha; OneTrainer: lora_alpha; SimpleTuner: lora_alpha",
    )
    rank_stabilized: bool = setting(
        False,
        "Rank-stabilized LoRA (rsLoRA): multiply by alpha / sqrt(rank), so that a high rank learns as fast as a low "
        "one (peft: use_rslora; LyCORIS: rs_lora). Each layer of adapter.ranks uses its own rank.",
        when=BY_RANK,
    )
    dropout: float = setting(
        0.0,
        "Probability of dropping each adapter input during training.",
        when=BY_RANK,
        ge=0,
        lt=1,
        also="kohya: network_dropout; OneTrainer: dropout_probability; SimpleTuner: lora_dropout",
    )
    rank_dropout: float = setting(
        0.0,
        "Probability of dropping each rank of a sample during training. LoKr and LoHa: each row of the update, for all "
        "samples.",
        when=BY_RANK,
        ge=0,
        lt=1,
        also="kohya: rank_dropout",
    )
    rank_dropout_scale: bool = setting(
        False,
        "LoKr and LoHa: divide the rows that rank dropout leaves by their share. LoRA always divides by 1 - "
        "rank_dropout.",
        when={"adapter.type": ("lokr", "loha"), "adapter.rank_dropout": ()},
        also="kohya: rank_dropout_scale",
    )
    module_dropout: float = setting(
        0.0,
        "Probability of training a pass without the adapter of a layer, drawn for each layer.",
        ge=0,
        lt=1,
        also="kohya: module_dropout",
    )
    scale_weight_norms: float = setting(
        0.0,
        "Maximum norm of each layer's update; layers above it are scaled down after every step. sd-scripts recommends "
        "1 as a start; 0: no limit.",
        ge=0,
        also="kohya: scale_weight_norms",
    )
    targets: list[str] = setting(
        [],
        "Target modules: endings of module names, such as 'to_q'; empty: the architecture's default.",
        also="ai-toolkit: only_if_contains; OneTrainer: layer_filter",
    )
    init: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = setting(
        "default",
        "Initial values of a LoRA (peft: init_lora_weights). default, gaussian and orthogonal draw the first matrix. "
        "pissa and olora take both from the base's weight; the file has twice the rank.",
        when={"adapter.type": ("lora", "dora")},
        also="SimpleTuner: lora_init_type",
    )
    freeze_a: bool = setting(
        False,
        "LoRA-FA: train the second matrix only, and keep the first as it was drawn. This halves optimizer states and "
        "gradients, and saves activations.",
        when={"adapter.type": ("lora", "dora")},
    )
    init_from: str = setting(
        "",
        "LoRA file to continue from, with the same base model, type and rank, in any key layout; empty: start from "
        "the base model.",
        also="kohya: network_weights; ai-toolkit: pretrained_lora_path; OneTrainer: lora_model_name; SimpleTuner: "
        "init_lora; diffusion-pipe: init_from_existing",
        place="file",
    )
    dtype: Literal["bf16", "fp32"] = setting("bf16", "Dtype of the adapter weights during training.")
    text_encoder: bool = setting(
        False,
        "Also train all CLIP text encoders, but not T5. This needs more memory.",
        when={"family.text_encoder": (True,)},
        also="kohya: network_train_unet_only = false; ai-toolkit: train_text_encoder; SimpleTuner: train_text_encoder",
    )

    @property
    def doubles_rank(self) -> bool:
        """Return True if the start is taken from the base, so that checkpoints and files hold twice the rank."""
        return self.type in ("lora", "dora") and self.init in ("pissa", "olora")

    @property
    def freezes_a(self) -> bool:
        """Return True if LoRA's first matrix is not trained."""
        return self.freeze_a and self.type in ("lora", "dora")

    @property
    def is_random(self) -> bool:
        """Return True if the adapters draw random numbers in training: for dropout of any kind."""
        return any((self.dropout, self.rank_dropout, self.module_dropout))


class Folder(Section):
    """One image folder: a [[dataset.folders]] table."""

    path: str = setting(
        ...,
        "Folder with images and a .txt (or .caption) file for each, including subfolders.",
        also="kohya: image_dir, train_data_dir, image_directory; ai-toolkit: folder_path; SimpleTuner: "
        "instance_data_dir",
        place="folder",
    )
    repeats: int | float = setting(
        1,
        "Number of times each image is trained per epoch. Need not be a whole number: 0.5 trains half of the folder in "
        "one epoch and the other half in the next.",
        ge=0.01,
        le=10_000,
        also="kohya: num_repeats; ai-toolkit: num_repeats; diffusion-pipe: num_repeats",
    )
    trigger: str = setting(
        "",
        "Trigger word of this folder; empty: dataset.trigger.",
        also="kohya: class_tokens",
    )
    prefix: str = setting(
        "",
        "Text before every caption of this folder, such as 'masterpiece, best quality,'.",
        also="kohya: caption_prefix; diffusion-pipe: caption_prefix",
    )
    suffix: str = setting("", "Text after every caption of this folder.", also="kohya: caption_suffix")
    regularization: bool = setting(
        False,
        "Regularization images: of the same class, without your subject. They get no trigger word and are not held "
        "out for validation.",
        also="kohya: is_reg, reg_data_dir; ai-toolkit: is_reg",
    )
    weight: float = setting(
        1.0,
        "Loss weight of this folder's images. For regularization images this is kohya's prior_loss_weight.",
        gt=0,
        le=100,
        also="kohya: prior_loss_weight; ai-toolkit: loss_multiplier",
    )
    resolution: Annotated[int, Field(ge=0, le=0)] | Annotated[int, Field(ge=16, le=8192)] = setting(
        0,
        "Training resolution of this folder: side in pixels of a square with the same area; 0: dataset.resolution. "
        "To train at two sizes, list the folder twice.",
    )
    control: str = setting(
        "",
        "For editing models: folder with the control images (the images before the edit). Each has the name of its "
        "image, or name_1, name_2.",
        also="kohya: control_directory; ai-toolkit: control_path",
        place="folder",
    )
    mask: str = setting(
        "",
        "Masks, white where the image is trained: a folder with a mask of the same name for each image, 'alpha' for "
        "the images' own transparency, or a name pattern for files beside them, such as '*-masklabel'.",
        when={"masks.matter": (True,)},
        also="kohya: conditioning_data_dir; ai-toolkit: mask_path",
        place="folder",
    )

    @property
    def mask_folder(self) -> str:
        """Return the path of a folder of masks; "" where the masks are elsewhere."""
        return self.mask if is_mask_folder(self.mask) else ""


def is_mask_folder(mask: str) -> bool:
    """Return True if a folder's `mask` is a path: neither "alpha" nor a name with a * for the image's."""
    return mask not in ("", "alpha") and "*" not in mask


class Dataset(Section):
    """Images, captions, buckets and the cache of encoded examples."""

    folders: list[Folder] = setting([], "The image folders.")
    resolution: Literal["auto"] | Annotated[int, Field(ge=16, le=8192)] = setting(
        "auto",
        "Training resolution: side in pixels of a square with the training area. auto: the architecture's native "
        "resolution.",
    )
    buckets: bool = setting(
        True,
        "Aspect-ratio buckets: group images by shape. If off, all images are cropped to squares.",
        also="kohya: enable_bucket; OneTrainer: aspect_ratio_bucketing",
    )
    bucket_step: Literal["auto"] | Annotated[int, Field(ge=8, le=512)] = setting(
        "auto",
        "Step of the bucket sizes: all sides are multiples of this many pixels.",
        also="kohya: bucket_reso_steps; SimpleTuner: aspect_bucket_alignment",
    )
    max_aspect: float = setting(2.0, "Maximum aspect ratio of a bucket.", ge=1, le=8, when={"dataset.buckets": (True,)})
    upscale: bool = setting(
        True,
        "Enlarge images that are smaller than their bucket. If off, they get smaller buckets.",
        also="kohya: bucket_no_upscale = false",
    )
    flip: bool = setting(
        False,
        "Mirror half of the samples left to right. Not for text, logos or asymmetric characters.",
        also="kohya: flip_aug; ai-toolkit: flip_x",
    )
    follow_mask: bool = setting(
        False,
        "Move the crop of an image that has a mask as little as needed to keep the white part of the mask inside. If "
        "off, crops are in the middle, or where random_crop draws them.",
        when=MASKED,
    )
    random_crop: bool = setting(
        False,
        "Cut variants of an image out at a random place instead of the middle.",
        also="kohya: random_crop; ai-toolkit: random_crop; OneTrainer: enable_crop_jitter",
    )
    zoom: float = setting(
        0.0,
        "Maximum zoom of image variants: 0.5 enlarges an image by up to a half before it is cropped.",
        ge=0,
        le=2,
    )
    rotate: float = setting(
        0.0,
        "Maximum angle of image variants, in degrees to either side.",
        ge=0,
        le=45,
        also="OneTrainer: random_rotate_max_angle",
    )
    color_jitter: float = setting(
        0.0,
        "Maximum change of brightness, contrast and saturation of image variants: 0.1 is a tenth more or less.",
        ge=0,
        le=0.9,
        also="kohya: color_aug",
    )
    image_variants: int = setting(
        4,
        "Number of cached versions of each image: the image as it is, and others cropped, zoomed, turned or coloured "
        "differently.",
        ge=2,
        le=64,
        when=CHANGED_IMAGES,
        also="OneTrainer: image_variations",
    )
    frames: list[int] = setting(
        [],
        "Clip lengths to train, in frames, such as [17, 33]. Each clip uses the longest length that fits.",
        when=CLIPS,
        also="kohya: target_frames; ai-toolkit: num_frames; diffusion-pipe: frame_buckets",
    )
    fps: Literal["auto"] | Annotated[float, Field(ge=1, le=120)] = setting(
        "auto",
        "Frame rate to which clips are converted. auto: the frame rate that the model generates.",
        when=CLIPS | {"dataset.frames": ()},
    )
    clip: Literal["head", "middle", "chunks"] = setting(
        "head",
        "Part of longer videos to use: the beginning (head), the middle, or as many consecutive clips as fit (chunks).",
        when=CLIPS | {"dataset.frames": ()},
        also="kohya: frame_extraction",
    )
    control_resolution: Literal["auto"] | Annotated[int, Field(ge=32, le=8192)] = setting(
        "auto",
        "Resolution of control images: side in pixels of a square with their area. auto: as in the model's pipeline.",
        when={"family.controls": (True,)},
    )
    background: str = setting(
        "#ffffff", "Background colour behind transparent images, as #rrggbb.", pattern="^#[0-9a-fA-F]{6}$"
    )
    trigger: str = setting(
        "",
        "Trigger word. It is added at the start of captions that lack it.",
        also="ai-toolkit: trigger_word",
    )
    class_word: str = setting(
        "",
        "Class of what is trained, such as 'dog': a second pass of each step with this word in place of the trigger "
        "keeps the base's own prediction for it. Empty: no second pass. A step takes two to three times as long.",
        also="ai-toolkit: diff_output_preservation_class",
    )
    missing_caption: Literal["error", "trigger", "skip"] = setting(
        "error",
        "What to do with images that have no caption: stop with an error, use the trigger word as caption, or skip "
        "them.",
    )
    caption_lines: Literal["join", "first", "one"] = setting(
        "join",
        "Captions of several lines: join them into one, use the first line, or draw one line anew each time (one).",
        also="kohya: enable_wildcard; SimpleTuner: disable_multiline_split = false",
    )
    caption_dropout: float = setting(
        0.0,
        "Probability of training a sample without its caption.",
        ge=0,
        le=1,
        also="kohya: caption_dropout_rate; ai-toolkit: caption_dropout_rate; SimpleTuner: caption_dropout_probability",
    )
    shuffle_tags: bool = setting(
        False,
        "Shuffle the tags of a caption, in a new order each time.",
        also="kohya: shuffle_caption; ai-toolkit: shuffle_tokens",
    )
    tag_dropout: float = setting(
        0.0,
        "Probability of dropping each tag of a caption. The trigger word is never dropped.",
        ge=0,
        lt=1,
        also="kohya: caption_tag_dropout_rate",
    )
    wildcards: bool = setting(
        False,
        "Random words in captions: '{red|blue}' becomes one of these words, drawn anew each time.",
        also="kohya: enable_wildcard",
    )
    keep_tokens: int = setting(
        1, "Number of tags at the start of a caption that are neither shuffled nor dropped.", ge=0, when=TAGGED
    )
    keep_separator: str = setting(
        "",
        "Mark in captions, such as '|||': tags before the first mark stay in front, tags after the second one stay at "
        "the end. It replaces keep_tokens in captions that have it, and is never trained.",
        also="kohya: keep_tokens_separator",
    )
    tag_separator: str = setting(
        ",",
        "Separator between the tags of a caption.",
        min_length=1,
        when=TAGGED,
        also="kohya: caption_separator",
    )
    caption_variants: int = setting(
        8,
        "Number of cached versions of each caption: shuffled, with tags dropped, with another line or wildcard word.",
        ge=1,
        le=64,
        when=VARIED,
    )
    cache_dir: str = setting(
        "cache",
        "Folder of the cache with encoded images and captions, shared by all runs.",
        also="kohya: cache_directory",
        place="folder",
    )
    cache_limit: Literal["none"] | Annotated[float, Field(gt=0)] = setting(
        "none",
        "Largest size of the cache, in GiB. Before images are encoded, entries that were unused for longest are "
        "deleted, but none of the last 24 hours.",
    )
    max_pixels: int = setting(64_000_000, "Maximum number of pixels of an image. Larger images are refused.", ge=4096)

    @property
    def varies_captions(self) -> bool:
        """Return True if a caption is read in `caption_variants` versions."""
        return self.shuffle_tags or self.tag_dropout > 0 or self.wildcards or self.caption_lines == "one"

    @property
    def varies_images(self) -> bool:
        """Return True if an image is trained in `image_variants` versions."""
        return self.random_crop or self.zoom > 0 or self.rotate > 0 or self.color_jitter > 0

    @property
    def triggers(self) -> list[str]:
        """Return the trigger words of all folders."""
        return [word for word in dict.fromkeys(map(self.find_trigger, range(len(self.folders)))) if word.strip()]

    def find_trigger(self, index: int) -> str:
        """Return the trigger word of a folder: its own, else the dataset's; "" for regularization."""
        folder = self.folders[index]
        return "" if folder.regularization else folder.trigger or self.trigger


class Train(Section):
    """Length of the training and batch size."""

    steps: int = setting(
        1500,
        "Number of optimizer steps.",
        ge=1,
        also="kohya: max_train_steps, max_train_epochs * steps_per_epoch; OneTrainer: epochs * steps_per_epoch; "
        "SimpleTuner: max_train_steps, num_train_epochs * steps_per_epoch; diffusion-pipe: epochs * "
        "steps_per_epoch",
    )
    batch_size: int = setting(
        1,
        "Number of images per micro-batch, over all processes together.",
        ge=1,
        also="kohya: train_batch_size; SimpleTuner: train_batch_size; diffusion-pipe: micro_batch_size_per_gpu",
    )
    accumulate: int = setting(
        1,
        "Gradient accumulation: number of micro-batches per step. Their gradients are summed in float32.",
        ge=1,
        also="kohya: gradient_accumulation_steps; ai-toolkit: gradient_accumulation; OneTrainer: "
        "gradient_accumulation_steps; SimpleTuner: gradient_accumulation_steps; diffusion-pipe: "
        "gradient_accumulation_steps",
    )
    max_grad_norm: float = setting(
        1.0,
        "Maximum gradient norm (gradient clipping); 0: no clipping.",
        ge=0,
        also="OneTrainer: clip_grad_norm; diffusion-pipe: gradient_clipping",
    )
    threads: int = setting(
        0, "CPU threads of PyTorch; 0: PyTorch's own choice. Bit-identical repeats need the same number.", ge=0, le=1024
    )
    deterministic: bool = setting(
        False,
        "Use deterministic GPU kernels, so that repeated and resumed runs are bit-identical. Attention in the backward "
        "pass is slower. On a CPU they always are.",
    )
    gradient_exchange: Literal["fp32", "fp8"] = setting(
        "fp32",
        "Precision of the gradients sent between processes. fp8: a quarter of the bytes; what rounding leaves out "
        "is sent with later steps.",
        when={"run.several_processes": (True,)},
    )
    log_every: int = setting(1, "Interval between step records in the log, in steps.", ge=1)


class Optimizer(Section):
    """Optimizer and learning rate."""

    name: (
        Literal[OPTIMIZERS]  # type: ignore[valid-type]  # pydantic reads the tuple
        | Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    ) = setting(
        "adamw8bit",
        "Optimizer. adamw8bit, lion8bit, ademamix8bit: bitsandbytes. adamw: PyTorch, for comparison. prodigy: finds "
        "the learning rate by itself. adamw_schedulefree: needs no falling schedule. adafactor, came: little memory. "
        "muon: orthogonalized steps for matrices. Or any class, such as 'pytorch_optimizer.Adan', with arguments.",
        also="kohya: optimizer_type; ai-toolkit: optimizer",
    )
    arguments: dict[str, Any] = setting(
        {},
        "Arguments of an optimizer that is given as a class, such as {betas = [0.9, 0.95], weight_decay = 0.01}. Its "
        "own defaults apply to the rest.",
        when={"optimizer.name": (CLASS,)},
        also="kohya: optimizer_args",
        names="an argument",
    )
    lr: Literal["auto"] | Annotated[float, Field(gt=0, le=MOST_LR)] = setting(
        "auto",
        "Learning rate, before lr_scale. auto: 1e-4 (lion8bit: 2e-5). With prodigy: a factor on the rate that it "
        "finds (auto: 1).",
        also="kohya: learning_rate, unet_lr; OneTrainer: learning_rate; SimpleTuner: learning_rate",
    )
    lr_scale: Literal["auto", "none"] | Annotated[float, Field(gt=0, le=100)] = setting(
        "auto",
        "Factor on the learning rate. auto: 1.4 for FP8 base models, 1 otherwise and with prodigy. none: no factor.",
    )
    text_encoder_lr: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = setting(
        "auto",
        "Learning rate of the text encoders; lr_scale does not apply to it. auto: half of lr.",
        when={"adapter.text_encoder": (True,)} | BY_RATE,
    )
    lrs: dict[str, Annotated[float, Field(gt=0, le=100)]] = setting(
        {},
        "Learning rate factors of single layers or blocks of the denoiser, such as {'down_blocks.0' = 0.5}. The "
        "first match counts. To leave layers untrained, use adapter.ranks.",
        when=BY_RATE,
    )
    loraplus_lr_ratio: float = setting(
        1.0,
        "LoRA+ ratio: factor on the learning rate of each LoRA's second matrix (lora_B, lora_up). The LoRA+ paper "
        "uses 16.",
        gt=0,
        le=1000,
        when=BY_RATE | {"adapter.type": ("lora", "dora")},
    )
    d0: float = setting(1e-6, "Prodigy: initial learning rate.", gt=0, lt=1, when=PRODIGY)
    d_coef: float = setting(
        1.0,
        "Prodigy: factor on the learning rate that it finds; use 0.5 or 2 to correct it.",
        gt=0,
        le=100,
        when=PRODIGY,
    )
    growth_rate: Literal["unlimited"] | Annotated[float, Field(gt=1, le=1000)] = setting(
        "unlimited", "Prodigy: maximum growth of the learning rate per step. 1.02 makes a slow start.", when=PRODIGY
    )
    safeguard_warmup: bool = setting(
        True,
        "Prodigy: keep its estimate independent of the schedule, so that a warm-up distorts it less.",
        when=PRODIGY,
    )
    use_bias_correction: bool = setting(
        True, "Prodigy: Adam's bias correction. The first steps are slower.", when=PRODIGY
    )
    decouple: bool = setting(
        True,
        "Prodigy: decoupled weight decay, as in AdamW. If off, the decay is added to the gradient.",
        when=PRODIGY | {"optimizer.weight_decay": ()},
    )
    weight_decay: float = setting(
        0.01,
        "Decoupled weight decay. lion8bit usually needs 3 to 10 times more.",
        ge=0,
        when={"optimizer.name": Except((CLASS,))},
        also="OneTrainer: optimizer_weight_decay; SimpleTuner: adam_weight_decay",
    )
    beta1: float = setting(
        0.9,
        "Decay rate of the first moment (muon: its momentum).",
        ge=0,
        lt=1,
        when={"optimizer.name": Except(("adafactor", CLASS))},
        also="SimpleTuner: adam_beta1, optimizer_beta1",
    )
    beta2: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = setting(
        "auto",
        "Decay rate of the second moment. auto: 0.999 (lion8bit: 0.99).",
        when={"optimizer.name": Except(("adafactor", "muon", CLASS))},
        also="SimpleTuner: adam_beta2, optimizer_beta2",
    )
    eps: float = setting(
        1e-8,
        "Small number that is added to the denominator.",
        gt=0,
        when={"optimizer.name": Except(("lion8bit", "adafactor", "came", "muon", CLASS))},
        also="SimpleTuner: adam_epsilon",
    )
    rounding: Literal["master", "stochastic", "nearest"] = setting(
        "master",
        "How bf16 adapters keep small updates: float32 master weights (master), stochastic rounding, or not at all "
        "(nearest).",
        when={"adapter.dtype": ("bf16",)},
    )
    ema_decay: float = setting(
        0.0,
        "Average the weights over the last steps (EMA): previews, held-out loss and LoRA files use the average, and "
        "training goes on from its own. 0.99 averages about the last 100 steps, 0.999 the last 1,000; 0: off.",
        ge=0,
        lt=1,
        also="ai-toolkit: ema_decay; OneTrainer: ema_decay; SimpleTuner: ema_decay",
    )


class Schedule(Section):
    """Learning rate over the steps."""

    name: Literal["constant", "cosine", "cosine_with_restarts", "linear", "polynomial", "wsd", "rex", "points"] = (
        setting(
            "constant",
            "Shape of the learning rate after the warm-up. wsd: constant, then a decay at the end. rex: stays high and "
            "falls late. points: your own curve.",
            also="kohya: lr_scheduler; ai-toolkit: lr_scheduler; OneTrainer: learning_rate_scheduler; SimpleTuner: "
            "lr_scheduler",
        )
    )
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = setting(
        0,
        "Length of the warm-up: a whole number of steps, or a fraction of all steps.",
        when={"schedule.name": Except(("points",))},
        also="kohya: lr_warmup_steps; OneTrainer: learning_rate_warmup_steps; SimpleTuner: lr_warmup_steps; "
        "diffusion-pipe: warmup_steps",
    )
    cycles: int = setting(
        3,
        "Number of cosine cycles. Each cycle starts at the full learning rate.",
        ge=1,
        le=1000,
        when={"schedule.name": ("cosine_with_restarts",)},
        also="kohya: lr_scheduler_num_cycles; OneTrainer: learning_rate_cycles",
    )
    power: float = setting(
        2.0,
        "Power of the polynomial. 1 is the linear schedule; above 1 the learning rate falls faster at first.",
        gt=0,
        le=100,
        when={"schedule.name": ("polynomial",)},
        also="kohya: lr_scheduler_power; SimpleTuner: lr_power",
    )
    decay: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = setting(
        0.2,
        "Length of the decay at the end of wsd: a whole number of steps, or a fraction of all steps.",
        when={"schedule.name": ("wsd",)},
        also="kohya: lr_decay_steps",
    )
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = setting(
        "cosine",
        "Shape of the decay of wsd. 1-sqrt falls fast at first and slowly at the end.",
        when={"schedule.name": ("wsd",)},
    )
    rex_d: float = setting(
        0.5,
        "How long rex stays high, from 0 (the linear schedule) to below 1. The paper uses 0.5; OneTrainer and "
        "musubi-tuner use 0.9.",
        ge=0,
        lt=1,
        when={"schedule.name": ("rex",)},
    )
    points: dict[str, Annotated[float, Field(ge=0, le=100)]] = setting(
        {},
        "Your own curve: places in the training with factors on the learning rate, joined by straight lines, such as "
        "{'0' = 0, '100' = 1, '1.0' = 0.1}. A whole number counts steps; a number with a decimal point is a "
        "share of all steps.",
        when={"schedule.name": ("points",)},
        names="a step or share",
    )
    min_lr: float = setting(
        0.0,
        "Final learning rate of the falling schedules (cosine to rex), as a fraction of the learning rate.",
        ge=0,
        le=1,
        when={"schedule.name": FALLING},
        also="kohya: lr_scheduler_min_lr_ratio",
    )


class Objective(Section):
    """Prediction target, loss and noise levels."""

    prediction: Literal["auto", "epsilon", "v", "flow"] = setting(
        "auto",
        "What the base model predicts: epsilon, v (kohya: --v_parameterization) or flow. auto: what its scheduler "
        "config or file says.",
        when=DIFFUSION,
        also="kohya: v_parameterization",
    )
    loss: Literal["mse", "huber", "smooth_l1", "pseudo_huber", "pseudo_smooth_l1"] = setting(
        "mse",
        "Loss function. mse: squared error. huber, smooth_l1: large errors count linearly, so outliers matter less. "
        "pseudo_huber, pseudo_smooth_l1: their smooth versions (kohya's huber and smooth_l1).",
        also="kohya: loss_type; ai-toolkit: loss_type",
    )
    huber_delta: float = setting(
        0.1,
        "Error above which huber and smooth_l1 become linear (kohya: huber_c). The noise has a standard deviation "
        "of 1.",
        gt=0,
        le=100,
        when=HUBER,
        also="kohya: huber_c",
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = setting(
        "constant",
        "How huber_delta changes with the noise level. constant: not at all. exponential: from huber_scale (clean) "
        "to huber_scale * huber_delta (noise). snr: from 1 to huber_delta by the signal-to-noise ratio, for "
        "diffusion models (kohya's default).",
        when=HUBER,
    )
    huber_scale: float = setting(
        1.0,
        "Factor on the result of huber_schedule = 'exponential'.",
        gt=0,
        le=100,
        when=HUBER | {"objective.huber_schedule": ("exponential",)},
    )
    weighting: Literal["min_snr", "soft_min_snr", "debiased"] = setting(
        "min_snr",
        "Loss weight by signal-to-noise ratio, for diffusion models. min_snr, soft_min_snr: as objective.min_snr_gamma "
        "says, with a sharp or a round corner. debiased: 1 / sqrt(SNR).",
        when=DIFFUSION,
        also="kohya: debiased_estimation_loss; OneTrainer: loss_weight_fn; SimpleTuner: use_soft_min_snr",
    )
    min_snr_gamma: float = setting(
        0.0,
        "Min-SNR loss weighting for diffusion models (Hang et al. 2023); usual: 5; 0: off.",
        ge=0,
        when=DIFFUSION | {"objective.weighting": ("min_snr", "soft_min_snr")},
        also="SimpleTuner: snr_gamma; OneTrainer: loss_weight_strength",
    )
    noise_offset: float = setting(
        0.0,
        "Noise offset for diffusion models: noise that is equal all over an image, so that very dark and bright "
        "images are learned. Usual: 0.03 to 0.1; 0: off.",
        ge=0,
        le=1,
        when=DIFFUSION,
        also="OneTrainer: offset_noise_weight",
    )
    pyramid_noise: int = setting(
        0,
        "Levels of pyramid noise for diffusion models (kohya: multires_noise_iterations): noise of lower resolutions "
        "is added, so that large areas of light and dark are learned. Usual: 6 to 10; 0: off.",
        ge=0,
        le=16,
        when=DIFFUSION,
        also="kohya: multires_noise_iterations",
    )
    pyramid_discount: float = setting(
        0.3,
        "Strength of each level of pyramid noise, as a share of that of the level before. Usual: 0.1 to 0.4.",
        gt=0,
        le=1,
        when=DIFFUSION | {"objective.pyramid_noise": Except((0,))},
        also="kohya: multires_noise_discount",
    )
    input_noise: float = setting(
        0.0,
        "Noise that the model sees and is not asked for, as a share of the noise (Ning et al. 2023): it learns to "
        "correct its own errors in sampling. Usual: 0.05 to 0.15; 0: off.",
        ge=0,
        le=1,
        when=DIFFUSION,
        also="kohya: ip_noise_gamma; SimpleTuner: input_perturbation",
    )
    zero_terminal_snr: bool = setting(
        False,
        "Train and preview with no signal left at the last timestep, for v-prediction models that were trained so "
        "and do not say it (Lin et al. 2023).",
        when=DIFFUSION,
        also="kohya: zero_terminal_snr; OneTrainer: rescale_noise_scheduler_to_zero_terminal_snr; SimpleTuner: "
        "rescale_betas_zero_snr",
    )
    unmasked_weight: float = setting(
        0.1,
        "Loss weight of the area outside the masks. 1: the same as inside, so masks have no effect. 0: nothing "
        "constrains this area, and it may drift.",
        ge=0,
        le=1,
        when=MASKED,
    )
    normalize_mask: bool = setting(
        False,
        "Divide the loss of an image with a mask by the mean weight of its area, so that a small subject counts as "
        "much as a large one.",
        when=MASKED,
        also="OneTrainer: normalize_masked_area_loss",
    )
    prior_outside_masks: float = setting(
        0.0,
        "Weight of a second loss outside the masks, towards the base's own prediction: the background stays as the "
        "base draws it. 0: off.",
        ge=0,
        le=10,
        when=MASKED,
        also="OneTrainer: masked_prior_preservation_weight",
    )
    prior_for_regularization: bool = setting(
        False,
        "Regularization images keep what the base model predicts for them, instead of teaching their own look.",
        when={"dataset.folders.regularization": (True,)},
    )
    prior_for_class: float = setting(
        1.0,
        "Weight of the loss of the second pass of dataset.class_word.",
        gt=0,
        le=10,
        when={"dataset.class_word": ()},
        also="ai-toolkit: diff_output_preservation_multiplier",
    )
    timesteps: Literal["auto", "uniform", "logit_normal", "mode", "cosmap", "beta"] = setting(
        "auto",
        "Timestep distribution: which noise levels are trained how often. auto: uniform for diffusion models, "
        "logit_normal for flow matching. `lora-fp8 timesteps` draws it.",
        also="kohya: timestep_sampling, weighting_scheme; ai-toolkit: timestep_type; OneTrainer: "
        "timestep_distribution; diffusion-pipe: timestep_sample_method",
    )
    logit_mean: float = setting(
        0.0,
        "Mean of the normal distribution behind logit_normal: above 0 trains more noise, below 0 less.",
        ge=-10,
        le=10,
        when={"objective.timesteps": ("logit_normal",)},
        also="kohya: logit_mean; OneTrainer: noising_bias",
    )
    logit_std: float = setting(
        1.0,
        "Standard deviation of the normal distribution behind logit_normal: small values keep to the middle of the "
        "noise levels, large ones reach both ends.",
        gt=0,
        le=10,
        when={"objective.timesteps": ("logit_normal",)},
        also="kohya: logit_std, sigmoid_scale; OneTrainer: noising_weight + 1; SimpleTuner: flow_sigmoid_scale",
    )
    mode_scale: float = setting(
        1.29,
        "Shape of the mode distribution: above 0 trains the middle of the noise levels more often, below 0 both ends.",
        ge=-1,
        le=1.75,
        when={"objective.timesteps": ("mode",)},
        also="kohya: mode_scale; OneTrainer: noising_weight",
    )
    beta_alpha: float = setting(
        2.0,
        "First parameter of the beta distribution; larger than the second trains more noise.",
        ge=0.5,
        le=100,
        when={"objective.timesteps": ("beta",)},
        also="SimpleTuner: flow_beta_schedule_alpha",
    )
    beta_beta: float = setting(
        2.0,
        "Second parameter of the beta distribution; larger than the first trains less noise.",
        ge=0.5,
        le=100,
        when={"objective.timesteps": ("beta",)},
        also="SimpleTuner: flow_beta_schedule_beta",
    )
    even_timesteps: bool = setting(
        False,
        "Spread the timesteps evenly over consecutive images instead of drawing each by chance. The distribution is "
        "the same; the gradient of a step varies less.",
    )
    shift: Literal["auto", "scheduler"] | Annotated[float, Field(gt=0)] = setting(
        "auto",
        "Timestep shift (kohya: discrete_flow_shift). auto: the usual training value for this architecture. "
        "scheduler: as in the model's sampler.",
        when=FLOW,
        also="kohya: discrete_flow_shift; OneTrainer: timestep_shift; SimpleTuner: flow_schedule_shift",
    )
    t_min: float = setting(
        0.0,
        "Lowest timestep to train, from 0 (clean) to 1 (noise). kohya: min_timestep / 1000. Wan 2.2's high-noise "
        "expert: 0.875.",
        ge=0,
        lt=1,
        also="kohya: min_timestep / 1000; ai-toolkit: min_denoising_steps / 1000; OneTrainer: "
        "min_noising_strength; diffusion-pipe: min_t",
    )
    t_max: float = setting(
        1.0,
        "Highest timestep to train, from 0 (clean) to 1 (noise). kohya: max_timestep / 1000. Wan 2.2's low-noise "
        "expert: 0.875.",
        gt=0,
        le=1,
        also="kohya: max_timestep / 1000; ai-toolkit: max_denoising_steps / 1000; OneTrainer: "
        "max_noising_strength; diffusion-pipe: max_t",
    )
    guidance: float = setting(
        1.0,
        "Embedded guidance value that guidance-distilled models get during training (kohya: guidance_scale).",
        ge=0,
        when={"family.guidance": (True,), "base.guidance": (True,)},
        also="kohya: guidance_scale; SimpleTuner: flux_guidance_value",
    )


class Memory(Section):
    """Trade-offs between memory and speed."""

    gradient_checkpointing: Literal["auto"] | bool = setting(
        "auto",
        "Gradient checkpointing: recompute activations in the backward pass. It needs less memory and is about 40 % "
        "slower. auto: only if the training does not fit into the free VRAM without; on a CPU always.",
        also="diffusion-pipe: activation_checkpointing",
    )
    keep_attention: bool = setting(
        False,
        "With gradient checkpointing, keep the results of attention instead of recomputing them. Faster where "
        "attention takes a large part of a step, as in transformers on large images; needs one activation per block "
        "more.",
        when={"memory.gradient_checkpointing": (True, "auto")},
    )
    offload: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = setting(
        "auto",
        "Share of the frozen weights that stays in RAM and is copied to the GPU for each use; 1: all. For models "
        "that do not fit into VRAM; slower. auto: as little as the free VRAM allows.",
        also="kohya: blocks_to_swap / num_blocks; ai-toolkit: layer_offloading; OneTrainer: "
        "layer_offload_fraction; diffusion-pipe: blocks_to_swap / num_blocks",
    )
    shard_base: bool = setting(
        False,
        "Split the frozen base model among the processes of the job (FSDP2), so that it takes its memory once and not "
        "once per GPU. Each block is sent to all GPUs whenever it computes; slower without a fast link between them.",
        when={"run.several_processes": (True,)},
    )
    compile: Literal["off", "blocks"] = setting(
        "off",
        "torch.compile. blocks: compile the denoiser's repeated blocks; the first steps take minutes.",
        also="kohya: torch_compile",
    )
    cuda_graphs: bool = setting(
        False,
        "Record the forward and backward pass of each image size as a CUDA graph and replay it. Faster where the GPU "
        "waits for the CPU: 3 to 10 % for FLUX at 1024 px on an H100.",
    )

    @property
    def recomputes(self) -> bool:
        """Return True if activations are recomputed in the backward pass; so they are where "auto" was not decided."""
        return self.gradient_checkpointing is not False

    @property
    def keeps_attention(self) -> bool:
        """Return True if activations are recomputed, but for the results of attention."""
        return self.recomputes and self.keep_attention

    @property
    def share_in_ram(self) -> float:
        """Return the share of the frozen weights that is offloaded; none where "auto" was not decided."""
        return 0.0 if self.offload == "auto" else float(self.offload)


class Preview(Section):
    """Images drawn during training, always from the same seed."""

    prompts: list[str] = setting(
        [],
        "Prompts of the previews; empty: no previews. Options at the end of a prompt are its own: --w 1216 --h 832 "
        "(size), --d 7 (seed), --s 30 (steps), --g 4 (guidance), --n blurry (negative prompt).",
        also="kohya: sample_prompts; SimpleTuner: validation_prompt",
    )
    controls: list[str] = setting(
        [],
        "For editing models: the control image of each prompt. A folder stands for all images in it.",
        when=DRAWN | {"family.controls": (True,)},
        place="file or folder",
    )
    negative: str = setting(
        "",
        "Negative prompt of the previews.",
        when=DRAWN | {"family.negative": (True,)},
        also="ai-toolkit: neg",
    )
    every: int = setting(
        0,
        "Preview interval, in steps; 0: only at the start and at the end.",
        ge=0,
        when=DRAWN,
        also="kohya: sample_every_n_steps; ai-toolkit: sample_every; OneTrainer: sample_after; SimpleTuner: "
        "validation_steps",
    )
    at_start: bool = setting(
        True,
        "Draw previews before the first step, for comparison.",
        when=DRAWN,
        also="kohya: sample_at_first; ai-toolkit: skip_first_sample = false",
    )
    steps: int = setting(
        20,
        "Number of denoising steps of each preview.",
        ge=1,
        le=500,
        when=DRAWN,
        also="ai-toolkit: sample_steps; SimpleTuner: validation_num_inference_steps",
    )
    guidance: Literal["auto"] | Annotated[float, Field(ge=0)] = setting(
        "auto",
        "Guidance scale (CFG) of the previews. auto: the usual value for the architecture.",
        when=DRAWN,
        also="ai-toolkit: guidance_scale; SimpleTuner: validation_guidance",
    )
    width: int = setting(
        0, "Width of the previews in pixels; 0: the training resolution.", ge=0, le=8192, multiple_of=16, when=DRAWN
    )
    height: int = setting(
        0, "Height of the previews in pixels; 0: the training resolution.", ge=0, le=8192, multiple_of=16, when=DRAWN
    )
    frames: int = setting(
        1, "Number of frames of each preview: 1 for an image, more for a clip.", ge=1, le=4096, when=DRAWN | CLIPS
    )
    tiled: Literal["auto"] | bool = setting(
        "auto",
        "Decode the previews in tiles: less memory, and sometimes faint seams. auto: only where a whole preview does "
        "not fit into the free VRAM.",
        when=DRAWN,
    )
    seed: int = setting(
        42,
        "Seed of the first preview. The following previews count up from it.",
        ge=0,
        le=MAX_SEED,
        when=DRAWN,
        also="SimpleTuner: validation_seed",
    )
    score_model: str = setting(
        "",
        "Image model that scores the previews: how near they are to the images, and to their prompts. A folder, or a "
        "model of Hugging Face that is downloaded already, such as openai/clip-vit-base-patch32. Empty: no scores.",
        when=DRAWN,
        place="folder",
    )


class Validation(Section):
    """Loss on held-out images. It rises when the LoRA starts to memorize the training images."""

    every: int = setting(
        0,
        "Validation interval, in steps; also at the start and at the end. 0: no validation.",
        ge=0,
        also="kohya: validate_every_n_steps; SimpleTuner: eval_steps_interval; diffusion-pipe: eval_every_n_steps",
    )
    pictures: int = setting(
        0,
        "Number of images held out for validation, drawn from all folders by the seed.",
        ge=0,
        also="kohya: validation_split * num_images; SimpleTuner: num_eval_images",
    )
    keep_best: bool = setting(
        True,
        "Keep the LoRA of the step with the lowest held-out loss. At the end it is written beside the last one, as "
        "NAME-best.",
        when={"validation.pictures": ()},
    )
    patience: int = setting(
        0,
        "Early stopping: end after this number of validations without an improvement that is larger than noise. "
        "0: train all steps.",
        ge=0,
        when={"validation.pictures": ()},
    )


class Checkpoint(Section):
    """Checkpoints, from which a training can be resumed."""

    every: int = setting(
        250,
        "Checkpoint interval, in steps.",
        ge=1,
        also="SimpleTuner: checkpointing_steps",
    )
    keep: int = setting(
        2,
        "Number of latest checkpoints to keep. At least 2, because the latest one may still be incomplete.",
        ge=2,
        also="kohya: save_last_n_steps_state / save_every_n_steps; SimpleTuner: checkpoints_total_limit",
    )


class Tracking(Section):
    """Experiment trackers, which get losses, learning rates and previews while the run trains."""

    to: list[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"]] = setting(
        [],
        "Experiment trackers. tensorboard: event files in the run folder. mlflow: a database in the run folder, or the "
        "server of MLFLOW_TRACKING_URI. wandb, trackio, swanlab: log in with their own command or environment "
        "variables first.",
        also="kohya: log_with; SimpleTuner: report_to",
    )
    project: str = setting(
        "lora-fp8",
        "Project of the tracker, in which the run appears. TensorBoard has none.",
        min_length=1,
        max_length=120,
        when={"tracking.to": ()},
        also="kohya: log_tracker_name; ai-toolkit: project_name; SimpleTuner: tracker_project_name",
    )
    run_name: str = setting(
        "auto",
        "Name of the run in the tracker. auto: the name of the job.",
        min_length=1,
        max_length=120,
        when={"tracking.to": ()},
        also="kohya: wandb_run_name; SimpleTuner: tracker_run_name",
    )
    log_images: bool = setting(
        True,
        "Send the previews too. trackio gets none.",
        when={"tracking.to": (), "preview.prompts": ()},
    )


class Export(Section):
    """The LoRA file."""

    every: int = setting(
        0,
        "Interval for LoRA files during training, in steps, written to export/step-N. 0: only at the end.",
        ge=0,
        also="kohya: save_every_n_steps; ai-toolkit: save_every; diffusion-pipe: save_every_n_epochs * steps_per_epoch",
    )
    formats: list[Literal["auto", "diffusers", "comfy", "kohya"]] = setting(
        ["auto"],
        "Key layouts to write, one file each. kohya: for A1111, Forge, ComfyUI and InvokeAI. comfy: for ComfyUI. "
        "auto: what most programs read for this architecture.",
    )
    dtype: Literal["bf16", "fp16", "fp32"] = setting(
        "bf16",
        "Dtype of the weights in the file.",
        also="kohya: save_precision; OneTrainer: output_dtype; diffusion-pipe: save_dtype",
    )
    title: str = setting(
        "",
        "Title in the file; empty: the job's name.",
        also="kohya: metadata_title",
    )
    author: str = setting(
        "",
        "Author in the file.",
        when=WITH_METADATA,
        also="kohya: metadata_author",
    )
    description: str = setting(
        "",
        "Description in the file.",
        when=WITH_METADATA,
        also="kohya: metadata_description",
    )
    license: str = setting(
        "",
        "Licence in the file.",
        when=WITH_METADATA,
        also="kohya: metadata_license",
    )
    metadata: Literal["public", "private", "none"] = setting(
        "public",
        "Training metadata in the file. public: all except paths. private: nothing about images and settings. none: "
        "only what programs need to load it.",
        also="kohya: no_metadata",
    )
    verify: bool = setting(True, "Load the file into a fresh pipeline and compare it with the training model.")


class Job(Section):
    """The complete configuration of one training."""

    name: str = setting(
        "my-lora",
        "Name of the run folder and of the LoRA file.",
        min_length=1,
        max_length=120,
        also="kohya: output_name",
    )
    output_dir: str = setting(
        "runs",
        "Folder in which the run folder is created.",
        also="ai-toolkit: training_folder; OneTrainer: output_model_destination",
        place="folder",
    )
    seed: int = setting(0, "Random seed of the data order, the noise and the initial weights.", ge=0, le=MAX_SEED)
    preset: list[str] = setting(
        [],
        "Presets to start from: a recipe's goal and GPU (character, vram_16gb), other names, or paths. Later presets "
        "override earlier ones; this config overrides them all.",
    )
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
    tracking: Tracking = Tracking()
    export: Export = Export()

    @property
    def run_folder(self) -> Path:
        """Return the folder of the run, `output_dir/name`; it may not exist yet."""
        return Path(os.path.expanduser(self.output_dir)) / self.name
