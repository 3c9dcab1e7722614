"""The loop against one that is written with torch alone: backward, clip, AdamW, step after step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lora_fp8 import adapters, train
from lora_fp8.settings import Job
from lora_fp8.stages.finish import Result
from lora_fp8.stages.step import compute_loss

STEPS, ACCUMULATE, LR = 5, 2, 1e-2
SETTINGS = (
    *("model.dtype=fp32", "quantize.storage=none", "adapter.dtype=fp32", "optimizer.name=adamw", f"optimizer.lr={LR}"),
    *("optimizer.lr_scale=none", "schedule.name=constant", "schedule.warmup=0", f"train.steps={STEPS}"),
    *("train.batch_size=2", f"train.accumulate={ACCUMULATE}", "checkpoint.every=50", "dataset.buckets=false"),
)


def plain_fit(session: Any, data: Any, loaded: Any, state: Any, missed: frozenset[str] = frozenset()) -> None:
    """Train as `train.fit` does, with torch's own parts."""
    job = session.job
    parameters = [parameter for _, parameter in adapters.list_trained_parameters(loaded.denoiser)]
    betas = (job.optimizer.beta1, 0.999)
    optimizer = torch.optim.AdamW(parameters, LR, betas, job.optimizer.eps, job.optimizer.weight_decay)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for position in range(step * ACCUMULATE, (step + 1) * ACCUMULATE):
            batch = data.loader.take_batch(step + 1, position)
            errors = compute_loss(session.family, loaded.denoiser, loaded.objective, batch, job.objective.guidance)
            weights = [
                job.dataset.folders[item.placed.example.folder_index].weight
                for item in data.loader.list_batch_items(position)
            ]
            losses.append(errors * torch.tensor(weights))
        torch.cat(losses).mean().backward()
        if job.train.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, job.train.max_grad_norm)
        optimizer.step()


@pytest.mark.parametrize("most", [0.0, 0.02], ids=["unclipped", "clipped"])
def test_five_steps_are_those_of_a_plain_loop(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, pictures: Any, most: float
) -> None:
    """Batches of 2, 2 and 1 pictures, two a step, from two folders of which one counts half."""
    found: list[dict[str, torch.Tensor]] = []

    def keep(session: Any, data: Any, loaded: Any, step: int) -> Result:
        found.append(
            {name: value.detach().clone() for name, value in adapters.list_trained_parameters(loaded.denoiser)}
        )
        return Result(session.run, [], [])

    monkeypatch.setattr(train, "finish", keep)
    folders = f"dataset.folders=[{{path='{pictures}'}}, {{path='{pictures}', weight=0.5, repeats=2}}]"
    # A large epsilon, so that the update depends on the size of the gradient and not on its sign alone.
    common = (*SETTINGS, folders, f"train.max_grad_norm={most}", "optimizer.eps=1e-3", "optimizer.weight_decay=0.1")
    train.run(job(*common, "name=ours"), progress=False)
    monkeypatch.setattr(train, "fit", plain_fit)
    train.run(job(*common, "name=plain"), progress=False)
    ours, plain = found
    moved = sum(float(tensor.norm()) ** 2 for name, tensor in plain.items() if "lora_B" in name) ** 0.5
    apart = sum(float((tensor - ours[name]).norm()) ** 2 for name, tensor in plain.items()) ** 0.5
    assert ours.keys() == plain.keys() and moved > 0.01
    assert apart < 1e-5 * moved
