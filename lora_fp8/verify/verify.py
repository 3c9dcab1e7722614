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
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import families, settings
from ..adapters import kinds
from ..errors import Joined, Message, Template, UserError, first_few, missing_file
from ..lora_files import export, layer_names, layouts, safetensors_file
from ..objectives import PREDICTION_TYPES
from ..training.text_encoders import encode_batch
from .deltas import compute_layer_error, compute_relative_error
from .file_checks import UNNAMED_ARCHITECTURE, check_bytes
from .merging import measure_merged
from .pipeline import Loaded, build_clean_pipeline, find_all_loaded, load, scale_adapter
from .reference import Previews, Probe, Reference, find_worst_psnr, measure_preview_psnr, predict
from .report import Report

# Relative error of a prediction (Frobenius norm), by the denoiser's compute dtype. More is allowed if rounding does
# more.
PREDICTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# Relative error of B @ A * scaling, by the coarsest dtype involved: both factors may be rounded once (and once more if
# a client multiplies alpha in), and bf16 rounds by up to 2^-9 of a value.
DELTA_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
PREVIEW_PSNR = 40.0  # dB
MARGIN = 2  # between two effects of rounding, which have the same size but not the same value
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # one step of the last bit, relative


ON_BASE = Message("on the base model")
ON_DECODED = Message("on the base model as trained (dequantized)")
PUBLISHED = Message("on the original base model")
"""On which base a file and the trained model are compared."""
ALL_LOADED = Template("all {n} layers, by {call}")
ALL_LOADED_RENAMED = Template("all {n} layers, by {call} after renaming ({why})")
EQUAL = Template("every pixel is identical {place}")


def _format_limit(limit: str, floor: bool) -> str:
    """Return a limit with its reason: it is the usual one, or what the last bit of the adapter changes decides it."""
    if not floor:
        return limit
    return Message("{limit}: {count} times the effect of the adapter's last bit", limit=limit, count=MARGIN)


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
        RunFailure: see `build_clean_pipeline`.
    """
    reference = reference or Reference()
    probe, previews, base = reference.probe, reference.previews, reference.base
    if previews is not None and device not in (None, family.device):
        raise ValueError(f"previews are drawn on {family.device}; they cannot be compared on {device}")
    report = Report(file.name, on_check=reference.on_check)
    dtype = dtype or family.dtype
    tensors = check_bytes(file, family, report)
    if tensors is None:
        return report
    text = layer_names.has_text(tensors, family)
    pipeline = build_clean_pipeline(family, base, dtype, device, text=text)
    if not _check_load(pipeline, file, family, tensors, report):
        return report
    denoiser = getattr(pipeline, family.denoiser_name)
    if reference.adapter is not None:
        _check_delta(find_all_loaded(pipeline, family), reference.adapter, tensors, report)
    where = ON_DECODED if base is not None else ON_BASE
    # peft computes an adapter in the adapter's own dtype, so the trained one's dtype counts as well
    trained = reference.adapter.state if reference.adapter else {}
    step = max(ROUNDING.get(d, 0.0) for d in {dtype} | _collect_dtypes(tensors) | _collect_dtypes(trained))
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
        pipeline = build_clean_pipeline(family, None, dtype, device, text=text)
        load(pipeline, file, family)
        _measure_plain(pipeline, family, reference, report)
    if merged:
        measure_merged(family, tensors, report)
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
        raise missing_file(file)
    if not family_name:
        metadata = safetensors_file.read_header(file).metadata
        family_name = families.read_family_name(metadata)
        if not family_name:
            named_family = metadata.get("ss_base_model_version")
            accepted = " | ".join(families.list_families())
            if not named_family:
                raise UserError(UNNAMED_ARCHITECTURE(path=file, names=accepted))
            raise UserError(
                Message(
                    "{path}: the header says {kind}, which is not supported; name the architecture with --family "
                    "({names})",
                    path=file,
                    kind=repr(named_family),
                    names=accepted,
                )
            )
    Family = families.get(family_name)
    if not base:
        report = Report(file.name)
        check_bytes(file, Family, report)
        return report
    stated = safetensors_file.read_header(file).metadata.get("modelspec.prediction_type", "")
    prediction = stated if stated in PREDICTION_TYPES else "auto"
    section = settings.Model(family=family_name, path=base)
    family = Family(section, device="cpu", dtype=torch.bfloat16, prediction=prediction)
    family.fetch_weights()
    return check(file, family, merged=True)


def _format_error(error: float) -> str:
    return f"{error:.2e}" if error else "0"


def _check_load(pipeline: Any, file: Path, family: Any, tensors: Mapping[str, Tensor], report: Report) -> bool:
    denoiser = getattr(pipeline, family.denoiser_name)
    try:
        in_file, _ = layouts.from_layout(tensors, family, dict(denoiser.config))
        complaints, renamed = load(pipeline, file, family)
    except Exception as error:  # diffusers raises many types for a file that does not fit; all mean the same here
        return report.add("load", False, f"{type(error).__name__}: {str(error)[:500]}")
    # a fused layer with untrained members is loaded with zeros for these
    acting = {path for path, layer in find_all_loaded(pipeline, family).items() if layer.acts}
    wanted = set(layouts.list_modules(in_file))
    problems = [Message("diffusers warns: {text}", text=text[:300]) for text in complaints]
    if wanted - acting:
        lost = sorted(wanted - acting)
        problems.append(
            Message(
                "{count} of {total} layers were not loaded, such as {names}",
                count=len(lost),
                total=len(wanted),
                names=first_few(lost),
            )
        )
    if acting - wanted:
        problems.append(
            Message("layers were loaded that the file does not have: {names}", names=first_few(sorted(acting - wanted)))
        )
    if problems:
        return report.add("load", False, Joined("; ", problems))
    template = ALL_LOADED_RENAMED if renamed else ALL_LOADED
    call = f"{type(pipeline).__name__}.load_lora_weights"
    return report.add("load", True, template(n=len(wanted), call=call, why=renamed))


def _check_delta(
    loaded: Mapping[str, Loaded],
    adapter: export.Adapter,
    tensors: Mapping[str, Tensor],
    report: Report,
) -> None:
    trained, scaling = kinds.group_by_layer(adapter.state), adapter.scaling
    missing = sorted(set(trained) - set(loaded))
    if missing:
        report.add(
            "delta",
            False,
            Message(
                "{count} trained layers are missing in the file, such as {names}",
                count=len(missing),
                names=first_few(missing),
            ),
        )
        return
    errors = {}
    for module, parts in trained.items():
        scale = float(scaling[module] if isinstance(scaling, Mapping) else scaling)
        errors[module] = compute_layer_error(loaded[module], parts, scale)
    worst = max(errors, key=lambda module: errors[module])
    dtypes = _collect_dtypes(tensors) | {tensor.dtype for layer in loaded.values() for tensor in layer.parts.values()}
    tolerance = max(DELTA_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    error = report.measure("delta_error", errors[worst])
    report.add(
        "delta",
        error <= tolerance,
        Message(
            "largest relative error {error}, in {layer} (allowed {allowed})",
            error=_format_error(error),
            layer=worst,
            allowed=f"{tolerance:.0e}",
        ),
    )


def _check_text(pipeline: Any, family: Any, probe: Probe, step: float, report: Report) -> None:
    """Compare the pipeline's encoding of the captions with that of training."""
    trained = [getattr(pipeline, name) for name in family.trained_text]
    if None in trained:
        report.add("text", False, Message("the file contains no LoRA of the text encoders that were trained"))
        return
    encoders = nn.ModuleList(trained)

    def ask() -> dict[str, Tensor]:
        return encode_batch(family, pipeline, probe.captions, probe.cond)

    def measure_gap(cond: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
        return max(compute_relative_error(tensor, reference[name]) for name, tensor in cond.items())

    cond = ask()
    error, allowed = report.measure("text_error", measure_gap(cond, probe.cond)), PREDICTION_TOLERANCE[family.dtype]
    floor = bool(step) and error > allowed
    if floor:
        with scale_adapter(encoders, 1 + step):
            allowed = max(allowed, MARGIN * measure_gap(ask(), cond))
    report.add(
        "text",
        error <= allowed,
        Message(
            "text conditioning: relative error {error} (allowed {allowed})",
            error=_format_error(error),
            allowed=_format_limit(f"{allowed:.1e}", floor),
        ),
    )
    with scale_adapter(encoders, 0.0):
        effect = report.measure("text_effect", measure_gap(ask(), cond))
    report.add(
        "text effect",
        True,
        Message("without the adapter, the text conditioning differs by {effect}", effect=f"{effect:.1%}"),
        judged=False,
    )


def _check_prediction(denoiser: nn.Module, family: Any, probe: Probe, step: float, where: str, report: Report) -> None:
    answer = predict(family, denoiser, probe)
    error = report.measure("prediction_error", compute_relative_error(answer, probe.prediction_BCHW))
    assert isinstance(denoiser.dtype, torch.dtype)  # of a diffusers model
    allowed = PREDICTION_TOLERANCE[denoiser.dtype]
    limited = bool(step) and error > allowed
    if limited:
        with scale_adapter(denoiser, 1 + step):
            floor = compute_relative_error(predict(family, denoiser, probe), answer)
        allowed = max(allowed, MARGIN * floor)
        report.measure("prediction_floor", floor)
    report.add(
        "prediction",
        error <= allowed,
        Message(
            "relative error {error} {place} (allowed {allowed})",
            error=_format_error(error),
            place=where,
            allowed=_format_limit(f"{allowed:.1e}", limited),
        ),
    )
    with scale_adapter(denoiser, 0.0):
        effect = report.measure("effect", compute_relative_error(predict(family, denoiser, probe), answer))
    report.add(
        "effect",
        True,
        Message("without the adapter, the prediction differs by {effect}", effect=f"{effect:.1%}"),
        judged=False,
    )


def _check_previews(
    pipeline: Any, denoiser: nn.Module, previews: Previews, step: float, where: str, report: Report
) -> None:
    rendered = list(previews.render(pipeline))
    worst = report.measure("preview_psnr", find_worst_psnr(previews.images, rendered))
    allowed, template = PREVIEW_PSNR, Template("lowest PSNR {db} dB {place} (at least {allowed})")
    if step and worst < allowed:
        with scale_adapter(denoiser, 1 + step):
            floor = find_worst_psnr(rendered, list(previews.render(pipeline)))
        allowed = min(allowed, floor - 20 * math.log10(MARGIN))
        template = Template("lowest PSNR {db} dB {place} (at least {allowed}, the effect of the adapter's last bit)")
        report.measure("preview_floor", floor)
    if math.isinf(worst):
        template = EQUAL
    report.add("preview", worst >= allowed, template(db=f"{worst:.1f}", place=where, allowed=f"{allowed:.1f}"))


def _collect_dtypes(tensors: Mapping[str, Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for name, tensor in tensors.items() if not name.endswith(export.KEPT_WIDE)}


def _measure_plain(pipeline: Any, family: Any, reference: Reference, report: Report) -> None:
    """Measure what the file gives in a pipeline of the published base, which it is loaded into."""
    probe, previews = reference.probe, reference.previews
    if probe is not None:
        answer = predict(family, getattr(pipeline, family.denoiser_name), probe)
        error = report.measure("plain_prediction_error", compute_relative_error(answer, probe.prediction_BCHW))
        report.add(
            "plain prediction",
            True,
            Message("relative difference {error} on the original base model", error=_format_error(error)),
            judged=False,
        )
    if previews is not None:
        worst = report.measure("plain_preview_psnr", measure_preview_psnr(previews, pipeline))
        template = EQUAL if math.isinf(worst) else Template("lowest PSNR {db} dB {place}")
        report.add("plain preview", True, template(db=f"{worst:.1f}", place=PUBLISHED), judged=False)
