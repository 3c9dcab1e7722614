"""Every setting of a job, declared once.

One TOML table = one section = one frozen pydantic model below. A setting is one declaration: name, type with bounds,
default, help, when it has an effect, and its names in other trainers. The check, the commented file of `lora-fp8 new`,
the web form, the warnings about unused settings and docs/settings.md are made from it.

Which settings exclude each other is in config/relations.py; config/loading.py turns TOML into a `Job`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCALES = {
    "fp8": ("row", "tensor", "1x64", "1x128", "128x128", "none"),
    "int8": ("1x128", "1x64", "row"),
    "nf4": ("64",),
}
"""The scales that each quantized storage knows, the one that "auto" tries first in front."""
TORCHAO_LACKS = ("none", "128x128")
"""Scales of fp8 that torchao's weight-only tensors have no granularity for."""
STORAGES = ("bf16", *(name for kind, scales in SCALES.items() for name in (kind, *(f"{kind} {one}" for one in scales))))
Storage = Literal[STORAGES]  # type: ignore[valid-type]
"""A storage, with a scale if it is not the storage's own."""
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
    **bounds: Any,
) -> Any:
    """Declare a setting: its default (... if it must be given), its help, and its bounds (pydantic's ge, gt, le, lt).

    Args:
        when: what the setting needs to have an effect: other settings, each with the values that they must have.
            No values mean any but empty ones, `Except` all but these, and of "one | other" either will do.
            "dataset.folders.NAME" is what the folders that have it say. The other keys are facts: "family.NAME" is
            one of `families.traits`, the rest are in `FACTS`. A form leaves the setting out where it has no effect,
            and every command warns of one that is set there (`config.find_unused_settings`).
        also: its names in other trainers that differ from ours, such as "kohya: network_dim; ai-toolkit: linear".
            What stands behind a name converts its value to ours. "kohya" is sd-scripts and what shares its names:
            kohya_ss, lora-scripts, musubi-tuner.
    """
    names = dict(one.split(": ") for one in also.split("; ")) if also else {}
    extra = {"when": when or {}, "also": names}
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


FACTS = {
    "base.single_file": "model.path is a whole model, not a single file",
    "base.on_hub": "model.path is a local path",
    "base.guidance": "this model has no guidance embedding",
    "layers.fp8": "no layer can be multiplied in FP8",
    "layers.modulation": "this model has no modulation layers",
    "run.several_processes": "one process exchanges no gradients",
}
"""What a `when` may need beside settings and the family's traits, each with the reason where it does not hold.

A fact is true or false once the base's headers, its layers or the processes are known, and counts as true before."""
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
BY_RATE: dict[str, tuple[Any, ...]] = {"optimizer.name": ("adamw8bit", "adamw", "lion8bit")}
PRODIGY: dict[str, tuple[Any, ...]] = {"optimizer.name": ("prodigy",)}
HUBER: dict[str, tuple[Any, ...]] = {"objective.loss": ("huber", "smooth_l1", "pseudo_huber", "pseudo_smooth_l1")}
TAGGED: dict[str, tuple[Any, ...]] = {"dataset.shuffle_tags | dataset.tag_dropout": ()}
VARIED: dict[str, tuple[Any, ...]] = {"dataset.shuffle_tags | dataset.tag_dropout | dataset.wildcards": ()}
TOLD: dict[str, tuple[Any, ...]] = {"export.metadata": ("public", "private")}
MASKED: dict[str, tuple[Any, ...]] = {"dataset.folders.mask": ()}


class Model(Section):
    """The base model that is frozen and adapted."""

    family: str = setting(..., "Architecture, such as sd15, sdxl, flux or qwen_image; the README lists them all.")
    path: str = setting(
        ...,
        "Base model: Hugging Face id, diffusers folder, single .safetensors file, or 'demo' (bundled).",
        also="kohya: pretrained_model_name_or_path, dit; ai-toolkit: name_or_path; OneTrainer: base_model_name; "
        "diffusion-pipe: diffusers_path, transformer_path",
    )
    components: str = setting(
        "",
        "Diffusers folder with the VAE, text encoders and tokenizers that a single file lacks.",
        when={"base.single_file": (True,)},
    )
    revision: str = setting(
        "", "Branch, tag or commit on the hub; empty means the default branch.", when={"base.on_hub": (True,)}
    )
    dtype: Literal["bf16", "fp32"] = setting(
        "bf16",
        "Compute dtype, and storage of the parts that are not quantized.",
        also="kohya: mixed_precision; OneTrainer: train_dtype",
    )
    text_storage: Literal["none", "fp8", "int8", "nf4"] = setting(
        "none",
        "Storage of the text encoders while captions are encoded; fp8 takes half the memory of bf16, nf4 a third.",
        also="kohya: fp8_t5, fp8_llm; ai-toolkit: quantize_te; SimpleTuner: text_encoder_1_precision",
    )


class Quantize(Section):
    """How the frozen base is held in memory, and how it is multiplied."""

    storage: Literal["fp8", "int8", "nf4", "bf16", "none"] = setting(
        "fp8",
        "fp8: e4m3; int8; nf4: 4 bits, as QLoRA; bf16: not quantized; none: not quantized, held in model.dtype.",
        also="kohya: fp8_base; ai-toolkit: quantize; OneTrainer: weight_dtype; SimpleTuner: base_model_precision; "
        "diffusion-pipe: transformer_dtype",
    )
    backend: Literal["own", "torchao", "te"] = setting(
        "own",
        "Whose layers: own; torchao: its weight-only tensors; te: TransformerEngine's FP8 layers, on CUDA only.",
        when=QUANTIZED,
    )
    scale: Literal["auto", "row", "tensor", "1x64", "1x128", "128x128", "none"] = setting(
        "auto",
        "Weights that share a scale; auto: row for fp8 (an fp8 file keeps its own), 1x128 for int8; none: "
        "fp8 as kohya's fp8_base.",
        when={"quantize.storage": ("fp8", "int8")},
        also="kohya: fp8_scaled",
    )
    modulation: Literal["auto", "fp8", "int8", "nf4", "bf16"] = setting(
        "auto",
        "Storage of layers that see one row per image; auto: int8, which has the least error.",
        when=QUANTIZED | {"layers.modulation": (True,)},
    )
    keep: list[str] = setting(
        [], "Further module names to keep in model.dtype, beside the family's precise parts.", when=QUANTIZED
    )
    override: dict[str, Storage] = setting(
        {}, "Storage of single layers, such as {'ff.net.2' = 'int8 1x128', 'to_q' = 'bf16'}.", when=QUANTIZED
    )
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
        when=QUANTIZED | {"quantize.sensitivity": ("auto",)},
    )
    compute: Literal["upcast", "fp8", "fp8_forward", "auto"] = setting(
        "upcast",
        "upcast: weights decoded, matmul in model.dtype; fp8: matmul in FP8; auto: the fastest, measured.",
        when={"quantize.storage": ("fp8",), "layers.fp8": (True,)},
    )
    recipe: Literal["current", "delayed", "block", "mxfp8"] = setting(
        "current",
        "Scales in an FP8 matmul: of this step, of the last steps, of 1x128 blocks, of 1x32 (te only).",
        when=FP8_LAYERS,
    )
    fast_accum: bool = setting(
        True, "Let the forward FP8 matmul add up in fewer bits, as Hopper does it fastest.", when=FP8_LAYERS
    )
    kernels: Literal["torch", "triton"] = setting(
        "torch",
        "triton: own kernels around the FP8 matmul (not measured on a GPU yet); compute = auto tries both.",
        when=FP8_LAYERS,
    )
    fp8_min_features: int = setting(
        512, "Layers with a side below this are not multiplied in FP8.", ge=0, when=FP8_MATMUL
    )
    fp8_exclude: list[str] = setting([], "Module names that are held in fp8 but not multiplied in it.", when=FP8_MATMUL)


class Adapter(Section):
    """The trainable part."""

    type: Literal["lora", "dora", "lokr", "loha"] = setting(
        "lora",
        "lora; dora: LoRA with a length for each row of the weight; lokr, loha: LyCORIS' products.",
        also="kohya: network_module, lycoris_algo; SimpleTuner: lora_type",
    )
    rank: int = setting(
        16,
        "Size of the low-rank update; larger learns more and weighs more.",
        ge=1,
        le=MOST_RANK,
        also="kohya: network_dim; ai-toolkit: linear; OneTrainer: lora_rank; SimpleTuner: lora_rank",
    )
    factor: int = setting(
        8,
        "LoKr: size of the first matrix wherever it divides the layer's; smaller weighs more; 0: the root.",
        when={"adapter.type": ("lokr",)},
        ge=0,
        also="ai-toolkit: lokr_factor",
    )
    decompose_both: bool = setting(
        False,
        "LoKr: the first matrix is of low rank as well, where the rank is below half its side.",
        when={"adapter.type": ("lokr",)},
    )
    ranks: dict[str, Annotated[int, Field(ge=0, le=MOST_RANK)]] = setting(
        {},
        "Ranks of single layers or blocks, such as {'down_blocks.0' = 4, '*attn*' = 32}; 0 leaves them as they are. "
        "The first that fits a layer counts; alpha goes with it, so that all are scaled by alpha / rank.",
    )
    alpha: float = setting(
        16.0,
        "Update strength; the update is scaled by alpha / rank.",
        gt=0,
        also="kohya: network_alpha; ai-toolkit: linear_alpha; OneTrainer: lora_alpha; SimpleTuner: lora_alpha",
    )
    dropout: float = setting(
        0.0,
        "Probability of dropping an adapter input while training.",
        ge=0,
        lt=1,
        also="kohya: network_dropout; OneTrainer: dropout_probability; SimpleTuner: lora_dropout",
    )
    targets: list[str] = setting(
        [],
        "Module name endings to adapt, such as 'to_q'; empty means the family's choice.",
        also="ai-toolkit: only_if_contains; OneTrainer: layer_filter",
    )
    init_from: str = setting(
        "",
        "LoRA file to go on from, of this base, type and rank, in any layout; empty begins at the base itself.",
        also="kohya: network_weights; ai-toolkit: pretrained_lora_path; OneTrainer: lora_model_name; SimpleTuner: "
        "init_lora; diffusion-pipe: init_from_existing",
    )
    dtype: Literal["bf16", "fp32"] = setting("bf16", "Dtype of the adapter weights while training.")
    text_encoder: bool = setting(
        False,
        "Train the CLIP text encoders too, all of them: sd15, sd2, sdxl, sd3, flux, flux_kontext (not T5).",
        when={"family.text_encoder": (True,)},
        also="kohya: network_train_unet_only = false; ai-toolkit: train_text_encoder; SimpleTuner: train_text_encoder",
    )


class Folder(Section):
    """One folder of pictures: a [[dataset.folders]] table."""

    path: str = setting(
        ...,
        "Folder with images and .txt (or .caption) files beside them; searched with subfolders.",
        also="kohya: image_dir, train_data_dir, image_directory; ai-toolkit: folder_path; SimpleTuner: "
        "instance_data_dir",
    )
    repeats: int = setting(
        1,
        "How often each image is seen per epoch.",
        ge=1,
        also="kohya: num_repeats; ai-toolkit: num_repeats; diffusion-pipe: num_repeats",
    )
    trigger: str = setting(
        "",
        "Trigger word of this folder; empty means dataset.trigger.",
        also="kohya: class_tokens",
    )
    regularization: bool = setting(
        False,
        "Pictures of the class without your subject: they get no trigger word, and none is kept out for validation.",
        also="kohya: is_reg, reg_data_dir; ai-toolkit: is_reg",
    )
    weight: float = setting(
        1.0,
        "Weight of this folder's pictures in the loss.",
        gt=0,
        le=100,
        also="kohya: prior_loss_weight; ai-toolkit: loss_multiplier",
    )
    resolution: Annotated[int, Field(ge=0, le=0)] | Annotated[int, Field(ge=16, le=8192)] = setting(
        0,
        "Side of the square with this folder's training area; 0 means dataset.resolution. A folder that is named twice "
        "can be trained at two sizes.",
    )
    control: str = setting(
        "",
        "For editing models: folder with a control picture of the same name (or name_1, name_2) for each image.",
        also="kohya: control_directory; ai-toolkit: control_path",
    )
    mask: str = setting(
        "",
        "Masks, white where an image is trained, black where not: a folder with one of the same name for each, 'alpha' "
        "for the images' own transparency, or a name beside them, such as '*-masklabel'.",
        when={"objective.unmasked_weight": Except((1.0,))},
        also="kohya: conditioning_data_dir; ai-toolkit: mask_path",
    )

    @property
    def mask_folder(self) -> str:
        """The path of a folder of masks; "" where the masks are elsewhere."""
        return self.mask if names_a_folder_of_masks(self.mask) else ""


def names_a_folder_of_masks(mask: str) -> bool:
    """Whether a folder's `mask` is a path: neither "alpha" nor a name with a * for the picture's."""
    return mask not in ("", "alpha") and "*" not in mask


class Dataset(Section):
    """Pictures, captions, buckets and the cache of encoded examples."""

    folders: list[Folder] = setting([], "The picture folders.")
    resolution: Literal["auto"] | Annotated[int, Field(ge=16, le=8192)] = setting(
        "auto", "Side of the square with the training area; auto: the family's own."
    )
    buckets: bool = setting(
        True,
        "Group images by aspect ratio; false crops everything to a square.",
        also="kohya: enable_bucket; OneTrainer: aspect_ratio_bucketing",
    )
    bucket_step: Literal["auto"] | Annotated[int, Field(ge=8, le=512)] = setting(
        "auto",
        "Bucket sides are multiples of this many pixels.",
        also="kohya: bucket_reso_steps; SimpleTuner: aspect_bucket_alignment",
    )
    max_aspect: float = setting(2.0, "Widest aspect ratio of a bucket.", ge=1, le=8, when={"dataset.buckets": (True,)})
    upscale: bool = setting(
        True,
        "Enlarge images that are smaller than their bucket; false gives them smaller buckets.",
        also="kohya: bucket_no_upscale = false",
    )
    flip: bool = setting(
        False,
        "Mirror half of the samples; not for text, logos or asymmetric characters.",
        also="kohya: flip_aug; ai-toolkit: flip_x",
    )
    frames: list[int] = setting(
        [],
        "Lengths that video clips are trained at, in frames, such as [17, 33]; a clip takes the longest that fits.",
        when=CLIPS,
        also="kohya: target_frames; ai-toolkit: num_frames; diffusion-pipe: frame_buckets",
    )
    fps: Literal["auto"] | Annotated[float, Field(ge=1, le=120)] = setting(
        "auto",
        "Frames a second that clips are brought to; auto: those that the model draws.",
        when=CLIPS | {"dataset.frames": ()},
    )
    clip: Literal["head", "middle", "chunks"] = setting(
        "head",
        "Which part of a longer clip: its beginning, its middle, or as many pieces as fit.",
        when=CLIPS | {"dataset.frames": ()},
        also="kohya: frame_extraction",
    )
    control_resolution: Literal["auto"] | Annotated[int, Field(ge=32, le=8192)] = setting(
        "auto",
        "Side of the square with the area of control pictures; auto: as the model's pipeline shows them.",
        when={"family.controls": (True,)},
    )
    background: str = setting("#ffffff", "Colour under transparent images, as #rrggbb.", pattern="^#[0-9a-fA-F]{6}$")
    trigger: str = setting(
        "",
        "Trigger word, put in front of captions that lack it.",
        also="ai-toolkit: trigger_word",
    )
    missing_caption: Literal["error", "trigger", "skip"] = setting("error", "What an image without a caption means.")
    caption_dropout: float = setting(
        0.0,
        "Probability that a sample is shown without its caption.",
        ge=0,
        le=1,
        also="kohya: caption_dropout_rate; ai-toolkit: caption_dropout_rate; SimpleTuner: caption_dropout_probability",
    )
    shuffle_tags: bool = setting(
        False,
        "Shuffle comma-separated tags, differently each time.",
        also="kohya: shuffle_caption; ai-toolkit: shuffle_tokens",
    )
    tag_dropout: float = setting(
        0.0,
        "Probability that a tag is left out of its caption; never the trigger word.",
        ge=0,
        lt=1,
        also="kohya: caption_tag_dropout_rate",
    )
    wildcards: bool = setting(
        False,
        "'{red|blue}' in a caption is one of these words, drawn each time.",
        also="kohya: enable_wildcard",
    )
    keep_tokens: int = setting(
        1, "The first N tags stay in place when shuffling, and are not left out.", ge=0, when=TAGGED
    )
    tag_separator: str = setting(
        ",",
        "What separates tags.",
        min_length=1,
        when=TAGGED,
        also="kohya: caption_separator",
    )
    caption_variants: int = setting(
        8,
        "Versions of each caption held in the cache: shuffled, with tags left out, of other words.",
        ge=1,
        le=64,
        when=VARIED,
    )
    cache_dir: str = setting(
        "cache",
        "Folder of encoded images and captions, shared by all runs.",
        also="kohya: cache_directory",
    )
    max_pixels: int = setting(64_000_000, "Images with more pixels are refused.", ge=4096)

    @property
    def varies_captions(self) -> bool:
        """Whether a caption is read in `caption_variants` versions."""
        return self.shuffle_tags or self.tag_dropout > 0 or self.wildcards

    @property
    def triggers(self) -> list[str]:
        """The trigger words of all folders."""
        return [word for word in dict.fromkeys(map(self.trigger_of, range(len(self.folders)))) if word.strip()]

    def trigger_of(self, index: int) -> str:
        """The word that the captions of this folder get: its own, else the dataset's; none for regularization."""
        folder = self.folders[index]
        return "" if folder.regularization else folder.trigger or self.trigger


class Train(Section):
    """The loop."""

    steps: int = setting(
        1500,
        "Optimizer steps.",
        ge=1,
        also="kohya: max_train_steps, max_train_epochs * steps_per_epoch; OneTrainer: epochs * steps_per_epoch; "
        "SimpleTuner: max_train_steps, num_train_epochs * steps_per_epoch; diffusion-pipe: epochs * "
        "steps_per_epoch",
    )
    batch_size: int = setting(
        1,
        "Images per micro-batch, over all processes together.",
        ge=1,
        also="kohya: train_batch_size; SimpleTuner: train_batch_size; diffusion-pipe: micro_batch_size_per_gpu",
    )
    accumulate: int = setting(
        1,
        "Micro-batches per step; their gradients are summed in float32.",
        ge=1,
        also="kohya: gradient_accumulation_steps; ai-toolkit: gradient_accumulation; OneTrainer: "
        "gradient_accumulation_steps; SimpleTuner: gradient_accumulation_steps; diffusion-pipe: "
        "gradient_accumulation_steps",
    )
    max_grad_norm: float = setting(
        1.0,
        "Clip the gradient to this norm; 0 turns clipping off.",
        ge=0,
        also="OneTrainer: clip_grad_norm; diffusion-pipe: gradient_clipping",
    )
    threads: int = setting(
        0, "CPU threads for torch; 0 keeps torch's choice. Bitwise repeats need the same number.", ge=0
    )
    gradient_exchange: Literal["fp32", "fp8"] = setting(
        "fp32",
        "Between processes; fp8: a quarter of the bytes, and what rounding leaves out is sent with later steps.",
        when={"run.several_processes": (True,)},
    )
    log_every: int = setting(1, "Write a step event every so many steps.", ge=1)


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw8bit", "adamw", "lion8bit", "prodigy"] = setting(
        "adamw8bit",
        "adamw8bit, lion8bit: bitsandbytes; adamw: torch, for comparison; prodigy finds the learning rate by itself.",
        also="kohya: optimizer_type; ai-toolkit: optimizer",
    )
    lr: Literal["auto"] | Annotated[float, Field(gt=0, le=MOST_LR)] = setting(
        "auto",
        "Learning rate before lr_scale; auto: 1e-4, lion8bit 2e-5; with prodigy a factor on what it finds, auto: 1.",
        also="kohya: learning_rate, unet_lr; OneTrainer: learning_rate; SimpleTuner: learning_rate",
    )
    lr_scale: Literal["auto", "none"] | Annotated[float, Field(gt=0, le=100)] = setting(
        "auto", "Factor on the rate: auto (1.4 on an FP8 base, else 1; 1 with prodigy), none, or a number."
    )
    text_encoder_lr: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = setting(
        "auto",
        "Rate of adapter.text_encoder; lr_scale leaves it alone. auto: half of lr.",
        when={"adapter.text_encoder": (True,)} | BY_RATE,
    )
    lrs: dict[str, Annotated[float, Field(gt=0, le=100)]] = setting(
        {},
        "Factors on the denoiser's rate, of single layers or blocks, such as {'down_blocks.0' = 0.5}; the first that "
        "fits a layer counts. adapter.ranks leaves layers as they are.",
        when=BY_RATE,
    )
    loraplus_lr_ratio: float = setting(
        1.0,
        "LoRA+: factor on the rate of each LoRA's second matrix (lora_B, lora_up); 16 is its authors'.",
        gt=0,
        le=1000,
        when=BY_RATE | {"adapter.type": ("lora", "dora")},
    )
    d0: float = setting(1e-6, "Prodigy: the rate that it begins with.", gt=0, lt=1, when=PRODIGY)
    d_coef: float = setting(
        1.0, "Prodigy: factor on the rate that it finds; 0.5 or 2 to correct it.", gt=0, le=100, when=PRODIGY
    )
    growth_rate: Literal["unlimited"] | Annotated[float, Field(gt=1, le=1000)] = setting(
        "unlimited", "Prodigy: how much what it finds may grow in a step; 1.02 makes a slow beginning.", when=PRODIGY
    )
    safeguard_warmup: bool = setting(
        True,
        "Prodigy: what it finds does not depend on the schedule, so that a warm-up misleads it less.",
        when=PRODIGY,
    )
    use_bias_correction: bool = setting(
        True, "Prodigy: Adam's correction of the first moments; slower first steps.", when=PRODIGY
    )
    decouple: bool = setting(
        True,
        "Prodigy: weight decay beside the gradient, as AdamW; false adds it to the gradient.",
        when=PRODIGY | {"optimizer.weight_decay": ()},
    )
    weight_decay: float = setting(
        0.01,
        "Decoupled weight decay; with lion8bit 3 to 10 times more is usual.",
        ge=0,
        also="OneTrainer: optimizer_weight_decay; SimpleTuner: adam_weight_decay",
    )
    beta1: float = setting(
        0.9,
        "Decay of the first moment.",
        ge=0,
        lt=1,
        also="SimpleTuner: adam_beta1, optimizer_beta1",
    )
    beta2: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = setting(
        "auto",
        "Decay of the second moment; auto: 0.999, 0.99 with lion8bit (of its only moment).",
        also="SimpleTuner: adam_beta2, optimizer_beta2",
    )
    eps: float = setting(
        1e-8,
        "Added to the denominator.",
        gt=0,
        when={"optimizer.name": ("adamw8bit", "adamw", "prodigy")},
        also="SimpleTuner: adam_epsilon",
    )
    rounding: Literal["master", "stochastic", "nearest"] = setting(
        "master",
        "How bf16 adapters keep small updates: float32 masters, stochastic rounding, or not at all (nearest).",
        when={"adapter.dtype": ("bf16",)},
    )


class Schedule(Section):
    """The learning rate over the steps; a pure function of the step."""

    name: Literal["constant", "cosine", "cosine_with_restarts", "linear"] = setting(
        "constant",
        "Shape after the warm-up.",
        also="kohya: lr_scheduler; ai-toolkit: lr_scheduler; OneTrainer: learning_rate_scheduler; SimpleTuner: "
        "lr_scheduler",
    )
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = setting(
        0,
        "Warm-up: a whole number of steps, or a fraction of all steps.",
        also="kohya: lr_warmup_steps; OneTrainer: learning_rate_warmup_steps; SimpleTuner: lr_warmup_steps; "
        "diffusion-pipe: warmup_steps",
    )
    cycles: int = setting(
        3,
        "cosine_with_restarts: how often it falls; after each fall it is at the full rate again.",
        ge=1,
        le=1000,
        when={"schedule.name": ("cosine_with_restarts",)},
        also="kohya: lr_scheduler_num_cycles; OneTrainer: learning_rate_cycles",
    )
    min_lr: float = setting(
        0.0,
        "Where cosine and linear end, as a fraction of the rate.",
        ge=0,
        le=1,
        when={"schedule.name": ("cosine", "cosine_with_restarts", "linear")},
        also="kohya: lr_scheduler_min_lr_ratio",
    )


class Objective(Section):
    """What the denoiser is asked to predict, and at which noise levels."""

    prediction: Literal["auto", "epsilon", "v", "flow"] = setting(
        "auto",
        "What the base model predicts (kohya: --v_parameterization): epsilon, v or flow; auto: as its scheduler's "
        "config or its file says.",
        when=DIFFUSION,
        also="kohya: v_parameterization",
    )
    loss: Literal["mse", "huber", "smooth_l1", "pseudo_huber", "pseudo_smooth_l1"] = setting(
        "mse",
        "How an error counts: by its square; huber, smooth_l1: large ones in proportion, so that they pull less; "
        "pseudo_: with a round corner, as kohya's huber and smooth_l1.",
        also="kohya: loss_type; ai-toolkit: loss_type",
    )
    huber_delta: float = setting(
        0.1,
        "The error of a value from which huber and smooth_l1 count in proportion; noise has a deviation of 1.",
        gt=0,
        le=100,
        when=HUBER,
        also="kohya: huber_c",
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = setting(
        "constant",
        "huber_delta by the noise: the same; exponential: from huber_scale on a clean picture to huber_delta times "
        "that; snr: from 1 to huber_delta by the signal-to-noise ratio, of diffusion models.",
        when=HUBER,
    )
    huber_scale: float = setting(
        1.0,
        "What huber_schedule = 'exponential' is multiplied by.",
        gt=0,
        le=100,
        when=HUBER | {"objective.huber_schedule": ("exponential",)},
    )
    min_snr_gamma: float = setting(
        0.0,
        "Min-SNR loss weighting (Hang et al. 2023) for diffusion models; 0 is off.",
        ge=0,
        when=DIFFUSION,
        also="SimpleTuner: snr_gamma; OneTrainer: loss_weight_strength",
    )
    noise_offset: float = setting(
        0.0,
        "Diffusion models: noise that is the same all over a picture, so that very dark and bright ones are learned; "
        "0.03 to 0.1 is usual, 0 is off.",
        ge=0,
        le=1,
        when=DIFFUSION,
        also="OneTrainer: offset_noise_weight",
    )
    unmasked_weight: float = setting(
        0.1,
        "What the loss counts outside of the masks of dataset.folders: 1 as much as inside, so that they have no "
        "effect; 0 leaves what is outside to drift.",
        ge=0,
        le=1,
        when=MASKED,
    )
    timesteps: Literal["auto", "uniform", "logit_normal"] = setting(
        "auto",
        "Distribution of the noise level.",
        when=FLOW,
        also="kohya: timestep_sampling, weighting_scheme; ai-toolkit: timestep_type",
    )
    shift: Literal["auto", "scheduler"] | Annotated[float, Field(gt=0)] = setting(
        "auto",
        "Timestep shift (kohya: discrete_flow_shift). auto: usual for the family; scheduler: as the model's sampler.",
        when=FLOW,
        also="kohya: discrete_flow_shift; OneTrainer: timestep_shift; SimpleTuner: flow_schedule_shift",
    )
    t_min: float = setting(
        0.0,
        "Least noise that is trained, as a share of all noise; 0 is a clean picture.",
        ge=0,
        lt=1,
        also="kohya: min_timestep / 1000; ai-toolkit: min_denoising_steps / 1000; OneTrainer: "
        "min_noising_strength; diffusion-pipe: min_t",
    )
    t_max: float = setting(
        1.0,
        "Most noise that is trained; 1 is noise alone. Wan 2.2's low-noise expert: 0.875.",
        gt=0,
        le=1,
        also="kohya: max_timestep / 1000; ai-toolkit: max_denoising_steps / 1000; OneTrainer: "
        "max_noising_strength; diffusion-pipe: max_t",
    )
    guidance: float = setting(
        1.0,
        "Embedded guidance shown to guidance-distilled models while training.",
        ge=0,
        when={"family.guidance": (True,), "base.guidance": (True,)},
        also="kohya: guidance_scale; SimpleTuner: flux_guidance_value",
    )


class Memory(Section):
    """What is traded for memory."""

    gradient_checkpointing: bool = setting(
        True,
        "Recompute activations in the backward pass: less memory, about 40 % slower.",
        also="diffusion-pipe: activation_checkpointing",
    )
    offload: float = setting(
        0.0,
        "Share of the frozen weights that waits in main memory and is copied to the GPU for each use: for models "
        "that do not fit; slower. 1 is all.",
        ge=0,
        le=1,
        also="kohya: blocks_to_swap / num_blocks; ai-toolkit: layer_offloading; OneTrainer: "
        "layer_offload_fraction; diffusion-pipe: blocks_to_swap / num_blocks",
    )
    compile: Literal["off", "blocks"] = setting(
        "off",
        "blocks: torch.compile for the denoiser's repeated blocks; first steps take minutes.",
        also="kohya: torch_compile",
    )
    cuda_graphs: bool = setting(
        False,
        "Replay compiled blocks as CUDA graphs: less waiting for launches, more memory.",
        when={"memory.compile": ("blocks",)},
    )


class Preview(Section):
    """Images made while training, always from the same seed."""

    prompts: list[str] = setting(
        [],
        "What to draw; empty makes no previews.",
        also="kohya: sample_prompts; SimpleTuner: validation_prompt",
    )
    controls: list[str] = setting(
        [],
        "For editing models: the control picture of each prompt; a folder stands for all pictures in it.",
        when=DRAWN | {"family.controls": (True,)},
    )
    negative: str = setting(
        "",
        "Negative prompt.",
        when=DRAWN | {"family.negative": (True,)},
        also="ai-toolkit: neg",
    )
    every: int = setting(
        0,
        "Draw every so many steps; 0 draws only at the start and at the end.",
        ge=0,
        when=DRAWN,
        also="kohya: sample_every_n_steps; ai-toolkit: sample_every; OneTrainer: sample_after; SimpleTuner: "
        "validation_steps",
    )
    at_start: bool = setting(
        True,
        "Draw before the first step, to compare with.",
        when=DRAWN,
        also="kohya: sample_at_first; ai-toolkit: skip_first_sample = false",
    )
    steps: int = setting(
        20,
        "Denoising steps.",
        ge=1,
        le=500,
        when=DRAWN,
        also="ai-toolkit: sample_steps; SimpleTuner: validation_num_inference_steps",
    )
    guidance: Literal["auto"] | Annotated[float, Field(ge=0)] = setting(
        "auto",
        "Guidance scale; auto: the family's usual one.",
        when=DRAWN,
        also="ai-toolkit: guidance_scale; SimpleTuner: validation_guidance",
    )
    width: int = setting(0, "Pixels; 0 means the training resolution.", ge=0, multiple_of=16, when=DRAWN)
    height: int = setting(0, "Pixels; 0 means the training resolution.", ge=0, multiple_of=16, when=DRAWN)
    frames: int = setting(1, "Frames of each preview; 1 draws a picture, more a clip.", ge=1, when=DRAWN | CLIPS)
    seed: int = setting(
        42,
        "Seed of the first preview; the next ones count up.",
        ge=0,
        le=MAX_SEED,
        when=DRAWN,
        also="SimpleTuner: validation_seed",
    )


class Validation(Section):
    """The loss on pictures that are kept out of training: it turns up when the LoRA begins to learn them by heart."""

    every: int = setting(
        0,
        "Measure every so many steps, at the start and at the end; 0 never.",
        ge=0,
        also="kohya: validate_every_n_steps; SimpleTuner: eval_steps_interval; diffusion-pipe: eval_every_n_steps",
    )
    pictures: int = setting(
        0,
        "Pictures kept out of training and measured on, drawn from all folders by the seed.",
        ge=0,
        also="kohya: validation_split * num_images; SimpleTuner: num_eval_images",
    )


class Checkpoint(Section):
    """What is kept to go on training."""

    every: int = setting(
        250,
        "Save every so many steps.",
        ge=1,
        also="SimpleTuner: checkpointing_steps",
    )
    keep: int = setting(
        2,
        "Newest checkpoints kept; at least 2, because the newest may be the one being written.",
        ge=2,
        also="kohya: save_last_n_steps_state / save_every_n_steps; SimpleTuner: checkpoints_total_limit",
    )


class Export(Section):
    """The LoRA file."""

    every: int = setting(
        0,
        "Write the LoRA files every so many steps too, into export/step-N, to choose from; 0 only at the end.",
        ge=0,
        also="kohya: save_every_n_steps; ai-toolkit: save_every; diffusion-pipe: save_every_n_epochs * steps_per_epoch",
    )
    formats: list[Literal["auto", "diffusers", "comfy", "kohya"]] = setting(
        ["auto"],
        "Key layouts to write, a file each: kohya is read by A1111, Forge, ComfyUI and InvokeAI, comfy by ComfyUI; "
        "auto is what most programs read of this architecture.",
    )
    dtype: Literal["bf16", "fp16", "fp32"] = setting(
        "bf16",
        "Dtype in the file.",
        also="kohya: save_precision; OneTrainer: output_dtype; diffusion-pipe: save_dtype",
    )
    title: str = setting(
        "",
        "Display name in the file; empty means the job's name.",
        also="kohya: metadata_title",
    )
    author: str = setting(
        "",
        "Author in the file.",
        when=TOLD,
        also="kohya: metadata_author",
    )
    description: str = setting(
        "",
        "Description in the file.",
        when=TOLD,
        also="kohya: metadata_description",
    )
    license: str = setting(
        "",
        "Licence in the file.",
        when=TOLD,
        also="kohya: metadata_license",
    )
    metadata: Literal["public", "private", "none"] = setting(
        "public",
        "What the file tells of its training: public is all but paths; private nothing of pictures and settings; none "
        "only what programs need to load it.",
        also="kohya: no_metadata",
    )
    verify: bool = setting(True, "Load the file into a clean pipeline and compare it with the training model.")


class Job(Section):
    """The whole typed config of one training."""

    name: str = setting(
        "my-lora",
        "Name of the run folder and of the file.",
        min_length=1,
        max_length=120,
        also="kohya: output_name",
    )
    output_dir: str = setting(
        "runs",
        "Folder that the run folder is made in.",
        also="ai-toolkit: training_folder; OneTrainer: output_model_destination",
    )
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
