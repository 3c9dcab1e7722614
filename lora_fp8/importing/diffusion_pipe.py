"""diffusion-pipe: the main TOML and its dataset TOML. Facts: its examples and documentation of August 2026."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import PureWindowsPath
from typing import Any

from ..errors import Message, UserError
from ..settings import Adapter
from . import (
    adapter_settings,
    common_values,
    dataset_settings,
    memory_settings,
    model_settings,
    objective_settings,
    optimizer_settings,
    remarks,
    target_modules,
    tracker_settings,
)
from .import_draft import Draft, Folder, Tool
from .readers import read_flag, read_list, read_number, read_pair, read_positive, read_string, read_whole
from .rules import JOINT, Rule, map_idle, map_none, map_to
from .source_files import Source, flatten_tables

NO_EVAL = remarks.VALIDATION
PART_FILES = {
    "model.vae": "vae",
    "model.vae_path": "vae",
    "model.llm_path": "t5|llm",
    "model.clip_path": "clip",
    "model.text_encoder_path": "any",
    "model.t5_path": "t5",
    "model.byt5_path": "t5",
    "model.llama3_path": "llm",
}
"""Key -> kind of the part whose file it names; see `model_settings.set_part_files`."""
DENOISER_FILES = ["model.transformer_path", "model.diffusion_model", "model.checkpoint_path", "model.single_file_path"]
"""The keys that name the denoiser's file, in several versions."""
CLIP_PARTS = {"single_beginning": "head", "single_middle": "middle"}

RULES: dict[str, Rule] = {
    "output_dir": map_to("output_dir", read_string, remarks.RUN_FOLDER),
    "dataset": JOINT,
    "epochs": JOINT,
    "max_steps": JOINT,
    "micro_batch_size_per_gpu": JOINT,
    "image_micro_batch_size_per_gpu": JOINT,
    "gradient_accumulation_steps": map_to("train.accumulate", read_whole),
    "gradient_clipping": map_to("train.max_grad_norm", read_number),
    "warmup_steps": JOINT,
    "lr_scheduler": JOINT,
    "force_constant_lr": map_none(Message("schedule.name sets the schedule")),
    "pipeline_stages": map_none(remarks.WHOLE_MODEL, 1),
    "partition_method": map_idle(),
    "partition_split": map_none(remarks.WHOLE_MODEL),
    "blocks_to_swap": JOINT,
    "disable_block_swap_for_eval": map_idle(),
    "pseudo_huber_c": JOINT,
    "eval_datasets": map_none(NO_EVAL),
    **dict.fromkeys(
        ("eval_every_n_epochs", "eval_every_n_steps", "eval_every_n_examples", "eval_before_first_step")
        + ("eval_micro_batch_size_per_gpu", "image_eval_micro_batch_size_per_gpu", "eval_gradient_accumulation_steps"),
        map_idle(NO_EVAL),
    ),
    "eval_datasets.**": map_none(NO_EVAL),
    "save_every_n_epochs": JOINT,
    "save_every_n_steps": JOINT,
    "save_every_n_examples": map_none(remarks.COUNTS_STEPS),
    "checkpoint_every_n_epochs": map_none(remarks.COUNTS_STEPS),
    "checkpoint_every_n_minutes": map_none(remarks.COUNTS_STEPS),
    "activation_checkpointing": JOINT,
    "reentrant_activation_checkpointing": map_idle(),
    "upload_hf_from_epoch": map_none(remarks.UPLOAD),
    "huggingface_repo": map_none(remarks.UPLOAD),
    "save_dtype": map_to("export.dtype", common_values.FILE_DTYPE),
    "caching_batch_size": map_idle(),
    "map_num_proc": map_idle(),
    "compile": JOINT,
    "steps_per_print": map_idle(),
    "logging_steps": map_idle(),
    "video_clip_mode": JOINT,
    "x_axis_examples": map_idle(remarks.LOGGING),
    "resume_from_checkpoint": map_none(remarks.RESUMES),
    "regenerate_cache": map_idle(),
    **dict.fromkeys(("monitoring.enable_wandb", "monitoring.wandb_tracker_name", "monitoring.wandb_run_name"), JOINT),
    "monitoring.**": map_idle(remarks.LOGGING),
    "model.type": JOINT,
    "model.diffusers_path": JOINT,
    "model.checkpoint_path": JOINT,
    "model.transformer_path": JOINT,
    "model.ckpt_path": JOINT,
    "model.single_file_path": JOINT,
    **dict.fromkeys(("model.diffusion_model", "model.diffusion_model_dtype"), JOINT),
    "model.merge_adapters": JOINT,
    "model.merge_adapters.**": map_none(remarks.NOT_MERGED),
    **dict.fromkeys(PART_FILES, JOINT),
    **dict.fromkeys(("model.text_encoders", "model.text_encoders.**"), JOINT),
    "model.llama3_4bit": map_idle(),
    "model.max_llama3_sequence_length": map_none(remarks.PROMPT_LENGTH),
    "model.max_sequence_length": map_none(remarks.PROMPT_LENGTH),
    "model.dtype": JOINT,
    "model.transformer_dtype": JOINT,
    "model.timestep_sample_method": JOINT,
    "model.sigmoid_scale": JOINT,
    "model.shift": JOINT,
    "model.flux_shift": JOINT,
    "model.lumina_shift": JOINT,
    "model.guidance": map_to("objective.guidance", read_number),
    "model.bypass_guidance_embedding": map_none(remarks.GUIDANCE),
    "model.v_pred": JOINT,
    "model.min_snr_gamma": JOINT,
    "model.debiased_estimation_loss": JOINT,
    "model.llm_adapter_lr": JOINT,
    "model.unet_lr": JOINT,
    "model.text_encoder_1_lr": JOINT,
    "model.text_encoder_2_lr": JOINT,
    "model.min_t": map_to("objective.t_min", read_number),
    "model.max_t": map_to("objective.t_max", read_number),
    "model.first_frame_conditioning_p": map_none(remarks.NO_FIRST_FRAME),
    "adapter.type": JOINT,
    "adapter.rank": map_to("adapter.rank", read_whole),
    "adapter.alpha": map_none(Message("diffusion-pipe does not accept alpha; it equals the rank")),
    "adapter.dropout": map_to("adapter.dropout", read_number),
    "adapter.dtype": map_to(
        "adapter.dtype",
        common_values.make_choice_reader({"bfloat16": "bf16", "float32": "fp32"}, Message("bf16 and fp32")),
    ),
    "adapter.decompose_factor": JOINT,
    "adapter.init_from_existing": map_none(Message("set adapter.init_from to the .safetensors file in that folder")),
    "adapter.fuse_adapters": map_none(remarks.MERGE_BEFOREHAND),
    "adapter.fuse_adapters.**": map_none(remarks.MERGE_BEFOREHAND),
    "optimizer.type": JOINT,
    "optimizer.lr": JOINT,
    "optimizer.betas": JOINT,
    **dict.fromkeys((f"optimizer.{name}" for name in optimizer_settings.OF_PRODIGY), JOINT),
    "optimizer.weight_decay": map_to("optimizer.weight_decay", read_number),
    "optimizer.eps": map_to("optimizer.eps", read_number),
    "optimizer.beta3": map_none(remarks.NOT_AN_ARGUMENT),
    "optimizer.min_8bit_size": map_idle(),
    "optimizer.stabilize": map_none(remarks.NOT_STABILIZED),
    "optimizer.gradient_release": map_none(remarks.SUMMED),
    "data.resolutions": JOINT,
    "data.enable_ar_bucket": JOINT,
    "data.min_ar": JOINT,
    "data.max_ar": JOINT,
    "data.num_ar_buckets": JOINT,
    "data.ar_buckets": map_none(remarks.BUCKETS),
    "data.size_buckets": map_none(remarks.BUCKETS),
    "data.frame_buckets": JOINT,
    "data.shuffle_tags": JOINT,
    "data.cache_shuffle_num": JOINT,
    "data.cache_shuffle_delimiter": JOINT,
    "data.skip_empty_caption": JOINT,
    "data.caption_prefix": JOINT,
    "data.directory.*.path": JOINT,
    "data.directory.*.num_repeats": JOINT,
    "data.directory.*.mask_path": JOINT,
    "data.directory.*.control_path": JOINT,
    "data.directory.*.caption_prefix": JOINT,
    "data.directory.*.resolutions": JOINT,
    "data.directory.*.ar_buckets": map_none(remarks.BUCKETS),
    "data.directory.*.size_buckets": map_none(remarks.BUCKETS),
    "data.directory.*.frame_buckets": JOINT,
    "data.directory.*.min_ar": map_none(remarks.ONE_ASPECT),
    "data.directory.*.max_ar": map_none(remarks.ONE_ASPECT),
    **{
        f"data.directory.*.{name}": map_none(remarks.FOR_ALL_FOLDERS)
        for name in ("shuffle_tags", "cache_shuffle_num", "cache_shuffle_delimiter")
    },
    "data.directory.*.num_ar_buckets": map_none(remarks.BUCKET_STEP),
}

MODELS = {
    "sdxl": "sdxl",
    "flux": "flux",
    "flux2": "flux2",
    "qwen_image": "qwen_image",
    "z_image": "z_image",
    "chroma": "chroma",
    "sd3": "sd3",
    "lumina_2": "lumina2",
    "hidream": "hidream",
    "auraflow": "auraflow",
    "krea2": "krea2",
    "wan": "wan",
    "hunyuan-video": "hunyuan_video",
    "hunyuan_image": "hunyuan_image",
    "ltx-video": "ltx_video",
}


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield the settings of the main file, and those of its dataset file with the prefix `data.`."""
    data = draft.source.data
    if not isinstance(data, dict):
        raise UserError(remarks.NO_TABLE(path=draft.source.path))
    if "directory" in data:
        yield from _flatten_dataset(data)
        return
    yield from ((key, key, value) for key, value in flatten_tables(data))
    name = str(data.get("dataset", ""))
    inner = draft.refer("dataset", name) if name else None
    if isinstance(inner, dict):
        yield from _flatten_dataset(inner, PureWindowsPath(name).name)


def _flatten_dataset(data: dict[str, Any], file: str = "") -> Iterator[tuple[str, str, Any]]:
    for key, value in flatten_tables(data):
        yield (f"{file}: {key}" if file else key), f"data.{key}", value


def combine(draft: Draft) -> None:
    """Convert all settings of a job."""
    if "directory" in draft.source.data:
        draft.defaults = {"data.enable_ar_bucket": False}
        model_settings.set_family(
            draft, (), "", Message("the file describes only the images; import the main file with this file beside it")
        )
        model_settings.set_model_path(draft, "model.diffusers_path")
        _set_folders(draft)
        return
    kind = str(draft.get("model.type") or "")
    paths = [draft.get(key) for key in (*DENOISER_FILES, "model.diffusers_path", "model.ckpt_path")]
    controls = any(draft.has(key) for key in draft.find_keys("data.directory.*.control_path"))
    why = f"model.type = {kind!r}" if kind else Message("the file has no [model] type")
    model_settings.set_family(
        draft, "model.type", *model_settings.refine_kind(MODELS.get(kind, kind), why, paths, controls)
    )
    _set_path(draft)
    _set_training_adapter(draft)
    objective_settings.set_prediction(
        draft, "model.v_pred", "v" if common_values.is_on(draft.get("model.v_pred")) else ""
    )
    model_settings.set_dtype(draft, "model.dtype")
    monitored = ("monitoring.wandb_tracker_name", "monitoring.wandb_run_name")
    tracker_settings.set_tracker(draft, "monitoring.enable_wandb", "wandb", *monitored)
    dtypes = [key for key in ("model.transformer_dtype", "model.diffusion_model_dtype") if draft.has(key)]
    stored = draft.get(dtypes[0]) if dtypes else "bfloat16"
    model_settings.set_storage(draft, dtypes[:1] or ["model.transformer_dtype"], stored, "diffusion-pipe", scaled=False)
    draft.report_unmatched(["model.transformer_dtype", "model.diffusion_model_dtype"], remarks.OTHER_KEY, off=True)
    _set_adapter(draft)
    _set_folders(draft)
    _set_length_and_rate(draft)
    _set_timesteps(draft)
    objective_settings.set_min_snr(draft, "model.min_snr_gamma")
    debiased = "model.debiased_estimation_loss"
    objective_settings.set_debiased(draft, debiased, common_values.is_on(draft.get(debiased)))
    checkpointing = draft.get("activation_checkpointing")
    if checkpointing == "unsloth":
        note = remarks.RECOMPUTED
        draft.report_different("activation_checkpointing", {"memory.gradient_checkpointing": True}, note)
    else:
        draft.report_mapped("activation_checkpointing", {"memory.gradient_checkpointing": bool(checkpointing)})
    if draft.get("compile"):
        draft.report_different("compile", {"memory.compile": "blocks"}, remarks.COMPILED)
    draft.report_unmatched("compile", remarks.OFF, off=True)
    memory_settings.set_swap(draft, "blocks_to_swap")
    name = PureWindowsPath(str(draft.get("output_dir") or "")).name
    if name:
        common_values.set_name(draft, "", name)
        draft.comments["name"] = [Message("this is the last part of output_dir; diffusion-pipe names runs by the time")]


def _set_path(draft: Draft) -> None:
    keys = [*DENOISER_FILES, "model.diffusers_path", "model.ckpt_path"]
    given = [key for key in keys if draft.has(key)]
    if not given:
        model_settings.set_model_path(draft, "model.diffusers_path")
        return
    single = given[0] in DENOISER_FILES
    if single and draft.has("model.diffusers_path"):
        draft.report_mapped(
            "model.diffusers_path", {"model.components": draft.get("model.diffusers_path", read_string)}
        )
    model_settings.set_model_path(draft, given[0])
    draft.report_unmatched(given[1:], Message("{key} is the base model", key=given[0]), off=True)
    encoders = [*draft.find_keys("model.text_encoders.*.path"), *draft.find_keys("model.text_encoders.*.paths")]
    for key in encoders:
        if isinstance(draft.given[key], list) and len(draft.given[key]) == 1:
            draft.given[key] = draft.given[key][0]
    several = [key for key in encoders if isinstance(draft.given[key], list)]
    single_files = [key for key in encoders if key not in several]
    model_settings.set_part_files(draft, PART_FILES | dict.fromkeys(single_files, "any"))
    draft.report_unmatched(several, Message("set the file of each text encoder in model.files"))
    kinds = [key for key in draft.given if key.startswith("model.text_encoders.")]
    draft.report_unmatched(kinds, Message("the encoder's file shows what kind of encoder it is"), off=True)


def _set_training_adapter(draft: Draft) -> None:
    """Set model.training_adapter from an adapter that is merged into the model for training, and not saved."""
    given = draft.get("model.merge_adapters", read_list) or []
    if len(given) == 1 and isinstance(given[0], str):
        draft.given["model.merge_adapters"] = given[0]
        model_settings.set_training_adapter(draft, "model.merge_adapters")
    draft.report_unmatched("model.merge_adapters", Message("this trainer has one model.training_adapter"))


def _set_adapter(draft: Draft) -> None:
    kind = common_values.normalize_name(draft.get("adapter.type") or "")
    if kind != "lokr":
        draft.report_unmatched("adapter.decompose_factor", remarks.BELONGS_TO(key="LoKr"), off=True)
    if own := adapter_settings.find_type(kind):
        draft.report_mapped("adapter.type", {"adapter.type": own})
        rank = draft.get("adapter.rank", read_whole)
        if kind == "lokr":
            factor = draft.get("adapter.decompose_factor")
            settings = {"adapter.factor": adapter_settings.read_lokr_factor(-1 if factor is None else factor)}
            draft.report_mapped("adapter.decompose_factor", settings, remarks.MINUS_ONE)
            if rank and rank > adapter_settings.WHOLE_RANK:
                rank = adapter_settings.WHOLE_RANK
                draft.report_mapped("adapter.rank", {"adapter.rank": rank}, remarks.WHOLE_MATRICES)
        if rank:
            draft.set("adapter.alpha", float(rank), Message("diffusion-pipe forces alpha = rank"))
        target_modules.assume_layers_of_diffusion_pipe(draft)
    elif kind:
        draft.report_unmatched("adapter.type", Message("this trainer has no {kind}; a LoRA was written", kind=kind))
        draft.set("adapter.type", "lora")
        draft.add_todo("adapter.type", remarks.CHECK_RANK(kind=kind))
        rank = draft.get("adapter.rank", read_whole) or 0
        if rank > adapter_settings.WHOLE_RANK:  # a LoKr's way to say "whole matrices"
            draft.report_unmatched("adapter.rank", remarks.BELONGS_TO(key="LoKr"))
            draft.set("adapter.rank", Adapter().rank)
            draft.add_todo("adapter.rank", Message("choose a rank for the LoRA"))
    elif draft.has("model.type"):
        model_settings.set_whole_model(
            draft,
            Message(
                "the file has no [adapter], so diffusion-pipe trains the whole model; this trainer trains a LoRA "
                "instead"
            ),
        )


def _set_folders(draft: Draft) -> None:
    tables = sorted({m[0] for key in draft.given if (m := re.match(r"data\.directory\.\d+\.", key))})
    resolutions = [value for table in tables for value in _add_folders(draft, table)]
    dataset_settings.set_unmasked(draft)
    keys = ["data.caption_prefix", *draft.find_keys("data.directory.*.caption_prefix")]
    glued = [key for key in keys if not str(draft.get(key) or " ")[-1].isspace()]
    draft.report_different(glued, {}, Message("this trainer puts a space after the prefix"))
    draft.report_mapped(keys, {}, remarks.IN_EACH_FOLDER)
    draft.report_mapped("dataset", {}, remarks.READ_TOO if tables else remarks.FILE_NOT_FOUND)
    if draft.has("dataset") and not tables:
        draft.folders = [Folder("TODO")]
        draft.add_todo("dataset.folders", remarks.FOLDERS_OF(file=draft.get("dataset")))
    if any(resolutions):
        sizes = ["data.resolutions", *draft.find_keys("data.directory.*.resolutions")]
        dataset_settings.set_resolutions(draft, sizes, resolutions)
    _set_frames(draft)
    _set_buckets(draft, bool(tables))
    _set_captions(draft)


def _add_folders(draft: Draft, table: str) -> list[Any]:
    """Add a directory to the draft, once for each of its resolutions; return these, None for the general one."""
    path = draft.get(f"{table}path", read_string)
    if not path:
        return []
    repeats = draft.get(f"{table}num_repeats", read_number) or 1.0
    folder = dataset_settings.count_images(draft, Folder(path, repeats), deep=False)
    at = f"dataset.folders.{len(draft.folders)}"
    draft.report_mapped(f"{table}path", {}, remarks.SETS(setting=f"{at}.path"))
    draft.report_mapped(f"{table}num_repeats", {}, remarks.SETS(setting=f"{at}.repeats = {repeats:g}"))
    dataset_settings.set_control(draft, f"{table}control_path", folder, at)
    dataset_settings.set_mask_folder(draft, f"{table}mask_path", folder, at)
    prefix = draft.get(f"{table}caption_prefix", read_string) or draft.get("data.caption_prefix", read_string)
    if prefix:
        folder.prefix = prefix.strip()
    own = f"{table}resolutions" if draft.has(f"{table}resolutions") else "data.resolutions"
    resolutions = draft.get(own, read_list) or [None]
    if len(resolutions) > 1:
        draft.report_mapped(own, {}, remarks.ONCE_FOR_EACH)
    draft.folders += [replace(folder) for _ in resolutions]
    return resolutions


def _set_frames(draft: Draft) -> None:
    """Set dataset.frames and dataset.clip."""
    lengths = ["data.frame_buckets", *draft.find_keys("data.directory.*.frame_buckets")]
    part = str(draft.get("video_clip_mode") or "single_beginning")
    dataset_settings.set_clips(
        draft,
        lengths,
        [read_whole(length) for key in lengths if draft.has(key) for length in draft.get(key, read_list)],
        ["video_clip_mode"],
        CLIP_PARTS.get(part),
        Message("the lengths apply to every folder; a clip takes the longest that fits, as in diffusion-pipe"),
    )


def _set_buckets(draft: Draft, has_folders: bool) -> None:
    """Set dataset.buckets and dataset.max_aspect."""
    buckets = draft.get("data.enable_ar_bucket")
    if has_folders:
        draft.report_mapped("data.enable_ar_bucket", {"dataset.buckets": bool(buckets)})
    widest = [read_number(draft.given[key]) for key in ("data.max_ar",) if draft.has(key)]
    widest += [1 / max(0.01, read_number(draft.given[key])) for key in ("data.min_ar",) if draft.has(key)]
    keys = ["data.min_ar", "data.max_ar", "data.num_ar_buckets"]
    if widest and buckets:
        draft.report_different(
            keys,
            {"dataset.max_aspect": common_values.clamp("dataset.max_aspect", max(widest))},
            Message(
                "the wider of the two was written; this trainer rounds bucket sides to dataset.bucket_step and "
                "sets no number of aspect ratios"
            ),
        )
    draft.report_unmatched(keys, Message("this setting has no effect without aspect ratio buckets"), off=True)


def _set_captions(draft: Draft) -> None:
    """Set the shuffling of tags, and what to do with images that have no caption."""
    number_of = draft.get("data.cache_shuffle_num", read_whole) or 0
    shuffle = ["data.shuffle_tags", "data.cache_shuffle_num"]
    if number_of or common_values.is_on(draft.get("data.shuffle_tags")):
        settings: dict[str, Any] = {"dataset.shuffle_tags": True, "dataset.keep_tokens": 0}
        settings["dataset.caption_variants"] = common_values.clamp("dataset.caption_variants", number_of)
        draft.report_mapped(shuffle, settings)
        separator = str(draft.get("data.cache_shuffle_delimiter") or ", ").strip() or " "
        draft.report_mapped("data.cache_shuffle_delimiter", {"dataset.tag_separator": separator})
    draft.report_unmatched([*shuffle, "data.cache_shuffle_delimiter"], remarks.OFF, off=True)
    if draft.has("data.skip_empty_caption"):
        if read_flag(draft.given["data.skip_empty_caption"]):
            draft.report_mapped("data.skip_empty_caption", {"dataset.missing_caption": "skip"})
        else:
            note = Message(
                "an empty caption is an error in this trainer; dataset.missing_caption = 'skip' leaves such "
                "images out, and 'trigger' captions them with the trigger word"
            )
            draft.report_unmatched("data.skip_empty_caption", note)


def _set_length_and_rate(draft: Draft) -> None:
    batch, notes = _read_batch(draft)
    keys = ["micro_batch_size_per_gpu", "image_micro_batch_size_per_gpu"]
    notes.append(
        Message(
            "train.batch_size counts the images of all processes together; multiply it by the number of GPUs that you "
            "used"
        )
    )
    draft.report_different(keys, {"train.batch_size": batch}, remarks.join(notes))
    accumulate = read_positive(draft.get("gradient_accumulation_steps") or 1)
    per_epoch = _count_steps_per_epoch(draft, batch * accumulate)
    if draft.has("max_steps"):
        draft.report_mapped("max_steps", {"train.steps": draft.get("max_steps", read_whole)})
        draft.report_unmatched("epochs", remarks.COUNTS(key="max_steps"), off=True)
    elif draft.has("epochs"):
        dataset_settings.set_steps_from_epochs(draft, "epochs", draft.get("epochs", read_positive), per_epoch, 1)
    rate = "model.unet_lr" if draft.has("model.unet_lr") else "optimizer.lr"
    optimizer_settings.set_optimizer(draft, "optimizer.type", [rate], draft.get(rate, read_number))
    if draft.has("pseudo_huber_c"):
        ours = {"objective.loss": "pseudo_smooth_l1", "objective.huber_delta": draft.get("pseudo_huber_c", read_number)}
        draft.report_different("pseudo_huber_c", ours, remarks.TWICE)
    optimizer_settings.set_prodigy(draft, {name: f"optimizer.{name}" for name in optimizer_settings.OF_PRODIGY})
    keys = ["model.text_encoder_1_lr", "model.text_encoder_2_lr"]
    # It trains text encoders of SDXL only.
    general = draft.get("optimizer.lr", read_number) if draft.family == "sdxl" else 0
    own = {key: read_number(draft.given[key]) if draft.has(key) else general for key in keys}
    rates = {name: own[key] for name, key in zip(("CLIP-L", "CLIP-G"), keys, strict=True) if own[key]}
    why = (
        Message("diffusion-pipe trains SDXL's text encoders too, unless their learning rates are 0")
        if not draft.has(keys[0])
        else ""
    )
    left_out = [name for name in ("CLIP-L", "CLIP-G") if name not in rates]
    optimizer_settings.set_text_encoders(draft, keys, keys, rates, why, left_out)
    draft.report_unmatched(["optimizer.lr", "model.unet_lr"], remarks.RATE_OF_DENOISER(rate_key=rate), off=True)
    betas = draft.get("optimizer.betas", read_pair)
    if betas:
        draft.report_mapped("optimizer.betas", {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]})
    if draft.has("model.type"):
        optimizer_settings.set_schedule(
            draft,
            optimizer_settings.ScheduleKeys("lr_scheduler", warmup="warmup_steps"),
            warmup=draft.get("warmup_steps", read_number),
            constant_warms_up=True,
        )
    dataset_settings.set_every(
        draft,
        "checkpoint.every",
        ("save_every_n_steps", "save_every_n_epochs"),
        per_epoch,
        remarks.SAVED,
    )


def _count_steps_per_epoch(draft: Draft, samples_per_step: int) -> int | None:
    """Return the steps per epoch.

    diffusion-pipe takes each image at each resolution, as our folders do, and drops partial steps.
    """
    count = dataset_settings.count_samples(draft)
    return max(1, count // samples_per_step) if count else None


def _read_batch(draft: Draft) -> tuple[int, list[str]]:
    """Return the batch size of the largest resolution, and remarks about others."""
    value = draft.get("image_micro_batch_size_per_gpu") or draft.get("micro_batch_size_per_gpu") or 1
    if not isinstance(value, list):
        return read_positive(value), []
    return read_positive(max(read_pair(size) for size in value)[1]), [
        Message("this trainer has one batch size; that of the largest resolution was written")
    ]


def _set_timesteps(draft: Draft) -> None:
    keys = ["model.timestep_sample_method", "model.shift", "model.flux_shift", "model.lumina_shift"]
    method = draft.get("model.timestep_sample_method") or "logit_normal"
    if any(common_values.is_on(draft.get(key)) for key in keys[2:]):
        shift: float | str = "auto"
    else:
        shift = draft.get("model.shift", read_number) or 1.0
    shape = objective_settings.make_logit_normal(std=draft.get("model.sigmoid_scale", read_number))
    if method == "uniform":
        shape = {"objective.timesteps": "uniform"}
    elif "objective.logit_std" in shape:
        keys.append("model.sigmoid_scale")
    if draft.has("model.type"):
        objective_settings.set_timesteps(draft, keys, shape, shift)
    draft.report_unmatched([*keys, "model.sigmoid_scale"], remarks.OFF, off=True)


def recognise(source: Source) -> str:
    """Recognise [model] with a type and [optimizer] with one, or [[directory]]."""
    data = source.data
    if source.kind != "toml" or not isinstance(data, dict):
        return ""
    model, optimizer = data.get("model"), data.get("optimizer")
    if isinstance(model, dict) and "type" in model and isinstance(optimizer, dict) and "type" in optimizer:
        return Message("[model] and [optimizer] with a type")
    if isinstance(data.get("directory"), list):
        return "[[directory]]"
    return "micro_batch_size_per_gpu" if "micro_batch_size_per_gpu" in data else ""


TOOL = Tool(
    "diffusion-pipe",
    Message("diffusion-pipe of August 2026"),
    RULES,
    {
        "micro_batch_size_per_gpu": 1,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "activation_checkpointing": False,
        "model.timestep_sample_method": "logit_normal",
        "data.enable_ar_bucket": False,
    },
    recognise,
    flatten,
    combine,
)
