"""The LoRA file: from the one internal naming to the key layouts that other programs read, and back.

Inside, an adapter is a dict of `<diffusers module path>.lora_A.weight` (r, in[, kh, kw]) and `....lora_B.weight`
(out, r[, 1, 1]), and a scaling (alpha / rank), for all modules or module by module. Outside there are two layouts:

* `diffusers`: `unet.` or `transformer.` + module path + `.lora_A/.lora_B.weight`. The scaling is multiplied into B (in
  float32) and no alpha is written: it is the only form that diffusers, ComfyUI and the hosts read with the same
  strength.
* `kohya`: `lora_unet_<name>.lora_down/.lora_up.weight` and `.alpha`, read by A1111, Forge, ComfyUI, InvokeAI, Draw
  Things and diffusers. The weights are written as they were trained and alpha is the true alpha, so nothing is rounded.

How kohya's tools call a module depends on the architecture; a family says which rule holds in `kohya_naming`:

    diffusers_underscored   SD 1.5: the diffusers path with _ for .
    sgm_unet                SDXL: block names of the original UNet (input_blocks_4_1_...), inner names as in diffusers
    bfl_flux                FLUX: names of the original transformer, where q, k, v (and the MLP's input) are one layer

Several LoRAs become the LoRA of their fused layer without loss: the A's are stacked, the B's stand in a block diagonal,
the rank is the sum of the ranks, and alpha grows with the rank. Members that were not trained are rows of zeros.

The writer is our own (30 lines) because `safetensors.torch.save_file` orders metadata at random: here the same run
gives the same bytes. There is no date, absolute path or user name in a file. File names are
`<slug>_<layout>.safetensors`, where the slug is the ASCII part of the job's name without the characters that prompts
and shells give a meaning to; the display name stays in the metadata. Sources: ModelSpec 1.0.1 (Stability AI),
kohya-ss/sd-scripts' metadata and names, the safetensors format.
"""

import hashlib
import json
import math
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import tomlkit
import torch
from torch import Tensor

from . import __version__, config
from .config import UserError
from .run import RunFailure, atomic_write

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
LAYOUTS = ("diffusers", "kohya")
MAX_TAGS = 200  # per folder in ss_tag_frequency: clients show two dozen, and headers must stay small
MAX_HEADER = 1 << 20  # bytes; hosts give up on large headers, ours are far below
LEGACY_WINDOW = (0x100000, 0x10000)  # offset and size of the bytes that A1111's old hash looks at


# -- what the trainer tells about the run


@dataclass(frozen=True)
class FolderFacts:
    """One dataset folder, as far as the file tells of it.

    Attributes:
        name: the folder; only its last part is written.
        num_images: images used, not counting repeats.
        repeats: how often an epoch shows each image.
        tags: how many captions hold each tag.
    """

    name: str
    num_images: int
    repeats: int = 1
    tags: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def count(cls, name: str, captions: Iterable[str], repeats: int = 1, separator: str = ",") -> "FolderFacts":
        """Count the tags of a folder's captions (one caption per image)."""
        captions = list(captions)
        tags = Counter(tag.strip() for caption in captions for tag in caption.split(separator) if tag.strip())
        return cls(name, len(captions), repeats, dict(tags))


@dataclass(frozen=True)
class ExportFacts:
    """What a run was, for the file's metadata. Everything here is written into a file that is made to be published.

    Attributes:
        name: the job's name; gives the file name, and the title where the config has none.
        steps: optimizer steps done.
        rank: LoRA rank.
        alpha: LoRA alpha, as in the config (before any scaling is multiplied in).
        learning_rate: the rate trained with, after scaling.
        learning_rate_factor: what the configured rate was multiplied with for the base's precision.
        seed: the job's seed.
        resolution: (width, height) in pixels.
        folders: the dataset.
        batch_size: images per optimizer step, accumulation included.
        optimizer, schedule, warmup_steps: as in the config.
        storage: how the frozen base was held ("fp8", "none", ...).
        mixed_precision: "bf16" or "no".
        base_name: the base model; a path is reduced to its last part.
        base_hash: sha256 hex over the base's denoiser files.
        prediction_type: "epsilon" or "v_prediction"; None for flow matching.
        trigger: the word to prompt with.
        tags: ModelSpec tags.
        dropout, min_snr_gamma, max_grad_norm, caption_dropout: as in the config.
        buckets: {(width, height): images}.
        config_toml: the resolved config; absolute paths in it are reduced to their last part.
    """

    name: str
    steps: int
    rank: int
    alpha: float
    learning_rate: float
    seed: int
    resolution: tuple[int, int]
    learning_rate_factor: float = 1.0
    folders: tuple[FolderFacts, ...] = ()
    batch_size: int = 1
    optimizer: str = ""
    schedule: str = ""
    warmup_steps: int = 0
    storage: str = ""
    mixed_precision: str = "bf16"
    base_name: str = ""
    base_hash: str = ""
    prediction_type: str | None = None
    trigger: str = ""
    tags: tuple[str, ...] = ()
    dropout: float = 0.0
    min_snr_gamma: float = 0.0
    max_grad_norm: float = 0.0
    caption_dropout: float = 0.0
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    config_toml: str = ""


# -- the two ends: write and read


def write(
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float] | float,
    family: Any,
    denoiser_config: Mapping[str, Any],
    section: config.Export,
    facts: ExportFacts,
    folder: Path,
) -> list[Path]:
    """Write the trained adapter, one file per layout of `section.formats`.

    Args:
        state: internal naming (see the module's text).
        scaling: alpha / rank, one for all modules or `{module path: scaling}`.
        family: the ModelFamily or its class (its naming and identifiers are read).
        denoiser_config: the denoiser's diffusers config.
        folder: made where it is missing; files of the same name are replaced whole.

    Returns:
        The files, in the order of `section.formats`.

    Raises:
        RunFailure: the adapter holds NaN or infinity, was never trained (B is zero), or does not fit fp16.
        UserError: the kohya layout has no name for a trained module.
    """
    _refuse_broken(state, "the trained adapter")
    folder.mkdir(parents=True, exist_ok=True)
    contents = {}
    for layout in dict.fromkeys(section.formats):  # all layouts are made before any is written
        tensors = to_layout(state, scaling, family, denoiser_config, layout)
        dtype = DTYPES[section.dtype]
        # alpha stays float32: it is a setting, and bf16 would round it
        contents[layout] = {k: v if k.endswith(".alpha") else v.to(dtype) for k, v in tensors.items()}
        _refuse_broken(contents[layout], f"the {layout} file in {section.dtype}")
    paths = []
    for layout, tensors in contents.items():
        path = folder / f"{slug(facts.name)}_{layout}.safetensors"
        write_file(path, tensors, metadata(family, section, facts, layout), hashes=True)
        paths.append(path)
    return paths


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, hashes: bool = False) -> str:
    """Write a safetensors file whose bytes depend on nothing but its content, whole or not at all.

    Metadata keys are sorted. Tensors are sorted by size of their element, then by name, as the safetensors library
    does: sorted by name alone, a float32 after an odd number of bf16 would not be aligned. The header is padded with
    spaces so that the data begins at a multiple of 8.

    Args:
        hashes: add `sshs_model_hash` and `modelspec.hash_sha256` (all bytes after the header) and `sshs_legacy_hash`.

    Returns:
        sha256 hex over all bytes after the header.
    """
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise TypeError(f"metadata {key!r} is a {type(value).__name__}: safetensors metadata are strings")
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    data, entries = bytearray(), {}
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        begin = len(data)
        data += tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    sha = hashlib.sha256(data).hexdigest()
    written = dict(metadata)
    if hashes:
        written["sshs_model_hash"] = sha
        written["modelspec.hash_sha256"] = "0x" + sha
        # The header's length does not depend on the hash's value, so the window can be found with a placeholder. Unlike
        # kohya's this hash is the one that A1111 computes from the file; a file that ends before the window has none.
        written["sshs_legacy_hash"] = "0" * 8
        offset, size = LEGACY_WINDOW
        begin = offset - len(_header(entries, written))
        if 0 <= begin < len(data):
            written["sshs_legacy_hash"] = hashlib.sha256(data[begin : begin + size]).hexdigest()[:8]
        else:
            del written["sshs_legacy_hash"]
    atomic_write(path, _header(entries, written) + data)
    return sha


def _header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    content = {"__metadata__": dict(sorted(metadata.items())), **entries} if metadata else dict(entries)
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Header:
    """A safetensors header: metadata, tensors (dtype, shape, data_offsets), and the byte where the data begin."""

    metadata: dict[str, str]
    entries: dict[str, dict[str, Any]]
    data_begin: int


def read_header(path: Path) -> Header:
    """Read and check a safetensors header: the file must hold exactly the bytes that its header tells of.

    Raises:
        UserError: no such file, not a safetensors file, cut short, or with bytes that belong to nothing.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            if not 2 <= length <= size - 8:
                raise UserError(f"{path}: not a whole safetensors file (its header would end outside of the file)")
            content = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:  # JSON and UTF-8 errors
        raise UserError(f"{path}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a safetensors file (its header is not a JSON object)")
    found = content.pop("__metadata__", {})
    wrong = [key for key, value in found.items() if not isinstance(value, str)]
    if wrong:
        raise UserError(f"{path}: metadata that are not text: {', '.join(sorted(wrong))}")
    end = 0
    try:
        for begin, stop in sorted(entry["data_offsets"] for entry in content.values()):
            if begin != end or stop < begin:
                raise UserError(f"{path}: tensors overlap or leave a gap at byte {end}")
            end = stop
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not a safetensors file (a tensor has no data_offsets)") from None
    if 8 + length + end != size:
        problem = "is cut short" if size < 8 + length + end else "has bytes that belong to no tensor"
        raise UserError(f"{path}: {problem}: {8 + length + end} bytes by its header, {size} in the file")
    return Header(found, content, 8 + length)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file.

    Returns:
        Tensors on the CPU, and the metadata.

    Raises:
        UserError: see `read_header`.
    """
    header = read_header(path)
    try:
        return safetensors.torch.load_file(path), header.metadata
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error})") from None


def payload_hash(path: Path) -> str:
    """sha256 hex over all bytes after the header: what `sshs_model_hash` must be, and Civitai's AutoV3."""
    begin = read_header(path).data_begin
    with open(path, "rb") as file:
        file.seek(begin)
        return hashlib.file_digest(file, "sha256").hexdigest()


def slug(name: str) -> str:
    """A file name for every shell, host and prompt syntax: ASCII letters, digits, `.`, `_`, `-`. Never empty."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:80].strip("-._")
    # a name in another script has no ASCII part; its hash keeps two of them apart
    return plain or "lora-" + hashlib.sha256(name.encode()).hexdigest()[:8]


def _refuse_broken(tensors: Mapping[str, Tensor], what: str) -> None:
    wrong = sorted(name for name, tensor in tensors.items() if not torch.isfinite(tensor).all())
    if wrong:
        advice = "; write it in bf16 or fp32 (export.dtype)" if what.endswith("fp16") else ""
        raise RunFailure(f"{what} has NaN or infinity in {_some(wrong)}{advice}")
    is_up = (".lora_B.weight", ".lora_up.weight")
    wrong = sorted(name for name, tensor in tensors.items() if name.endswith(is_up) and not tensor.any())
    if wrong:
        raise RunFailure(f"{what} is zero in {_some(wrong)}: never trained, the file would do nothing there")
    if not any(name.endswith(is_up) for name in tensors):
        raise RunFailure(f"{what} is empty: there is nothing to write")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- layouts


def modules(state: Mapping[str, Tensor]) -> list[str]:
    """The module paths of an adapter in the internal naming, sorted.

    Raises:
        UserError: an A without its B (or the other way round), a pair of different ranks, or a name of another kind.
    """
    halves: dict[str, set[str]] = {}
    for name in state:
        module, dot, half = name.rpartition(".lora_")
        if not dot or half not in ("A.weight", "B.weight"):
            raise UserError(f"{name}: not a LoRA tensor (expected <module>.lora_A.weight or .lora_B.weight)")
        halves.setdefault(module, set()).add(half)
    for module, found in halves.items():
        if len(found) != 2:
            raise UserError(f"{module}: has lora_{found.pop()[0]} but not the other half of the pair")
        a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
        if a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1]:
            raise UserError(f"{module}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} are not of one rank")
    return sorted(halves)


def to_layout(
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float] | float,
    family: Any,
    denoiser_config: Mapping[str, Any],
    layout: str,
) -> dict[str, Tensor]:
    """Rename an adapter from the internal naming to a file's. Dtypes are kept; what must be multiplied becomes float32.

    Raises:
        UserError: an incomplete pair, or a module that the layout has no name for.
    """
    out: dict[str, Tensor] = {}
    names = modules(state)
    pairs = {m: (state[f"{m}.lora_A.weight"], state[f"{m}.lora_B.weight"], _scale_of(scaling, m)) for m in names}
    if layout == "diffusers":
        for module, (a, b, scale) in pairs.items():
            out[f"{family.denoiser_name}.{module}.lora_A.weight"] = a
            out[f"{family.denoiser_name}.{module}.lora_B.weight"] = b if scale == 1 else b.float() * scale
        return out
    if layout != "kohya":
        raise UserError(f"{layout!r}: unknown layout; there are {', '.join(LAYOUTS)}")
    to_kohya, members_of = _naming(family)
    groups = {to_kohya(module, denoiser_config): None for module in names}
    for group in groups:
        members = members_of(group, denoiser_config)
        if len(members) == 1:
            a, b, scale = pairs[members[0]]
        else:
            a, b, scale = fuse([pairs.get(m) for m in members], [_flux_rows(m, denoiser_config) for m in members])
        out[f"lora_unet_{group}.lora_down.weight"] = a
        out[f"lora_unet_{group}.lora_up.weight"] = b
        out[f"lora_unet_{group}.alpha"] = torch.tensor(scale * a.shape[0], dtype=torch.float32)
    return out


def from_layout(
    tensors: Mapping[str, Tensor], family: Any, denoiser_config: Mapping[str, Any], layout: str | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The inverse of `to_layout`: a file's tensors in the internal naming, and each module's alpha / rank.

    Files of other programs are read as well: a fused layer whose B is not block diagonal is given to all of its members
    with the same A, which changes nothing. Where alpha is missing it equals the rank, as every client has it.

    Args:
        layout: "diffusers" or "kohya"; found from the names where it is None.

    Raises:
        UserError: names of neither layout, or incomplete pairs.
    """
    layout = layout or detect_layout(tensors, family)
    state: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    if layout == "diffusers":
        prefix = family.denoiser_name + "."
        foreign = sorted(name for name in tensors if not name.startswith(prefix))
        if foreign:
            raise UserError(f"{_some(foreign)}: not names of a {family.denoiser_name} LoRA in the diffusers layout")
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return state, dict.fromkeys(modules(state), 1.0)
    _, members_of = _naming(family)
    halves = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
    renamed = {}
    for name, tensor in tensors.items():
        group, _, kind = name.partition(".")
        if not group.startswith("lora_unet_") or kind not in (*halves, "alpha"):
            raise UserError(f"{name}: not a name of the kohya layout that a LoRA of the denoiser has")
        if kind != "alpha":
            renamed[f"{group}.{halves[kind]}"] = tensor
    for group in modules(renamed):
        a, b = renamed[f"{group}.lora_A.weight"], renamed[f"{group}.lora_B.weight"]
        alpha = tensors.get(f"{group}.alpha")
        scale = 1.0 if alpha is None else float(alpha) / a.shape[0]
        members = members_of(group.removeprefix("lora_unet_"), denoiser_config)
        rows = [b.shape[0]] if len(members) == 1 else [_flux_rows(m, denoiser_config) for m in members]
        if sum(rows) != b.shape[0]:
            raise UserError(f"{group}: lora_up has {b.shape[0]} rows; this base has {sum(rows)}")
        for member, pair in zip(members, split(a, b, rows), strict=True):
            if pair is not None:
                state[f"{member}.lora_A.weight"], state[f"{member}.lora_B.weight"] = pair
                scaling[member] = scale
    alphas = [name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")]
    stray = sorted(group for group in alphas if f"{group}.lora_down.weight" not in tensors)
    if stray:
        raise UserError(f"{_some(stray)}: alpha without weights")
    return state, scaling


def detect_layout(tensors: Iterable[str], family: Any) -> str:
    """Which layout a file has, from its names.

    Raises:
        UserError: neither; the message names what was found.
    """
    names = list(tensors)
    if any(name.startswith("lora_unet_") for name in names):
        return "kohya"
    if any(name.startswith(family.denoiser_name + ".") for name in names):
        return "diffusers"
    found = names[0] if names else "an empty file"
    raise UserError(f"{found}: not a LoRA for {family.title} (expected lora_unet_... or {family.denoiser_name}....)")


def _scale_of(scaling: Mapping[str, float] | float, module: str) -> float:
    return float(scaling[module] if isinstance(scaling, Mapping) else scaling)


Pair = tuple[Tensor, Tensor, float]  # A (r, in), B (out, r), alpha / rank


def fuse(pairs: list[Pair | None], rows: list[int]) -> Pair:
    """The LoRA of a fused layer from those of its members: A's stacked, B's in a block diagonal, the rank is the sum.

    Args:
        pairs: A (r, in), B (rows, r) and scaling of each member; None where a member has no adapter.
        rows: output features of each member.
    """
    present = [pair for pair in pairs if pair is not None]
    scale = present[0][2]
    stacked = torch.cat([a for a, _, _ in present])
    dtype = present[0][1].dtype if all(s == scale for _, _, s in present) else torch.float32
    diagonal = torch.zeros(sum(rows), stacked.shape[0], dtype=dtype)
    row = column = 0
    for pair, height in zip(pairs, rows, strict=True):
        if pair is not None:
            _, b, own = pair
            # one alpha serves the whole layer: where members differ, the ratio goes into their B
            block = b if own == scale else b.float() * (own / scale)
            diagonal[row : row + height, column : column + b.shape[1]] = block
            column += b.shape[1]
        row += height
    return stacked, diagonal, scale


def split(a: Tensor, b: Tensor, rows: list[int]) -> list[tuple[Tensor, Tensor] | None]:
    """The inverse of `fuse`: (A, B) of each member of a fused layer; None for a member that the LoRA does not touch."""
    if len(rows) == 1:
        return [(a, b)]
    rank = a.shape[0]
    blocks = b.split(rows)
    used = [block.ne(0).any(0) for block in blocks]  # which columns of B each member needs
    even = rank // len(rows)
    if rank % len(rows) == 0 and all(
        not u[: i * even].any() and not u[(i + 1) * even :].any() for i, u in enumerate(used)
    ):
        bounds = [(i * even, (i + 1) * even) for i in range(len(rows))]  # members of equal rank: the common case
        return [(a[i:j].clone(), block[:, i:j].clone()) for (i, j), block in zip(bounds, blocks, strict=True)]
    touched = [i for i, u in enumerate(used) if u.any()]
    ends = [int(used[i].nonzero().max()) + 1 for i in touched]
    begins = [int(used[i].nonzero().min()) for i in touched]
    out: list[tuple[Tensor, Tensor] | None] = [None] * len(rows)
    if all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)):
        # columns that nobody uses belong to the block before them
        edges = [0, *begins[1:], rank]
        for i, begin, end in zip(touched, edges, edges[1:], strict=False):
            out[i] = (a[begin:end].clone(), blocks[i][:, begin:end].clone())
    else:  # trained as one layer: every member needs all of A
        for i in touched:
            out[i] = (a.clone(), blocks[i].clone())
    return out


def unread_by_diffusers(family: Any, denoiser_config: Mapping[str, Any], layout: str) -> str | None:
    """Why diffusers itself cannot load this layout for this base, or None where it can.

    Only the bundled miniatures are meant: diffusers 0.42 has the sizes of FLUX.1 written into its converter of kohya
    names.
    """
    if layout == "kohya" and family.kohya_naming == "bfl_flux":
        width = _flux_width(denoiser_config)
        if width != 3072:
            return f"diffusers converts kohya's FLUX names at width 3072 only, this base has {width}"
        sizes = FLUX_DEFAULTS | dict(denoiser_config)
        if sizes["num_layers"] > 19 or sizes["num_single_layers"] > 38:
            return "diffusers converts kohya's FLUX names for 19 + 38 blocks, this base has more"
    return None


# -- kohya's names: for each rule, (module path -> kohya name) and (kohya name -> module paths), without lora_unet_

# Words of diffusers' UNet paths that hold an underscore themselves: all other underscores of a kohya name were dots.
COMPOUNDS = (
    *("down_blocks", "up_blocks", "mid_block", "transformer_blocks", "to_q", "to_k", "to_v", "to_out", "proj_in"),
    *("proj_out", "time_emb_proj", "conv_shortcut", "conv_in", "conv_out", "time_embedding", "add_embedding"),
    *("linear_1", "linear_2"),
)


def _dotted(kohya: str) -> str:
    parts = re.split(f"({'|'.join(COMPOUNDS)})", kohya)
    return "".join(part if part in COMPOUNDS else part.replace("_", ".") for part in parts)


def _underscored_to_kohya(module: str, denoiser_config: Mapping[str, Any]) -> str:
    return module.replace(".", "_")


def _underscored_members(kohya: str, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    return (_dotted(kohya),)


# Layers inside a ResNet block, and layers outside of all blocks, that the original UNet calls otherwise.
SGM_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
SGM_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


# What diffusers takes where a config.json leaves it out.
UNET_DEFAULTS: dict[str, Any] = {
    "layers_per_block": 2,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}
FLUX_DEFAULTS = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38}


def sgm_blocks(denoiser_config: Mapping[str, Any]) -> dict[str, str]:
    """{path of a block's part in diffusers: in the original UNet}, from the UNet's depth and layers per block.

    The original counts all parts of the way down (and up) in one list: the input convolution, then for each resolution
    `layers_per_block` layers (ResNet block .0, attention .1) and the downsampler (up: one layer more, the upsampler
    last).
    """
    denoiser_config = UNET_DEFAULTS | dict(denoiser_config)
    layers = denoiser_config["layers_per_block"]
    if not isinstance(layers, int):
        raise UserError(f"layers_per_block = {layers}: kohya's names are known where all blocks have as many layers")
    names = dict(SGM_OUTSIDE)
    for i, _ in enumerate(denoiser_config["down_block_types"]):
        for j in range(layers):
            names[f"down_blocks.{i}.resnets.{j}"] = f"input_blocks.{(layers + 1) * i + j + 1}.0"
            names[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{(layers + 1) * i + j + 1}.1"
        names[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{(layers + 1) * (i + 1)}.0.op"
    names["mid_block.resnets.0"] = "middle_block.0"
    names["mid_block.attentions.0"] = "middle_block.1"
    names["mid_block.resnets.1"] = "middle_block.2"
    for i, kind in enumerate(denoiser_config["up_block_types"]):
        for j in range(layers + 1):
            names[f"up_blocks.{i}.resnets.{j}"] = f"output_blocks.{(layers + 1) * i + j}.0"
            names[f"up_blocks.{i}.attentions.{j}"] = f"output_blocks.{(layers + 1) * i + j}.1"
        place = 2 if "CrossAttn" in kind else 1  # the upsampler follows the attention, where there is one
        names[f"up_blocks.{i}.upsamplers.0.conv"] = f"output_blocks.{(layers + 1) * i + layers}.{place}.conv"
    return names


def _sgm_to_kohya(module: str, denoiser_config: Mapping[str, Any]) -> str:
    for path, name in sgm_blocks(denoiser_config).items():
        if module == path or module.startswith(path + "."):
            inner = module[len(path) + 1 :]
            inner = SGM_RESNET.get(inner, inner)
            return (f"{name}.{inner}" if inner else name).replace(".", "_")
    raise UserError(
        f"{module}: kohya's layout has no name for this layer; "
        "leave it out of adapter.targets, or kohya out of export.formats"
    )


def _sgm_members(kohya: str, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    resnet = {name.replace(".", "_"): path for path, name in SGM_RESNET.items()}
    for path, name in sgm_blocks(denoiser_config).items():
        name = name.replace(".", "_")
        # an upsampler without attention before it is called like an attention: only its whole name tells
        if kohya == name:
            return (path,)
        inner = kohya.removeprefix(name + "_")
        if inner != kohya and path not in SGM_OUTSIDE and (("resnets" in path) == (inner in resnet)):
            if "attentions" in path and inner == "conv":
                continue
            return (f"{path}.{resnet.get(inner) or _dotted(inner)}",)
    raise UserError(f"lora_unet_{kohya}: no layer of this base has that name")


# Layers of one block, by their names in the original FLUX; the order of the members is their order in the fused layer.
FLUX_DOUBLE = {
    "img_mod_lin": ("norm1.linear",),
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_mod_lin": ("norm1_context.linear",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
}
FLUX_SINGLE = {
    "modulation_lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}
FLUX_BLOCKS = (
    ("double_blocks", "transformer_blocks", FLUX_DOUBLE),
    ("single_blocks", "single_transformer_blocks", FLUX_SINGLE),
)


def _flux_to_kohya(module: str, denoiser_config: Mapping[str, Any]) -> str:
    for theirs, ours, layers in FLUX_BLOCKS:
        match = re.fullmatch(rf"{ours}\.(\d+)\.(.+)", module)
        for name, members in layers.items():
            if match and match[2] in members:
                return f"{theirs}_{match[1]}_{name}"
    # diffusers drops or swaps what kohya files hold outside of the blocks: the file would not do what was trained
    raise UserError(
        f"{module}: kohya's FLUX layout holds layers inside the blocks only; "
        "leave it out of adapter.targets, or kohya out of export.formats"
    )


def _flux_members(kohya: str, denoiser_config: Mapping[str, Any]) -> tuple[str, ...]:
    for theirs, ours, layers in FLUX_BLOCKS:
        match = re.fullmatch(rf"{theirs}_(\d+)_(\w+)", kohya)
        if match and match[2] in layers:
            return tuple(f"{ours}.{match[1]}.{member}" for member in layers[match[2]])
    raise UserError(f"lora_unet_{kohya}: no layer of this base has that name")


def _flux_width(denoiser_config: Mapping[str, Any]) -> int:
    sizes = FLUX_DEFAULTS | dict(denoiser_config)
    return sizes["num_attention_heads"] * sizes["attention_head_dim"]


def _flux_rows(module: str, denoiser_config: Mapping[str, Any]) -> int:
    return _flux_width(denoiser_config) * (4 if module.endswith(".proj_mlp") else 1)  # FLUX's MLP is four times as wide


NAMINGS = {
    "diffusers_underscored": (_underscored_to_kohya, _underscored_members),
    "sgm_unet": (_sgm_to_kohya, _sgm_members),
    "bfl_flux": (_flux_to_kohya, _flux_members),
}


def _naming(family: Any) -> tuple[Callable[..., str], Callable[..., tuple[str, ...]]]:
    if family.kohya_naming not in NAMINGS:
        raise UserError(f"{family.title} has no kohya layout; set export.formats = ['diffusers']")
    return NAMINGS[family.kohya_naming]


IMPLEMENTATIONS = {  # ModelSpec's word for whose module names a file has
    "diffusers_underscored": "diffusers",
    "sgm_unet": "https://github.com/Stability-AI/generative-models",
    "bfl_flux": "https://github.com/black-forest-labs/flux",
}


# -- metadata


def metadata(family: Any, section: config.Export, facts: ExportFacts, layout: str) -> dict[str, str]:
    """What a file says of itself: ModelSpec, kohya's `ss_*` that clients read, the config. No date, path, user name."""
    naming = family.kohya_naming
    width, height = facts.resolution
    tags = [*facts.tags, *(tag for tag in ("lora",) if tag not in facts.tags)]
    epoch_size = sum(folder.num_images * folder.repeats for folder in facts.folders)
    epochs = math.ceil(facts.steps * facts.batch_size / epoch_size) if epoch_size else 0
    folders = _folder_names(facts.folders)
    written: dict[str, Any] = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family.modelspec_architecture}/lora",
        "modelspec.implementation": IMPLEMENTATIONS[naming] if layout == "kohya" else "diffusers",
        "modelspec.implementation_version": f"lora_fp8/{__version__}",
        "modelspec.title": section.title or facts.name,
        "modelspec.resolution": f"{width}x{height}",
        "modelspec.author": section.author,
        "modelspec.description": section.description,
        "modelspec.license": section.license,
        "modelspec.trigger_phrase": facts.trigger,
        "modelspec.tags": ", ".join(tags),
        "modelspec.prediction_type": (facts.prediction_type or "").replace("v_prediction", "v"),
        "ss_network_module": "networks.lora_flux" if naming == "bfl_flux" else "networks.lora",
        "ss_network_dim": facts.rank,
        # Where the scaling is multiplied into the weights, the file behaves as alpha = rank; who reads alpha here must
        # not scale a second time.
        "ss_network_alpha": facts.alpha if layout == "kohya" else float(facts.rank),
        "ss_network_args": "{}",
        "ss_network_dropout": facts.dropout,
        "ss_base_model_version": family.kohya_base_version,
        "ss_v2": "False",
        "ss_output_name": slug(facts.name),
        "ss_sd_model_name": basename(facts.base_name),
        "ss_learning_rate": facts.learning_rate,
        "ss_unet_lr": facts.learning_rate,
        "ss_optimizer": facts.optimizer,
        "ss_lr_scheduler": facts.schedule,
        "ss_lr_warmup_steps": facts.warmup_steps,
        "ss_steps": facts.steps,
        "ss_max_train_steps": facts.steps,
        "ss_epoch": epochs,
        "ss_num_epochs": epochs,
        "ss_num_train_images": epoch_size,
        "ss_total_batch_size": facts.batch_size,
        "ss_resolution": f"({width}, {height})",
        "ss_seed": facts.seed,
        "ss_mixed_precision": facts.mixed_precision,
        "ss_fp8_base": str(facts.storage == "fp8"),
        "ss_max_grad_norm": facts.max_grad_norm,
        "ss_min_snr_gamma": facts.min_snr_gamma or "None",
        "ss_caption_dropout_rate": facts.caption_dropout,
        "ss_training_comment": section.description,
        "ss_dataset_dirs": _json(
            {name: {"n_repeats": f.repeats, "img_count": f.num_images} for name, f in folders.items()}
        ),
        "ss_tag_frequency": _json({name: _frequent(folder.tags) for name, folder in folders.items()}),
        "ss_bucket_info": _json(
            {
                "buckets": {
                    str(i): {"resolution": list(size), "count": count}
                    for i, (size, count) in enumerate(sorted(facts.buckets.items()))
                }
            }
        ),
        "ss_enable_bucket": str(bool(facts.buckets)),
        "lora_fp8_version": __version__,
        "lora_fp8_layout": layout,
        "lora_fp8_storage": facts.storage,
        "lora_fp8_alpha": facts.alpha,
        "lora_fp8_learning_rate_factor": facts.learning_rate_factor,
        "lora_fp8_base_hash": facts.base_hash,
        "lora_fp8_config": without_paths(facts.config_toml),
    }
    return {key: str(value) for key, value in written.items() if value != ""}


def _folder_names(folders: tuple[FolderFacts, ...]) -> dict[str, FolderFacts]:
    """Folders by the last part of their path; a second one of the same name gets a number."""
    named: dict[str, FolderFacts] = {}
    for folder in folders:
        name, number = basename(folder.name), 2
        while name in named:
            name, number = f"{basename(folder.name)} ({number})", number + 1
        named[name] = folder
    return named


def _frequent(tags: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(tags.items(), key=lambda item: (-item[1], item[0]))[:MAX_TAGS])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=False)


def basename(path: str) -> str:
    """The last part of a path of any system; a hub id `owner/name` loses its owner too."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] if path.rstrip("\\/") else ""


def without_paths(toml: str) -> str:
    """A config without comments, whose texts that lead out of the job's folder are reduced to their last part.

    Absolute paths of any system, `~/...`, file URLs and `../...` name the machine and often its owner.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list):
            return [clean(item) for item in value]
        if isinstance(value, str) and "\n" not in value:
            leads_out = re.match(r"/|~|[A-Za-z]:[\\/]|\\\\|file:", value) or ".." in re.split(r"[\\/]", value)
            return basename(value) if leads_out else value
        return value

    return tomlkit.dumps(clean(tomlkit.parse(toml).unwrap())) if toml else ""
