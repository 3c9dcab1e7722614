"""The checks that a file's bytes alone allow: header, hash, pairs and values."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..adapters import kinds
from ..errors import Joined, Message, Template, UserError, first_few
from ..lora_files import export, layouts, safetensors_file
from .report import Report

HEADER_KEYS = (
    *("sshs_model_hash", "ss_base_model_version", "ss_network_module", "ss_network_dim", "ss_network_alpha"),
    *("modelspec.sai_model_spec", "modelspec.architecture", "modelspec.implementation", "modelspec.title"),
    *("modelspec.resolution", "modelspec.hash_sha256"),
)
EMPTY_HASH = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of nothing

UNNAMED_ARCHITECTURE = Template("{path}: the header does not name the architecture; give it with --family ({names})")


def check_bytes(file: Path, family: Any, report: Report) -> dict[str, Tensor] | None:
    """Check what the bytes alone show. Returns the tensors, or None if the file cannot be used."""
    try:
        header = safetensors_file.read_header(file)
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
        else Message(
            "{line}; its data begins at {place}, not at a multiple of 8", line=detail, place=header.data_begin
        ),
    )

    problems = _find_header_problems(metadata, header.data_begin)
    detail = Joined("; ", problems) or Message("{n} keys, the required ones among them", n=len(metadata))
    whole = report.add("metadata", not problems, detail)
    whole &= _check_hash(file, metadata, report)
    try:  # checks `tensors` and not the loaded model: InvokeAI refuses a pair that is broken here
        modules = _find_pairs(tensors, layout)
        whole &= report.add("pairs", True, Message("{n} layers, each with both matrices at one rank", n=len(modules)))
    except UserError as error:
        whole &= report.add("pairs", False, str(error))
    whole &= _check_values(tensors, report)
    return tensors if whole else None


def _find_header_problems(metadata: Mapping[str, str], num_bytes: int) -> list[str]:
    """Return what a program or a host would refuse of a header of `num_bytes`."""
    problems: list[str] = [Message("{name} is missing", name=key) for key in HEADER_KEYS if key not in metadata]
    if not re.fullmatch(r"\d+x\d+", metadata.get("modelspec.resolution", "0x0")):
        problems.append(
            Message("modelspec.resolution {value} is not WxH", value=repr(metadata["modelspec.resolution"]))
        )
    if num_bytes > export.MAX_HEADER:
        problems.append(
            Message("the header has {size} MiB, and hosts refuse large headers", size=f"{num_bytes / 2**20:.1f}")
        )
    return problems


def _check_hash(file: Path, metadata: Mapping[str, str], report: Report) -> bool:
    """Check that the hashes in the header are those of the data."""
    sha = safetensors_file.hash_payload(file)
    hashes = {metadata.get("sshs_model_hash"), metadata.get("modelspec.hash_sha256", "").removeprefix("0x")}
    right = hashes == {sha} and sha != EMPTY_HASH
    names = Joined(" and ", sorted(f"{digest[:12]}..." for digest in hashes if digest)) or Message("nothing")
    detail = (
        Message("the header has the SHA-256 of the tensors, {sha}...", sha=sha[:12])
        if right
        else Message(
            "the data has the hash {hash}..., but the header says {told}: the file was changed or damaged after "
            "it was written",
            hash=sha[:12],
            told=names,
        )
    )
    return report.add("hash", right, detail)


def _check_values(tensors: Mapping[str, Tensor], report: Report) -> bool:
    """Check that all values are finite, and that no layer is without effect."""
    wrong = export.find_nonfinite(tensors)
    finite = report.add(
        "finite",
        not wrong,
        Message("NaN or infinity in {names}", names=first_few(wrong)) if wrong else Message("no NaN, no infinity"),
    )
    is_up = (".lora_up.weight", *(f".{part}" for part in kinds.ZERO_AT_START))
    ups = {name: t for name, t in tensors.items() if name.endswith(is_up)}
    does = ups | {name: alpha for name, alpha in tensors.items() if name.endswith(".alpha")}
    zero = sorted(name for name, tensor in does.items() if not tensor.float().any())
    detail = Message("no layer is zero")
    if zero:
        detail = Message(
            "B or alpha is zero in {names} ({count} of {total})",
            names=first_few(zero),
            count=len(zero),
            total=len(does),
        )
    return report.add("trained", bool(ups) and not zero, detail) and finite


def _find_pairs(tensors: Mapping[str, Tensor], layout: str) -> list[str]:
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    renamed = {n.replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B."): t for n, t in weights.items()}
    other = layouts.find_kinds(renamed) != {"lora"}
    modules = layouts.list_modules(renamed if layout == "kohya" or other else weights)
    if layout == "kohya":
        alphas = {name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")}
        if alphas != set(modules):
            raise UserError(
                Message(
                    "alpha and weights do not match in {names}",
                    names=first_few(sorted(alphas ^ set(modules))),
                )
            )
    return modules
