"""A run that was stopped and resumed ends with the bytes of one that never was.

Each chain below is interrupted several times, by a stop request and by a crash in the middle of things, and is compared
with an uninterrupted run: every byte of the exported files and of the last checkpoint. That the comparison can fail is
shown by planting the bugs it is there for: optimizer not restored, adapter not restored, random numbers that depend on
how long the process has been running.
"""

import itertools
import json
import shutil
import signal
from pathlib import Path

import miniatures
import pytest
import safetensors
import torch
from PIL import Image
from safetensors.torch import load_file

from lora_fp8 import adapters, config, train
from lora_fp8.cli import training as training_commands
from lora_fp8.common import writing
from lora_fp8.data import loader
from lora_fp8.errors import RunFailure, Stopped, UserError, UserErrors
from lora_fp8.lora_files import safetensors_file
from lora_fp8.run import Run
from lora_fp8.stages import finish, milestones, previews
from lora_fp8.stages import step as step_stage
from lora_fp8.training import checkpoint, optim

STEPS = 6
# Few layers, for speed; at rank 16 the feed-forward ones have 4,096 elements and more, so that 8-bit moments are 8-bit.
SMALL = ("adapter.rank=16", "adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']", f"train.steps={STEPS}")
RANDOM = (
    "dataset.caption_dropout=0.3",
    "dataset.flip=true",
    "dataset.shuffle_tags=true",
    "dataset.tag_dropout=0.3",
    "dataset.caption_variants=3",
    "adapter.dropout=0.1",
)


class Crash(Exception):
    pass


def run(job, resume=False, echo=None):
    return train.run(job, resume=resume, progress=False, echo=echo)


def folder_of(job) -> Path:
    return Path(job.output_dir) / job.name


def run_until(job, step, resume=False, how="stop"):
    """Train up to the end of this step: asked to stop there, or torn out after the update and before the save."""
    control = folder_of(job) / "control"

    def echo(event):
        at = event["event"] == "step" or event.get("stage") == "train"
        if how == "stop" and at and event["step"] == step - 1:
            (control / "stop").touch()
        if how == "crash" and event["event"] == "step" and event["step"] == step:
            raise Crash

    with pytest.raises(Stopped if how == "stop" else Crash):
        run(job, resume, echo)


def outcome(job, tree_hash) -> dict[str, str]:
    """Hashes of all that must be the same: the exported files and the last checkpoint, metadata and JSON included."""
    folder = folder_of(job)
    last = f"checkpoints/step-{job.train.steps:06d}/"
    hashes = {k: v for k, v in tree_hash(folder).items() if k.startswith(("export/", last))}
    assert len(hashes) == 2 + 4
    return hashes


def payloads(job) -> list[str]:
    """Hashes of the tensors alone, for jobs whose settings, and so the metadata, differ."""
    files = sorted((folder_of(job) / "export").glob("*.safetensors"))
    assert len(files) == 2
    return [safetensors_file.hash_payload(path) for path in files]


def events(job, kind):
    return [event for event in Run.open(folder_of(job)).read_events() if event["event"] == kind]


@pytest.mark.parametrize(
    ("optimizer", "rounding", "accumulate", "random"),
    [
        # These four have each pair of values of any two columns.
        ("adamw8bit", "master", 2, True),
        ("adamw8bit", "stochastic", 1, True),
        ("adamw", "master", 1, False),
        ("adamw", "stochastic", 2, False),
        ("lion8bit", "stochastic", 1, True),
        ("prodigy", "master", 1, True),
        ("adafactor", "master", 1, True),
        ("adamw_schedulefree", "master", 1, True),
        ("adamw_schedulefree", "stochastic", 1, True),
        ("came", "stochastic", 1, True),
        ("muon", "master", 1, True),
        ("ademamix8bit", "master", 1, True),
        ("pytorch_optimizer.Adan", "master", 1, True),
        ("pytorch_optimizer.ScheduleFreeAdamW", "stochastic", 1, True),
    ],
)
def test_stopped_and_crashed_it_is_the_same_to_the_bit(
    make_job, tmp_path, tree_hash, optimizer, rounding, accumulate, random
):
    settings = (f"optimizer.name={optimizer}", f"optimizer.rounding={rounding}", f"train.accumulate={accumulate}")
    settings += ("schedule.name=cosine", "schedule.warmup=2", *SMALL, *(RANDOM if random else ()))
    settings += (
        ("optimizer.lr=auto", "optimizer.d_coef=64.0", "optimizer.use_bias_correction=false")
        if optimizer == "prodigy"
        else ()
    )
    whole, pieces = make_job(tmp_path / "a", *settings), make_job(tmp_path / "b", *settings)
    run(whole)
    run_until(pieces, 1)
    run_until(pieces, 4, resume=True, how="crash")  # the newest checkpoint is that of step 2: two steps are done again
    run(pieces, resume=True)
    assert [event["step"] for event in events(pieces, "resume")] == [1, 2]
    assert outcome(pieces, tree_hash) == outcome(whole, tree_hash)
    tensors = load_file(folder_of(whole) / "checkpoints" / f"step-{STEPS:06d}" / "optimizer.safetensors")
    assert any(k.endswith("/absmax1") for k in tensors) == (optimizer in ("adamw8bit", "lion8bit", "ademamix8bit"))
    rates = [event["lr"] for event in events(whole, "step")]
    assert (max(rates) > 3e-6) if optimizer == "prodigy" else (max(rates) > 1e-5)  # Prodigy begins with 1e-6
    assert any(k.endswith("/master") for k in tensors) == (rounding == "master")
    losses = [[(e["step"], e["loss"], e["lr"], e["grad_norm"]) for e in events(job, "step")] for job in (whole, pieces)]
    assert set(losses[1]) == set(losses[0])  # the steps done twice gave the same figures twice


@pytest.mark.parametrize(("rounding", "name"), [("master", "adamw8bit"), ("stochastic", "came")])
def test_a_moving_average_resumes_to_the_bit_and_leaves_the_training_alone(
    make_job, tmp_path, tree_hash, rounding, name
):
    settings = (f"optimizer.name={name}", f"optimizer.rounding={rounding}", *SMALL, *RANDOM)
    averaged = (*settings, "optimizer.ema_decay=0.7")
    whole, pieces, plain = (
        make_job(tmp_path / "abc"[i], *given) for i, given in enumerate((averaged, averaged, settings))
    )
    run(whole)
    run(plain)
    run_until(pieces, 1)
    run_until(pieces, 4, resume=True, how="crash")
    run(pieces, resume=True)
    assert outcome(pieces, tree_hash) == outcome(whole, tree_hash)
    losses = [[(event["step"], event["loss"]) for event in events(job, "step")] for job in (whole, plain)]
    assert losses[0] == losses[1] and outcome(plain, tree_hash) != outcome(whole, tree_hash)


@pytest.mark.parametrize("rounding", ["master", "stochastic", "average"])
def test_previews_validations_and_files_see_the_averaged_weights(make_job, tmp_path, monkeypatch, rounding):
    """schedulefree's x = y + (1 - 1 / beta1) (z - y), of what the checkpoint says of y and z; or the moving average."""
    seen = {}

    def watch(module, name, what, where):
        original = getattr(module, name)

        def watching(*args, **more):
            seen[what, args[-1]] = adapters.copy_state(where(args))
            return original(*args, **more)

        monkeypatch.setattr(module, name, watching)

    watch(milestones.validate, "measure", "validation", lambda args: args[2].adapted)
    watch(milestones.previews, "draw", "preview", lambda args: args[1])
    settings = ("optimizer.name=adamw_schedulefree", f"optimizer.rounding={rounding}", "schedule.warmup=1", *SMALL)
    if rounding == "average":
        settings = ("optimizer.ema_decay=0.9", "schedule.warmup=1", *SMALL)
    settings += ("validation.pictures=1", "validation.every=2", "preview.every=2", "preview.prompts=['a cat']")
    job = make_job(tmp_path, *settings, "checkpoint.keep=9", "export.every=2")
    run(job)
    for step in (2, 4, STEPS):
        bundle = checkpoint.read(folder_of(job) / "checkpoints" / f"step-{step:06d}")
        moved = 0
        for name, tensor in bundle.adapter.items():
            y = bundle.optimizer[f"{name}/{'trained' if rounding == 'stochastic' else 'master'}"].float()
            if rounding == "average":
                x = bundle.optimizer[f"{name}/average"]
            else:
                x = torch.lerp(y, bundle.optimizer[f"{name}/z"], 1 - 1 / 0.9)
            assert torch.equal(tensor, x.bfloat16()), (step, name)
            moved += not torch.equal(tensor, y.bfloat16())
            assert torch.equal(seen["validation", step][name], tensor)
            assert torch.equal(seen["preview", step][name], tensor)
        assert step == 2 or moved > len(bundle.adapter) / 2  # the first step that is no warm-up averages nothing
        kept = folder_of(job) / "export" / ("" if step == STEPS else f"step-{step:06d}")
        path = min(kept.glob("*_kohya.safetensors"), key=lambda path: len(path.name))  # not that of the best step
        sums = sorted(float(tensor.double().sum()) for tensor in bundle.adapter.values())
        exported = sorted(float(tensor.double().sum()) for key, tensor in load_file(path).items() if "alpha" not in key)
        assert exported == pytest.approx(sums)


# -- one uninterrupted run for the rest, with everything random on


@pytest.fixture(scope="module")
def settings():
    return (*SMALL, *RANDOM)


@pytest.fixture(scope="module")
def whole(make_job, settings, tmp_path_factory, tree_hash):
    job = make_job(tmp_path_factory.mktemp("whole"), *settings)
    run(job)
    return job, outcome(job, tree_hash)


def test_stopped_after_each_step(make_job, tmp_path, settings, whole, tree_hash):
    job = make_job(tmp_path, *settings)
    for step in range(1, STEPS):
        run_until(job, step, resume=step > 1)
    run(job, resume=True)
    assert [event["step"] for event in events(job, "resume")] == list(range(1, STEPS))
    assert outcome(job, tree_hash) == whole[1]


def test_two_runs_in_one_process_are_the_same(make_job, tmp_path, settings, whole, tree_hash):
    job = make_job(tmp_path, *settings)
    torch.manual_seed(12345)  # whatever the global generator holds
    run(job)
    (told,) = events(job, "cache")
    assert told["encoded"] == 0 and told["reused"] > 0
    assert outcome(job, tree_hash) == whole[1]


def test_resuming_a_finished_run_writes_the_same_files(make_job, tmp_path, settings, whole, tree_hash):
    job = make_job(tmp_path, *settings)
    shutil.copytree(folder_of(whole[0]), folder_of(job))
    shutil.rmtree(folder_of(job) / "export")
    run(job, resume=True)
    assert outcome(job, tree_hash) == whole[1]


def test_killed_before_the_first_checkpoint_starts_at_zero_and_says_so(make_job, tmp_path, settings, whole, tree_hash):
    job = make_job(tmp_path, *settings)
    run_until(job, 1, how="crash")
    run(job, resume=True)
    assert "begins at step 0" in events(job, "warning")[-1]["text"]
    assert outcome(job, tree_hash) == whole[1]


@pytest.fixture(scope="module")
def crashed(make_job, settings, tmp_path_factory):
    """Crashed at step 5, with the checkpoints of steps 2 and 4."""
    job = make_job(tmp_path_factory.mktemp("crashed"), *settings)
    run_until(job, 5, how="crash")
    return job


def test_a_corrupt_newest_checkpoint_costs_two_steps_and_no_bit(
    make_job, tmp_path, settings, crashed, whole, tree_hash
):
    job = make_job(tmp_path, *settings)
    shutil.copytree(folder_of(crashed), folder_of(job))
    broken = folder_of(job) / "checkpoints" / "step-000004" / "optimizer.safetensors"
    data = bytearray(broken.read_bytes())
    data[-7] ^= 4
    broken.write_bytes(data)
    run(job, resume=True)
    assert [event["step"] for event in events(job, "resume")] == [2]
    assert any("step-000004 was skipped" in event["text"] for event in events(job, "warning"))
    assert outcome(job, tree_hash) == whole[1]


def test_all_checkpoints_corrupt_is_a_failure_not_a_fresh_start(make_job, tmp_path, settings, crashed, tree_hash):
    job = make_job(tmp_path, *settings)
    shutil.copytree(folder_of(crashed), folder_of(job))
    for path in (folder_of(job) / "checkpoints").glob("step-*/manifest.json"):
        path.write_text("{}", encoding="utf-8")
    before = tree_hash(folder_of(job) / "checkpoints")
    with pytest.raises(RunFailure, match="checkpoints are incomplete"):
        run(job, resume=True)
    assert tree_hash(folder_of(job) / "checkpoints") == before


def test_previews_change_nothing(make_job, tmp_path, settings, whole):
    drawing = make_job(tmp_path, *settings, "preview.prompts=['a cat', 'a dog']", "preview.every=2")
    run_until(drawing, 3)
    run(drawing, resume=True)
    assert len(list((folder_of(drawing) / "samples").glob("step-*.png"))) == 2 * (STEPS // 2 + 1)
    assert payloads(drawing) == payloads(whole[0])


def test_a_cold_cache_changes_nothing_at_the_start_nor_in_the_middle(make_job, tmp_path, settings, whole, tree_hash):
    """A warm one: `test_two_runs_in_one_process_are_the_same`."""
    cache = tmp_path / Path(whole[0].dataset.cache_dir).name  # the LoRA file records the last part of the path
    job = make_job(tmp_path, *settings, f"dataset.cache_dir='{cache}'")
    run_until(job, 3)
    shutil.rmtree(cache)
    run(job, resume=True)
    assert all(told["encoded"] > 0 and told["reused"] == 0 for told in events(job, "cache"))
    assert outcome(job, tree_hash) == whole[1]


def test_the_run_folder_may_be_moved_and_renamed(make_job, tmp_path, settings, whole, capsys):
    job = make_job(tmp_path, *settings)
    run_until(job, 3)
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    folder_of(job).rename(moved)
    training_commands.resume(moved, [], as_json=True)
    assert not folder_of(job).exists()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines if line["event"] == "resume"] == [3] and lines[-1]["event"] == "done"
    names = {path.name for path in (moved / "export").iterdir()}
    assert names == {"renamed_diffusers.safetensors", "renamed_kohya.safetensors"}
    assert sorted(safetensors_file.hash_payload(path) for path in (moved / "export").iterdir()) == sorted(
        payloads(whole[0])
    )
    with safetensors.safe_open(moved / "export" / "renamed_kohya.safetensors", "pt") as file:
        assert file.metadata()["ss_output_name"] == "renamed"


# -- what may change between two starts


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "adapter.rank=8",
        "adapter.alpha=2.0",
        "adapter.targets=['attn1.to_q', 'attn2.to_k', 'attn1.to_v']",
        "adapter.dtype='fp32'",
        "optimizer.name='adamw'",
        "optimizer.rounding='stochastic'",
        "quantize.storage='none'",
    ],
)
def test_what_a_checkpoint_cannot_go_on_with_is_refused(make_job, tmp_path, settings, stopped, tree_hash, change):
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    before = tree_hash(tmp_path / "runs" / "lora" / "checkpoints")
    config_file = folder_of(stopped) / "config.toml"
    job = make_job(tmp_path, *settings, change)
    stages = events(job, "stage")
    with pytest.raises(UserErrors) as refusal:
        run(job, resume=True)
    assert events(job, "stage") == stages  # nothing was downloaded, encoded or loaded first
    (problem,) = refusal.value.problems
    key = change.partition("=")[0]
    assert problem.startswith(f"{key}: was ") and "step-000003" in str(refusal.value)
    # The refused setting has not got into the folder, so that resuming it as it is still works.
    assert (tmp_path / "runs" / "lora" / "config.toml").read_bytes() == config_file.read_bytes()
    assert tree_hash(tmp_path / "runs" / "lora" / "checkpoints") == before


@pytest.fixture(scope="module")
def stopped(make_job, settings, tmp_path_factory):
    job = make_job(tmp_path_factory.mktemp("stopped"), *settings)
    run_until(job, 3)
    return job


def test_several_refusals_come_together(make_job, tmp_path, settings, stopped):
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    with pytest.raises(UserErrors) as refusal:
        run(make_job(tmp_path, *settings, "seed=1", "adapter.rank=8"), resume=True)
    assert {problem.partition(":")[0] for problem in refusal.value.problems} == {"seed", "adapter.rank"}


def test_another_family_is_refused(make_job, tmp_path, settings, stopped):
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    with pytest.raises(UserError, match="sd15.*sdxl"):
        run(make_job(tmp_path, *settings, family="sdxl"), resume=True)


def test_fewer_steps_than_done_is_refused(make_job, tmp_path, settings, stopped):
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    with pytest.raises(UserError, match="train.steps is 2"):
        run(make_job(tmp_path, *settings, "train.steps=2"), resume=True)


def test_another_learning_rate_is_told_and_applies(make_job, tmp_path, settings, stopped, whole):
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    job = make_job(tmp_path, *settings, "optimizer.lr=5e-4", "adapter.init_from=other.safetensors")
    run(job, resume=True)
    (idle,) = [event["text"] for event in events(job, "warning") if "init_from" in event["text"]]
    assert idle == "adapter.init_from has no effect: the run continues from its own checkpoint"
    (warning,) = [event["text"] for event in events(job, "warning") if "optimizer.lr:" in event["text"]]
    assert "0.001 -> 0.0005" in warning
    assert {e["step"]: e["lr"] for e in events(job, "step")}[4] == pytest.approx(5e-4 * 1.4)
    assert config.load(folder_of(job) / "config.toml").optimizer.lr == 5e-4
    assert payloads(job) != payloads(whole[0])


def test_a_longer_run_goes_on_as_if_it_had_been_planned_so(make_job, tmp_path, settings, whole, tree_hash):
    short = make_job(tmp_path, *settings, "train.steps=4")
    run(short)
    longer = make_job(tmp_path, *settings)
    run(longer, resume=True)
    assert outcome(longer, tree_hash) == whole[1]


@pytest.mark.parametrize("change", ["dataset.flip=false", "dataset.caption_dropout=0.5", "train.accumulate=2"])
def test_other_changed_settings_are_told(make_job, tmp_path, settings, stopped, change):
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    job = make_job(tmp_path, *settings, change)
    run(job, resume=True)
    told = [event["text"] for event in events(job, "warning") if "used from now on" in event["text"]]
    assert len(told) == 1 and f"{change.partition('=')[0]}: " in told[0]


def test_another_base_at_the_same_place_is_told(make_job, tmp_path, settings, stopped):
    """A base that was replaced, or a hub branch that moved: the path is the same, the weights are not."""
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    miniatures.save("sd15", tmp_path / "other", seed=1)
    job = make_job(tmp_path, *settings, f"model.path='{tmp_path / 'other'}'")
    run(job, resume=True)
    assert [event["text"] for event in events(job, "warning") if "its training adapter differs" in event["text"]]


def test_a_moved_base_and_pictures_are_no_change(make_job, tmp_path, settings, stopped, whole, tiny, pictures):
    shutil.copytree(folder_of(stopped), tmp_path / "runs" / "lora")
    base, mine = shutil.copytree(tiny("sd15"), tmp_path / "base"), shutil.copytree(pictures, tmp_path / "mine")
    job = make_job(tmp_path, *settings, f"model.path='{base}'", f"dataset.folders=[{{path='{mine}'}}]")
    run(job, resume=True)
    aside = ("smaller than the training", "has no effect")  # of the job itself, moved or not
    told = [event["text"] for event in events(job, "warning") if not any(one in event["text"] for one in aside)]
    assert told == [] and payloads(job) == payloads(whole[0])


def test_exporting_while_a_checkpoint_is_being_written_leaves_it_alone(make_job, tmp_path, settings, monkeypatch):
    """`lora-fp8 export` reads a run that another process trains: what that one is writing is not a leftover."""
    job = make_job(tmp_path, *settings)
    real = writing.sync_folder
    exported = []

    def sync_folder(path):
        if path.name.startswith(".tmp-step-000004"):
            exported.extend(finish.export_run(folder_of(job), []))
        real(path)

    monkeypatch.setattr(checkpoint, "sync_folder", sync_folder)
    run(job)
    assert len(exported) == 2 and events(job, "done")


def test_a_checkpoint_is_exported_without_its_pictures_and_that_is_told(make_job, tmp_path, settings, pictures, capsys):
    mine = shutil.copytree(pictures, tmp_path / "mine")
    kept_out = ("validation.every=2", "validation.pictures=1")
    job = make_job(tmp_path, *settings, f"dataset.folders=[{{path='{mine}'}}]", "train.steps=2", *kept_out)
    run(job)
    before = payloads(job)
    shutil.rmtree(mine)
    assert len(finish.export_run(folder_of(job), [])) == 2 and payloads(job) == before
    assert "1 problem with the images" in capsys.readouterr().err


@pytest.mark.parametrize(("warmup", "steps"), [("2", 2), ("0.4", 3), ("0.5", 3)])
def test_the_file_tells_the_warm_up_that_was_done(make_job, tmp_path, settings, warmup, steps):
    job = make_job(tmp_path, *settings, f"schedule.warmup={warmup}")
    run(job)
    rates = [event["lr"] for event in events(job, "step")]
    assert rates.index(max(rates)) == steps
    for path in (folder_of(job) / "export").iterdir():
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["ss_lr_warmup_steps"] == str(steps)


def test_changed_pictures_are_told(make_job, tmp_path, settings, pictures):
    mine = shutil.copytree(pictures, tmp_path / "mine")
    job = make_job(tmp_path, *settings, f"dataset.folders=[{{path='{mine}'}}]")
    run_until(job, 3)
    (mine / "a.txt").write_text("a cat, yellow", encoding="utf-8")
    Image.open(mine / "b.jpg").transpose(Image.Transpose.ROTATE_180).save(mine / "b.jpg")
    for suffix in (".png", ".txt"):
        (mine / f"c{suffix}").rename(mine / f"z{suffix}")
    (mine / "d.jpg").unlink()
    run(job, resume=True)
    told = [event["text"] for event in events(job, "warning")]
    begin = next(i for i, text in enumerate(told) if "images, captions or buckets changed" in text)
    assert "no longer bit-identical to that of an uninterrupted run" in told[begin]
    assert [text.replace(" the dataset since the checkpoint", "") for text in told[begin + 1 : begin + 5]] == [
        "removed from (2): c.png, d.jpg",
        "added to (1): z.png",
        "image edited since the checkpoint (1): b.jpg",
        "caption edited since the checkpoint (1): a.png",
    ]


def test_changed_files_are_counted_and_the_first_five_named():
    before = {f"0/{i}.png": "a b" for i in range(8)} | {"1/x.png": "a b"}
    now = {f"0/{i}.png": "a c" for i in range(8)} | {"1/y.png": "a b"}
    assert checkpoint.describe_changes(before, now) == [
        "removed from the dataset since the checkpoint (1): 1/x.png",
        "added to the dataset since the checkpoint (1): 1/y.png",
        "caption edited since the checkpoint (8): 0/0.png, 0/1.png, 0/2.png, 0/3.png, 0/4.png, ...",
    ]
    assert checkpoint.describe_changes({}, now) == []  # a checkpoint of an earlier version


# -- planted bugs: each must be noticed by the comparison above


def resumed_in_the_middle(make_job, tmp_path, settings):
    job = make_job(tmp_path, *settings)
    run_until(job, 3)
    run(job, resume=True)
    return payloads(job)


def test_planted_optimizer_not_restored(make_job, tmp_path, settings, whole, monkeypatch):
    monkeypatch.setattr(optim.AdapterOptimizer, "load_state", lambda self, tensors, meta: None)
    assert resumed_in_the_middle(make_job, tmp_path, settings) != payloads(whole[0])


def test_planted_moments_not_restored(make_job, tmp_path, settings, whole, monkeypatch):
    """Masters restored, moments and step counts forgotten: the ordinary way to get resuming wrong."""
    real = optim.AdapterOptimizer.load_state

    def forget(self, tensors, meta):
        real(self, {k: v for k, v in tensors.items() if k.endswith("/master")}, meta | {"steps": {}})

    monkeypatch.setattr(optim.AdapterOptimizer, "load_state", forget)
    assert resumed_in_the_middle(make_job, tmp_path, settings) != payloads(whole[0])


def test_planted_adapter_not_restored(make_job, tmp_path, settings, whole, monkeypatch):
    # With masters the bf16 values are rewritten from them at the next step; stochastic rounding has only the values.
    more = (*settings, "optimizer.rounding=stochastic")
    good = make_job(tmp_path / "good", *more)
    run(good)
    monkeypatch.setattr(adapters, "load_state_", lambda denoiser, tensors: None)
    assert resumed_in_the_middle(make_job, tmp_path / "bad", more) != payloads(good)


@pytest.mark.parametrize("how", ["request", "signal"])
def test_a_stop_between_two_previews_saves_at_once_and_resuming_draws_them(
    make_job, tmp_path, tree_hash, monkeypatch, how
):
    """Previews may take many minutes; the steps since the last checkpoint are not kept waiting for them."""
    shown = (*SMALL, "preview.prompts=['a cat', 'a dog', 'a bird']", "preview.every=3", "preview.steps=1")
    shown += ("preview.at_start=false", "checkpoint.every=5", "export.verify=false")
    whole, stopped = make_job(tmp_path / "whole", *shown), make_job(tmp_path / "stopped", *shown)
    run(whole)
    real, drawn = previews.draw_clips, []

    def draw_clips(*given):
        drawn.append(given[-1])
        if len(drawn) == 2:  # of step 3
            if how == "signal":
                signal.raise_signal(signal.SIGTERM)
            else:
                Run(folder_of(stopped)).request("stop")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(previews, "draw_clips", draw_clips)
        with pytest.raises(Stopped, match="saved at step 3"):
            run(stopped)
    assert drawn == [[0], [1]] and not list((folder_of(stopped) / "samples").glob("step-000003-*"))
    run(stopped, resume=True)
    assert outcome(stopped, tree_hash) == outcome(whole, tree_hash)
    images = [tree_hash(folder_of(job) / "samples") for job in (whole, stopped)]
    assert images[0] == images[1] and sum(name.startswith("step-000003-") for name in images[0]) == 3


def test_planted_another_seed(make_job, tmp_path, settings, whole):
    job = make_job(tmp_path, *settings, "seed=1")
    run(job)
    assert payloads(job) != payloads(whole[0])


@pytest.mark.parametrize("purpose", ["noise", "timestep", "flip", "caption_dropout", "shuffle_variant"])
def test_planted_random_numbers_that_are_not_restored(make_job, tmp_path, settings, monkeypatch, purpose):
    """Draws that depend on how many this process has made, as with a global generator that resuming does not restore.

    Each kind of draw is planted by itself, and the comparison of a stopped and resumed run with a whole one, which is
    what all tests above do, notices every one.
    """
    drawn = itertools.count()
    real = loader.make_generator

    def counting(seed, what, when, uid):
        return real(seed, what, when, uid) if what != purpose else real(next(drawn), what, when, uid)

    monkeypatch.setattr(loader, "make_generator", counting)
    settings = (*settings, "train.accumulate=2", "dataset.caption_variants=16")  # enough draws to differ for certain
    job = make_job(tmp_path / "whole", *settings)
    run(job)
    drawn = itertools.count()  # a new process starts to count again
    job_stopped = make_job(tmp_path / "pieces", *settings)
    run_until(job_stopped, 3)
    drawn = itertools.count()
    run(job_stopped, resume=True)
    assert payloads(job_stopped) != payloads(job)


def test_planted_dropout_that_is_not_restored(make_job, tmp_path, settings, monkeypatch):
    """The same for the one draw that goes through torch's global generator."""
    keys = itertools.count()
    monkeypatch.setattr(step_stage, "_make_seed", lambda text: next(keys))
    job = make_job(tmp_path / "whole", *settings)
    run(job)
    keys = itertools.count()
    pieces = make_job(tmp_path / "pieces", *settings)
    run_until(pieces, 3)
    keys = itertools.count()
    run(pieces, resume=True)
    assert payloads(pieces) != payloads(job)


# -- what is due at the step of a checkpoint and was not done


DUE = ("export.every=4", "validation.pictures=1", "validation.every=4", "preview.prompts=['a cat']", "preview.every=4")


@pytest.mark.parametrize("last", ["checkpoint", "export", "validation"])
def test_what_a_kill_right_after_a_checkpoint_left_undone_is_done_when_resumed(
    make_job, tmp_path, settings, due_at_4, tree_hash, last
):
    """Killed at step 4 when the checkpoint, the LoRA files or the held-out loss were the last thing that was done."""
    job = make_job(tmp_path, *settings, *DUE)

    def kill(event):
        if event["event"] == last and (folder_of(job) / "checkpoints/step-000004").exists():
            raise Crash

    with pytest.raises(Crash):
        run(job, echo=kill)
    assert not (folder_of(job) / "samples/step-000004-0.png").exists()
    run(job, resume=True)
    assert [event["step"] for event in events(job, "resume")] == [4]
    whole, pieces = (tree_hash(folder_of(one)) for one in (due_at_4, job))
    made = {name for name in whole if name.startswith(("samples/step", "export/", "checkpoints/step-000006"))}
    assert {"samples/step-000004-0.png", "export/step-000004/lora_kohya.safetensors"} <= made
    assert {name: pieces.get(name) for name in made} == {name: whole[name] for name in made}
    for kind in ("validation", "preview"):
        # A validation whose event is the last thing that was done is made again, with the same loss.
        ours, theirs = (
            list(dict.fromkeys((event["step"], event.get("loss")) for event in events(of, kind)))
            for of in (job, due_at_4)
        )
        assert ours == theirs


def test_the_last_held_out_loss_is_measured_although_all_steps_are_done(make_job, tmp_path, settings, due_at_4):
    job = make_job(tmp_path, *settings, *DUE)
    shutil.copytree(folder_of(due_at_4), folder_of(job))
    log = folder_of(job) / "events.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if json.loads(line).get("path") == "checkpoints/step-000006")
    log.write_text("".join(lines[: end + 1]), encoding="utf-8")
    run(job, resume=True)
    first, again = ([(e["step"], e["loss"]) for e in events(one, "validation")] for one in (due_at_4, job))
    assert again == first and first[-1][0] == STEPS
    run(job, resume=True)
    assert len(events(job, "validation")) == len(first), "nothing is done twice"


@pytest.fixture(scope="module")
def due_at_4(make_job, settings, tmp_path_factory):
    job = make_job(tmp_path_factory.mktemp("due"), *settings, *DUE)
    run(job)
    return job
