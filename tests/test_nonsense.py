"""Files that are there and make no sense: told in one line that names the file, before anything is encoded or trained.

Each case ended in a traceback, or after hours of encoding, once.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_fp8 import families, settings, train
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.precision import dtypes
from lora_fp8.stages import previews
from lora_fp8.training import checkpoint
from webui import translations

GONE = object()
CASES = (
    ("sd15", "scheduler/scheduler_config.json", "beta_schedule", "bent", "bent is not implemented"),
    ("sd15", "scheduler/scheduler_config.json", "beta_start", "low", "should be a number"),
    ("sd15", "scheduler/scheduler_config.json", "trained_betas", {}, "scheduler_config.json does not describe"),
    ("sd15", "scheduler/scheduler_config.json", "num_train_timesteps", 0, "scheduler_config.json does not describe"),
    ("sd15", "scheduler/scheduler_config.json", "_class_name", "Nobody's", "diffusers has no scheduler named"),
    ("flux", "scheduler/scheduler_config.json", "shift", [3], "should be a number"),
    ("flux", "scheduler/scheduler_config.json", "max_image_seq_len", 256, "how noise is added to images (ZeroDivision"),
    ("sd15", "unet/config.json", "resnet_time_scale_shift", ["a"], "does not describe a UNet2DConditionModel"),
    ("sd15", "unet/config.json", "mid_block_scale_factor", "wide", "should be a number"),
    ("sd15", "unet/config.json", "cross_attention_dim", 0, "belong to different models"),
    ("chroma", "transformer/config.json", "num_layers", "many", "should be a number"),
    (
        "qwen_image",
        "transformer/config.json",
        "num_attention_heads",
        GONE,
        "not have the weights that its config.json desc",
    ),
    (
        "flux",
        "transformer/config.json",
        "num_single_layers",
        5,
        "does not have the weights that its config.json describes",
    ),
    ("flux", "transformer/config.json", "num_layers", 0, "does not have the weights that its config.json describes"),
    ("sd15", "vae/config.json", "block_out_channels", None, "does not describe a AutoencoderKL"),
    ("sd15", "vae/config.json", "latent_channels", 8, "belong to different models"),
    ("sd15", "text_encoder/config.json", "hidden_size", "wide", "cannot be loaded as a CLIPTextModel"),
    ("sd15", "text_encoder/config.json", "intermediate_size", 96, "weights of other sizes than its config.json"),
    ("flux", "text_encoder_2/config.json", "num_layers", 2, "weights of a T5EncoderModel"),
    ("sd15", "tokenizer/tokenizer_config.json", "model_max_length", GONE, "how many tokens the text encoder reads"),
    ("flux", "tokenizer/tokenizer_config.json", "model_max_length", {}, "how many tokens the text encoder reads"),
)


def changed(base: Path, copy: Path, file: str, key: str, value: Any) -> Path:
    """A copy of a model's folder with one entry of one of its files changed."""
    shutil.copytree(base, copy)
    path = copy / file
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop(key, None)
    path.write_text(json.dumps(content if value is GONE else content | {key: value}), encoding="utf-8")
    return copy


@pytest.mark.parametrize(("family", "file", "key", "value", "told"), CASES)
def test_a_model_that_makes_no_sense_is_told_before_it_is_used(
    family: str,
    file: str,
    key: str,
    value: Any,
    told: str,
    tiny: Callable[[str], Path],
    job: Callable[..., settings.Job],
    tmp_path: Path,
) -> None:
    base = changed(tiny(family), tmp_path / "base", file, key, value)
    cache = tmp_path / "cache"
    mine = job(f"model.path='{base}'", f"dataset.cache_dir='{cache}'", family=family)
    with pytest.raises(UserError) as error:
        train.run(mine, progress=False)
    line = str(error.value)
    assert told in line and str((base / file).parent) in line and "\n" not in line, line
    assert not cache.exists() and not Path(mine.output_dir).exists()
    assert translations.translate("zh-CN", line) != line


def test_whole_encoders_of_another_model_are_told_without_a_weight_being_read(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their config agrees with their file, and neither with what the denoiser is trained on: both loaders are asked as
    they will be, on no device."""
    base = shutil.copytree(tiny("flux"), tmp_path / "base")
    shutil.rmtree(base / "text_encoder_2")
    shutil.copytree(tiny("flux") / "text_encoder", base / "text_encoder_2")
    family = families.get("flux")(
        settings.Model(family="flux", path=str(base)), device="cpu", dtype=dtypes.DTYPES["bf16"]
    )
    with pytest.raises(UserError, match="text_encoder_2"):
        family.check_parts()
    whole = families.get("flux")(
        settings.Model(family="flux", path=str(tiny("flux"))), device="cpu", dtype=dtypes.DTYPES["bf16"]
    )
    loaded = []
    real = type(whole)._from_pretrained
    whole._from_pretrained = lambda *asked, **options: loaded.append(real(whole, *asked, **options)) or loaded[-1]
    whole.check_parts()
    assert len(loaded) == 3 and {one.device.type for one in loaded} == {"meta"} and whole.vae is None


@pytest.mark.parametrize("name", families.list_families())
def test_every_familys_own_parts_pass(name: str, tiny: Callable[[str], Path]) -> None:
    model = settings.Model(family=name, path=str(tiny(name)))
    families.get(name)(model, device="cpu", dtype=dtypes.DTYPES["bf16"]).check_parts()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: b"",
        lambda state: b"[]",
        lambda state: json.dumps(state)[:-20].encode(),
        *(lambda state, key=key: _without(state, key) for key in ("step", "optimizer", "pinned", "settings", "data")),
        *(
            lambda state, key=key, value=value: json.dumps(state | {key: value}).encode()
            for key, value in (
                ("step", "4"),
                ("step", -1),
                ("step", True),
                ("optimizer", []),
                ("pinned", None),
                ("settings", 3),
                ("data", None),
                ("compute", 3),
                ("moved", [3]),
                ("moved", "x"),
            )
        ),
        lambda state: json.dumps(state | {"optimizer": state["optimizer"] | {"steps": [1]}}).encode(),
        lambda state: json.dumps(state | {"optimizer": state["optimizer"] | {"steps": {"x": "y"}}}).encode(),
        lambda state: json.dumps(state | {"optimizer": {}}).encode(),
    ],
)
def test_a_checkpoint_whose_state_makes_no_sense_is_one_line(
    change: Callable[[dict[str, Any]], bytes], trained: settings.Job, tmp_path: Path
) -> None:
    """Its hashes agree: it was written so, by another program or by hand."""
    place = shutil.copytree(trained.run_folder, tmp_path / "runs" / trained.name)
    bundle = place / "checkpoints" / "step-000002"
    raw = change(json.loads((bundle / "state.json").read_bytes()))
    rewrite(bundle, "state.json", raw)
    mine = trained.model_copy(update={"output_dir": str(tmp_path / "runs")})
    with pytest.raises((RunFailure, UserError)) as error:
        train.run(mine, resume=True, progress=False)
    line = str(error.value)
    assert "\n" not in line and ("state.json" in line or "the checkpoint's optimizer" in line), line
    assert translations.translate("zh-CN", line) != line


@pytest.mark.parametrize("raw", [b"", b"no picture", None])
def test_a_first_preview_that_cannot_be_read_costs_the_contact_sheet_alone(
    raw: bytes | None, job: Callable[..., settings.Job]
) -> None:
    """And so do events of previews that lack what they have: all is trained by then."""
    mine = job("train.steps=1", "preview.prompts=['a cat']", "preview.steps=1")
    folder = mine.run_folder
    first = previews.get_path(folder / "samples", 0, 0)

    def spoil(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            with open(folder / "events.jsonl", "a", encoding="utf-8") as file:
                file.write('{"event": "preview"}\n{"event": "preview", "step": 0}\n' if raw is None else "")
            first.write_bytes(raw if raw is not None else first.read_bytes())

    result = train.run(mine, progress=False, echo=spoil)
    told = [e["text"] for e in result.run.read_events() if e["event"] == "warning" and "contact sheet" in e["text"]]
    assert len(result.files) == 2 and len(told) == (raw is not None)
    assert not (folder / "samples" / "contact_sheet.png").exists()
    assert all(translations.translate("zh-CN", line) != line for line in told)


def test_tensors_of_a_checkpoint_that_are_none_are_one_line(trained: settings.Job, tmp_path: Path) -> None:
    place = shutil.copytree(trained.run_folder / "checkpoints", tmp_path / "checkpoints")
    rewrite(place / "step-000002", "optimizer.safetensors", b"nothing of the kind")
    with pytest.raises(RunFailure, match=r"optimizer\.safetensors is not a safetensors file"):
        checkpoint.read_latest(place)


@pytest.fixture(scope="module")
def trained(make_job: Callable[..., settings.Job], tmp_path_factory: pytest.TempPathFactory) -> settings.Job:
    """A run of two steps that is to go on to four. Not to be changed."""
    mine = make_job(tmp_path_factory.mktemp("trained"), "train.steps=2")
    train.run(mine, progress=False)
    return mine.model_copy(update={"train": mine.train.model_copy(update={"steps": 4})})


def rewrite(bundle: Path, name: str, raw: bytes) -> None:
    (bundle / name).write_bytes(raw)
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    (bundle / "manifest.json").write_text(
        json.dumps(manifest | {name: hashlib.sha256(raw).hexdigest()}), encoding="utf-8"
    )


def _without(state: dict[str, Any], key: str) -> bytes:
    return json.dumps({name: value for name, value in state.items() if name != key}).encode()
