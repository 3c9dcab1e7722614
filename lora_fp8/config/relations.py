"""Find settings that contradict each other although each of them is valid by itself."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ..common.text import find_similar, is_utf8, quote
from ..errors import Message, Template, UserError
from ..settings import (
    SCALES,
    TORCHAO_LACKS,
    Job,
    Preview,
    Quantize,
    find_path_places,
    parse_storage,
    schedules,
    split_options,
)
from .validation import describe_value

LEAST_FACTOR = 0.05  # for Prodigy's factor; a smaller one is a learning rate meant for Adam
NO_BASE = Message("no base model is given; give a Hugging Face id, a diffusers folder, a .safetensors file or 'demo'")
NO_FOLDER = Message("no image folder is given; add a [[dataset.folders]] table with a path")
"""Problems of a config that is only begun. The page recognises both, and says what to do there instead."""
MOST_NAME_BYTES = 240  # a file system takes 255; the rest is for "-2" and for temporary names
KINDS = ("tags", "sentences", "instructions", "diffusion", "flow")
"""Kinds of families for which a preset can have a [for.KIND] table: by captions, and by what they predict."""


def find_kinds(family: str) -> tuple[str, ...]:
    """Return those of `KINDS` that apply to a family; () for an unknown family."""
    from ..families import get_traits, list_families

    if family not in list_families():
        return ()
    known = get_traits(family)
    return known["captions"], "diffusion" if known["objective"] == "Diffusion" else "flow"


Problems = Iterator[tuple[str, str]]
"""(setting, what is wrong with it), without the setting's name in the text."""


@dataclass(frozen=True)
class Rule:
    """A rule about settings that are valid by themselves.

    Attributes:
        find: yields the problems of a job.
        reads: settings that the rule reads besides those that its problems name.
        known_family: the rule needs a `model.family` that exists.
    """

    find: Callable[[Job], Problems]
    reads: tuple[str, ...] = ()
    known_family: bool = False


def find_contradictions(job: Job) -> list[tuple[tuple[str, ...], str]]:
    """Return the problems of a job whose settings are valid by themselves: (settings that were read, line)."""
    from ..families import list_families  # does not import torch

    rules = RULES if job.model.family in list_families() else [rule for rule in RULES if not rule.known_family]
    return [
        ((key, *rule.reads), Message("{key}: {line}", key=key, line=text))
        for rule in rules
        for key, text in rule.find(job)
    ]


def _check_family(job: Job) -> Problems:
    """Yield a problem if `model.family` does not exist."""
    from ..families import list_families

    families = list_families()
    if job.model.family not in families:
        near, name, names = find_similar(job.model.family, families), quote(job.model.family), " | ".join(families)
        if near:
            yield (
                "model.family",
                Message(
                    "unknown architecture {name}, did you mean {meant}?; accepted: {names}",
                    name=name,
                    meant=repr(near),
                    names=names,
                ),
            )
        else:
            yield "model.family", Message("unknown architecture {name}; accepted: {names}", name=name, names=names)


def _check_sources(job: Job) -> Problems:
    """Yield a problem for a missing base model, and for missing folders."""
    if not job.model.path:
        yield "model.path", NO_BASE
    if not job.dataset.folders:
        yield "dataset.folders", NO_FOLDER


def _check_folders(job: Job) -> Problems:
    """Yield the problems of each entry of `dataset.folders`."""
    for i, folder in enumerate(job.dataset.folders):
        key = f"dataset.folders.{i}"
        if not folder.path:
            yield f"{key}.path", Message("the path is empty; give a folder")
        if folder.regularization and folder.trigger:
            yield f"{key}.trigger", Message("regularization images get no trigger word; leave it empty")
        if "*" in folder.mask and not _is_mask_pattern(folder.mask):
            yield (
                f"{key}.mask",
                Message(
                    "{given} is not a name pattern of masks beside their images; write one * for the image's name "
                    "with text before or after it, such as '*_mask', and no folder",
                    given=quote(folder.mask),
                ),
            )


def _check_missing_caption(job: Job) -> Problems:
    """Yield a problem if a trigger word is to replace missing captions where there is none."""
    if job.dataset.missing_caption == "trigger" and not job.dataset.trigger:
        # A regularization folder has no trigger: the scan reports each of its images without a caption.
        if any(not folder.trigger and not folder.regularization for folder in job.dataset.folders):
            yield "dataset.missing_caption", Message("'trigger' needs dataset.trigger or a trigger in every folder")


def _check_class_word(job: Job) -> Problems:
    """Yield a problem if there is no trigger word for the class word to stand for, or it is a trigger word itself."""
    word, triggers = job.dataset.class_word, job.dataset.triggers
    if not word:
        return
    if not triggers:
        yield (
            "dataset.class_word",
            Message(
                "the class word replaces the trigger word in captions, but no image folder has a trigger word "
                "(folders for regularization never have one); set dataset.trigger, or remove this setting"
            ),
        )
    elif word in triggers:
        yield (
            "dataset.class_word",
            Message("{word} is the trigger word itself; give the class that it belongs to", word=quote(word)),
        )


def _check_loraplus(job: Job) -> Problems:
    """Yield a problem if LoRA+ is set for an adapter without LoRA's two matrices."""
    if job.optimizer.loraplus_lr_ratio != 1 and job.adapter.type not in ("lora", "dora"):
        yield (
            "optimizer.loraplus_lr_ratio",
            Message(
                "LoRA+ needs the two matrices of a LoRA, but adapter.type is {type}; leave it at 1",
                type=repr(job.adapter.type),
            ),
        )


def _check_oft(job: Job) -> Problems:
    """Yield the problems of OFT, whose blocks have no ranks."""
    section = job.adapter
    if section.type != "oft":
        return
    if ranks := {name: rank for name, rank in section.ranks.items() if rank}:
        yield (
            "adapter.ranks",
            Message(
                "{names}: OFT has no ranks; with adapter.type = 'oft', only 0 is accepted, for layers that are not "
                "trained",
                names=", ".join(ranks),
            ),
        )
    if job.memory.cuda_graphs:
        yield (
            "memory.cuda_graphs",
            Message(
                "CUDA graphs do not work with adapter.type = 'oft', which solves for its rotations in each "
                "pass; use false"
            ),
        )


def _check_start(job: Job) -> Problems:
    """Yield the problems of initial values that other settings of the adapter exclude."""
    section = job.adapter
    if section.init != "default" and section.init_from:
        yield (
            "adapter.init",
            Message(
                "{init} excludes adapter.init_from, which takes the initial values from a file; remove one of them",
                init=repr(section.init),
            ),
        )
    if not section.doubles_rank:
        return
    if section.type == "dora":
        yield (
            "adapter.init",
            Message(
                "{init} is not available with adapter.type = 'dora'; use 'lora', or adapter.init = 'default'",
                init=repr(section.init),
            ),
        )
    if section.freeze_a:
        yield (
            "adapter.init",
            Message(
                "{init} excludes adapter.freeze_a, because it trains the change of both matrices; set freeze_a to "
                "false, or use 'orthogonal'",
                init=repr(section.init),
            ),
        )
    if section.scale_weight_norms:
        yield (
            "adapter.init",
            Message(
                "{init} excludes adapter.scale_weight_norms, whose factor cannot be applied to the initial values; "
                "set it to 0, or use 'default'",
                init=repr(section.init),
            ),
        )


def _check_schedule(job: Job) -> Problems:
    """Yield a problem if the warm-up and decay are longer than the training, or if points are no places in it."""
    section, steps = job.schedule, job.train.steps
    if section.name == "points" and not section.points:
        yield (
            "schedule.name",
            Message("'points' needs schedule.points, such as {example}", example="{'0' = 0, '0.1' = 1, '1.0' = 0.1}"),
        )
        return
    if section.name == "points":
        try:
            schedules.read_points(section, steps)
        except UserError as error:
            yield "schedule.points", error.args[0]
        return
    warmup = section.warmup
    if isinstance(warmup, int) and warmup >= steps and warmup:
        yield (
            "schedule.warmup",
            Message(
                "the warm-up has {warmup} steps, but train.steps is {steps}; use fewer, or a fraction",
                warmup=warmup,
                steps=steps,
            ),
        )
    elif section.name == "wsd":
        decay = schedules.count_decay_steps(section, steps)
        if (spent := schedules.count_warmup_steps(section, steps)) + decay > steps:
            yield (
                "schedule.decay",
                Message(
                    "the decay has {decay} steps and schedule.warmup {warmup}, but train.steps is {steps}; use "
                    "fewer, or a fraction",
                    decay=decay,
                    warmup=spent,
                    steps=steps,
                ),
            )


def _check_timesteps(job: Job) -> Problems:
    """Yield a problem if no timestep lies between `objective.t_min` and `objective.t_max`."""
    least, most = job.objective.t_min, job.objective.t_max
    if least >= most:
        yield (
            "objective.t_min",
            Message(
                "{low} is not below objective.t_max = {high}, so no timestep is left; use a smaller value",
                low=f"{least:g}",
                high=f"{most:g}",
            ),
        )


def _check_validation(job: Job) -> Problems:
    """Yield a problem if only one of the two settings is set that validation needs."""
    section = job.validation
    if section.every and not section.pictures:
        yield (
            "validation.pictures",
            Message("the value 0 leaves validation.every no images to measure on; hold out 2, or a tenth"),
        )
    if section.pictures and not section.every:
        yield (
            "validation.every",
            Message(
                "the value 0 means that the held-out images (validation.pictures) are never measured; set how often"
            ),
        )


def _check_prompts(job: Job) -> Problems:
    """Yield a problem for each option of a preview prompt that cannot be used."""
    for number, prompt in enumerate(job.preview.prompts):
        key = f"preview.prompts.{number}"
        _, values, problems = split_options(prompt)
        for problem in problems:
            yield key, Message("{key}: {line}", key=quote(prompt), line=problem)
        try:
            Preview.model_validate(values)
        except ValidationError as error:
            # Of the members of a union, the last is the widest.
            by_name = {item["loc"][0]: item for item in error.errors(include_url=False)}
            for name, item in by_name.items():
                line = describe_value(item, ("preview", name))
                yield key, Message("{prompt}: {name} {line}", prompt=quote(prompt), name=name, line=line)


def _check_lists(job: Job) -> Problems:
    """Yield the problems of the lists `export.formats` and `preset`: empty, repeated, or auto beside others."""
    formats = job.export.formats
    if not formats:
        yield "export.formats", Message("the list is empty; accepted: auto | diffusers | comfy | kohya")
    if "auto" in formats and len(formats) > 1:
        yield "export.formats", Message("auto chooses the layouts itself and cannot be combined with others")
    if len(set(formats)) != len(formats):
        yield "export.formats", Message("a layout is listed twice")
    if len(set(job.preset)) != len(job.preset):
        yield "preset", Message("a preset is listed twice")


def _check_encoding(job: Job) -> Problems:
    """Yield a problem for each text that cannot be written as UTF-8."""
    for key, text in _list_texts(job.model_dump()):
        if not is_utf8(text):
            yield key, Message("expected text in UTF-8, got {given}", given=quote(text))


def _check_paths(job: Job) -> Problems:
    """Yield a problem for each path that no file system accepts, and for a `name` that cannot name a folder."""
    for named in find_path_places(job.model_dump()):
        if "\0" in named.path:
            yield named.key, Message("{path} is not a valid path", path=quote(named.path))
    if any(c in "/\\" or not c.isprintable() for c in job.name) or job.name.strip() in ("", ".", ".."):
        yield (
            "name",
            Message("{name} is not a valid folder name; use letters, digits, '-' and '_'", name=quote(job.name)),
        )
    elif (size := len(job.name.encode(errors="replace"))) > MOST_NAME_BYTES:
        yield (
            "name",
            Message("too long for a folder name: {size} bytes, at most {most}", size=size, most=MOST_NAME_BYTES),
        )


def _check_optimizer(job: Job) -> Problems:
    """Yield the problems of settings that this optimizer cannot use."""
    section = job.optimizer
    rate = section.lr if isinstance(section.lr, float) else None
    if section.ema_decay and section.name == "adamw_schedulefree":
        yield "optimizer.ema_decay", Message("'adamw_schedulefree' averages the weights itself; leave it at 0")
    if job.adapter.scale_weight_norms and section.name == "adamw_schedulefree":
        yield (
            "adapter.scale_weight_norms",
            Message(
                "optimizer.name = {name} averages the weights itself, so their norm cannot be limited; leave it at 0",
                name=repr(section.name),
            ),
        )
    if section.name != "prodigy":
        if rate is not None and rate >= 1:
            yield (
                "optimizer.lr",
                Message(
                    "must be below 1, got {given}; values from 1 on are a factor for optimizer.name = 'prodigy'",
                    given=f"{rate:g}",
                ),
            )
        return
    if rate is not None and rate < LEAST_FACTOR:
        yield (
            "optimizer.lr",
            Message(
                "{given} would train almost nothing: with optimizer.name = 'prodigy', it is a factor of the "
                "learning rate that Prodigy finds; use 'auto', which is 1",
                given=f"{rate:g}",
            ),
        )
    if section.text_encoder_lr != "auto":
        yield (
            "optimizer.text_encoder_lr",
            Message("'prodigy' finds one learning rate for all trained weights; leave it at 'auto'"),
        )
    if section.lrs:
        yield "optimizer.lrs", Message("'prodigy' finds one learning rate for all trained weights; leave it empty")
    if section.loraplus_lr_ratio != 1:
        yield (
            "optimizer.loraplus_lr_ratio",
            Message("'prodigy' finds one learning rate for all trained weights; leave it at 1"),
        )


def _check_objective(job: Job) -> Problems:
    """Yield problems where [objective] does not fit what the family predicts."""
    from ..families import get

    given, by_snr = job.objective.prediction, job.objective.loss != "mse" and job.objective.huber_schedule == "snr"
    if given == "auto" and not by_snr:
        return
    diffusion, title = (family := get(job.model.family)).objective == "Diffusion", family.title
    if diffusion and given == "flow":
        yield (
            "objective.prediction",
            Message("{given}: {title} predicts epsilon or v; use 'auto'", given=repr(given), title=title),
        )
    if not diffusion and given in ("epsilon", "v"):
        yield (
            "objective.prediction",
            Message("{given}: {title} is trained with flow matching; use 'auto'", given=repr(given), title=title),
        )
    if by_snr and not diffusion:
        yield (
            "objective.huber_schedule",
            Message("'snr' needs a diffusion model's signal-to-noise ratio; use 'exponential' or 'constant'"),
        )


def _check_recording(job: Job) -> Problems:
    """Yield a problem if the family's pass cannot be recorded as a CUDA graph."""
    from ..families import get

    if job.memory.cuda_graphs and not (family := get(job.model.family)).is_recordable:
        yield (
            "memory.cuda_graphs",
            Message(
                "true: the transformer of {title} cannot be recorded as a CUDA graph; use false", title=family.title
            ),
        )


def _is_mask_pattern(name: str) -> bool:
    """Return True if a pattern with a * matches masks only, and not the images' own names."""
    return name.count("*") == 1 and not re.search(r"[/\\]", name) and not re.fullmatch(r"\*(\.\w+)?", name)


def _list_texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (setting, text) for every text among a job's values."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _list_texts(inner, f"{key}.{name}" if key else str(name))


def _check_controls(job: Job) -> Problems:
    """Yield problems where the family takes no control images, or requires them."""
    from ..families import get, list_families

    family = get(job.model.family)
    fewest, most = family.controls
    title, prompts, controls = family.title, len(job.preview.prompts), len(job.preview.controls)
    for i, folder in enumerate(job.dataset.folders):
        key = f"dataset.folders.{i}.control"
        if folder.control and not most:
            editing = " | ".join(name for name in list_families() if any(get(name).controls))
            yield (
                key,
                Message(
                    "{family} does not use control images; leave it empty, or choose an editing model: {editing}",
                    family=title,
                    editing=editing,
                ),
            )
        elif not folder.control and fewest:
            yield (
                key,
                Message(
                    "{family} is an editing model and needs a control image for each image; name the folder with "
                    "the control images",
                    family=title,
                ),
            )
    if controls and not most:
        yield "preview.controls", Message("{family} does not use control images; leave it empty", family=title)
    elif prompts and fewest and not controls or controls and controls != prompts:
        yield (
            "preview.controls",
            Message(
                "the list has {count} entries, but preview.prompts has {prompts}; give one for each prompt",
                count=controls,
                prompts=prompts,
            ),
        )


def _check_clips(job: Job) -> Problems:
    """Yield problems where the family takes no clips, or none of these lengths."""
    from ..families import get, list_families

    family = get(job.model.family)
    title, (step, _) = family.title, family.clips
    lengths = {"dataset.frames": job.dataset.frames, "preview.frames": [job.preview.frames]}
    if not step:
        takers = " | ".join(name for name in list_families() if any(get(name).clips))
        for key, given in lengths.items():
            if given != ([] if key == "dataset.frames" else [1]):
                yield (
                    key,
                    Message(
                        "{family} generates images only; leave it out, or choose a video model: {takers}",
                        family=title,
                        takers=takers,
                    ),
                )
        return
    for key, given in lengths.items():
        for length in given:
            if length < 1 or (length - 1) % step:
                near = max(1, round((length - 1) / step) * step + 1)
                yield (
                    key,
                    Message(
                        "{family} accepts clips of {lengths} ... frames, got {given}; use {near}",
                        family=title,
                        lengths=f"1, {step + 1}, {2 * step + 1}",
                        given=length,
                        near=near,
                    ),
                )
    if len(set(job.dataset.frames)) != len(job.dataset.frames):
        yield "dataset.frames", Message("a length is listed twice")


def _check_quantize(job: Job) -> Problems:
    """Yield the problems of a [quantize] table whose settings exclude each other."""
    section, dtype = job.quantize, job.model.dtype
    storage, scale = section.storage, section.scale
    if storage == "bf16" and dtype != "bf16":
        yield (
            "quantize.storage",
            Message(
                "'bf16' contradicts model.dtype = {dtype}; use 'none' to store it in model.dtype", dtype=repr(dtype)
            ),
        )
    if scale != "auto" and storage in SCALES and scale not in SCALES[storage]:
        accepted_here = " | ".join(("auto", *(choice for choice in SCALES[storage] if storage != "nf4")))
        yield (
            "quantize.scale",
            Message(
                "{scale} is not available with quantize.storage = {storage}; accepted: {accepted}",
                scale=repr(scale),
                storage=repr(storage),
                accepted=accepted_here,
            ),
        )
    yield from _check_own_layers(section) if section.backend == "own" else _check_other_layers(section)


def _check_own_layers(section: Quantize) -> Problems:
    """Yield problems where this project's own layers cannot do what [quantize] asks for."""
    storage, scale, compute, recipe = section.storage, section.scale, section.compute, section.recipe
    if recipe == "mxfp8":
        yield (
            "quantize.recipe",
            Message("'mxfp8' needs quantize.backend = 'te'; use that, or 'current', 'delayed' or 'block'"),
        )
    if compute in ("fp8", "fp8_forward"):
        if storage in ("int8", "nf4"):
            yield (
                "quantize.compute",
                Message(
                    "{compute} needs quantize.storage = 'fp8', not {storage}; use that, or 'upcast'",
                    compute=repr(compute),
                    storage=repr(storage),
                ),
            )
        fitting = ("128x128",) if recipe == "block" else ("row", "tensor")
        if storage == "fp8" and scale not in ("auto", *fitting):
            yield (
                "quantize.scale",
                Message(
                    "{scale} has no FP8 matmul with quantize.recipe = {recipe}; use {fitting}, or "
                    "quantize.compute = 'upcast'",
                    scale=repr(scale),
                    recipe=repr(recipe),
                    fitting=" or ".join(map(repr, fitting)),
                ),
            )
    if section.kernels == "triton" and recipe != "current" and compute != "upcast":
        yield (
            "quantize.kernels",
            Message(
                "'triton' has no recipe {recipe}; use quantize.recipe = 'current', or 'torch'", recipe=repr(recipe)
            ),
        )
    if recipe == "block" and compute != "upcast" and scale == "auto":
        yield "quantize.scale", Message("quantize.recipe = 'block' needs scale = '128x128'; set it")


def _check_other_layers(section: Quantize) -> Problems:
    """Yield problems where another library's layers cannot do what [quantize] asks for."""
    if section.storage not in SCALES:
        return
    if section.sensitivity != "off":
        yield (
            "quantize.sensitivity",
            Message(
                "{given} needs quantize.backend = 'own'; use 'off', and write the result of `lora-fp8 precision` "
                "into quantize.override",
                given=repr(section.sensitivity),
            ),
        )
    if section.kernels == "triton":
        yield (
            "quantize.kernels",
            _suggest_own_layers(Message("'triton' works with this program's own layers only; use 'torch'")),
        )
    yield from _check_te(section) if section.backend == "te" else _check_torchao(section)


def _suggest_own_layers(advice: Message) -> Message:
    """Add to an advice about another library's layers that this project's own layers can do what is asked."""
    return Message("{line}, or quantize.backend = 'own'", line=advice)


def _check_te(section: Quantize) -> Problems:
    """Yield problems where TransformerEngine's layers cannot do it."""
    if section.storage != "fp8":
        line = Message("TransformerEngine stores FP8 only, not {given}; use 'fp8'", given=repr(section.storage))
        yield "quantize.storage", _suggest_own_layers(line)
    if section.compute != "fp8":
        line = Message("TransformerEngine multiplies in FP8, not {given}; use 'fp8'", given=repr(section.compute))
        yield "quantize.compute", _suggest_own_layers(line)
    if section.scale != "auto":
        yield (
            "quantize.scale",
            _suggest_own_layers(Message("quantize.recipe decides TransformerEngine's scales; use 'auto'")),
        )
    if not section.fast_accum:
        yield (
            "quantize.fast_accum",
            _suggest_own_layers(Message("TransformerEngine decides how to accumulate; leave it at true")),
        )


def _check_torchao(section: Quantize) -> Problems:
    """Yield problems where torchao's layers cannot do it."""
    if section.compute != "upcast":
        template = Template(
            "torchao's weight-only tensors must be dequantized first, which {given} does not do; use 'upcast'"
        )
        yield "quantize.compute", _suggest_own_layers(template(given=repr(section.compute)))
    if section.recipe != "current":
        line = Message("torchao's weight-only tensors have no FP8 matmul; leave it at 'current'")
        yield "quantize.recipe", _suggest_own_layers(line)
    asked: list[tuple[str, str, str]]
    asked = [("quantize.storage", section.storage, section.scale), ("quantize.modulation", section.modulation, "")]
    asked += [("quantize.override", *parse_storage(text)) for text in section.override.values()]
    for key, storage, scale in asked:
        if storage == "nf4":
            yield key, _suggest_own_layers(Message("torchao has no weight-only 'nf4'; use 'fp8' or 'int8'"))
        elif storage == "fp8" and scale in TORCHAO_LACKS:
            accepted_here = " | ".join(choice for choice in SCALES["fp8"] if choice not in TORCHAO_LACKS)
            key = "quantize.scale" if key == "quantize.storage" else key
            template = Template("torchao has no fp8 with scale {scale}; accepted: {accepted}")
            yield key, _suggest_own_layers(template(scale=repr(scale), accepted=accepted_here))


def _check_memory(job: Job) -> Problems:
    """Yield the problems of a [memory] table whose settings exclude each other or settings of [quantize]."""
    section, quantize = job.memory, job.quantize
    if quantize.backend == "te":
        if section.compile == "blocks":
            # Each block is compiled as one graph, and TransformerEngine's layers are left out of graphs.
            yield (
                "memory.compile",
                Message("'blocks' does not work with quantize.backend = 'te'; use 'off', or quantize.backend = 'own'"),
            )
        if section.gradient_checkpointing is True and excludes_recomputing(quantize):
            yield (
                "memory.gradient_checkpointing",
                Message(
                    "gradient checkpointing does not work with quantize.recipe = 'delayed' of quantize.backend = "
                    "'te'; use false, or another recipe"
                ),
            )
    elif section.compile == "blocks" and quantize.recipe == "delayed" and quantize.compute != "upcast":
        # The history is written while the gradient is computed, which a compiled backward may reorder or leave out.
        yield (
            "memory.compile",
            Message(
                "'blocks' does not work with quantize.recipe = 'delayed'; use quantize.recipe = 'current', or "
                "memory.compile = 'off'"
            ),
        )
    if section.share_in_ram:
        for key, usual in find_offload_clashes(job):
            value = getattr(quantize if key.startswith("quantize") else section, key.partition(".")[2])
            yield (
                "memory.offload",
                Message(
                    "{value} excludes {setting}; use {usual}, or offload = 0",
                    value=f"{section.share_in_ram:g}",
                    setting=f"{key} = {'true' if value is True else repr(value)}",
                    usual=usual,
                ),
            )
    if section.shard_base:
        for key, clash, usual in (
            ("memory.compile", section.compile != "off", "'off'"),  # each block is one graph, which gathers nothing
            ("memory.cuda_graphs", section.cuda_graphs, "false"),
            ("quantize.backend", quantize.backend != "own", "'own'"),
            # A matmul that fails on one process alone would leave the others waiting for it.
            ("quantize.compute", quantize.compute == "auto", "'upcast', 'fp8_forward' or 'fp8'"),
            # It is measured on a base that one process holds.
            ("quantize.sensitivity", quantize.sensitivity != "off", "'off'"),
        ):
            if clash:
                yield "memory.shard_base", Message("true needs {setting}", setting=f"{key} = {usual}")
    if section.cuda_graphs:
        for key, clash, usual in (
            ("memory.offload", bool(section.share_in_ram), "0"),  # fetching waits for copies that Python starts
            ("quantize.backend", quantize.backend != "own", "'own'"),
            # a recording would drop the same elements each time
            ("adapter.dropout", bool(job.adapter.dropout), "0"),
            ("adapter.rank_dropout", bool(job.adapter.rank_dropout), "0"),
            ("adapter.module_dropout", bool(job.adapter.module_dropout), "0"),
            ("adapter.text_encoder", job.adapter.text_encoder, "false"),  # tokenizing is no work of the GPU
        ):
            if clash:
                yield "memory.cuda_graphs", Message("true needs {setting}", setting=f"{key} = {usual}")


def excludes_recomputing(quantize: Quantize) -> bool:
    """Return True if this [quantize] table excludes gradient checkpointing.

    TransformerEngine updates its history when the forward ends, so the recomputation would multiply with other scales.
    """
    return quantize.backend == "te" and quantize.recipe == "delayed"


def find_offload_clashes(job: Job) -> Iterator[tuple[str, str]]:
    """Yield each setting that excludes offloading, with the value to use instead.

    Only our own frozen layers can be offloaded. Processes that share the base gather it from parameters, which
    offloaded bytes are not.
    """
    quantize = job.quantize
    for key, clash, usual in (
        ("quantize.storage", quantize.storage in ("bf16", "none"), "'fp8'"),
        ("quantize.backend", quantize.backend != "own", "'own'"),
        ("memory.shard_base", job.memory.shard_base, "false"),
    ):
        if clash:
            yield key, usual


RULES = (
    Rule(_check_family),
    Rule(_check_quantize, reads=("quantize.storage", "quantize.compute", "quantize.backend", "model.dtype")),
    Rule(
        _check_memory,
        reads=(
            *("memory", "quantize.compute", "quantize.recipe", "quantize.backend", "quantize.sensitivity"),
            *("adapter.dropout", "adapter.rank_dropout", "adapter.module_dropout", "adapter.text_encoder"),
        ),
    ),
    Rule(_check_sources),
    Rule(_check_folders),
    Rule(
        _check_controls,
        reads=("model.family", "dataset.folders", "preview.prompts", "preview.controls"),
        known_family=True,
    ),
    Rule(_check_clips, reads=("model.family",), known_family=True),
    Rule(_check_recording, reads=("model.family",), known_family=True),
    Rule(_check_objective, reads=("model.family", "objective.loss"), known_family=True),
    Rule(_check_missing_caption, reads=("dataset.trigger", "dataset.folders")),
    Rule(_check_class_word, reads=("dataset.trigger", "dataset.folders")),
    Rule(_check_optimizer, reads=("optimizer.name", "optimizer.lr", "adapter.scale_weight_norms")),
    Rule(_check_loraplus, reads=("adapter.type",)),
    Rule(_check_oft, reads=("adapter.type",)),
    Rule(_check_start, reads=("adapter.type", "adapter.init_from", "adapter.freeze_a", "adapter.scale_weight_norms")),
    Rule(_check_schedule, reads=("train.steps",)),
    Rule(_check_timesteps, reads=("objective.t_max",)),
    Rule(_check_validation),
    Rule(_check_prompts),
    Rule(_check_lists),
    Rule(_check_encoding),
    Rule(_check_paths),
)
"""All rules; problems are listed in this order."""
