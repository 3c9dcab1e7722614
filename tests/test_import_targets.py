"""The layers that another trainer adapts are those that an import's adapter.targets select.

Judged by the other trainers' own rules, read from their sources (named in importing/target_modules.py), on diffusers'
denoisers at full size; and by the numbers of modules that sd-scripts' files of released models have.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from torch import nn

from lora_fp8 import adapters, families, importing
from lora_fp8.importing import target_modules
from lora_fp8.lora_files import layouts, naming
from lora_fp8.settings import Adapter


@cache
def full_size(family: str) -> nn.Module:
    """The denoiser of the released model, on the meta device."""
    Family = families.get(family)
    with torch.device("meta"):
        return getattr(diffusers, Family.denoiser_class).from_config(dict(Family.reference_config))


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def adapted(path: Path, tool: str, family: str) -> tuple[dict[str, int], importing.Import]:
    """The rank of each layer that the imported config adapts, and the import."""
    made = importing.import_file(path, tool, family)
    section = Adapter(**made.settings["adapter"])
    names = families.get(family).choose_adapter_layers(full_size(family), section.targets)
    return adapters.assign_ranks(section, names)[0], made


def all_linear(family: str, *blocks: str) -> set[str]:
    """Every linear layer whose name begins with that of a block, except those that no LoRA of ours can be on."""
    denoiser = full_size(family)
    linear = {name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear)}
    left_out = families.get(family).find_layers_without_adapter(denoiser)
    return {name for name in linear if name.startswith(blocks)} - set(left_out)


JOINT = ("transformer_blocks.", "single_transformer_blocks.")
BLOCKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("flux", "flux_kontext", "hunyuan_video", "sd3"), JOINT),
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "anima"), JOINT),
    "z_image": ("layers.",),
    "ideogram4": ("layers.",),
    "lumina2": ("layers.", "noise_refiner.", "context_refiner."),
    "aura_flow": ("joint_transformer_blocks.", "single_transformer_blocks."),
    "hidream": ("double_stream_blocks.", "single_stream_blocks."),
    "krea2": ("transformer_blocks.",),
}
"""Architecture -> beginnings of the names of its blocks, in diffusers."""
MORE_BLOCKS = {
    ("diffusion-pipe", "z_image"): ("noise_refiner.", "context_refiner."),  # of the same class
    ("ai-toolkit", "krea2"): ("text_fusion.layerwise_blocks.", "text_fusion.refiner_blocks."),  # "blocks" in its name
    ("musubi-tuner", "krea2"): ("",),  # KREA2_TARGET_REPLACE_MODULES = None
}
"""(tool, architecture) -> beginnings of the other names that it adapts."""


def ai_toolkit(tmp_path: Path, family: str, **network: Any) -> Path:
    config = {"type": "lora", "linear": 16, "linear_alpha": 8, **network}
    process = {"type": "sd_trainer", "network": config, "model": {"name_or_path": "base"}, "datasets": []}
    job = {"job": "extension", "config": {"name": "it", "process": [process]}}
    return write(tmp_path / "ai.yaml", yaml.safe_dump(job))


def diffusion_pipe(tmp_path: Path, family: str) -> Path:
    return write(tmp_path / "pipe.toml", "[model]\ntype = 'x'\n[adapter]\ntype = 'lora'\nrank = 16\n")


def musubi(tmp_path: Path, family: str, arguments: str = "") -> Path:
    text = (
        f"dit = 'm.safetensors'\nnetwork_module = 'networks.lora_x'\nnetwork_dim = 16\nnetwork_args = [{arguments}]\n"
    )
    return write(tmp_path / "musubi.toml", text)


WRITERS = {"ai-toolkit": ai_toolkit, "diffusion-pipe": diffusion_pipe, "musubi-tuner": musubi}
FURTHER = [(tool, family) for tool, places in target_modules.FURTHER_LAYERS.items() for family in places]


@pytest.mark.parametrize(("tool", "family"), FURTHER)
def test_what_a_tool_adapts_is_what_its_own_rule_selects(tmp_path: Path, tool: str, family: str) -> None:
    """Every linear layer of the blocks that the tool names, as counted on the denoiser of the released model."""
    ranks, made = adapted(WRITERS[tool](tmp_path, family), tool, family)
    assert set(ranks) == all_linear(family, *BLOCKS[family], *MORE_BLOCKS.get((tool, family), ()))
    told = {entry.note for entry in made.differs if entry.key == target_modules.LAYERS}
    fused = {target_modules.ONE_LORA(tool=tool)} if family in target_modules.FUSED[tool] else set()
    assert told == fused | ({target_modules.LLM_ADAPTER} if family == "anima" else set())


@pytest.mark.parametrize(("tool", "families_"), list(target_modules.FUSED.items()))
def test_one_lora_for_q_k_and_v_is_told_where_the_original_has_one_layer(
    tmp_path: Path, tool: str, families_: set[str]
) -> None:
    for family in families_:
        native = [ours for _, ours in families.get(family).native_layers if len(ours.split()) > 1]
        assert native, f"{family}: its original has no fused layers"
        made = importing.import_file(WRITERS[tool](tmp_path, family), tool, family)
        assert target_modules.ONE_LORA(tool=tool) in [entry.note for entry in made.differs]
        assert "same training: no" in importing.report(made)[-1]


def test_diffusion_pipe_adapts_the_linear_layers_of_a_unets_blocks(tmp_path: Path) -> None:
    ranks, made = adapted(diffusion_pipe(tmp_path, "sdxl"), "diffusion-pipe", "sdxl")
    assert set(ranks) == all_linear("sdxl", "down_blocks.", "mid_block.", "up_blocks.")
    assert target_modules.TEXT_PROJECTION in [entry.note for entry in made.differs]
    path = diffusion_pipe(tmp_path, "sdxl")
    text = path.read_text().replace("'x'", "'x'\ntext_encoder_1_lr = 0\ntext_encoder_2_lr = 0")
    made = importing.import_file(write(path, text), "diffusion-pipe", "sdxl")
    assert target_modules.LAYERS not in [entry.key for entry in made.differs]


LYCORIS = {
    ("flux", "'preset=attn-mlp'"): 19 * 14 + 38 * 6,
    ("flux", ""): 19 * 14 + 38 * 6,
    ("sdxl", "'preset=attn-only'"): 70 * 8,
    ("sdxl", "'preset=unet-transformer-only'"): 722,
    ("sdxl", "'preset=full-lin'"): 722 + 17 + 11 + 2,
    ("sdxl", "'preset=unet-convblock-only'"): 17 * 3 + 11 + 4 + 2,
}
"""(architecture, network arguments) -> how many layers LyCORIS adapts, in diffusers' naming (lycoris/config.py)."""


@pytest.mark.parametrize(("family", "arguments"), list(LYCORIS))
def test_presets_of_lycoris(tmp_path: Path, family: str, arguments: str) -> None:
    text = "pretrained_model_name_or_path = 'm.safetensors'\nnetwork_module = 'lycoris.kohya'\nnetwork_dim = 4\n"
    text += f"learning_rate = 1e-4\nnetwork_args = ['algo=loha', {arguments}]\n"
    ranks, made = adapted(write(tmp_path / "kohya.toml", text), "sd-scripts", family)
    assert len(ranks) == LYCORIS[family, arguments]
    assert "network_args" not in [entry.key for entry in made.no_counterpart if not entry.off]
    fused = target_modules.ONE_LORA(tool="sd-scripts") in [entry.note for entry in made.differs]
    assert fused == (family == "flux")
    assert made.settings["adapter"].get("text_encoder", False) == ("unet" not in arguments)


@pytest.mark.parametrize(
    ("family", "only", "without"),
    [
        ("hidream", [], ["ff_i.experts", "ff_i.gate"]),  # its example, config/examples/train_lora_hidream_48.yaml
        ("flux", ["transformer.single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"], []),
        ("flux", ["transformer_blocks.1."], ["norm", "ff_context"]),
        ("qwen_image", ["attn"], ["add_"]),
    ],
)
def test_ai_toolkits_filters_select_the_same_layers(
    tmp_path: Path, family: str, only: list[str], without: list[str]
) -> None:
    """toolkit/lora_special.py: of the layers that it would adapt, those whose name contains no and one of the words."""
    filters = {"only_if_contains": only, "ignore_if_contains": without}
    ranks, made = adapted(ai_toolkit(tmp_path, family, network_kwargs=filters), "ai-toolkit", family)
    every = {name: f"transformer.{name}" for name in all_linear(family, *BLOCKS[family])}
    expected = {name for name, full in every.items() if not only or any(word in full for word in only)}
    assert set(ranks) == {name for name in expected if not any(word in every[name] for word in without)}
    lost = [*made.differs, *(entry for entry in made.no_counterpart if not entry.off)]
    assert not any("network_kwargs" in entry.key for entry in lost)


def test_alpha_of_ai_toolkits_transformers_is_the_rank(tmp_path: Path) -> None:
    for family, kind, alpha in (("flux", "lora", 16), ("flux", "lokr", 8), ("sdxl", "lora", 8)):
        made = importing.import_file(ai_toolkit(tmp_path, family, type=kind), "ai-toolkit", family)
        assert made.settings["adapter"]["alpha"] == alpha, (family, kind)


@pytest.mark.parametrize(
    ("family", "module", "count"),
    [
        ("flux", "networks.lora_flux", 304),  # 19 x 10 and 38 x 3
        # 24 blocks of 10, and 13 with a second attention; of the last block's context, three more are never computed,
        # and the query and the modulation cannot be trained here.
        ("sd3", "networks.lora_sd3", None),
        ("sdxl", "networks.lora", 722),
    ],
)
def test_modules_are_as_many_as_sd_scripts_counts(tmp_path: Path, family: str, module: str, count: int | None) -> None:
    text = f"pretrained_model_name_or_path = 'm.safetensors'\nnetwork_module = '{module}'\nnetwork_dim = 4\n"
    ranks, _ = adapted(write(tmp_path / "kohya.toml", text), "sd-scripts", family)
    if count is None:
        assert set(ranks) == all_linear(family, "transformer_blocks.")
        return
    Family = families.get(family)
    state = {}
    for name in ranks:
        out, inner, *_ = full_size(family).get_submodule(name).weight.shape
        state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"] = torch.zeros(1, inner), torch.zeros(out, 1)
    written = layouts.to_layout(state, 1.0, Family, dict(full_size(family).config), "kohya")
    assert len({key.partition(".")[0] for key in written}) == count


def test_q_k_and_v_of_sd_scripts_are_one_lora_unless_split(tmp_path: Path) -> None:
    """The LoRA on a layer of 3 x 3072 outputs has one A, where ours has three."""
    plain = "pretrained_model_name_or_path = 'm.safetensors'\nnetwork_module = 'networks.lora_flux'\n"
    for arguments, told, mapped in (("", True, False), ("network_args = ['split_qkv=True']\n", False, True)):
        made = importing.import_file(write(tmp_path / "kohya.toml", plain + arguments), "sd-scripts")
        assert (target_modules.LAYERS in [entry.key for entry in made.differs]) == told
        assert ("network_args" in [entry.key for entry in made.mapped]) == mapped
    text = plain.replace("lora_flux", "lora") + "network_args = ['split_qkv=True']\n"
    made = importing.import_file(write(tmp_path / "kohya.toml", text), "sd-scripts", "sdxl")
    assert "network_args" in [entry.key for entry in made.no_counterpart], "a UNet has no such layers"
    page = {"flux1_checkbox": True, "LoRA_type": "Flux1", "split_qkv": True, "pretrained_model_name_or_path": "m"}
    made = importing.import_file(write(tmp_path / "page.json", page), "kohya_ss")
    assert "split_qkv" in [entry.key for entry in made.mapped]
    assert target_modules.LAYERS not in [entry.key for entry in made.differs]


@pytest.mark.parametrize(
    ("family", "classes"),
    [("flux", ("FluxTransformerBlock", "FluxSingleTransformerBlock")), ("qwen_image", ("QwenImageTransformerBlock",))],
)
def test_lycoris_adapts_whole_blocks_by_their_class(tmp_path: Path, family: str, classes: tuple[str, ...]) -> None:
    """As in SimpleTuner's documents for FLUX."""
    preset = {"target_module": list(classes), "module_algo_map": {name: {"factor": 16} for name in classes}}
    config = {"algo": "lokr", "linear_dim": 10000, "full_matrix": True, "bypass_mode": True, "factor": 8}
    write(tmp_path / "lycoris.json", config | {"apply_preset": preset})
    data = {"model_family": family, "lora_type": "lycoris", "lycoris_config": "lycoris.json"}
    ranks, made = adapted(write(tmp_path / "simple.json", data), "simpletuner", family)
    assert set(ranks) == all_linear(family, *BLOCKS[family]) and made.settings["adapter"]["factor"] == 16
    assert "lycoris_config" in [entry.key for entry in made.mapped]


SIMPLETUNER = {
    ("flux", None): (19 * 8 + 38 * 3, ""),
    ("flux", "context"): (19 * 4, ""),
    ("flux", "context+ffs"): (19 * 6, ""),
    ("flux", "all+ffs"): (19 * 12 + 38 * 5, target_modules.LAST_LAYER),
    ("flux", "ai-toolkit"): (19 * 14 + 38 * 6, target_modules.LAST_LAYER),
    ("flux", "tiny"): (2, ""),
    ("chroma", None): (19 * 8 + 38 * 3, ""),
    ("sdxl", None): (70 * 8, ""),
    ("qwen_image", None): (60 * 4, ""),
    ("flux2", None): (8 * 4 + 48, ""),
}
"""(architecture, flux_lora_target) -> how many layers of the released model it adapts, and what is told."""


@pytest.mark.parametrize(("family", "chosen"), list(SIMPLETUNER))
def test_simpletuner_adapts_attention_unless_told_otherwise(tmp_path: Path, family: str, chosen: str | None) -> None:
    data = {"model_family": family, "model_type": "lora", "lora_type": "standard", "lora_rank": 8}
    data |= {"pretrained_model_name_or_path": "m", "flux_lora_target": chosen} if chosen else {}
    ranks, made = adapted(write(tmp_path / "simple.json", data), "simpletuner", family)
    count, told = SIMPLETUNER[family, chosen]
    assert len(ranks) == count
    assert [entry.note for entry in made.differs if entry.key == "flux_lora_target"] == ([told] if told else [])


def test_an_unknown_flux_lora_target_is_told(tmp_path: Path) -> None:
    data = {"model_family": "flux", "lora_type": "standard", "flux_lora_target": "daisy"}
    made = importing.import_file(write(tmp_path / "simple.json", data), "simpletuner")
    assert "targets" not in made.settings["adapter"]
    assert ["flux_lora_target"] == [entry.key for entry in made.no_counterpart if not entry.off]


BOTH = {"target_module": ["Attention", "FeedForward"]}
FF_RANKS = dict.fromkeys(("ff.net.0.proj", "ff.net.2"), 4)


@pytest.mark.parametrize(
    ("preset", "parts", "ours", "unread"),
    [
        (None, ("attn",), {}, []),
        (BOTH, ("attn", "ff"), {}, []),
        (
            {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 4}}},
            ("attn",),
            {"factor": 4},
            [],
        ),
        # The keys of module_algo_map are targets too.
        (
            {"target_module": ["Attention"], "module_algo_map": {"FeedForward": {"factor": 16, "dim": 4, "alpha": 2}}},
            ("attn", "ff"),
            {"ranks": FF_RANKS},
            [],
        ),
        (
            BOTH | {"module_algo_map": {"Attention": {"factor": 8}, "FeedForward": {"factor": 4}}},
            ("attn", "ff"),
            {"factor": 8},
            ["module_algo_map.FeedForward.factor"],
        ),
        (
            BOTH | {"module_algo_map": {"FeedForward": {"dim": 4, "algo": "loha", "use_tucker": True}}},
            ("attn", "ff"),
            {"ranks": FF_RANKS},
            [f"module_algo_map.FeedForward.{key}" for key in ("scale", "algo", "use_tucker")],
        ),
        (
            BOTH | {"name_algo_map": {"down_blocks*": {"dim": 4}}, "use_fnmatch": True},
            ("attn", "ff"),
            {},
            ["name_algo_map", "use_fnmatch"],
        ),
        ({"target_module": ["ResnetBlock2D"]}, None, {}, ["apply_preset"]),
    ],
)
def test_simpletuners_lycoris(
    tmp_path: Path, preset: Any, parts: tuple[str, ...] | None, ours: dict[str, Any], unread: list[str]
) -> None:
    config = {"algo": "lokr", "linear_dim": 8, "linear_alpha": 4, "factor": 16}
    write(tmp_path / "lycoris.json", config | ({"apply_preset": preset} if preset else {}))
    data = {"model_family": "sdxl", "lora_type": "lycoris", "lycoris_config": "lycoris.json"}
    made = importing.import_file(write(tmp_path / "simple.json", data), "simpletuner")
    own = families.get("sdxl").adapter_targets
    expected = None if parts is None else [name for name in own if name.startswith(parts)]
    adapter = made.settings["adapter"]
    assert adapter.get("targets") == expected and adapter["factor"] == ours.get("factor", 16)
    assert (adapter["rank"], adapter["alpha"], adapter.get("ranks", {})) == (8, 4, ours.get("ranks", {}))
    told = "".join(entry.note for entry in made.differs if entry.key == "lycoris_config")
    assert all(part in told for part in unread) and bool(told) == bool(unread)
    assert ("lycoris_config" in importing.list_differences(made).get("differs", [])) == bool(unread)


def onetrainer(tmp_path: Path, **more: Any) -> Path:
    data = {"base_model_name": "m", "training_method": "LORA", "lora_rank": 8, "lora_alpha": 8.0, **more}
    return write(tmp_path / "one.json", data)


@pytest.mark.parametrize("family", ["sdxl", "sd15"])
def test_onetrainer_adapts_the_whole_unet_with_an_empty_filter(tmp_path: Path, family: str) -> None:
    every = {n for n, m in full_size(family).named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    for more in ({"layer_filter": ""}, {"layer_filter_preset": "full"}):
        ranks, made = adapted(onetrainer(tmp_path, **more), "onetrainer", family)
        assert set(ranks) == every and not [entry for entry in made.differs if entry.key == target_modules.LAYERS]
    ranks, _ = adapted(onetrainer(tmp_path, layer_filter="attentions"), "onetrainer", family)
    assert set(ranks) == {name for name in every if "attentions" in name}


@pytest.mark.parametrize(
    ("words", "blocks"), [("transformer_block", True), ("attn,ff.net,proj_mlp", False), ("norm1,attn", True)]
)
def test_a_filter_reaches_the_modulation_where_it_names_it(tmp_path: Path, words: str, blocks: bool) -> None:
    ranks, _ = adapted(onetrainer(tmp_path, layer_filter=words), "onetrainer", "flux")
    expected = {n for n in all_linear("flux", *JOINT) if any(word in n for word in words.split(","))}
    assert set(ranks) == expected
    assert any("norm" in name for name in ranks) == blocks


@pytest.mark.parametrize(
    ("family", "filters", "is_regex"),
    [
        ("flux", "attn,ff.net", False),
        ("flux", "transformer_blocks.3.,single_transformer_blocks.7.proj_out", False),
        # Its presets of Z-Image: BaseZImageSetup.py.
        ("z_image", "^(?=.*attention)(?!.*refiner).*, ^(?=.*feed_forward)(?!.*refiner).*", True),
        ("z_image", "layers", False),
        ("z_image", "attention", False),
        ("qwen_image", r"transformer_blocks\.(0|7|59)\.attn", True),
        ("chroma", "attn", False),
    ],
)
def test_onetrainers_filters_select_the_same_layers(tmp_path: Path, family: str, filters: str, is_regex: bool) -> None:
    path = onetrainer(tmp_path, layer_filter=filters, layer_filter_regex=is_regex)
    ranks, made = adapted(path, "onetrainer", family)
    found = [re.compile(word.strip() if is_regex else re.escape(word.strip())) for word in filters.split(",")]
    assert set(ranks) == {name for name in all_linear(family, "") if any(word.search(name) for word in found)}
    assert set(ranks.values()) == {8} and "layer_filter" in [entry.key for entry in made.mapped]


@pytest.mark.parametrize(
    ("family", "file_format", "told"),
    [
        ("flux", "KOHYA", True),
        ("flux", "SAFETENSORS", False),
        ("qwen_image", "COMFY", False),
        ("z_image", "COMFY", True),
    ],
)
def test_onetrainer_fuses_layers_for_some_formats(tmp_path: Path, family: str, file_format: str, told: bool) -> None:
    path = onetrainer(tmp_path, layer_filter="attn,attention", output_model_format=file_format)
    made = importing.import_file(path, "onetrainer", family)
    assert (target_modules.ONE_LORA(tool="OneTrainer") in [entry.note for entry in made.differs]) == told
    assert "output_model_format" not in importing.list_differences(made).get("none", [])


def test_a_filter_that_may_select_layers_outside_of_blocks_is_told(tmp_path: Path) -> None:
    for words, is_regex in (("norm", False), ("proj_out", False), ("lin.*", True)):
        made = importing.import_file(
            onetrainer(tmp_path, layer_filter=words, layer_filter_regex=is_regex), "onetrainer", "flux"
        )
        assert "layer_filter" in [key for names in importing.list_differences(made).values() for key in names]


def test_an_empty_filter_of_a_transformer_is_told(tmp_path: Path) -> None:
    ranks, made = adapted(onetrainer(tmp_path, layer_filter=""), "onetrainer", "flux")
    assert set(ranks) == all_linear("flux", *JOINT)
    assert target_modules.OUTSIDE_BLOCKS in [entry.note for entry in made.differs]
    assert "same training: no" in importing.report(made)[-1]


MUSUBI_OWN = {
    "flux_kontext": [r".*(norm).*"],  # and the modulation, unless the user gives exclude patterns
    "qwen_image": [r".*(_mod_).*"],
    "z_image": [r".*(_modulation|_refiner).*"],
    "hunyuan_video": [r".*(img_mod|txt_mod|modulation).*"],
    "wan": [r".*(patch_embedding|text_embedding|time_embedding|time_projection|norm|head).*"],
    "krea2": [],
    "flux2": [r".*(norm).*"],
}
"""Architecture -> the exclude patterns that musubi-tuner adds (networks/lora_*.py)."""
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ("wan", [r".*ffn.*"], []),
    ("wan", [".*"], [r"blocks\.(1|2|30)\.self_attn.*", r"blocks\.7\.ffn\.0"]),
    ("flux_kontext", [r".*single_blocks.*"], []),
    ("flux2", [r".*(txt_mlp|img_mlp).*", r".*single_blocks\.[0-9]\..*"], []),
    ("hunyuan_video", [r".*double_blocks.*attn.*"], []),
    ("qwen_image", [r".*_mod\..*", r"transformer_blocks\.(0|59)\..*"], []),
    ("qwen_image", [r".*txt_mlp.*"], [r".*\.59\.txt_mlp.*", r".*\.3\.txt_mlp.*"]),
    (
        "krea2",
        [r".*\.mlp\..*", "first", r"last\.linear", r"tmlp\..*", r"txtmlp\..*", r"tproj\.1", r"txtfusion\..*"],
        [],
    ),
    ("z_image", [], [r".*noise_refiner.*"]),
]


@pytest.mark.parametrize(("family", "exclude", "include"), PATTERNS)
def test_musubis_patterns_select_the_same_layers(
    tmp_path: Path, family: str, exclude: list[str], include: list[str]
) -> None:
    arguments = [f"{name}_patterns={given!r}" for name, given in (("exclude", exclude), ("include", include)) if given]
    ranks, made = adapted(musubi(tmp_path, family, json.dumps(arguments)[1:-1]), "musubi-tuner", family)

    def is_trained(ours: str) -> bool:
        native = naming.to_native(families.get(family).native_layers, ours)
        assert native is not None
        name = ours if family == "z_image" else native[0]  # its copy of Z-Image has the names of diffusers
        excluded = any(re.fullmatch(pattern, name) for pattern in [*exclude, *MUSUBI_OWN[family]])
        return not excluded or any(re.fullmatch(pattern, name) for pattern in include)

    places = ("",) if family == "krea2" else BLOCKS.get(family, (*JOINT, "blocks."))
    every = all_linear(family, *places, *(("noise_refiner.", "context_refiner.") if family == "z_image" else ()))
    assert set(ranks) == {name for name in every if is_trained(name)} and set(ranks.values()) == {16}
    assert "network_args" in [entry.key for entry in made.mapped]


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*x", "(", ".*.*.*.*.*x", "x" * 300, r"(a)\1", 7])
def test_patterns_that_are_slow_or_none_are_told(tmp_path: Path, pattern: object) -> None:
    made = importing.import_file(
        musubi(tmp_path, "wan", json.dumps(f"exclude_patterns={[pattern]!r}")), "musubi-tuner", "wan"
    )
    assert "targets" not in made.settings["adapter"] and "ranks" not in made.settings["adapter"]
    assert "network_args" in [entry.key for entry in made.no_counterpart if not entry.off]
    assert "same training: no" in importing.report(made)[-1]
