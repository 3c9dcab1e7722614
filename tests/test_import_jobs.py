"""Moving in, the whole file: scripts as people write them, jobs that are no LoRA training, and relatives of an
architecture.

Judged by: what a POSIX shell passes on, and the other trainers' own documents and sources.
"""

import json
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lora_fp8 import cli, importing
from lora_fp8.errors import Message, UserError
from lora_fp8.importing import import_draft, readers, remarks, source_files
from webui import translations


def made(path: Path, content: str | dict[str, Any], tool: str = "") -> importing.Import:
    """Import a file of this content."""
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return importing.import_file(path, tool)


def settings(found: importing.Import) -> dict[str, Any]:
    """Return what our file holds, as TOML reads it."""
    return tomllib.loads(importing.to_toml(found))


def keys(entries: list[import_draft.Entry]) -> set[str]:
    return {entry.key for entry in entries}


# ------------------------------------------------------------------------------------------------------------ scripts

COMMAND = 'accelerate launch sdxl_train_network.py --network_module networks.lora --output_name "my lora"'
OPTIONS = "--pretrained_model_name_or_path=x.safetensors --network_dim 24 --learning_rate 3e-4 --max_train_steps 77"


@pytest.mark.parametrize(
    "script",
    [
        f"{COMMAND} {OPTIONS} 2>&1 | tee log",
        f"{COMMAND} {OPTIONS} > log.txt 2>&1 &",
        f"{COMMAND} {OPTIONS} >>log.txt&",
        f"{COMMAND} {OPTIONS} && echo done",
        f"{COMMAND} {OPTIONS}; shutdown now",
        f"cd sd-scripts && {COMMAND} {OPTIONS} || echo --network_dim 3",
        f"{COMMAND} 2>err.txt {OPTIONS} # --network_dim 3",
        f"({COMMAND} {OPTIONS})",
        f"echo it's off\n{COMMAND} {OPTIONS}",
        "\n".join([COMMAND, *(f"  --{option}" for option in OPTIONS.split("--")[1:])]),
        "\n".join([f"{COMMAND} \\", "", *(f"  --{option}  \n # more" for option in OPTIONS.split("--")[1:])]),
        "\n".join([COMMAND, *(f"  --{option}" for option in OPTIONS.split("--")[1:]), "  --seed 3 | tee log"]),
    ],
)
def test_operators_and_line_ends_of_a_shell_are_no_values(tmp_path: Path, script: str) -> None:
    found = settings(made(tmp_path / "train.sh", script))
    assert (found["adapter"]["rank"], found["optimizer"]["lr"], found["train"]["steps"]) == (24, 3e-4, 77)
    assert (found["name"], found["model"]["path"]) == ("my lora", "x.safetensors")


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("a.ps1", f"& {COMMAND} {OPTIONS} 2>&1 | Tee-Object log"),
        ("a.ps1", f"{COMMAND} {OPTIONS} *> log.txt; pause"),
        ("a.bat", f"{COMMAND} {OPTIONS} > log.txt 2>&1 & pause"),
        ("a.cmd", f"{COMMAND} ^\n {OPTIONS} || exit /b 1"),
    ],
)
def test_operators_of_windows_shells_are_no_values(tmp_path: Path, name: str, script: str) -> None:
    found = settings(made(tmp_path / name, script))
    assert (found["adapter"]["rank"], found["train"]["steps"], found["name"]) == (24, 77, "my lora")


@pytest.mark.parametrize(
    "line",
    [
        "p a'b c'd \"e f\" g\\ h 2>&1 --x=1",
        "p a#b 'c#d' # e",
        "p 2>/dev/null 2 > /dev/null --q 'l>m' '&' ';'",
        'p --a "" \'x"y\' "it\'s" </dev/null',
        r"""p "a\"b\\c\d" 'e\f' \g\'h\\ """,
    ],
)
def test_words_are_those_that_a_shell_passes_on(tmp_path: Path, line: str) -> None:
    printer = "import sys; print(sys.argv[1:], file=open('words', 'w'))"
    shell = f'p() {{ python3 -c {shlex.quote(printer)} "$@"; }}\n{line}'
    subprocess.run(["bash", "-c", shell], cwd=tmp_path, check=True)
    assert source_files.split_commands(line, ".sh") == [["p", *eval((tmp_path / "words").read_text())]]


def test_a_script_of_variables_is_refused_in_words(tmp_path: Path) -> None:
    """lora-scripts' train.sh: the script that it runs is a variable, set by conditions."""
    text = 'trainer="./stable/train_network.py"\nif [ $m == "sdxl" ]; then\n  trainer="./sdxl_train_network.py"\nfi\n'
    with pytest.raises(UserError, match="Variables and conditions are not evaluated"):
        made(tmp_path / "train.sh", text + 'python -m accelerate $trainer --xformers "${args[@]}"')
    with pytest.raises(UserError, match="Variables and conditions are not evaluated"):
        made(tmp_path / "train.ps1", '$trainer = "./sdxl_train_network.py"\npython -m accelerate $trainer --xformers')


# ------------------------------------------------------------------------------------------ what is no LoRA training

PAGE = {"max_resolution": "512,512", "train_batch_size": 1, "pretrained_model_name_or_path": "a/b", "sdxl": True}
BASE = "--pretrained_model_name_or_path=x --train_data_dir y"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.sh", f"python train_textual_inversion.py {BASE} --token_string x", "textual inversion"),
        ("a.sh", f"python sdxl_train_control_net_lllite.py {BASE}", "ControlNet"),
        ("a.sh", f"python train_leco.py {BASE}", "slider"),
        ("a.json", PAGE | {"num_vectors_per_token": 4, "token_string": "x"}, "textual inversion"),
        ("a.json", {"training_method": "EMBEDDING", "model_type": "FLUX_DEV_1"}, "textual inversion"),
        ("a.json", {"training_method": "FINE_TUNE_VAE", "model_type": "FLUX_DEV_1"}, "the VAE"),
        ("a.json", {"model_family": "flux", "model_type": "lora", "controlnet": True}, "ControlNet"),
        ("a.json", {"config": {"process": [{"type": "sd_trainer", "adapter": {"type": "redux"}}]}}, "an adapter"),
    ],
)
def test_what_trains_something_else_is_refused_in_words(
    tmp_path: Path, name: str, content: str | dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=f"{told}.*only trains LoRAs"):
        made(tmp_path / name, content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.sh", f"python sdxl_train.py {BASE}"),
        ("a.sh", f"python fine_tune.py {BASE}"),
        ("a.sh", "python src/musubi_tuner/hv_train.py --dit x"),
        ("a.json", PAGE | {"learning_rate": 1e-5}),
        ("a.json", {"training_method": "FINE_TUNE", "model_type": "FLUX_DEV_1"}),
        ("a.json", {"model_family": "flux", "model_type": "full"}),
        ("a.toml", 'pretrained_model_name_or_path = "sd_xl_base_1.0.safetensors"\nlearning_rate = 1e-5'),
        ("a.toml", 'dit = "x"\nlearning_rate = 1e-5'),
        ("a.toml", 'model_train_type = "sdxl-finetune"\npretrained_model_name_or_path = "x"'),
    ],
)
def test_a_training_of_the_whole_model_leaves_a_todo(tmp_path: Path, name: str, content: str | dict[str, Any]) -> None:
    found = made(tmp_path / name, content)
    assert "adapter.rank: the other trainer trains the whole model; choose the rank of the LoRA" in found.todo
    assert isinstance(settings(found)["adapter"]["rank"], int)


# ----------------------------------------------------------------------------------------- relatives of architectures


@pytest.mark.parametrize(
    ("name", "content", "family"),
    [
        ("a.sh", "python hidream_o1_train_network.py --dit x --network_module networks.lora_hidream_o1", "hidream_o1"),
        ("a.sh", "python hv_1_5_train_network.py --dit x --task t2v", "hunyuan_video_1_5"),
        ("a.sh", "python hv_1_5_train_network.py --dit x --task i2v", "hunyuan_video_1_5"),
        ("a.sh", "python hv_train_network.py --dit x", None),
        ("a.sh", "python qwen_image_21_train_network.py --dit x --network_module lora_qwen_image", "qwen_image_21"),
        ("a.sh", "python fpack_train_network.py --dit x --network_module networks.lora_framepack", "framepack"),
        ("a.sh", "python wan_train_network.py --dit x --task i2v-14B", "wan_i2v"),
        ("a.sh", "python wan_train_network.py --dit x --task t2v-14B", None),
        ("a.toml", 'dit = "x"\nnetwork_module = "networks.lora_hv_1_5"', "hunyuan_video_1_5"),
        ("a.toml", 'dit = "x"\nnetwork_module = "networks.lora_hidream_o1"', "hidream_o1"),
    ],
)  # fmt: skip
def test_a_relative_of_another_architecture_stays_unknown(
    tmp_path: Path, name: str, content: str, family: str | None
) -> None:
    found = made(tmp_path / name, content)
    unknown = [line for line in importing.find_problems(found) if line.startswith("model.family: unknown architecture")]
    todo = [line for line in found.todo if line.startswith("model.family: this version does not support")]
    assert (bool(unknown), bool(todo)) == (family is not None, family is not None)
    assert family is None or settings(found)["model"]["family"] == family


@pytest.mark.parametrize(
    ("content", "family"),
    [
        ({"model_type": "FLUX_2", "base_model_name": "black-forest-labs/FLUX.2-klein-base-9B"}, "flux2_klein"),
        ({"model_type": "FLUX_2", "base_model_name": "black-forest-labs/FLUX.2-dev"}, "flux2"),
        ({"model_family": "hunyuanvideo", "model_type": "lora"}, "hunyuan_video_1_5"),
        ({"model_family": "wan", "model_type": "lora", "model_flavour": "i2v-14b-2.1"}, "wan_i2v"),
        ({"model_family": "flux", "model_type": "lora", "pretrained_model_name_or_path": "a/FLUX.1-Kontext-dev"},
         "flux_kontext"),
        ({"arch": "qwen_image", "name_or_path": "Qwen/Qwen-Image-Edit-2509"}, "qwen_image_edit_plus"),
        ({"is_flux": True, "name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"}, "flux_kontext"),
        ({"arch": "wan22_5b", "name_or_path": "ai-toolkit/Wan2.2-TI2V-5B-Diffusers-bf16"}, "wan22_5b"),
        ({"arch": "ssd", "name_or_path": "segmind/SSD-1B"}, "ssd"),
    ],
)  # fmt: skip
def test_one_name_for_several_architectures_is_not_taken_as_it_is(
    tmp_path: Path, content: dict[str, Any], family: str
) -> None:
    """SimpleTuner's hunyuanvideo is 1.5 by its documents; OneTrainer's FLUX_2 is klein too."""
    if "base_model_name" in content:
        content = content | {"training_method": "LORA"}
    if "name_or_path" in content:
        content = {"job": "extension", "config": {"name": "x", "process": [{"type": "sd_trainer", "model": content}]}}
    assert settings(made(tmp_path / "a.json", content))["model"]["family"] == family


def test_chroma_of_lora_scripts_is_no_flux(tmp_path: Path) -> None:
    """Its own preset: Chroma is a choice on the page of FLUX."""
    preset = '[metadata]\ntrain_type = "flux-lora"\n[data]\nmodel_type = "chroma"\nguidance_scale = 0.0\n'
    assert settings(made(tmp_path / "chroma.toml", preset))["model"]["family"] == "chroma"
    preset = preset.replace('model_type = "chroma"\n', "")
    assert settings(made(tmp_path / "flux.toml", preset))["model"]["family"] == "flux"


# ----------------------------------------------------------------------------------------------------- single settings


def kohya(tmp_path: Path, text: str) -> importing.Import:
    model = 'pretrained_model_name_or_path = "black-forest-labs/FLUX.1-dev"\nnetwork_module = "networks.lora_flux"\n'
    return made(tmp_path / "kohya.toml", model + text)


def test_a_bucket_step_below_ours_is_told(tmp_path: Path) -> None:
    found = kohya(tmp_path, "enable_bucket = true\nbucket_reso_steps = 1\nnetwork_train_unet_only = true")
    assert settings(found)["dataset"]["bucket_step"] == 8 and not importing.find_problems(found)
    assert "bucket_reso_steps" in keys(found.differs)


def test_what_an_absent_dataset_file_says_is_a_todo(tmp_path: Path) -> None:
    for name, text in (
        ("a.toml", 'dit = "x"\nnetwork_module = "networks.lora_wan"\n'),
        ("b.toml", 'pretrained_model_name_or_path = "x"\nnetwork_module = "networks.lora_flux"\n'),
    ):
        found = made(tmp_path / name, text + 'dataset_config = "elsewhere/set.toml"')
        assert not {"resolution", "enable_bucket", "batch_size", "train_batch_size"} & keys(found.defaults)
        assert "resolution" not in settings(found)["dataset"] and "buckets" not in settings(found)["dataset"]
        assert any(line.startswith("dataset.resolution: elsewhere/set.toml sets") for line in found.todo)


def test_reasons_are_those_of_the_case(tmp_path: Path) -> None:
    found = kohya(tmp_path, "noise_offset = 0.1\ncache_text_encoder_outputs = false\ntext_encoder_lr = 1e-5")
    assert settings(found)["adapter"]["text_encoder"] is True
    assert "cache_text_encoder_outputs" in keys(found.mapped)
    assert [entry.off for entry in found.no_counterpart if entry.key == "noise_offset"] == [True]
    page = {"LoRA_type": "Flux1", "flux1_checkbox": True, "pretrained_model_name_or_path": "a/b"}
    page |= {f"{kind}_cache_text_encoder_outputs": kind == "flux1" for kind in ("flux1", "sd3", "sdxl")}
    found = made(tmp_path / "page.json", page)
    assert not any("sets it again" in entry.note for entry in found.no_counterpart)
    assert "text_encoder" not in settings(found)["adapter"] and "flux1_cache_text_encoder_outputs" in keys(found.mapped)


def test_quotation_marks_of_additional_parameters_are_dropped(tmp_path: Path) -> None:
    """kohya_ss takes them out of the text before it splits it."""
    page = {"LoRA_type": "Standard", "sdxl": True, "pretrained_model_name_or_path": "a/b", "network_dim": 8}
    page |= {"additional_parameters": '--network_args "loraplus_lr_ratio=4" --lr_scheduler_type "CosineAnnealingLR"'}
    page |= {"optimizer": "AdamW8bit", "learning_rate": 1e-4, "unet_lr": 1e-4, "text_encoder_lr": 0}
    found = made(tmp_path / "page.json", page)
    assert settings(found)["optimizer"]["loraplus_lr_ratio"] == 4
    assert [e.value for e in found.no_counterpart if e.key.endswith("lr_scheduler_type")] == ['"CosineAnnealingLR"']


# ---------------------------------------------------------------------------------------------------- diffusion-pipe

PIPE = """
output_dir = "out"
dataset = "set.toml"
epochs = 10
micro_batch_size_per_gpu = 1
blocks_to_swap = 10
[model]
{model}
dtype = "bfloat16"
[adapter]
type = "lora"
rank = 32
[optimizer]
type = "AdamW8bitKahan"
lr = 5e-5
"""


@pytest.mark.parametrize(
    ("model", "control", "family"),
    [
        ("type = 'flux2'\ndiffusion_model = 'm/flux-2-klein-base-9b.safetensors'", True, "flux2_klein"),
        ("type = 'flux2'\ndiffusion_model = 'm/flux2-dev.safetensors'", False, "flux2"),
        ("type = 'z_image'\ndiffusion_model = 'm/z_image_bf16.safetensors'", False, "z_image"),
        ("type = 'qwen_image'\ntransformer_path = 'm/qwen_image_edit_bf16.safetensors'", True, "qwen_image_edit"),
        ("type = 'qwen_image'\ntransformer_path = 'm/qwen_image_edit_2509.safetensors'", True, "qwen_image_edit_plus"),
        ("type = 'qwen_image'\ndiffusers_path = 'm/Qwen-Image-Edit'", False, "qwen_image_edit"),
        ("type = 'qwen_image'\ntransformer_path = 'm/mine.safetensors'", True, "qwen_image_edit"),
        ("type = 'qwen_image'\ntransformer_path = 'm/mine.safetensors'", False, "qwen_image"),
        ("type = 'flux'\ntransformer_path = 'm/flux1-kontext-dev.safetensors'", True, "flux_kontext"),
        ("type = 'wan'\nckpt_path = 'm/Wan2.1-I2V-14B-480P'", False, "wan_i2v"),
        ("type = 'wan'\nckpt_path = 'm/Wan2.2-TI2V-5B'", False, "wan22_5b"),
        ("type = 'wan'\nckpt_path = 'm/Wan2.1-T2V-1.3B'", False, "wan"),
        ("type = 'hunyuan_video_15'\ndiffusion_model = 'm/x.safetensors'", False, "hunyuan_video_15"),
    ],
)
def test_what_diffusion_pipe_calls_its_models(tmp_path: Path, model: str, control: bool, family: str) -> None:
    """The keys of its documents, old and new; an editing model is a file or a dataset with control images."""
    rows = 'resolutions = [512]\n[[directory]]\npath = "a"\n' + ('control_path = "b"\n' if control else "")
    (tmp_path / "set.toml").write_text(rows, encoding="utf-8")
    key = "diffusion_model_dtype" if "diffusion_model" in model else "transformer_dtype"
    model += f'\n{key} = "float8"\nvae = "v.safetensors"\ntext_encoders = [{{path = "t.safetensors", type = "x"}}]'
    found = made(tmp_path / "a.toml", PIPE.format(model=model))
    ours = settings(found)
    assert (ours["model"]["family"], ours["quantize"]["storage"]) == (family, "fp8")
    assert ours["model"]["path"].startswith("m/") and not found.unknown
    kept = ours["dataset"]["folders"][0].get("control")
    lost = any("the file has control images" in line for line in found.todo)
    assert (bool(kept), lost) == (control and family != "flux2_klein", control and family == "flux2_klein")


@pytest.mark.parametrize(
    ("encoders", "file"),
    [
        ("{path = 'q.safetensors', type = 'lumina2'}", "q.safetensors"),
        ("{paths = ['q.safetensors'], type = 'lumina2'}", "q.safetensors"),
        ("{paths = ['q.safetensors', 'r.safetensors'], type = 'flux'}", None),
    ],
)
def test_text_encoders_and_a_merged_adapter_of_diffusion_pipe(tmp_path: Path, encoders: str, file: str | None) -> None:
    """Its supported_models.md, Z-Image: the Turbo adapter is merged while training only."""
    model = f"type = 'z_image'\ndiffusion_model = 'z.safetensors'\ntext_encoders = [{encoders}]\n"
    found = made(tmp_path / "a.toml", PIPE.format(model=model + "merge_adapters = ['a/turbo.safetensors']"))
    ours = settings(found)["model"]
    assert ours.get("files", {}).get("text_encoder") == file and ours["training_adapter"] == "a/turbo.safetensors"
    lost = {entry.key for entry in found.no_counterpart if not entry.off and "text_encoders" in entry.key}
    assert lost == (set() if file else {"model.text_encoders.0.paths"})


def test_what_the_page_of_ai_toolkit_writes_for_every_model_is_no_difference(tmp_path: Path) -> None:
    convolutions = {"type": "lora", "linear": 16, "conv": 16, "conv_alpha": 16}
    found = made(tmp_path / "a.yaml", toolkit("zimage", {}, network=convolutions))
    assert "network.conv" not in importing.list_differences(found).get("none", [])
    found = made(tmp_path / "a.yaml", toolkit("sdxl", {}, network=convolutions))
    assert "network.conv" in importing.list_differences(found)["none"]


# --------------------------------------------------------------------------------------------------------- offloading


@pytest.mark.parametrize(
    ("module", "swap", "share"),
    [("networks.lora_flux", 18, 27 / 57), ("networks.lora_flux", 35, 53 / 57), ("networks.lora_flux", 0, None)],
)
def test_swapped_blocks_are_a_share(tmp_path: Path, module: str, swap: int, share: float | None) -> None:
    """sd-scripts' FLUX: N // 2 double-stream blocks and two single-stream ones for each of the others, of 19 and 38."""
    text = f'pretrained_model_name_or_path = "x/flux1"\nnetwork_module = "{module}"\nnetwork_train_unet_only = true\n'
    found = made(tmp_path / "a.toml", f"{text}fp8_base = true\nblocks_to_swap = {swap}\ntorch_compile = true")
    memory = settings(found)["memory"]
    assert memory.get("offload") == (None if share is None else round(share, 2))
    assert memory["compile"] == "blocks" and not importing.find_problems(found)
    assert ("blocks_to_swap" in keys(found.differs)) is (share is not None)


def test_offloading_of_an_unquantized_base_is_a_todo(tmp_path: Path) -> None:
    found = made(tmp_path / "a.toml", 'dit = "x"\nnetwork_module = "networks.lora_qwen_image"\nblocks_to_swap = 45')
    assert "offload" not in settings(found)["memory"] and not importing.find_problems(found)
    assert any(line.startswith("memory.offload: the other trainer offloads about 0.75") for line in found.todo)


ONETRAINER = {
    "training_method": "LORA",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "a/b",
    "concepts": [{"path": "c"}],
    "unet": {"weight_dtype": "FLOAT_8"},
    "epochs": 40,
}


@pytest.mark.parametrize(("checkpointing", "share"), [("CPU_OFFLOADED", 0.5), ("ON", None)])
def test_onetrainers_share_is_ours(tmp_path: Path, checkpointing: str, share: float | None) -> None:
    """LayerOffloadConductor: layers are offloaded with CPU_OFFLOADED only."""
    page = ONETRAINER | {"layer_offload_fraction": 0.5, "gradient_checkpointing": checkpointing}
    assert settings(made(tmp_path / "a.json", page))["memory"].get("offload") == share


@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({"ramtorch": True}, 1.0),
        ({"ramtorch": True, "ramtorch_transformer_percent": 40}, 0.4),
        ({"enable_group_offload": True}, 1.0),
        ({"musubi_blocks_to_swap": 15}, 0.25),
        ({}, None),
    ],
)
def test_simpletuners_offloading(tmp_path: Path, more: dict[str, Any], share: float | None) -> None:
    page = {"model_family": "qwen_image", "model_type": "lora", "pretrained_model_name_or_path": "a/b"}
    page |= {"base_model_precision": "fp8-quanto", "optimizer": "optimi-lion", "learning_rate": 1e-5}
    found = settings(made(tmp_path / "a.json", page | more))
    assert found["memory"].get("offload") == share and found["optimizer"]["name"] == "lion8bit"


# ------------------------------------------------------------------------------------- what is predicted, and how long


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.sh", "python sdxl_train_network.py --network_module networks.lora "
                 "--pretrained_model_name_or_path noob.safetensors --v_parameterization"),
        ("a.json", ONETRAINER | {"force_v_prediction": True}),
        ("a.json", {"model_family": "sdxl", "model_type": "lora", "prediction_type": "v_prediction"}),
        ("a.toml", "[model]\ntype = 'sdxl'\ncheckpoint_path = 'x.safetensors'\nv_pred = true\n"
                   "[optimizer]\ntype = 'adamw'\nlr = 1e-4\n[adapter]\ntype = 'lora'\nrank = 8"),
        ("a.yaml", {"job": "extension", "config": {"name": "x", "process": [{"type": "sd_trainer",
                    "network": {"type": "lora", "linear": 4}, "model": {"arch": "sdxl", "name_or_path": "x",
                    "is_v_pred": True}}]}}),
    ],
    ids=["sd-scripts", "onetrainer", "simpletuner", "diffusion-pipe", "ai-toolkit"],
)  # fmt: skip
def test_v_prediction_is_kept(tmp_path: Path, name: str, content: str | dict[str, Any]) -> None:
    """A single file need not say it: the setting does."""
    assert settings(made(tmp_path / name, content))["objective"]["prediction"] == "v"


@pytest.mark.parametrize(
    ("part", "stops"),
    [({}, True), ({"stop_training_after": 5, "stop_training_after_unit": "EPOCH"}, True),
     ({"stop_training_after": 60, "stop_training_after_unit": "EPOCH"}, False),
     ({"stop_training_after_unit": "NEVER"}, False)],
)  # fmt: skip
def test_the_end_of_onetrainers_text_encoder_is_a_todo(tmp_path: Path, part: dict[str, Any], stops: bool) -> None:
    """TrainConfig: a text encoder stops after 30 epochs unless the file says another."""
    page = ONETRAINER | {"text_encoder": {"train": True} | part, "text_encoder_2": {"train": False}}
    found = made(tmp_path / "a.json", page)
    assert settings(found)["adapter"]["text_encoder"] is True
    assert any(line.startswith("optimizer.text_encoder_lr: OneTrainer stops") for line in found.todo) is stops


# ------------------------------------------------------------------------------------------------------------ previews


def toolkit(arch: str, sample: dict[str, Any], job: str = "extension", **more: Any) -> dict[str, Any]:
    process = {"type": "sd_trainer", "model": {"name_or_path": "a/b", "arch": arch}, "sample": sample}
    process |= {"network": {"type": "lora", "linear": 16}, "datasets": [{"folder_path": "a", "control_path": "b"}]}
    return {"job": job, "config": {"name": "x", "process": [process | more]}}


def test_control_images_of_prompts_are_previews_controls(tmp_path: Path) -> None:
    prompts = [f"make the person {word}  --ctrl_img /c/{word}.jpg --steps 9" for word in ("smile", "cry")]
    found = made(tmp_path / "a.yaml", toolkit("flux_kontext", {"prompts": prompts}))
    preview = settings(found)["preview"]
    assert preview["prompts"] == ["make the person smile", "make the person cry"] and preview["steps"] == 9
    assert preview["controls"] == ["/c/smile.jpg", "/c/cry.jpg"] and not importing.find_problems(found)
    found = made(tmp_path / "a.yaml", toolkit("flux", {"prompts": prompts}))
    assert "controls" not in settings(found)["preview"] and "--ctrl_img" not in importing.to_toml(found)


@pytest.mark.parametrize("written", ["prompt", "sample", "kohya"])
def test_several_control_images_of_a_prompt_are_all_carried_or_named(tmp_path: Path, written: str) -> None:
    """A folder stands for all of its images; where none holds just these, in order, nothing is left out in silence."""

    def carried(images: list[str]) -> tuple[Any, list[str]]:
        flag = "ci" if written == "kohya" else "ctrl_img"
        line = " ".join(["both", *(f"--{flag} {image}" for image in images)])
        sample = {"prompt": "both"} | {f"ctrl_img_{i}": image for i, image in enumerate(images, 1)}
        if written == "kohya":
            (tmp_path / "prompts.txt").write_text(line, encoding="utf-8")
            command = "python musubi_tuner/qwen_image_train_network.py --edit_plus --dit a.safetensors"
            text = f"{command} --network_module networks.lora_qwen_image --sample_prompts prompts.txt"
            (tmp_path / "a.sh").write_text(text, encoding="utf-8")
            found = importing.import_file(tmp_path / "a.sh")
        else:
            given = {"prompts": [line]} if written == "prompt" else {"samples": [sample]}
            found = made(tmp_path / "a.yaml", toolkit("qwen_image_edit_plus", given))
        todo = [line for line in found.todo if line.startswith("preview.controls: some prompts have several")]
        return settings(found)["preview"].get("controls"), todo

    held = tmp_path / "both"
    held.mkdir()
    images = [str(held / name) for name in ("1.png", "2.jpg")]
    for image in [*images, str(held / "notes.txt")]:
        Path(image).write_bytes(b"x")
    assert carried(images) == ([str(held)], [])
    for given in (images[::-1], ["/c/1.png", "/d/2.png"]):
        controls, (line,) = carried(given)
        assert controls is None and " + ".join(given) in line
        assert translations.translate("zh-CN", line).startswith("preview.controls：有的提示词有多张控制图（")
    (held / "3.webp").write_bytes(b"x")
    assert carried(images)[0] is None, "a third image is in the folder"


def test_the_reason_given_for_convolutions_is_that_of_the_documents() -> None:
    """moving-in.md: they are trained where adapter.targets names them."""
    from lora_fp8.importing import kohya_table

    root = Path(importing.__file__).parents[2]
    document = (root / "docs/moving-in.md").read_text(encoding="utf-8")
    assert "are trained where `adapter.targets` names them" in " ".join(document.split())
    assert "adapter.targets names them" in kohya_table.NO_CONV and "not adapted" not in kohya_table.NO_CONV


@pytest.mark.parametrize(("arch", "frames"), [("wan21", 37), ("flux", None)])
def test_frames_of_previews(tmp_path: Path, arch: str, frames: int | None) -> None:
    found = made(tmp_path / "a.yaml", toolkit(arch, {"prompts": ["a cat"], "num_frames": 40}))
    assert settings(found)["preview"].get("frames") == frames


@pytest.mark.parametrize(
    ("job", "more", "told"),
    [
        ("generate", {"type": "to_folder"}, "generate images"),
        ("mod", {"type": "rescale_lora"}, "change a LoRA file"),
        ("train", {"type": "slider"}, "slider"),
    ],
)
def test_jobs_of_ai_toolkit_that_train_no_lora(tmp_path: Path, job: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"{told}.*only trains LoRAs"):
        made(tmp_path / "a.yaml", toolkit("flux", {}, job, **more))
    whole = toolkit("flux", {})
    del whole["config"]["process"][0]["network"]
    assert any("the other trainer trains the whole model" in line for line in made(tmp_path / "b.yaml", whole).todo)


# --------------------------------------------------------------------------------------------------- paths and report


def test_relative_paths_are_found_from_where_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data/img", "data/masks", "work/img"):
        (tmp_path / name).mkdir(parents=True)
    text = (
        "masked_loss = true\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'img'\nconditioning_data_dir = 'masks'\n"
    )
    (tmp_path / "data/set.toml").write_text(text, encoding="utf-8")
    command = "python sdxl_train_network.py --network_module networks.lora --pretrained_model_name_or_path a/b"
    (tmp_path / "data/train.sh").write_text(f"{command} --masked_loss --dataset_config set.toml", encoding="utf-8")
    for start, image, mask in (("data", "img", "masks"), ("", "data/img", "data/masks"), ("work", "img", "")):
        monkeypatch.chdir(tmp_path / start)
        found = importing.import_file(Path("train.sh") if start == "data" else tmp_path / "data/train.sh")
        importing.relocate(found, Path.cwd())
        (folder,) = settings(found)["dataset"]["folders"]
        # What is here already is left as it is.
        assert (folder["path"], folder["mask"]) == (image, mask or str(tmp_path / "data/masks"))
        assert Path(folder["path"]).is_dir() and Path(folder["mask"]).is_dir()
        monkeypatch.setattr("sys.argv", ["lora-fp8", "import-config", str(tmp_path / "data/train.sh")])
        cli.main()
        assert f"{tmp_path / start / 'train.lora-fp8.toml'} written" in capsys.readouterr().out


def test_the_report_begins_with_what_is_to_do_and_ends_with_a_verdict(tmp_path: Path) -> None:
    long = "a cat " * 100
    found = made(tmp_path / "a.yaml", toolkit("flux", {"prompts": [long, "b"], "width": 512, "height": 520, "seed": 3}))
    lines = importing.report(found)
    assert lines[1].startswith("to do (") and lines[-1].startswith("same training: no, because ")
    assert "\n" not in lines[-1] and max(map(len, lines)) < 700 and not any(long in line for line in lines)
    notes = [line for line in importing.report(found, verbose=True) if line.startswith("      ")]
    assert len(notes) == len(set(notes)) > 1
    every = "\n".join(importing.report(found, verbose=True))
    assert all(f"  {entry.key} = " in every for entry in [*found.mapped, *found.no_counterpart])
    assert importing.to_json(found)["verdict"] == lines[-1] and not importing.to_json(found)["same_training"]
    data = {"job": "extension", "config": {"name": "x", "process": [{"type": "sd_trainer", "train": {"lr": 1e-4},
            "model": {"name_or_path": "a/b", "arch": "flux"}, "network": {"type": "lora", "linear": 16},
            "datasets": [{"folder_path": "a"}], "save": {"save_every": 50}}]}}  # fmt: skip
    assert importing.describe_verdict(made(tmp_path / "b.yaml", data)) == "same training: yes"
    data["config"]["process"][0]["datasets"][0]["mask_path"] = "m"  # its loss is divided by the mask's area, as ours
    assert importing.describe_verdict(made(tmp_path / "b.yaml", data)) == "same training: yes"
    data["config"]["process"][0]["datasets"][0]["is_reg"] = True  # shown as often as the others
    assert importing.describe_verdict(made(tmp_path / "b.yaml", data)).endswith(
        "1 setting differs in meaning (datasets.0.is_reg)"
    )
    (tmp_path / "set/10_cat").mkdir(parents=True)
    for name in ("0.png", "0.txt"):
        (tmp_path / "set/10_cat" / name).write_bytes(b"a cat")
    text = "train_data_dir = 'set'\nmax_train_epochs = 2\nresolution = '512,512'\ntimestep_sampling = 'sigmoid'\n"
    text += "network_train_unet_only = true\nmixed_precision = 'bf16'\nmodel_prediction_type = 'raw'\n"
    text += "network_args = ['split_qkv=true']\n"
    assert importing.describe_verdict(kohya(tmp_path, text)) == "same training: yes"


def test_switches_that_change_nothing_of_what_is_learned_are_no_differences(tmp_path: Path) -> None:
    """A settings page writes every switch, also those that are off as they are without it."""
    (tmp_path / "set/10_cat").mkdir(parents=True)
    for name in ("0.png", "0.txt"):
        (tmp_path / "set/10_cat" / name).write_bytes(b"a cat")
    text = "train_data_dir = 'set'\nmax_train_epochs = 2\nresolution = '512,512'\ntimestep_sampling = 'sigmoid'\n"
    text += "network_train_unet_only = true\nmixed_precision = 'bf16'\nmodel_prediction_type = 'raw'\n"
    text += "network_args = ['split_qkv=true']\n"
    switches = "xformers sdpa mem_eff_attn save_state save_state_on_train_end use_flash_attn no_half_vae".split()
    text += "".join(f"{name} = false\n" for name in switches)
    found = kohya(tmp_path, text)
    assert set(switches) <= keys(found.mapped) and importing.describe_verdict(found) == "same training: yes"
    # The same value in two sections changes nothing; the second of two values counts, and the first is lost.
    found = kohya(tmp_path, text + "network_dim = 8\n[a]\nnetwork_dim = 8\n")
    assert importing.describe_verdict(found) == "same training: yes" and settings(found)["adapter"]["rank"] == 8
    found = kohya(tmp_path, text + "network_dim = 8\n[a]\nnetwork_dim = 16\n")
    assert importing.describe_verdict(found).endswith("1 setting has no counterpart (network_dim)")
    assert settings(found)["adapter"]["rank"] == 16


def test_reasons_are_told_apart_by_what_they_are_and_not_by_their_first_words(tmp_path: Path) -> None:
    assert remarks.is_of_the_run(remarks.UPLOAD) and remarks.is_of_the_run(readers.hide(remarks.COUNTS_STEPS))
    assert remarks.is_of_the_run(remarks.join([remarks.UPLOAD, remarks.RESUMES]))
    assert not remarks.is_of_the_run(remarks.join([remarks.UPLOAD, remarks.NOT_HERE]))
    assert not remarks.is_of_the_run(Message("checkpoint.every counts steps, which changes the loss"))
    found = made(tmp_path / "a.yaml", toolkit("flux", {}))
    draft = import_draft.Draft(found.tool, source_files.read_source(tmp_path / "a.yaml"), "", "flux")
    draft.given |= {"a": 1, "b": 1}
    draft.labels |= {"a": "a", "b": "b"}
    draft.report_different("a", {"preview.prompts": "a cat, train.seed = 3"}, "as it is written")
    draft.report_different("b", {"adapter.rank": 3, "preview.seed": 1}, "")
    found.differs[:], found.no_counterpart[:] = draft.lists["differs"], []
    assert importing.list_differences(found)["differs"] == ["b"]


@pytest.mark.parametrize(
    ("module", "given", "told"),
    [
        ("lora_flux", "", True),  # flux_train_utils.py: the default is sigma_scaled
        ("lora_flux", "model_prediction_type = 'raw'", False),
        ("lora_sd3", "", True),  # sd3_train_network.py always scales
        ("lora_lumina", "", False),
    ],
)
def test_a_loss_that_is_weighted_by_the_noise_counts_as_a_difference(
    tmp_path: Path, module: str, given: str, told: bool
) -> None:
    text = f"pretrained_model_name_or_path = 'x'\nnetwork_module = 'networks.{module}'\n{given}\n"
    found = made(tmp_path / "a.toml", text + "network_args = ['verbose=True']\n")
    assert ("model_prediction_type" in importing.list_differences(found).get("differs", [])) == told
    assert "network_args" in keys(found.mapped)


def test_titles_of_trainers_are_chinese_in_chinese() -> None:
    english = [tool.title for tool in importing.TOOLS.values() if " of " in translations.translate("zh-CN", tool.title)]
    assert english == []
