"""LoRA files of every kind and layout, mutated as tensors, as a header and as bytes."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import tomlkit
import torch
from safetensors import safe_open
from torch import Tensor

from lora_fp8 import config, families, settings, verify
from lora_fp8.adapters import kinds
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.lora_files import export, layer_names, layouts
from lora_fp8.plan import disk_budget
from lora_fp8.plan.start import read_start_values
from lora_fp8.tools import average, files, merge, resize

DTYPES = {
    **{
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F64": torch.float64,
        "C64": torch.complex64,
    },
    **{"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
STRANGE = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "U64", "X", "", "f32", 7, None)
BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
SHAPES = ((0,), (1,), (4,), (4, 0), (1, 1), (4, 4), (4, 32), (32, 4), (32, 32), (2, 3), (4, 32, 3, 3), (32, 4, 1, 1))
SHAPES += ((2, 2, 2), (32, 4, 3, 3), (), (1, 1, 1, 1, 1))
NAMES = (
    "x",
    "",
    "a.lora_A.weight",
    "lora_unet_a.alpha",
    "a.hada_w1_a",
    "lora_unet_\x1b.lora_up.weight",
    "x.dora_scale",
)
METADATA = {"ss_base_model_version": "sd_v1", "ss_network_dim": "4", "ss_network_alpha": "2"}


def written(tensors: dict[str, Tensor], metadata: dict[str, Any] | None) -> tuple[dict[str, Any], bytes]:
    """A safetensors header and its data, by the format's description."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {"dtype": BY_DTYPE[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [len(data), len(data) + len(raw)]
        data += raw
    return header, data


def put(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Cases:
    """A case is one file; it is used beside a sound one of the same kind and layout."""

    def __init__(self, work: Path) -> None:
        torch.set_num_threads(1)
        section = settings.Model(family="sd15", path="demo")
        self.family: Any = families.get("sd15")(section, device="cpu", dtype=torch.float32)
        self.sizes = self.family.read_denoiser_config()
        shapes = type(self.family).list_layer_shapes(self.sizes)
        attention = [name for name in shapes if name.endswith(("attn1.to_q", "attn2.to_v"))][:2]
        convolution = [name for name in shapes if name.endswith("conv1")][:1]
        self.layers = {name: shapes[name] for name in (*attention, *convolution)}
        self.sound: list[tuple[str, dict[str, Tensor]]] = []
        for kind, layout in (
            *(("lora", layout) for layout in layer_names.LAYOUTS),
            *(("dora", "diffusers"), ("lokr", "kohya"), ("lokr_small", "kohya"), ("loha", "kohya")),
        ):
            state = self._state(kind)
            try:
                self.sound.append((kind, layouts.to_layout(state, 0.5, type(self.family), self.sizes, layout)))
            except UserError:  # this family has no such layout
                continue
        assert {kind for kind, _ in self.sound} == {"lora", "dora", "lokr", "lokr_small", "loha"}
        self.work = work
        for number, (_, tensors) in enumerate(self.sound):
            put(work / f"sound-{number}.safetensors", *written(tensors, METADATA))

    def _state(self, kind: str) -> dict[str, Tensor]:
        """An adapter of rank 4 under our names, for a few layers of the miniature."""
        torch.manual_seed(0)
        state = {}
        for layer, (rows, *columns) in self.layers.items():
            flat = torch.Size(columns).numel()
            if kind in ("lora", "dora"):
                parts = {"lora_A.weight": (4, *columns), "lora_B.weight": (rows, 4, *(1 for _ in columns[1:]))}
                parts |= {"lora_magnitude_vector": (rows,)} if kind == "dora" else {}
            elif len(columns) > 1:
                continue
            elif kind == "loha":
                parts = {"hada_w1_a": (rows, 4), "hada_w1_b": (4, flat), "hada_w2_a": (rows, 4), "hada_w2_b": (4, flat)}
            elif kind == "lokr":
                parts = {"lokr_w1": (4, 4), "lokr_w2": (rows // 4, flat // 4)}
            else:
                parts = {"lokr_w1": (4, 4), "lokr_w2_a": (rows // 4, 4), "lokr_w2_b": (4, flat // 4)}
            state |= {f"{layer}.{part}": torch.randn(shape) * 0.1 for part, shape in parts.items()}
        assert kinds.group_by_layer(state)
        return state

    def make(self, draw: random.Random, folder: Path) -> None:
        number = draw.randrange(len(self.sound))
        tensors = dict(self.sound[number][1])
        metadata: Any = dict(METADATA)
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            self._change(draw, tensors)
        if draw.random() < 0.2:
            metadata = mutations.values_of(draw, {"m": metadata}).get("m") if draw.random() < 0.5 else None
        header, data = written(tensors, metadata)
        if draw.random() < 0.3:
            self._change_header(draw, header)
        path = folder / "given.safetensors"
        put(path, header, data)
        if draw.random() < 0.25:
            path.write_bytes(mutations.bytes_of(draw, path.read_bytes()))
        choices = {"sound": number, "layout": draw.choice(layer_names.LAYOUTS), "tool": draw.randrange(8)}
        choices |= {"dtype": draw.choice(("", "bf16", "fp16", "fp32")), "rank": draw.choice((0, 1, 3, 4, 64))}
        (folder / "choices.json").write_text(json.dumps(choices), encoding="utf-8")

    def _change(self, draw: random.Random, tensors: dict[str, Tensor]) -> None:
        name = draw.choice(list(tensors) or ["x"])
        tensor = tensors.get(name, torch.ones(2, 2))
        how = draw.randrange(10)
        if how == 0:
            tensors.pop(name, None)
        elif how == 1:
            tensors[draw.choice((*NAMES, name[:-1], name + ".weight", name.upper()))] = tensor
        elif how <= 3:
            tensors[name] = torch.randn(draw.choice(SHAPES)).to(tensor.dtype)
        elif how <= 5:
            tensors[name] = tensor.to(draw.choice(list(DTYPES.values())))
        elif how == 6 and tensor.ndim == 2:
            tensors[name] = tensor.T.contiguous()
        elif how == 7 and tensor.numel():
            changed = tensor.clone().float().reshape(-1)
            changed[draw.randrange(len(changed))] = draw.choice((float("nan"), float("inf"), 1e38, 1e-40, 0.0))
            tensors[name] = changed.reshape(tensor.shape).to(tensor.dtype)
        elif how == 8:
            tensors[name] = torch.zeros_like(tensor)
        elif tensor.ndim:
            at = draw.randrange(tensor.ndim)
            tensors[name] = tensor.narrow(at, 0, draw.randrange(tensor.shape[at] + 1)).contiguous()

    def _change_header(self, draw: random.Random, header: dict[str, Any]) -> None:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        if not entries or draw.random() < 0.3:
            mutations.values_of(draw, header)
            return
        entry = draw.choice(entries)
        if draw.random() < 0.5:
            entry["dtype"] = draw.choice((*DTYPES, *STRANGE))
        else:
            entry["shape"] = draw.choice((*map(list, SHAPES), [-1, 4], [1 << 62, 4], [2**70], "4", None, [4.0], [[4]]))

    def _look_at_model(self, merged: Path) -> None:
        """A merged base is whole, or there is nothing of it: every weight of the base, in its shape, and finite."""
        if not merged.exists():
            return
        made = merged / "unet/diffusion_pytorch_model.safetensors"
        with safe_open(self.family.folder / "unet/diffusion_pytorch_model.safetensors", "pt") as base:
            with safe_open(made, "pt") as found:
                assert set(found.keys()) == set(base.keys()), "the merged model has other weights than the base"
                for name in base.keys():
                    weight = found.get_tensor(name)
                    assert list(weight.shape) == base.get_slice(name).get_shape(), name
                    assert torch.isfinite(weight.float()).all(), "update"
        shutil.rmtree(merged)  # thousands of cases would fill the disk

    def use(self, folder: Path, allowed: Callable[[Callable[[], Any]], Any]) -> None:
        path, out, merged = folder / "given.safetensors", folder / "out.safetensors", folder / "merged"
        choices = json.loads((folder / "choices.json").read_text(encoding="utf-8"))
        other = self.work / f"sound-{choices['sound']}.safetensors"
        dtype, rank = choices["dtype"], choices["rank"]
        if choices["tool"] == 0:
            found = allowed(lambda: files.inspect(path))
            if found is not None:
                found.format_lines()
        elif choices["tool"] == 1:
            allowed(lambda: verify.check_file(path, family_name="sd15"))
        elif choices["tool"] == 2:
            allowed(lambda: files.convert(path, out, choices["layout"], family="sd15", base="demo", dtype=dtype))
        elif choices["tool"] == 3:
            allowed(lambda: resize.resize(path, out, rank=rank, energy=0, uniform=False, dtype=dtype))
        elif choices["tool"] == 4:
            allowed(lambda: merge.merge([(path, 0.5), (other, 1.0)], out, rank=rank, energy=0, dtype=dtype))
        elif choices["tool"] == 5:
            what = "delta" if rank else "factors"
            allowed(lambda: average.average_files([other, path], out, what=what, half_life=0, rank=0, dtype=dtype))
        elif choices["tool"] == 6:
            allowed(lambda: merge.merge_into_base([(path, 0.5), (other, 1.0)], "demo", merged, family_name="sd15"))
            self._look_at_model(merged)
        else:
            given = {"family": "sd15", "path": "demo"}
            kind = self.sound[choices["sound"]][0].partition("_")[0]
            adapter = {"init_from": str(path), "type": kind, "rank": 4, "alpha": 2.0, "targets": ["attn1.to_q"]}
            made = {"name": "x", "model": given, "adapter": adapter, "dataset": {"folders": [{"path": "x"}]}}
            job = allowed(lambda: config.loads(tomlkit.dumps(made)))
            if job is not None:
                allowed(lambda: read_start_values(job, self.family, disk_budget.list_trainable(job, self.family)))
        if out.exists():  # what a tool has written can be used
            try:
                export.read_adapter(out)
            except (UserError, RunFailure) as error:
                if "alpha is 0" not in str(error):
                    raise AssertionError("a tool wrote what cannot be used") from error
