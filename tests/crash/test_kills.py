"""A training that is killed again and again, and gone on with each time: always the bytes of the one that never was.

A kill is aimed: at the n-th file-changing call of a kind, such as those into a checkpoint that is being saved. What
is on the disk changes at these calls and at no other moment. KILLS=2000 in the environment makes it two thousand.
"""

import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import scenes
from conftest import SEED

from lora_fp8.errors import RunFailure
from lora_fp8.run import Run
from lora_fp8.training import checkpoint

KILLS = int(os.environ.get("KILLS", "12"))
PLACES = ("/checkpoints/.tmp-", "/cache/", "/samples/", "/export/", "/events.jsonl", "")
"""Parts of paths: in a save, while encoding, in a preview, in a LoRA file, between all this, anywhere."""


def faults_of(run: Run) -> list[str]:
    """Return what is wrong with a run after a kill: a checkpoint that has its name is whole, and none is lost."""
    faults, newest = [], 0
    for path in run.checkpoints.glob("step-*"):
        try:
            newest = max(newest, checkpoint.read(path).step)
        except RunFailure as failure:
            faults.append(f"unloadable: {failure}")
    acknowledged = max((event["step"] for event in run.read_events() if event["event"] == "checkpoint"), default=0)
    if newest < acknowledged:
        faults.append(f"lost: step {acknowledged} was acknowledged, the newest is {newest}")
    if run.is_locked():
        faults.append("a killed run is said to be alive")
    return faults


@pytest.mark.timeout(max(900, 10 * KILLS))
def test_killed_wherever_it_is_it_ends_with_the_same_bytes(rig, trained, fresh, capsys):
    scene, rng = scenes.get("training", trained.settings), random.Random(SEED)
    calls = [call for call in trained.trace if call.op != "mark"]
    many = {part: sum(part in call.path for call in calls) for part in PLACES}
    kills: Counter[str] = Counter()
    completed = 0
    while kills.total() < KILLS or completed < len(PLACES):
        place, code = fresh(), -9
        first: str | None = PLACES[completed % len(PLACES)]
        while code:
            aim = rng.choice(PLACES) if first is None else first
            # The first kill of a run always hits: the number of calls varies a little, so the last ones are left out.
            at = rng.randint(1, many[aim] if first is None else max(1, many[aim] // 2))
            first = None
            outcome = rig.play("training", place, "kill", at, match=aim, settings=trained.settings)
            code = outcome.code
            assert code in (0, -9), outcome.text
            if code:
                kills[aim] += 1
                assert not faults_of(Run(scene.run(place)))
        assert scene.view(place) == trained.view, f"other bytes, SEED={SEED}, run {completed}"
        completed += 1
        shutil.rmtree(place)
    assert all(kills[part] for part in PLACES), kills
    with capsys.disabled():
        print(f"\nSEED={SEED}: {kills.total()} kills over {completed} runs: {dict(kills)}")


def test_a_naive_way_of_saving_is_found_out(rig, trained, fresh):
    """A saver that writes in place: were nothing found here, the test above would prove nothing."""
    scene = scenes.get("training", trained.settings)
    place: Path = fresh()
    outcome = rig.play(
        "training", place, "torn", 2, match="/checkpoints/step-", plant="no rename", settings=trained.settings
    )
    assert outcome.code == -9
    assert re.match("unloadable", faults_of(Run(scene.run(place)))[0])
