"""DoRA, LoKr and LoHa from training to the file and back: what carries them, what reads them, and what it then does.

Judges: diffusers' pipelines, and the formulas by which ComfyUI and LyCORIS make a weight of a file's tensors.
"""

import json
import tomllib
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from lora_fp8 import families, settings, train, verify
from lora_fp8.adapters import kinds
from lora_fp8.errors import UserErrors
from lora_fp8.lora_files import export, layer_names, layouts, safetensors_file
from lora_fp8.plan import resolve
from lora_fp8.stages import finish

torch.set_num_threads(1)
KINDS = ("dora", "lokr", "loha")


def comfy_delta(file, stem):
    """ComfyUI's `lokr` and `loha` adapters, restated: alpha counts where a matrix is of low rank."""
    get = lambda part: file.get(f"{stem}.{part}")  # noqa: E731
    alpha, dim = get("alpha"), None
    if get("hada_w1_a") is not None:
        dim = get("hada_w1_b").shape[0]
        made = (get("hada_w1_a").double() @ get("hada_w1_b").double()) * (
            get("hada_w2_a").double() @ get("hada_w2_b").double()
        )
    else:
        factors = []
        for side in ("lokr_w1", "lokr_w2"):
            whole = get(side)
            if whole is None:
                dim = get(f"{side}_b").shape[0]
                whole = get(f"{side}_a").double() @ get(f"{side}_b").double()
            factors.append(whole.double())
        made = torch.kron(factors[0], factors[1].flatten(1))
    return made * (float(alpha) / dim if alpha is not None and dim is not None else 1.0)


def trained_delta(state, module, scale):
    return kinds.compute_delta(kinds.group_by_layer(state)[module], scale, torch.float64)


@pytest.mark.parametrize("storage", ["fp8", "none"])
@pytest.mark.parametrize(("kind", "layout"), [("dora", "diffusers"), ("lokr", "kohya"), ("loha", "kohya")])
def test_from_training_to_a_verified_file(job, kind, layout, storage):
    """A whole job in float32: every check of the file holds, the prediction to rounding."""
    made = job(
        f"adapter.type={kind}",
        "adapter.alpha=2.0",
        "adapter.dtype=fp32",
        "export.formats=['auto']",
        "export.dtype=fp32",
        "export.verify=true",
        "model.dtype=fp32",
        "train.steps=3",
        "optimizer.lr=1e-2",
        "preview.prompts=['a cat']",
        "preview.at_start=false",
        f"quantize.storage={storage}",
    )
    result = train.run(made, progress=False)
    (file,), (report,) = result.files, result.reports
    assert file.name == f"lora_{layout}.safetensors" and report.ok
    assert report.measured["delta_error"] < 1e-5 and report.measured["prediction_error"] < 1e-5
    assert report.measured["effect"] > 1e-3 and report.measured["preview_psnr"] > 60
    lines = {check.name: check.detail for check in report.checks}
    assert ("computed from the file" in lines["load"]) == (kind != "dora")
    metadata = safetensors_file.read_header(file).metadata
    assert metadata["ss_network_module"] == ("networks.lora" if kind == "dora" else "lycoris.kohya")
    told = {"dora": {}, "lokr": {"algo": "lokr", "factor": "8", "decompose_both": "False"}, "loha": {"algo": "loha"}}
    assert json.loads(metadata["ss_network_args"]) == told[kind]
    assert metadata["ss_network_alpha"] == ("4.0" if kind == "dora" else "2.0")
    assert metadata["modelspec.tags"] == f"lora, {kind}"
    again = finish.export_run(result.run.path, ["export.dtype=bf16"])
    held = load_file(again[0])
    wide = {name.rpartition(".")[2] for name, tensor in held.items() if tensor.dtype == torch.float32}
    assert wide == ({"lora_magnitude_vector"} if kind == "dora" else {"alpha"})
    report = verify.check_file(again[0], str(made.model.path))
    assert report.ok and 0 < report.measured["merged_row-scaled"] <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_as_people_train(job, kind):
    result = train.run(
        job(
            f"adapter.type={kind}",
            "export.formats=['auto']",
            "export.verify=true",
            "train.steps=3",
            "optimizer.lr=1e-2",
            "memory.gradient_checkpointing=true",
        ),
        progress=False,
    )
    assert result.reports[0].ok, result.reports[0].format_lines()


# -- which layout carries which kind


FACTS = tomllib.loads((Path(__file__).parent / "data" / "facts.toml").read_text(encoding="utf-8"))


def adapter_of_kind(denoiser, names, kind, seed=0):
    """Tensors of trained layers: (state, scaling), the scaling 1 where LoKr has no rank."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    state, scaling = {}, {}
    for i, name in enumerate(names):
        out, inner, *kernel = denoiser.get_submodule(name).weight.shape
        columns = inner * (kernel[0] * kernel[1] if kernel else 1)
        if kind == "dora":
            parts = {"lora_A.weight": draw(2, inner, *kernel), "lora_B.weight": draw(out, 2, *(1 for _ in kernel))}
            parts["lora_magnitude_vector"] = draw(out).abs()
        elif kind == "loha":
            parts = {"hada_w1_a": draw(out, 2), "hada_w1_b": draw(2, columns)}
            parts |= {"hada_w2_a": draw(out, 2), "hada_w2_b": draw(2, columns)}
        else:
            parts = {"lokr_w1": draw(4, 4)}
            whole = (out // 4, inner // 4, *kernel)
            parts |= (
                {"lokr_w2": draw(*whole)}
                if i % 2
                else {"lokr_w2_a": draw(out // 4, 2), "lokr_w2_b": draw(2, columns // 4)}
            )
        state |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        scaling[name] = 1.0 if "lokr_w2" in parts else 0.5
    return state, scaling


@pytest.mark.parametrize("name", families.list_families())
def test_each_kind_in_each_layout_that_carries_it_and_back(tiny, name):
    """Of DoRA diffusers' own conversion keeps every tensor; of the others ComfyUI's formula judges."""
    Family = families.get(name)
    family = Family(settings.Model(family=name, path=str(tiny(name))), device="cpu", dtype=torch.float32)
    denoiser, sizes = family.make_empty_denoiser(), family.read_denoiser_config()
    names = Family.choose_adapter_layers(denoiser)
    few = names[:: max(1, len(names) // 5)][:6]
    for kind in KINDS:
        able = [one for one in Family.layouts if layouts.explain_unsupported(kind, names, Family, sizes, one) is None]
        expected = "diffusers" if kind == "dora" else FACTS[name]["lycoris"][kind == "loha"]
        assert (able[0] if able else "") == expected, kind
        state, scaling = adapter_of_kind(denoiser, few, kind)
        for layout in able:
            file = layouts.to_layout(state, scaling, Family, sizes, layout)
            assert layouts.detect_layout(file, Family) == layout and layouts.list_modules(state) == sorted(few)
            back, scales = layouts.from_layout(file, Family, sizes)
            assert back.keys() == state.keys()
            for module, parts in kinds.group_by_layer(back).items():
                wanted = trained_delta(state, module, scaling[module])
                got = kinds.compute_delta(parts, scales[module], torch.float64)
                assert (got - wanted).norm() < 1e-6 * wanted.norm()
            if kind == "dora":
                options = {"unet_config": denoiser.config} if name == "sdxl" else {}
                read = Family.get_pipeline_type().lora_state_dict(dict(file), **options)
                assert (read[0] if isinstance(read, tuple) else read).keys() == file.keys()
                assert all(torch.equal(back[key], state[key]) for key in state if "magnitude" in key)
                continue
            name_of, _ = layer_names.get_rule(Family, sizes, layout)
            for module in few:
                wanted = trained_delta(state, module, scaling[module])
                made = comfy_delta(file, name_of(module)[0])
                assert (made - wanted).norm() < 1e-6 * wanted.norm(), (layout, module)


FLUX_IN_COMFYUI = {  # comfy.utils.flux_to_diffusers, its keys without the block and ".weight"
    *(f"attn.{x}" for x in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0")),
    *("attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    *("norm1.linear", "norm1_context.linear", "norm.linear", "proj_mlp", "proj_out"),
}


def test_comfyui_knows_flux_layers_by_diffusers_names():
    """Each as a slice of rows of the fused weight, which is why LoKr and LoHa keep the layers apart there."""
    Family = families.get("flux")
    with torch.device("meta"):
        denoiser = diffusers.FluxTransformer2DModel.from_config(Family.reference_config)
    names = Family.choose_adapter_layers(denoiser)
    state, scaling = adapter_of_kind(denoiser, names[:1], "lokr")
    file = layouts.to_layout(state, scaling, Family, dict(denoiser.config), "diffusers")
    assert {key.rpartition(".")[0] for key in file} == {f"transformer.{names[0]}"}
    assert {name.split(".", 2)[2] for name in names} <= FLUX_IN_COMFYUI


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        (
            "sd15",
            ("dora", "['kohya']"),
            r"kohya layout .* does not support DoRA: .*A1111.*set export.formats = \['diffusers'\]",
        ),
        ("sd15", ("lokr", "['diffusers']"), r"no program reads LoKr .*; set export.formats = \['kohya'\]"),
        (
            "flux",
            ("loha", "['kohya', 'diffusers']"),
            r"it stores 3 layers as one \(lora_unet_double_blocks_0_img_attn_qkv\)",
        ),
        (
            "lumina2",
            ("lokr", "['auto']"),
            r"(?s)comfy layout.*stores 3.*no layout supports it: .*adapter.type = 'lora'",
        ),
    ],
)
def test_what_nothing_could_read_is_refused_before_a_run_folder_exists(job, tmp_path, family, given, message):
    kind, formats = given
    sizes = ("dataset.resolution=64", "dataset.bucket_step=32")
    with pytest.raises(UserErrors, match=message):
        train.run(job(f"adapter.type={kind}", f"export.formats={formats}", *sizes, family=family), progress=False)
    assert not (tmp_path / "runs").exists()


def test_lokr_of_layers_that_are_not_joined_is_carried_in_the_joined_layout(job):
    """FLUX's feed-forward layers stand alone in ComfyUI's names, too."""
    family = families.get("flux")
    made = job("adapter.type=lokr", "adapter.targets=['ff.net.2']", "export.formats=['comfy', 'kohya']", family="flux")
    built = family(made.model, device="cpu", dtype=torch.float32)
    assert resolve.choose_layouts(made, built) is made


@pytest.mark.parametrize(
    ("kind", "family", "by_diffusers"),
    [("lokr", "z_image", True), ("lokr", "flux2_klein", True), ("lokr", "flux", False), ("dora", "flux", True)],
)
def test_transformers_from_training_to_a_verified_file(job, kind, family, by_diffusers):
    Family = families.get(family)
    side = 2 * Family.bucket_multiple
    result = train.run(
        job(
            f"adapter.type={kind}",
            "adapter.factor=4",
            "adapter.rank=2",
            "adapter.alpha=1.0",
            "export.formats=['auto']",
            "export.verify=true",
            "export.dtype=fp32",
            "model.dtype=fp32",
            "adapter.dtype=fp32",
            "train.steps=2",
            "optimizer.lr=1e-2",
            f"dataset.resolution={side}",
            f"dataset.bucket_step={Family.bucket_multiple}",
            family=family,
        ),
        progress=False,
    )
    (report,) = result.reports
    assert report.ok and result.files[0].name == "lora_diffusers.safetensors"
    assert report.measured["delta_error"] < 1e-5 and report.measured["prediction_error"] < 1e-5
    load = next(check.detail for check in report.checks if check.name == "load")
    assert ("computed from the file" not in load) == by_diffusers


def test_a_wrong_strength_and_a_lost_length_are_found(job):
    """Of files that differ from the training in what the eye would not see."""
    result = train.run(job("adapter.type=lokr", "export.formats=['kohya']", "train.steps=2"), progress=False)
    made = job("adapter.type=lokr")
    family = families.get("sd15")(made.model, device="cpu", dtype=torch.float32)
    file = result.files[0]
    tensors, metadata = safetensors_file.read(file)
    sizes = family.read_denoiser_config()
    state, scaling = layouts.from_layout(tensors, family, sizes)
    assert verify.check(file, family, verify.Reference(export.Adapter(state, scaling))).ok
    changed = {key: tensor * 1.02 if key.endswith("lokr_w1") else tensor for key, tensor in tensors.items()}
    safetensors_file.write_file(file, changed, metadata, hashes=True)
    (failed,) = verify.check(file, family, verify.Reference(export.Adapter(state, scaling))).list_failures()
    assert failed.startswith("delta: largest relative error 2.0")
    first = next(key for key in tensors if key.endswith("lokr_w1"))
    safetensors_file.write_file(
        file, {key: tensor for key, tensor in tensors.items() if key != first}, metadata, hashes=True
    )
    assert any(
        "pairs" in line and "the LoKr is incomplete" in line for line in verify.check(file, family).list_failures()
    )
