"""DoRA, LoKr and LoHa in runs, tools and imports: resume, processes, average, merge, convert, other programs."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from waiting import LONG_SECONDS

from lora_fp8 import config, families, importing, train
from lora_fp8.adapters import kinds
from lora_fp8.errors import UserError
from lora_fp8.lora_files import layouts, safetensors_file
from lora_fp8.plan import estimate
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Adapter
from lora_fp8.tools import average, files, merge, pairs
from lora_fp8.tools import resize as resize_tool
from lora_fp8.training import checkpoint

ROOT = Path(__file__).parent.parent
KINDS = ("dora", "lokr", "loha")
SMALL = ("adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']", "optimizer.lr=1e-2", "adapter.factor=4")


def folder_of(job):
    return Path(job.output_dir) / job.name


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_the_same_to_the_bit(make_job, tmp_path, kind):
    settings = (f"adapter.type={kind}", *SMALL, "adapter.dropout=0.2", "export.formats=['auto']")
    settings += ("memory.gradient_checkpointing=true", "adapter.rank=2")
    whole = train.run(make_job(tmp_path / "a", *settings, "train.steps=4"), progress=False)
    train.run(make_job(tmp_path / "b", *settings, "train.steps=2"), progress=False)
    pieces = train.run(make_job(tmp_path / "b", *settings, "train.steps=4"), progress=False, resume=True)
    one, other = (load_file(result.files[0]) for result in (whole, pieces))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    saved = [load_file(r.run.path / "checkpoints/step-000004/optimizer.safetensors") for r in (whole, pieces)]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    wrong = make_job(tmp_path / "b", *settings, "train.steps=6", f"adapter.type={'loha' if kind != 'loha' else 'dora'}")
    with pytest.raises(UserError, match=f"adapter.type: was {kind}"):
        train.run(wrong, progress=False, resume=True)


def test_ranks_by_layer_reach_every_layout(make_job, tmp_path):
    """Of a model whose q, k and v are one layer in kohya's files; diffusers' loader is the judge."""
    Family = families.get("flux")
    ranked = ("adapter.rank=4", "adapter.alpha=8.0", "adapter.ranks={'attn.to_q' = 8, 'single_transformer_blocks' = 2}")
    settings = (f"export.formats={list(Family.layouts)}", "export.verify=true", "train.steps=2", "optimizer.lr=1e-2")
    job = make_job(tmp_path, *ranked, *settings, family="flux")
    result = train.run(job, progress=False)
    assert len(result.reports) == len(result.files) == len(Family.layouts) and all(one.ok for one in result.reports)
    held = checkpoint.read_latest(result.run.checkpoints)[0].adapter
    sizes = {kinds.read_rank(parts) for parts in kinds.group_by_layer(held).values()}
    assert sizes == {2, 4, 8}
    assert estimate.estimate(planning.make(job)).adapter_bytes == sum(tensor.nbytes for tensor in held.values())
    kohya = load_file(next(path for path in result.files if "kohya" in path.name))
    fused = "lora_unet_double_blocks_0_img_attn_qkv"
    assert kohya[f"{fused}.lora_down.weight"].shape[0] == kohya[f"{fused}.alpha"] / 2 == 8 + 4 + 4

    def begun(*more):
        given = make_job(tmp_path / "next", *more, f"adapter.init_from='{result.files[0]}'", family="flux")
        return planning.make(given).start

    for layer, parts in kinds.group_by_layer(begun(*ranked)).items():
        ours = kinds.compute_delta(kinds.group_by_layer(held)[layer], 2.0)
        torch.testing.assert_close(kinds.compute_delta(parts, 2.0), ours, rtol=2e-2, atol=1e-3)
    with pytest.raises(UserError, match=".*attn.to_q has rank 8, .* give 2; 4 layers"):
        begun("adapter.rank=4", "adapter.ranks={'single_transformer_blocks' = 2}")
    with pytest.raises(UserError, match="the file has rank 2, 8, but adapter.rank is 4"):
        begun("adapter.rank=4")
    wrong = make_job(tmp_path / "third", "adapter.ranks={'attn.to_w' = 8}", family="flux")
    with pytest.raises(UserError, match="adapter.ranks: 'attn.to_w' matches no"):
        train.run(wrong, progress=False)
    assert not folder_of(wrong).exists()  # found before anything is made


def test_layers_of_rank_0_are_in_no_file_and_the_file_goes_on(make_job, tmp_path):
    """One of q, k and v, which are one layer in kohya's files, and a whole block."""
    Family = families.get("flux")
    ranked = ("adapter.rank=4", "adapter.ranks={'attn.to_q' = 0, '^single_transformer_blocks.1' = 0}")
    settings = (f"export.formats={list(Family.layouts)}", "export.verify=true", "train.steps=2", "optimizer.lr=1e-2")
    rates = ("optimizer.lrs={'attn.to_k' = 0.5}", "optimizer.loraplus_lr_ratio=2.0")
    job = make_job(tmp_path, *ranked, *settings, *rates, family="flux")
    result = train.run(job, progress=False)
    assert len(result.reports) == len(Family.layouts) and all(one.ok for one in result.reports)
    family = Family(job.model, device="cpu", dtype=torch.bfloat16)
    every = family.choose_adapter_layers(family.make_empty_denoiser())
    left_out = [n for n in every if n.endswith("attn.to_q") or n.startswith("single_transformer_blocks.1.")]
    held = kinds.group_by_layer(checkpoint.read_latest(result.run.checkpoints)[0].adapter)
    assert left_out and set(held) == set(every) - set(left_out)
    assert estimate.estimate(planning.make(job)).adapter_bytes == sum(
        t.nbytes for parts in held.values() for t in parts.values()
    )
    for path in result.files:
        given = make_job(tmp_path / "next", *ranked, f"adapter.init_from='{path}'", family="flux")
        assert set(kinds.group_by_layer(planning.make(given).start)) == set(held)
    wrong = make_job(tmp_path / "third", "optimizer.lrs={'attn.to_w' = 2}", family="flux")
    with pytest.raises(UserError, match="optimizer.lrs: 'attn.to_w' matches no"):
        train.run(wrong, progress=False)
    assert not folder_of(wrong).exists()


@pytest.mark.parametrize(
    "more",
    [
        ("optimizer.name=adamw",),
        ("optimizer.name=came", "optimizer.ema_decay=0.5", "objective.even_timesteps=true", "objective.timesteps=mode"),
    ],
    ids=["adamw", "came"],
)
def test_two_processes_train_what_one_trains(make_job, tmp_path, more):
    """DoRA, whose parameters are of two dtypes' sizes and of one dimension; with CAME, by matrices."""
    settings = ("adapter.type=dora", *SMALL, "train.steps=2", "train.batch_size=2", "export.formats=['diffusers']")
    settings += ("model.dtype=fp32", "quantize.storage=none", "adapter.dtype=fp32", *more)
    alone = train.run(make_job(tmp_path / "a", *settings), progress=False)
    shared = make_job(tmp_path / "b", *settings)
    file = tmp_path / "job.toml"
    file.write_text(config.dumps(shared), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    command += ["--main_process_port", str(port), "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", str(ROOT / "train_lora.py"), "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (
        load_file(folder / "checkpoints/step-000002/adapter.safetensors")
        for folder in (alone.run.path, folder_of(shared))
    )
    assert one.keys() == two.keys() and any("magnitude" in name for name in one)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def runs(make_job, tmp_path_factory):
    """{kind: a finished run with two checkpoints}."""
    made = {}

    def run_of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            job = make_job(folder, f"adapter.type={kind}", *SMALL, "export.formats=['auto']", "train.steps=4")
            made[kind] = train.run(job, progress=False)
        return made[kind]

    return run_of


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_of_checkpoints_is_that_of_their_parameters(runs, kind):
    result = runs(kind)
    shares, (written,) = average.average_run(result.run.path, what="factors", half_life=0.0, last=2)
    held = [checkpoint.read(path).adapter for path in sorted(result.run.checkpoints.glob("step-*"))[-2:]]
    assert list(shares.values()) == [0.5, 0.5]
    tensors = load_file(written)
    family = families.get("sd15")
    state, _ = layouts.from_layout(tensors, family, {})
    for name, tensor in state.items():
        wanted = (held[0][name].double() + held[1][name].double()) / 2
        torch.testing.assert_close(tensor.double(), wanted.reshape(tensor.shape), rtol=2**-7, atol=1e-6)
    with pytest.raises(UserError, match="--average delta: the average of .* use --average factors"):
        average.average_run(result.run.path, what="delta", half_life=0.0, last=2)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_into_a_base_is_base_and_delta(runs, tiny, tmp_path, kind):
    """By the formulas in float64; of DoRA the rows have the lengths that were trained."""
    file = runs(kind).files[0]
    merge.merge_into_base([(file, 1.0)], str(tiny("sd15")), tmp_path / "merged")
    part = "unet/diffusion_pytorch_model.safetensors"
    before, after = load_file(tiny("sd15") / part), load_file(tmp_path / "merged" / part)
    state, scaling = layouts.from_layout(load_file(file), families.get("sd15"), {})
    layers = kinds.group_by_layer(state)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {f"{n}.weight" for n in layers}
    for module, parts in layers.items():
        weight = before[f"{module}.weight"].double()
        held = {name: tensor.double() for name, tensor in parts.items()}
        if kind == "dora":
            total = weight + held["lora_B.weight"] @ held["lora_A.weight"] * scaling[module]
            wanted = total * (held["lora_magnitude_vector"] / total.norm(dim=1))[:, None]
        elif kind == "loha":
            product = (held["hada_w1_a"] @ held["hada_w1_b"]) * (held["hada_w2_a"] @ held["hada_w2_b"])
            wanted = weight + product * scaling[module]
        else:
            w2 = held["lokr_w2"] if "lokr_w2" in held else held["lokr_w2_a"] @ held["lokr_w2_b"]
            wanted = weight + torch.kron(held["lokr_w1"], w2) * scaling[module]
        got = after[f"{module}.weight"]
        assert got.dtype == before[f"{module}.weight"].dtype
        tolerance = 2**-8 if got.dtype == torch.bfloat16 else 2**-10 if got.dtype == torch.float16 else 1e-6
        assert (got.double() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_tells_the_kind_and_the_other_tools_refuse_it(runs, tmp_path, kind):
    file = runs(kind).files[0]
    about = files.inspect(file)
    assert about.kind == kind and "sd15" in about.families and about.hashes["header"] is True
    assert about.layout == ("diffusers" if kind == "dora" else "kohya")
    title = {"dora": "DoRA", "lokr": "LoKr", "loha": "LoHa"}[kind]
    assert f"{title} of {len(about.norms)} layers" in about.format_lines()[0]
    state, scaling = layouts.from_layout(load_file(file), families.get("sd15"), {})
    norms = [
        float(kinds.compute_delta(parts, scaling[name], torch.float64).norm())
        for name, parts in kinds.group_by_layer(state).items()
    ]
    assert sorted(about.norms.values()) == pytest.approx(sorted(norms), rel=1e-4)
    for refused in (
        lambda: pairs.read(file),
        lambda: resize_tool.resize(file, tmp_path / "x.safetensors", rank=2, energy=0.0, uniform=False, dtype=""),
        lambda: merge.merge([(file, 1.0), (file, 1.0)], tmp_path / "x.safetensors", rank=0, energy=0.0, dtype=""),
    ):
        with pytest.raises(UserError, match=r"not a LoRA with pairs|does not belong to a plain LoRA") as error:
            refused()
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="does not support|no comfy layout"):
        files.convert(file, tmp_path / "x.safetensors", "kohya" if kind == "dora" else "diffusers", family="sd15")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_converted_to_another_layout_and_back(tmp_path, kind):
    """Krea 2's layers stand alone in both of ComfyUI's and kohya's names."""
    Family = families.get("krea2")
    module, (rows, columns) = "transformer_blocks.3.attn.to_q", (64, 32)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    if kind == "lokr":
        parts = {"lokr_w1": draw(4, 4), "lokr_w2_a": draw(rows // 4, 2), "lokr_w2_b": draw(2, columns // 4)}
    else:
        parts = {f"hada_w{i}_{h}": draw(rows, 2) if h == "a" else draw(2, columns) for i in "12" for h in "ab"}
    state = {f"{module}.{part}": tensor for part, tensor in parts.items()}
    source = tmp_path / "a.safetensors"
    made = layouts.to_layout(state, 0.5, Family, Family.reference_config, "comfy")
    safetensors_file.write_file(source, made, {"ss_network_alpha": "1.0"}, hashes=True)
    assert files.convert(source, tmp_path / "b.safetensors", "kohya", family="krea2") == 1
    assert files.convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "comfy", family="krea2") == 1
    there, back = (load_file(tmp_path / f"{name}.safetensors") for name in "bc")
    assert all(name.startswith("lora_unet_blocks_3_attn_wq.") for name in there)
    assert back.keys() == made.keys() and all(torch.equal(back[name], made[name]) for name in made)
    header = safetensors_file.read_header(tmp_path / "b.safetensors").metadata
    assert header["ss_network_alpha"] == "1.0" and header["lora_fp8_layout"] == "kohya"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "a.toml",
            "network_module = 'lycoris.kohya'\nnetwork_dim = 100000\nnetwork_alpha = 1\n"
            "network_args = ['algo=lokr', 'factor=16', 'decompose_both=True']\n",
            {"type": "lokr", "rank": 1024, "factor": 16, "decompose_both": True},
        ),
        (
            "b.toml",
            "network_module = 'lycoris.kohya'\nnetwork_dim = 8\nnetwork_args = ['algo=lokr']\n",
            {"type": "lokr", "rank": 8, "factor": 0},
        ),
        (
            "c.toml",
            "network_module = 'lycoris.kohya'\nnetwork_dim = 8\nnetwork_args = ['algo=loha']\n",
            {"type": "loha", "rank": 8},
        ),
        (
            "d.toml",
            "network_module = 'lycoris.kohya'\nnetwork_dim = 8\nnetwork_args = ['algo=locon', 'dora_wd=True']\n",
            {"type": "dora", "rank": 8},
        ),
    ],
)
def test_kohyas_lycoris_is_ours(tmp_path, name, content, expected):
    base = "pretrained_model_name_or_path = 'v1-5.safetensors'\ntrain_data_dir = 'p'\n"
    (tmp_path / name).write_text(base + content, encoding="utf-8")
    made = importing.import_file(tmp_path / name, family="sd15", tool="sd-scripts")
    found = config.loads(importing.to_toml(made)).adapter
    assert {key: getattr(found, key) for key in expected} == expected


def test_ai_toolkits_lokr_is_ours(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n      network:\n        type: lokr\n"
        "        linear: 16\n        linear_alpha: 16\n        lokr_full_rank: true\n        lokr_factor: 4\n"
        "      datasets:\n        - folder_path: p\n      train:\n        steps: 10\n        lr: 1e-4\n"
        "      model:\n        name_or_path: black-forest-labs/FLUX.1-dev\n        arch: flux\n",
        encoding="utf-8",
    )
    made = importing.import_file(tmp_path / "a.yaml")
    found = config.loads(importing.to_toml(made)).adapter
    assert (found.type, found.rank, found.factor) == ("lokr", 1024, 4)


ONETRAINER = {  # TrainConfig's defaults of version 12, as it writes them into every file
    "__version": 12, "training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "x",
    "lora_rank": 16, "lora_alpha": 1.0, "lora_decompose": False, "lora_decompose_norm_epsilon": True,
    "lora_decompose_output_axis": False, "lokr_dim": 16, "lokr_decompose_both": False, "lokr_decompose_factor": -1,
    "lokr_use_tucker": False, "lokr_weight_decompose": False, "lokr_dora_on_output": True, "lokr_full_matrix": False,
    "lokr_vec_trick": True,
}  # fmt: skip
AI_TOOLKIT = """job: extension
config:
  name: x
  process:
    - type: sd_trainer
      datasets: [{folder_path: p}]
      train: {steps: 10, lr: 1e-4}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, arch: flux}
      network:
"""
SIMPLETUNER = {"model_family": "flux", "model_type": "lora", "lora_type": "lycoris", "max_train_steps": 10}
SIMPLETUNER |= {"lycoris_config": "config/lycoris_config.json", "validation_lycoris_strength": 1.0}
LYCORIS = {  # documentation/LYCORIS.md
    "algo": "lokr", "multiplier": 1.0, "linear_dim": 10000, "linear_alpha": 1, "factor": 10,
    "apply_preset": {"target_module": ["Attention", "FeedForward"],
                     "module_algo_map": {"Attention": {"factor": 10}, "FeedForward": {"factor": 4}}},
}  # fmt: skip
DIFFUSION_PIPE = "output_dir = '/d'\ndataset = 'd.toml'\nepochs = 10\nmicro_batch_size_per_gpu = 1\n"
DIFFUSION_PIPE += "pipeline_stages = 1\n[model]\ntype = 'flux'\ndiffusers_path = '/f'\n[adapter]\ndtype = 'bfloat16'\n"
OTHERS = [  # name of the file, its content, another file beside it, ours, words of the report
    ("a.json", ONETRAINER | {"peft_type": "LOKR"}, None, {"type": "lokr", "rank": 16, "alpha": 1.0, "factor": 0}, ()),
    (
        "a.json",
        ONETRAINER | {"peft_type": "LOKR", "lokr_full_matrix": True, "lokr_decompose_factor": 8, "lora_rank": 4},
        None,
        {"type": "lokr", "rank": 1024, "factor": 8, "decompose_both": False},
        ("lora_rank, lokr_use_tucker",),
    ),
    (
        "a.json",
        ONETRAINER | {"peft_type": "LOKR", "lokr_weight_decompose": True, "lokr_decompose_both": True},
        None,
        {"type": "lokr", "decompose_both": True},
        ("lokr_weight_decompose", "LoKr does not have this setting"),
    ),
    ("a.json", ONETRAINER | {"peft_type": "LOHA"}, None, {"type": "loha", "rank": 16, "alpha": 1.0}, ()),
    (
        "a.json",
        ONETRAINER | {"peft_type": "LORA", "lora_decompose": True},
        None,
        {"type": "dora", "rank": 16, "alpha": 1.0},
        (),
    ),
    # Its README.
    ("a.yaml", '        type: "lokr"\n        lokr_full_rank: true\n        lokr_factor: 8\n', None,
     {"type": "lokr", "rank": 1024, "factor": 8}, ()),
    ("a.yaml", '        type: "lokr"\n        linear: 32\n        linear_alpha: 16\n        lokr_factor: -1\n', None,
     {"type": "lokr", "rank": 32, "alpha": 16.0, "factor": 0}, ()),
    # What its page writes for a LoRA, too.
    ("a.yaml", '        type: "lora"\n        linear: 32\n        linear_alpha: 32\n        lokr_full_rank: true\n'
     "        lokr_factor: -1\n", None, {"type": "lora", "rank": 32, "alpha": 32.0},
     ("network.lokr_factor, network.lokr_full_rank",)),
    ("config.json", SIMPLETUNER, LYCORIS, {"type": "lokr", "rank": 1024, "alpha": 1.0, "factor": 10},
     ("not converted: module_algo_map.FeedForward.factor", "one factor")),
    # bypass_mode computes the same in another order
    ("config.json", SIMPLETUNER, {"bypass_mode": True, "algo": "lokr", "multiplier": 1.0, "full_matrix": True,
     "linear_dim": 10000, "linear_alpha": 1, "factor": 4}, {"type": "lokr", "rank": 1024, "factor": 4}, ()),
    ("config.json", SIMPLETUNER, {"algo": "loha", "multiplier": 1.0, "linear_dim": 32, "linear_alpha": 16},
     {"type": "loha", "rank": 32, "alpha": 16.0}, ()),
    ("config.json", SIMPLETUNER, {"algo": "locon", "dora_wd": True, "linear_dim": 32, "linear_alpha": 16},
     {"type": "dora", "rank": 32, "alpha": 16.0}, ()),
    ("config.json", SIMPLETUNER | {"lora_type": "standard", "use_dora": True, "lora_rank": 16}, None,
     {"type": "dora", "rank": 16, "alpha": 16.0}, ()),
    # examples/main_example.toml: a rank that TOML reads as a float
    ("a.toml", "type = 'lokr'\nrank = 1e6\ndecompose_factor = 4\n", None,
     {"type": "lokr", "rank": 1024, "factor": 4}, ()),
    ("a.toml", "type = 'lora'\nrank = 32\n", None, {"type": "lora", "rank": 32, "alpha": 32.0}, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "beside", "expected", "words"), OTHERS, ids=[f"{i} {row[0]}" for i, row in enumerate(OTHERS)]
)
def test_the_others_kinds_are_ours(tmp_path, name, content, beside, expected, words):
    """Values of their documentation and of what their pages write."""
    text = json.dumps(content) if isinstance(content, dict) else content
    text = {"a.yaml": AI_TOOLKIT, "a.toml": DIFFUSION_PIPE}.get(name, "") + text
    (tmp_path / name).write_text(text, encoding="utf-8")
    if beside:
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "lycoris_config.json").write_text(json.dumps(beside), encoding="utf-8")
    made = importing.import_file(tmp_path / name)
    found = Adapter(**tomllib.loads(importing.to_toml(made))["adapter"])
    assert {key: getattr(found, key) for key in expected} == expected
    off = ", ".join(entry.key for entry in made.no_counterpart if entry.off)
    said = "\n".join([*importing.report(made, verbose=True), off])
    assert all(word in said for word in words), said


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_s_file_is_as_large_as_the_file(runs, make_job, tmp_path, kind):
    job = make_job(tmp_path, f"adapter.type={kind}", *SMALL, "export.formats=['auto']", "train.steps=4")
    made = estimate.estimate(planning.make(job))
    (file,) = runs(kind).files
    ((layout, size),) = made.file_bytes.items()
    assert file.name == f"lora_{layout}.safetensors"
    tensors = load_file(file)
    # not counted there: alphas, and that lengths are float32 in a bf16 file
    assert size == pytest.approx(sum(tensor.nbytes for tensor in tensors.values()), rel=0.2)
