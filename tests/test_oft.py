"""OFT from training to the file and back: its rotation, its layers in every storage, runs, files, tools and imports.

Judges: the formulas by which LyCORIS (Diag-OFT) and ComfyUI turn a weight, restated, and torch's own autograd.
"""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from lora_fp8 import adapters, config, families, importing, precision, settings, train, verify
from lora_fp8.adapters import kinds
from lora_fp8.adapters.attach import attached
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.lora_files import layer_names, layouts, safetensors_file
from lora_fp8.plan import estimate
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Adapter, Quantize
from lora_fp8.tools import average, files, merge
from lora_fp8.training import checkpoint

torch.set_num_threads(1)
SMALL = ("adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']", "optimizer.lr=1e-2", "adapter.type=oft")


def comfy_weight(blocks, weight, alpha=0.0, strength=1.0):
    """ComfyUI's OFT, restated: R of Cayley, block by block, and its transpose times the weight."""
    blocks, weight = blocks.double(), weight.double()
    q = blocks - blocks.transpose(1, 2)
    if alpha > 0 and q.norm() > alpha:
        q = q * alpha / q.norm()
    parts = []
    for block, rows in zip(q, weight.split(q.shape[1]), strict=True):
        eye = torch.eye(q.shape[1], dtype=torch.float64)
        rotation = (eye + block) @ torch.linalg.inv(eye - block)
        parts.append(torch.einsum("nm,n...->m...", rotation - eye, rows) * strength + rows)
    return torch.cat(parts)


def layer(form, dtype=torch.float32):
    """A layer in a storage, such as "fp8 row"; "conv" is a convolution in int8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1, stride=2) if form == "conv" else nn.Linear(64, 96))
    storage, _, scale = form.partition(" ")
    storage = "int8" if storage == "conv" else storage
    precision.quantize_(model, Quantize(storage=storage, scale=scale or "auto"), (), dtype)
    return model, torch.randn(2, 8, 8, 8).to(dtype) if form == "conv" else torch.randn(2, 5, 64).to(dtype)


def turned_(model, std=0.2):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in adapters.list_trained_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


@pytest.mark.parametrize("form", ["fp8 row", "int8 1x64", "nf4", "none", "conv"])
def test_forward_and_gradients_are_those_of_the_rotated_weight(form):
    model, x = layer(form)
    report = adapters.inject(model, Adapter(type="oft", block_size=10, dtype="fp32"), ["0"], 0)
    turned_(model)
    base, (blocks,) = model[0].get_base_layer(), [p for _, p in adapters.list_trained_parameters(model)]
    assert blocks.shape == ((3, 8, 8) if form == "conv" else (12, 8, 8)) and report.num_parameters == blocks.numel()
    leaf, mine, theirs = (t.detach().clone() for t in (blocks, x, x))
    leaf, mine, theirs = leaf.double().requires_grad_(True), mine.requires_grad_(True), theirs.double()
    theirs.requires_grad_(True)
    weight, bias = comfy_weight(leaf, base.weight.detach()), base.bias.detach().double()
    wanted = F.conv2d(theirs, weight, bias, 2, 1) if form == "conv" else F.linear(theirs, weight, bias)
    got = model(mine)
    upstream = torch.randn(wanted.shape, dtype=torch.float64)
    got.backward(upstream.float())
    wanted.backward(upstream)
    for ours, judge in ((got, wanted), (mine.grad, theirs.grad), (blocks.grad, leaf.grad)):
        assert (ours.double() - judge).norm() <= 1e-5 * judge.norm()
    parts = kinds.group_by_layer(adapters.copy_state(model))["0"]
    exact = base.weight.detach().double()
    assert (
        kinds.compute_weight_change(exact, parts, 1.0, 0.5) + exact - comfy_weight(leaf, exact, strength=0.5)
    ).norm() < 1e-5
    plain, alone, whole = nn.Sequential(base), base(x), model(x)
    for strength in (1.0, 0.5):
        with attached({"0": plain[0]}, adapters.copy_state(model), {"0": 1.0}, strength, x.device):
            assert (plain(x) - (alone + (whole - alone) * strength)).norm() < 1e-5 * whole.norm()
    rows = torch.linalg.vector_norm(comfy_weight(leaf, exact).flatten(1)), torch.linalg.vector_norm(exact.flatten(1))
    torch.testing.assert_close(*rows)  # a rotation keeps lengths


@pytest.mark.parametrize("form", ["fp8 row", "conv"])
def test_training_begins_at_the_base_and_disabled_is_the_base(form):
    model, x = layer(form, torch.bfloat16)
    before = model(x)
    adapters.inject(model, Adapter(type="oft"), ["0"], 0)
    assert torch.equal(model(x), before)
    model(x).square().sum().backward()
    assert all(p.grad.any() and p.dtype == torch.bfloat16 for _, p in adapters.list_trained_parameters(model))
    turned_(model)
    assert not torch.equal(model(x), before)
    with adapters.disabled(model):
        assert torch.equal(model(x), before)
    assert all(p.requires_grad for _, p in adapters.list_trained_parameters(model))


def test_compiled_in_one_graph():
    torch._dynamo.reset()
    model, x = layer("fp8 row", torch.bfloat16)
    adapters.inject(model, Adapter(type="oft"), ["0"], 0)
    turned_(model)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("rows", "most", "size"), [(96, 32, 32), (320, 32, 32), (100, 32, 25), (4, 32, 4), (96, 10, 8)]
)
def test_blocks_divide_the_output_features(rows, most, size):
    assert kinds.choose_block_size(rows, most) == size


def test_what_has_no_blocks_is_refused():
    with pytest.raises(UserError, match="adapter.block_size = 4: 0 has 7 output features"):
        adapters.inject(nn.Sequential(nn.Linear(4, 7)), Adapter(type="oft", block_size=4), ["0"], 0)
    with pytest.raises(UserError, match="'oft': 0 is a grouped convolution .2 groups."):
        adapters.inject(nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)), Adapter(type="oft"), ["0"], 0)


@pytest.mark.parametrize(("family", "layout"), [("sd15", "kohya"), ("flux", "diffusers"), ("krea2", "comfy")])
def test_from_training_to_a_verified_file(make_job, tmp_path, family, layout):
    Family = families.get(family)
    side = 2 * Family.bucket_multiple
    exact = ("adapter.dtype=fp32", "export.dtype=fp32", "model.dtype=fp32", "export.verify=true")
    sizes = (f"dataset.resolution={side}", f"dataset.bucket_step={Family.bucket_multiple}") if family != "sd15" else ()
    settings = ("adapter.type=oft", "adapter.block_size=8", "optimizer.lr=1e-2", "train.steps=3", *exact, *sizes)
    job = make_job(tmp_path, *settings, "export.formats=['auto']", family=family)
    result = train.run(job, progress=False)
    (path,), (report,) = result.files, result.reports
    assert path.name == f"lora_{layout}.safetensors" and report.ok, report.list_failures()
    assert report.measured["delta_error"] < 1e-5 and report.measured["prediction_error"] < 1e-5
    assert report.measured["effect"] > 1e-4
    tensors, built = load_file(path), planning.make(job).family
    assert estimate.estimate(planning.make(job)).file_bytes[layout] == sum(
        tensor.nbytes for name, tensor in tensors.items() if name.endswith("oft_blocks")
    )
    metadata = safetensors_file.read_header(path).metadata
    assert json.loads(metadata["ss_network_args"]) == {"algo": "diag-oft"}
    assert (metadata["ss_network_module"], metadata["ss_network_dim"]) == ("lycoris.kohya", "8")
    held = kinds.group_by_layer(checkpoint.read_latest(result.run.checkpoints)[0].adapter)
    name_of, _ = layer_names.get_rule(Family, built.read_denoiser_config(), layout)
    shapes = Family.list_layer_shapes(built.read_denoiser_config())
    for module, parts in list(held.items())[::7]:  # as ComfyUI reads them, with the file's alpha
        stem, weight = name_of(module)[0], torch.randn(shapes[module])
        blocks, alpha = tensors[f"{stem}.oft_blocks"], float(tensors[f"{stem}.alpha"])
        wanted = weight.double() + kinds.compute_weight_change(weight.double(), parts, 1.0)
        assert (comfy_weight(blocks, weight, alpha) - wanted).norm() < 1e-6 * wanted.norm()
    more = ("export.formats=['auto']", f"adapter.init_from='{path}'")
    again = make_job(tmp_path / "next", *settings, *more, family=family)
    for name, tensor in planning.make(again).start.items():
        assert torch.equal(tensor, held[name.removesuffix(".oft_blocks")]["oft_blocks"])


def test_a_run_resumes_to_the_bit_and_tools_take_its_files(make_job, tmp_path, tiny):
    settings = (*SMALL, "adapter.module_dropout=0.1", "adapter.scale_weight_norms=0.2", "optimizer.ema_decay=0.5")
    settings += ("memory.gradient_checkpointing=true", "export.formats=['kohya']", "train.log_every=1")
    whole = train.run(make_job(tmp_path / "a", *settings, "train.steps=4"), progress=False)
    train.run(make_job(tmp_path / "b", *settings, "train.steps=2"), progress=False)
    pieces = train.run(make_job(tmp_path / "b", *settings, "train.steps=4"), progress=False, resume=True)
    for name in ("adapter", "optimizer"):
        one, other = (load_file(r.run.path / f"checkpoints/step-000004/{name}.safetensors") for r in (whole, pieces))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    steps = [event for event in whole.run.read_events() if event["event"] == "step"]
    assert max(event["keys_scaled"] for event in steps) > 0
    assert max(event["max_key_norm"] for event in steps) == pytest.approx(0.2)
    with pytest.raises(UserError, match="adapter.block_size: was 32, is 8"):
        train.run(make_job(tmp_path / "b", *settings, "adapter.block_size=8"), progress=False, resume=True)
    file = whole.files[0]
    about = files.inspect(file)
    assert about.kind == "oft" and "sd15" in about.families and max(about.norms.values()) > 0
    assert average.average_run(whole.run.path, what="factors", half_life=0.0, last=2)[1]
    with pytest.raises(UserError, match="use --average factors"):
        average.average_run(whole.run.path, what="delta", half_life=0.0, last=2)
    merge.merge_into_base([(file, 1.0)], str(tiny("sd15")), tmp_path / "merged")
    part = "unet/diffusion_pytorch_model.safetensors"
    before, after = load_file(tiny("sd15") / part), load_file(tmp_path / "merged" / part)
    state, _ = layouts.from_layout(load_file(file), families.get("sd15"), {})
    layers = kinds.group_by_layer(state)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {f"{n}.weight" for n in layers}
    for module, parts in layers.items():
        wanted = comfy_weight(parts["oft_blocks"], before[f"{module}.weight"])
        assert (after[f"{module}.weight"].double() - wanted).norm() <= 2**-8 * wanted.norm()
    assert verify.check_file(file, str(tiny("sd15"))).ok


FACTS = tomllib.loads((Path(__file__).parent / "data" / "facts.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", families.list_families())
def test_each_layout_that_carries_it_and_back(tiny, name):
    """The layouts of LoHa, which likewise cannot be joined or have rows swapped; ComfyUI's formula judges."""
    Family = families.get(name)
    family = Family(settings.Model(family=name, path=str(tiny(name))), device="cpu", dtype=torch.float32)
    denoiser, sizes = family.make_empty_denoiser(), family.read_denoiser_config()
    names = Family.choose_adapter_layers(denoiser)
    able = [
        layout for layout in Family.layouts if layouts.explain_unsupported("oft", names, Family, sizes, layout) is None
    ]
    assert (able[0] if able else "") == FACTS[name]["lycoris"][1]
    few = names[:: max(1, len(names) // 4)]
    shapes = {module: tuple(denoiser.get_submodule(module).weight.shape) for module in few}
    blocks = {module: kinds.choose_block_size(shape[0], 8) for module, shape in shapes.items()}
    state = {
        f"{module}.oft_blocks": torch.randn(shapes[module][0] // size, size, size) / 4
        for module, size in blocks.items()
    }
    for layout in able:
        file = layouts.to_layout(state, 1.0, Family, sizes, layout)
        assert layouts.detect_layout(file, Family) == layout
        back, scaling = layouts.from_layout(file, Family, sizes)
        assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
        assert set(scaling.values()) == {1.0}
        name_of, _ = layer_names.get_rule(Family, sizes, layout)
        for module in few:
            stem, weight = name_of(module)[0], torch.randn(shapes[module])
            wanted = weight + kinds.compute_weight_change(weight, kinds.group_by_layer(state)[module], 1.0)
            made = comfy_weight(file[f"{stem}.oft_blocks"], weight, float(file[f"{stem}.alpha"]))
            assert (made - wanted).norm() < 1e-5 * wanted.norm()


def test_a_limit_in_another_program_s_file_is_read(tmp_path):
    """LyCORIS' `constraint`: alpha limits the norm of Q."""
    blocks, weight = torch.randn(4, 8, 8), torch.randn(32, 16)
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    for alpha in (0.0, 0.5, 1e6):
        state, scaling = layouts.from_layout(
            {f"{stem}.oft_blocks": blocks, f"{stem}.alpha": torch.tensor(alpha)}, families.get("sd15"), {}
        )
        ((module, parts),) = kinds.group_by_layer(state).items()
        got = weight.double() + kinds.compute_weight_change(weight.double(), parts, scaling[module])
        assert (got - comfy_weight(blocks, weight, alpha)).norm() < 1e-5 * got.norm()


@pytest.mark.parametrize("blocks", [torch.ones(2, 4), torch.ones(2, 4, 3)])
def test_tensors_that_are_no_blocks_are_refused(blocks, tmp_path):
    save_file({"lora_unet_a.oft_blocks": blocks}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="do not match"):
        files.inspect(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("family", "more", "why"),
    [
        ("sd15", ("adapter.ranks={'attn1' = 8}",), "adapter.ranks: attn1: OFT has no ranks"),
        ("sd15", ("memory.cuda_graphs=true",), "memory.cuda_graphs: CUDA graphs do not work with adapter.type = 'oft'"),
        ("sd15", ("export.formats=['diffusers']",), r"no program reads OFT .*; set export.formats = \['kohya'\]"),
        (
            "flux",
            ("export.formats=['kohya']", "dataset.resolution=64", "dataset.bucket_step=32"),
            "stores 3 layers as one",
        ),
        ("sd15", ("adapter.text_encoder=true",), "text encoders can be trained as LoRA only"),
    ],
)
def test_what_oft_cannot_do_is_refused(make_job, tmp_path, family, more, why):
    with pytest.raises((UserError, UserErrors), match=f"(?s){why}"):
        planning.make(make_job(tmp_path, "adapter.type=oft", *more, family=family))


def test_lycoris_diag_oft_is_ours_and_other_forms_are_not(tmp_path):
    base = "pretrained_model_name_or_path = 'v1-5.safetensors'\ntrain_data_dir = 'p'\nnetwork_dim = 16\n"

    def read(text):
        (tmp_path / "a.toml").write_text(base + text, encoding="utf-8")
        return config.loads(importing.to_toml(importing.import_file(tmp_path / "a.toml", family="sd15"))).adapter

    lycoris = read("network_module = 'lycoris.kohya'\nnetwork_alpha = 4\nnetwork_args = ['algo=diag-oft']\n")
    assert (lycoris.type, lycoris.block_size, lycoris.alpha) == ("oft", 16, 16.0)
    assert read("network_module = 'networks.oft'\n").type == "lora"  # its dim is the number of blocks
    (tmp_path / "lycoris_config.json").write_text(json.dumps({"algo": "diag-oft", "linear_dim": 8}), encoding="utf-8")
    content = {"model_family": "flux", "model_type": "lora", "lora_type": "lycoris", "max_train_steps": 10}
    (tmp_path / "b.json").write_text(json.dumps(content | {"lycoris_config": "lycoris_config.json"}), encoding="utf-8")
    found = tomllib.loads(importing.to_toml(importing.import_file(tmp_path / "b.json", tool="simpletuner")))["adapter"]
    assert (found["type"], found["block_size"]) == ("oft", 8) and "alpha" not in found
