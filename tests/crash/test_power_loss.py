"""Power losses, replayed from the recorded calls of each scene: what was acknowledged is not lost (see `powerloss`).

2,000 states of each disk in `make torture`, some in `make test`. The last tests plant mistakes in how files are
written: the same replay has to report each as a loss.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenes
from conftest import SEED
from powerloss import MODELS, Disk, lay_out, snapshot
from rig import Rig

LADDERS = ("captions", "page", "fetch", "made")
FEW, MANY = 150, 2000


def losses(disk: Disk, model: str, count: int, fresh: Callable[[], Path], judge: Callable[[Path, list[str]], Any],
           first: bool = False) -> list[str]:  # fmt: skip
    """Return what is lost in `count` states, one line each.

    Args:
        judge: judge(folder, acknowledged marks) raises where something is lost.
        first: stop at the first loss.
    """
    rng, found = random.Random(f"{SEED} {model}"), []
    print(f"SEED={SEED}")
    for number in range(count):
        crash = rng.randint(0, disk.length)
        folder = fresh()
        lay_out(disk.after(crash, model, rng), folder)
        try:
            judge(folder, disk.acknowledged(crash))
        except Exception as error:
            found.append(f"state {number}, after call {crash}: {type(error).__name__}: {str(error)[:500]}")
            if first:
                break
        shutil.rmtree(folder)
    return found


def recorded(rig: Rig, name: str, folder: Path, plant: str = "") -> tuple[Disk, list[Any]]:
    """Play a ladder and return its disk, and what is seen before its first act and after each."""
    scene = scenes.get(name)
    played, seen = folder / "played", folder / "seen"
    for place in (played, seen):
        place.mkdir(parents=True)
        scene.prepare(place)
    before = snapshot(played)
    outcome = rig.play(name, played, record=True, plant=plant)
    assert outcome.code == 0, outcome.text
    return Disk(before, outcome.trace, played.resolve()), scene.views(seen)


def judge_ladder(name: str, views: list[Any]) -> Callable[[Path, list[str]], None]:
    """Return a judge: after `mend` all acknowledged acts are seen, and at most the one that was at work, too."""
    scene = scenes.get(name)

    def judge(folder: Path, marks: list[str]) -> None:
        scene.mend(folder)
        scenes.judge(scene.view(folder), views, len(marks))

    return judge


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", LADDERS)
def test_a_power_loss_takes_nothing_that_was_acknowledged(name, model, rig, how_many, fresh, tmp_path):
    disk, views = recorded(rig, name, tmp_path / name)
    lost = losses(disk, model, how_many(MANY, FEW), fresh, judge_ladder(name, views))
    assert not lost, f"{len(lost)} losses:\n" + "\n".join(lost[:10])


def judge_training(trained: Any) -> Callable[[Path, list[str]], None]:
    """Return a judge: the checkpoints and files that were acknowledged are there, and nothing that is there is torn."""
    scene = scenes.get("training", trained.settings)

    def judge(folder: Path, marks: list[str]) -> None:
        (newest, bundle, best), exported = scene.view(folder)
        saved = max((mark for mark in marks if mark.startswith("step-")), default="")
        assert newest >= saved, f"{saved} was acknowledged, the newest is {newest or 'none'}"
        expected_bundle, expected = trained.view
        torn = [name for name, told in exported.items() if expected[name] != told]
        assert not torn, f"{torn}: not what training wrote"
        if "done" in marks:
            # The removal of a former best may be lost: parts of it are left, and the newer one is chosen.
            kept = {name: told for name, told in best.items() if name in expected_bundle[2]}
            assert (newest, bundle, kept) == expected_bundle and exported == expected, (
                "done was said, and files are missing"
            )

    return judge


@pytest.mark.parametrize("model", MODELS)
def test_a_power_loss_takes_no_checkpoint_that_was_acknowledged(model, rig, trained, how_many, fresh):
    disk = Disk(trained.before, trained.trace, trained.place)
    lost = losses(disk, model, how_many(MANY, FEW), fresh, judge_training(trained))
    assert not lost, f"{len(lost)} losses:\n" + "\n".join(lost[:10])


def test_a_training_goes_on_after_a_power_loss_to_the_same_bytes(rig, trained, how_many, fresh):
    disk, rng = Disk(trained.before, trained.trace, trained.place), random.Random(SEED)
    scene = scenes.get("training", trained.settings)
    for number in range(how_many(100, 3)):
        folder = fresh()
        lay_out(disk.after(rng.randint(0, disk.length), MODELS[number % 2], rng), folder)
        outcome = rig.play("training", folder, settings=trained.settings)
        assert outcome.code == 0, (number, outcome.text)
        assert scene.view(folder) == trained.view, number


@pytest.mark.parametrize(
    ("name", "mistake"), [(name, mistake) for name in LADDERS for mistake in scenes.SCENES[name].mistakes]
)
def test_a_planted_mistake_is_found_out(name, mistake, rig, fresh, tmp_path):
    """Were nothing lost here, the tests above would prove nothing."""
    disk, views = recorded(rig, name, tmp_path / name, mistake)
    assert losses(disk, "strict", MANY, fresh, judge_ladder(name, views), first=True)


@pytest.mark.parametrize("mistake", scenes.Training.mistakes)
def test_a_planted_mistake_in_checkpoints_is_found_out(mistake, rig, fresh, trained, tmp_path):
    (place := tmp_path.resolve() / "planted").mkdir()
    outcome = rig.play("training", place, record=True, plant=mistake, settings=trained.settings)
    assert outcome.code == 0, outcome.text
    assert losses(Disk({}, outcome.trace, place), "strict", MANY, fresh, judge_training(trained), first=True)
