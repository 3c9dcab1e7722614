"""Optimizers by class: against the classes themselves, and the reasons why one is refused."""

import json

import pytest
import pytorch_optimizer
import safetensors.torch
import torch
from torch import nn

from lora_fp8 import train
from lora_fp8.errors import UserError
from lora_fp8.settings import Optimizer
from lora_fp8.training import optim

CLASSES = {
    "pytorch_optimizer.Adan": (pytorch_optimizer.Adan, {"betas": [0.9, 0.8, 0.95], "weight_decay": 0.1}),
    "pytorch_optimizer.ScheduleFreeAdamW": (pytorch_optimizer.ScheduleFreeAdamW, {"weight_decay": 0.02}),
    "torch.optim.NAdam": (torch.optim.NAdam, {}),
}


class Forgetful(torch.optim.SGD):
    """Counts its steps where no checkpoint looks."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] *= self.count
        return super().step(closure)


class Drawing(torch.optim.SGD):
    """Adds noise from the global random numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param))


class Listing(torch.optim.SGD):
    """Keeps a list for each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("history", []).append(1)
        return super().step(closure)


class Infinite(torch.optim.SGD):
    """Keeps a number that JSON does not have."""

    def step(self, closure=None):
        self.param_groups[0]["largest"] = float("inf")
        return super().step(closure)


class WithoutRate(torch.optim.Optimizer):
    """Takes no learning rate."""

    def __init__(self, params):
        super().__init__(params, {})


def make(name: str, dtype: torch.dtype = torch.float32, **more) -> tuple[list, optim.AdapterOptimizer]:
    drawn = torch.Generator().manual_seed(3)
    shapes = {"a": (16, 30), "b": (7, 5), "c": (4, 4, 3, 3)}
    named = [
        (key, nn.Parameter((torch.randn(shape, generator=drawn) * 0.05).to(dtype))) for key, shape in shapes.items()
    ]
    section = Optimizer(name=name, arguments=CLASSES[name][1], lr=1e-3, **more)
    return named, optim.build(named, section, base_storage="none", seed=4)


def gradients(step: int, named) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(50 + step)
    return {name: torch.randn(param.shape, generator=drawn) * 0.01 for name, param in named}


@pytest.mark.parametrize("name", CLASSES)
def test_ten_steps_equal_the_class_s_own(name: str) -> None:
    named, mine = make(name)
    made, arguments = CLASSES[name]
    theirs = [nn.Parameter(param.detach().clone()) for _, param in named]
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    judge = made(theirs, lr=1e-3, **given)
    if hasattr(judge, "train"):
        judge.train()
    for step in range(1, 11):
        grads = gradients(step, named)
        for param, grad in zip(theirs, grads.values(), strict=True):
            param.grad = grad.clone()
        judge.param_groups[0]["lr"] = 1e-3 / step
        judge.step()
        mine.step(mine.layout.join(grads), 1e-3 / step, step)
        for (_, param), expected in zip(named, theirs, strict=True):
            assert torch.equal(param, expected)
    if hasattr(judge, "eval"):
        judge.eval()
    with mine.evaluation():
        for (_, param), expected in zip(named, theirs, strict=True):
            assert torch.equal(param, expected)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("rounding", ["master", "stochastic", "nearest"])
def test_resumed_in_the_middle_is_the_same_to_the_bit(name: str, rounding: str) -> None:
    named, mine = make(name, torch.bfloat16, rounding=rounding)
    for step in range(1, 7):
        mine.step(mine.layout.join(gradients(step, named)), 1e-3, step)
        if step == 3:
            with mine.evaluation():  # as a checkpoint is written
                values = {key: param.detach().clone() for key, param in named}
                tensors, meta = mine.copy_state()
    again, resumed = make(name, torch.bfloat16, rounding=rounding)
    for key, param in again:
        param.data.copy_(values[key])
    resumed.load_state(safetensors.torch.load(safetensors.torch.save(tensors)), json.loads(json.dumps(meta)))
    for step in range(4, 7):
        resumed.step(resumed.layout.join(gradients(step, again)), 1e-3, step)
    assert all(torch.equal(param, other) for (_, param), (_, other) in zip(named, again, strict=True))
    tensors, meta = mine.copy_state()
    other, other_meta = resumed.copy_state()
    assert meta == other_meta and all(torch.equal(tensors[key], other[key]) for key in tensors)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("nowhere.Adam", {}, "optimizer.name = 'nowhere.Adam': there is no module nowhere; install its package"),
        ("torch.optim.Adm", {}, "torch.optim has no Adm, did you mean 'torch.optim.Adam'?"),
        ("torch.nn.Linear", {}, "it is not a torch.optim.Optimizer"),
        ("os.path", {}, "it is not a torch.optim.Optimizer"),
        (f"{__name__}.WithoutRate", {}, "it has no argument lr"),
        (
            "torch.optim.Adam",
            {"beta": 1},
            "optimizer.arguments: torch.optim.Adam has no argument 'beta'; its arguments are betas",
        ),
        ("pytorch_optimizer.Adan", {"bettas": [1]}, "has no argument 'bettas'"),  # although it takes **kwargs
        ("torch.optim.Adam", {"lr": 1.0}, "the trainer sets 'lr' itself; set optimizer.lr"),
        ("torch.optim.Adam", {"betas": [0.9, 2.0]}, "does not accept them (Invalid beta parameter at index 1: 2.0)"),
        ("torch.optim.LBFGS", {}, "it needs a closure"),
        ("pytorch_optimizer.AliG", {}, "it has no argument lr"),
        ("pytorch_optimizer.SOAP", {}, "'GG' (list) is neither a tensor nor a number"),
        (f"{__name__}.Listing", {}, "'history' (list) is neither a tensor nor a number"),
        (f"{__name__}.Infinite", {}, "its state cannot be saved"),
        (f"{__name__}.Forgetful", {}, "its state cannot be restored"),
        (f"{__name__}.Drawing", {}, "its state cannot be restored"),
    ],
)
def test_what_cannot_train_is_refused_with_the_reason(name: str, arguments: dict, problem: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(UserError) as caught:
        optim.try_out(Optimizer(name=name, arguments=arguments))
    assert problem in str(caught.value) and "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CLASSES)
def test_these_can(name: str) -> None:
    optim.try_out(Optimizer(name=name, arguments=CLASSES[name][1], loraplus_lr_ratio=16.0, lrs={"down": 0.5}))


def test_a_job_is_refused_before_it_has_a_folder(make_job, tmp_path) -> None:
    job = make_job(tmp_path, "optimizer.name=torch.optim.LBFGS")
    with pytest.raises(UserError, match="it needs a closure"):
        train.run(job, progress=False)
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())
