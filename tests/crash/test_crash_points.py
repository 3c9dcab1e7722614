"""Kill, full disk, I/O error and short write at the file-changing calls of each scene (see `rig` and `scenes`).

`make test` draws some calls of each fault, `make torture` takes all.
"""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import scenes
from rig import FAULTS, GROWS, Call, Outcome, Rig

LADDERS = ("captions", "page", "queue", "rescue", "fetch", "made")
FEW = 8
"""Calls of each fault and scene in `make test`."""
FEW_TRAININGS = 2


def points(trace: list[Call], fault: str) -> list[int]:
    """Return the numbers of the calls that this fault makes sense at."""
    counted = [call for call in trace if call.op != "mark"]
    fits = {"torn": ("write",), "short": ("write",), "full once": GROWS, "full": GROWS}.get(fault)
    return [number for number, call in enumerate(counted, 1) if fits is None or call.op in fits]


def in_words(outcome: Outcome, fault: str) -> None:
    """Assert that it ended as this fault lets it: killed, or by a message of one line and its exit code, or not at all.

    A fault that something else makes good for, such as one in front of what is only tidied up, is no failure.
    """
    if fault in ("kill", "torn"):
        assert outcome.code in (-9, 0), outcome
        return
    assert "Traceback" not in outcome.text, outcome.text
    assert outcome.code in ((0,) if fault == "short" else (0, 2, 3)), outcome
    assert outcome.code == 0 or len(outcome.text.strip().splitlines()) == 1, outcome.text


@pytest.fixture(scope="module")
def played(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Call], list[Any]]]:
    """played("page"): the trace of the whole scene, and what is seen before its first act and after each."""
    kept: dict[str, Any] = {}

    def play(name: str) -> tuple[list[Call], list[Any]]:
        if name not in kept:
            scene = scenes.get(name)
            for folder in (one := tmp_path_factory.mktemp(name), two := tmp_path_factory.mktemp(name)):
                scene.prepare(folder)
            outcome = rig.play(name, two, record=True)
            assert outcome.code == 0 and outcome.marks == [act for act, _ in scene.acts()], outcome.text
            kept[name] = outcome.trace, scene.views(one)
        return kept[name]

    return play


@pytest.mark.parametrize("fault", FAULTS[1:])
@pytest.mark.parametrize("name", LADDERS)
def test_what_was_acknowledged_stays_and_the_rest_is_done_or_not(name, fault, rig, played, draw, fresh):
    trace, views = played(name)
    scene = scenes.get(name)
    wrong = []
    for at in draw(points(trace, fault), FEW):
        place = fresh()
        scene.prepare(place)
        outcome = rig.play(name, place, fault, at)
        try:
            in_words(outcome, fault)
            assert not (torn := scene.torn(place, views)), f"half written: {torn}"
            scene.mend(place)
            done = scenes.judge(scene.view(place), views, len(outcome.marks))
            for _, action in scene.acts()[done:]:
                action(place)
            assert scene.view(place) == views[-1], "going on from there ends elsewhere"
        except Exception as error:
            wrong.append(f"{fault} at call {at} ({outcome.marks[-1:]}): {type(error).__name__}: {str(error)[:600]}")
        shutil.rmtree(place)
    assert not wrong, f"{len(wrong)} faults:\n" + "\n".join(wrong[:10])


def test_captions_that_are_written_in_place_are_found_out(rig, played, fresh):
    """Were nothing torn here, the test above would not see torn files."""
    scene, (_, views), place = scenes.get("captions"), played("captions"), fresh()
    scene.prepare(place)
    outcome = rig.play("captions", place, "torn", 2, match="/0.txt", plant="captions in place")
    assert outcome.code == -9 and scene.torn(place, views) == ["0.txt"]


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_training_goes_on_to_the_same_bytes(fault, rig, trained, draw, fresh):
    scene = scenes.get("training", trained.settings)
    wrong = []
    for at in draw(points(trained.trace, fault), FEW_TRAININGS):
        place = fresh()
        outcome = rig.play("training", place, fault, at, settings=trained.settings)
        try:
            in_words(outcome, fault)
            (newest, *_), _ = scene.view(place)
            saved = [mark for mark in outcome.marks if mark.startswith("step-")]
            assert newest >= max(saved, default=""), f"{saved[-1]} was acknowledged, the newest is {newest or 'none'}"
            if "done" not in outcome.marks:
                again = rig.play("training", place, settings=trained.settings)
                assert again.code == 0, again.text
            assert scene.view(place) == trained.view, "other bytes"
        except Exception as error:
            wrong.append(f"{fault} at call {at} ({outcome.marks[-1:]}): {type(error).__name__}: {str(error)[-600:]}")
        shutil.rmtree(place)
    assert not wrong, f"{len(wrong)} faults:\n" + "\n".join(wrong[:10])
