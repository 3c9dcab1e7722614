"""The best validated step: its LoRA is kept and exported, whatever stops a run, and patience ends a training.

The curve of held-out losses is planted, so that it is known which step is best; the LoRA of that step is compared with
that of a training which ends there.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import safetensors
from safetensors.torch import load_file

from lora_fp8 import train
from lora_fp8.cli import lora_files as lora_commands
from lora_fp8.common import messages
from lora_fp8.errors import Message, RunFailure, Stopped, UserError
from lora_fp8.lora_files import safetensors_file
from lora_fp8.run import Run, ownership
from lora_fp8.stages import finish, held_out, milestones, validate
from lora_fp8.training import checkpoint
from lora_fp8.training.verdict import Measurement

SMALL = ("adapter.rank=4", "adapter.targets=['attn1.to_q', 'attn2.to_k']", "optimizer.lr=1e-2")
HELD = (*SMALL, "validation.pictures=2", "validation.every=1", "train.steps=9", "checkpoint.every=2")
TURNS = [1.0, 0.8, 0.6, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
"""Planted loss of each step: step 3 is best, which has no checkpoint of its own."""
FALLS = [1.0 - 0.05 * step for step in range(10)]


@pytest.fixture
def plant(monkeypatch):
    """plant(curve): the held-out losses are those of the curve; images differ by a little."""

    def planted(curve):
        def measure(session, data, loaded, step):
            assert data.held_out is not None
            losses = tuple(tuple(curve[step] + 0.001 * i + 1e-4 * k for k in range(5)) for i in range(2))
            measurement = Measurement(step, losses)
            bands = {Message("t = {step} of {total}", step=k, total=5): losses[0][k] for k in range(5)}
            session.run.log_event("validation", step=step, loss=measurement.mean, bands=bands, pictures=2)
            return measurement

        monkeypatch.setattr(validate, "measure", measure)

    return planted


def run(job, resume=False, echo=None):
    return train.run(job, resume=resume, progress=False, echo=echo)


def folder_of(job) -> Path:
    return Path(job.output_dir) / job.name


def payloads(folder: Path, name: str) -> dict[str, str]:
    """Layout -> hash of the tensors."""
    files = sorted((folder / "export").glob(f"{name}_*.safetensors"))
    return {path.stem.rpartition("_")[2]: safetensors_file.hash_payload(path) for path in files}


def outcome(folder: Path, tree_hash) -> dict[str, str]:
    """Hashes of the exported files, of the last checkpoint, of the best LoRA and of the series of losses."""
    last = checkpoint.find_newest(folder / "checkpoints").name
    kept = ("export/", f"checkpoints/{last}/", "checkpoints/best-", "validation.json")
    return {name: digest for name, digest in tree_hash(folder).items() if name.startswith(kept)}


def events_of(folder: Path, kind: str) -> list[dict]:
    return [event for event in Run.open(folder).read_events() if event["event"] == kind]


def test_the_best_is_the_lora_of_its_step_and_is_written_beside_the_last(make_job, tmp_path, plant):
    plant(TURNS)
    result = run(make_job(tmp_path / "a", *HELD, "export.verify=true"))
    folder = result.run.path
    assert [path.name for path in result.files] == [
        *("lora_diffusers.safetensors", "lora_kohya.safetensors"),
        *("lora-best_diffusers.safetensors", "lora-best_kohya.safetensors"),
    ]
    assert [report.ok for report in result.reports] == [True] * 4
    assert {"lora_kohya.safetensors", "lora-best_kohya.safetensors"} <= json.loads(
        (folder / "verify.json").read_text(encoding="utf-8")
    ).keys()

    # The authority: trainings of the same job that end at step 3, or never look at held-out losses.
    plant(TURNS[:4])
    ends_there = run(make_job(tmp_path / "b", *HELD, "train.steps=3")).run.path
    assert payloads(folder, "lora-best") == payloads(ends_there, "lora")
    adapters = [
        load_file(path / "adapter.safetensors")
        for path in (folder / "checkpoints" / "best-000003", ends_there / "checkpoints" / "step-000003")
    ]
    assert all(adapters[0][name].equal(adapters[1][name]) for name in adapters[1]) and len(adapters[0]) > 4
    plant(TURNS)
    unkept = run(make_job(tmp_path / "c", *HELD, "validation.keep_best=false")).run.path
    assert payloads(folder, "lora") == payloads(unkept, "lora") != payloads(folder, "lora-best")
    assert not [*unkept.glob("checkpoints/best-*"), *unkept.glob("export/*-best_*")]

    # Rotation keeps two checkpoints and does not touch the best one.
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        *("best-000003", "step-000008", "step-000009"),
    ]
    with safetensors.safe_open(folder / "export" / "lora-best_kohya.safetensors", framework="pt") as file:
        assert file.metadata()["ss_steps"] == "3" and file.metadata()["ss_output_name"] == "lora-best"
    assert events_of(folder, "done")[-1]["files"] == [f"export/{path.name}" for path in result.files]


def test_the_sentence_is_said_in_the_log_and_the_terminal(job, plant, capsys, monkeypatch):
    plant(TURNS)
    from lora_fp8.cli.events import print_event

    mine = job(*HELD, "export.formats=['kohya']")
    folder = run(mine, echo=print_event).run.path
    verdicts = events_of(folder, "verdict")
    assert [event["risen_since"] for event in verdicts if event["step"] < 6] == [None] * 5
    last = verdicts[-1]
    assert (last["best"], last["risen_since"], last["step"]) == (3, 5, 9) or last["risen_since"] == 4
    wanted = (
        f"Held-out loss was best at step 3 (0.4007) and has risen since step {last['risen_since']}. "
        "The file of step 3 is lora-best_kohya.safetensors."
    )
    assert last["text"] == wanted
    assert wanted in capsys.readouterr().out.splitlines()
    chinese = messages.translate("zh-CN", last["text"])
    assert "第 3 步最低" in chinese and "lora-best_kohya.safetensors" in chinese and "Held" not in chinese


def test_without_a_turn_the_last_step_is_the_best_and_there_is_one_file(job, plant, tree_hash):
    plant(TURNS)
    mine = job(*HELD)
    folder = run(mine).run.path
    assert len(payloads(folder, "lora-best")) == 2
    # More steps, and the loss falls after all: the file of step 3 must not stay under the name of the best.
    plant([*TURNS, 0.3, 0.2, 0.1])
    result = run(job(*HELD, "train.steps=12"), resume=True)
    assert [path.name for path in result.files] == ["lora_diffusers.safetensors", "lora_kohya.safetensors"]
    assert not payloads(folder, "lora-best") and len(payloads(folder, "lora")) == 2
    assert [path.name for path in folder.glob("checkpoints/best-*")] == ["best-000012"]
    assert events_of(folder, "verdict")[-1]["text"].startswith("Held-out loss was best at step 12 (0.1")


class Crash(Exception):
    pass


def test_stopped_killed_and_resumed_it_ends_with_the_same_bytes(make_job, tmp_path, plant, tree_hash, monkeypatch):
    """Torn out before and after each thing that a validation leaves: event, LoRA, file."""
    plant(TURNS)
    whole = make_job(tmp_path / "whole", *HELD)
    wanted = outcome(run(whole).run.path, tree_hash)
    assert len([name for name in wanted if "best" in name]) == 3 + 2 and "validation.json" in wanted
    pieces = make_job(tmp_path / "pieces", *HELD)

    def stop(event):
        if event["event"] == "step" and event["step"] == 4:
            Run(folder_of(pieces)).request("stop")

    with pytest.raises(Stopped):
        run(pieces, echo=stop)
    assert outcome(run(pieces, resume=True).run.path, tree_hash) == wanted

    torn = [("log", at) for at in (3, 4)] + [("best", 3), ("write", 2), ("write", 3), ("write", 4), ("write", 9)]
    for place, at in torn:
        job = make_job(tmp_path / f"{place}-{at}", *HELD)
        with monkeypatch.context() as patch:

            def write(path, data, at=at, real_write=held_out.atomic_write):
                if json.loads(data)["measurements"][-1][0] == at:
                    raise Crash
                return real_write(path, data)

            if place == "write":
                patch.setattr(held_out, "atomic_write", write)

            def echo(event, place=place, at=at):
                kind = {"log": "validation", "best": "best"}.get(place)
                if event["event"] == kind and event["step"] == at:
                    raise Crash

            with pytest.raises(Crash):
                run(job, echo=echo)
        assert outcome(run(job, resume=True).run.path, tree_hash) == wanted, (place, at)
        best = [event["best"] for event in events_of(folder_of(job), "verdict")]
        assert best[-1] == 3


def test_a_better_lora_does_not_displace_the_former_before_a_checkpoint_knows_of_it(job, plant, monkeypatch):
    """Best at 3, better at 5, killed after it; resumed from step 4, where only 3 is known, with fewer steps."""
    plant([1.0, 0.8, 0.6, 0.4, 0.5, 0.3, 0.7, 0.8, 0.9, 1.0])
    mine = job(*HELD)

    def echo(event):
        if event["event"] == "step" and event["step"] == 6:
            raise Crash

    monkeypatch.setattr(milestones.Milestones, "save", _save_until(milestones.Milestones.save, 4))
    with pytest.raises(Crash):
        run(mine, echo=echo)
    folder = folder_of(mine)
    assert sorted(path.name for path in folder.glob("checkpoints/best-*")) == ["best-000003", "best-000005"]
    monkeypatch.undo()
    plant([1.0, 0.8, 0.6, 0.4, 0.5])
    result = run(job(*HELD, "train.steps=4"), resume=True)
    assert len(result.files) == 4 and [path.name for path in folder.glob("checkpoints/best-*")] == ["best-000003"]


def _save_until(real, last):
    return lambda self: real(self) if self.state.step <= last else None


def test_patience_ends_a_training_as_if_its_steps_were_reached(make_job, tmp_path, plant, tree_hash):
    plant(TURNS)
    mine = make_job(tmp_path / "a", *HELD, "validation.patience=4", "export.verify=true", "train.log_every=3")
    result = run(mine)
    folder = result.run.path
    # Best at step 3, then four validations without an improvement: 4, 5, 6, 7.
    (end,) = events_of(folder, "patience")
    assert end["step"] == 7 and end["text"] == (
        "Training ends at step 7: the held-out loss has not improved in 4 validations. "
        "Raise validation.patience to go on."
    )
    assert len(result.files) == 4 and all(report.ok for report in result.reports)
    assert events_of(folder, "done")[-1]["step"] == 7 == events_of(folder, "step")[-1]["step"]
    assert checkpoint.read_latest(folder / "checkpoints")[0].step == 7
    before = outcome(folder, tree_hash)

    # Resumed, it has ended: nothing is trained, and the files are the same.
    run(mine, resume=True)
    assert events_of(folder, "patience")[-1]["text"] == end["text"] and len(events_of(folder, "patience")) == 2
    assert outcome(folder, tree_hash) == before and events_of(folder, "step")[-1]["step"] == 7

    # With more patience it goes on, and is what a run with that patience from the start is.
    run(make_job(tmp_path / "a", *HELD, "validation.patience=0"), resume=True)
    run(make_job(tmp_path / "b", *HELD))
    assert payloads(folder, "lora") == payloads(folder_of(make_job(tmp_path / "b")), "lora")

    # Torn out after the validation that ends it and before the checkpoint of that step.
    torn = make_job(tmp_path / "c", *HELD, "validation.patience=4", "export.verify=true", "train.log_every=3")

    def echo(event):
        if event["event"] == "checkpoint" and event["step"] == 7:
            raise Crash

    with pytest.raises(Crash):
        run(torn, echo=echo)
    shutil.rmtree(folder_of(torn) / "checkpoints" / "step-000007")
    assert outcome(run(torn, resume=True).run.path, tree_hash) == before


def test_a_falling_loss_never_exhausts_patience(job, plant):
    plant(FALLS)
    folder = run(job(*HELD, "validation.patience=1")).run.path
    assert events_of(folder, "step")[-1]["step"] == 9 and not events_of(folder, "patience")


def test_a_stop_that_is_asked_for_in_the_step_that_ends_it_is_no_stop(job, plant):
    plant(TURNS)
    mine = job(*HELD, "validation.patience=4")

    def stop(event):
        if event["event"] == "step" and event["step"] == 6:
            Run(folder_of(mine)).request("stop")

    result = run(mine, echo=stop)
    assert len(result.files) == 4 and events_of(folder_of(mine), "done")[-1]["step"] == 7


def test_the_command_writes_the_best_again(job, plant, capsys):
    plant(TURNS)
    folder = run(job(*HELD)).run.path
    before = payloads(folder, "lora-best")
    for path in folder.glob("export/*"):
        path.unlink()
    written = finish.export_run(folder, [], best=True)
    assert payloads(folder, "lora-best") == before and [path.parent for path in written] == [folder / "export"] * 2
    command = partial(lora_commands.export, folder, overrides=[], formats=[], kit=None, as_json=True)
    command(step=0, best=True, preview_metadata=True)
    assert json.loads(capsys.readouterr().out)["kohya"]["ss_steps"] == "3"
    command(step=0, best=True, preview_metadata=False)
    assert json.loads(capsys.readouterr().out) == [str(path) for path in written]
    # Step 3 has no checkpoint of its own, and is found all the same.
    assert sorted(path.name for path in finish.export_run(folder, [], step=3)) == sorted(
        f"lora_{layout}.safetensors" for layout in ("diffusers", "kohya")
    )
    drawn = {path: safetensors_file.hash_payload(path) for path in folder.glob("export/step-000003/*")}
    assert sorted(drawn.values()) == sorted(before.values())
    with pytest.raises(UserError, match="--best and --step each choose a step"):
        command(step=2, best=True, preview_metadata=False)


def test_a_damaged_best_lora_does_not_hold_up_the_last_one(job, plant):
    plant(TURNS)
    mine = job(*HELD)
    folder = run(mine).run.path
    (folder / "checkpoints" / "best-000003" / "adapter.safetensors").write_bytes(b"damaged")
    result = run(mine, resume=True)
    assert [path.name for path in result.files] == ["lora_diffusers.safetensors", "lora_kohya.safetensors"]
    (text,) = [event["text"] for event in events_of(folder, "warning") if "best step" in event["text"]]
    assert text.startswith("the LoRA of the best step was not written: ") and "is incomplete" in text
    with pytest.raises(RunFailure, match="is incomplete"):
        finish.export_run(folder, [], best=True)


def test_without_validation_there_is_no_best(job, capsys):
    folder = run(job(*SMALL, "train.steps=2")).run.path
    assert not (folder / "validation.json").exists() and not events_of(folder, "verdict")
    with pytest.raises(UserError, match=r"the run has no best LoRA\. Train with validation"):
        finish.export_run(folder, [], best=True)


@pytest.mark.parametrize("other", ["objective.min_snr_gamma=1.0", "model.caption_tokens=150"])
def test_other_held_out_images_begin_a_series_of_their_own(job, plant, other):
    """And another loss, and captions that are encoded in another way."""
    plant(TURNS)
    mine = job(*HELD, "train.steps=4")
    folder = run(mine).run.path
    run(job(*HELD, "train.steps=6", other), resume=True)
    texts = [event["text"] for event in events_of(folder, "warning")]
    assert any("only validations from now on are compared" in text for text in texts)
    assert any(f"used from now on: {other.partition('=')[0]}: " in text for text in texts)
    assert {event["best"] for event in events_of(folder, "verdict") if event["step"] > 4} == {4}


def test_at_a_learning_rate_of_zero_nothing_is_kept_as_the_best(job, plant):
    """The first step of a warmup changes nothing: its file would be refused as never trained."""
    plant([1.0, 0.1, 0.6, 0.5, 0.7])
    result = run(job(*HELD, "train.steps=4", "schedule.warmup=2"))
    assert [path.name for path in result.run.path.glob("checkpoints/best-*")] == ["best-000003"]
    assert len(result.files) == 4


def test_a_deleted_run_takes_the_best_with_it_and_leaves_what_others_wrote(job, plant):
    plant(TURNS)
    folder = run(job(*HELD)).run.path
    (folder / "checkpoints" / "best-000003" / "notes.txt").write_text("mine", encoding="utf-8")
    assert ownership.remove(folder) == ["checkpoints/best-000003/notes.txt"]
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measurements": 3}', '{"measurements": [[1, [[1], [1, 2]], true]]}', "{"]
)
def test_a_damaged_series_is_begun_again(job, plant, text):
    plant(TURNS)
    mine = job(*HELD, "train.steps=4")
    folder = run(mine).run.path
    (folder / "validation.json").write_text(text, encoding="utf-8")
    result = run(job(*HELD, "train.steps=5"), resume=True)
    assert result.files and [
        entry[0] for entry in json.loads((folder / "validation.json").read_bytes())["measurements"]
    ] == [4, 5]


def test_trained_text_encoders_are_those_of_the_best_step_too(job, plant):
    """They are part of the LoRA: in a clean pipeline both files do what training did at their steps."""
    plant([1.0, 0.5, 0.7, 0.8])
    result = run(job(*HELD, "train.steps=3", "adapter.text_encoder=true", "export.verify=true"))
    assert len(result.reports) == 4 and all(report.ok for report in result.reports)
    folder = result.run.path
    best, last = (load_file(folder / "export" / f"lora{kind}_kohya.safetensors") for kind in ("-best", ""))
    names = [name for name in last if name.startswith("lora_te") and name.endswith("lora_up.weight")]
    assert names and any(not best[name].equal(last[name]) for name in names)
