"""inspect and convert: what a file is told to be, and the same LoRA in every other layout, judged by arithmetic."""

import hashlib
import json

import pytest
import safetensors.torch
import torch

from lora_fp8 import families, settings
from lora_fp8.cli import lora_files as lora_commands
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.lora_files import export, export_metadata, layouts, safetensors_file
from lora_fp8.tools import files
from lora_fp8.verify import compute_delta_error


def made(folder, name, layout, scaling=0.5, dtype="bf16", every=9):
    """A LoRA file on some layers of the released model, and what was trained."""
    Family = families.get(name)
    shapes = Family.list_layer_shapes(Family.reference_config)
    chosen = [n for n in shapes if any(n.endswith(f".{target}") for target in Family.adapter_targets)][::every]
    generator = torch.Generator().manual_seed(3)
    state = {}
    for module in chosen:
        out, inner, *kernel = shapes[module]
        state[f"{module}.lora_A.weight"] = torch.randn(2, inner, *kernel, generator=generator)
        state[f"{module}.lora_B.weight"] = torch.randn(out, 2, *(1 for _ in kernel), generator=generator)
    facts = export_metadata.ExportFacts("x", 1, 2, 2 * scaling, 1e-4, 0, (512, 512))
    section = settings.Export(formats=[layout], dtype=dtype)
    (path,) = export.write(export.Adapter(state, scaling), Family, Family.reference_config, section, facts, folder)
    return path, state


def test_inspect_tells_what_was_written(tmp_path, capsys):
    path, state = made(tmp_path, "sdxl", "kohya")
    lora_commands.inspect(path, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["layout"], told["families"], told["dtypes"]) == ("kohya", ["sdxl"], {"bf16": len(state) // 2})
    assert told["ranks"] == {"2": len(state) // 2} and told["alphas"] == {"1.0": len(state) // 2}
    raw = path.read_bytes()
    assert told["hashes"]["sha256"] == hashlib.sha256(raw).hexdigest() and told["hashes"]["header"] is True
    assert told["metadata"]["sshs_model_hash"].startswith(told["hashes"]["autov3"])
    module = next(key for key in state if key.endswith("lora_A.weight")).removesuffix(".lora_A.weight")
    a, b = (state[f"{module}.lora_{half}.weight"].bfloat16().double().flatten(1) for half in "AB")
    norm = float((b @ a).norm()) * 0.5
    assert any(abs(found / norm - 1) < 1e-6 for found in told["norms"].values())
    lora_commands.inspect(path, as_json=False)
    assert "kohya layout" in capsys.readouterr().out


def test_inspect_says_when_the_hash_is_of_other_bytes(tmp_path):
    path, _ = made(tmp_path, "krea2", "comfy")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert files.inspect(path).hashes["header"] is False


@pytest.mark.parametrize(("name", "layout"), [("krea2", "comfy"), ("z_image", "diffusers"), ("sdxl", "kohya")])
def test_a_file_without_metadata_is_known_by_names_and_shapes(tmp_path, name, layout):
    path, _ = made(tmp_path, name, layout, every=40)
    bare = tmp_path / "bare.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(path), bare)
    about = files.inspect(bare)
    assert (about.families, about.layout, about.hashes["header"]) == ([name], layout, None)


@pytest.mark.parametrize("name", ["flux", "z_image", "sdxl"])
def test_any_layout_to_any_other(tmp_path, name):
    Family = families.get(name)
    for first in Family.layouts:
        path, state = made(tmp_path / first, name, first, dtype="fp32")
        for second in Family.layouts:
            out = tmp_path / first / f"to-{second}.safetensors"
            files.convert(path, out, second)
            tensors, metadata = safetensors_file.read(out)
            assert layouts.detect_layout(tensors, Family) == second == metadata["lora_fp8_layout"]
            assert metadata["sshs_model_hash"] == safetensors_file.hash_payload(out)
            back, scales = layouts.from_layout(tensors, Family, Family.reference_config)
            assert back.keys() == state.keys()
            for module in layouts.list_modules(state):
                pairs = [(s[f"{module}.lora_A.weight"], s[f"{module}.lora_B.weight"]) for s in (back, state)]
                assert compute_delta_error((*pairs[0], scales[module]), (*pairs[1], 0.5)) < 1e-6, (
                    first,
                    second,
                    module,
                )


def test_what_convert_refuses(tmp_path):
    path, _ = made(tmp_path, "sd15", "kohya")
    out = tmp_path / "out.safetensors"
    with pytest.raises(UserError, match="Stable Diffusion 1.5 has no comfy layout"):
        files.convert(path, out, "comfy")
    with pytest.raises(UserError, match="'x': there is no such layout; accepted: diffusers, comfy, kohya"):
        files.convert(path, out, "x")
    with pytest.raises(UserError, match="exists already"):
        files.convert(path, path, "diffusers")
    strange = tmp_path / "strange.safetensors"
    safetensors.torch.save_file({"q.lora_A.weight": torch.ones(1, 4), "q.lora_B.weight": torch.ones(4, 1)}, strange)
    with pytest.raises(UserError, match="\\(none that is supported\\); name it with --family"):
        files.convert(strange, out, "diffusers")
    big, state = made(tmp_path / "big", "krea2", "comfy", scaling=1e6, dtype="fp32")
    with pytest.raises(RunFailure, match="not finite in fp16"):
        files.convert(big, out, "diffusers", dtype="fp16")
    assert not out.exists() and state
