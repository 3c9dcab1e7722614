"""The tools on LoRA files, judged by dense linear algebra (torch.linalg.svd), by diffusers, and by addition."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_families import original_layout

from lora_fp8 import cli, config, families, verify
from lora_fp8.families import _files
from lora_fp8.lora_files import layouts
from lora_fp8.settings import Model
from lora_fp8.tools import extract, merge, resize

RANK = 6


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """A command through `lora_fp8.cli.main`, in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["lora-fp8", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """ask("resize", file, ...) -> (exit code, stdout, stderr)."""

    def ask(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(monkeypatch, *arguments)
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return code, told.out, told.err

    return ask


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora_for(layers: dict[str, tuple[int, ...]], rank: int = RANK, seed: int = 0) -> dict[str, torch.Tensor]:
    """lora_A and lora_B for layers by their weights' shapes; columns of falling size, as training leaves them."""
    state = {}
    for i, (name, (out, num_in, *kernel)) in enumerate(layers.items()):
        fall = 0.5 ** torch.arange(rank)
        a = random(rank, num_in, *kernel, seed=seed + 2 * i) * 0.1
        b = random(out, rank, seed=seed + 2 * i + 1) * fall
        state[f"{name}.lora_A.weight"] = a
        state[f"{name}.lora_B.weight"] = b.reshape(out, rank, *(1 for _ in kernel))
    return state


def as_kohya(state: dict[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """Under kohya's words for the halves, with an alpha for each layer."""
    made = {}
    for name, tensor in state.items():
        made[name.replace("lora_A", "lora_down").replace("lora_B", "lora_up")] = tensor
        made[name.partition(".lora_")[0] + ".alpha"] = torch.tensor(alpha)
    return made


def deltas(path: Path) -> dict[str, torch.Tensor]:
    """What a file does, by the formats' definition: B @ A * alpha / rank, as dense matrices in float64."""
    tensors = load_file(path)
    found = {}
    for name, tensor in tensors.items():
        for down, up in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
            if name.endswith(f".{down}.weight"):
                module = name.removesuffix(f".{down}.weight")
                b = tensors[f"{module}.{up}.weight"].double().flatten(1)
                alpha = tensors.get(f"{module}.alpha", torch.tensor(float(tensor.shape[0])))
                found[module] = b @ tensor.double().flatten(1) * (float(alpha) / tensor.shape[0])
    return found


def ranks(path: Path) -> dict[str, int]:
    halves = ("lora_A.weight", "lora_down.weight")
    return {name: len(tensor) for name, tensor in load_file(path).items() if name.endswith(halves)}


def rel(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    return float((tensor.double() - reference.double()).norm() / reference.double().norm())


LAYERS = {"lora_unet_a": (24, 40), "lora_unet_b": (40, 16), "lora_te1_conv": (16, 8, 3, 3), "lora_unet_small": (4, 40)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file in kohya's layout with alpha 3 at rank 6: linears, a convolution, a layer with less rows than rank."""
    path = tmp_path / "lora.safetensors"
    save_file(as_kohya(lora_for(LAYERS), 3.0), path, {"ss_base_model_version": "sd_v1", "sshs_model_hash": "stale"})
    return path


# --------------------------------------------------------------------------------------------------------------- resize


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_resized_is_the_best_that_the_dense_svd_gives(ask: Callable, file: Path, tmp_path: Path, rank: int) -> None:
    out = tmp_path / "small.safetensors"
    code, said, _ = ask("resize", file, "--rank", rank, "--dtype", "fp32", "--output", out, "--json")
    assert code == 0
    rows = {row["module"]: row for row in json.loads(said)["layers"]}
    small = deltas(out)
    for module, delta in deltas(file).items():
        u, s, v = torch.linalg.svd(delta, full_matrices=False)
        best = u[:, :rank] * s[:rank] @ v[:rank]
        assert rel(small[module], best) < 1e-5, module
        assert rows[module]["kept"] == pytest.approx(float(s[:rank].square().sum() / s.square().sum()), abs=1e-9)
    assert ranks(out)["lora_unet_a.lora_down.weight"] == min(rank, RANK)
    assert ranks(out)["lora_unet_small.lora_down.weight"] == min(rank, 4)  # no layer has more than its side
    assert load_file(out)["lora_te1_conv.lora_down.weight"].shape[1:] == (8, 3, 3)


def test_energy_gives_each_layer_the_rank_it_needs(ask: Callable, file: Path, tmp_path: Path) -> None:
    own, same, capped = (tmp_path / f"{name}.safetensors" for name in ("own", "same", "capped"))
    assert ask("resize", file, "--energy", 0.95, "--output", own)[0] == 0
    assert ask("resize", file, "--energy", 0.95, "--uniform", "--output", same)[0] == 0
    assert ask("resize", file, "--energy", 0.95, "--rank", 1, "--output", capped)[0] == 0
    needed = {}
    for module, delta in deltas(file).items():
        shares = torch.linalg.svdvals(delta).square()
        needed[module] = int((shares.cumsum(0) / shares.sum() < 0.95).sum()) + 1
    assert len(set(needed.values())) > 1
    assert {name.partition(".")[0]: rank for name, rank in ranks(own).items()} == needed
    assert set(ranks(same).values()) == {max(needed.values())}
    assert set(ranks(capped).values()) == {1}


def test_a_report_lists_the_layers_that_lose_most() -> None:
    rows = [resize.Row(f"layer{number:02}", 8, 2, 1 - number / 1000, 1.0) for number in range(30)]
    dropped = [f"zero{number}" for number in range(5)]
    report = resize.Report(rows, dropped)
    *worst, others, left_out, total = report.format_lines()
    assert [line.rpartition(" ")[2] for line in worst] == [f"layer{number:02}" for number in range(29, 19, -1)]
    assert others == "20 other layers keep 98.1000% or more each"
    assert left_out == "5 layers are not written, because their deltas are zero: zero0, zero1, zero2 and 2 more"
    assert total.startswith("30 layers at rank 2 keep ")
    assert len(report.to_json()["layers"]) == 30 and report.to_json()["dropped"] == dropped
    assert len(resize.Report(rows[:10], []).format_lines()) == 11  # nothing about others where there are none


def test_the_new_file_says_what_it_is(ask: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "lora-resized.safetensors"
    assert ask("resize", file, "--rank", 2)[0] == 0
    with safe_open(out, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["ss_base_model_version"] == "sd_v1" and metadata["ss_network_dim"] == "2"
    assert metadata["ss_output_name"] == "lora-resized" and metadata["sshs_model_hash"] != "stale"
    assert {float(t) for name, t in load_file(out).items() if name.endswith(".alpha")} == {2.0}
    assert ask("resize", file, "--rank", 2)[0] == 2  # the place is taken, and nothing is replaced


def test_diffusers_takes_ranks_that_differ_as_they_are(
    ask: Callable, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without alphas in the file, the layers' scales are left to who loads it."""
    lora = diffusers_lora("sd15", tiny("sd15"), tmp_path / "lora.safetensors", uneven=True)
    out = tmp_path / "small.safetensors"
    assert ask("resize", lora, "--energy", 0.9, "--output", out)[0] == 0
    assert len(set(ranks(out).values())) > 1
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(tiny("sd15"))
    pipe.load_lora_weights(str(tmp_path), weight_name=out.name)
    loaded, wanted = verify.find_loaded_layers(pipe.unet), deltas(out)
    assert {f"unet.{name}" for name in loaded} == wanted.keys()
    for name, one in loaded.items():
        a, b, scale = one.parts["lora_A.weight"], one.parts["lora_B.weight"], one.scaling
        assert rel(b.flatten(1) @ a.flatten(1) * scale, wanted[f"unet.{name}"]) < 1e-6, name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x.dora_scale": torch.ones(2)}, "x.dora_scale does not belong to a plain LoRA"),
        ({"x.lora_down.weight": torch.ones(2, 3)}, "not the other half"),
        ({"x.alpha": torch.ones(())}, "has an alpha, but no weights"),
    ],
)
def test_other_adapters_are_refused_by_name(
    ask: Callable, file: Path, tmp_path: Path, change: dict[str, torch.Tensor], words: str
) -> None:
    path = tmp_path / "other.safetensors"
    save_file(load_file(file) | change, path)
    code, _, said = ask("resize", path, "--rank", 2)
    assert code == 2 and words in said
    assert not (tmp_path / "other-resized.safetensors").exists()


NAN, EMPTY, LOHA = torch.tensor(math.nan), torch.ones(6, 0), "x.hada_w1_a x.hada_w1_b x.hada_w2_a x.hada_w2_b".split()


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        ({"x.alpha": torch.ones(2)}, "alpha that is not a single number", False),
        ({"x.alpha": torch.ones(0)}, "empty tensors", False),
        ({"x.lora_down.weight": EMPTY, "x.lora_up.weight": EMPTY.T}, "empty tensors", False),
        ({"x.lora_down.weight": torch.ones(6, 4).long()}, "whole or complex numbers", False),
        ({"x\n.lora_down.weight": torch.ones(6, 4)}, "names that cannot be printed: 'x\\n", False),
        ({"lora_unet_a.lora_up.weight": torch.ones(24, 5)}, "one rank", False),
        ({"lora_unet_a.alpha": NAN}, "NaN or infinity", True),
        ({"lora_unet_b.lora_up.weight": NAN.expand(40, 6)}, "NaN or infinity", True),
        (
            {f"lora_{layer}.alpha": torch.tensor(0) for layer in ("unet_a", "unet_b", "te1_conv", "unet_small")},
            "0",
            True,
        ),
        ({}, "one rank", False),
    ],
)
def test_broken_files_are_refused_by_each_tool(
    ask: Callable, file: Path, tmp_path: Path, change: dict[str, torch.Tensor], words: str, told: bool
) -> None:
    path, out = tmp_path / "broken.safetensors", tmp_path / "out"
    tensors = {name: tensor.contiguous() for name, tensor in (load_file(file) | change).items()}
    if not change:
        tensors = {name: torch.ones(24 if name.endswith("a") else 5, 4 if name == LOHA[0] else 5) for name in LOHA}
    save_file(tensors, path, {"ss_base_model_version": "sd_v1"})
    for arguments in (
        ("resize", path, "--rank", 2, "--output", out),
        ("convert", path, "--format", "diffusers", "--output", out),
        ("merge", path, file, "--output", out),
        ("merge", path, "--into", "demo", "--output", out),
        ("average", path, file, "--output", out),
        ("kit", path, "--out", out),
        ("inspect", path),
    ):
        code, _, said = ask(*arguments)
        assert code == (0 if told and arguments[0] == "inspect" else 2), (arguments, said)
        # Some look at names before shapes: of layers, and of pairs.
        shapes = ("different ranks", "do not match", "no such names", "not a LoRA") if words == "one rank" else ()
        assert not code or any(each in said for each in (words, *shapes)), (arguments, said)
        assert said.count("\n") == bool(code) and not out.exists(), (arguments, said)
    report = verify.check_file(path, family_name="sd15")
    assert not report.ok and {"file", "pairs", "finite", "trained"} & {
        line.split(":")[0] for line in report.list_failures()
    }


def test_float8_is_read_and_written_as_something_else(ask: Callable, file: Path, tmp_path: Path) -> None:
    tensors = {name: t if name.endswith("alpha") else t.to(torch.float8_e4m3fn) for name, t in load_file(file).items()}
    held, out = tmp_path / "held.safetensors", tmp_path / "out.safetensors"
    save_file(tensors, held, {"ss_base_model_version": "sd_v1"})
    code, said, _ = ask("inspect", held)
    assert code == 0 and "float8_e4m3fn" in said
    code, _, said = ask("resize", held, "--rank", 6, "--output", out)
    assert code == 2 and "choose --dtype bf16" in said and not out.exists()
    assert ask("resize", held, "--rank", 6, "--dtype", "fp32", "--output", out)[0] == 0
    assert rel(deltas(out)["lora_unet_a"], deltas(held)["lora_unet_a"]) < 1e-5


def test_what_others_wrote_is_told_on_a_line(ask: Callable, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    save_file(load_file(file), path, {"ss_base_model_version": "sd_v1", "modelspec.title": "a\nb\x1b[2J\u202e中"})
    assert "modelspec.title = a\\nb\\x1b[2J\\u202e中\n" in ask("inspect", path)[1]


def test_sizes_and_files_that_mean_nothing(ask: Callable, file: Path, tmp_path: Path) -> None:
    loha = tmp_path / "loha.safetensors"
    save_file({"lora_unet_a.hada_w1_a": torch.ones(2, 2)}, loha)
    zero = tmp_path / "zero.safetensors"
    save_file({name: tensor * name.endswith("alpha") for name, tensor in load_file(file).items()}, zero)
    for arguments, words in {
        (file,): "the target size is missing",
        (file, "--rank", -1): "at least 1",
        (file, "--energy", 1.5): "between 0 and 1",
        (file, "--rank", 2, "--dtype", "fp8"): "bf16, fp16, fp32",
        (loha, "--rank", 2): "hada_w1_a",
        (zero, "--rank", 2): "nothing to keep",
        (tmp_path / "absent.safetensors", "--rank", 2): "no such file",
    }.items():
        code, _, said = ask("resize", *arguments)
        assert code == 2 and words in said and said.count("\n") == 1, (arguments, said)


# ---------------------------------------------------------------------------------------------------------------- merge


def test_merged_loras_are_the_weighted_sum(ask: Callable, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    layers = {"lora_unet_a": (24, 40), "lora_te1_conv": (16, 8, 3, 3), "lora_unet_only": (8, 8)}
    save_file(as_kohya(lora_for(layers, rank=4, seed=100), 8.0), other, {"ss_base_model_version": "sd_v1", "x": "y"})
    out = tmp_path / "both.safetensors"
    code, _, said = ask("merge", f"{file}:0.7", f"{other}:-0.5", "--output", out)
    assert code == 0, said
    one, two, both = deltas(file), deltas(other), deltas(out)
    assert both.keys() == one.keys() | two.keys()
    for module, delta in both.items():
        wanted = 0.7 * one.get(module, 0 * delta) - 0.5 * two.get(module, 0 * delta)
        assert rel(delta, wanted) < 1e-6, module
    assert ranks(out)["lora_unet_a.lora_down.weight"] == RANK + 4
    with safe_open(out, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["ss_base_model_version"] == "sd_v1" and "x" not in metadata
    assert metadata["modelspec.merged_from"] == "lora.safetensors:0.7, other.safetensors:-0.5"

    small = tmp_path / "small.safetensors"
    assert ask("merge", f"{file}:0.7", f"{other}:-0.5", "--rank", 3, "--dtype", "fp32", "--output", small)[0] == 0
    u, s, v = torch.linalg.svd(both["lora_unet_a"], full_matrices=False)
    assert rel(deltas(small)["lora_unet_a"], u[:, :3] * s[:3] @ v[:3]) < 1e-5


def test_loras_that_do_not_go_together(ask: Callable, file: Path, tmp_path: Path) -> None:
    peft, wide, out = (tmp_path / f"{name}.safetensors" for name in ("peft", "wide", "out"))
    save_file(lora_for({"unet.a": (24, 40)}), peft)
    save_file(as_kohya(lora_for({"lora_unet_a": (48, 40)}), 1.0), wide)
    other = tmp_path / "other.safetensors"  # in one layout with the first, without a layer in common
    save_file(as_kohya(lora_for({"lora_unet_double": (48, 40)}), 1.0), other, {"ss_base_model_version": "flux1"})
    for arguments, words in {
        (file,): "at least two LoRA files",
        (file, peft): "files with the same layout",
        (file, wide): "different architectures",
        (file, other): (
            "lora.safetensors is for Stable Diffusion 1.5, but other.safetensors is for FLUX.1: only LoRAs of one"
        ),
        (f"{file}:nan", wide): "finite number",
        (f"{file}:x", wide): f"{file}:x: the weight is not a finite number other than 0; write it as in {file}:0.7",
        (f"{file}2:x", wide): "no such file",
        (file, wide, "--family", "sd15"): "--into BASE",
    }.items():
        code, _, said = ask("merge", *arguments, "--output", out)
        assert code == 2 and words in said and not out.exists(), (arguments, said)


def denoiser_layers(family: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """The weights' shapes of the layers that get an adapter."""
    cls = families.get(family)
    made = cls(Model(family=family, path=str(folder)), device="cpu", dtype=torch.float32).make_empty_denoiser()
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    return {name: shapes[f"{name}.weight"] for name in cls.choose_adapter_layers(made)}


def diffusers_lora(family: str, folder: Path, path: Path, uneven: bool = False) -> Path:
    """A file in diffusers' layout for a miniature; uneven: half of the layers need more of their rank."""
    cls = families.get(family)
    state = lora_for(denoiser_layers(family, folder))
    if uneven:
        for name in sorted(name for name in state if name.endswith("B.weight"))[::2]:
            state[name] *= 2.0 ** torch.arange(RANK).reshape(1, RANK, *(1 for _ in state[name].shape[2:]))
    save_file(
        {f"{cls.denoiser_name}.{name}": tensor for name, tensor in state.items()},
        path,
        {"ss_base_model_version": cls.kohya_base_version},
    )
    return path


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_merged_into_a_folder_as_diffusers_fuses_it(
    ask: Callable, tiny: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    base, cls = tiny(family), families.get(family)
    lora = diffusers_lora(family, base, tmp_path / "lora.safetensors")
    out = tmp_path / "merged"
    code, said, wrong = ask("merge", f"{lora}:0.7", "--into", base, "--output", out)
    assert code == 0, wrong
    pipe = getattr(diffusers, cls.pipeline_class).from_pretrained(base)
    untouched = {k: v.clone() for k, v in getattr(pipe, cls.denoiser_name).state_dict().items()}
    pipe.load_lora_weights(str(tmp_path), weight_name=lora.name)
    pipe.fuse_lora(lora_scale=0.7)
    pipe.unload_lora_weights()
    fused = getattr(pipe, cls.denoiser_name).state_dict()
    merged = getattr(getattr(diffusers, cls.pipeline_class).from_pretrained(out), cls.denoiser_name).state_dict()
    assert merged.keys() == fused.keys()
    for name, tensor in fused.items():
        assert torch.allclose(merged[name], tensor, rtol=1e-5, atol=1e-6), name
    changed = {name for name in merged if not torch.equal(merged[name], untouched[name])}
    assert len(changed) == len(denoiser_layers(family, base)) and f"{len(changed)} layers changed" in said


def test_shards_stay_and_bf16_is_rounded_once(ask: Callable, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(tiny("sd15"))
    pipe.unet.to(torch.bfloat16)
    pipe.save_pretrained(base, max_shard_size="200KB")
    lora = diffusers_lora("sd15", base, tmp_path / "lora.safetensors")
    out = tmp_path / "merged"
    assert ask("merge", lora, "--into", base, "--output", out)[0] == 0
    shards = sorted(path.name for path in (base / "unet").glob("*.safetensors"))
    assert len(shards) > 2 and sorted(path.name for path in (out / "unet").glob("*.safetensors")) == shards
    before, after = ({}, {})
    for name in shards:
        before |= load_file(base / "unet" / name)
        after |= load_file(out / "unet" / name)
    gains = {f"{module.removeprefix('unet.')}.weight": delta for module, delta in deltas(lora).items()}
    for name, tensor in before.items():
        if name not in gains:
            assert torch.equal(after[name], tensor), name
            continue
        exact = tensor.double() + gains[name].reshape(tensor.shape)
        assert after[name].dtype == torch.bfloat16
        # half a step of bf16's last bit is up to 2^-8 of the value; a delta rounded before it is added would be further
        assert ((after[name].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-7).all(), name


def test_merged_into_a_single_file_in_its_own_names(ask: Callable, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """FLUX's original names, where q, k and v are rows of one tensor; read back through the family's own reading."""
    base = Path(shutil.copytree(tiny("flux"), tmp_path / "base"))
    checkpoint = tmp_path / "flux.safetensors"
    save_file(original_layout(families.get("flux"), base), checkpoint)  # which changes the weights of `base`
    family = families.get("flux")(Model(family="flux", path=str(base)), device="cpu", dtype=torch.float32)
    lora = diffusers_lora("flux", base, tmp_path / "lora.safetensors")
    out = tmp_path / "merged.safetensors"
    code, _, said = ask("merge", lora, "--into", checkpoint, "--components", base, "--output", out)
    assert code == 0, said
    model = Model(family="flux", path=str(out), components=str(base))
    after = dict(families.get("flux")(model, device="cpu", dtype=torch.float32).read_denoiser_tensors())
    gains = {f"{module.removeprefix('transformer.')}.weight": delta for module, delta in deltas(lora).items()}
    for name, tensor in family.read_denoiser_tensors():
        wanted = tensor.double() + gains.get(name, torch.zeros(())).reshape(tensor.shape if name in gains else ())
        assert torch.allclose(after[name].double(), wanted, atol=1e-6), name


def test_a_full_disk_leaves_no_half_of_a_model(
    ask: Callable, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = diffusers_lora("sd15", tiny("sd15"), tmp_path / "lora.safetensors")

    out = tmp_path / "merged"

    def full(*_: object) -> None:
        assert not out.exists(), "whoever is killed here leaves a folder that looks like a model"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(merge.system, "replace", full)
        code, _, said = ask("merge", lora, "--into", tiny("sd15"), "--output", out)
    assert code == 2 and "No space left on device" in said
    assert [path.name for path in tmp_path.iterdir()] == [lora.name]
    assert ask("merge", lora, "--into", tiny("sd15"), "--output", out)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [lora.name, "merged"]


def test_bases_that_cannot_take_a_lora(ask: Callable, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    lora = diffusers_lora("sd15", tiny("sd15"), tmp_path / "lora.safetensors")
    out = tmp_path / "merged"
    quantized = tmp_path / "quantized"
    diffusers.StableDiffusionPipeline.from_pretrained(tiny("sd15")).save_pretrained(quantized)
    (weights,) = _files.find_weight_files(quantized / "unet", "diffusion_pytorch_model")
    held = load_file(weights)
    save_file({n: t.to(torch.float8_e4m3fn) if "to_q" in n else t for n, t in held.items()}, weights)
    code, _, said = ask("merge", lora, "--into", quantized, "--output", out)
    assert code == 2 and "F8_E4M3" in said and "bf16, fp16 or fp32" in said
    code, _, said = ask("merge", lora, "--into", tiny("sdxl"), "--family", "sdxl", "--output", out)
    assert code == 2 and "for another model" in said, said
    code, _, said = ask("merge", lora, "--into", tiny("sdxl"), "--output", out)
    assert code == 2 and "model.family = 'sd15'" in said, said
    assert not out.exists()


# -------------------------------------------------------------------------------------------------------------- extract


def shifted(tiny: Callable[[str], Path], family: str, folder: Path, gains: dict[str, torch.Tensor]) -> Path:
    """A miniature with these added to its denoiser's weights, saved by diffusers."""
    cls = families.get(family)
    pipe = getattr(diffusers, cls.pipeline_class).from_pretrained(tiny(family))
    state = getattr(pipe, cls.denoiser_name).state_dict()
    for name, gain in gains.items():
        state[name] += gain.reshape(state[name].shape).float()
    pipe.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "layout"), [("sd15", "kohya"), ("flux", "diffusers"), ("ernie_image", "comfy")])
def test_extracted_is_the_lora_that_was_added(
    ask: Callable, tiny: Callable[[str], Path], tmp_path: Path, family: str, layout: str
) -> None:
    base, prefix = tiny(family), families.get(family).denoiser_name
    lora = diffusers_lora(family, base, tmp_path / "lora.safetensors")
    added = {f"{module.removeprefix(f'{prefix}.')}.weight": delta for module, delta in deltas(lora).items()}
    tuned = shifted(tiny, family, tmp_path / "tuned", added)
    out = tmp_path / "found.safetensors"
    ways = ("--family", family, "--rank", RANK, "--dtype", "fp32", "--layout", layout, "--output", out)
    code, said, wrong = ask("extract", base, tuned, *ways, "--json")
    assert code == 0, wrong
    cls = families.get(family)
    denoiser = cls(Model(family=family, path=str(base)), device="cpu", dtype=torch.float32).read_denoiser_config()
    state, scaling = layouts.from_layout(load_file(out), cls, denoiser)
    found = {n.removesuffix(".lora_A.weight") for n in state if n.endswith("A.weight")}
    assert {f"{name}.weight" for name in found} == added.keys()
    for name in found:
        a, b = state[f"{name}.lora_A.weight"].flatten(1), state[f"{name}.lora_B.weight"].flatten(1)
        assert rel(b @ a * scaling[name], added[f"{name}.weight"]) < 1e-3, name
    told = json.loads(said)
    assert told["left_out"] == [] and all(row["kept"] > 1 - 1e-6 for row in told["layers"])
    assert "of" in wrong and f"{len(found)} of" in wrong  # progress, a line for each layer
    assert verify.check_file(out).ok  # the header is whole, and says the architecture
    with safe_open(out, "pt") as opened:
        whose = {"sd15": "diffusers", "flux": "diffusers", "ernie_image": "https://github.com/comfyanonymous/ComfyUI"}
        assert opened.metadata()["modelspec.implementation"] == whose[family]


def test_what_differs_and_is_not_extracted_is_told(ask: Callable, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    added = {"conv_in.weight": random(32, 4, 3, 3, seed=1), "conv_in.bias": random(32, seed=2)}
    query = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"
    added[query] = random(32, 32, seed=3)
    tuned = shifted(tiny, "sd15", tmp_path / "tuned", added)
    one, every = tmp_path / "one.safetensors", tmp_path / "every.safetensors"
    ways = ("--family", "sd15", "--energy", "0.9", "--json")
    code, said, _ = ask("extract", tiny("sd15"), tuned, *ways, "--output", one)
    told = json.loads(said)
    assert code == 0 and told["left_out"] == ["conv_in.bias", "conv_in.weight"]
    sizes = {name: float(gain.square().sum()) for name, gain in added.items()}
    assert told["outside"] == pytest.approx(1 - sizes[query] / sum(sizes.values()), rel=1e-3)
    shares = torch.linalg.svdvals(added[query]).square()
    assert told["layers"][0]["rank"] == int((shares.cumsum(0) / shares.sum() < 0.9).sum()) + 1
    code, said, _ = ask("extract", tiny("sd15"), tuned, *ways, "--layers", "all", "--output", every)
    assert code == 0 and json.loads(said)["left_out"] == ["conv_in.bias"]


def test_a_large_difference_by_the_randomised_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same singular values as the dense SVD, and the share kept is of the whole, not of what was looked at."""
    monkeypatch.setattr(extract, "EXACT", 64)
    fall = torch.diag(0.8 ** torch.arange(200.0))
    matrix = torch.linalg.qr(random(300, 200, seed=1))[0] @ fall @ torch.linalg.qr(random(200, 200, seed=2))[0]
    before = torch.get_rng_state()
    found = extract.compute_spectrum(matrix, 8)
    assert len(found.values) == 16 and torch.equal(torch.get_rng_state(), before)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    pair = found.make_pair(8)
    error, best = (matrix - pair.compute_delta()).norm(), s[8:].norm()
    assert error < 1.01 * best
    assert (
        found.find_rank(0.5, float(matrix.square().sum()))
        == int((s.square().cumsum(0) / s.square().sum() < 0.5).sum()) + 1
    )


def test_models_that_cannot_be_compared(ask: Callable, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(tiny("sd15"))
    pipe.unet = diffusers.UNet2DConditionModel.from_config({**pipe.unet.config, "block_out_channels": (64, 64)})
    pipe.save_pretrained(wide)
    query = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"
    broken = shifted(tiny, "sd15", tmp_path / "broken", {query: torch.full((32, 32), torch.nan)})
    out = tmp_path / "out.safetensors"
    for other, more, words in (
        (wide, ("--rank", 4), "different architectures"),
        (broken, ("--rank", 4), "NaN or infinity"),
        (tiny("sdxl"), ("--rank", 4), "model.family = 'sd15'"),
        (tiny("sd15"), ("--rank", 4), "nothing to extract"),
        (tiny("sd15"), (), "the target size is missing"),
        (tiny("sd15"), ("--rank", 4, "--layers", "nowhere"), "'nowhere'"),
    ):
        code, _, said = ask("extract", tiny("sd15"), other, "--family", "sd15", *more, "--output", out)
        assert code == 2 and words in said and not out.exists(), (words, said)


# -------------------------------------------------------------------------------------------------------------- average


def test_the_two_averages_of_files(ask: Callable, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for i, path in enumerate(paths):
        save_file(as_kohya(lora_for(LAYERS, seed=50 * i), 3.0), path, {"ss_base_model_version": "sd_v1", "i": str(i)})
    whole, factors, half = (tmp_path / f"{name}.safetensors" for name in ("whole", "factors", "half"))
    assert (
        ask("average", *paths, "--average", "delta", "--rank", 3 * RANK, "--dtype", "fp32", "--output", whole)[0] == 0
    )
    assert ask("average", *paths, "--output", factors)[0] == 0
    assert ask("average", *paths, "--average", "delta", "--half-life", 1, "--dtype", "fp32", "--output", half)[0] == 0
    mean = {name: sum(deltas(path)[name] for path in paths) / 3 for name in deltas(paths[0])}
    later = {
        name: sum(share * deltas(path)[name] for path, share in zip(paths, (1 / 7, 2 / 7, 4 / 7), strict=True))
        for name in mean
    }
    held = [load_file(path) for path in paths]
    for name, delta in mean.items():
        assert rel(deltas(whole)[name], delta) < 1e-6, name
        u, s, v = torch.linalg.svd(later[name], full_matrices=False)
        assert rel(deltas(half)[name], u[:, :RANK] * s[:RANK] @ v[:RANK]) < 1e-5, name  # the files' rank
        a = sum(one[f"{name}.lora_down.weight"].flatten(1).double() for one in held) / 3
        b = sum(one[f"{name}.lora_up.weight"].flatten(1).double() for one in held) / 3
        assert rel(deltas(factors)[name], b @ a * 3.0 / RANK) < 1e-6, name
        assert rel(deltas(factors)[name], delta) > 0.1  # another thing, which is why both are offered


def test_files_that_cannot_be_averaged(ask: Callable, file: Path, tmp_path: Path) -> None:
    other, rank = tmp_path / "other.safetensors", tmp_path / "rank.safetensors"
    save_file(as_kohya(lora_for({"lora_unet_a": (24, 40)}), 3.0), other)
    save_file(as_kohya(lora_for(LAYERS, rank=2), 3.0), rank)
    out = tmp_path / "out.safetensors"
    for arguments, words in {
        (file, other, "--output", out): "not all files have this layer",
        (file, rank, "--output", out): "--average delta",
        (file, file, "--output", out, "--half-life", -1): "--half-life",
        (file, file, "--output", out, "--average", "mean"): "factors, delta",
        (file, file, "--output", out, "--rank", 2): "--average delta",
        (file, file): "--output",
        (tmp_path,): "not a run folder",
    }.items():
        code, _, said = ask("average", *arguments)
        assert code == 2 and words in said and not out.exists(), (words, said)


def test_the_average_of_a_run_is_a_file_of_the_run(ask: Callable, job: Callable, tmp_path: Path) -> None:
    path, folder = tmp_path / "job.toml", tmp_path / "runs" / "lora"
    settings = (
        "preview.prompts=[]",
        "checkpoint.keep=2",
        "export.formats=['kohya']",
        "export.dtype=fp32",
        "adapter.alpha=2.0",
    )
    path.write_text(config.dumps(job(*settings)), encoding="utf-8")
    assert ask("train", path)[0] == 0
    code, said, wrong = ask("average", folder, "--half-life", 2)
    assert code == 0 and "33.33%  step 4" in said and "66.67%  step 6" in said, said + wrong
    (written,) = (folder / "export" / "average").iterdir()
    assert ask("export", folder, "--step", 4)[0] == 0
    (four,), (six,) = ((folder / "export" / "step-000004").iterdir(), (folder / "export").glob("*.safetensors"))
    one, two, mean = load_file(four), load_file(six), load_file(written)
    assert mean.keys() == two.keys()
    for name, tensor in mean.items():
        assert torch.allclose(tensor, one[name] / 3 + two[name] * 2 / 3, rtol=1e-5, atol=1e-8), name
    both = {name: deltas(four)[name] / 3 + deltas(six)[name] * 2 / 3 for name in deltas(six)}
    assert ask("average", folder, "--half-life", 2, "--average", "delta")[0] == 0  # the nearest pair of the run's rank
    for name, delta in both.items():
        u, s, v = torch.linalg.svd(delta, full_matrices=False)
        assert rel(deltas(written)[name], u[:, :4] * s[:4] @ v[:4]) < 1e-4, name
    assert verify.check_file(written).ok
    code, _, said = ask("average", folder, "--last", 1)
    assert code == 2 and "checkpoint.keep" in said
