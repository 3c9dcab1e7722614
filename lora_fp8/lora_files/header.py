"""Reads alpha from the header of diffusers' own LoRA files, as tensors.

diffusers (0.34 and later) writes each component's peft config into the header, under `lora_adapter_metadata`:
`{"transformer.r": 4, "transformer.lora_alpha": 16, "transformer.alpha_pattern": {"to_q": 8}, ...}`. Its loader then
scales each layer by alpha / rank of that config. In every other layout alpha is a tensor `<layer>.alpha`. This module
converts the header to such tensors, so that no other code needs to know it.

Sources: diffusers `loaders/lora_base.py` (`LORA_ADAPTER_METADATA_KEY`), peft `tuners/lora/model.py`
(`_create_and_replace`), `tuners/lora/layer.py` (`update_layer`) and `utils/other.py` (`get_pattern_key`).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..adapters.kinds import read_rank
from ..common.text import quote
from ..errors import Message, UserError

KEY = "lora_adapter_metadata"
DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "alpha": 8, "rank_pattern": {}, "alpha_pattern": {}}
"""peft's defaults for entries that a component's config lacks; in configs of LoKr and LoHa, alpha is `alpha`."""
PRIVATE = ("base_model_name_or_path", "revision", "auto_mapping")
"""Entries that reveal a machine's folders or the trainer's model, and that no loader needs."""
MOST_PATTERNS = 10_000
PATTERN = re.compile(r"\^?(?:[\w.]|\\[.\-d]\+?|\.[*+]|-){1,300}\$?", re.ASCII)
"""Matches safe patterns of peft: names, dots, digits. Others could take unlimited time to match."""
MOST_REPEATS = 3  # limit on `.*` and the like in one pattern, for the same reason


def read_alphas(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], parts: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return `<layer>.alpha` for each layer that takes its scale from the header.

    A layer with its own alpha tensor keeps it: every program but diffusers reads that, and diffusers refuses such a
    file.

    Args:
        tensors: the file's tensors, in our names.
        metadata: the file's metadata.
        parts: last parts of the names of an adapter's tensors, such as "lora_A.weight".

    Raises:
        UserError: the header is damaged, or its ranks differ from the tensors'.
    """
    if not metadata.get(KEY):
        return {}
    components = _read_components(metadata[KEY])
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part = next((part for part in parts if name.endswith(f".{part}")), None)
        if part:
            layers.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
    alphas: dict[str, Tensor] = {}
    patterns = {prefix: _Patterns(config) for prefix, config in components.items()}
    wrong: list[tuple[str, object, object]] = []
    for layer, held in layers.items():
        prefix = next(
            (component for component in components if layer.startswith(f"{component}.") or not component), None
        )
        rank = read_rank(held)
        if prefix is None or f"{layer}.alpha" in tensors:
            continue
        told_rank, alpha = patterns[prefix].find_rank_and_alpha(
            layer.removeprefix(f"{prefix}."), any("lora_" in part for part in held)
        )
        if not rank and alpha == told_rank:  # LoKr with two whole matrices
            continue
        if told_rank != rank:
            wrong.append((layer, rank, told_rank))
        root = components[prefix].get("use_rslora") is True
        alphas[f"{layer}.alpha"] = torch.tensor(alpha * math.sqrt(rank) if root else alpha)
    if wrong:
        name, its_rank, stated = wrong[0]
        raise UserError(
            Message(
                "lora_adapter_metadata in the header does not match this file: {layer} has rank {rank}, but the "
                "header says {stated} (layers that differ: {count}); save the file again",
                layer=name,
                rank=its_rank,
                stated=stated,
                count=len(wrong),
            )
        )
    return alphas


def remove_private_values(text: str) -> str:
    """Return the header's entry without values that reveal folders; the strengths stay."""
    held = _read(text)
    return json.dumps({key: None if key.rpartition(".")[2] in PRIVATE else value for key, value in held.items()})


def _read(text: str) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict):
        raise UserError(
            Message(
                "{key} in the header is not a JSON object: {text}; save the file again", key=KEY, text=quote(text[:80])
            )
        )
    return held


def _read_components(text: str) -> dict[str, dict[str, Any]]:
    """Return each component's config by its prefix, the longest first; "" for a file of a single model."""
    configs: dict[str, dict[str, Any]] = {}
    for name, value in _read(text).items():
        prefix, _, key = name.rpartition(".")
        configs.setdefault(prefix, {})[key] = value
    for prefix, config in configs.items():
        for key in ("r", "lora_alpha", "alpha"):
            value = config.get(key, DEFAULTS[key])
            if not _is_number(value) or key == "r" and value <= 0:
                raise UserError(
                    Message(
                        "lora_adapter_metadata in the header: {key} = {value} is not a valid {what}",
                        key=f"{prefix}.{key}",
                        value=quote(str(value)[:40]),
                        what=key,
                    )
                )
    return dict(sorted(configs.items(), key=lambda item: -len(item[0])))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


class _Patterns:
    """Rank and alpha of a component's layers, by the first pattern that matches, as in peft."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = {**DEFAULTS, **config}
        self.ranks = list(_compile_patterns(self.config["rank_pattern"], "rank_pattern"))
        self.alphas = list(_compile_patterns(self.config["alpha_pattern"], "alpha_pattern"))

    def find_rank_and_alpha(self, layer: str, is_lora: bool) -> tuple[float, float]:
        # Whether a text encoder's path has `text_model` in it depends on the transformers version that wrote it.
        paths = (layer, layer.removeprefix("text_model."))
        whole = self.config["lora_alpha" if is_lora else "alpha"]
        rank = next((value for pattern, value in self.ranks if any(map(pattern.match, paths))), self.config["r"])
        return rank, next((value for pattern, value in self.alphas if any(map(pattern.match, paths))), whole)


def _compile_patterns(patterns: Any, what: str) -> Iterator[tuple[re.Pattern[str], float]]:
    if not isinstance(patterns or {}, dict) or len(patterns or {}) > MOST_PATTERNS:
        raise UserError(Message("{key} in the header: {what} is not a readable list of layers", key=KEY, what=what))
    for pattern, value in (patterns or {}).items():
        repeats = len(re.findall(r"[*+]", pattern))
        if not PATTERN.fullmatch(pattern) or repeats > MOST_REPEATS or not _is_number(value):
            raise UserError(
                Message(
                    "{key} in the header: {what} contains {pattern}, which is not supported; use the layer's name",
                    key=KEY,
                    what=what,
                    pattern=quote(pattern[:80]),
                )
            )
        yield re.compile(rf"(.*\.)?({pattern})$"), value
