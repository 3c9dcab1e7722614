"""Learning rates by step: against transformers' schedules, REX's formula, and numpy's interpolation."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from lora_fp8 import config
from lora_fp8.errors import UserError
from lora_fp8.settings import Schedule, schedules

LR, STEPS = 2e-4, 30
JOB = """
name = "a"
[model]
family = "sd15"
path = "demo"
[[dataset.folders]]
path = "images"
"""


def rates(section: Schedule, steps: int = STEPS) -> list[float]:
    return [schedules.compute_learning_rate(step, section, LR, steps) for step in range(steps + 1)]


def theirs(make, *args, **more) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = make(optimizer, *args, **more)
    values = []
    for _ in range(STEPS + 1):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (7, 7), (0.1, 3), (29, 29)])
@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("min_lr", [0.0, 0.1])
def test_polynomial_equals_transformers(warmup, steps, power, min_lr):
    expected = theirs(
        transformers.get_polynomial_decay_schedule_with_warmup, steps, STEPS, lr_end=LR * min_lr, power=power
    )
    section = Schedule(name="polynomial", warmup=warmup, power=power, min_lr=min_lr)
    assert rates(section) == pytest.approx(expected, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (7, 7), (0.1, 3)])
@pytest.mark.parametrize(("decay", "decay_steps"), [(1, 1), (10, 10), (0.3, 9), (23, 23)])
@pytest.mark.parametrize("shape", ["cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize("min_lr", [0.0, 0.1])
def test_wsd_equals_transformers(warmup, steps, decay, decay_steps, shape, min_lr):
    expected = theirs(transformers.get_wsd_schedule, steps, decay_steps, STEPS, decay_type=shape, min_lr_ratio=min_lr)
    got = rates(Schedule(name="wsd", warmup=warmup, decay=decay, decay_shape=shape, min_lr=min_lr))
    assert got[steps:] == pytest.approx(expected[steps:], rel=1e-9, abs=1e-18)
    assert min_lr or got == pytest.approx(expected, rel=1e-9, abs=1e-18)  # their warm-up begins at the floor


@pytest.mark.parametrize("warmup", [0, 6])
def test_rex_is_the_formula_of_its_paper(warmup):
    """Chen et al. 2021: lr * (1 - t/T) / (1/2 + 1/2 (1 - t/T))."""
    got = rates(Schedule(name="rex", warmup=warmup))
    for step in range(warmup, STEPS + 1):
        left = 1 - (step - warmup) / (STEPS - warmup)
        assert got[step] == pytest.approx(LR * left / (1 / 2 + 1 / 2 * left), rel=1e-12)
    assert got[:warmup] == pytest.approx([LR * step / 6 for step in range(warmup)])
    # OneTrainer writes it with d = 0.9, and lifts it to a floor.
    got = rates(Schedule(name="rex", rex_d=0.9, min_lr=0.2))
    for step in range(STEPS + 1):
        left = 1 - step / STEPS
        assert got[step] == pytest.approx(LR * (0.2 + 0.8 * left / ((1 - 0.9) + 0.9 * left)), rel=1e-12)
    straight = rates(Schedule(name="rex", rex_d=0.0))
    assert straight == pytest.approx(rates(Schedule(name="linear")), rel=1e-12, abs=1e-18)


def test_points_are_interpolated_as_numpy_does():
    section = Schedule(name="points", points={"1.0": 0.1, "0": 0.0, "5": 1.0, "0.5": 2.0}, warmup=7)
    expected = np.interp(np.arange(STEPS + 1), [0, 5, 15, 30], [0.0, 1.0, 2.0, 0.1])
    assert rates(section) == pytest.approx(list(LR * expected), rel=1e-12)  # a warm-up of the table does not count
    late = Schedule(name="points", points={"10": 0.5, "12": 1.0})
    assert rates(late) == pytest.approx(list(LR * np.interp(range(STEPS + 1), [10, 12], [0.5, 1.0])))
    assert rates(Schedule(name="points", points={"0.3": 0.5})) == [LR * 0.5] * (STEPS + 1)


@pytest.mark.parametrize("written", ["{'0' = 0, '0.5' = 1, '1.0' = 0.1}", "['0 = 0', '0.5 = 1', '1.0 = 0.1']"])
def test_points_are_written_as_a_table(written):
    text = f"{JOB}[schedule]\nname = 'points'\npoints = {written}\n"
    job = config.loads(text)
    assert job.schedule.points == {"0": 0, "0.5": 1, "1.0": 0.1}
    assert config.loads(config.dumps(job)) == job
    assert list(config.loads(config.dumps(job)).schedule.points) == list(job.schedule.points)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("name = 'points'", "schedule.name: 'points' needs schedule.points, such as"),
        ("name = 'points'\npoints = {0 = 0, 1.0 = 0.0}", "schedule.points: no factor is above 0"),
        ("name = 'points'\npoints = {half = 1}", "schedule.points: 'half' is not a position in the training"),
        ("name = 'points'\npoints = {1.5 = 1}", "schedule.points: '1.5' is not a position in the training"),
        ("name = 'points'\npoints = {'-1' = 1}", "schedule.points: '-1' is not a position in the training"),
        (f"name = 'points'\npoints = {{{'9' * 400} = 1}}", "is not a position in the training"),
        (
            "name = 'points'\npoints = {0.5 = 1, 50 = 1}",
            "schedule.points: '0.5' and '50' are the same step; remove one",
        ),
        ("name = 'points'\npoints = {0 = -1}", "schedule.points.0: must be at least 0 and at most 100"),
        (
            "name = 'wsd'\nwarmup = 60\ndecay = 41",
            "schedule.decay: the decay has 41 steps and schedule.warmup 60, but train.steps is",
        ),
        (
            "name = 'wsd'\nwarmup = 0.6\ndecay = 0.5",
            "schedule.decay: the decay has 50 steps and schedule.warmup 60, but train.steps is",
        ),
        ("name = 'rexx'", "did you mean 'rex'?"),
    ],
)
def test_schedules_that_cannot_be_are_refused(lines, problem):
    with pytest.raises(UserError) as caught:
        config.loads(f"{JOB}[train]\nsteps = 100\n[schedule]\n{lines}\n")
    assert problem in str(caught.value)


def test_what_belongs_to_another_schedule_is_reported():
    job = config.loads(
        f"{JOB}[schedule]\nname = 'points'\npoints = {{'0' = 1}}\nwarmup = 5\npower = 3.0\ndecay = 0.1\n"
    )
    warnings = " ".join(config.find_unused_settings(job))
    assert "schedule.warmup has no effect with schedule.name = 'points'" in warnings
    assert "schedule.power has no effect without schedule.name = 'polynomial'" in warnings
    assert "schedule.decay has no effect without schedule.name = 'wsd'" in warnings
