"""Verifies that an exported file does what training did: diffusers itself loads it, and the results are compared.

`check` runs these checks in order; each is a named line of the report:

    file, metadata, hash        the bytes are complete, the header has what hosts need, the hash matches the bytes
    pairs, finite, trained      each A has its B at one rank; no NaN or infinity; no B is zero
    load                        `pipeline.load_lora_weights` of a clean pipeline takes every tensor, and nothing else
    delta                       each layer's change in that pipeline is what training added: B @ A * scaling
    text, text effect           if text encoders were trained: the pipeline's encode captions as in training
    prediction, effect          its denoiser predicts for stored inputs (the probe) what the training model did
    preview                     its previews equal those made while training (PSNR)
    plain prediction / preview  the same on the published base in its own dtype: measured and reported, not judged
    merged                      reported, not judged: how much is left after merging into the base and storing it in FP8

Why there are two bases. An adapter trained on FP8 weights has seen rounded weights. On the same rounded weights,
dequantized, the file must give the same results: any difference there is our mistake. On the published weights the
difference that remains is the error of FP8; users should know how large it is, so it is reported.

How rounding matters. In bf16, the last bit of an adapter changes a UNet's prediction by about 1 %, whatever the adapter
does, because every rounding after it falls differently. So if anything computes or is stored in less than float32 and
the error is above the fixed tolerance, the tolerance is measured: the file's adapter is made stronger by one step of
the last bit (2^-8 in bf16), and twice the resulting change is allowed. For comparison, the line `effect` reports what
the adapter as a whole does. The precise check is `delta`: it compares weights, unaffected by the denoiser's arithmetic.

Only the probe and the trained tensors are taken from training. The clean pipeline's denoiser is a plain diffusers model
without a module of this package, and the file goes through diffusers' own conversion. diffusers does not convert every
layout that other programs read, and its conversion of kohya's FLUX.1 is hard-coded to the released size: such files are
first renamed by `layouts.from_layout`, and the report says so. diffusers does not read LoHa at all, and LoKr rarely:
the deltas of such a file are computed from it and added beside the clean pipeline's layers, as the report says.

Shapes: B batch, C channels, H height, W width (latents); r rank.
"""

import gc
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import families, precision, settings
from ..adapters import kinds
from ..common.text import first_few
from ..errors import Message, RunFailure, UserError
from ..families._encoders import quiet
from ..lora_files import export, layouts
from ..objectives import PREDICTION_TYPES
from ..training.text_encoders import answer

Tensors = Iterable[tuple[str, precision.Weight]]
Base = Mapping[str, Tensor] | Callable[[], Tensors]  # a whole state dict, or a function that streams one

# Relative error of a prediction (Frobenius norm), by the denoiser's compute dtype. More is allowed if rounding does
# more.
PREDICTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# Relative error of B @ A * scaling, by the coarsest dtype involved: both factors may be rounded once (and once more if
# a client multiplies alpha in), and bf16 rounds by up to 2^-9 of a value.
DELTA_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
PREVIEW_PSNR = 40.0  # dB
MARGIN = 2  # between two effects of rounding, which have the same size but not the same value
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # one step of the last bit, relative
HEADER_KEYS = (
    *("sshs_model_hash", "ss_base_model_version", "ss_network_module", "ss_network_dim", "ss_network_alpha"),
    *("modelspec.sai_model_spec", "modelspec.architecture", "modelspec.implementation", "modelspec.title"),
    *("modelspec.resolution", "modelspec.hash_sha256"),
)
EMPTY_HASH = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of nothing


# -- the report


@dataclass(frozen=True)
class Check:
    """The result of one check. `judged` is False for what is only measured; then `ok` is True."""

    name: str
    ok: bool
    detail: str
    judged: bool = True


@dataclass
class Report:
    """The checks of one file.

    Attributes:
        file: name of the file.
        checks: results, in the order of the checks.
        measured: numbers by name: prediction_error, delta_error, preview_psnr, plain_prediction_error,
            plain_preview_psnr, merged_unscaled, merged_row-scaled.
    """

    file: str
    checks: list[Check] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if every judged check passed."""
        return all(check.ok for check in self.checks)

    def failed(self) -> list[str]:
        """Return the checks that failed, each as "name: detail"."""
        return [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]

    def add(self, name: str, ok: bool, detail: str, *, judged: bool = True) -> bool:
        """Add a check's result, and return `ok`."""
        self.checks.append(Check(name, bool(ok), detail, judged))
        return bool(ok)

    def measure(self, name: str, value: float) -> float:
        """Record a number, and return it."""
        self.measured[name] = float(value)
        return float(value)

    def to_json(self) -> dict[str, Any]:
        """Return what verify.json stores: plain JSON types; infinity (identical images) becomes None."""
        return {
            "file": self.file,
            "ok": self.ok,
            "checks": [vars(check) for check in self.checks],
            "measured": {name: value if math.isfinite(value) else None for name, value in self.measured.items()},
        }

    def lines(self) -> list[str]:
        """Return one line per check, for the log."""
        marks = {(True, True): "ok  ", (False, True): "FAIL", (True, False): "info", (False, False): "info"}
        return [f"{marks[c.ok, c.judged]} {c.name}: {c.detail}" for c in self.checks]


# -- the probe: inputs and the training model's prediction


@dataclass(frozen=True)
class Probe:
    """Inputs of the denoiser and the training model's prediction for them, on the CPU.

    Attributes:
        noisy_BCHW, t_B, cond, guidance: arguments of `family.predict`.
        prediction_BCHW: the training model's prediction, with the adapter and without dropout.
        captions: captions that the trained text encoders turned into `cond`; () if none was trained.
    """

    noisy_BCHW: Tensor
    t_B: Tensor
    cond: dict[str, Tensor]
    prediction_BCHW: Tensor
    guidance: float = 1.0
    captions: tuple[str, ...] = ()


def make_probe(
    family: Any, denoiser: nn.Module, objective: Any, batch: Any, guidance: float = 1.0, text: Any = None
) -> Probe:
    """Add noise to a batch and record the training denoiser's prediction, as in a training step.

    Args:
        family: family of the model.
        denoiser: the training model, with its adapter; it is called in eval mode, which is reset after.
        objective: the job's objective.
        batch: `data.loader.Batch`, or an object with its latents_BCHW, noise_BCHW, t_generators and cond (collated).
            Its generators are drawn from, so pass one that training does not use.
        guidance: guidance scale of the training.
        text: the trained `TextEncoders`, which encode the batch's captions; None if none is trained.
    """
    latents_BCHW, noise_BCHW = batch.latents_BCHW.cpu(), batch.noise_BCHW.cpu()
    t_B = objective.sample_t(batch.t_generators, family.seq_len(tuple(latents_BCHW.shape[2:])))
    noisy_BCHW = objective.add_noise(latents_BCHW, noise_BCHW, t_B)
    cond = {name: tensor.detach().cpu() for name, tensor in batch.cond.items()}
    captions: tuple[str, ...] = ()
    if text is not None:
        captions = tuple(batch.captions)
        cond = answer(family, text.pipeline, captions, cond)
    prediction_BCHW = _predict(family, denoiser, noisy_BCHW, t_B, cond, guidance)
    return Probe(noisy_BCHW, t_B, cond, prediction_BCHW, guidance, captions)


def predict(family: Any, denoiser: nn.Module, probe: Probe) -> Tensor:
    """Return a denoiser's prediction for the probe's inputs: (B, C, H, W) on the CPU."""
    return _predict(family, denoiser, probe.noisy_BCHW, probe.t_B, probe.cond, probe.guidance)


def _predict(
    family: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: dict[str, Tensor], guidance: float
) -> Tensor:
    device = next(denoiser.parameters()).device
    was_training = denoiser.training
    denoiser.eval()
    try:
        with torch.no_grad():
            moved = {name: tensor.to(device) for name, tensor in cond.items()}
            return family.predict(denoiser, noisy.to(device), t.to(device), moved, guidance).detach().cpu()
    finally:
        denoiser.train(was_training)


def save_probe(probe: Probe, path: Path) -> None:
    """Write a probe as safetensors, so that other programs can be tested with its inputs and prediction."""
    tensors = {"noisy": probe.noisy_BCHW, "t": probe.t_B, "prediction": probe.prediction_BCHW}
    tensors |= {f"cond.{name}": tensor for name, tensor in probe.cond.items()}
    about = {"guidance": repr(float(probe.guidance))}
    if probe.captions:
        about["captions"] = json.dumps(probe.captions)
    export.write_file(path, tensors, about)


# -- previews


@dataclass(frozen=True)
class Previews:
    """Previews made while training, and how to make them with another pipeline.

    Attributes:
        images: PIL images, or uint8 arrays (H, W, 3), of the training model at the exported step.
        render: makes the same previews (prompts, seeds, settings) with the pipeline that it is given.
    """

    images: Sequence[Any]
    render: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Reference:
    """What training leaves to compare a file with. What is None is not compared.

    Attributes:
        adapter: the trained adapter, for `delta`.
        probe: stored inputs and the training model's prediction, for `prediction`.
        previews: previews of the training model, for `preview`.
        base: the weights that training used, dequantized (FP8 storage). None: training used the published weights in
            the family's dtype, so these are judged and there is no second measurement.
    """

    adapter: export.Adapter | None = None
    probe: Probe | None = None
    previews: Previews | None = None
    base: Base | None = None


def psnr(image: Any, other: Any) -> float:
    """Return the peak signal-to-noise ratio of two 8-bit images in dB; infinity if they are identical.

    Raises:
        ValueError: the images differ in size.
    """
    a, b = (np.asarray(x).astype(np.float64) for x in (image, other))
    if a.shape != b.shape:
        raise ValueError(f"pictures of {a.shape} and {b.shape} cannot be compared")
    error = np.mean((a - b) ** 2)
    return math.inf if error == 0 else float(10 * np.log10(255.0**2 / error))


def preview_psnr(previews: Previews, pipeline: Any) -> float:
    """Return the PSNR in dB of the worst preview, compared with the same one made by `pipeline`.

    Raises:
        ValueError: the number or size of the images differs.
    """
    return _worst(previews.images, list(previews.render(pipeline)))


def _worst(images: Sequence[Any], others: Sequence[Any]) -> float:
    return min((psnr(a, b) for a, b in zip(images, others, strict=True)), default=math.inf)


def _told(worst: float) -> str:
    return "every pixel the same" if math.isinf(worst) else f"{worst:.1f} dB at worst"


# -- the clean pipeline


def clean_pipeline(
    family: Any,
    base: Base | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    text: bool = False,
) -> Any:
    """Return the family's diffusers pipeline with a new denoiser: a plain diffusers model, without our modules.

    Args:
        family: family of the model.
        base: weights by diffusers' names (the dequantized FP8 ones), or a function that streams them; None: the
            published ones, as the family reads them from the model's files.
        dtype: storage and compute dtype of the denoiser; None: the family's.
        device: device of the denoiser; None: the family's. On another one it can predict, but the pipeline cannot
            generate images.
        text: True adds the trainable text encoders, newly loaded from the model's files.

    Raises:
        RunFailure: the weights are not those of this denoiser.
    """
    dtype = dtype or family.dtype
    denoiser = family.empty_denoiser()
    if base is None:
        tensors: Tensors = family.denoiser_tensors()
    else:
        tensors = base() if callable(base) else base.items()
    wide = set(getattr(denoiser, "_keep_in_fp32_modules", None) or ())  # float32 in diffusers' own loading, too

    def held(name: str, tensor: Tensor) -> Tensor:
        to = torch.float32 if wide & set(name.split(".")) else dtype
        return tensor.detach().to(device or family.device, to if tensor.is_floating_point() else tensor.dtype)

    state = {name: held(name, precision.plain(tensor)) for name, tensor in tensors}
    wrong = denoiser.load_state_dict(state, strict=False, assign=True)
    if wrong.missing_keys or wrong.unexpected_keys:
        raise RunFailure(
            Message(
                "the base for verification is not whole: missing {missing}, unexpected {unexpected}",
                missing=first_few(wrong.missing_keys) or "none",
                unexpected=first_few(wrong.unexpected_keys) or "none",
            )
        )
    left = [name for name, buffer in denoiser.named_buffers() if buffer.is_meta]
    if left:
        raise RunFailure(
            Message(
                "{name} has buffers that no file holds: {names}", name=type(denoiser).__name__, names=", ".join(left)
            )
        )
    foreign = {type(m).__name__ for m in denoiser.modules() if type(m).__module__.split(".")[0] in ("lora_fp8", "peft")}
    if foreign:
        raise RunFailure(
            Message("the denoiser for verification is not clean: it holds {names}", names=", ".join(sorted(foreign)))
        )
    return family.pipeline(denoiser.requires_grad_(False).eval(), text=text)


def load(pipeline: Any, file: Path, family: Any) -> tuple[list[str], str | None]:
    """Load a LoRA file into a pipeline as a user of diffusers does.

    Returns:
        Warnings of diffusers and peft; and why the file was renamed before diffusers loaded it, or None.
    """
    denoiser_config = dict(getattr(pipeline, family.denoiser_name).config)
    tensors, _ = export.read_adapter(file, sound=False)
    layout = layouts.detect_layout(tensors, family)
    (kind,) = layouts.kinds_in(layouts.from_layout(tensors, family, denoiser_config, layout)[0])
    renamed = layouts.unread_by_diffusers(family, denoiser_config, layout, kind)
    with _complaints() as complaints, quiet():
        if renamed:
            state, scaling = layouts.from_layout(tensors, family, denoiser_config, layout)
            if layouts.unread_by_diffusers(family, denoiser_config, "diffusers", kind):
                _attach(getattr(pipeline, family.denoiser_name), state, scaling)
                return complaints, Message(
                    "{why}: each delta, made from the file, is added beside the layer", why=renamed
                )
            pipeline.load_lora_weights(layouts.to_layout(state, scaling, family, denoiser_config, "diffusers"))
        else:
            pipeline.load_lora_weights(str(file.parent), weight_name=file.name, local_files_only=True)
    return complaints, renamed


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Collect the warnings of diffusers and peft, whatever verbosity the caller has set."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            # diffusers warns about each part that a file does not adapt; layers that were not loaded are found by name.
            if not re.search(r"No LoRA keys associated to \w+ found with the prefix=", text):
                found.append(text)

    collect = Collect(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("diffusers", "peft")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        for logger in loggers:  # into the list and not to the screen: the report shows what matters
            logger.handlers, logger.propagate = [collect], False
            logger.setLevel(logging.WARNING)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
        found += [str(w.message) for w in warned if not issubclass(w.category, DeprecationWarning | FutureWarning)]
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


class _Attached:
    """A forward hook that adds the effect of LoKr or LoHa tensors to a layer's output."""

    def __init__(self, parts: dict[str, Tensor], scaling: float) -> None:
        self.parts, self.scaling, self.strength = parts, scaling, 1.0

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], answer: Tensor) -> Tensor:
        x = inputs[0]
        added = kinds.delta({name: part.to(x.device) for name, part in self.parts.items()}, self.scaling)
        added = (added * self.strength).to(x.dtype).reshape(layer.weight.shape)
        if isinstance(layer, nn.Conv2d):
            return answer + F.conv2d(x, added, None, layer.stride, layer.padding, layer.dilation)
        return answer + F.linear(x, added)


def _attach(denoiser: nn.Module, state: Mapping[str, Tensor], scaling: Mapping[str, float]) -> None:
    for path, parts in kinds.grouped(state).items():
        layer = denoiser.get_submodule(path)
        attached = _Attached(parts, scaling[path])
        vars(layer)["attached"] = attached
        layer.register_forward_hook(attached)


@dataclass(frozen=True)
class Loaded:
    """The adapter that acts on one layer: its tensors by the last part of their names, and their scaling.

    Attributes:
        parts: the tensors.
        scaling: factor of their product.
        weight: the layer's own weight, on which DoRA's delta depends.
    """

    parts: dict[str, Tensor]
    scaling: float
    weight: Tensor

    @property
    def acts(self) -> bool:
        """True if the adapter has an effect; in a layer that was filled up when fused, the zero-start tensors are 0."""
        return all(tensor.any() for name, tensor in self.parts.items() if name in kinds.ZERO_AT_START)


def loaded_layers(denoiser: nn.Module) -> dict[str, Loaded]:
    """Return {module path: adapter} of a denoiser that a file was loaded into."""
    found = {}
    for path, module in denoiser.named_modules():
        if attached := getattr(module, "attached", None):
            found[path] = Loaded(attached.parts, attached.scaling, module.weight)
        for adapter in module.active_adapters if hasattr(module, "get_base_layer") else ():
            parts = {}
            for part in kinds.ALL_PARTS:
                held = getattr(module, part.removesuffix(".weight"), None)
                if held is not None and adapter in held:
                    tensor = held[adapter] if isinstance(held, nn.ParameterDict) else held[adapter].weight
                    parts[part] = tensor.detach()
            if parts:
                found[path] = Loaded(parts, float(module.scaling[adapter]), module.get_base_layer().weight)
    return found


def all_loaded(pipeline: Any, family: Any) -> dict[str, Loaded]:
    """Return `loaded_layers` of a pipeline's denoiser and text encoders, by an adapter's names."""
    found = loaded_layers(getattr(pipeline, family.denoiser_name))
    for name in family.trained_text:
        if (encoder := getattr(pipeline, name, None)) is not None:
            found |= {layouts.text_layer(name, path): one for path, one in loaded_layers(encoder).items()}
    return found


def delta_error(pair: tuple[Tensor, Tensor, float], other: tuple[Tensor, Tensor, float]) -> float:
    """Return the relative error ||B'A's' - BAs|| / ||BAs|| (Frobenius norm) of `pair`, compared with `other`.

    Both are (A, B, scaling). The (out, in) matrices are never formed. With X = [B's', -Bs] and Y = [A'; A], ||XY||^2 is
    the trace of (X^T X)(Y Y^T): two small matrices, in float64 because equal deltas cancel.
    """

    def gram(columns: Tensor, rows: Tensor) -> float:
        return max(float((columns.T @ columns * (rows @ rows.T)).sum()), 0.0)

    (a, b, s), (a0, b0, s0) = ((x.double().flatten(1), y.double().flatten(1), z) for x, y, z in (pair, other))
    norm = gram(b0 * s0, a0)
    error = gram(torch.cat([b * s, -b0 * s0], 1), torch.cat([a, a0.to(a.device)]))
    return math.sqrt(error / norm) if norm else (0.0 if error == 0 else math.inf)


def _layer_error(loaded: Loaded, parts: dict[str, Tensor], scale: float) -> float:
    """Return the relative error of a loaded layer's change of its weight, compared with the trained tensors'.

    For DoRA it is the larger error of the two loaded things, B @ A and the magnitudes. The change of the weight that
    they make together is a small difference, in which the magnitudes' rounding in a bf16 pipeline would look large.
    """
    if set(loaded.parts) != set(parts):
        return math.inf
    device = loaded.weight.device
    trained = {name: tensor.to(device) for name, tensor in parts.items()}
    if "lora_A.weight" not in parts:
        deltas = (
            kinds.delta(held, by, torch.float64) for held, by in ((loaded.parts, loaded.scaling), (trained, scale))
        )
        return relative_error(*deltas)
    pair, own = ((one["lora_A.weight"], one["lora_B.weight"]) for one in (loaded.parts, trained))
    error = delta_error((*pair, loaded.scaling), (*own, scale))
    if "lora_magnitude_vector" in parts:
        lengths = (one["lora_magnitude_vector"].flatten() for one in (loaded.parts, trained))
        error = max(error, relative_error(*lengths))
    return error


def relative_error(tensor: Tensor, reference: Tensor) -> float:
    """Return ||tensor - reference|| / ||reference|| in float64; infinity for different shapes or NaN."""
    if tensor.shape != reference.shape:
        return math.inf
    error = float((tensor.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


# -- verification


def check(
    file: Path,
    family: Any,
    reference: Reference | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    merged: bool = False,
) -> Report:
    """Verify an exported file. Problems of the file never raise; the report lists them.

    If the file's bytes fail a check, the report ends there, because a broken file cannot be compared.

    Args:
        file: the LoRA file.
        family: the ModelFamily instance, with its device and dtype. The VAE is loaded if previews are compared.
        reference: what the file is compared with; None: nothing, it only has to load.
        dtype: compute dtype of the clean denoiser; None: the family's.
        device: device of the clean denoiser; None: the family's. On another one (the CPU, if the GPU has no room for
            the unquantized model) previews cannot be compared.
        merged: measure what merging into an FP8 base would leave of the LoRA; reads the published weights once more.

    Raises:
        ValueError: previews are to be compared on another device than the family's.
        RunFailure: see `clean_pipeline`.
    """
    reference = reference or Reference()
    probe, previews, base = reference.probe, reference.previews, reference.base
    if previews is not None and device not in (None, family.device):
        raise ValueError(f"previews are drawn on {family.device}; they cannot be compared on {device}")
    report = Report(file.name)
    dtype = dtype or family.dtype
    tensors = _check_file(file, family, report)
    if tensors is None:
        return report
    text = layouts.has_text(tensors, family)
    pipeline = clean_pipeline(family, base, dtype, device, text=text)
    if not _check_load(pipeline, file, family, tensors, report):
        return report
    denoiser = getattr(pipeline, family.denoiser_name)
    if reference.adapter is not None:
        _check_delta(all_loaded(pipeline, family), reference.adapter, tensors, report)
    where = "on the base that training saw (decoded)" if base is not None else "on the base"
    # peft computes an adapter in the adapter's own dtype, so the trained one's dtype counts as well
    trained = reference.adapter.state if reference.adapter else {}
    step = max(ROUNDING.get(d, 0.0) for d in {dtype} | _dtypes(tensors) | _dtypes(trained))
    if probe is not None and probe.captions:
        _check_text(pipeline, family, probe, step, report)
    if probe is not None:
        _check_prediction(denoiser, family, probe, step, where, report)
    if previews is not None:
        _check_previews(pipeline, denoiser, previews, step, where, report)
    # one denoiser at a time: two of a large model would not fit into memory together
    del pipeline, denoiser
    gc.collect()
    if base is not None and (probe is not None or previews is not None):
        pipeline = clean_pipeline(family, None, dtype, device, text=text)
        load(pipeline, file, family)
        _measure_plain(pipeline, family, reference, report)
    if merged:
        _measure_merged(family, tensors, report)
    return report


def check_file(file: Path, base: str = "", family_name: str = "") -> Report:
    """Verify a file without the run that made it.

    Args:
        file: the LoRA file.
        base: base model to load it into (as `model.path`); empty: check the bytes, names, pairs and values only.
        family_name: the architecture; empty: take it from the file's metadata.

    Raises:
        UserError: there is no such file, or its architecture is unknown.
    """
    if not file.is_file():
        raise UserError(Message("{path}: no such file", path=file))
    if not family_name:
        metadata = export.read_header(file).metadata
        family_name = family_told(metadata)
        if not family_name:
            told = metadata.get("ss_base_model_version")
            what = f"says {told!r}, which is none of ours" if told else "does not say it"
            accepted = " | ".join(families.available())
            raise UserError(f"{file}: the header {what}; name the architecture with --family ({accepted})")
    Family = families.get(family_name)
    if not base:
        report = Report(file.name)
        _check_file(file, Family, report)
        return report
    stated = export.read_header(file).metadata.get("modelspec.prediction_type", "")
    prediction = stated if stated in PREDICTION_TYPES else "auto"
    section = settings.Model(family=family_name, path=base)
    family = Family(section, device="cpu", dtype=torch.bfloat16, prediction=prediction)
    return check(file, family, merged=True)


def family_told(metadata: Mapping[str, str]) -> str:
    """Return the family that a file's header names; "" if it names none of ours."""
    told = metadata.get("ss_base_model_version")
    return next((name for name in families.available() if families.get(name).kohya_base_version == told), "")


def _check_file(file: Path, family: Any, report: Report) -> dict[str, Tensor] | None:
    """Check what the bytes alone show. Returns the tensors, or None if the file cannot be used."""
    try:
        header = export.read_header(file)
        tensors, metadata = export.read_adapter(file, sound=False)
        layout = layouts.detect_layout(tensors, family)
    except UserError as error:
        report.add("file", False, str(error))
        return None
    detail: str = Message(
        "{n} tensors in {size} MiB, {layout} layout",
        n=len(tensors),
        size=f"{file.stat().st_size / 2**20:.1f}",
        layout=layout,
    )
    aligned = header.data_begin % 8 == 0
    report.add(
        "file",
        aligned,
        detail
        if aligned
        else Message("{line}; its data begin at {place}, no multiple of 8", line=detail, place=header.data_begin),
    )

    problems = _header_problems(metadata, header.data_begin)
    detail = "; ".join(problems) or Message("{n} keys, the required ones among them", n=len(metadata))
    whole = report.add("metadata", not problems, detail)
    whole &= _check_hash(file, metadata, report)
    try:  # checks `tensors` and not the loaded model: InvokeAI refuses a pair that is broken here
        modules = _pairs(tensors, layout)
        whole &= report.add("pairs", True, Message("{n} layers, each with both halves at one rank", n=len(modules)))
    except UserError as error:
        whole &= report.add("pairs", False, str(error))
    whole &= _check_values(tensors, report)
    return tensors if whole else None


def _header_problems(metadata: Mapping[str, str], num_bytes: int) -> list[str]:
    """Return what a program or a host would refuse of a header of `num_bytes`."""
    problems: list[str] = [Message("{name} is missing", name=key) for key in HEADER_KEYS if key not in metadata]
    if not re.fullmatch(r"\d+x\d+", metadata.get("modelspec.resolution", "0x0")):
        problems.append(
            Message("modelspec.resolution {value} is not WxH", value=repr(metadata["modelspec.resolution"]))
        )
    if num_bytes > export.MAX_HEADER:
        problems.append(Message("the header has {size} MiB, hosts refuse large ones", size=f"{num_bytes / 2**20:.1f}"))
    return problems


def _check_hash(file: Path, metadata: Mapping[str, str], report: Report) -> bool:
    """Check that the hashes in the header are those of the data."""
    sha = export.payload_hash(file)
    told = {metadata.get("sshs_model_hash"), metadata.get("modelspec.hash_sha256", "").removeprefix("0x")}
    right = told == {sha} and sha != EMPTY_HASH
    names = " and ".join(sorted(f"{one[:12]}..." for one in told if one)) or "nothing"
    detail = (
        f"sha256 {sha[:12]}..."
        if right
        else Message("the data have {hash}..., the header says {told}", hash=sha[:12], told=names)
    )
    return report.add("hash", right, detail)


def _check_values(tensors: Mapping[str, Tensor], report: Report) -> bool:
    """Check that all values are finite, and that no layer is without effect."""
    wrong = export.not_finite(tensors)
    finite = report.add(
        "finite",
        not wrong,
        Message("NaN or infinity in {names}", names=first_few(wrong)) if wrong else Message("no NaN, no infinity"),
    )
    is_up = (".lora_up.weight", *(f".{part}" for part in kinds.ZERO_AT_START))
    ups = {name: t for name, t in tensors.items() if name.endswith(is_up)}
    does = ups | {name: alpha for name, alpha in tensors.items() if name.endswith(".alpha")}
    zero = sorted(name for name, tensor in does.items() if not tensor.float().any())
    detail = (
        f"B or alpha is zero in {first_few(zero)} ({len(zero)} of {len(does)})" if zero else Message("no layer is zero")
    )
    return report.add("trained", bool(ups) and not zero, detail) and finite


def _figure(error: float) -> str:
    return f"{error:.2e}" if error else "0"


def _pairs(tensors: Mapping[str, Tensor], layout: str) -> list[str]:
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    renamed = {n.replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B."): t for n, t in weights.items()}
    other = layouts.kinds_in(renamed) != {"lora"}
    modules = layouts.modules(renamed if layout == "kohya" or other else weights)
    if layout == "kohya":
        alphas = {name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")}
        if alphas != set(modules):
            raise UserError(
                Message(
                    "alpha and weights do not belong together in {names}",
                    names=first_few(sorted(alphas ^ set(modules))),
                )
            )
    return modules


def _check_load(pipeline: Any, file: Path, family: Any, tensors: Mapping[str, Tensor], report: Report) -> bool:
    denoiser = getattr(pipeline, family.denoiser_name)
    try:
        in_file, _ = layouts.from_layout(tensors, family, dict(denoiser.config))
        complaints, renamed = load(pipeline, file, family)
    except Exception as error:  # diffusers raises many types for a file that does not fit; all mean the same here
        return report.add("load", False, f"{type(error).__name__}: {str(error)[:500]}")
    # a fused layer with untrained members is loaded with zeros for these
    acting = {path for path, one in all_loaded(pipeline, family).items() if one.acts}
    wanted = set(layouts.modules(in_file))
    problems = [Message("diffusers warns: {text}", text=text[:300]) for text in complaints]
    if wanted - acting:
        lost = sorted(wanted - acting)
        problems.append(
            Message(
                "{count} of {total} layers were not loaded, as {names}",
                count=len(lost),
                total=len(wanted),
                names=first_few(lost),
            )
        )
    if acting - wanted:
        problems.append(
            Message("layers that the file does not have: {names}", names=first_few(sorted(acting - wanted)))
        )
    detail: str = Message(
        "all {n} layers, by {call}", n=len(wanted), call=f"{type(pipeline).__name__}.load_lora_weights"
    )
    if renamed:
        detail += f" after renaming ({renamed})"
    return report.add("load", not problems, "; ".join(problems) or detail)


def _check_delta(
    loaded: Mapping[str, Loaded],
    adapter: export.Adapter,
    tensors: Mapping[str, Tensor],
    report: Report,
) -> None:
    trained, scaling = kinds.grouped(adapter.state), adapter.scaling
    missing = sorted(set(trained) - set(loaded))
    if missing:
        report.add(
            "delta",
            False,
            Message(
                "{count} trained layers are not in the file, as {names}", count=len(missing), names=first_few(missing)
            ),
        )
        return
    errors = {}
    for module, parts in trained.items():
        scale = float(scaling[module] if isinstance(scaling, Mapping) else scaling)
        errors[module] = _layer_error(loaded[module], parts, scale)
    worst = max(errors, key=lambda module: errors[module])
    dtypes = _dtypes(tensors) | {tensor.dtype for one in loaded.values() for tensor in one.parts.values()}
    tolerance = max(DELTA_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    error = report.measure("delta_error", errors[worst])
    where = f" in {worst}" if error > 0 else ""
    report.add(
        "delta", error <= tolerance, f"relative error {_figure(error)} at worst{where} (allowed {tolerance:.0e})"
    )


def _check_text(pipeline: Any, family: Any, probe: Probe, step: float, report: Report) -> None:
    """Compare the pipeline's encoding of the captions with that of training."""
    found = [getattr(pipeline, name) for name in family.trained_text]
    if None in found:
        report.add("text", False, Message("the file holds no LoRA of the text encoders that were trained"))
        return
    encoders = nn.ModuleList(found)

    def ask() -> dict[str, Tensor]:
        return answer(family, pipeline, probe.captions, probe.cond)

    def gap(cond: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
        return max(relative_error(tensor, reference[name]) for name, tensor in cond.items())

    cond = ask()
    error, allowed, why = report.measure("text_error", gap(cond, probe.cond)), PREDICTION_TOLERANCE[family.dtype], ""
    if step and error > allowed:
        with _scaled(encoders, 1 + step):
            allowed = max(allowed, MARGIN * gap(ask(), cond))
        why = f": {MARGIN} times what the last bit of the adapter changes"
    report.add(
        "text",
        error <= allowed,
        Message(
            "conditioning: relative error {error} (allowed {allowed})",
            error=_figure(error),
            allowed=f"{allowed:.1e}{why}",
        ),
    )
    with _scaled(encoders, 0.0):
        effect = report.measure("text_effect", gap(ask(), cond))
    report.add(
        "text effect",
        True,
        Message("without the adapter the conditioning is {effect} off", effect=f"{effect:.1%}"),
        judged=False,
    )


def _check_prediction(denoiser: nn.Module, family: Any, probe: Probe, step: float, where: str, report: Report) -> None:
    answer = predict(family, denoiser, probe)
    error = report.measure("prediction_error", relative_error(answer, probe.prediction_BCHW))
    assert isinstance(denoiser.dtype, torch.dtype)  # of a diffusers model
    allowed = PREDICTION_TOLERANCE[denoiser.dtype]
    why = ""
    if step and error > allowed:
        with _scaled(denoiser, 1 + step):
            floor = relative_error(predict(family, denoiser, probe), answer)
        allowed = max(allowed, MARGIN * floor)
        why = f": {MARGIN} times what the last bit of the adapter changes"
        report.measure("prediction_floor", floor)
    report.add("prediction", error <= allowed, f"relative error {_figure(error)} {where} (allowed {allowed:.1e}{why})")
    with _scaled(denoiser, 0.0):
        effect = report.measure("effect", relative_error(predict(family, denoiser, probe), answer))
    report.add(
        "effect",
        True,
        Message("without the adapter the prediction is {effect} off", effect=f"{effect:.1%}"),
        judged=False,
    )


def _check_previews(
    pipeline: Any, denoiser: nn.Module, previews: Previews, step: float, where: str, report: Report
) -> None:
    rendered = list(previews.render(pipeline))
    worst = report.measure("preview_psnr", _worst(previews.images, rendered))
    allowed, why = PREVIEW_PSNR, ""
    if step and worst < allowed:
        with _scaled(denoiser, 1 + step):
            floor = _worst(rendered, list(previews.render(pipeline)))
        allowed = min(allowed, floor - 20 * math.log10(MARGIN))
        why = ", as the last bit of the adapter changes that much"
        report.measure("preview_floor", floor)
    least = "" if math.isinf(worst) else f" (at least {allowed:.1f}{why})"
    report.add("preview", worst >= allowed, f"{_told(worst)} {where}{least}")


MERGED_FORMATS = {"unscaled": precision.Format("fp8", "none"), "row-scaled": precision.FP8_ROW}
MOSTLY_LOST = 0.7  # cosine at which half of the change of the weights is rounding


def survival(weight_NK: Tensor, delta_NK: Tensor, form: precision.Format) -> float:
    """Measure what is left of a LoRA after merging it into a weight that is then stored in `form`.

    Returns the cosine of the angle between the wanted change and the actual one, which is the rounded sum minus the
    rounded weight. At 1 everything is left; its square is the share of the change that is not rounding; 0 means that
    nothing changes.
    """
    weight_NK, delta_NK = weight_NK.float(), delta_NK.float()
    before = precision.round_trip(weight_NK, form, torch.float32)
    change = precision.round_trip(weight_NK + delta_NK, form, torch.float32) - before
    norms = float(change.double().norm() * delta_NK.double().norm())
    return float((change.double() * delta_NK.double()).sum()) / norms if norms else 0.0


def _measure_merged(family: Any, tensors: Mapping[str, Tensor], report: Report) -> None:
    state, scaling = layouts.from_layout(tensors, family, family.denoiser_config())
    layers = kinds.grouped(state)
    # Only the denoiser is stored in FP8, so a file of text encoders alone has nothing to measure.
    wanted = {f"{module}.weight": module for module in layers if not layouts.text_encoder_of(module, family)}
    if not wanted:
        return
    left: dict[str, dict[str, float]] = {name: {} for name in MERGED_FORMATS}
    for name, weight in family.denoiser_tensors():
        if module := wanted.get(name):
            weight_NK = precision.plain(weight).to(family.device).flatten(1).float()
            parts = {part: tensor.to(family.device) for part, tensor in layers[module].items()}
            delta = kinds.gain(weight_NK, parts, scaling[module])
            for form_name, form in MERGED_FORMATS.items():
                left[form_name][module] = survival(weight_NK, delta, form)
    for name, found in left.items():
        median = report.measure(f"merged_{name}", float(np.median(list(found.values()))))
        worst = min(found, key=lambda module: found[module])
        hint = "; most of what merging changes is rounding: load the file beside the base instead"
        report.add(
            f"merged, {name} e4m3",
            True,
            f"cosine to the wanted change {median:.3f} in the median layer, {found[worst]:.3f} in {worst}"
            + (hint if median < MOSTLY_LOST else ""),
            judged=False,
        )


@contextmanager
def _scaled(denoiser: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the loaded adapter's strength by `factor` inside this context."""
    attached: list[_Attached] = [vars(one)["attached"] for one in denoiser.modules() if "attached" in vars(one)]
    adapted: list[Any] = [module for module in denoiser.modules() if hasattr(module, "get_base_layer")]
    layers = [(module, dict(module.scaling)) for module in adapted]
    lengths = [
        (dora, dora.weight.detach().clone(), module, name)
        for module, _ in layers
        for name, dora in (getattr(module, "lora_magnitude_vector", None) or {}).items()
    ]
    try:
        for one in attached:
            one.strength = factor
        for module, before in layers:
            module.scaling.update({name: scale * factor for name, scale in before.items()})
        for dora, trained, module, name in lengths:
            dora.weight.data = _lengths_at(factor, trained, module, name)
        yield
    finally:
        for one in attached:
            one.strength = 1.0
        for module, before in layers:
            module.scaling.update(before)
        for dora, trained, _, _ in lengths:
            dora.weight.data = trained


def _lengths_at(factor: float, trained: Tensor, module: Any, adapter: str) -> Tensor:
    """Return DoRA's magnitudes between the weight's own row lengths (factor 0) and the trained ones (1)."""
    a, b = (half[adapter].weight for half in (module.lora_A, module.lora_B))
    own = kinds.row_lengths(module.get_base_layer(), a, b, 0.0).view(trained.shape)
    return (own + factor * (trained.float() - own)).to(trained.dtype)


def _dtypes(tensors: Mapping[str, Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for name, tensor in tensors.items() if not name.endswith(export.KEPT_WIDE)}


def _measure_plain(pipeline: Any, family: Any, reference: Reference, report: Report) -> None:
    """Measure what the file gives in a pipeline of the published base, which it is loaded into."""
    probe, previews = reference.probe, reference.previews
    if probe is not None:
        answer = predict(family, getattr(pipeline, family.denoiser_name), probe)
        error = report.measure("plain_prediction_error", relative_error(answer, probe.prediction_BCHW))
        report.add(
            "plain prediction",
            True,
            Message("relative gap {error} on the base as published", error=_figure(error)),
            judged=False,
        )
    if previews is not None:
        worst = report.measure("plain_preview_psnr", preview_psnr(previews, pipeline))
        report.add("plain preview", True, f"{_told(worst)} on the base as published", judged=False)
