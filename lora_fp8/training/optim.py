"""Optimizers that apply small updates to bf16 adapters, their exact state, and the learning rate by step.

A bf16 number near 0.05 can change only in steps of 0.00024. Adam with a learning rate of 1e-5 wants to change it by
0.00001: rounded to the nearest bf16, nothing happens at any step. There are three settings of `optimizer.rounding`:

    master      keeps float32 copies (masters), which the optimizer updates; the adapters are the rounded masters. Loses
                nothing.
    stochastic  keeps no masters: each step starts from the bf16 values and rounds the float32 result up or down, with
                the probability that preserves the mean. Unbiased, but each rounding adds noise of up to one bf16 step.
    nearest     plain bf16, as in naive trainers. Kept for comparison; it does not learn at small learning rates.

The measured differences are in NOTES.md, printed by tests/test_optim.py. float32 adapters need none of this and are
updated directly.

Gradients are passed as float32 tensors by name (the loop sums micro-batches in float32), not through `.grad`. The
optimizers are the libraries' own: `torch.optim.AdamW`; `bitsandbytes.optim.AdamW8bit` (Dettmers et al. 2021, "8-bit
Optimizers via Block-wise Quantization"; it keeps float32 moments for tensors below 4,096 elements) and `Lion8bit` (Chen
et al. 2023, "Symbolic Discovery of Optimization Algorithms"); and `prodigyopt.Prodigy` (Mishchenko and Defazio 2024,
"Prodigy: An Expeditiously Adaptive Parameter-Free Learner"), which multiplies the learning rate by its own estimate d,
one for all parameters. Each library is imported when it is needed.

The state consists of tensors by name and a JSON-able dict, from which a resumed run continues bit for bit. No pickle.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Message, UserError, first_few
from ..precision.names import by_name
from ..settings import Optimizer, Schedule

AUTO_FP8_FACTOR = 1.4
AUTO_LR = {"adamw8bit": 1e-4, "adamw": 1e-4, "lion8bit": 2e-5, "prodigy": 1.0}
"""Optimizer -> the learning rate of optimizer.lr = "auto". Lion changes every element by the learning rate, so 3 to 10
times less is usual (Chen et al., sect. 5)."""
ESTIMATES = ("d", "d_max", "d_numerator", "k")
"""Prodigy's state besides its tensors; the same in each of its parameter groups."""


def lr(section: Optimizer) -> float:
    """Return `optimizer.lr` as a number; see `AUTO_LR`."""
    return AUTO_LR[section.name] if section.lr == "auto" else float(section.lr)


def lr_factor(section: Optimizer, base_storage: str) -> float:
    """Return the factor on `optimizer.lr`: `optimizer.lr_scale` as a number.

    "auto" is 1.4 for a base stored in FP8 and 1 otherwise: the middle of the 30 to 50 % that lora-scripts users report
    as helpful with `fp8_base`. Our reference measurements found no mechanism for it: gradients have the same size to 1
    % with and without FP8, and a higher learning rate helped bf16 and FP8 bases alike. So it is a convention and not a
    correction: the effective learning rate is logged and stored, and `lr_scale = "none"` gives `lr` as written. With
    Prodigy "auto" is 1, because Prodigy finds its learning rate on the quantized base.
    """
    if section.lr_scale == "auto":
        return AUTO_FP8_FACTOR if base_storage == "fp8" and section.name != "prodigy" else 1.0
    return 1.0 if section.lr_scale == "none" else float(section.lr_scale)


def text_encoder_lr(section: Optimizer) -> float:
    """Return the learning rate of text encoders: `optimizer.text_encoder_lr`; "auto" is half of `optimizer.lr`.

    Half is a convention, more careful than the equal learning rates that kohya's scripts use by default: what a text
    encoder forgets is missing from every prompt. `lr_scale` does not apply, because text encoders are not stored in
    FP8. Prodigy has one learning rate for everything, so it is the denoiser's.
    """
    if section.name == "prodigy":
        return lr(section) * lr_factor(section, "none")
    return lr(section) / 2 if section.text_encoder_lr == "auto" else float(section.text_encoder_lr)


def lr_factors(section: Optimizer, names: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Return the learning rate factors of those layers, or parameters of layers, that have one; and warnings.

    Raises:
        UserError: an entry of `optimizer.lrs` matches none of the names.
    """
    return by_name("optimizer.lrs", section.lrs.items(), names)


def beta2(section: Optimizer) -> float:
    """Return `optimizer.beta2` as a number: "auto" is 0.999, or 0.99 with Lion, as in its paper."""
    if section.beta2 != "auto":
        return float(section.beta2)
    return 0.99 if section.name == "lion8bit" else 0.999


def cautions(section: Optimizer) -> list[str]:
    """Return warnings about settings that work but are seldom intended."""
    if section.name == "lion8bit" and section.lr != "auto" and section.lr >= 1e-4:
        return [
            Message(
                "{setting} is a rate for AdamW; with optimizer.name = 'lion8bit' 3 to 10 times less is usual, "
                "and as many times the weight_decay",
                setting=f"optimizer.lr = {section.lr:g}",
            )
        ]
    return []


def warmup_steps(section: Schedule, total_steps: int) -> int:
    """Return the number of warm-up steps; a fraction is rounded up, as in transformers' Trainer."""
    warmup = section.warmup if section.warmup >= 1 else section.warmup * total_steps
    return math.ceil(warmup - 1e-9)  # 0.1 * 30 is 3.0000000000000004


def learning_rate(step: int, section: Schedule, base_lr: float, total_steps: int) -> float:
    """Return the learning rate of one optimizer step; a pure function, so that resuming needs no schedule state.

    The values equal transformers' `get_{constant,cosine,linear}_schedule_with_warmup` and
    `get_cosine_with_hard_restarts_schedule_with_warmup`: `base_lr * step / warmup` during warm-up, so the first step
    has learning rate 0; then down to `min_lr * base_lr` at `total_steps`.

    Args:
        step: steps taken before this one: 0 for the first.
        section: the job's `[schedule]` table. `warmup` counts steps, or is a fraction of `total_steps` if below 1 (see
            `warmup_steps`).
        base_lr: learning rate after warm-up.
        total_steps: steps of the whole training.
    """
    warmup = warmup_steps(section, total_steps)
    if step < warmup:
        return base_lr * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if section.name == "constant":
        shape = 1.0
    elif section.name == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif section.name == "cosine_with_restarts":
        # After the last step the cycle has ended; it does not restart.
        turn = 1.0 if progress == 1 else section.cycles * progress % 1.0
        shape = 0.5 * (1.0 + math.cos(math.pi * turn))
    elif section.name == "linear":
        shape = 1.0 - progress
    else:
        raise UserError(
            Message(
                "{key}: {given} is not known; accepted: {names}",
                key="schedule.name",
                given=repr(section.name),
                names="constant, cosine, cosine_with_restarts, linear",
            )
        )
    if section.name != "constant":
        shape = section.min_lr + (1.0 - section.min_lr) * shape
    return base_lr * shape


@torch.no_grad()
def clip_(grads: dict[str, Tensor], max_norm: float) -> float:
    """Scale the gradients in place so that their joint 2-norm is at most `max_norm` (0: no limit).

    The norm is summed in float64 in the order of the names, so that the same gradients give the same bits. If it is not
    finite, nothing is scaled and the caller must stop.

    Returns:
        The norm before scaling.
    """
    if not grads:
        return 0.0
    norms = [torch.linalg.vector_norm(grads[name], dtype=torch.float64) for name in sorted(grads)]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        for grad in grads.values():
            grad.mul_(max_norm / (norm + 1e-6))  # the 1e-6 is torch.nn.utils.clip_grad_norm_'s
    return norm


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bf16, up or down with the probability that preserves the mean; moves less than one bf16 step.

    bf16 is the upper half of float32's bits. Adding a uniform 16-bit number and cutting off the lower half carries into
    the upper half with a probability proportional to the lower half. This works on the magnitude, whatever the sign.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    cut = values.contiguous().view(torch.int32).add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    # The cast changes nothing, as finite values are exact in bf16. NaN and infinity must not get noise in their
    # payload.
    return torch.where(torch.isfinite(values), cut, values).to(torch.bfloat16)


@dataclass
class _SavedState:
    """The tensors of a saved state.

    Attributes:
        moments: the optimizer's tensors of each parameter, {parameter: {key: tensor}}.
        masters: float32 copies of the parameters.
        shared: bitsandbytes' code books.
        unknown: names of tensors that belong to no parameter.
    """

    moments: dict[str, dict[str, Tensor]]
    masters: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


class AdapterOptimizer:
    """An optimizer for adapters; create it with `build`.

    Attributes:
        base_lr: `optimizer.lr * lr_factor`, the base of `learning_rate`; with Prodigy a factor on its estimate.
        lr_factor: see the function `lr_factor`.
        text_ratio: learning rate of text encoders as a multiple of `base_lr`; 0 if none is trained.
    """

    def __init__(
        self,
        named_params: list[tuple[str, nn.Parameter]],
        section: Optimizer,
        *,
        base_storage: str,
        seed: int,
        of_text: Collection[str] = (),
    ) -> None:
        if not named_params:
            raise ValueError("no parameters to optimize")
        self.params = dict(named_params)
        if len(self.params) != len(named_params):
            raise ValueError("two parameters have the same name")
        self.name = section.name
        self.rounding = section.rounding
        self.seed = seed
        self.lr_factor = lr_factor(section, base_storage)
        self.base_lr = lr(section) * self.lr_factor
        self._beta1 = section.beta1
        if section.rounding not in ("master", "stochastic", "nearest"):
            raise UserError(
                Message(
                    "{key}: {given} is not known; accepted: {names}",
                    key="optimizer.rounding",
                    given=repr(section.rounding),
                    names="master, stochastic, nearest",
                )
            )
        # The tensors that the optimizer updates and keys its state by: the parameter itself if it needs no rounding,
        # else a float32 copy.
        self._stepped: dict[str, nn.Parameter] = {}
        for name, param in self.params.items():
            direct = param.dtype == torch.float32 or section.rounding == "nearest"
            self._stepped[name] = param if direct else nn.Parameter(param.detach().to(torch.float32))
        self.text_ratio = text_encoder_lr(section) / self.base_lr if of_text else 0.0
        factors, _ = lr_factors(section, [name for name in self.params if name not in of_text])
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for name, stepped in self._stepped.items():
            ratio = self.text_ratio if name in of_text else factors.get(name, 1.0)
            # LoRA+ (Hayou et al. 2024): the matrix that starts at zero learns faster.
            ratio *= section.loraplus_lr_ratio if name.endswith(".lora_B.weight") else 1.0
            groups.setdefault((name in of_text, ratio), []).append(stepped)
        # The denoiser's groups come first, whatever the parameters' order: Prodigy sums over groups in their order.
        by_ratio = [
            {"params": params, "ratio": ratio}
            for (_, ratio), params in sorted(groups.items(), key=lambda group: group[0][0])
        ]
        self._optimizer = _make(section, by_ratio, self.base_lr)
        self._release()

    @torch.no_grad()
    def start_at(self, values: dict[str, Tensor]) -> None:
        """Set the masters to the values that the parameters were rounded from; only before the first step."""
        for name, value in values.items():
            stepped = self._stepped[name]
            if self.rounding == "master" and stepped is not self.params[name]:
                stepped.copy_(value)

    def effective(self, lr: float) -> float:
        """Return the learning rate that a step at `lr` uses: `lr`, or with Prodigy `lr` times its present estimate."""
        return lr * self._optimizer.param_groups[0]["d"] if self.name == "prodigy" else lr

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], lr: float, step: int) -> None:
        """Update the parameters.

        Args:
            grads: float32 gradients of all parameters, by name.
            lr: learning rate of this step, from `learning_rate`; that of text encoders keeps its ratio to it.
            step: number of this step, counted from 1. Keys the random bits of stochastic rounding, so that a resumed
                run draws the same.
        """
        if grads.keys() != self.params.keys():
            raise ValueError(f"gradients and parameters differ: {sorted(grads.keys() ^ self.params.keys())[:8]}")
        for name, stepped in self._stepped.items():
            if self.rounding == "stochastic" and stepped is not self.params[name]:
                stepped.data = self.params[name].detach().to(torch.float32)
            stepped.grad = grads[name].to(stepped.dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["ratio"]
        self._optimizer.step()
        for name, stepped in self._stepped.items():
            param = self.params[name]
            stepped.grad = None
            if stepped is param:
                continue
            if self.rounding == "master":
                param.copy_(stepped)
            else:
                param.copy_(round_stochastically(stepped.data, self._generator(step, name, param.device)))
        self._release()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies on the CPU of all that `load_state` needs: tensors, and a dict for JSON.

        Tensors are named "<parameter>/master" and "<parameter>/<key of the optimizer>". bitsandbytes' code books are
        the same for all parameters and stored once, as "qmap1" and, for AdamW's second moments, "qmap2".
        """
        tensors: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for name, stepped in self._stepped.items():
            if self.rounding == "master" and stepped is not self.params[name]:
                tensors[f"{name}/master"] = _copy(stepped)
            for key, value in self._optimizer.state.get(stepped, {}).items():
                if key == "step":
                    counts[name] = int(value)
                elif key in ("qmap1", "qmap2"):
                    tensors[key] = _copy(value)
                else:
                    tensors[f"{name}/{key}"] = _copy(value)
        meta = {
            "version": 1,
            "name": self.name,
            "rounding": self.rounding,
            "seed": self.seed,
            "lr_factor": self.lr_factor,
            "base_lr": self.base_lr,
            "steps": counts,
            "dtypes": {name: str(param.dtype).removeprefix("torch.") for name, param in self.params.items()},
        }
        if self.name == "prodigy":
            meta["estimates"] = {key: self._optimizer.param_groups[0][key] for key in ESTIMATES}
        return tensors, meta

    def load_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Restore what `state` returned; the parameters themselves are restored by `adapters.load_state_`.

        Raises:
            UserError: the state belongs to another optimizer, rounding, seed or set of parameters. Then nothing is
                changed.
        """
        self._check_meta(meta)
        state = self._read_state(tensors)
        if wrong := self._misfits(state, meta["steps"]):
            raise UserError(
                Message("the checkpoint's optimizer does not fit these adapters: {names}", names=first_few(wrong, 8))
            )

        self._optimizer.state.clear()
        for name, stepped in self._stepped.items():
            if name in state.masters:
                stepped.data.copy_(state.masters[name])
            if name not in meta["steps"]:
                continue
            values: dict[str, Any] = state.moments[name] | (state.shared if "absmax1" in state.moments[name] else {})
            count = int(meta["steps"][name])
            values["step"] = torch.tensor(float(count), dtype=torch.float32) if self.name == "adamw" else count
            self._optimizer.state[stepped] = values
        for group in self._optimizer.param_groups if self.name == "prodigy" else ():
            group.update(meta["estimates"])

    def _check_meta(self, meta: dict[str, Any]) -> None:
        """Check that the dict of a saved state is of this optimizer.

        Raises:
            UserError: it is of another one, or incomplete.
        """
        _, own = self.state()
        for key in ("version", "name", "rounding", "seed", "dtypes"):
            if meta.get(key) != own[key]:
                given, expected = f"{meta.get(key)!r}", f"{own[key]!r}"
                if key == "dtypes":
                    given, expected = Message("others"), Message("this job's")
                raise UserError(
                    Message(
                        "the checkpoint's optimizer does not fit: {key} is {given}, expected {expected}",
                        key=key,
                        given=given,
                        expected=expected,
                    )
                )
        counts = meta.get("steps")
        if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
            raise UserError(Message("the checkpoint's optimizer does not fit: steps are not whole numbers by name"))
        estimates = meta.get("estimates")
        if self.name == "prodigy" and not (
            isinstance(estimates, dict) and all(isinstance(estimates.get(key), int | float) for key in ESTIMATES)
        ):
            names = ", ".join(ESTIMATES)
            raise UserError(
                Message("the checkpoint's optimizer does not fit: it lacks {names} of Prodigy", names=names)
            )

    def _read_state(self, tensors: dict[str, Tensor]) -> _SavedState:
        """Sort the tensors of a saved state by their names; those of the optimizer are copied to its devices."""
        state = _SavedState({name: {} for name in self.params})
        device = next(iter(self.params.values())).device
        for full, tensor in tensors.items():
            name, _, key = full.rpartition("/")
            if full in ("qmap1", "qmap2"):
                state.shared[full] = tensor.to(device, copy=True)
            elif name not in self.params:
                state.unknown.append(full)
            elif key == "master":
                state.masters[name] = tensor
            else:
                state.moments[name][key] = tensor.to(self.params[name].device, copy=True)
        return state

    def _misfits(self, state: _SavedState, steps: Collection[str]) -> list[str]:
        """Return the names of tensors that are missing, unknown, or of another shape.

        Args:
            state: the tensors.
            steps: names of the parameters that have made a step, and so have moments.
        """
        expected_masters = {
            name for name, p in self._stepped.items() if self.rounding == "master" and p is not self.params[name]
        }
        wrong = state.unknown + sorted(expected_masters ^ state.masters.keys())
        wrong += [name for name, master in state.masters.items() if master.shape != self.params[name].shape]
        for name, values in state.moments.items():
            if name in steps:
                wrong += sorted({f"{name}/{key}" for key in self._keys(name)} ^ {f"{name}/{key}" for key in values})
                wrong += [f"{name}/{key}" for key, value in values.items() if not self._fits(name, key, value)]
            else:
                wrong += [f"{name}/{key}" for key in values]
            if "absmax1" in values:
                books = {key.replace("absmax", "qmap") for key in values if "absmax" in key}
                wrong += sorted(books - state.shared.keys())
        return wrong

    def num_bytes(self) -> int:
        """Return the bytes kept between two steps besides the adapters: masters and moments."""
        tensors, _ = self.state()
        return sum(tensor.nbytes for tensor in tensors.values())

    def _keys(self, name: str) -> set[str]:
        """Return the names of the optimizer's tensors for a parameter after its first step."""
        if self.name == "adamw":
            return {"exp_avg", "exp_avg_sq"}
        if self.name == "prodigy":
            return {"s", "p0", "exp_avg_sq"} | ({"exp_avg"} if self._beta1 else set())
        moments = {"state1"} if self.name == "lion8bit" else {"state1", "state2"}
        small = self.params[name].numel() < 4096
        return moments if small else moments | {key.replace("state", "absmax") for key in moments}

    def _fits(self, name: str, key: str, value: Tensor) -> bool:
        if key.startswith("absmax"):
            return value.shape == (math.ceil(self.params[name].numel() / 256),)
        if key in ("s", "p0"):  # p0 is a single 0 for a parameter that started as zeros
            return value.shape == (self.params[name].numel(),) or key == "p0" and not value.ndim
        return value.shape == self.params[name].shape

    def _generator(self, step: int, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}|{step}|{name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big", signed=True))

    def _release(self) -> None:
        """Free the float32 values of stochastic rounding between steps."""
        if self.rounding == "stochastic":
            for name, stepped in self._stepped.items():
                if stepped is not self.params[name]:
                    stepped.data = torch.empty(0, dtype=torch.float32, device=stepped.device)


def build(
    named_params: list[tuple[str, nn.Parameter]],
    section: Optimizer,
    *,
    base_storage: str,
    seed: int,
    of_text: Collection[str] = (),
) -> AdapterOptimizer:
    """Return the optimizer that the section names, for parameters as `adapters.parameters` lists them.

    Args:
        named_params: the parameters.
        section: the job's `[optimizer]` table.
        base_storage: storage of the frozen base ("fp8", "none"); decides the "auto" learning rate factor.
        seed: keys stochastic rounding.
        of_text: names of the parameters that get the learning rate of text encoders.

    Raises:
        UserError: the name or rounding is unknown, or bitsandbytes does not work here.
    """
    return AdapterOptimizer(named_params, section, base_storage=base_storage, seed=seed, of_text=of_text)


def _make(section: Optimizer, params: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {
        "lr": lr,
        "betas": (section.beta1, beta2(section)),
        "eps": section.eps,
        "weight_decay": section.weight_decay,
    }
    if section.name == "adamw":
        return torch.optim.AdamW(params, **settings)
    if section.name == "prodigy":
        from prodigyopt import Prodigy

        decay = settings.pop("weight_decay")  # set in the groups: as an argument, Prodigy prints it to stdout
        return Prodigy(
            [group | {"weight_decay": decay} for group in params],
            **settings,
            d0=section.d0,
            d_coef=section.d_coef,
            growth_rate=math.inf if section.growth_rate == "unlimited" else section.growth_rate,
            decouple=section.decouple,
            safeguard_warmup=section.safeguard_warmup,
            use_bias_correction=section.use_bias_correction,
        )
    if section.name in ("adamw8bit", "lion8bit"):
        try:
            import bitsandbytes
        except Exception as error:  # it loads a native library, which raises differently by platform
            raise UserError(
                Message(
                    "optimizer.name = {name} needs bitsandbytes, which does not load here ({why}); use 'adamw'",
                    name=repr(section.name),
                    why=error,
                )
            ) from error
        if section.name == "adamw8bit":
            return bitsandbytes.optim.AdamW8bit(params, **settings)
        del settings["eps"]  # Lion takes the sign and divides by nothing
        return bitsandbytes.optim.Lion8bit(params, **settings)
    raise UserError(
        Message(
            "{key}: {given} is not known; accepted: {names}",
            key="optimizer.name",
            given=repr(section.name),
            names=", ".join(AUTO_LR),
        )
    )


def state_bytes(params: list[nn.Parameter], section: Optimizer) -> int:
    """Return what `AdapterOptimizer.num_bytes` will be for these parameters, which may be on meta.

    bitsandbytes keeps moments in float32 for tensors below 4096 elements; otherwise one byte per element and a float32
    per block of 256, plus a shared code book of 256 float32 for each kind of moment. Prodigy keeps four tensors; one of
    them is a single number for parameters that start as zeros, which this estimate ignores.
    """
    moments = {"prodigy": 4, "lion8bit": 1}.get(section.name, 2)
    total = 0
    for param in params:
        num, direct = param.numel(), param.dtype == torch.float32 or section.rounding == "nearest"
        if section.name in ("adamw", "prodigy"):
            total += moments * num * (param.itemsize if direct else 4)  # in the dtype that is updated
        else:
            total += moments * (4 * num if num < 4096 else num + 4 * math.ceil(num / 256))
        if section.rounding == "master" and not direct:
            total += 4 * num
    if section.name in ("adamw8bit", "lion8bit") and any(param.numel() >= 4096 for param in params):
        total += moments * 4 * 256
    return total


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
