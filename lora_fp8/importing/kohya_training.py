"""kohya's training settings: model, network, precision, length, learning rate, timesteps and compilation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PureWindowsPath
from typing import Any

from ..errors import Message
from . import (
    adapter_settings,
    common_values,
    dataset_settings,
    kohya_blocks,
    kohya_convolutions,
    model_settings,
    musubi_patterns,
    objective_settings,
    optimizer_settings,
    remarks,
    target_modules,
)
from .import_draft import Draft
from .kohya_data import collect_values, list_subsets
from .kohya_table import NO_CONV, NO_DROPOUT, NO_LYCORIS, NO_PART, NO_RATIO
from .readers import Unfit, is_off, read_list, read_number, read_positive, read_string, read_whole

SCRIPTS = {
    "train_network.py": "sd15",
    "sdxl_train_network.py": "sdxl",
    "flux_train_network.py": "flux",
    "sd3_train_network.py": "sd3",
    "lumina_train_network.py": "lumina2",
    "hunyuan_image_train_network.py": "hunyuan_image",
    "anima_train_network.py": "anima",
}

WHOLE_MODEL = {
    "train_db.py": "sd15",
    "fine_tune.py": "sd15",
    "sdxl_train.py": "sdxl",
    "flux_train.py": "flux",
    "sd3_train.py": "sd3",
    "lumina_train.py": "lumina2",
    "anima_train.py": "anima",
    "hunyuan_image_train.py": "hunyuan_image",
}
"""Scripts that train the whole model."""
OTHER_JOBS = {
    "textual_inversion": remarks.EMBEDDING,
    "control_?net": remarks.CONTROLNET,
    "leco": Message("these settings train a slider from prompts (LECO)"),
}
"""Parts of the names of scripts that cannot be converted -> what these scripts train."""
MODULES = {"lora_flux": "flux", "oft_flux": "flux", "lora_sd3": "sd3", "lora_lumina": "lumina2"} | {
    "lora_hunyuan_image": "hunyuan_image",
    "lora_anima": "anima",
}

TRAIN_TYPES = {
    "sdlora": "sd15",
    "sdxllora": "sdxl",
    "fluxlora": "flux",
    "chromalora": "chroma",
    "sd3lora": "sd3",
    "lumina2lora": "lumina2",
    "luminalora": "lumina2",
    "animalora": "anima",
}


def _detect_kind(draft: Draft) -> tuple[str, str, str]:
    """Return the architecture, what shows it, and the key that does, if there is one."""
    if draft.get("model_type") == "chroma":
        return "chroma", "model_type = 'chroma'", "model_type"
    if draft.get("model_train_type"):
        name = draft.get("model_train_type", read_string)
        kind = TRAIN_TYPES.get(re.sub("finetune|dreambooth", "lora", common_values.normalize_name(name)), "")
        why = (
            f"model_train_type = {name!r}"
            if kind
            else Message("{name} is not a kind of LoRA training that this trainer knows", name=repr(name))
        )
        return kind, why, "model_train_type"
    module = str(draft.get("network_module") or "").split(".")[-1]
    if module in MODULES:
        return MODULES[module], f"network_module = {module!r}", ""
    for key, kind in (("flux1_checkbox", "flux"), ("flux_checkbox", "flux"), ("sd3_checkbox", "sd3"), ("sdxl", "sdxl")):
        if common_values.is_on(draft.get(key)):
            return kind, remarks.IS_ON(name=key), key
    v2 = common_values.is_on(draft.get("v2"))
    script = draft.source.script
    if script in WHOLE_MODEL and not (v2 and WHOLE_MODEL[script] == "sd15"):
        return WHOLE_MODEL[script], script, ""
    if script in SCRIPTS and not (v2 and SCRIPTS[script] == "sd15"):
        return SCRIPTS[script], script, ""
    if v2:
        return "sd2", remarks.IS_ON(name="v2"), "v2"
    if draft.has("t5xxl") and draft.has("ae"):
        flux = draft.has("clip_l")
        if flux:
            return "flux", Message("t5xxl, ae and clip_l belong to FLUX"), ""
        return "chroma", Message("the file has t5xxl and ae, but no clip_l"), ""
    if draft.has("sdxl"):
        return "sd15", Message("sdxl, v2 and the other architectures are off"), "sdxl"
    return "", remarks.BY_SCRIPT(tool="sd-scripts"), ""


def set_model(draft: Draft) -> None:
    """Set model.family and model.path."""
    kind, why, key = _detect_kind(draft)
    path = str(draft.get("pretrained_model_name_or_path") or "")
    kind, why = model_settings.refine_kind(kind, why, [path])
    named = model_settings.find_family_by_name(path)
    if not kind and named and not draft.family:
        model_settings.set_family(
            draft, (), named, Message("the architecture was read from the name of the base model")
        )
        draft.add_todo(
            "model.family",
            Message(
                "{family} was read from the name {file}; check it",
                family=draft.family,
                file=repr(PureWindowsPath(path).name),
            ),
        )
    else:
        model_settings.set_family(draft, key or (), kind, why)
    keys = ["model_train_type", "model_type", "flux1_checkbox", "flux_checkbox", "sd3_checkbox", "sdxl", "v2"]
    draft.report_unmatched(
        keys, Message("this setting is for another architecture, or another setting names it"), off=True
    )
    model_settings.set_model_path(draft, "pretrained_model_name_or_path")
    model_settings.set_part_files(draft, PART_FILES)


PART_FILES = {
    "vae": "vae",
    "ae": "vae",
    "clip_l": "clip_l",
    "clip_g": "clip_g",
    "t5xxl": "t5",
    "gemma2": "llm",
    "qwen3": "llm",
    "text_encoder": "any",
    "byt5": "t5",
}
"""Key -> kind of the part whose file it names; see `model_settings.set_part_files`."""


def find_other_job(script: str) -> str:
    """Return what a script trains that is neither a LoRA nor the whole model; "" for any other script."""
    return next((what for part, what in OTHER_JOBS.items() if re.search(part, script)), "")


def set_network(draft: Draft) -> None:
    """Set adapter.type and the settings that depend on it."""
    module = str(draft.get("network_module") or "")
    given = _read_network_arguments(draft)
    given.pop("verbose", None)  # it only prints names
    page_type = common_values.normalize_name(draft.get("LoRA_type") or "")
    kind = page_type.removeprefix("kohya").removeprefix("lycoris")
    lycoris = _uses_lycoris(draft)
    algorithm = common_values.normalize_name(draft.get("lycoris_algo") or given.pop("algo", "") or kind)
    algorithm = algorithm if algorithm not in ("", "standard", "flux1", "sd3", "locon", "lora") else "lora"
    other = module.split(".")[-1]
    if not lycoris and other in ("dylora", "oft", "oft_flux"):
        algorithm = other
    if not lycoris and "lorafa" in (common_values.normalize_name(other), algorithm):
        algorithm = "lora"
        draft.set("adapter.freeze_a", True, Message("sd-scripts' lora_fa trains only the second matrix"))
    # kohya_ss's page stores dora_wd for every type of LoRA, and uses it with LyCORIS only.
    paged = common_values.is_on(draft.get("dora_wd")) and (lycoris or draft.tool.name != "kohya_ss")
    decomposed = str(given.get("dora_wd", "")).lower() == "true" or paged
    if algorithm == "lora" or not decomposed:  # in LoKr and LoHa, weight decomposition has no counterpart
        given.pop("dora_wd", None)
    if algorithm == "lora" and decomposed:
        algorithm = "dora"
    naming = ["network_module", "LoRA_type", "lycoris_algo", *(["dora_wd"] if paged and algorithm == "dora" else [])]
    own_type = adapter_settings.set_type(draft, naming, algorithm)
    draft.set("adapter.type", own_type)
    if algorithm == "lokr":
        _set_lokr(draft, given)
    if own_type == "oft":
        _set_oft(draft)
    if lycoris and given.pop("rs_lora", "").lower() == "true":
        draft.set("adapter.rank_stabilized", True)
    _set_dropout(draft, given, own_type, lycoris)
    own_network = algorithm == "lora" and not lycoris
    kohya_blocks.set_blocks(draft, given, plain=own_network)
    kohya_blocks.set_choice(draft, given, plain=own_network)
    kohya_blocks.set_loraplus(draft, given, plain=own_network)
    if draft.tool.name == "musubi-tuner":
        musubi_patterns.set_patterns(draft, given)
    plain_page = not lycoris and kind in ("", "standard", "flux1", "sd3")
    if algorithm in ("lora", "dora", "loha", "lokr"):
        paged = not plain_page or draft.tool.name == "sd-scripts"
        kohya_convolutions.set_convolutions(draft, given, lycoris, paged)
    if own_network:
        target_modules.assume_tools_layers(draft)
        split = common_values.is_on(draft.get("split_qkv"))
        if draft.family in target_modules.FUSED_IN_SD_SCRIPTS:  # others know no such argument
            split = given.pop("split_qkv", "").lower() == "true" or split
        target_modules.report_fused(draft, split)
    elif lycoris:
        _set_lycoris_layers(draft, given)
    _report_arguments(draft, given)
    _report_page_keys(draft, plain_page)


def _set_lycoris_layers(draft: Draft, given: dict[str, str]) -> None:
    """Set adapter.targets where a preset of LyCORIS adapts whole blocks of a transformer."""
    preset = kohya_convolutions.find_preset(draft, given)
    if draft.family not in target_modules.FUSED_IN_SD_SCRIPTS or preset not in kohya_convolutions.BLOCK_PRESETS:
        return
    target_modules.assume_tools_layers(draft)
    target_modules.report_fused(draft)
    note = Message("this preset adapts every linear layer of the blocks")
    draft.report_mapped(["LyCORIS_preset", *kohya_blocks.pop_arguments(given, ["preset"])], {}, note)


def _uses_lycoris(draft: Draft) -> bool:
    """Return True if the network is LyCORIS', by its module or by the page's type of LoRA."""
    names = (draft.get("network_module"), draft.get("LoRA_type"))
    return any("lycoris" in common_values.normalize_name(name or "") for name in names)


ARGUMENTS = ("network_args", "network_args_custom")
"""Keys that hold the network's arguments: the trainers', and that of lora-scripts' page."""


def _read_network_arguments(draft: Draft, keys: Iterable[str] = ARGUMENTS) -> dict[str, str]:
    """Return the network's arguments in these keys by name."""
    arguments = [argument for key in keys for argument in draft.get(key, _split_words) or []]
    return dict(str(argument).partition("=")[::2] for argument in arguments)


def _split_words(value: Any) -> list[Any]:
    """Return a list, or the words of a line."""
    return value.split() if isinstance(value, str) else read_list(value)


BY_FAMILY = {
    *("block_dims", "block_alphas", *musubi_patterns.NAMES),
    *(*kohya_convolutions.KEYS, *kohya_blocks.RATES, *kohya_blocks.CHOICES),
}
"""Arguments of the network whose meaning depends on the blocks of the architecture."""


def _report_arguments(draft: Draft, left: dict[str, str]) -> None:
    """Report the network's arguments; `left` are those that no setting was made from."""
    for key in ARGUMENTS:
        own = [name for name in _read_network_arguments(draft, [key]) if name in left]
        parts = [f"{name}={left[name]}" for name in own]
        reasons = remarks.join([_explain_argument(name) for name in own])
        waits = not draft.family and any(name in BY_FAMILY for name in own)
        if own and key in draft.done:  # settings were made from its other arguments
            draft.report_unmatched_parts(key, parts, remarks.NEEDS_FAMILY if waits else reasons)
            draft.waiting += parts if waits else []
        elif waits:
            draft.wait(key)
        elif own:
            draft.report_unmatched(key, Message("{key}: {line}", key=", ".join(parts), line=reasons))
        else:
            draft.report_mapped(key, {}, Message("[adapter] says the same as these arguments"))


PAGE_KEYS: tuple[str, ...]
PAGE_KEYS = ("conv_dim", "conv_alpha", "factor", "lokr_factor", "decompose_both", "use_tucker", "use_cp", "use_scalar")
PAGE_KEYS += ("rescaled", "constrain", "bypass_mode", "full_matrix", "train_norm", "rank_dropout_scale", "dora_wd")
PAGE_KEYS += ("LyCORIS_preset", "dropout", "loraplus_lr_ratio", "loraplus_unet_lr_ratio")
PAGE_KEYS += ("loraplus_text_encoder_lr_ratio",)
"""Keys of the settings pages, which store them for every type of LoRA."""


def _report_page_keys(draft: Draft, plain: bool) -> None:
    """Report the page's keys that no setting was made from; `plain`: the page's type of LoRA uses none of them."""
    for key in PAGE_KEYS:
        used = draft.has(key) and not is_off(draft.given[key])
        if key.startswith("loraplus"):
            draft.report_unmatched(key, NO_RATIO, off=not used)
        elif key in ("conv_dim", "conv_alpha"):
            # The page stores them for every type of LoRA; only LoCon and LyCORIS use them.
            page = plain and draft.tool.name != "sd-scripts"
            draft.report_unmatched(key, remarks.OF_ANOTHER_KIND if page else NO_CONV, off=page or not used)
        else:
            draft.report_unmatched(key, remarks.OF_ANOTHER_KIND if plain else NO_LYCORIS, off=plain or not used)


def _explain_argument(name: str) -> str:
    """Return why an argument of the network has no counterpart."""
    if name.startswith("conv"):
        return NO_CONV
    if name.startswith("loraplus"):
        return NO_RATIO
    if name.endswith("dropout"):
        return NO_DROPOUT
    return NO_LYCORIS if name in ("factor", "preset", "decompose_both", "use_tucker", "train_norm") else NO_PART


def _set_lokr(draft: Draft, given: dict[str, str]) -> None:
    """Set what belongs to LoKr alone, and remove it from the network's arguments."""
    keys = [key for key in ("lokr_factor", "factor") if draft.has(key)]
    factor = given.pop("factor", None) or (draft.get(keys[0]) if keys else -1)
    draft.report_mapped(keys, {"adapter.factor": adapter_settings.read_lokr_factor(factor)}, remarks.MINUS_ONE)
    both = given.pop("decompose_both", "").lower() == "true" or common_values.is_on(draft.get("decompose_both"))
    draft.report_mapped("decompose_both", {"adapter.decompose_both": both})
    full = given.pop("full_matrix", "").lower() == "true" or common_values.is_on(draft.get("full_matrix"))
    rank = draft.get("network_dim", read_whole)
    if full or (rank or 0) > adapter_settings.WHOLE_RANK:
        settings = {"adapter.rank": adapter_settings.choose_lokr_rank(rank or 1, full)}
        draft.report_mapped(["network_dim", "full_matrix"], settings, remarks.WHOLE_MATRICES)


def _set_oft(draft: Draft) -> None:
    """Set the block size of OFT, which LyCORIS calls its rank; its alpha has no effect in LyCORIS either."""
    draft.report_mapped("network_dim", {"adapter.block_size": max(draft.get("network_dim", read_whole) or 4, 2)})
    draft.report_unmatched("network_alpha", Message("OFT has no alpha"), off=True)


def _set_dropout(draft: Draft, given: dict[str, str], kind: str, lycoris: bool) -> None:
    """Set dropout of ranks and modules from the network's arguments or the page's keys, and remove the arguments."""
    for name in ("rank_dropout", "module_dropout"):
        try:
            share = read_number(given[name] or 0.0) if name in given else draft.get(name, read_number) or 0.0
        except Unfit:
            continue  # `_report_arguments` reports it
        given.pop(name, None)
        if share and name == "rank_dropout" and lycoris and kind in ("lora", "dora"):
            draft.report_different(name, {f"adapter.{name}": share}, ROWS_THERE)
            draft.comments.setdefault(f"adapter.{name}", []).append(ROWS_THERE)
        elif share:
            draft.report_mapped(name, {f"adapter.{name}": share})
        draft.report_unmatched(name, remarks.OFF, off=True)
    scaled = given.pop("rank_dropout_scale", "").lower() == "true" or common_values.is_on(
        draft.get("rank_dropout_scale")
    )
    if scaled and kind in ("lokr", "loha") and "adapter.rank_dropout" in draft.settings:
        draft.report_mapped("rank_dropout_scale", {"adapter.rank_dropout_scale": True})


ROWS_THERE = Message(
    "LyCORIS drops rows of the update; this trainer drops ranks of each sample, as sd-scripts' own LoRA does"
)


def set_precision(draft: Draft) -> None:
    """Set model.dtype and quantize.storage."""
    model_settings.set_dtype(draft, "mixed_precision")
    if not draft.get("mixed_precision"):
        draft.notes.append(
            Message(
                "the file has no mixed_precision, so the other trainer computes in float32; this trainer "
                "computes in bf16 (model.dtype)"
            )
        )
    scaled = common_values.is_on(draft.get("fp8_scaled"))
    cast = [key for key in ("fp8_base", "fp8_base_unet") if common_values.is_on(draft.get(key))]
    if scaled:
        draft.report_mapped(
            ["fp8_scaled", *cast],
            {"quantize.storage": "fp8", "quantize.scale": "1x64"},
            Message(
                "each 64 weights of a row share a scale, as in the other trainer. This trainer stores modulation "
                "layers in int8 (quantize.modulation); scale = 'auto', one per row, takes less memory and is "
                "nearly as exact"
            ),
        )
    elif cast:
        draft.report_different(
            cast,
            {"quantize.storage": "fp8"},
            remarks.CAST_WITHOUT_SCALE(tool="kohya"),
        )
    else:
        model_settings.set_storage(draft, (), "bf16", "kohya")
        draft.comments["quantize.storage"] = [
            Message("the other trainer does not quantize the base model either; 'fp8' would halve its memory")
        ]
    draft.report_unmatched(["fp8_base", "fp8_base_unet", "fp8_scaled"], remarks.OFF, off=True)


def set_length_and_rate(draft: Draft) -> None:
    """Set steps, batch size, learning rate, schedule and how often files are saved."""
    batch, processes = _set_batch(draft)
    accumulate = read_positive(draft.get("gradient_accumulation_steps") or 1)
    per_epoch = dataset_settings.count_steps_per_epoch(draft, batch, accumulate, processes)
    _set_steps(draft, per_epoch, batch)
    _set_optimizer(draft)
    _set_schedule(draft)
    dataset_settings.set_every(
        draft, "checkpoint.every", ("save_every_n_steps", "save_every_n_epochs"), per_epoch, remarks.SAVED
    )
    preview = ("sample_every_n_steps", "sample_every_n_epochs")
    dataset_settings.set_every(draft, "preview.every", preview, per_epoch, epochs_count=True)


def _set_batch(draft: Draft) -> tuple[int, int]:
    """Set train.batch_size; return the largest batch size of the folders, and the number of processes."""
    keys, inner = collect_values(draft, "batch_size", list_subsets(draft))
    outer = draft.get("train_batch_size")
    if all(inner):
        draft.report_unmatched("train_batch_size", Message("the dataset's batch_size takes precedence"), off=True)
    keys += ["train_batch_size", "num_processes"]
    sizes = {read_positive(value or outer or 1) for value in inner}
    batch, processes = max(sizes), read_positive(draft.get("num_processes") or 1)
    note = remarks.BATCH_OF_ALL(batch=batch, processes=processes) if processes > 1 else ""
    if len(sizes) > 1:
        note = Message("this trainer has one batch size; the largest of {sizes} was written", sizes=sorted(sizes))
    (draft.report_different if note else draft.report_mapped)(keys, {"train.batch_size": batch * processes}, note)
    return batch, processes


def _set_steps(draft: Draft, per_epoch: int | None, batch: int) -> None:
    """Set train.steps from epochs or steps; kohya's page has a key of its own for epochs, `epoch`."""
    epochs, steps = read_whole(draft.get("max_train_epochs") or 0), read_whole(draft.get("max_train_steps") or 0)
    page_epochs = draft.get("epoch")
    if epochs <= 0 and not draft.has("max_train_steps") and page_epochs:
        dataset_settings.set_steps_from_epochs(draft, "epoch", read_whole(page_epochs), per_epoch, batch)
    elif epochs > 0:
        dataset_settings.set_steps_from_epochs(draft, "max_train_epochs", epochs, per_epoch, batch)
        draft.report_unmatched("max_train_steps", remarks.COUNTS(key="max_train_epochs"), off=True)
    elif steps > 0:
        draft.report_mapped("max_train_steps", {"train.steps": steps})
    elif page_epochs:
        dataset_settings.set_steps_from_epochs(draft, "epoch", read_whole(page_epochs), per_epoch, batch)
    draft.report_unmatched(["epoch", "max_train_epochs", "max_train_steps"], remarks.OTHER_KEY, off=True)


def _set_optimizer(draft: Draft) -> None:
    """Set the optimizer with its arguments, its learning rate, and the text encoders."""
    rate_key = "unet_lr" if draft.has("unet_lr") and read_number(draft.given["unet_lr"]) > 0 else "learning_rate"
    rate = draft.get(rate_key, read_number)
    name_key = "optimizer_type"
    if not draft.has("optimizer_type"):
        for key, name in (("use_8bit_adam", "AdamW8bit"), ("use_lion_optimizer", "Lion")):
            if common_values.is_on(draft.get(key)):
                draft.given[key], name_key = name, key
    optimizer_settings.set_optimizer(draft, name_key, [rate_key], rate)
    draft.report_unmatched(["use_8bit_adam", "use_lion_optimizer"], remarks.OFF, off=True)
    if draft.tool.name != "musubi-tuner":
        _set_text_encoders(draft)
    draft.report_unmatched(["learning_rate", "unet_lr"], remarks.RATE_OF_DENOISER(rate_key=rate_key), off=True)
    for key in ("optimizer_args", "optimizer_args_custom"):
        if draft.has(key):
            optimizer_settings.set_optimizer_arguments(draft, key, draft.given[key])
        draft.report_unmatched(key, remarks.EMPTY, off=True)


def _set_schedule(draft: Draft) -> None:
    """Set the schedule, with a warm-up in steps or, on kohya's page, in percent."""
    warmup_key, warmup, note = "lr_warmup_steps", draft.get("lr_warmup_steps", read_number), ""
    if not warmup and draft.has("lr_warmup"):
        warmup_key, percent = "lr_warmup", read_number(draft.given["lr_warmup"])
        warmup, note = percent / 100, Message("this is {percent} % of all steps", percent=f"{percent:g}")
    for key in ("lr_warmup_steps", "lr_warmup"):
        if key != warmup_key:
            draft.report_unmatched(key, remarks.COUNTS(key=warmup_key), off=True)
    cycles = "lr_restart_cycles" if draft.has("lr_restart_cycles") else "lr_scheduler_num_cycles"
    optimizer_settings.set_schedule(
        draft,
        optimizer_settings.ScheduleKeys(
            "lr_scheduler",
            warmup=warmup_key,
            cycles=cycles,
            power="lr_scheduler_power",
            decay="lr_decay_steps",
            floor="lr_scheduler_min_lr_ratio",
        ),
        warmup=warmup,
        warmup_note=note,
        floor=draft.get("lr_scheduler_min_lr_ratio", read_number),
    )
    draft.report_unmatched(["lr_scheduler_num_cycles", "lr_restart_cycles"], remarks.OTHER_KEY, off=True)


ONLY_ATTENTION = Message(
    "LyCORIS' attn-only leaves the feed-forward layers of text encoders out; this trainer adapts both kinds"
)


def _set_text_encoders(draft: Draft) -> None:
    """Set the text encoders: kohya trains the CLIPs, at learning_rate, unless the file says otherwise."""
    keys = ["network_train_unet_only"]
    off = any(common_values.is_on(draft.get(key)) for key in ("network_train_unet_only", "cache_text_encoder_outputs"))
    preset = kohya_convolutions.find_preset(draft, _read_network_arguments(draft)) if _uses_lycoris(draft) else ""
    off = off or preset.startswith("unet-")
    given = (
        [read_number(rate) for rate in read_list(draft.given["text_encoder_lr"])]
        if draft.has("text_encoder_lr")
        else []
    )
    general = draft.get("learning_rate", read_number)
    names = ("CLIP-L", "CLIP-G") if model_settings.count_trained_text(draft.family) == 2 else ("CLIP",)
    by_encoder = given or ([general] if general else [])
    rates = {name: by_encoder[min(i, len(by_encoder) - 1)] for i, name in enumerate(names) if by_encoder}
    left_out = [name for name, rate in rates.items() if not rate]
    rates = {} if off else {name: rate for name, rate in rates.items() if rate}
    why = Message(
        "sd-scripts trains the text encoders too, unless their outputs are cached or network_train_unet_only is set"
    )
    optimizer_settings.set_text_encoders(draft, keys, ["text_encoder_lr"], rates, why, left_out)
    if draft.settings.get("adapter.text_encoder"):
        if preset == "attn-only":
            draft.add_difference("preset", ONLY_ATTENTION)
        cached = ["cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"]
        draft.report_mapped(cached, {}, Message("neither trainer caches captions while text encoders are trained"))


def set_noise(draft: Draft) -> None:
    """Set timesteps, their weights, and the guidance during training."""
    objective_settings.set_min_snr(draft, "min_snr_gamma")
    objective_settings.set_prediction(
        draft, "v_parameterization", "v" if common_values.is_on(draft.get("v_parameterization")) else ""
    )
    _set_offset(draft)
    _set_more_noise(draft)
    if not draft.family:
        draft.wait(FLOW_KEYS)
    elif model_settings.predicts_noise(draft.family):
        draft.report_unmatched(FLOW_KEYS, Message("models that predict noise do not use this setting"), off=True)
    else:
        _set_timesteps(draft)
        _set_flow_objective(draft)


TIMESTEP_KEYS: tuple[str, ...]
TIMESTEP_KEYS = ("timestep_sampling", "sigmoid_scale", "discrete_flow_shift", "training_shift", "weighting_scheme")
TIMESTEP_KEYS += ("logit_mean", "logit_std", "mode_scale")
FLOW_KEYS = (*TIMESTEP_KEYS, "model_prediction_type", "guidance_scale")
"""Keys that only flow-matching models use."""


def _set_timesteps(draft: Draft) -> None:
    """Set objective.timesteps and shift from timestep_sampling and, with "sigma", from weighting_scheme."""
    method = str(draft.get("timestep_sampling") or "sigma")
    scheme = str(draft.get("weighting_scheme") or "uniform")
    shift_key = "training_shift" if draft.family in ("sd3", "sd35") else "discrete_flow_shift"
    shift = draft.get(shift_key, read_number) or 1.0
    keys = ["timestep_sampling"]
    notes: list[str] = []
    shape: str | dict[str, Any] = "uniform"
    if method == "sigma":
        keys += ["weighting_scheme", shift_key]
        shape = _read_scheme(draft, scheme, keys, notes)
    elif method == "uniform":
        shift = 1.0
    else:
        shape = objective_settings.make_logit_normal(std=draft.get("sigmoid_scale", read_number))
        keys += ["sigmoid_scale"] if "objective.logit_std" in shape else []
        if method == "shift":
            keys.append(shift_key)
        else:
            shift = 1.0 if method == "sigmoid" else "auto"
            notes += _explain_method(draft, method)
    objective_settings.set_timesteps(draft, keys, shape, shift, remarks.join(notes), exact=not notes)
    draft.report_unmatched(TIMESTEP_KEYS, remarks.UNUSED_WITH(key="timestep_sampling", value=method), off=True)


def _read_scheme(draft: Draft, scheme: str, keys: list[str], notes: list[str]) -> str | dict[str, Any]:
    """Return our settings for a weighting_scheme; its keys and remarks are added to `keys` and `notes`."""
    if scheme == "logit_normal":
        mean, std = draft.get("logit_mean", read_number), draft.get("logit_std", read_number)
        keys += ["logit_mean", "logit_std"]
        return objective_settings.make_logit_normal(mean, std)
    if scheme == "mode":
        scale = draft.get("mode_scale", read_number)
        keys.append("mode_scale")
        return {"objective.timesteps": "mode"} | ({} if scale is None else {"objective.mode_scale": scale})
    if scheme in ("sigma_sqrt", "cosmap"):  # weights of the loss in sd-scripts, with uniform timesteps
        notes.append(Message("this trainer has no weighting_scheme = {scheme}", scheme=scheme))
    return "uniform"


def _explain_method(draft: Draft, method: str) -> list[str]:
    """Return the remarks on a timestep distribution that changes with the image, or that ours lacks."""
    if method in ("flux_shift", "sigmoid"):
        return []
    if method.endswith("_shift"):
        return [Message("{keys}: this trainer uses the shift of the model's own scheduler", keys=method)]
    draft.add_todo("objective.timesteps", remarks.CHOOSE_ANOTHER(name=repr(method)))
    return [remarks.LOGIT_NORMAL(method=method)]


UNSCALED = ("lumina2", "anima")
"""Flow-matching architectures whose scripts of sd-scripts train the velocity unchanged by default."""
SCALED = Message(
    "sd-scripts' default, sigma_scaled, weights the loss by the squared noise level; this trainer trains the velocity "
    "unchanged, which sd-scripts calls raw"
)


def _set_flow_objective(draft: Draft) -> None:
    """Report what the model is trained to predict, and set the guidance during training."""
    prediction = draft.get("model_prediction_type")
    if prediction == "raw":
        draft.report_mapped("model_prediction_type", {}, Message("both trainers train the model's velocity unchanged"))
    elif draft.has("model_prediction_type"):
        draft.report_unmatched(
            "model_prediction_type",
            Message("this trainer trains the model's velocity unchanged, which the other trainer calls raw"),
        )
    elif prediction == "sigma_scaled" and draft.family not in UNSCALED:
        draft.add_difference("model_prediction_type", SCALED)
    if draft.get("guidance_scale") is not None:
        draft.report_mapped("guidance_scale", {"objective.guidance": read_number(draft.get("guidance_scale"))})
    draft.report_unmatched("guidance_scale", remarks.EMPTY, off=True)


def _set_more_noise(draft: Draft) -> None:
    """Set pyramid noise, input noise, zero-terminal SNR and the debiased weight."""
    pyramid = ["multires_noise_iterations", "multires_noise_discount"]
    levels, discount = draft.get(pyramid[0], read_whole), draft.get(pyramid[1], read_number)
    shape = {"objective.pyramid_noise": common_values.clamp("objective.pyramid_noise", levels)} if levels else {}
    shape |= {"objective.pyramid_discount": discount} if levels and discount is not None else {}
    if common_values.normalize_name(draft.get("noise_offset_type") or "") == "original":
        draft.report_unmatched(pyramid, remarks.UNUSED_WITH(key="noise_offset_type", value="Original"), off=True)
    else:
        objective_settings.set_of_diffusion(draft, pyramid, shape)
    gamma = draft.get("ip_noise_gamma", read_number)
    objective_settings.set_of_diffusion(draft, "ip_noise_gamma", {"objective.input_noise": gamma} if gamma else {})
    zero = common_values.is_on(draft.get("zero_terminal_snr"))
    ours = {"objective.zero_terminal_snr": True} if zero else {}
    objective_settings.set_of_diffusion(draft, "zero_terminal_snr", ours)
    chosen = common_values.is_on(draft.get("debiased_estimation_loss"))
    objective_settings.set_debiased(draft, "debiased_estimation_loss", chosen)


def _set_offset(draft: Draft) -> None:
    """Set the noise offset, unless the page selects multires noise instead."""
    chosen = common_values.normalize_name(draft.get("noise_offset_type") or "")
    if chosen and chosen != "original":
        keys = ["noise_offset", "noise_offset_random_strength", "adaptive_noise_scale"]
        note = remarks.UNUSED_WITH(key="noise_offset_type", value=draft.get("noise_offset_type"))
        draft.report_unmatched(keys, note, off=True)
    else:
        objective_settings.set_noise_offset(draft, "noise_offset", heeded=False)


def set_compile(draft: Draft) -> None:
    """Set memory.compile from torch_compile or from accelerate's backend."""
    backend = draft.get("dynamo_backend")
    compiled = common_values.is_on(draft.get("torch_compile"))
    named = draft.has("dynamo_backend") and str(backend).lower() not in ("no", "none")
    if compiled or (named and draft.tool.name == "kohya_ss"):
        draft.report_different(
            ["torch_compile", "dynamo_backend"],
            {"memory.compile": "blocks"},
            remarks.COMPILED,
        )
    draft.report_unmatched(["torch_compile", "dynamo_backend"], remarks.OFF, off=True)
