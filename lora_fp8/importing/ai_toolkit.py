"""ai-toolkit: the YAML (or JSON) of a job. Facts: ai-toolkit 0.12."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .. import families
from ..errors import Message, UserError
from ..settings import Adapter
from . import (
    adapter_settings,
    common_values,
    dataset_settings,
    kohya_previews,
    memory_settings,
    model_settings,
    objective_settings,
    optimizer_settings,
    preview_settings,
    remarks,
    target_modules,
    tracker_settings,
)
from .import_draft import Draft, Folder, Tool
from .readers import read_flag, read_list, read_number, read_pair, read_positive, read_string, read_whole
from .rules import JOINT, Rule, map_idle, map_immaterial, map_none, map_to
from .source_files import Source, flatten_tables

PROCESS = "config.process.0."
SAMPLE = f"{PROCESS}sample."
TRAIN = f"{PROCESS}train."
NO_VIDEO = dataset_settings.NO_CLIPS
NO_CONTROL = Message("this trainer reads control images from one folder: dataset.folders.N.control")
NO_LOSS = remarks.ONE_LOSS
NO_RANGE = Message(
    "this is a position in ai-toolkit's own list of noise levels; see objective.t_min and objective.t_max"
)
NO_PRESERVE = Message(
    "this trainer does not preserve what the base model draws without a prompt; dataset.class_word preserves a class"
)
NEVER_ENLARGED = Message("ai-toolkit never enlarges images; small ones get smaller buckets")
ALPHA_IS_RANK = Message("ai-toolkit trains transformers with alpha = rank, whatever linear_alpha is")
AREA = {"objective.normalize_mask": True}

SHORT: dict[str, Rule] = {
    "type": map_idle(Message("this is the kind of process")),
    "training_folder": map_to("output_dir", read_string, remarks.RUN_FOLDER),
    "sqlite_db_path": map_idle(),
    "device": map_idle(),
    "trigger_word": map_to(
        "dataset.trigger", read_string, Message("the trigger word is put in front of captions that lack it")
    ),
    "performance_log_every": map_idle(remarks.LOGGING),
    "network.type": JOINT,
    "network.linear": JOINT,
    "network.rank": JOINT,
    "network.linear_alpha": JOINT,
    "network.alpha": JOINT,
    "network.conv": JOINT,
    "network.conv_alpha": JOINT,
    "network.dropout": map_to("adapter.dropout", read_number),
    "network.lokr_full_rank": JOINT,
    "network.lokr_factor": JOINT,
    **{f"network.network_kwargs.{name}": JOINT for name in ("only_if_contains", "ignore_if_contains")},
    "network.network_kwargs.**": map_none(remarks.TARGETS),
    "network.pretrained_lora_path": map_to("adapter.init_from", read_string, remarks.START),
    "network.transformer_only": map_idle(remarks.DENOISER),
    "network.old_lokr_format": map_idle(remarks.BELONGS_TO(key="LoKr")),
    "save.dtype": map_to("export.dtype", common_values.FILE_DTYPE),
    "save.save_every": JOINT,
    "save.max_step_saves_to_keep": JOINT,
    "save.save_format": map_none(remarks.FILE_FORMAT, "safetensors", "diffusers"),
    "save.push_to_hub": map_none(remarks.UPLOAD),
    "save.hf_repo_id": map_none(remarks.UPLOAD),
    "save.hf_private": map_none(remarks.UPLOAD),
    "datasets.*.folder_path": JOINT,
    "datasets.*.dataset_path": JOINT,
    "datasets.*.num_repeats": JOINT,
    "datasets.*.resolution": JOINT,
    "datasets.*.caption_ext": JOINT,
    "datasets.*.caption_type": JOINT,
    "datasets.*.default_caption": JOINT,
    "datasets.*.caption_dropout_rate": JOINT,
    "datasets.*.shuffle_tokens": JOINT,
    "datasets.*.keep_tokens": JOINT,
    "datasets.*.flip_x": JOINT,
    "datasets.*.flip_y": map_none(Message("this trainer mirrors images only from left to right")),
    "datasets.*.buckets": JOINT,
    "datasets.*.bucket_tolerance": JOINT,
    "datasets.*.is_reg": JOINT,
    "datasets.*.network_weight": map_none(remarks.FULL_STRENGTH, 1, 1.0),
    "datasets.*.loss_multiplier": JOINT,
    "datasets.*.token_dropout_rate": JOINT,
    "datasets.*.random_triggers": map_none(Message("a folder has one trigger")),
    "datasets.*.trigger_word": JOINT,
    "datasets.*.cache_latents": map_immaterial(remarks.ALWAYS_CACHED),
    "datasets.*.cache_latents_to_disk": map_immaterial(remarks.ALWAYS_CACHED),
    "datasets.*.cache_text_embeddings": map_immaterial(remarks.ALWAYS_CACHED),
    "datasets.*.mask_path": JOINT,
    "datasets.*.mask_min_value": JOINT,
    "datasets.*.alpha_mask": JOINT,
    "datasets.*.invert_mask": map_none(Message("this trainer trains the white area of a mask; invert the masks")),
    "datasets.*.control_path": JOINT,
    "datasets.*.control_path_1": map_none(NO_CONTROL),
    "datasets.*.control_path_2": map_none(NO_CONTROL),
    "datasets.*.control_path_3": map_none(NO_CONTROL),
    "datasets.*.controls": map_none(NO_CONTROL),
    "datasets.*.num_frames": map_none(remarks.NO_SPREAD, 1),
    "datasets.*.shrink_video_to_frames": map_idle(remarks.NO_SPREAD),
    "datasets.*.fps": map_idle(NO_VIDEO),
    "datasets.*.do_i2v": map_idle(NO_VIDEO),
    "datasets.*.do_audio": map_idle(NO_VIDEO),
    "datasets.*.auto_frame_count": map_idle(NO_VIDEO),
    "datasets.*.audio_normalize": map_idle(NO_VIDEO),
    "datasets.*.audio_preserve_pitch": map_idle(NO_VIDEO),
    "datasets.*.random_scale": map_none(remarks.CENTER_CROP),
    "datasets.*.random_crop": JOINT,
    "datasets.*.scale": map_none(remarks.SCALED, 1, 1.0),
    "datasets.*.augments": map_none(remarks.NO_COLOURS),
    "datasets.*.augmentations": map_none(remarks.NO_COLOURS),
    "datasets.*.type": map_none(Message("this trainer reads folders of images with captions"), "image"),
    "datasets.*.num_workers": map_idle(),
    "datasets.*.prefetch_factor": map_idle(),
    "train.batch_size": JOINT,
    "train.steps": map_to("train.steps", read_whole),
    "train.gradient_accumulation_steps": JOINT,
    "train.gradient_accumulation": JOINT,
    "train.train_unet": map_none(remarks.DENOISER, True),
    "train.train_text_encoder": JOINT,
    "train.gradient_checkpointing": map_to("memory.gradient_checkpointing", read_flag),
    "train.noise_scheduler": map_none(remarks.NOISING, "flowmatch", "ddpm"),
    "train.optimizer": JOINT,
    "train.optimizer_params.weight_decay": map_to("optimizer.weight_decay", read_number),
    "train.optimizer_params.eps": map_to("optimizer.eps", read_number),
    "train.optimizer_params.betas": JOINT,
    **dict.fromkeys((f"train.optimizer_params.{name}" for name in optimizer_settings.OF_PRODIGY), JOINT),
    "train.optimizer_params.**": map_none(remarks.NOT_AN_ARGUMENT),
    "train.lr": JOINT,
    "train.unet_lr": JOINT,
    "train.text_encoder_lr": JOINT,
    "train.embedding_lr": map_none(remarks.NO_EMBEDDINGS),
    "train.lr_scheduler": JOINT,
    "train.lr_scheduler_params.num_cycles": JOINT,
    "train.lr_scheduler_params.num_warmup_steps": JOINT,
    "train.lr_scheduler_params.**": map_none(Message("no schedule of this trainer has this argument")),
    "train.max_grad_norm": map_to("train.max_grad_norm", read_number),
    "train.dtype": JOINT,
    "train.min_snr_gamma": JOINT,
    "train.snr_gamma": JOINT,
    "train.timestep_type": JOINT,
    "train.linear_timesteps": JOINT,
    "train.linear_timesteps2": JOINT,
    "train.content_or_style": map_none(remarks.WHOLE_RANGE, "balanced"),
    "train.content_or_style_reg": map_none(remarks.WHOLE_RANGE, "balanced"),
    "train.min_denoising_steps": map_none(NO_RANGE),
    "train.max_denoising_steps": map_none(NO_RANGE, 1000, 999),
    "train.loss_type": map_none(objective_settings.ONE_LOSS, "mse"),
    **dict.fromkeys(("train.ema_config.use_ema", "train.ema_config.ema_decay"), JOINT),
    "train.noise_offset": JOINT,
    "train.reg_weight": JOINT,
    "train.skip_first_sample": JOINT,
    "train.force_first_sample": JOINT,
    "train.disable_sampling": JOINT,
    "train.cache_text_embeddings": map_immaterial(remarks.ALWAYS_CACHED),
    "train.unload_text_encoder": map_immaterial(remarks.TEXT_FREED),
    "train.bypass_guidance_embedding": map_none(remarks.GUIDANCE),
    "train.xformers": map_immaterial(remarks.ATTENTION),
    "train.sdp": map_immaterial(remarks.ATTENTION),
    "train.attention_backend": map_immaterial(remarks.ATTENTION),
    "train.switch_boundary_every": map_idle(NO_VIDEO),
    "train.do_differential_guidance": map_none(NO_LOSS),
    "train.differential_guidance_scale": map_idle(remarks.BELONGS_TO(key="do_differential_guidance")),
    "train.do_guidance_loss": map_none(NO_LOSS),
    "train.diff_output_preservation": JOINT,
    "train.diff_output_preservation_multiplier": JOINT,
    "train.diff_output_preservation_class": JOINT,
    "train.blank_prompt_preservation": map_none(NO_PRESERVE),
    "train.blank_prompt_preservation_multiplier": map_idle(remarks.BELONGS_TO(key="blank_prompt_preservation")),
    "train.inverted_mask_prior": map_none(remarks.NO_MASK),
    "train.force_consistent_noise": map_none(objective_settings.NO_NOISE),
    "train.start_step": map_none(remarks.RESUMES),
    "train.merge_network_on_save": map_none(Message("this trainer never changes the base model")),
    "train.compile": JOINT,
    "model.name_or_path": JOINT,
    "model.arch": JOINT,
    "model.is_flux": JOINT,
    "model.is_xl": JOINT,
    "model.is_v2": JOINT,
    "model.is_v3": JOINT,
    "model.is_lumina2": JOINT,
    "model.is_v_pred": JOINT,
    "model.quantize": JOINT,
    "model.qtype": JOINT,
    "model.quantize_te": map_idle(remarks.TEXT_FREED),
    "model.qtype_te": map_idle(remarks.TEXT_FREED),
    "model.quantize_kwargs.**": map_none(remarks.LAYER_STORAGE),
    "model.low_vram": map_idle(),
    "model.dtype": map_idle(remarks.COUNTS(key="train.dtype")),
    "model.vae_path": JOINT,
    "model.te_name_or_path": map_none(remarks.OWN_ENCODERS),
    "model.assistant_lora_path": JOINT,
    "model.inference_lora_path": map_none(remarks.NOT_MERGED),
    "model.lora_path": map_none(remarks.NOT_MERGED),
    "model.layer_offloading": JOINT,
    "model.layer_offloading_transformer_percent": JOINT,
    "model.layer_offloading_text_encoder_percent": map_idle(remarks.BELONGS_TO(key="layer_offloading")),
    "model.compile": JOINT,
    "model.use_flux_cfg": map_none(Message("the model gets guidance as one number")),
    **dict.fromkeys(("model.model_kwargs", "model.model_kwargs.**"), map_none(remarks.NOT_HERE)),
    "sample.sampler": map_none(remarks.NO_SAMPLER, "flowmatch", "ddpm"),
    "sample.sample_every": JOINT,
    "sample.sample_start_step": map_idle(),
    "sample.prompts": JOINT,
    **{f"sample.samples.*.{name}": JOINT for name in ("prompt", "neg", "width", "height", "seed")},
    **{f"sample.samples.*.{name}": JOINT for name in ("guidance_scale", "sample_steps", "num_frames")},
    **{f"sample.samples.*.{name}": JOINT for name in ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")},
    "sample.samples.*.**": map_none(Message("this trainer has one value for all previews")),
    "sample.width": JOINT,
    "sample.height": JOINT,
    "sample.neg": JOINT,
    "sample.seed": JOINT,
    "sample.walk_seed": JOINT,
    "sample.guidance_scale": JOINT,
    "sample.sample_steps": JOINT,
    "sample.guidance_rescale": map_none(remarks.NO_RESCALE),
    "sample.num_frames": JOINT,
    "sample.fps": map_idle(NO_VIDEO),
    "sample.format": map_idle(remarks.PREVIEWS_PNG),
    "sample.ext": map_idle(remarks.PREVIEWS_PNG),
    "sample.network_multiplier": map_none(remarks.PREVIEW_STRENGTH, 1, 1.0),
    **dict.fromkeys(("logging.use_wandb", "logging.project_name", "logging.run_name"), JOINT),
    "logging.**": map_idle(remarks.LOGGING),
    "datasets.*.square_crop": map_none(Message("dataset.buckets applies to all folders")),
    "datasets.*.prior_reg": map_none(NO_PRESERVE),
    "datasets.*.inpaint_path": map_none(NO_CONTROL),
    "datasets.*.full_size_control_images": map_none(NO_CONTROL),
    "datasets.*.standardize_images": map_none(remarks.NOT_HERE),
    "datasets.*.use_short_captions": map_none(remarks.ONE_CAPTION),
    "datasets.*.replacements": map_none(Message("this trainer reads captions as they are")),
    **{
        f"train.{name}": map_none(objective_settings.NO_NOISE, 1, 1.0)
        for name in ("noise_multiplier", "target_noise_multiplier")
    },
    **{
        f"train.{name}": map_none(objective_settings.NO_NOISE)
        for name in ("random_noise_multiplier", "random_noise_shift")
    },
    **{
        f"train.{name}": map_none(objective_settings.NO_NOISE)
        for name in ("optimal_noise_pairing_samples", "blended_blur_noise")
    },
    **{
        f"train.{name}": map_none(remarks.NOT_HERE, 1, 1.0)
        for name in ("img_multiplier", "latent_multiplier", "noisy_latent_multiplier")
    },
    **{
        f"train.{name}": map_none(NO_LOSS) for name in ("do_cfg", "do_random_cfg", "contrastive_loss", "t0_loss_target")
    },
    **{
        f"train.{name}": map_none(remarks.NOT_HERE)
        for name in ("weight_jitter", "free_u", "train_refiner", "train_turbo")
    },
    **{
        f"train.ema_config.{name}": map_idle(remarks.BELONGS_TO(key="use_ema"))
        for name in ("use_feedback", "param_multiplier")
    },
    "train.short_and_long_captions": map_none(remarks.ONE_CAPTION),
    "train.inverted_mask_prior_multiplier": map_idle(remarks.BELONGS_TO(key="inverted_mask_prior")),
    "train.num_train_timesteps": map_none(remarks.NOISING, 1000),
    **{
        f"model.{name}": map_none(Message("this trainer does not support this architecture"), False)
        for name in ("is_ssd", "is_vega", "is_pixart")
    },
    "model.accuracy_recovery_adapter": map_none(remarks.NOT_MERGED),
    "model.refiner_name_or_path": map_none(Message("this trainer does not train refiners")),
    "model.split_model_over_gpus": map_none(remarks.WHOLE_MODEL),
    "sample.cache_prompts": map_idle(),
}
RULES: dict[str, Rule] = {
    "job": map_idle(Message("this is the kind of job")),
    "config.name": JOINT,
    "meta.**": map_none(remarks.TITLES),
    **{PROCESS.replace(".0.", ".*.") + key: rule for key, rule in SHORT.items()},
}

CONTROL_IMAGES = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
PROMPT_FLAGS = {"n": "negative", "w": "width", "h": "height", "d": "seed", "seed": "seed", "s": "steps"}
PROMPT_FLAGS |= {"steps": "steps", "l": "guidance", "cfg": "guidance", "num_frames": "frames"}
PROMPT_FLAGS |= dict.fromkeys(CONTROL_IMAGES, "controls")
"""Flags that may follow the text of a prompt -> our names."""
SAMPLE_FIELDS = {
    "width": "width",
    "height": "height",
    "neg": "negative",
    "seed": "seed",
    "guidance_scale": "guidance",
    "sample_steps": "steps",
    "num_frames": "frames",
}
"""Keys under `sample` that apply to all previews -> our names."""
SAMPLE_NAMES = SAMPLE_FIELDS | {"prompts": "prompts", "walk_seed": "seed"}
ARCHITECTURES = {
    "sd15": "sd15",
    "sd1": "sd15",
    "sd2": "sd2",
    "sdxl": "sdxl",
    "sd3": "sd3",
    "flux": "flux",
    "fluxkontext": "flux_kontext",
    "flux2": "flux2",
    "flux2klein4b": "flux2_klein",
    "flux2klein9b": "flux2_klein",
    "qwenimage": "qwen_image",
    "qwenimage2512": "qwen_image",
    "qwenimageedit": "qwen_image_edit",
    **dict.fromkeys(("qwenimageeditplus", "qwenimageeditplus2509"), "qwen_image_edit_plus"),
    "zimage": "z_image",
    "zimageturbo": "z_image",
    "zimagedeturbo": "z_image",
    "chroma": "chroma",
    "lumina2": "lumina2",
    "krea2": "krea2",
    "ernieimage": "ernie_image",
    "hidream": "hidream",
    "wan21": "wan",
    "wan2214b": "wan",
    "wan225b": "wan22_5b",
    "ltx2": "ltx2",
}


OTHER_JOBS = {
    "generate": remarks.DRAWS,
    "extract": Message("these settings extract a LoRA from two models (`lora-fp8 extract` does that)"),
    "mod": remarks.CHANGES_A_FILE,
}
OTHER_PROCESSES = {
    **dict.fromkeys(
        ("slider", "ultimate_slider_trainer", "concept_slider"), Message("these settings train a slider from prompts")
    ),
    **dict.fromkeys(
        ("textual_inversion_trainer", "image_reference_slider_trainer"),
        Message("these settings train no LoRA on images"),
    ),
    "to_folder": remarks.DRAWS,
    "rescale_lora": remarks.CHANGES_A_FILE,
}
"""Jobs and processes that do not train a LoRA on images -> the reason to refuse them."""


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield the job's keys. A second process is an error, since one of our files is one job."""
    data = draft.source.data
    processes = (
        data["config"].get("process") if isinstance(data, dict) and isinstance(data.get("config"), dict) else None
    )
    if not isinstance(processes, list) or len(processes) != 1 or not isinstance(processes[0], dict):
        raise UserError(
            Message(
                "{path}: expected one process under config. Split the file into one file per process",
                path=draft.source.path,
            )
        )

    kind = str(processes[0].get("type", ""))
    if what := OTHER_JOBS.get(str(data.get("job", ""))) or OTHER_PROCESSES.get(kind):
        model_settings.refuse(draft, what)
    if processes[0].get("adapter") and not processes[0].get("network"):
        model_settings.refuse(draft, Message("these settings train an adapter (IP-Adapter, Redux, ControlNet)"))
    yield from ((key.removeprefix(PROCESS), key, value) for key, value in flatten_tables(data))


def combine(draft: Draft) -> None:
    """Convert all settings of a job."""
    common_values.set_name(draft, "config.name")
    _set_model(draft)
    model_settings.set_dtype(draft, f"{PROCESS}train.dtype")
    quantize, kind = f"{PROCESS}model.quantize", f"{PROCESS}model.qtype"
    if common_values.is_on(draft.get(quantize)):
        # The name of an accuracy-recovery adapter follows a bar.
        name, _, recovery = str(draft.get(kind) or "qfloat8").partition("|")
        model_settings.set_storage(draft, [quantize, kind], name, "ai-toolkit")
        if recovery:
            draft.notes.append(
                Message(
                    "qtype names an accuracy recovery adapter, which this trainer does not use: {file}", file=recovery
                )
            )
    else:
        model_settings.set_storage(draft, [quantize], "bf16", "ai-toolkit")
    draft.report_unmatched(kind, Message("the base model is not quantized"), off=True)
    _set_network(draft)
    _set_folders(draft)
    _set_training(draft)
    _set_previews(draft)
    names = (f"{PROCESS}logging.{name}" for name in ("project_name", "run_name"))
    tracker_settings.set_tracker(draft, f"{PROCESS}logging.use_wandb", "wandb", *names)


def _set_model(draft: Draft) -> None:
    def make_key(name: str) -> str:
        return f"{PROCESS}model.{name}"

    kind, why = (
        ARCHITECTURES.get(common_values.normalize_name(str(draft.get(make_key("arch")) or "").partition(":")[0]), ""),
        "",
    )
    if kind:
        why = f"arch = {draft.get(make_key('arch'))!r}"
    for name, family in (("is_flux", "flux"), ("is_xl", "sdxl"), ("is_v2", "sd2"), ("is_v3", "sd3")):
        if not kind and common_values.is_on(draft.get(make_key(name))):
            kind, why = family, remarks.IS_ON(name=name)
    if not kind and common_values.is_on(draft.get(make_key("is_lumina2"))):
        kind, why = "lumina2", remarks.IS_ON(name="is_lumina2")
    if not kind and not draft.has(make_key("arch")):
        kind, why = "sd15", Message("the file has neither arch nor is_..., so ai-toolkit takes SD 1.5")
    kind, why = model_settings.refine_kind(kind, why, [draft.get(make_key("name_or_path"))])
    keys = [make_key(name) for name in ("arch", "is_flux", "is_xl", "is_v2", "is_v3", "is_lumina2")]
    model_settings.set_family(
        draft,
        [key_of for key_of in keys if draft.has(key_of) and draft.given[key_of]],
        kind or common_values.normalize_name(draft.get(make_key("arch"))),
        why or f"arch = {draft.get(make_key('arch'))!r}",
    )
    draft.report_unmatched(keys, remarks.OTHER_ARCHITECTURE, off=True)
    objective_settings.set_prediction(
        draft, make_key("is_v_pred"), "v" if common_values.is_on(draft.get(make_key("is_v_pred"))) else ""
    )
    model_settings.set_model_path(draft, make_key("name_or_path"))
    model_settings.set_part_files(draft, {make_key("vae_path"): "vae"})
    model_settings.set_training_adapter(draft, make_key("assistant_lora_path"))


NO_LAYERS = ("ff_i.gate",)
"""Parts of names, as its example for HiDream has them, of modules without a linear layer."""


def _set_network(draft: Draft) -> None:
    key = f"{PROCESS}network.type"
    if not any(given_key.startswith(f"{PROCESS}network.") for given_key in draft.given):
        model_settings.set_whole_model(
            draft,
            Message(
                "the file has no network, so ai-toolkit trains the whole model; this trainer trains a LoRA instead"
            ),
        )
    kind = common_values.normalize_name(draft.get(key) or "lora")
    adapter_settings.set_type(draft, key, kind)
    convolutions = [f"{PROCESS}network.{name}" for name in ("conv", "conv_alpha")]
    if draft.family and not _is_unet(draft):  # its page writes them for every model
        draft.report_unmatched(convolutions, Message("the blocks of this model have no convolutions"), off=True)
    draft.report_unmatched(convolutions, remarks.NO_CONV)
    _set_lokr(draft, kind)
    _set_rank(draft, kind)
    keys = [f"{PROCESS}network.network_kwargs.{name}" for name in ("only_if_contains", "ignore_if_contains")]
    only, without = ([read_string(part) for part in draft.get(key, read_list) or []] for key in keys)
    without = [part for part in without if part not in NO_LAYERS]
    target_modules.assume_tools_layers(draft)
    target_modules.report_fused(draft)
    if only or without:
        rank = draft.settings.get("adapter.rank", Adapter().rank)
        is_exact = draft.family in target_modules.BLOCKS_OF_DIFFUSERS
        adapter_settings.set_filter(draft, keys, only, without, rank, is_exact)


def _is_unet(draft: Draft) -> bool:
    """Return True if the denoiser is a UNet, in which ai-toolkit makes kohya's kind of LoRA."""
    return draft.family in families.list_families() and families.get(draft.family).denoiser_class.startswith("UNet")


def _set_rank(draft: Draft, kind: str) -> None:
    """Set rank and alpha; of a transformer, ai-toolkit makes PEFT's LoRA, whose alpha equals the rank."""
    is_peft = kind != "lokr" and draft.family != "" and not _is_unet(draft)
    for ours, names, read in (
        ("adapter.rank", ("network.rank", "network.linear"), read_whole),
        ("adapter.alpha", ("network.linear_alpha", "network.alpha"), read_number),
    ):
        keys = [PROCESS + name for name in names]
        used = next((candidate for candidate in keys if draft.has(candidate)), keys[-1])
        rank = draft.settings.get("adapter.rank")
        if ours == "adapter.alpha" and is_peft and rank:
            draft.report_mapped(keys, {ours: float(rank)}, ALPHA_IS_RANK)
            draft.set(ours, float(rank), ALPHA_IS_RANK)
            continue
        if draft.get(used) is not None and used not in draft.done:
            draft.report_mapped(used, {ours: read(draft.get(used))})
        draft.report_unmatched(keys, remarks.COUNTS(key=used.rsplit(".", 1)[-1]), off=True)


def _set_lokr(draft: Draft, kind: str) -> None:
    """Set the factor of a LoKr, and its rank if whole matrices are trained; `kind` is the network's type."""
    factor, full = f"{PROCESS}network.lokr_factor", f"{PROCESS}network.lokr_full_rank"
    if kind != "lokr":
        draft.report_unmatched([factor, full], remarks.BELONGS_TO(key="LoKr"), off=True)
        return
    given = draft.get(factor)
    draft.report_mapped(
        factor,
        {"adapter.factor": adapter_settings.read_lokr_factor(-1 if given is None else given)},
        remarks.MINUS_ONE,
    )
    if common_values.is_on(draft.get(full)):
        ranks = [f"{PROCESS}network.rank", f"{PROCESS}network.linear"]
        draft.report_mapped([full, *ranks], {"adapter.rank": adapter_settings.WHOLE_RANK}, remarks.WHOLE_MATRICES)
    draft.report_unmatched(full, remarks.OFF, off=True)


def _set_mask(draft: Draft, table: str, folder: Folder, at: str) -> None:
    alpha, path = f"{table}alpha_mask", f"{table}mask_path"
    if common_values.is_on(draft.get(alpha)):
        folder.mask = "alpha"
        draft.report_mapped(
            alpha, AREA, remarks.join([remarks.SETS(setting=f"{at}.mask = 'alpha'"), remarks.MASK_AREA])
        )
        draft.report_unmatched(path, remarks.COUNTS(key="alpha_mask"), off=True)
    elif draft.get(path, read_string):
        folder.mask = dataset_settings.as_mask_folder(draft.get(path, read_string))
        draft.report_mapped(path, AREA, remarks.join([remarks.SETS(setting=f"{at}.mask"), remarks.MASK_AREA]))
    draft.report_unmatched(alpha, remarks.OFF, off=True)


def _set_unmasked_weight(draft: Draft, tables: list[str]) -> None:
    """Set objective.unmasked_weight from the folders with masks; ai-toolkit ignores the area outside by default."""
    keys = [f"{table}mask_min_value" for table in tables]
    if any(folder.mask for folder in draft.folders):
        masked = [key for key, table in zip(keys, tables, strict=True) if _has_masks(draft, table)]
        dataset_settings.set_shared(
            draft, masked, [draft.get(key) or 0.0 for key in masked], "objective.unmasked_weight", read_number
        )
    draft.report_unmatched(keys, Message("there are no masks"), off=True)


def _set_preservation(draft: Draft) -> None:
    """Set dataset.class_word, which ai-toolkit calls differential output preservation."""
    on, word, weight = (f"{TRAIN}diff_output_preservation{end}" for end in ("", "_class", "_multiplier"))
    if (
        common_values.is_on(draft.get(on))
        and draft.get(word, read_string)
        and draft.get(f"{PROCESS}trigger_word", read_string)
    ):
        draft.report_mapped([on, word], {"dataset.class_word": draft.get(word, read_string)})
        if (multiplier := draft.get(weight, read_number)) is not None:
            draft.report_mapped(weight, {"objective.prior_for_class": float(multiplier)})
    elif common_values.is_on(draft.get(on)):
        draft.report_unmatched(
            on, Message("this needs both a class and a trigger_word, and the file lacks one of them")
        )
    draft.report_unmatched([on, word, weight], remarks.BELONGS_TO(key="diff_output_preservation"), off=True)


def _has_masks(draft: Draft, table: str) -> bool:
    return common_values.is_on(draft.get(f"{table}alpha_mask")) or draft.has(f"{table}mask_path")


def _set_folders(draft: Draft) -> None:
    tables = sorted(
        {m[0] for key in draft.given if (m := re.match(re.escape(PROCESS) + r"datasets\.\d+\.", key))},
        key=lambda table: int(table.split(".")[-2]),
    )
    indices = [_add_folders(draft, table) for table in tables]
    draft.report_unmatched(draft.find_keys(f"{PROCESS}datasets.*.folder_path"), remarks.EMPTY, off=True)
    _set_unmasked_weight(draft, tables)
    _set_preservation(draft)
    dataset_settings.balance_regularization(draft)
    dataset_settings.weigh_regularization(draft, f"{PROCESS}train.reg_weight")
    for table, own in zip(tables, indices, strict=True):
        for i in own:
            dataset_settings.weigh(draft, f"{table}loss_multiplier", draft.folders[i], f"dataset.folders.{own[0]}")
    _set_sides(draft, [(f"{table}resolution", own) for table, own in zip(tables, indices, strict=True)])
    _set_shared(draft, tables)
    for key in [caption_key for table in tables for caption_key in (f"{table}caption_ext", f"{table}caption_type")]:
        if str(draft.get(key) or "txt").lstrip(".").lower() in ("txt", "caption"):
            draft.report_mapped(key, {}, remarks.CAPTIONS_READ)
        else:
            draft.report_unmatched(key, remarks.RENAME_CAPTIONS)
            draft.todo.append(remarks.CAPTION_SUFFIX(suffix=f".{draft.get(key)}"))


def _add_folders(draft: Draft, table: str) -> range:
    """Add a dataset's folder to the draft, once for each resolution; return the indices of what was added."""
    name = f"{table}folder_path" if draft.has(f"{table}folder_path") else f"{table}dataset_path"
    path = draft.get(name, read_string)
    if not path:
        return range(0)
    folder = Folder(path, read_positive(draft.get(f"{table}num_repeats") or 1), draft.get(f"{table}trigger_word") or "")
    dataset_settings.count_images(draft, folder, deep=True)
    first = len(draft.folders)
    at = f"dataset.folders.{first}"
    draft.report_mapped(name, {}, remarks.SETS(setting=f"{at}.path"))
    draft.report_mapped(f"{table}num_repeats", {}, remarks.SETS(setting=f"{at}.repeats = {folder.repeats}"))
    draft.report_mapped(f"{table}trigger_word", {}, remarks.SETS(setting=f"{at}.trigger"))
    dataset_settings.set_control(draft, f"{table}control_path", folder, at)
    _set_mask(draft, table, folder, at)
    caption = draft.get(f"{table}default_caption", read_string)
    if common_values.is_on(draft.get(f"{table}is_reg")):
        folder.regularization, folder.trigger = True, ""
        draft.report_different(f"{table}is_reg", {}, remarks.SHOWN_ALIKE)
        draft.report_unmatched(f"{table}default_caption", Message("each of these images needs a caption file"))
    draft.report_unmatched(f"{table}is_reg", remarks.OFF, off=True)
    if caption and not folder.regularization:
        draft.report_different(f"{table}default_caption", {}, dataset_settings.caption_by_trigger(folder, caption))
    sides = sorted({read_whole(side) for side in draft.get(f"{table}resolution", read_list) or []})
    if len(sides) > 1:
        draft.report_mapped(f"{table}resolution", {}, remarks.ONCE_FOR_EACH)
        draft.folders += [replace(folder, resolution=side) for side in sides]
    else:
        draft.folders.append(folder)
    return range(first, len(draft.folders))


def _set_shared(draft: Draft, tables: list[str]) -> None:
    """Set the settings that have one value for all folders: dropout, flips, buckets and the shuffling of tags."""
    for name, setting, read in (
        ("caption_dropout_rate", "dataset.caption_dropout", read_number),
        ("shuffle_tokens", "dataset.shuffle_tags", read_flag),
        ("token_dropout_rate", "dataset.tag_dropout", read_number),
        ("flip_x", "dataset.flip", read_flag),
        ("buckets", "dataset.buckets", read_flag),
    ):
        dataset_settings.set_shared(draft, *draft.collect(name, tables), setting, read)
    keys, values = draft.collect("random_crop", tables)
    if any(map(read_flag, filter(None, values))):
        dataset_settings.set_shared(draft, keys, values, "dataset.random_crop", read_flag, remarks.CACHED_VARIANTS)
    draft.report_unmatched(keys, remarks.OFF, off=True)
    dataset_settings.set_bucket_step(draft, *draft.collect("bucket_tolerance", tables))
    dataset_settings.keep_aspects(draft, "buckets")
    if draft.settings.get("dataset.buckets") is not False:
        draft.assume("dataset.upscale", False, "buckets", NEVER_ENLARGED)
    keys, values = draft.collect("keep_tokens", tables)
    if draft.settings.get("dataset.shuffle_tags") or draft.settings.get("dataset.tag_dropout"):
        dataset_settings.set_shared(
            draft, keys, [0 if value is None else value for value in values], "dataset.keep_tokens", read_whole
        )
    draft.report_unmatched(keys, remarks.UNUSED_WITHOUT(key="shuffle_tokens"), off=True)


def _set_sides(draft: Draft, folders: list[tuple[str, range]]) -> None:
    """Set dataset.resolution to the largest, and that of folders with another one; ai-toolkit's default is 512.

    Args:
        draft: the import.
        folders: each dataset's key, and the indices of its folders; a dataset with several resolutions has one folder
            for each, whose resolution is set already.
    """
    largest = max([0, *(folder.resolution for folder in draft.folders)])
    single = [(key, own) for key, own in folders if own and key not in draft.done]
    sides = [read_whole((draft.get(key, read_list) or [512])[0]) for key, _ in single]
    top = max([largest, *sides])
    for (key, own), side in zip(single, sides, strict=True):
        draft.folders[own[0]].resolution = side if side != top else 0
        if not draft.has(key):
            draft.report_default(key.removeprefix(PROCESS), side, f"dataset.folders.{own[0]}.resolution = {side}")
    if top:
        draft.set(
            "dataset.resolution",
            top,
            Message("this is the largest resolution of the datasets; previews use it unless they set another"),
        )
    note = remarks.LARGEST if len({largest or top, *sides}) > 1 else ""
    draft.report_mapped([key for key, _ in single], {"dataset.resolution": top} if single else {}, note)


def _set_training(draft: Draft) -> None:
    _set_batch(draft)
    _set_optimizer(draft)
    warmup = f"{TRAIN}lr_scheduler_params.num_warmup_steps"
    optimizer_settings.set_schedule(
        draft,
        optimizer_settings.ScheduleKeys(
            f"{TRAIN}lr_scheduler", warmup=warmup, cycles=f"{TRAIN}lr_scheduler_params.num_cycles"
        ),
        warmup=draft.get(warmup, read_number),
    )
    gammas = [f"{TRAIN}min_snr_gamma", f"{TRAIN}snr_gamma"]
    for key in gammas:
        if draft.has(key):
            objective_settings.set_min_snr(draft, key)
    draft.report_unmatched(gammas, remarks.OFF, off=True)
    objective_settings.set_noise_offset(draft, f"{TRAIN}noise_offset")
    _set_timesteps(draft)
    ema = f"{TRAIN}ema_config."
    chosen = common_values.is_on(draft.get(f"{ema}use_ema"))
    optimizer_settings.set_ema(draft, f"{ema}use_ema", f"{ema}ema_decay", chosen=chosen, usual=0.999)
    for key in (f"{TRAIN}compile", f"{PROCESS}model.compile"):
        if common_values.is_on(draft.get(key)):
            draft.report_different(key, {"memory.compile": "blocks"}, remarks.COMPILED)
        draft.report_unmatched(key, remarks.OFF, off=True)
    offload = [f"{PROCESS}model.layer_offloading", f"{PROCESS}model.layer_offloading_transformer_percent"]
    share = draft.get(offload[1], read_number) if draft.has(offload[1]) else 1.0
    note: str = Message(
        "ai-toolkit offloads a random share of the layers; this trainer offloads that share of the frozen weights"
    )
    memory_settings.set_offload(draft, offload, share if common_values.is_on(draft.get(offload[0])) else 0.0, note)
    dataset_settings.set_every(draft, "checkpoint.every", (f"{PROCESS}save.save_every", ""), None, remarks.SAVED)
    keep = draft.get(f"{PROCESS}save.max_step_saves_to_keep", read_whole)
    if keep:
        ours = common_values.clamp("checkpoint.keep", keep)
        note = Message("this trainer counts checkpoints; the final LoRA file is always written")
        if ours > keep:
            note = remarks.AT_LEAST(least=ours)
        draft.report_different(f"{PROCESS}save.max_step_saves_to_keep", {"checkpoint.keep": ours}, note)


def _set_batch(draft: Draft) -> None:
    """Set train.batch_size and train.accumulate."""
    batch = read_positive(draft.get(f"{TRAIN}batch_size") or 1)
    draft.report_mapped(f"{TRAIN}batch_size", {"train.batch_size": batch})
    keys = [f"{TRAIN}gradient_accumulation_steps", f"{TRAIN}gradient_accumulation"]
    used = keys[0] if draft.has(keys[0]) and read_whole(draft.given[keys[0]]) > 1 else keys[1]
    accumulate = read_whole(draft.get(used) or draft.get(keys[0]) or 1)
    draft.report_mapped(keys, {"train.accumulate": accumulate})


def _set_optimizer(draft: Draft) -> None:
    """Set the optimizer, its learning rates, betas and eps, and the text encoders."""
    general, denoiser, encoder = f"{TRAIN}lr", f"{TRAIN}unet_lr", f"{TRAIN}text_encoder_lr"
    rate = denoiser if draft.has(denoiser) else general
    optimizer_settings.set_optimizer(draft, f"{TRAIN}optimizer", [rate], draft.get(rate, read_number), least=0.1)
    optimizer_settings.set_prodigy(
        draft, {name: f"{TRAIN}optimizer_params.{name}" for name in optimizer_settings.OF_PRODIGY}
    )
    trains_encoder = common_values.is_on(draft.get(f"{TRAIN}train_text_encoder"))
    own = encoder if draft.has(encoder) else general
    rates = {"CLIP": draft.get(own, read_number)} if trains_encoder else {}
    optimizer_settings.set_text_encoders(draft, [f"{TRAIN}train_text_encoder"], [encoder], rates)
    draft.report_unmatched([general, denoiser], remarks.RATE_OF_DENOISER(rate_key="unet_lr"), off=True)
    name = str(draft.get(f"{TRAIN}optimizer")).lower()
    if not draft.has(f"{TRAIN}optimizer_params.eps") and ("adam" in name or "prodigy" in name):
        draft.set("optimizer.eps", 1e-6, remarks.TOOLS_DEFAULT(tool="ai-toolkit"))
        draft.report_default("train.optimizer_params.eps", 1e-6, "optimizer.eps = 1e-06")
    betas = draft.get(f"{TRAIN}optimizer_params.betas", read_pair)
    if betas:
        draft.report_mapped(
            f"{TRAIN}optimizer_params.betas", {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}
        )


def _set_timesteps(draft: Draft) -> None:
    keys = [f"{PROCESS}train.{name}" for name in ("timestep_type", "linear_timesteps", "linear_timesteps2")]
    kind = str(draft.get(keys[0]) or "sigmoid")
    if any(common_values.is_on(draft.get(key)) for key in keys[1:]):
        objective_settings.set_timesteps(draft, keys, "uniform", 1.0, remarks.UNIFORM, exact=False)
    elif kind == "sigmoid":
        objective_settings.set_timesteps(draft, keys[:1], "logit_normal", 1.0)
    elif kind == "linear":
        objective_settings.set_timesteps(draft, keys[:1], "uniform", 1.0)
    elif kind == "weighted":
        objective_settings.set_timesteps(draft, keys[:1], "uniform", 1.0, remarks.UNIFORM, exact=False)
    elif kind.endswith("shift"):
        note = Message("this trainer draws timesteps uniformly and shifts them as the model's own scheduler does")
        objective_settings.set_timesteps(draft, keys[:1], "uniform", "auto", note, exact=False)
    else:
        objective_settings.set_timesteps(
            draft, keys[:1], "logit_normal", 1.0, remarks.LOGIT_NORMAL(method=repr(kind)), exact=False
        )
        draft.add_todo("objective.timesteps", remarks.CHOOSE_ANOTHER(name=repr(kind)))
    draft.report_unmatched(keys, remarks.OFF, off=True)


def _set_previews(draft: Draft) -> None:
    off_switch = f"{PROCESS}train.disable_sampling"
    starts = [f"{PROCESS}train.skip_first_sample", f"{PROCESS}train.force_first_sample"]
    if common_values.is_on(draft.get(off_switch)):
        draft.report_mapped(off_switch, {}, remarks.NO_PROMPTS)
        draft.report_unmatched([key for key in draft.given if key.startswith(SAMPLE)], remarks.PREVIEWS_OFF, off=True)
        draft.report_unmatched(starts, remarks.OFF, off=True)
        return
    prompts, unknown_flags = _read_preview_prompts(draft)
    pictures = _with_common_settings(draft, prompts)
    keys = [key for key in draft.given if key.startswith(SAMPLE) and draft.tool.find_rule(key) is JOINT]
    if pictures:
        has_trigger = draft.get(f"{PROCESS}trigger_word") or "[trigger]" not in str(prompts)
        notes: list[str] = (
            []
            if has_trigger
            else [Message("the prompts have [trigger], but the file has no trigger_word to replace it")]
        )
        notes += kohya_previews.name_unknown_flags(unknown_flags)
        dataset_settings.set_every(draft, "preview.every", (f"{SAMPLE}sample_every", ""), None)
        named = {key: _find_preview_setting(key) for key in keys if key != f"{SAMPLE}sample_every"}
        preview_settings.set_previews(draft, named, pictures, remarks.join(notes))
    else:
        draft.report_unmatched(keys, remarks.NOT_PROMPTED, off=True)
    if pictures and common_values.is_on(draft.get(starts[0])):
        draft.report_mapped(starts[0], {"preview.at_start": False})
    draft.report_unmatched([*starts, off_switch], remarks.OFF, off=True)


def _read_preview_prompts(draft: Draft) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a table for each prompt, with the settings of its own, and the flags of prompts that are unknown."""
    lines = draft.get(f"{SAMPLE}prompts", read_list) or []
    parsed = [kohya_previews.parse_prompt(str(line), PROMPT_FLAGS) for line in lines]
    prompts = [picture | {"where": f"sample.prompts.{number}"} for number, (picture, _) in enumerate(parsed)]
    unknown_flags = [flag for _, flags in parsed for flag in flags]
    start = len(f"{SAMPLE}samples.")
    for i in sorted({int(key[start:].split(".")[0]) for key in draft.find_keys(f"{SAMPLE}samples.*.prompt")}):
        names = {"prompt": "prompt", **SAMPLE_FIELDS}
        own = {ours: draft.get(f"{SAMPLE}samples.{i}.{name}") for name, ours in names.items()}
        images = [draft.get(f"{SAMPLE}samples.{i}.{name}") for name in CONTROL_IMAGES]
        own["controls"] = [image for image in images if image]
        own |= {"where": f"sample.samples.{i}", "flags": {ours: name for name, ours in names.items()}}
        if own["prompt"]:
            prompts.append({name: value for name, value in own.items() if value not in (None, "", [])})
    return prompts, unknown_flags


def _with_common_settings(draft: Draft, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompts with the settings that all of them share; [trigger] becomes the trigger word."""
    trigger = str(draft.get(f"{PROCESS}trigger_word") or "")
    common = {ours: draft.get(f"{SAMPLE}{name}") for name, ours in SAMPLE_FIELDS.items()}
    common = {name: value for name, value in common.items() if value is not False}
    seed = common.get("seed")
    pictures: list[dict[str, Any]] = []
    for i, prompt in enumerate(prompts):
        walks = seed is not None and common_values.is_on(draft.get(f"{SAMPLE}walk_seed"))
        picture = common | ({"seed": draft.get(f"{SAMPLE}seed", read_whole) + i} if walks else {}) | prompt
        pictures.append(picture | {"prompt": str(picture["prompt"]).replace("[trigger]", trigger)})
    return pictures


def _find_preview_setting(key: str) -> str:
    """Return the name in [preview] of the setting that one of the tool's keys under `sample` holds."""
    if key.removeprefix(SAMPLE) in SAMPLE_NAMES:
        return SAMPLE_NAMES[key.removeprefix(SAMPLE)]
    last = key.rsplit(".", 1)[-1]
    return "controls" if last in CONTROL_IMAGES else "prompts" if last == "prompt" else SAMPLE_FIELDS.get(last, last)


def recognise(source: Source) -> str:
    """Recognise a file by its config with a list of processes."""
    data = source.data
    if source.kind not in ("yaml", "json") or not isinstance(data, dict):
        return ""
    inner = data.get("config")
    return "config.process" if isinstance(inner, dict) and isinstance(inner.get("process"), list) else ""


TOOL = Tool(
    "ai-toolkit",
    "ai-toolkit 0.12",
    RULES,
    {
        f"{PROCESS}network.linear_alpha": 1.0,
        f"{PROCESS}train.lr": 1e-6,
        f"{PROCESS}train.steps": 1000,
        f"{PROCESS}train.optimizer": "adamw",
        f"{PROCESS}train.lr_scheduler": "constant",
        f"{PROCESS}train.batch_size": 1,
        f"{PROCESS}train.timestep_type": "sigmoid",
        f"{PROCESS}model.quantize": False,
    },
    recognise,
    flatten,
    combine,
    prefix=PROCESS,
)
