"""The LoRA file, judged by sd-scripts' naming rules, diffusers' own conversion, safetensors and arithmetic."""

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import safetensors
import safetensors.torch
import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from waiting import LONG_SECONDS

from lora_fp8 import config, families, settings
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.lora_files import export, export_metadata, layer_names, layouts, safetensors_file
from lora_fp8.precision.dtypes import DTYPES
from lora_fp8.verify import HEADER_KEYS, compute_delta_error

torch.set_num_threads(1)

SD15 = {"cross_attention_dim": 768, "attention_head_dim": 8}
SDXL = {
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
FULL_SIZE = {"sd15": SD15, "sdxl": SDXL, "flux": {"guidance_embeds": True}}


@pytest.fixture(scope="module")
def full_size():
    """The real architectures on the meta device, made once each."""
    made = {}

    def get(name):
        if name not in made:
            family = families.get(name)
            cls = getattr(diffusers, family.denoiser_class)
            with torch.device("meta"):
                made[name] = cls.from_config({**FULL_SIZE[name]})
        return made[name]

    return get


def adapted(denoiser, wanted):
    """{path: (in, out, kernel)} of the layers whose path `wanted` accepts."""
    found = {}
    for path, module in denoiser.named_modules():
        if isinstance(module, torch.nn.Linear) and wanted(path):
            found[path] = (module.in_features, module.out_features, ())
        elif isinstance(module, torch.nn.Conv2d) and wanted(path):
            found[path] = (module.in_channels, module.out_channels, module.kernel_size)
    return found


def random_state(layers, rank=1, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for path, (num_in, num_out, kernel) in layers.items():
        r = rank(path) if callable(rank) else rank
        state[f"{path}.lora_A.weight"] = torch.randn(r, num_in, *kernel, generator=generator).to(dtype)
        b = torch.randn(num_out, r, *(1 for _ in kernel), generator=generator)
        state[f"{path}.lora_B.weight"] = b.to(dtype)
    return state


def in_transformer(path):
    """What sd-scripts adapts in a UNet by default: all layers inside of a Transformer2DModel."""
    return ".attentions." in path


def in_flux_block(path):
    """What sd-scripts adapts in FLUX by default: all linears inside of the blocks."""
    return "transformer_blocks." in path


CHOICES = {"sd15": in_transformer, "sdxl": in_transformer, "flux": in_flux_block}


# -- names that sd-scripts' rules give, written out without looking at the exporter


def sdxl_names():
    """kohya's 722: the original UNet's places of the transformers, and how deep each is."""
    depths = {"input_blocks_4_1": 2, "input_blocks_5_1": 2, "input_blocks_7_1": 10, "input_blocks_8_1": 10}
    depths |= {"middle_block_1": 10} | {f"output_blocks_{i}_1": 10 if i < 3 else 2 for i in range(6)}
    layers = [f"attn{n}_to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out_0")] + ["ff_net_0_proj", "ff_net_2"]
    names = {f"{place}_proj_{end}" for place in depths for end in ("in", "out")}
    return names | {
        f"{p}_transformer_blocks_{i}_{x}" for p, depth in depths.items() for i in range(depth) for x in layers
    }


def sdxl_conv_names():
    """The 66 more of conv_dim, inside of ResNet blocks and samplers; two blocks on the way down change the width."""
    resnets = {f"input_blocks_{i}_0": i in (4, 7) for i in (1, 2, 4, 5, 7, 8)}
    resnets |= {f"middle_block_{i}": False for i in (0, 2)} | {f"output_blocks_{i}_0": True for i in range(9)}
    names = {f"{place}_{x}" for place in resnets for x in ("in_layers_2", "emb_layers_1", "out_layers_3")}
    names |= {f"{place}_skip_connection" for place, widens in resnets.items() if widens}
    samplers = ("input_blocks_3_0_op", "input_blocks_6_0_op", "output_blocks_2_2_conv", "output_blocks_5_2_conv")
    return names | set(samplers)


def sd15_names():
    places = [f"down_blocks_{i}_attentions_{j}" for i in range(3) for j in range(2)] + ["mid_block_attentions_0"]
    places += [f"up_blocks_{i}_attentions_{j}" for i in (1, 2, 3) for j in range(3)]
    layers = [f"attn{n}_to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out_0")] + ["ff_net_0_proj", "ff_net_2"]
    names = {f"{place}_proj_{end}" for place in places for end in ("in", "out")}
    return names | {f"{place}_transformer_blocks_0_{x}" for place in places for x in layers}


def flux_names():
    double = [f"{s}_{x}" for s in ("img", "txt") for x in ("mod_lin", "attn_qkv", "attn_proj", "mlp_0", "mlp_2")]
    names = {f"double_blocks_{i}_{x}" for i in range(19) for x in double}
    return names | {f"single_blocks_{i}_{x}" for i in range(38) for x in ("linear1", "linear2", "modulation_lin")}


@pytest.mark.parametrize(
    ("name", "names", "count"), [("sd15", sd15_names, 192), ("sdxl", sdxl_names, 722), ("flux", flux_names, 304)]
)
def test_kohya_names_at_full_size(full_size, name, names, count):
    family, denoiser = families.get(name), full_size(name)
    layers = adapted(denoiser, CHOICES[name])
    state = random_state(layers)
    tensors = layouts.to_layout(state, 0.5, family, denoiser.config, "kohya")
    stems = {key.split(".")[0] for key in tensors}
    expected = {f"lora_unet_{n}" for n in names()}
    assert len(expected) == count
    assert stems == expected
    assert set(tensors) == {f"{s}.{end}" for s in stems for end in ("lora_down.weight", "lora_up.weight", "alpha")}

    back, scaling = layouts.from_layout(tensors, family, denoiser.config)
    assert set(scaling.values()) == {0.5} and set(scaling) == set(layers)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_sdxl_names_of_convolutions_and_embeddings_are_reversible(full_size):
    family, denoiser = families.get("sdxl"), full_size("sdxl")
    layers = adapted(denoiser, lambda path: True)
    to_kohya, members = layer_names.NAMINGS["sgm_unet"]
    names = {path: to_kohya(path, family, denoiser.config)[0] for path in layers}
    assert len(set(names.values())) == len(layers)
    assert all(members(kohya, family, denoiser.config) == (path,) for path, kohya in names.items())
    in_blocks = [path for path in layers if any(p in path for p in ("resnets", "attentions", "samplers"))]
    assert {names[path] for path in in_blocks} == sdxl_names() | sdxl_conv_names()  # sd-scripts with conv_dim
    assert len(sdxl_names() | sdxl_conv_names()) == 788
    assert names["up_blocks.0.upsamplers.0.conv"] == "output_blocks_2_2_conv"
    assert names["down_blocks.1.downsamplers.0.conv"] == "input_blocks_6_0_op"
    assert names["mid_block.resnets.1.time_emb_proj"] == "middle_block_2_emb_layers_1"
    assert names["up_blocks.2.resnets.0.conv_shortcut"] == "output_blocks_6_0_skip_connection"
    # what diffusers makes of them; a rank-1 LoRA on every layer
    state = random_state({path: shape for path, shape in layers.items() if path in in_blocks})
    tensors = layouts.to_layout(state, 1.0, family, denoiser.config, "kohya")
    loader = diffusers.StableDiffusionXLPipeline
    converted, _ = loader.lora_state_dict(tensors, unet_config=denoiser.config)
    converted = {key.removeprefix("unet."): tensor for key, tensor in converted.items()}
    assert convert_unet_state_dict_to_peft(converted).keys() == state.keys()


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_diffusers_takes_every_key_at_full_size(full_size, name, layout):
    family, denoiser = families.get(name), full_size(name)
    state = random_state(adapted(denoiser, CHOICES[name]), rank=2)
    tensors = layouts.to_layout(state, 0.75, family, denoiser.config, layout)
    loader = getattr(diffusers, family.pipeline_class)
    if name == "flux":
        converted, alphas = loader.lora_state_dict(dict(tensors), return_alphas=True)
        alphas = alphas or {}
    else:
        options = {"unet_config": denoiser.config} if name == "sdxl" else {}
        converted, alphas = loader.lora_state_dict(dict(tensors), **options)
    prefix = family.denoiser_name + "."
    assert all(key.startswith(prefix) for key in converted)
    converted = {key.removeprefix(prefix): tensor for key, tensor in converted.items()}
    if layout == "kohya" and name != "flux":
        converted = convert_unet_state_dict_to_peft(converted)
    assert converted.keys() == state.keys()
    modules = layouts.list_modules(state)
    # the UNets' kohya files carry alpha, which peft divides by the rank; elsewhere it is in the weights
    told = 0.75 if layout == "kohya" and name != "flux" else 1.0
    assert len(alphas or {}) == (len(modules) if told != 1 else 0)
    assert set((alphas or {}).values()) <= {0.75 * 2}
    for module in modules[:: max(1, len(modules) // 40)]:
        a, b = (converted[f"{module}.lora_{half}.weight"] for half in "AB")
        trained = (state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"], 0.75)
        assert compute_delta_error((a, b, told), trained) < 1e-6, module


def test_flux_kohya_refuses_what_diffusers_would_drop():
    with pytest.raises(UserError, match="x_embedder.*adapter.targets"):
        state = random_state({"x_embedder": (64, 32, ())})
        layouts.to_layout(state, 1.0, families.get("flux"), {}, "kohya")


def test_a_config_may_leave_out_what_diffusers_has_a_default_for(full_size):
    """A single-file checkpoint comes with a short config, and config.json files are written by hand too."""
    flux, sdxl = families.get("flux"), families.get("sdxl")
    state = random_state(adapted(full_size("flux"), lambda path: path.startswith("single_transformer_blocks.3.")))
    whole = layouts.to_layout(state, 1.0, flux, full_size("flux").config, "kohya")
    short = layouts.to_layout(state, 1.0, flux, {"num_layers": 19}, "kohya")
    assert whole.keys() == short.keys() and all(torch.equal(whole[key], short[key]) for key in whole)
    assert layouts.explain_unread_by_diffusers(flux, {"in_channels": 64}, "kohya") is None
    left = {key: value for key, value in SDXL.items() if "block_types" in key}
    assert layer_names.map_sgm_blocks(left) == layer_names.map_sgm_blocks(full_size("sdxl").config)
    state = random_state(adapted(full_size("sdxl"), lambda path: path.endswith("attn1.to_q")))
    assert len(layouts.to_layout(state, 1.0, sdxl, sdxl.reference_config, "kohya")) == len(state) // 2 * 3


def test_a_family_without_kohya_names_says_so():
    family = SimpleNamespace(title="New", denoiser_name="transformer", kohya_naming="", native_layers=())
    with pytest.raises(UserError, match="New has no kohya layout; use 'diffusers'"):
        layouts.to_layout(random_state({"x": (4, 4, ())}), 1.0, family, {}, "kohya")


# -- fusing


def dense(pair):
    a, b, scale = pair
    return b.double() @ a.double() * scale


@pytest.mark.parametrize(
    ("ranks", "scales"),
    [
        ((4, 4, 4), (0.5, 0.5, 0.5)),
        ((1, 3, 2), (0.5, 0.5, 0.5)),
        ((4, None, 4), (2, 0, 2)),
        ((2, 5, None), (1.0, 0.25, 0)),
    ],
    ids=["equal", "unequal ranks", "missing member", "different scaling"],
)
def test_fusing_is_exact(ranks, scales):
    generator = torch.Generator().manual_seed(1)
    rows, width = [8, 8, 24], 16
    pairs = [
        None if r is None else (torch.randn(r, width, generator=generator), torch.randn(n, r, generator=generator), s)
        for r, n, s in zip(ranks, rows, scales, strict=True)
    ]
    fused = layouts.fuse(pairs, rows)
    assert fused[0].shape[0] == sum(r or 0 for r in ranks)
    whole = [dense(p) if p is not None else torch.zeros(n, width) for p, n in zip(pairs, rows, strict=True)]
    torch.testing.assert_close(dense(fused), torch.cat([x.double() for x in whole]), rtol=1e-6, atol=1e-6)
    back = layouts.split(fused[0], fused[1], rows)
    assert [p is None for p in back] == [p is None for p in pairs]
    for part, pair in zip(back, pairs, strict=True):
        if pair is not None:
            assert part[0].shape == pair[0].shape
            torch.testing.assert_close(dense((*part, fused[2])), dense(pair), rtol=1e-6, atol=1e-6)


def test_a_layer_trained_fused_is_given_to_all_members():
    """Files of sd-scripts: one A for q, k and v. Every member gets that A and its rows of B."""
    a, b = torch.randn(5, 16), torch.randn(24, 5)
    parts = layouts.split(a, b, [8, 8, 8])
    torch.testing.assert_close(torch.cat([dense((*part, 1.0)) for part in parts]), dense((a, b, 1.0)))


def test_alpha_of_a_fused_layer_keeps_the_scaling():
    layers = {f"transformer_blocks.0.attn.to_{x}": (32, 32, ()) for x in "qkv"}
    denoiser_config = {"num_attention_heads": 2, "attention_head_dim": 16}
    state = random_state(layers, rank=4)
    tensors = layouts.to_layout(state, 10 / 4, families.get("flux"), denoiser_config, "kohya")
    assert tensors["lora_unet_double_blocks_0_img_attn_qkv.alpha"] == 30
    assert tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"].shape == (12, 32)


# -- the file


LAYERS = {
    "mid_block.attentions.0.proj_in": (32, 32, (1, 1)),
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_q": (32, 48, ()),
    "up_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0": (48, 32, ()),
}
CANARY = "/home/canary_user/secret_place"


def facts(**changes):
    values = {
        "name": "My 水彩 <lora:style,1>",
        "steps": 120,
        "rank": 3,
        "alpha": 1.7,
        "learning_rate": 1.25e-4,
        "seed": 7,
        "resolution": (512, 768),
        "folders": (
            export_metadata.FolderFacts.count(
                f"{CANARY}/cats", ["ohwx, a cat", "ohwx, a red cat", "ohwx, a cat"], repeats=2
            ),
            export_metadata.FolderFacts(f"{CANARY}/old/cats", 1, 1, {"ohwx": 1}),
        ),
        "batch_size": 2,
        "optimizer": "adamw8bit",
        "schedule": "cosine",
        "storage": "fp8",
        "base_name": f"{CANARY}/base.safetensors",
        "base_hash": "ab" * 32,
        "prediction_type": "v_prediction",
        "trigger": "ohwx",
        "buckets": {(512, 768): 3, (512, 512): 1},
        "config_toml": f'# by canary_user\nname = "x"\n[model]\npath = "{CANARY}/base.safetensors"\n'
        '[dataset]\ncache_dir = "~/canary_user/c"\n[[dataset.folders]]\npath = "C:\\\\Users\\\\canary_user\\\\cats"\n'
        '[[dataset.folders]]\npath = "../canary_user/dogs"\n[[dataset.folders]]\npath = "data/birds"\n',
    }
    return export_metadata.ExportFacts(**{**values, **changes})


def write(folder, state=None, **section):
    state = random_state(LAYERS, rank=3) if state is None else state
    section = {"formats": ["diffusers", "kohya"]} | section
    return export.write(
        export.Adapter(state, 1.7 / 3), families.get("sd15"), {}, settings.Export(**section), facts(), folder
    )


def test_the_safetensors_library_reads_what_was_trained(tmp_path):
    state = random_state(LAYERS, rank=3)
    diffusers_file, kohya_file = write(tmp_path, state, dtype="fp32")
    assert [p.name for p in (diffusers_file, kohya_file)] == [
        "My-水彩-lora-style-1_diffusers.safetensors",
        "My-水彩-lora-style-1_kohya.safetensors",
    ]
    found = safetensors.torch.load_file(kohya_file)
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    path = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    assert torch.equal(found[f"{name}.lora_down.weight"], state[f"{path}.lora_A.weight"])
    assert torch.equal(found[f"{name}.lora_up.weight"], state[f"{path}.lora_B.weight"])
    assert found[f"{name}.alpha"].shape == () and found[f"{name}.alpha"].item() == pytest.approx(1.7)
    assert found["lora_unet_mid_block_attentions_0_proj_in.lora_down.weight"].shape == (3, 32, 1, 1)
    found = safetensors.torch.load_file(diffusers_file)
    assert len(found) == 2 * len(LAYERS) and not any("alpha" in key for key in found)
    assert torch.equal(found[f"unet.{path}.lora_B.weight"], state[f"{path}.lora_B.weight"] * (1.7 / 3))
    assert safetensors_file.read(diffusers_file)[0].keys() == found.keys()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dtype_in_the_file(tmp_path, dtype):
    for path in write(tmp_path, dtype=dtype):
        with safetensors.safe_open(path, "pt") as file:
            kinds = {file.get_tensor(k).dtype for k in file.keys() if not k.endswith("alpha")}
        assert kinds == {DTYPES[dtype]}


def test_kohya_weights_are_the_trained_bits(tmp_path):
    state = random_state(LAYERS, rank=3, dtype=torch.bfloat16)
    found, _ = safetensors_file.read(write(tmp_path, state, formats=["kohya"])[0])
    back, scaling = layouts.from_layout(found, families.get("sd15"), {})
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert set(scaling) == set(LAYERS) and list(scaling.values()) == pytest.approx([1.7 / 3] * 3)


SAME_RUN = """
import sys, torch
from pathlib import Path
from types import SimpleNamespace
from lora_fp8 import settings
from lora_fp8.lora_files import export, export_metadata
generator = torch.Generator().manual_seed(0)
state = {}
for name in ("mid_block.attentions.0.proj_in", "up_blocks.1.attentions.0.proj_out", "mid_block.x.to_q"):
    state[name + ".lora_A.weight"] = torch.randn(3, 33, generator=generator)
    state[name + ".lora_B.weight"] = torch.randn(31, 3, generator=generator)
family = SimpleNamespace(denoiser_name="unet", kohya_naming="diffusers_underscored", kohya_base_version="sd_v1")
family.native_layers, family.trained_text, family.kohya_module = (), {}, "networks.lora"
family.modelspec_architecture = "stable-diffusion-v1"
cats = export_metadata.FolderFacts.count("cats", ["a, b, c", "c, b", "d, e, a", "f"])
buckets = {(64, 64): 1, (32, 96): 2}
facts = export_metadata.ExportFacts("x", 1, 3, 1.7, 1e-4, 0, (512, 512), folders=(cats,), buckets=buckets)
section = settings.Export(formats=["diffusers", "kohya"])
export.write(export.Adapter(state, 1.7 / 3), family, {}, section, facts, Path(sys.argv[1]))
"""


def test_same_run_same_bytes_in_every_process(tmp_path):
    processes = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SAME_RUN, str(tmp_path / seed)]
        processes.append(subprocess.Popen(command, env=environment, cwd=Path(export.__file__).parents[1]))
    assert [process.wait(timeout=LONG_SECONDS) for process in processes] == [0, 0]
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == ["x_diffusers.safetensors", "x_kohya.safetensors"]  # and no temporary file left
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_header_layout_and_file_mode(tmp_path):
    before = os.umask(0o027)
    try:
        paths = write(tmp_path)
    finally:
        os.umask(before)
    for path in paths:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        assert (8 + length) % 8 == 0
        header = json.loads(raw[8 : 8 + length])
        metadata = header.pop("__metadata__")
        assert list(metadata) == sorted(metadata)
        sizes = {"F32": 4, "BF16": 2}
        assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())
        assert path.stat().st_mode & 0o777 == 0o640


def test_hashes_are_those_of_the_bytes(tmp_path):
    for path in write(tmp_path):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        sha = hashlib.sha256(raw[8 + length :]).hexdigest()
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert metadata["sshs_model_hash"] == sha == safetensors_file.hash_payload(path)
        assert metadata["modelspec.hash_sha256"] == "0x" + sha
        assert "sshs_legacy_hash" not in metadata  # nothing at that place of so small a file


def test_legacy_hash_is_the_one_clients_compute(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors_file.write_file(path, {"x": torch.randn(300_000)}, {"a": "b"}, hashes=True)
    window = path.read_bytes()[0x100000:0x110000]
    assert len(window) == 0x10000
    assert safetensors_file.read(path)[1]["sshs_legacy_hash"] == hashlib.sha256(window).hexdigest()[:8]


def test_metadata_says_what_hosts_read(tmp_path):
    diffusers_file, kohya_file = write(tmp_path, author="A", title="Mein Stil", description="d")
    _, m = safetensors_file.read(kohya_file)
    assert m["modelspec.sai_model_spec"] == "1.0.1"
    assert m["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert m["modelspec.resolution"] == "512x768" and m["modelspec.prediction_type"] == "v"
    assert m["modelspec.title"] == "Mein Stil" and m["modelspec.trigger_phrase"] == "ohwx"
    assert m["ss_base_model_version"] == "sd_v1" and m["ss_v2"] == "False"
    assert m["ss_network_module"] == "networks.lora" and m["ss_network_dim"] == "3" and m["ss_network_alpha"] == "1.7"
    assert m["ss_sd_model_name"] == "base.safetensors"
    assert json.loads(m["ss_tag_frequency"]) == {
        "cats": {"ohwx": 3, "a cat": 2, "a red cat": 1},
        "cats (2)": {"ohwx": 1},
    }
    assert json.loads(m["ss_dataset_dirs"])["cats"] == {"n_repeats": 2, "img_count": 3}
    assert m["ss_num_train_images"] == "7" and m["ss_epoch"] == "35"  # 120 steps of 2 over 7 samples
    assert json.loads(m["ss_bucket_info"])["buckets"]["0"] == {"resolution": [512, 512], "count": 1}
    assert "ss_noise_offset" not in m
    offset = export_metadata.build_metadata(
        families.get("sd15"), settings.Export(), facts(objective=settings.Objective(noise_offset=0.05)), "kohya"
    )
    assert offset["ss_noise_offset"] == "0.05"
    of_sd2 = export_metadata.build_metadata(families.get("sd2"), settings.Export(), facts(), "kohya")
    assert of_sd2["ss_v2"] == "True"  # A1111 shows the file with SD 2 models only if this says so
    # baked: nobody may scale a second time
    assert safetensors_file.read(diffusers_file)[1]["ss_network_alpha"] == "3.0"


def test_a_header_stays_small_whatever_the_captions_are(full_size):
    """SDXL with convolutions, and sixty folders of long sentences in Chinese, of which the frequent ones are kept."""
    family, denoiser = families.get("sdxl"), full_size("sdxl")
    sentence = "一只红色的狐狸坐在木屋前面看着远处的雪山" * 6
    tags = {f"{number} {sentence}": 1 + number % 7 for number in range(300)}
    folders = tuple(export_metadata.FolderFacts(f"folder {number}", 300, 1, tags) for number in range(60))
    told = export_metadata.build_metadata(family, settings.Export(), facts(folders=folders), "kohya")
    kept = json.loads(told["ss_tag_frequency"])
    assert len(kept) == 60 and all(set(found.values()) == {7} for found in kept.values())
    state = random_state(adapted(denoiser, lambda path: True))
    tensors = layouts.to_layout(state, 1.0, family, denoiser.config, "kohya")
    entries = {
        name: {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [10**9] * 2} for name, t in tensors.items()
    }
    assert len(safetensors_file.make_header(entries, told)) < export.MAX_HEADER


def test_nothing_private_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "canary_user"))
    homes = ("/home/canary_user", "/Users/canary_user/", "C:\\Users\\canary_user", "~canary_user", "~")
    monkeypatch.chdir(tmp_path)
    assert {export_metadata.get_basename(home) for home in (*homes, f"{tmp_path}/canary_user", "canary_user/.")} == {
        "~"
    }
    for path in write(tmp_path):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = raw[8 : 8 + length].decode()
        assert "canary_user" not in header and "/home" not in header and str(tmp_path) not in header
        kept = json.loads(header)["__metadata__"]["lora_fp8_config"]
        assert 'path = "base.safetensors"' in kept and 'path = "data/birds"' in kept and 'path = "dogs"' in kept
        assert not re.search(r"20\d\d-\d\d-\d\d", header)


@pytest.mark.parametrize("level", ["private", "none"])
def test_what_is_kept_back(tmp_path, level):
    """Nothing of pictures and settings, and still all that clients and the verification ask for."""
    for path in write(tmp_path, metadata=level, author="Me"):
        _, told = safetensors_file.read(path)
        assert not any(
            word in json.dumps(told) for word in ("cats", "a red cat", "cosine", "adamw", "0.000125", "seed")
        )
        assert told["modelspec.architecture"] == "stable-diffusion-v1/lora" and told["sshs_model_hash"]
        assert told.get("modelspec.author") == ("Me" if level == "private" else None)
        assert ("modelspec.trigger_phrase" in told) == (level == "private")
        assert set(HEADER_KEYS) <= set(told)
        with pytest.raises(UserError, match="contains no config.*export.metadata"):
            export_metadata.read_config(path)


def test_the_config_comes_back(tmp_path):
    job = config.loads("model = {family = 'sd15', path = '/x/y.safetensors'}\ndataset = {folders = [{path = '/a/b'}]}")
    state = random_state(LAYERS, rank=3)
    section = settings.Export(formats=["kohya"])
    told = facts(config_toml=config.dumps(job))
    (path,) = export.write(export.Adapter(state), families.get("sd15"), {}, section, told, tmp_path)
    back = config.loads(export_metadata.read_config(path))
    assert (back.model.path, back.dataset.folders[0].path) == ("y.safetensors", "b")
    assert back.model_dump(exclude={"model", "dataset"}) == job.model_dump(exclude={"model", "dataset"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my-lora_v1.2", "my-lora_v1.2"),
        ("a b:<c>,d", "a-b-c-d"),
        ("Ünïcode", "Unicode"),
        ("../../etc/passwd", "etc-passwd"),
        ("水彩 一号", "水彩-一号"),
        ("각", "각"),
        ("/".join("角" * 99), "-".join("角" * 40)),
        ("水" * 99, "水" * 53),  # of at most 160 bytes
        ("...", "lora-" + hashlib.sha256(b"...").hexdigest()[:8]),
    ],
)
def test_slug(name, expected):
    assert export_metadata.make_slug(name) == expected


# -- what must not be written


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_refused(tmp_path, value):
    state = random_state(LAYERS, rank=3)
    state["mid_block.attentions.0.proj_in.lora_A.weight"][1, 2] = value
    with pytest.raises(RunFailure, match="NaN or infinity in mid_block.attentions.0.proj_in.lora_A"):
        write(tmp_path, state)
    assert not list(tmp_path.iterdir())


def test_untrained_is_refused(tmp_path):
    state = random_state(LAYERS, rank=3)
    state["mid_block.attentions.0.proj_in.lora_B.weight"].zero_()
    with pytest.raises(RunFailure, match="never trained"):
        write(tmp_path, state)


def test_what_does_not_fit_fp16_is_refused(tmp_path):
    state = random_state(LAYERS, rank=3)
    state["mid_block.attentions.0.proj_in.lora_A.weight"][0, 0] = 70000.0
    with pytest.raises(RunFailure, match=r"fp16 has NaN or infinity.*export\.dtype"):
        write(tmp_path, state, dtype="fp16")
    assert not list(tmp_path.iterdir())
    write(tmp_path, state, dtype="bf16")


def test_half_a_pair_is_refused(tmp_path):
    state = random_state(LAYERS, rank=3)
    del state["mid_block.attentions.0.proj_in.lora_B.weight"]
    with pytest.raises(UserError, match="has lora_A, but not the other half"):
        write(tmp_path, state)


def test_broken_files_are_named(tmp_path):
    path = write(tmp_path)[0]
    raw = path.read_bytes()
    for name, content, message in [
        ("cut", raw[:-3], "incomplete"),
        ("tail", raw + b"x", "belong to no tensor"),
        ("short", raw[:5], "safetensors file is incomplete"),
        ("json", raw[:8] + b"x" + raw[9:], "not JSON"),
        ("list", struct.pack("<Q", 24) + b'{"__metadata__": ["a"]}  ', "metadata is not a JSON object"),
        ("deep", struct.pack("<Q", 200_000) + b"[" * 200_000, "not JSON"),
        ("large", struct.pack("<Q", 10**8 + 1) + b" " * 8, "but at most 100000000 are read"),
        ("twice", struct.pack("<Q", 40) + b'{"a": {}, "__metadata__": {}, "a": {}}  ', "lists 'a' twice"),
        ("half", struct.pack("<Q", 33) + b'{"__metadata__": {"a": "\\ud800"}}', r"not UTF-8: '\\ud800'"),
        ("pickle", b"\x80\x02}q\x00." * 40, "not a safetensors|incomplete"),
    ]:
        broken = tmp_path / f"{name}.safetensors"
        broken.write_bytes(content)
        if name == "large":
            os.truncate(broken, 10**8 + 100)
        with pytest.raises(UserError, match=message):
            safetensors_file.read(broken)
    none = tmp_path / "null.safetensors"  # the library writes no such thing, and reads it
    none.write_bytes(struct.pack("<Q", 24) + b'{"__metadata__": null}  ')
    assert safetensors_file.read(none) == ({}, {})
    with pytest.raises(UserError, match="No such file"):
        safetensors_file.read(tmp_path / "none.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "pipe.safetensors", "not a regular file|not a file")):
        with pytest.raises(UserError, match=words):
            safetensors_file.read(path)


def test_a_file_of_another_base_is_refused():
    with pytest.raises(UserError, match="not a LoRA for"):
        layouts.from_layout({"diffusion_model.x.lora_A.weight": torch.ones(1, 1)}, families.get("sd15"), {})
