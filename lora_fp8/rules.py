"""What is wrong with a job although each of its settings is fine by itself: the settings that exclude each other."""

import re
from collections.abc import Iterator
from typing import Any

from .settings import MOST_RANK, SCALES, TORCHAO_LACKS, Job, Memory, Optimizer, Quantize
from .wording import did_you_mean, is_utf8, shown

MOST_LR = 10.0  # Prodigy's factor; a rate of any other optimizer is below 1
MOST_FACTOR = 100.0  # on the rate, of a layer
LEAST_FACTOR = 0.05  # of Prodigy; below it is a rate that was meant for Adam


def contradictions(job: Job) -> list[tuple[tuple[str, ...], str]]:
    """What is wrong although each setting by itself is fine: (the settings that were looked at, line)."""
    found: list[tuple[tuple[str, ...], str]] = []

    def say(key: str, text: str, *looked_at: str) -> None:
        found.append(((key, *looked_at), f"{key}: {text}"))

    from .families import available  # imports no torch

    families = available()
    if job.model.family not in families:
        hint = did_you_mean(job.model.family, families)
        say("model.family", f"unknown family {shown(job.model.family)}{hint}; accepted: {' | '.join(families)}")
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
        if folder.resolution and not 16 <= folder.resolution <= 8192:
            say(f"dataset.folders.{i}.resolution", f"must lie between 16 and 8192 pixels, got {folder.resolution}")
        if folder.regularization and folder.trigger:
            say(f"dataset.folders.{i}.trigger", "a folder for regularization gets no trigger word; leave it out")
        if "*" in folder.mask and not _names_masks(folder.mask):
            say(
                f"dataset.folders.{i}.mask",
                f"{shown(folder.mask)} is no name for masks beside their images; write one * for the image's name with "
                "something before or behind it, such as '*_mask', and no folder",
            )
    for entry in job.adapter.ranks:
        if parse_rank(entry) is None:
            say(
                "adapter.ranks",
                f"{shown(entry)} is not 'NAME = RANK', such as 'attn2 = 32'; a rank is 1 to {MOST_RANK}, or 0 for none",
            )
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
        if job.objective.loss != "mse" and job.objective.huber_schedule == "snr":
            from .families import traits

            if traits(job.model.family)["objective"] != "Diffusion":
                say(
                    "objective.huber_schedule",
                    "'snr' needs a diffusion model's signal-to-noise ratio; use 'exponential' or 'constant'",
                    "model.family",
                    "objective.loss",
                )
    if job.dataset.missing_caption == "trigger" and not job.dataset.trigger:
        # A folder for regularization can have none: its pictures without captions are told one by one.
        if any(not folder.trigger and not folder.regularization for folder in job.dataset.folders):
            say(
                "dataset.missing_caption",
                "'trigger' needs dataset.trigger or a trigger in every folder",
                "dataset.trigger",
                "dataset.folders",
            )
    if isinstance(job.optimizer.lr, float) and not 0 < job.optimizer.lr <= MOST_LR:
        say("optimizer.lr", f"must be above 0 and below 1 (with prodigy at most 10), got {job.optimizer.lr:g}")
    if isinstance(job.optimizer.beta2, float) and not 0 <= job.optimizer.beta2 < 1:
        say("optimizer.beta2", f"must be at least 0 and below 1, got {job.optimizer.beta2:g}")
    if isinstance(job.optimizer.lr_scale, float) and not 0 < job.optimizer.lr_scale <= 100:
        say("optimizer.lr_scale", f"must be above 0 and at most 100, got {job.optimizer.lr_scale:g}")
    if isinstance(job.optimizer.text_encoder_lr, float) and not 0 < job.optimizer.text_encoder_lr < 1:
        say(
            "optimizer.text_encoder_lr",
            f"must be above 0 and below 1, got {job.optimizer.text_encoder_lr:g}; adapter.text_encoder = false leaves "
            "the text encoders as they are",
        )
    for key, text in _optimizer_contradictions(job.optimizer):
        say(f"optimizer.{key}", text, "optimizer.name", "optimizer.lr")
    if job.optimizer.loraplus_lr_ratio != 1 and job.adapter.type not in ("lora", "dora"):
        say(
            "optimizer.loraplus_lr_ratio",
            f"is of LoRA's second matrices, and adapter.type is {job.adapter.type!r}; leave it at 1",
            "adapter.type",
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
    for key, text in _texts(job.model_dump()):
        if not is_utf8(text):
            say(key, f"expected text in UTF-8, got {shown(text)}")
    paths = {"output_dir": job.output_dir, "model.path": job.model.path, "model.components": job.model.components}
    paths |= {"dataset.cache_dir": job.dataset.cache_dir, "adapter.init_from": job.adapter.init_from}
    paths |= {f"dataset.folders.{i}.path": folder.path for i, folder in enumerate(job.dataset.folders)}
    paths |= {f"dataset.folders.{i}.control": folder.control for i, folder in enumerate(job.dataset.folders)}
    paths |= {f"dataset.folders.{i}.mask": folder.mask for i, folder in enumerate(job.dataset.folders)}
    paths |= {f"preview.controls.{i}": path for i, path in enumerate(job.preview.controls)}
    for key, path in paths.items():
        if "\0" in path:
            say(key, f"{shown(path)} cannot be a path")
    if any(c in "/\\" or not c.isprintable() for c in job.name) or job.name.strip() in ("", ".", ".."):
        say("name", f"{shown(job.name)} cannot name a folder; use letters, digits, '-' and '_'")
    return found


def _optimizer_contradictions(section: Optimizer) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) where a rate is none for this optimizer."""
    for entry in section.lrs:
        if parse_factor(entry) is None:
            yield (
                "lrs",
                f"{shown(entry)} is not 'NAME = FACTOR', such as 'attn2 = 0.5'; a factor is above 0, up to "
                f"{MOST_FACTOR:g}; adapter.ranks with 'NAME = 0' leaves layers as they are",
            )
    if isinstance(section.growth_rate, float) and not 1 < section.growth_rate <= 1000:
        yield "growth_rate", f"must be above 1 and at most 1000, got {section.growth_rate:g}"
    rate = section.lr if isinstance(section.lr, float) and 0 < section.lr <= MOST_LR else None
    if section.name != "prodigy":
        if rate is not None and rate >= 1:
            yield "lr", f"must be below 1, got {rate:g}; from 1 on it is a factor for optimizer.name = 'prodigy'"
        return
    if rate is not None and rate < LEAST_FACTOR:
        yield (
            "lr",
            f"{rate:g} would train next to nothing: with optimizer.name = 'prodigy' it is a factor on the rate that is "
            "found; use 'auto', which is 1",
        )
    if section.text_encoder_lr != "auto":
        yield "text_encoder_lr", "'prodigy' finds one rate for all that is trained; leave it at 'auto'"
    if section.lrs:
        yield "lrs", "'prodigy' finds one rate for all that is trained; leave it empty"
    if section.loraplus_lr_ratio != 1:
        yield "loraplus_lr_ratio", "'prodigy' finds one rate for all that is trained; leave it at 1"


def _names_masks(name: str) -> bool:
    """Whether a name with a * fits masks only: every picture's own name is not theirs."""
    return name.count("*") == 1 and not re.search(r"[/\\]", name) and not re.fullmatch(r"\*(\.\w+)?", name)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(setting, text) of every text in a job's values."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{key}.{name}" if key else str(name))


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


def parse_rank(entry: str) -> tuple[str, int] | None:
    """A line of adapter.ranks as (layer name, rank). None: it is none."""
    match = re.fullmatch(r"\s*(\S+)\s*=\s*(\d{1,9})\s*", entry, re.ASCII)
    return (match[1], int(match[2])) if match and int(match[2]) <= MOST_RANK else None


def parse_factor(entry: str) -> tuple[str, float] | None:
    """A line of optimizer.lrs as (layer name, factor on the rate). None: it is none."""
    match = re.fullmatch(r"\s*(\S+)\s*=\s*(\d{1,9}(?:\.\d{0,12})?(?:e-?\d{1,2})?)\s*", entry, re.ASCII | re.IGNORECASE)
    return (match[1], float(match[2])) if match and 0 < float(match[2]) <= MOST_FACTOR else None


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
            yield "quantize.override", f"{shown(entry)} is not 'NAME = STORAGE [SCALE]'; storages: bf16, {kinds}"
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
    if section.offload:
        # What waits are the bytes of our own frozen layers, and who asks for them is Python.
        for key, clash, usual in (
            ("quantize.storage", quantize.storage in ("bf16", "none"), "'fp8'"),
            ("quantize.backend", quantize.backend != "own", "'own'"),
            ("quantize.kernels", quantize.kernels == "triton", "'torch'"),
            ("memory.compile", section.compile != "off", "'off'"),
        ):
            if clash:
                value = getattr(quantize if key.startswith("quantize") else section, key.partition(".")[2])
                yield "memory.offload", f"{section.offload:g} excludes {key} = {value!r}; use {usual}, or offload = 0"
    if section.cuda_graphs and section.compile == "off":
        yield "memory.cuda_graphs", "true records compiled blocks, and memory.compile is 'off'; use 'blocks'"
    if section.cuda_graphs and section.gradient_checkpointing:
        # The backward would replay the forward's recording while what it gave the first time is still needed.
        yield "memory.cuda_graphs", "true needs memory.gradient_checkpointing = false"
