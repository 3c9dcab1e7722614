"""Processes that share the frozen base (`memory.shard_base`): real ones, on the CPU through gloo.

The authority is the same job with processes that hold a base each, and with one process.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from test_prequantized import Single, quantized
from test_processes import ENVIRONMENT, FLOAT32, RECORDING, ROOT, folder_of, left_over, losses, noted, run_forked, write
from waiting import LONG_SECONDS

from lora_fp8.errors import UserError
from lora_fp8.plan import estimate, memory_choice
from lora_fp8.plan import plan as planning
from lora_fp8.plan.resolve import make_family
from lora_fp8.plan.training_memory import build_denoiser
from lora_fp8.run import Run
from lora_fp8.training.shared_blocks import count_shared_bytes

# Twenty-one samples of three buckets in batches of four, at least one of which is of a single sample. So the second
# process has a batch without a sample of its own, and its share of the held-out images and of the previews is smaller
# than the first's. Only some samples need the passes with the class word, or the base's own prediction as a target.
SHARED = (
    "seed=7",
    "quantize.storage=fp8",
    "train.steps=6",
    "train.batch_size=4",
    "checkpoint.every=3",
    "dataset.caption_dropout=0.2",
    "dataset.class_word='animal'",
    "objective.prior_for_regularization=true",
    "memory.gradient_checkpointing=true",
    "validation.pictures=1",
    "validation.every=3",
    "preview.prompts=['a cat', 'a dog', 'a bird']",
    "preview.every=3",
    "export.verify=true",
)
SHARD = "memory.shard_base=true"

# Gathered weights are where torch allocates: at multiples of 64 bytes. Float32 weights of a file are where the file has
# them, and with a single row of inputs a CPU multiplies those in another order. So they are moved.
ALIGNED = """
from lora_fp8.stages import load
real = load.precision.fill_
def filled(denoiser, *given, **more):
    real(denoiser, *given, **more)
    for parameter in denoiser.parameters():
        if type(parameter.data) is torch.Tensor:
            parameter.data = parameter.data.clone()
load.precision.fill_ = filled
"""

# Notes the passes of each batch, and what each process holds of the base before and after a step, by real tensors.
COUNTING = """
import torch
from torch.distributed.tensor import DTensor
from lora_fp8.stages import load, step
def held(denoiser):
    frozen = [t for t in (*denoiser.parameters(), *denoiser.buffers()) if not t.requires_grad]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in frozen]
    return [sum(t.untyped_storage().nbytes() for t in local), sum(t.nbytes for t in frozen)]
def counting(real):
    def counted(session, data, loaded, *given):
        note("bytes", *held(loaded.denoiser))
        result = real(session, data, loaded, *given)
        note("bytes", *held(loaded.denoiser))
        return result
    return counted
def describe(turn, *given):
    return [turn.dropped.prior, turn.dropped.class_word, turn.is_own] if turn else []
noting(step, "draw_turn", "turns", describe)
step.compute_gradient_ = counting(step.compute_gradient_)
from lora_fp8 import train
train.compute_gradient_ = step.compute_gradient_
"""


def last_checkpoint(job, step: int = 6) -> Path:
    return folder_of(job) / "checkpoints" / f"step-{step:06d}"


@pytest.fixture(scope="module")
def make(make_job, pictures):
    """make(folder, "train.steps=8", ...): the job of SHARED."""
    folders = f"[{{path='{pictures}', repeats=4, trigger='cat'}}, {{path='{pictures}', regularization=true}}]"
    return lambda folder, *more: make_job(folder, *FLOAT32, f"dataset.folders={folders}", *SHARED, *more, family="flux")


@pytest.fixture(scope="module")
def runs(make, tmp_path_factory):
    """The same job with one process, with two, and with two that share the base: {name: (job, folder)}."""
    root = tmp_path_factory.mktemp("shared")
    made = {}
    for name, number, more in (("one", 1, ()), ("two", 2, ()), ("shared", 2, (SHARD,))):
        job = make(root / name, *more)
        done = run_forked(job, root / name, number, planted=ALIGNED + COUNTING)
        assert not done.returncode, done.stderr[-3000:]
        made[name] = job, root / name
    return made


def tensors(*folders: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files in these folders; without metadata, in which the configs differ."""
    files = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    return {f"{path.name} {name}": tensor for path in files for name, tensor in load_file(path).items()}


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def relative(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The relative difference of two adapters."""
    adapter = [name for name in other if name.startswith("adapter.safetensors")]
    gap = sum(float((mine[name] - other[name]).norm()) ** 2 for name in adapter) ** 0.5
    return gap / sum(float(other[name].norm()) ** 2 for name in adapter) ** 0.5


def test_the_adapter_is_that_of_processes_that_hold_a_base_each(runs, tree_hash):
    """To the bit, with everything that a checkpoint holds, the exported files, the previews and the held-out losses."""
    two, shared = (folder_of(runs[name][0]) for name in ("two", "shared"))
    both = [tensors(run / "checkpoints" / "step-000006", run / "export") for run in (two, shared)]
    assert len(both[0]) > 300 and same(*both)
    assert len(tree_hash(two / "samples")) == 3 * 3 + 1 and tree_hash(two / "samples") == tree_hash(shared / "samples")
    assert (two / "validation.json").read_bytes() == (shared / "validation.json").read_bytes()
    assert losses(runs["two"][0]) == losses(runs["shared"][0])
    made = [turn for rank in (0, 1) for turn in noted(runs["shared"][1], rank, "turns") if turn]
    priors, words, owns = (set(flags) for flags in zip(*made, strict=True))
    assert priors == words == owns == {True, False}  # passes for another process, and batches that stand in
    assert {tuple(turn) for turn in noted(runs["two"][1], 0, "turns") if turn} == {(False, False, True)}
    verified = json.loads((shared / "verify.json").read_text(encoding="utf-8"))
    assert verified and all(report["ok"] for report in verified.values())


def test_the_adapter_is_that_of_one_process(runs):
    mine, other = (tensors(folder_of(runs[name][0]) / "checkpoints" / "step-000006") for name in ("shared", "one"))
    gap = relative(mine, other)
    print(f"\nshared by two against one process: adapters differ by {gap:.1e}")
    assert gap < 1e-5


def test_previews_with_options_of_their_own_make_as_many_passes_in_each_process(make, tmp_path, tree_hash):
    """One with more steps, or without guidance, on one process alone would leave it waiting for the other."""
    prompts = ["a cat --s 3", "a dog --s 1", "a bird --s 3 --g 1", "a cow --s 1", "a fox --s 3"]
    more = (f"preview.prompts={prompts}", "train.steps=1", "validation.pictures=0", "validation.every=0")
    drawn = {}
    for name, options in (("two", ()), ("shared", (SHARD,))):
        job = make(tmp_path / name, *more, "export.verify=false", *options)
        done = run_forked(job, tmp_path / name, 2, planted=ALIGNED)
        assert not done.returncode, done.stderr[-3000:]
        drawn[name] = tree_hash(folder_of(job) / "samples")
    assert len(drawn["two"]) == 2 * len(prompts) + 1 and drawn["two"] == drawn["shared"]


UPCAST, FP8 = {"storage": "fp8"}, {"storage": "fp8", "compute": "fp8"}
CASES = (
    ("flux", "bf16", UPCAST, {}, True),
    ("flux", "bf16", FP8 | {"recipe": "delayed"}, {"type": "dora"}, True),
    ("flux", "bf16", FP8 | {"compute": "fp8_forward", "scale": "tensor"}, {"type": "lokr"}, False),
    ("flux", "bf16", {"storage": "nf4"}, {"init": "pissa"}, True),
    ("flux", "bf16", {"storage": "bf16"}, {"type": "dora"}, False),
    ("z_image", "bf16", {"storage": "int8"}, {"type": "oft"}, True),
    ("sd15", "fp32", UPCAST, {"dtype": "fp32"}, True),
)


def test_a_shared_model_computes_what_a_whole_one_does(tiny, tmp_path):
    """Predictions to the bit, and gradients too but for a UNet.

    There a block's input goes to a later block as well. Its gradient is the sum of more than two, and autograd, which
    sees the gathering as steps of its own, adds them up in another order.
    """
    names = ("family", "dtype", "quantize", "adapter", "recomputes")
    cases = [dict(zip(names, case, strict=True)) | {"path": str(tiny(case[0]))} for case in CASES]
    script = str(Path(__file__).with_name("shard_worker.py"))
    environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    group = forked.start_group([script, str(tmp_path), json.dumps(cases)], 2, cwd=tmp_path, env=environment)
    for process in group:
        stderr = process.communicate(timeout=LONG_SECONDS)[1]
        assert process.returncode == 0, stderr[-3000:]
    for rank in (0, 1):
        for case, found in zip(cases, json.loads((tmp_path / f"{rank}.json").read_text()), strict=True):
            gradients = {name for name in found["exact"] if name.startswith("gradient")}
            assert len(gradients) >= 28 and len(found["exact"]) == len(gradients) + 3
            differing = {name for name, is_exact in found["exact"].items() if not is_exact}
            assert differing <= (gradients if case["family"] == "sd15" else set()), case
            assert max(found["gaps"].values()) < 1e-5
            if case["quantize"]["storage"] != "nf4":  # a start of PiSSA is a buffer, and belongs to the adapter
                assert found["local"][0] == found["local"][1] <= 0.55 * found["whole"]


LOADED = (
    # family, storage, scale, layout of a single file or "" for a folder; the share of the bytes that is read, at most
    ("flux", "fp8", "row", "", 0.35),
    ("flux", "int8", "row", "", 0.35),
    ("flux", "bf16", "auto", "", 0.35),
    ("flux", "fp8", "tensor", "", 0.75),  # the layers that are not quantized are still read by rows
    ("flux", "nf4", "auto", "", 0.75),
    ("sd15", "fp8", "auto", "", 0.35),
    ("flux", "fp8", "row", "plain", 0.25),  # whole, its fused layers are read once for each of their parts
    ("flux", "fp8", "auto", "older e5m2", 0.25),
    ("flux", "fp8", "auto", "newer rows", 0.3),
    ("flux", "fp8", "auto", "blocks as musubi", 0.3),
)


def test_each_process_reads_only_the_rows_that_it_keeps(tiny, tmp_path):
    """Where they can be quantized apart. Three processes, whose shares are uneven; what they hold is the same bits."""
    cases, paths, flux = [], {}, Single("flux", tmp_path / "single")
    for family, storage, scale, layout, _ in LOADED:
        if layout and layout not in paths:
            file, _, metadata = (flux.tensors, None, None) if layout == "plain" else quantized(flux, layout)
            paths[layout] = str(flux.write(tmp_path / f"{layout}.safetensors", file, metadata))
        path = str(tiny(family)) if not layout else paths[layout]
        section = {"storage": storage, "scale": scale}
        if layout == "blocks as musubi":
            section["override"] = {"ff.net.2": "fp8 1x64"}
        case = {"family": family, "path": path, "dtype": "bf16", "quantize": section}
        cases.append(case | ({"components": str(flux.rest)} if layout else {}))
    script = str(Path(__file__).with_name("shard_worker.py"))
    environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    group = forked.start_group([script, str(tmp_path), json.dumps(cases)], 3, cwd=tmp_path, env=environment)
    for process in group:
        stderr = process.communicate(timeout=LONG_SECONDS)[1]
        assert process.returncode == 0, stderr[-3000:]
    for rank in range(3):
        for case, found in zip(LOADED, json.loads((tmp_path / f"{rank}.json").read_text()), strict=True):
            assert found["differing"] == [] and 0.2 < found["read"] < case[-1], (case, found)
            assert 0.2 < found["held"] < 0.45, (case, found)


def test_each_process_holds_half_of_the_base(runs):
    for rank in (0, 1):
        held = noted(runs["shared"][1], rank, "bytes")
        assert len(held) == 2 * 6
        assert max(local for local, _ in held) <= 0.55 * held[0][1]
        whole = noted(runs["two"][1], rank, "bytes")
        assert {tuple(pair) for pair in whole} == {(held[0][1], held[0][1])}
    job = runs["shared"][0]
    counted = count_shared_bytes(build_denoiser(job, make_family(job)), 2)
    assert counted.part == held[0][0]  # the estimate, by real tensors
    model = next(event for event in Run.open(folder_of(runs["shared"][0])).read_events() if event["event"] == "model")
    assert any(line.startswith("2 processes share the base model: each stores ") for line in model["memory"])


def test_the_estimate_counts_what_one_process_holds(job):
    """Its part, the layers outside the blocks and three blocks; nothing is offloaded, however small the GPU is."""
    plan = planning.make(job(SHARD, "train.batch_size=4", "memory.gradient_checkpointing=auto", family="flux"))
    denoiser = build_denoiser(plan.job, plan.family)
    blocks = [*denoiser.transformer_blocks, *denoiser.single_transformer_blocks]
    sizes = [sum(p.nbytes for p in block.parameters() if not p.requires_grad) for block in blocks]
    frozen = sum(p.nbytes for p in denoiser.parameters() if not p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in denoiser.buffers())
    alone, of_two = (estimate.estimate(plan, "cuda", world=world) for world in (1, 2))
    assert alone.base_bytes == frozen + buffers
    held = frozen / 2 + buffers + (frozen - sum(sizes)) + sum(sorted(sizes)[-3:])
    assert held <= of_two.base_bytes < held + 1000  # parameters with an odd number of rows
    assert sum("memory.shard_base" in note for note in of_two.notes) == 1
    small = memory_choice.choose_memory(plan, 2**20, 2)
    assert (small.section.share_in_ram, small.section.recomputes) == (0.0, True) and "shard_base" in small.advice


@pytest.mark.parametrize(
    ("other", "needed"),
    [
        ("memory.compile=blocks", "memory.compile = 'off'"),
        ("memory.cuda_graphs=true", "memory.cuda_graphs = false"),
        ("quantize.backend=torchao", "quantize.backend = 'own'"),
        ("quantize.compute=auto", "quantize.compute = 'upcast', 'fp8_forward' or 'fp8'"),
        ("quantize.sensitivity=auto", "quantize.sensitivity = 'off'"),
    ],
)
def test_what_cannot_go_with_it_is_refused_in_words(job, other, needed):
    with pytest.raises(UserError) as refused:
        job(SHARD, other)
    assert f"memory.shard_base: true needs {needed}" in str(refused.value)


def test_offloading_excludes_it(job):
    with pytest.raises(
        UserError, match=r"memory.offload: 0.5 excludes memory.shard_base = true; use false, or offload"
    ):
        job(SHARD, "memory.offload=0.5")


def test_a_model_without_repeated_blocks_is_refused(job, monkeypatch):
    monkeypatch.setattr(FluxTransformer2DModel, "_repeated_blocks", [])
    monkeypatch.setattr(FluxTransformer2DModel, "_no_split_modules", None)
    with pytest.raises(
        UserError, match="FluxTransformer2DModel has no list of repeated blocks; use memory.shard_base = fal"
    ):
        planning.make(job(SHARD, family="flux"))
    planning.make(job(family="flux"))


STOP = """
from pathlib import Path
from lora_fp8.run import Run
from lora_fp8.training import optim
real_step = optim.AdapterOptimizer.step
def step(self, gradient, lr, number):
    real_step(self, gradient, lr, number)
    if number == AT:
        Run(Path(FOLDER)).request("stop")
optim.AdapterOptimizer.step = step
"""


def stop_at(step: int, job) -> str:
    return f"AT, FOLDER = {step}, {str(folder_of(job))!r}\n{STOP}"


def test_a_run_goes_on_with_another_number_of_processes(make, tmp_path, runs):
    """One process, then two that share the base, then one: a checkpoint does not know how many there were."""
    job = make(tmp_path, SHARD)
    for number, step, more in ((1, 2, ()), (2, 4, ("--resume",)), (1, 0, ("--resume",))):
        done = run_forked(job, tmp_path, number, *more, planted=ALIGNED + (stop_at(step, job) if step else ""))
        codes = done.returncode or [0]
        assert codes[0] == (75 if step else 0), done.stderr[-3000:]
    events = Run.open(folder_of(job)).read_events()
    assert [event["processes"] for event in events if event["event"] == "start"] == [1, 2, 1]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    warned = [event["text"] for event in events if event["event"] == "warning"]
    assert sum("memory.shard_base has no effect: the job runs in one process" in text for text in warned) == 2
    mine = tensors(folder_of(job) / "checkpoints" / "step-000006")
    assert relative(mine, tensors(folder_of(runs["one"][0]) / "checkpoints" / "step-000006")) < 1e-5


# Kills this process in the middle of the fourth step, with a block gathered: once, as a marker is left.
KILL = """
import os, signal
from pathlib import Path
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from lora_fp8.stages import step
real_step, at = step._accumulate_, [0]
def accumulate(session, data, loaded, number, positions):
    at[0] = number
    return real_step(session, data, loaded, number, positions)
step._accumulate_ = accumulate
real_forward, marker = FluxSingleTransformerBlock.forward, Path("killed")
def forward(self, *given, **more):
    if at[0] == 4 and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return real_forward(self, *given, **more)
FluxSingleTransformerBlock.forward = forward
"""


def test_a_killed_process_ends_all_and_the_run_resumes_exactly(make, tmp_path, runs, tree_hash):
    """As torchrun starts them. The other process says so and ends with the launcher, within a minute."""
    job = make(tmp_path, SHARD)
    config_file = write(job, tmp_path)
    (tmp_path / "recording.py").write_text(RECORDING, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "recording.py"), "--config", str(config_file)],
        cwd=tmp_path,
        env=ENVIRONMENT | {"SHARES": str(tmp_path), "PLANTED": ALIGNED + KILL},
        capture_output=True,
        encoding="utf-8",
        timeout=LONG_SECONDS,
    )
    ended = time.time()
    assert done.returncode != 0 and (tmp_path / "killed").exists() and left_over(tmp_path) == []
    assert ended - (tmp_path / "killed").stat().st_mtime < 60
    run = Run(folder_of(job))
    assert not run.is_locked()
    status = json.loads(run.status_file.read_text(encoding="utf-8"))
    assert status["step"] == 3 and status["state"] != "done"
    done = run_forked(job, tmp_path, 2, "--resume", planted=ALIGNED)
    assert not done.returncode, done.stderr[-3000:]
    shared = folder_of(runs["shared"][0])
    both = [tensors(path / "checkpoints" / "step-000006", path / "export") for path in (folder_of(job), shared)]
    assert same(*both)
    assert tree_hash(folder_of(job) / "samples") == tree_hash(shared / "samples")


FAILING = """
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from lora_fp8.data.loader import Loader
from lora_fp8.precision import FrozenLayer
real_take, real_forward, at = Loader.take_batch, FluxSingleTransformerBlock.forward, [0]
def set_rows_(self, rows, name):
    raise ValueError("broken")
if WHERE == "loading" and os.environ["RANK"] == "1":
    FrozenLayer.set_rows_ = set_rows_
def take_batch(self, step, *given):
    at[0] = step
    if WHERE == "reading" and step == 2 and os.environ["RANK"] == "1":
        raise OSError(5, "the disk is gone", "x.safetensors")
    return real_take(self, step, *given)
def forward(self, *given, **more):
    if WHERE == "computing" and at[0] == 2 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("no room")
    return real_forward(self, *given, **more)
Loader.take_batch, FluxSingleTransformerBlock.forward = take_batch, forward
"""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("loading", "the base model's weights are broken: broken"),
        ("reading", "x.safetensors: Input/output error"),
        ("computing", "out of memory on cpu"),
    ],
)
def test_a_process_that_fails_alone_ends_the_others(make, tmp_path, where, said):
    """While it loads and before a batch it can tell the others. In the middle of a pass they learn it from its exit."""
    without = ("preview.prompts=[]", "validation.every=0", "validation.pictures=0", "export.verify=false")
    job = make(tmp_path, SHARD, *without)
    done = run_forked(job, tmp_path, 2, planted=f"WHERE = {where!r}\n{FAILING}")
    assert said in done.stderr and 3 in done.returncode, done.stderr[-3000:]
    run = Run(folder_of(job))
    assert json.loads(run.status_file.read_text(encoding="utf-8"))["state"] == "error" and not run.is_locked()
    text = [event["text"] for event in run.read_events() if event["event"] == "error"][-1]
    assert (said if where != "computing" else "another process of this job exited; see its message above") in text
