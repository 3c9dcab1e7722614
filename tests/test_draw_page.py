"""Try it, without a browser: what a form becomes as a command, and what a record of somebody else becomes as HTML."""

import json
from pathlib import Path

import pytest

from lora_fp8 import jobs
from lora_fp8.errors import UserError
from lora_fp8.run import drawings as folders
from webui import drawings
from webui.context import Place, Ui
from webui.pages.draw import handlers, rendering

FORM = {"source": "", "steps": [], "base": "demo", "prompt": "a cat", "negative": "", "seed": "", "width": ""}
FORM |= {"height": "", "sampling_steps": "", "guidance": "", "strengths": ["1"], "with_base": True, "where": "beside"}


@pytest.fixture
def ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ui:
    monkeypatch.setattr(jobs, "ensure_worker", lambda home: None)
    (tmp_path / "data").mkdir()
    return Ui("en", Place(tmp_path / "home", [tmp_path / "data"]))


def test_a_form_becomes_a_job_beside_the_trainings(ui: Ui, tmp_path: Path) -> None:
    run = tmp_path / "data" / "run"
    (run / "checkpoints" / "step-000500").mkdir(parents=True)
    (run / "export" / "step-000250").mkdir(parents=True)
    assert drawings.list_steps(run) == [500, 250]
    with pytest.raises(UserError, match="a prompt has no option --out=/etc;"):
        drawings.start(ui, {**FORM, "source": str(run), "steps": [0], "prompt": "--out=/etc; $(x)"})
    form = {**FORM, "source": str(run), "steps": [0, 250], "prompt": "-o=/etc; $(x)", "seed": "7", "guidance": "3.5"}
    first, second = (drawings.start(ui, {**form, "where": where}) for where in ("beside", "turn"))
    assert (first, second) == ("000001", "000002")
    views = {view.command[1]: view for view in jobs.Queue(ui.place.home).list_jobs(shell=False)}
    view = views[f"--out={ui.place.home / 'drawings' / '000001'}"]
    assert view.command[2:] == (
        *("--prompt=-o=/etc; $(x)", "--seed=7", "--guidance=3.5", "--strength=1", "--base"),
        *("--step=0", "--step=250", "--", str(run)),
    )
    assert (view.gpus, view.priority, view.max_attempts) == (jobs.BESIDE, 0, 1)
    in_turn = views[f"--out={ui.place.home / 'drawings' / '000002'}"]
    assert (in_turn.gpus, in_turn.priority) == ("", 1)
    assert [drawing.id for drawing in drawings.list_drawings(ui)] == ["000002", "000001"]
    with pytest.raises(UserError, match="still in progress"):
        drawings.delete(ui, "000001")


def test_checkpoints_that_somebody_has_chosen_stay_when_the_pages_own_choice_is_answered(ui: Ui) -> None:
    run = ui.place.roots[0] / "run"
    for step in (250, 500):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    choose = handlers.Handlers(ui).choose_source
    assert choose(str(run))[0]["value"] == [0], "the newest, where nobody has chosen"
    assert "value" not in choose(str(run), [0, 250])[0]
    assert choose(str(run), [0, 300])[0]["value"] == [0], "another run's"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"source": "/etc/passwd"}, "/etc/passwd"),
        ({"base": ""}, "name a base model"),
        ({"base": "/etc"}, "/etc"),
        ({"seed": "seven"}, "seed: seven is not a number"),
        ({"guidance": "nan"}, "guidance: nan"),
        ({"seed": "-1"}, "seed: -1"),
        ({"strengths": ["9"]}, "accepted"),
        ({"where": "moon"}, "accepted: turn, beside"),
        ({"prompt": "x" * 5000}, "4000 characters"),
        ({"prompt": "a\0b"}, "NUL"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_nothing(ui: Ui, given: dict, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        drawings.start(ui, {**FORM, **given})
    assert jobs.Queue(ui.place.home).list_jobs(shell=False) == []
    folder = drawings.get_folder(ui.place)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_record_of_anybody_stays_text_and_names_no_other_files(ui: Ui) -> None:
    folder = drawings.get_folder(ui.place) / "000001"
    folders.create(folder)
    evil = '"><script>window.canary=1</script>'
    images = [
        {"lora": None, "strength": 0.0, "file": "000.png"},
        {"lora": 0, "strength": 1.0, "file": "001.png"},
        {"lora": 7, "strength": 0.5, "file": "002.png"},
        {"lora": 0, "strength": evil, "file": "003.png"},
        {"lora": 0, "strength": 1.0, "file": "../../secret.png"},
        "no image",
    ]
    record = {"state": evil, "stage": evil, "prompt": evil, "negative": evil, "seed": evil, "steps": evil}
    record |= {"width": evil, "base": evil, "device": evil, "loras": [{"name": evil, "place": evil}], "images": images}
    folders.write(folder, record)
    (drawing,) = drawings.list_drawings(ui)
    assert [image["file"] for image in drawing.images] == ["000.png", "001.png", "002.png"]
    html = rendering.render_drawing(ui, drawing) + rendering.render_history(ui, [drawing, drawing], drawing)
    assert "<script" not in html and "secret" not in html and html.count("&lt;script") > 5
    for content in ("[]", "nonsense", json.dumps({"images": {"a": 1}, "loras": 3, "total": -1})):
        (folder / "drawing.json").write_text(content, encoding="utf-8")
        (drawing,) = drawings.list_drawings(ui)
        assert drawing.state == "stopped" and rendering.render_drawing(ui, drawing)
    drawings.delete(ui, "000001")
    assert drawings.list_drawings(ui) == [] and not folder.exists()
