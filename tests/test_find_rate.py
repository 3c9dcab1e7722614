"""The learning-rate test: each step beside a second model's loss; what is suggested and said."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_fp8 import train
from lora_fp8.distributed import processes
from lora_fp8.errors import UserError
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Job
from lora_fp8.stages import cache, find_rate, load
from lora_fp8.stages.find_rate import Point, RateTest
from lora_fp8.stages.session import Session, UnwrittenRun
from lora_fp8.stages.step import compute_loss

EXACT = ("model.dtype=fp32", "quantize.storage=none", "train.batch_size=2", "adapter.text_encoder=false")


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_each_step_is_compared_with_the_base_on_the_same_draws(
    family: str, job: Callable[..., Job], tmp_path: Path
) -> None:
    """The base's losses are those of a model that never had adapters; the first step's are equal."""
    mine = job(*EXACT, "train.accumulate=2", f"output_dir='{tmp_path / 'runs'}'", family=family)
    found = find_rate.find_rate(mine, steps=6, ends=(1e-4, 1e-2))
    assert [point.lr for point in found.points] == pytest.approx([1e-4 * 100 ** (i / 5) for i in range(6)])
    assert not (tmp_path / "runs").exists()  # nothing is kept

    session = Session(planning.make(mine), UnwrittenRun(None), processes.Processes())
    data = cache.cache(session)
    plain, *_ = load.load_base(session.family, mine.quantize)
    objective = session.family.make_objective(mine.objective)
    for step, point in enumerate(found.points, 1):
        losses = []
        for position in (2 * step - 2, 2 * step - 1):
            batch = data.loader.take_batch(step, position)
            assert batch is not None
            with torch.no_grad():
                losses.append(compute_loss(session.family, plain, objective, batch, 1.0))
        assert point.base_loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    first, last = found.points[0], found.points[-1]
    assert first.ratio == pytest.approx(1, abs=1e-6) and first.loss == pytest.approx(first.base_loss, rel=1e-6)
    assert last.loss != pytest.approx(last.base_loss, rel=1e-4)  # it has learned, or unlearned


def test_it_ends_where_the_adapters_make_the_base_worse(job: Callable[..., Job]) -> None:
    found = find_rate.find_rate(job(*EXACT), steps=40, ends=(1e-3, 1e3))
    assert len(found.points) < 40
    assert all(point.ratio <= find_rate.END for point in found.points[:-1]) and not found.still_falls


def test_it_computes_as_training_does(job: Callable[..., Job]) -> None:
    """Without attention of cuDNN, which gives compiled blocks wrong gradients; with as many threads."""
    before = torch.get_num_threads()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        find_rate.find_rate(job(*EXACT, f"train.threads={before + 1}"), steps=1)
        assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_start_that_is_not_used_is_told(job: Callable[..., Job]) -> None:
    lora = train.run(job(*EXACT, "train.steps=1")).files[0]
    events: list[dict] = []
    find_rate.find_rate(job(*EXACT, f"adapter.init_from='{lora}'", "name='rate'"), steps=1, echo=events.append)
    told = [str(event["text"]) for event in events if event["event"] == "warning"]
    assert any(text.startswith("adapter.init_from is not used here") for text in told)


def test_prodigy_needs_none(job: Callable[..., Job]) -> None:
    with pytest.raises(UserError, match="finds its learning rate by itself"):
        find_rate.find_rate(job("optimizer.name=prodigy", "optimizer.lr=auto"))


def curve(*ratios: float) -> RateTest:
    points = tuple(Point(10 ** (i / 2 - 5), 0.1, 0.1, ratio) for i, ratio in enumerate(ratios))
    return RateTest("SD 1.5", "fp8", 1.4, 1e-4, points)


def test_what_is_suggested_and_said() -> None:
    found = curve(1.0, 0.99, 0.9, 0.7, 0.5, 0.45, 0.8, 1.6)  # lowest at 10^-2.5
    assert found.lowest.lr == pytest.approx(10**-2.5)
    # A quarter of 0.00316, without the factor that training puts on top: 0.000565.
    assert found.suggestion == 6e-4
    text = "\n".join(found.format_lines())
    assert "optimizer.lr = 0.0006" in text and "(1.4)" in text and "This config has optimizer.lr = 0.0001" in text
    rows = {line.split()[0]: line for line in found.format_lines() if "#" in line or "lowest" in line}
    assert rows["3.2e-03"].endswith("lowest") and rows["1.0e-04"].endswith("this config")
    falling = curve(1.0, 0.9, 0.8)
    assert falling.suggestion is None and "give a higher one with --to" in "\n".join(falling.format_lines())
    flat = curve(1.0, 1.0, 0.9995, 1.1)
    assert flat.suggestion is None and "the loss never fell" in "\n".join(flat.format_lines())
    assert replace(found, factor=1.0).suggestion == 8e-4


def test_a_target_of_the_base_itself_is_no_loss_of_the_base(job: Callable[..., Job]) -> None:
    """With the base's prediction as the target of all images, the base's loss is 0: no rate can improve on it."""
    own = ("dataset.folders.0.regularization=true", "objective.prior_for_regularization=true")
    mine = job(*EXACT, *own)
    session = Session(planning.make(mine), UnwrittenRun(None), processes.Processes())
    data, loaded = cache.cache(session), load.load(session)
    assert find_rate._measure_base(session, data, loaded, 1) == 0.0
    with pytest.raises(UserError, match="all images are regularization images"):
        find_rate.find_rate(mine, steps=3)
