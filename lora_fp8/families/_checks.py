"""Checks of a family's files: they are of its architecture, complete, and in a format that can be read.

They read headers and JSON only, before anything large is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import settings
from ..errors import Message, Template, UserError, UserErrors, combine, first_few
from . import UNKNOWN, _components, _files, _part_files, describe, get, list_families
from ._files import Header

if TYPE_CHECKING:
    from .base import ModelFamily


MOST_TOKENS = 1 << 20
"""Largest credible token limit of a tokenizer: without one in its config, transformers reports a number of 30
digits."""
NAMED_V = r"v[-_. ]?(pred|param)"
"""Matches the names of v-prediction models, such as NoobAI-XL-Vpred-v1.0.safetensors."""


def check_architecture(family: ModelFamily) -> None:
    """Check that the given file and folder are of this architecture, and name the other one if they are not."""
    relative = get(family.same_tensors_as) if family.same_tensors_as else None
    if family.checkpoint:
        if not family.recognises(family._header) and not (relative and relative.recognises(family._header)):
            raise UserError(
                _describe_other_architecture(family, str(family.checkpoint), *describe_checkpoint(family._header))
            )
        what, closer = describe(family._header)
        if closer != family.name and family.recognises(family._header):
            raise UserError(_describe_other_architecture(family, str(family.checkpoint), what, get(closer)))
    index = family.folder / family.index_name
    if index.is_file():
        class_name = str(_files.read_json(index).get("_class_name"))
        # The components of a single file may come from the family with the same tensors.
        if class_name != family.pipeline_class and not (
            family.checkpoint and relative and class_name == relative.pipeline_class
        ):
            other = _find_family(family, class_name)
            what = Message("a model for {name}", name=class_name)
            if other:
                what = Message("{title} ({name})", title=other.title, name=class_name)
            raise UserError(_describe_other_architecture(family, str(family.folder), what, other))
    elif not family.checkpoint:
        raise UserError(
            Message("{path} is not a diffusers folder (it has no {name})", path=family.folder, name=family.index_name)
        )
    foreign = _find_foreign_mark(type(family), family.folder)
    if foreign:
        other = _find_family(family, family.pipeline_class)
        template = Template("{path} is not {title}: {line}")
        if other:
            template = Template("{path} is not {title}: {line}; set model.family = {name} for {other}")
        values = {"name": repr(other.name), "other": other.title} if other else {}
        raise UserError(template(path=family.folder, title=family.title, line=foreign, **values))


def _find_foreign_mark(family: type[ModelFamily], folder: Path) -> str:
    """Return the first entry of a folder's configs that is not this architecture's, as text; "" if all match."""
    expected = {family.denoiser_name: family.config_marks | {"_class_name": family.denoiser_class}}
    # A VAE of another class, or with other normalization, would give latents that the denoiser was not trained on.
    expected["vae"] = family.vae_marks | {"_class_name": family.vae_class}
    for part, marks in expected.items():
        path = folder / part / "config.json"
        config = _files.read_json(path) if path.is_file() else marks
        for key, value in marks.items():
            # A missing entry was saved by a version without it, so it has its default: "no" or "none".
            if (config.get(key) or None) != (value or None):
                return Message(
                    "{file} has {key} = {value}, expected {expected}",
                    file=f"{part}/config.json",
                    key=key,
                    value=repr(config.get(key)),
                    expected=repr(value),
                )
    return ""


def _find_family(family: ModelFamily, pipeline_class: str) -> type[ModelFamily] | None:
    """Return the family of this folder; families that share a pipeline differ in the denoiser's config."""
    sharing = [other for other in _import_families() if other.pipeline_class == pipeline_class]
    return next((other for other in sharing if not _find_foreign_mark(other, family.folder)), None)


def _describe_other_architecture(family: ModelFamily, path: str, what: str, other: type[ModelFamily] | None) -> str:
    values = {"path": path, "line": what, "name": repr(family.name), "title": family.title}
    if other is None:
        return Message("{path} is {line}, but model.family = {name} is {title}; choose another file", **values)
    return Message(
        "{path} is {line}, but model.family = {name} is {title}; set model.family = {other} or choose another file",
        other=repr(other.name),
        **values,
    )


def check_complete(family: ModelFamily) -> None:
    """Report all missing files at once, with their places; damaged files are found by their headers."""
    wanted = ["scheduler/scheduler_config.json", "vae/config.json"]
    if not family.checkpoint:
        wanted.append(f"{family.denoiser_name}/config.json")
    missing = [w for w in wanted if not (family.folder / w).is_file()]
    needed = {} if family.checkpoint else {family.denoiser_name: "diffusion_pytorch_model"}
    if not family._find_source("vae"):
        needed["vae"] = "diffusion_pytorch_model"
    for name in family.text_parts:
        missing += _list_missing_text_files(family, name)
        if not family._is_tokenizer(name) and not family._find_source(name):
            needed[name] = family._find_text_class(name)[1]
    weights = {name: family._find_weight_files(name, stem) for name, stem in needed.items()}
    missing += [f"{name}/{needed[name]}.safetensors" for name, paths in weights.items() if not paths]
    _check_unquantized(family)
    _check_scales(family, weights)
    if missing:
        names = ", ".join(missing)
        if family.checkpoint:
            raise UserError(
                Message(
                    "{path} lacks {names}, which {file} needs",
                    path=family.folder,
                    names=names,
                    file=family.checkpoint,
                )
            )
        raise UserError(Message("{path} lacks {names}", path=family.folder, names=names))
    family.read_scheduler_config()  # fails if it cannot be read; the cache needs it


def _list_missing_text_files(family: ModelFamily, name: str) -> list[str]:
    """Return the files besides weights that a tokenizer or text encoder lacks."""
    part = family.folder / name
    if not family._is_tokenizer(name):
        return [] if (part / "config.json").is_file() else [f"{name}/config.json"]
    known = ["tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model"]
    if name == "processor":
        known = ["preprocessor_config.json", "processor_config.json"]
    return [] if any((part / k).is_file() for k in known) else [f"{name}/ ({' or '.join(known)})"]


def _check_scales(family: ModelFamily, weights: Mapping[str, Sequence[Path]]) -> None:
    """Take the notes of the denoiser's files, and refuse other parts that are quantized with scales."""
    from ._weights import ADVICE, WeightFile

    for name, paths in weights.items():
        for path in paths:
            file = WeightFile(path, family.absent)
            if name == family.denoiser_name:
                family.warnings += file.list_notes()
            elif file.scaled:  # diffusers and transformers load these parts, and ignore the scales
                raise UserError(
                    Message(
                        "{path} is quantized with scales, which is supported for the denoiser only; {line}",
                        path=path,
                        line=ADVICE,
                    )
                )
    if family._file:
        family.warnings += family._file.list_notes()


def check_denoiser(family: ModelFamily) -> None:
    """Check by the headers that a folder's denoiser has the weights that its config describes.

    `precision.fill_` checks the same, but only after images and captions are encoded.
    """
    from ._weights import WeightFile

    if family.checkpoint:
        return  # a single file's config is derived from its own tensors
    wanted = {name: tuple(tensor.shape) for name, tensor in family.outline.state_dict().items()}
    shapes_in_file: Header = {}
    for path in family._list_denoiser_files():
        shapes_in_file |= WeightFile(path, family.absent).header
    wrong: list[str] = [Message("{name} is missing", name=name) for name in wanted if name not in shapes_in_file]
    wrong += [Message("{name} is not part of this model", name=name) for name in shapes_in_file if name not in wanted]
    wrong += [
        Message("{name} is {shape}, expected {wanted}", name=name, shape=list(shape), wanted=list(wanted[name]))
        for name, shape in shapes_in_file.items()
        if name in wanted and wanted[name] != tuple(shape)
    ]
    if wrong:
        raise UserError(
            Message(
                "{path} does not have the weights that its config.json describes: {count} differ, {names}; the "
                "weights or the config belong to another model",
                path=family.folder / family.denoiser_name,
                count=len(wrong),
                names=first_few(wrong),
            )
        )


def check_scheduler(family: ModelFamily) -> None:
    """Check that the scheduler's config names a sampler of diffusers and describes a noising process."""
    import torch

    path, config = family.folder / "scheduler" / "scheduler_config.json", family.read_scheduler_config()
    _files.build_from_config(_files.find_scheduler(path, config), path, config)
    one_BCHW = torch.ones(1, 1, 1, 1)
    try:
        objective = family.get_objective_type()(config, settings.Objective())
        for tokens in (256, 4096):
            t_B = objective.sample_t([torch.Generator().manual_seed(0)], tokens)
            noised = objective.add_noise(one_BCHW, one_BCHW, t_B)
            if not torch.isfinite(noised).all():
                raise ValueError("what is noised is not finite")
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError, NotImplementedError) as error:
        raise UserError(
            Message(
                "{path} does not describe how noise is added to images ({why})",
                path=path,
                why=_files.shorten_error(error),
            )
        ) from error


def check_prediction(family: ModelFamily) -> None:
    """Check that an unmarked single file is not trained as epsilon although its name says v."""
    if (
        family.checkpoint
        and family.assumes_prediction()
        and family.get_prediction() == "epsilon"
        and family.is_file_called(NAMED_V)
    ):
        raise UserError(
            Message(
                "objective.prediction: the name of {file} suggests a v-prediction model, but the file has no mark "
                "of it, and {place} says epsilon. Set 'v', or 'epsilon' if the name is wrong",
                file=family.checkpoint.name,
                place=family.folder / "scheduler",
            )
        )


def check_vae(family: ModelFamily) -> None:
    """Check that the VAE's statistics are not those of another model with the same class and config."""
    import torch

    from ._weights import WeightFile

    files = family._find_weight_files("vae", "diffusion_pytorch_model") if family.other_vaes else []
    for path in filter(Path.is_file, files):  # the others are checked once they are downloaded
        file = WeightFile(path)
        means = file.read_dequantized("bn.running_mean").float() if "bn.running_mean" in file.header else torch.empty(0)
        for model, begin in family.other_vaes.items():
            if len(means) and torch.allclose(means[: len(begin)], torch.tensor(begin), rtol=0, atol=1e-3):
                raise UserError(
                    Message(
                        "{path} is {model}'s VAE, whose normalization differs from that of {title}; replace it with "
                        "the vae/ of {title}'s diffusers folder",
                        path=path,
                        model=model,
                        title=family.title,
                    )
                )


def check_fit(family: ModelFamily) -> None:
    """Check by the configs that the parts belong to one model: each part's output fits the next one's input.

    Raises:
        UserErrors: the parts that do not fit, one line each.
    """
    problems = [_find_latents_problem(family), *(_find_width_problem(family, entry) for entry in family.text_widths)]
    problems += [_find_vocabulary_problem(family, name) for name in family.text_parts if "tokenizer" in name]
    problems += [_find_sampler_problem(family), _skip_problem(family)]
    if problems := [text for text in problems if text]:
        raise combine(problems)


def _read_number(family: ModelFamily, place: str) -> int | None:
    """Return the integer at "part.entry" of the configs; None if no config has it."""
    part, _, entry = place.partition(".")
    source = family._find_source(part) if part == "vae" or part in family.text_parts else None
    if source and source.file is family._file:
        return None  # the single file contains this part, so the folder's config may not apply
    path = family.folder / part / "config.json"
    config = (
        family.read_denoiser_config()
        if part == family.denoiser_name
        else _files.read_json(path)
        if path.is_file()
        else {}
    )
    entry, _, index = entry.partition(".")
    value = config.get(entry, (config.get("text_config") or {}).get(entry))
    if index:
        value = value[int(index)] if isinstance(value, list | tuple) and len(value) > int(index) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _find_latents_problem(family: ModelFamily) -> str:
    """Compare the VAE's latent channels with what the denoiser takes; returns the problem, or ""."""
    name = "z_dim" if _read_number(family, "vae.z_dim") else "latent_channels"
    given, taken = _read_number(family, f"vae.{name}"), _read_number(family, f"{family.denoiser_name}.in_channels")
    # As in `count_latent_channels`.
    times = 4 if family.vae_class == "AutoencoderKLFlux2" else family.patch**2 if family.latents_as == "BSD" else 1
    if not given or not taken or given * times == taken:
        return ""
    what = f"{given} * {times} = {given * times}" if times > 1 else str(given)
    return _describe_mismatch(
        family, "vae", _format_entry("vae", name, what), _format_entry(family.denoiser_name, "in_channels", str(taken))
    )


def _format_entry(part: str, entry: str, value: str) -> Message:
    return Message("{part} has {entry} = {value}", part=part, entry=entry, value=value)


def _skip_problem(family: ModelFamily) -> str:
    """Compare model.clip_skip with the layers of the text encoder; returns the problem, or ""."""
    if family.clip_skip == 1:
        return ""
    most = _read_number(family, "text_encoder.num_hidden_layers")
    if most is None or family.clip_skip <= most:
        return ""
    return Message(
        "model.clip_skip = {given}: the text encoder has {count} layers. Use at most {count}",
        given=family.clip_skip,
        count=most,
    )


def _find_width_problem(family: ModelFamily, entry: str) -> str:
    place = entry if entry.partition(".")[0] in family.text_parts else f"{family.denoiser_name}.{entry}"
    wanted, total = _read_number(family, place), 0
    for term in family.text_widths[entry].split(" + "):
        times, _, source = term.rpartition(" * ")
        number = _read_number(family, source)
        if wanted is None or number is None:
            return ""
        total += int(times or 1) * number
    part, _, entry = place.partition(".")
    given = f"{family.text_widths.get(entry) or family.text_widths[place]} = {total}"
    return "" if total == wanted else _describe_mismatch(family, part, given, _format_entry(part, entry, str(wanted)))


def _describe_mismatch(family: ModelFamily, part: str, given: str, taken: str) -> str:
    return Message(
        "{path}: the components belong to different models: {given}, and {taken}. Take all components from one "
        "{family} folder",
        path=family.folder / part,
        given=given,
        taken=taken,
        family=family.title,
    )


def _find_vocabulary_problem(family: ModelFamily, tokenizer: str) -> str:
    """Compare a tokenizer's largest token with its encoder's vocabulary; returns the problem, or ""."""
    encoder = tokenizer.replace("tokenizer", "text_encoder")
    size = _read_number(family, f"{encoder}.vocab_size")
    if encoder not in family.text_parts:  # Anima's second tokenizer feeds its conditioner
        encoder, size = "text_conditioner", _read_number(family, "text_conditioner.target_vocab_size")
    path = family.folder / tokenizer / "tokenizer.json"
    if not size or not path.is_file():
        return ""
    content = _files.read_json(path)
    added = [token.get("id") for token in content.get("added_tokens") or [] if isinstance(token, dict)]
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    numbers = [*vocabulary.values(), *added] if isinstance(vocabulary, dict) else [len(vocabulary) - 1, *added]
    largest = max((number for number in numbers if isinstance(number, int)), default=0)
    if largest < size:
        return ""
    return _describe_mismatch(
        family,
        encoder,
        Message("{tokenizer} has tokens up to {largest}", tokenizer=tokenizer, largest=largest),
        _format_entry(encoder, "vocab_size", str(size)),
    )


def _find_sampler_problem(family: ModelFamily) -> str:
    """Return the problem if a flow matching model has a diffusion sampler or the reverse, else ""."""
    config = family.read_scheduler_config()
    flows = "FlowMatch" in str(config.get("_class_name")) or config.get("use_flow_sigmas") is True
    flows = flows or config.get("prediction_type") == "flow_prediction"
    wanted = family.objective == "FlowMatching"
    if flows == wanted or not config.get("_class_name"):
        return ""
    kind = Message("a flow matching model") if wanted else Message("a diffusion model")
    scheduler = Message("scheduler has {name}, which is not a sampler of {kind}", name=config["_class_name"], kind=kind)
    return _describe_mismatch(
        family, "scheduler", scheduler, Message("{title} is {kind}", title=family.title, kind=kind)
    )


def _check_unquantized(family: ModelFamily) -> None:
    """Check that no part of the folder was saved quantized by diffusers or transformers."""
    from ._weights import ADVICE

    weighed = [family.denoiser_name] if family._file is None else []
    weighed += [name for name in _components.list_weight_parts(type(family)) if not family._find_source(name)]
    problems = []
    for name in weighed:
        path = family.folder / name / "config.json"
        section = _files.read_json(path).get("quantization_config") if path.is_file() else None
        if section:
            quantization = section if isinstance(section, dict) else {}
            method = quantization.get("quant_method") or Message("an unnamed method")
            if bits := 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else 0:
                method = Message("{method} ({bits} bits)", method=method, bits=bits)
            problems.append(
                Message(
                    "{path} was saved quantized by {method}, which is not supported; {line}",
                    path=path.parent,
                    method=method,
                    line=ADVICE,
                )
            )
    if problems:
        raise UserErrors(problems)


def check_parts(family: ModelFamily) -> None:
    """Check that denoiser, scheduler, VAE, tokenizers and text encoders match their configs.

    The parts are built as for training, but from the files' headers, without reading a weight. Parts inside a
    single file are checked when they are loaded.

    Raises:
        UserErrors: the parts that cannot be used, one line each.
    """
    tokenizers = [partial(_check_limit, family, name) for name in family.text_parts if family._is_tokenizer(name)]
    encoders = [partial(_check_encoder, family, name) for name in family._list_text_encoders()]
    problems: list[str] = []
    for look in (
        partial(check_denoiser, family),
        partial(check_scheduler, family),
        partial(check_prediction, family),
        partial(_check_vae_sizes, family),
        *tokenizers,
        *encoders,
    ):
        try:
            look()
        except UserError as error:
            problems += error.problems
    if problems:
        raise combine(list(dict.fromkeys(problems)))


def _check_encoder(family: ModelFamily, name: str) -> None:
    """Check that a text encoder's config fits its weights."""
    source = family._find_source(name)
    cls, stem = family._find_text_class(name)
    if source is None:
        family._from_pretrained(cls, stem, name, device_map="meta")
    elif source.file is not family._file:
        config = cls.config_class.from_pretrained(family.folder / name, local_files_only=True)
        _part_files.build_text_encoder(cls, config, source, None)


def _check_vae_sizes(family: ModelFamily) -> None:
    """Check that the VAE's config is valid and fits its weight file."""
    import diffusers

    family.make_empty_vae()
    if not family._find_source("vae"):
        cls = getattr(diffusers, family.vae_class)
        family._from_pretrained(cls, "diffusion_pytorch_model", "vae", device_map="meta")


def _check_limit(family: ModelFamily, name: str) -> None:
    """Check that this tokenizer can be read, and that it states a token limit if nothing else does."""
    tokenizer = family.load_tokenizer(name)
    limit = getattr(tokenizer, "model_max_length", 1)  # processors have none
    fits = isinstance(limit, int | float) and limit > 0
    # Without a limit in its config, transformers reports a number of thirty digits.
    if fits and "CLIP" in family.text_parts[name]:
        fits = limit <= MOST_TOKENS
    elif fits and name in family.judge_length_by:
        fits = family.compute_token_limit(name) <= MOST_TOKENS
    if not fits:
        raise UserError(
            Message(
                "{path} does not say how many tokens the text encoder reads (model_max_length is {limit}); "
                "download it again",
                path=family.folder / name / "tokenizer_config.json",
                limit=repr(limit),
            )
        )


def _import_families() -> list[type[ModelFamily]]:
    # Imports every family file, which is affordable only because this serves error messages.
    return [importlib.import_module(f"{__package__}.{name}").Family for name in list_families()]


def describe_checkpoint(header: Header) -> tuple[str, type[ModelFamily] | None]:
    """Return what a single file seems to be, as words for an error message, and its family if it has one."""
    import torch
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type

    what, name = describe(header)
    if what:
        return what, get(name) if name else None
    # diffusers knows many more kinds. It compares shapes only, and returns "v1" when none fits.
    try:
        kind = infer_diffusers_model_type({key: torch.empty(shape, device="meta") for key, shape in header.items()})
    except (KeyError, IndexError):  # one mark fits, and the next tensors it compares are missing
        kind = "v1"
    return (UNKNOWN if kind == "v1" else Message("{name} (as diffusers calls it)", name=repr(kind))), None
