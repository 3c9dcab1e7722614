"""Every layout of every family: ComfyUI's names, diffusers' own loader, there and back, and what auto chooses.

Judges are diffusers' pipelines (`lora_state_dict` of each) and names written out here from the original code. The
denoisers are the released ones, on the meta device; the LoRAs on them are real, of small rank.
"""

import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

from lora_fp8 import config, families, settings
from lora_fp8.errors import UserError
from lora_fp8.lora_files import export_metadata, layouts, naming
from lora_fp8.plan import resolve
from lora_fp8.verify import compute_delta_error


@cache
def full_size(name):
    """(denoiser on the meta device, its config) of the released model."""
    Family = families.get(name)
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(Family.reference_config)
    return denoiser, dict(denoiser.config)


def random_lora(denoiser, names, rank=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name in names:
        out, inner, *kernel = denoiser.get_submodule(name).weight.shape
        r = rank(name) if callable(rank) else rank
        state[f"{name}.lora_A.weight"] = torch.randn(r, inner, *kernel, generator=generator)
        state[f"{name}.lora_B.weight"] = torch.randn(out, r, *(1 for _ in kernel), generator=generator)
    return state


def pair(state, module, scale):
    return state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"], scale


CASES = [(name, layout) for name in families.list_families() for layout in families.get(name).layouts]


def read_by_diffusers(name, tensors, denoiser):
    """{module: (A, B, scaling)} as diffusers' pipeline of the family understands a file, or what went wrong."""
    Family = families.get(name)
    options = {"unet_config": denoiser.config} if name == "sdxl" else {}
    try:
        converted = Family.get_pipeline_type().lora_state_dict(dict(tensors), **options)
    except (KeyError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    converted, alphas = converted if isinstance(converted, tuple) else (converted, None)
    prefix = Family.denoiser_name + "."
    if foreign := [key for key in converted if not key.startswith(prefix)]:
        return f"left over: {foreign[:2]}"
    converted = {key.removeprefix(prefix): tensor for key, tensor in converted.items()}
    if alphas:  # of UNets: it comes beside the weights, here one for all; elsewhere it is multiplied in
        converted = convert_unet_state_dict_to_peft(converted)
        (alpha,) = set(map(float, alphas.values()))
        assert 2 * len(alphas) == len(converted)
    read = {}
    for module in layouts.list_modules(converted):
        a, b, _ = pair(converted, module, 1.0)
        read[module] = a, b, alpha / a.shape[0] if alphas else 1.0
    return read


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_diffusers_reads_what_is_said_to_be_read_and_nothing_else(name, layout):
    """At full size, every adapted layer, of several ranks: no key is left over, and each delta is the trained one."""
    Family = families.get(name)
    denoiser, denoiser_config = full_size(name)
    names = Family.choose_adapter_layers(denoiser)
    ranks = {module: 1 + i % 3 for i, module in enumerate(names)}
    state = random_lora(denoiser, names, ranks.__getitem__)
    tensors = layouts.to_layout(state, 0.75, Family, denoiser_config, layout)
    found = read_by_diffusers(name, tensors, denoiser)
    reads = isinstance(found, dict) and found.keys() == set(names)
    assert reads == (layout in Family.layouts_of_diffusers), found if isinstance(found, str) else sorted(found)[:3]
    assert reads == (layouts.explain_unread_by_diffusers(Family, denoiser_config, layout) is None)
    if reads:
        for module in names[:: max(1, len(names) // 60)]:
            assert compute_delta_error(found[module], pair(state, module, 0.75)) < 1e-5, module


@pytest.mark.parametrize("name", families.list_families())
def test_diffusers_reads_some_of_the_layers_where_that_is_said(name):
    """A user's adapter.targets, here each kind of layer alone: it is said if diffusers needs others beside it."""
    Family = families.get(name)
    denoiser, denoiser_config = full_size(name)
    of_kind: dict[str, list[str]] = {}
    for module in Family.choose_adapter_layers(denoiser):
        of_kind.setdefault(re.sub(r"\.\d+\.", ".N.", module), []).append(module)
    for kind, modules in of_kind.items():
        names = modules if Family.converter_blocks else modules[:2]
        state = random_lora(denoiser, names, lambda module: 2)
        for layout in [layout for layout in Family.layouts if layout in Family.layouts_of_diffusers]:
            found = read_by_diffusers(name, layouts.to_layout(state, 1.0, Family, denoiser_config, layout), denoiser)
            # The other members of a fused layer are there too, and do nothing.
            reads = isinstance(found, dict) and found.keys() >= set(names)
            reads = reads and not any(found[module][1].any() for module in found.keys() - set(names))
            said = layouts.explain_unread_by_diffusers(Family, denoiser_config, layout, layers=names)
            assert reads == (said is None), (kind, layout, found if isinstance(found, str) else len(found))


@pytest.mark.parametrize("name", families.list_families())
def test_every_layout_to_every_other_and_back_loses_nothing(name):
    """Of a third of the layers, ranks and scalings drawn at random, so that fused layers lack members or mix them."""
    Family = families.get(name)
    denoiser, denoiser_config = full_size(name)
    generator = torch.Generator().manual_seed(7)
    names = Family.choose_adapter_layers(denoiser)
    chosen = [n for n in names if torch.rand((), generator=generator) < 0.34 and len(names) > 3][:40]
    ranks = {n: 1 + int(torch.randint(3, (), generator=generator)) for n in chosen}
    state = random_lora(denoiser, chosen, ranks.__getitem__)
    scaling = {n: 0.25 + float(torch.rand((), generator=generator)) for n in chosen}
    for first in Family.layouts:
        for second in Family.layouts:
            once = layouts.to_layout(state, scaling, Family, denoiser_config, first)
            assert layouts.detect_layout(once, Family) == first
            there, scales = layouts.from_layout(once, Family, denoiser_config)
            twice = layouts.to_layout(there, scales, Family, denoiser_config, second)
            back, scales = layouts.from_layout(twice, Family, denoiser_config)
            assert layouts.list_modules(back) == sorted(chosen)
            for module in chosen:
                error = compute_delta_error(pair(back, module, scales[module]), pair(state, module, scaling[module]))
                assert error < 1e-6, (first, second, module)


# -- ComfyUI


BFL = {
    *(f"double_blocks.#.{s}_{x}" for s in ("img", "txt") for x in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")),
    *("single_blocks.#.linear1", "single_blocks.#.linear2"),
}
NEXT_DIT = {"attention.qkv", "attention.out", *(f"feed_forward.w{i}" for i in (1, 2, 3))}
JOINT = {
    f"joint_blocks.#.{s}_block.{x}" for s in ("x", "context") for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
}
QWEN_IMAGE = {
    *(f"transformer_blocks.#.attn.to_{x}" for x in ("q", "k", "v", "out.0", "add_out")),
    *(f"transformer_blocks.#.attn.add_{x}_proj" for x in "qkv"),
    *(f"transformer_blocks.#.{s}_mlp.net.{x}" for s in ("img", "txt") for x in ("0.proj", "2")),
}
WAN = {
    *(f"blocks.#.{attn}.{x}" for attn in ("self_attn", "cross_attn") for x in "qkvo"),
    *("blocks.#.ffn.0", "blocks.#.ffn.2"),
}
COMFYUI = {
    "flux": (BFL, 19 * 8 + 38 * 2),
    "flux_kontext": (BFL, 19 * 8 + 38 * 2),
    "chroma": (BFL, 19 * 8 + 38 * 2),
    "flux2": (BFL, 8 * 8 + 48 * 2),
    "flux2_klein": (BFL, 5 * 8 + 20 * 2),
    # 3.5 medium: its first 13 blocks have a second attention, and the last block's text is only looked at
    "sd3": (JOINT | {f"joint_blocks.#.x_block.attn2.{x}" for x in ("qkv", "proj")}, 24 * 8 + 13 * 2 - 3),
    "lumina2": (
        {f"{block}.#.{x}" for block in ("layers", "noise_refiner", "context_refiner") for x in NEXT_DIT},
        (26 + 2 + 2) * 5,
    ),
    "z_image": ({f"layers.#.{x}" for x in NEXT_DIT}, 30 * 5),
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"), (QWEN_IMAGE, 60 * 12 - 4)),
    "krea2": (
        {f"blocks.#.attn.{x}" for x in ("wq", "wk", "wv", "wo", "gate")}
        | {f"blocks.#.mlp.{x}" for x in ("gate", "up", "down")},
        28 * 8,
    ),
    "ernie_image": (
        {f"layers.#.self_attention.to_{x}" for x in ("q", "k", "v", "out.0")}
        | {f"layers.#.mlp.{x}" for x in ("gate_proj", "up_proj", "linear_fc2")},
        36 * 7,
    ),
    "wan": (WAN, 40 * 10),
    "wan22_5b": (WAN, 30 * 10),
    "anima": (
        {f"blocks.#.{attn}.{x}_proj" for attn in ("self_attn", "cross_attn") for x in ("q", "k", "v", "output")}
        | {"blocks.#.mlp.layer1", "blocks.#.mlp.layer2"},
        28 * 10,
    ),
    "aura_flow": (
        {f"double_layers.#.attn.w{i}{x}" for i in (1, 2) for x in "qkvo"}
        | {f"single_layers.#.attn.w1{x}" for x in "qkvo"}
        | {f"double_layers.#.mlp{x}.{y}" for x in "CX" for y in ("c_fc1", "c_fc2", "c_proj")}
        | {f"single_layers.#.mlp.{y}" for y in ("c_fc1", "c_fc2", "c_proj")},
        4 * 14 + 32 * 7,
    ),
    "ideogram4": (
        {"layers.#.attention.qkv", "layers.#.attention.o", *(f"layers.#.feed_forward.w{i}" for i in (1, 2, 3))},
        34 * 5,
    ),
    # The names of the released file; ComfyUI renames them when it loads the model (see RENAMED), and knows these of
    # LoRAs with `diffusion_model.` in front.
    "hunyuan_video": (
        {f"double_blocks.#.{s}_{x}" for s in ("img", "txt") for x in ("attn_qkv", "attn_proj", "mlp.fc1", "mlp.fc2")}
        | {"single_blocks.#.linear1", "single_blocks.#.linear2"},
        20 * 8 + 40 * 2,
    ),
    "ltx_video": (
        {f"transformer_blocks.#.{attn}.to_{x}" for attn in ("attn1", "attn2") for x in ("q", "k", "v", "out.0")}
        | {"transformer_blocks.#.ff.net.0.proj", "transformer_blocks.#.ff.net.2"},
        28 * 10,
    ),
    "hidream": (
        {
            f"{kind}_stream_blocks.#.block.{x}"
            for kind in ("double", "single")
            for x in (
                *(f"attn1.to_{y}" for y in ("q", "k", "v", "out")),
                *(f"ff_i.shared_experts.w{i}" for i in (1, 2, 3)),
            )
        }
        | {f"double_stream_blocks.#.block.attn1.to_{x}_t" for x in ("q", "k", "v", "out")}
        | {f"double_stream_blocks.#.block.ff_t.w{i}" for i in (1, 2, 3)},
        16 * 14 + 32 * 7,
    ),
}
"""Layers in the blocks of ComfyUI's models, "#" for the block's number, and how many there are in all."""


RENAMED = {
    "hunyuan_video": (
        ("_attn_qkv", "_attn.qkv"),
        ("_attn_proj", "_attn.proj"),
        ("mlp.fc1", "mlp.0"),
        ("mlp.fc2", "mlp.2"),
    )
}
"""Where the model in ComfyUI has other names than LoRAs with `diffusion_model.`: kohya's come from the model's."""


@pytest.mark.parametrize("name", COMFYUI)
def test_comfyui_resolves_every_key(name):
    """Its rule: `diffusion_model.` and the layer's name; or `lora_unet_` and the name with _ for every dot."""
    Family = families.get(name)
    denoiser, denoiser_config = full_size(name)
    state = random_lora(denoiser, Family.choose_adapter_layers(denoiser))
    patterns, count = COMFYUI[name]
    tensors = layouts.to_layout(state, 0.5, Family, denoiser_config, "comfy")
    ends = Counter(re.sub(r".*(\.lora_[AB]\.weight)$", r"\1", key) for key in tensors)
    assert ends == {".lora_A.weight": count, ".lora_B.weight": count}
    stems = {re.sub(r"\.lora_[AB]\.weight$", "", key) for key in tensors}
    assert {re.sub(r"(blocks|layers|refiner)\.\d+", lambda m: re.sub(r"\d+", "#", m[0]), s) for s in stems} == {
        f"diffusion_model.{pattern}" for pattern in patterns
    }
    if "kohya" in Family.layouts:
        kohya = layouts.to_layout(state, 0.5, Family, denoiser_config, "kohya")
        for old, new in RENAMED.get(name, ()):
            stems = {stem.replace(old, new) for stem in stems}
        expected = {"lora_unet_" + stem.removeprefix("diffusion_model.").replace(".", "_") for stem in stems}
        assert {key.split(".")[0] for key in kohya} == expected and len(kohya) == 3 * count


def test_every_family_with_a_comfy_layout_has_names_to_be_held_against():
    with_comfy = {name for name in families.list_families() if "comfy" in families.get(name).layouts}
    assert with_comfy == set(COMFYUI)


def test_a_file_that_scales_by_alpha_is_read_in_every_layout():
    """As other trainers write them: lora_down and alpha under ComfyUI's names."""
    Family = families.get("krea2")
    state = {"diffusion_model.blocks.3.attn.wq.lora_down.weight": torch.randn(4, 8)}
    state |= {"diffusion_model.blocks.3.attn.wq.lora_up.weight": torch.randn(8, 4)}
    state |= {"diffusion_model.blocks.3.attn.wq.alpha": torch.tensor(2.0)}
    found, scaling = layouts.from_layout(state, Family, {})
    assert scaling == {"transformer_blocks.3.attn.to_q": 0.5} and len(found) == 2


SWAPPED = {
    "sd3": ("joint_blocks.2.context_block.adaLN_modulation.1", "transformer_blocks.2.norm1_context.linear"),
    "flux2": ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    "flux2_klein": ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    "aura_flow": ("modF.1", "norm_out.linear"),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_scale_and_shift_change_places_with_the_weights_they_are_for(tiny, name):
    """Other trainers' files may hold these layers; the single file's conversion, held against diffusers', judges."""
    native, ours = SWAPPED[name]
    family = families.get(name)(settings.Model(family=name, path=str(tiny(name))), device="cpu", dtype=torch.float32)
    sizes = family.read_denoiser_config()
    rows, columns = family.list_layer_shapes(sizes)[ours]
    a, b = torch.randn(2, columns), torch.randn(rows, 2)
    file = {f"diffusion_model.{native}.lora_A.weight": a, f"diffusion_model.{native}.lora_B.weight": b}
    state, scaling = layouts.from_layout(file, family, sizes)
    header = {}
    for key, tensor in family.make_empty_denoiser().state_dict().items():
        its, members = naming.to_native(family.native_layers, key) or (key, (key,))
        header[its] = (tensor.shape[0] * len(members), *tensor.shape[1:]) if tensor.ndim else ()
    key, change = family.convert_checkpoint(header)[f"{ours}.weight"]
    assert key == f"{native}.weight" and torch.equal(state[f"{ours}.lora_B.weight"] @ a, change(b @ a))
    back = layouts.to_layout(state, scaling, family, sizes, "comfy")
    assert back.keys() == file.keys() and all(torch.equal(back[key], file[key]) for key in file)


def test_a_layer_without_a_name_in_the_layout_is_refused():
    Family = families.get("krea2")
    state = {"nothing.to_q.lora_A.weight": torch.randn(4, 8), "nothing.to_q.lora_B.weight": torch.randn(8, 4)}
    for layout in ("comfy", "kohya"):
        with pytest.raises(UserError, match="nothing.to_q: .* has no name for this layer.*export.formats"):
            layouts.to_layout(state, 1.0, Family, {}, layout)


# -- export.formats


FACTS = tomllib.loads((Path(__file__).parent / "data" / "facts.toml").read_text(encoding="utf-8"))
"""What the makers and the trainers publish; see test_facts.py."""


@pytest.mark.parametrize("name", families.list_families())
def test_the_network_module_is_kohyas_own(name):
    """A new family: the module that trains it there."""
    Family = families.get(name)
    assert [export_metadata.choose_network_module(Family, kind) for kind in ("lora", "dora")] == [
        FACTS[name]["kohya_module"]
    ] * 2
    assert export_metadata.choose_network_module(Family, "lokr") == "lycoris.kohya"


@pytest.mark.parametrize("name", families.list_families())
def test_auto_is_what_most_programs_read(job, name):
    Family = families.get(name)
    size = f"dataset.bucket_step={Family.bucket_multiple}", f"dataset.resolution={2 * Family.bucket_multiple}"
    section = config.loads("model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}").export
    assert section.formats == ["auto"]
    made = resolve.resolve_auto(job("export.formats=['auto']", *size), Family)
    assert made.export.formats == FACTS[name]["formats"]
    assert {"diffusers", *Family.layouts_of_diffusers} & set(FACTS[name]["formats"])  # one at least is for diffusers


def test_a_layout_that_the_family_has_not_is_refused_before_anything_is_loaded(job):
    with pytest.raises(
        UserError, match=r"\['comfy'\]: Stable Diffusion 1.5 has no such layout; accepted: auto \| kohya"
    ):
        resolve.resolve_auto(job("export.formats=['comfy']"), families.get("sd15"))
