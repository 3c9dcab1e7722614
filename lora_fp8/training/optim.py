"""Optimizers that apply small updates to bf16 adapters, and their exact state.

A bf16 number near 0.05 can change only in steps of 0.00024. Adam with a learning rate of 1e-5 wants to change it by
0.00001: rounded to the nearest bf16, nothing happens at any step. There are three settings of `optimizer.rounding`:

    master      keeps float32 copies (masters), which the optimizer updates; the adapters are the rounded masters. Loses
                nothing.
    stochastic  keeps no masters: each step starts from the bf16 values and rounds the float32 result up or down, with
                the probability that preserves the mean. Unbiased, but each rounding adds noise of up to one bf16 step.
    nearest     plain bf16, as in naive trainers. Kept for comparison; it does not learn at small learning rates.

The measured differences are in NOTES.md, printed by tests/test_optim.py. float32 adapters need none of this and are
updated directly.

Gradients are passed as one flat float32 vector (the loop sums micro-batches in float32), not through `.grad`. The
optimizers are the libraries' own (see `optimizers`), each imported when it is needed.

The state consists of tensors by name and a JSON-able dict, from which a resumed run continues bit for bit. No pickle.
The state of AdamW, Lion and Prodigy is known key by key. That of the others is saved as the library holds it (see
`library_state`).
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Message, UserError, first_few
from ..precision.names import map_by_name
from ..settings import Optimizer, Schedule, is_class
from . import foreign, library_state
from .flat import ALIGNMENT, Layout, Part, Segment
from .optimizers import (
    AUTO_LR,
    BY_KEYS,
    EIGHT_BIT,
    FLAT,
    SMALLEST_8BIT,
    Kind,
    Unit,
    count_list_entries,
    estimate_state_bytes,
    is_matrix,
    make,
    require_package,
    resolve_beta2,
)

__all__ = ["AUTO_LR", "resolve_beta2", "count_list_entries", "require_package", "estimate_state_bytes"]

AUTO_FP8_FACTOR = 1.4
PIECE = 2**22
"""Elements whose norm is computed at a time on a CPU, so that the float64 copy stays small."""
ROUNDED_PIECE = 2**24
"""Elements that are rounded stochastically at a time, with about 20 bytes of intermediate values each."""
ESTIMATES = ("d", "d_max", "d_numerator", "k")
"""Prodigy's state besides its tensors; the same in each of its parameter groups."""


def resolve_lr(section: Optimizer) -> float:
    """Return `optimizer.lr` as a number; see `AUTO_LR`."""
    return AUTO_LR.get(section.name, AUTO_LR["adamw"]) if section.lr == "auto" else float(section.lr)


def resolve_lr_factor(section: Optimizer, base_storage: str) -> float:
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


def try_out(section: Optimizer, *, limits: bool = False) -> None:
    """Check that the optimizer can be made here; one that is given as a class takes a few steps and is resumed.

    Args:
        section: the job's `[optimizer]` table.
        limits: the job limits the weights after each update.

    Raises:
        UserError: it cannot be made, or not be resumed to the bit, or its weights cannot be limited.
    """
    require_package(section)
    if is_class(section.name):
        plain = section.model_copy(update={"lrs": {}})

        def make_one(named: list[tuple[str, nn.Parameter]]) -> AdapterOptimizer:
            made = build(named, plain, base_storage="none", seed=0)
            if limits:
                made.limit_with(lambda values: None)
            return made

        foreign.try_out(section, make_one)


def resolve_text_encoder_lr(section: Optimizer) -> float:
    """Return the learning rate of text encoders: `optimizer.text_encoder_lr`; "auto" is half of `optimizer.lr`.

    Half is a convention, more careful than the equal learning rates that kohya's scripts use by default: what a text
    encoder forgets is missing from every prompt. `lr_scale` does not apply, because text encoders are not stored in
    FP8. Prodigy has one learning rate for everything, so it is the denoiser's.
    """
    if section.name == "prodigy":
        return resolve_lr(section) * resolve_lr_factor(section, "none")
    return resolve_lr(section) / 2 if section.text_encoder_lr == "auto" else float(section.text_encoder_lr)


def find_lr_factors(section: Optimizer, names: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Return the learning rate factors of those layers, or parameters of layers, that have one; and warnings.

    Raises:
        UserError: an entry of `optimizer.lrs` matches none of the names.
    """
    return map_by_name("optimizer.lrs", section.lrs.items(), names)


def find_cautions(section: Optimizer, schedule: Schedule | None = None) -> list[str]:
    """Return warnings about settings that work but are seldom intended."""
    if section.name == "lion8bit" and section.lr != "auto" and section.lr >= 1e-4:
        return [
            Message(
                "{setting} is a learning rate for AdamW; optimizer.name = 'lion8bit' usually needs a 3 to 10 times "
                "smaller one, and a weight_decay as many times larger",
                setting=f"optimizer.lr = {section.lr:g}",
            )
        ]
    if section.name == "adamw_schedulefree" and schedule is not None and schedule.name != "constant":
        return [
            Message(
                "{setting} lowers the learning rate, but optimizer.name = 'adamw_schedulefree' averages the weights "
                "instead; use 'constant'",
                setting=f"schedule.name = {schedule.name!r}",
            )
        ]
    return []


@torch.no_grad()
def clip_(gradient: Tensor, max_norm: float) -> float:
    """Scale a flat gradient in place so that its 2-norm is at most `max_norm` (0: no limit).

    The norm is summed in float64. If it is not finite, nothing is scaled and the caller must stop.

    Returns:
        The norm before scaling.
    """
    # A CPU would first copy the whole vector to float64.
    pieces = gradient.split(PIECE) if gradient.device.type == "cpu" else (gradient,)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        gradient.mul_(max_norm / (norm + 1e-6))  # the 1e-6 is torch.nn.utils.clip_grad_norm_'s
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


Limit = Callable[[dict[str, Tensor]], None]
"""Changes parameters, given by name, in place."""


@dataclass
class _SavedState:
    """The tensors of a saved state.

    Attributes:
        moments: the optimizer's tensors of each parameter, {parameter: {key: tensor}}.
        masters: float32 copies of the parameters.
        trained: the parameters' own values, where a checkpoint's adapter has those to evaluate.
        averages: the moving averages of the parameters.
        shared: bitsandbytes' code books.
        unknown: names of tensors that belong to no parameter.
    """

    moments: dict[str, dict[str, Tensor]]
    masters: dict[str, Tensor] = field(default_factory=dict)
    trained: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


class AdapterOptimizer:
    """An optimizer for adapters; create it with `build`.

    Attributes:
        base_lr: `optimizer.lr * lr_factor`, which the schedule varies; with Prodigy a factor on its estimate.
        lr_factor: see `resolve_lr_factor`.
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
        self.lr_factor = resolve_lr_factor(section, base_storage)
        self.base_lr = resolve_lr(section) * self.lr_factor
        self._beta1 = section.beta1
        if section.rounding not in ("master", "stochastic", "nearest"):
            raise UserError(
                Message(
                    "{key}: {given} is not available; accepted: {names}",
                    key="optimizer.rounding",
                    given=repr(section.rounding),
                    names="master, stochastic, nearest",
                )
            )
        self.text_ratio = resolve_text_encoder_lr(section) / self.base_lr if of_text else 0.0
        factors, _ = find_lr_factors(section, [name for name in self.params if name not in of_text])
        keys: dict[str, Kind] = {}
        for name, param in named_params:
            ratio = self.text_ratio if name in of_text else factors.get(name, 1.0)
            # LoRA+ (Hayou et al. 2024): the matrix that starts at zero learns faster.
            ratio *= section.loraplus_lr_ratio if name.endswith(".lora_B.weight") else 1.0
            is_small = section.name in EIGHT_BIT and param.numel() < SMALLEST_8BIT
            keys[name] = Kind(name in of_text, ratio, param.dtype, is_small)
        self.layout = Layout(named_params, keys)
        self._units = [unit for part in self.layout.parts for unit in self._make_units(part)]
        self._optimizers = make(section, self._units, self.base_lr)
        self._initial = library_state.read_groups(self._optimizers)
        self._has_modes = all(callable(getattr(made, "eval", None)) for made in self._optimizers)
        self._trained: list[Tensor] | None = None  # the units' values while those to evaluate are in their place
        self.ema_decay = section.ema_decay
        if self.ema_decay and self._has_modes:
            raise UserError(
                Message("optimizer.ema_decay: {name} averages the weights itself; leave it at 0", name=repr(self.name))
            )
        # One float32 vector of each unit: the average of its masters, or of its values where it has none.
        self._averages = [unit.master.float().clone() for unit in self._units] if self.ema_decay else []
        self._limit: Limit | None = None
        if self._has_modes:
            self._switch("train")
        self._release()

    def limit_with(self, limit: "Limit") -> None:
        """Let a function change the parameters after each update, in place and before they are rounded and averaged.

        Raises:
            UserError: the optimizer holds the weights a second time, which the function would not reach.
        """
        if self._has_modes:
            raise UserError(
                Message(
                    "{key}: {line}",
                    key="adapter.scale_weight_norms",
                    line=Message(
                        "{name} stores the weights a second time, and these cannot be limited; leave it at 0",
                        name=repr(self.name),
                    ),
                )
            )
        self._limit = limit

    @torch.no_grad()
    def _make_units(self, part: Part) -> list[Unit]:
        """Move a part's parameters into one vector and return what the optimizer updates of it."""
        kind = part.key
        assert isinstance(kind, Kind)
        first = self.params[part.segments[0].name]
        values = torch.zeros(part.stop - part.start, dtype=kind.dtype, device=first.device)
        for segment in part.segments:
            view = segment.select_from(values)
            view.copy_(self.params[segment.name])
            self.params[segment.name].data = view
        direct = kind.dtype == torch.float32 or self.rounding == "nearest"
        stepped = values if direct else values.to(torch.float32)
        if self.name in FLAT:
            return [Unit(kind, part.segments, part.start, values, nn.Parameter(stepped), direct, True)]
        return [
            Unit(kind, (replace(segment, start=0),), part.start + segment.start, segment.select_from(values).view(-1),
                  nn.Parameter(segment.select_from(stepped)), direct, False)
            for segment in part.segments
        ]  # fmt: skip

    @torch.no_grad()
    def start_at(self, values: dict[str, Tensor]) -> None:
        """Set the masters to the values that the parameters were rounded from; only before the first step."""
        masters = {
            segment.name: segment.select_from(unit.master)
            for unit in self._list_master_units()
            for segment in unit.segments
        }
        for name, value in values.items():
            if name in masters:
                masters[name].copy_(value)
        for i, unit in enumerate(self._units if self._averages else ()):
            if self.rounding == "master" and not unit.direct:
                self._averages[i].copy_(unit.master)

    def _list_master_units(self) -> list[Unit]:
        return [unit for unit in self._units if self.rounding == "master" and not unit.direct]

    def compute_effective_lr(self, lr: float) -> float:
        """Return the learning rate that a step at `lr` uses: `lr`, or with Prodigy `lr` times its present estimate."""
        return lr * self._optimizers[0].param_groups[0]["d"] if self.name == "prodigy" else lr

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float, step: int) -> None:
        """Update the parameters.

        Args:
            gradient: float32 gradients of all parameters, flat, as `layout` arranges them.
            lr: learning rate of this step, from `schedules.compute_learning_rate`; that of text encoders keeps its
            ratio to it.
            step: number of this step, counted from 1. Keys the random bits of stochastic rounding, so that a resumed
                run draws the same.
        """
        if gradient.shape != (self.layout.size,):
            raise ValueError(f"the gradient has shape {list(gradient.shape)}, the layout {self.layout.size} values")
        self._require_views()
        if self._trained is not None:
            raise RuntimeError("a step while the weights to evaluate are in place")
        for unit in self._units:
            if self.rounding == "stochastic" and not unit.direct:
                unit.stepped.data = unit.values.to(torch.float32).view(unit.shape)
            part = gradient[unit.start : unit.start + unit.values.numel()]
            # A library may write into the gradient, which is not its own.
            unit.stepped.grad = part.view(unit.shape).to(unit.stepped.dtype, copy=self.name not in BY_KEYS)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["ratio"]
            optimizer.step()
        if self._limit is not None:
            self._limit(
                {segment.name: segment.select_from(unit.master) for unit in self._units for segment in unit.segments}
            )
        for unit in self._units:
            unit.stepped.grad = None
            if unit.direct:
                continue
            if self.rounding == "master":
                unit.values.copy_(unit.master)
                continue
            generator = self._make_generator(step, unit.segments[0].name, unit.values.device)
            for rounded, exact in zip(unit.values.split(ROUNDED_PIECE), unit.master.split(ROUNDED_PIECE), strict=True):
                rounded.copy_(round_stochastically(exact, generator))
        for average, unit in zip(self._averages, self._units, strict=bool(self._averages)):
            trained = unit.values if self.rounding == "stochastic" else unit.master
            average.lerp_(trained.float(), self._compute_ema_share(step))
        self._release()

    def _compute_ema_share(self, step: int) -> float:
        """Return the share of a step's weights in their moving average: 1 - ema_decay, and more in the first steps.

        The first average is of the first step alone; then the decay rises as step / (step + 9), as diffusers' EMAModel
        lets it, until it reaches ema_decay.
        """
        return 1 - min(self.ema_decay, step / (step + 9)) if step > 1 else 1.0

    @property
    def _evaluates_others(self) -> bool:
        """True if the weights to evaluate and to export are not those that are trained."""
        return self._has_modes or bool(self._averages)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Put the weights to evaluate and to export into the parameters, for the block.

        Most optimizers train the weights that are used afterwards, and nothing is changed. A schedule-free one (any
        that has `train` and `eval`) trains at one point and averages another, which is the result; and so does
        `optimizer.ema_decay`.
        """
        if not self._evaluates_others or self._trained is not None:
            yield
            return
        self.evaluate_()
        try:
            yield
        finally:
            assert self._trained is not None
            for unit, values in zip(self._units, self._trained, strict=True):
                unit.values.copy_(values)
            self._trained = None

    @torch.no_grad()
    def evaluate_(self) -> None:
        """Put the weights to evaluate and to export into the parameters, until `evaluation` ends or for good."""
        if not self._evaluates_others or self._trained is not None:
            return
        self._trained = [unit.values.clone() for unit in self._units]
        if self._averages:
            for unit, average in zip(self._units, self._averages, strict=True):
                unit.values.copy_(average)
            return
        for unit in self._units:
            if self.rounding == "stochastic" and not unit.direct:
                unit.stepped.data = unit.values.to(torch.float32).view(unit.shape)
        masters = [unit.master.clone() for unit in self._units]
        self._switch("eval")
        evaluated = [unit.master.clone() for unit in self._units]
        self._switch("train")
        # Going back is not exact in floating point: training continues from its own values.
        for unit, master, values in zip(self._units, masters, evaluated, strict=True):
            unit.master.copy_(master)
            unit.values.copy_(values)
        self._release()

    @property
    def library(self) -> torch.optim.Optimizer:
        """Return the library's optimizer, the first if there are several."""
        return self._optimizers[0]

    def _switch(self, mode: str) -> None:
        for optimizer in self._optimizers:
            getattr(optimizer, mode)()

    def format_lines(self) -> list[str]:
        """Return what is to be said of how the parameters are shared between two optimizers; [] for most."""
        others = [unit.segments[0].name for unit in self._units if not is_matrix(unit.shape)]
        if self.name != "muon" or not others:
            return []
        return [
            Message(
                "Muon updates {count} matrices; AdamW updates {others} tensors that are not matrices: {names}",
                count=len(self._units) - len(others),
                others=len(others),
                names=first_few(others),
            )
        ]

    def _require_views(self) -> None:
        """Check that the parameters still lie in the vectors that are updated: moving the model would part them.

        Only the first and the last of each unit are looked at, because a move takes all.
        """
        for unit in self._units:
            for segment in (unit.segments[0], unit.segments[-1]):
                if self.params[segment.name].data_ptr() != segment.select_from(unit.values).data_ptr():
                    raise RuntimeError(f"{segment.name} was moved or replaced after the optimizer was made")

    def _get_state(self, unit: Unit) -> dict[str, Any]:
        """Return the library's state of a unit; {} before its first step."""
        state = unit.optimizer.state
        return state[unit.stepped] if unit.stepped in state else {}  # looking it up in a defaultdict would create it

    def copy_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies on the CPU of all that `load_state` needs: tensors, and a dict for JSON.

        Tensors are named "<parameter>/master" and "<parameter>/<key of the optimizer>". bitsandbytes' code books are
        the same for all parameters and stored once, as "qmap1" and, for AdamW's second moments, "qmap2".
        """
        if self.name not in BY_KEYS:
            tensors, meta = self._copy_library_state()
            return tensors | self._copy_evaluation_state(), meta
        tensors = self._copy_evaluation_state()
        counts: dict[str, int] = {}
        for unit in self._units:
            whole = dict(self._get_state(unit))
            if self.rounding == "master" and not unit.direct:
                whole["master"] = unit.master
            for key, value in whole.items():
                if key == "step":
                    counts |= {segment.name: int(value) for segment in unit.segments}
                    continue
                host = value.detach().cpu()
                if key in ("qmap1", "qmap2"):
                    tensors[key] = host.clone()
                    continue
                for segment in unit.segments:
                    tensors[f"{segment.name}/{key}"] = _cut(unit, segment, key, host).clone()
        return tensors, self._make_meta(counts)

    def _copy_library_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of an optimizer that is saved as it is."""
        tensors, saved = library_state.collect(self._units, self._optimizers, self._initial)
        masters = {unit.segments[0].name: unit.master.view(unit.shape) for unit in self._list_master_units()}
        tensors |= {f"{name}/master": master.cpu().clone() for name, master in masters.items()}
        return tensors, self._make_meta({}) | {"library": saved}

    def _copy_evaluation_state(self) -> dict[str, Tensor]:
        """Return the averages, and the values that training continues from if no master has them.

        The adapter file beside them has the weights to evaluate.
        """
        tensors: dict[str, Tensor] = {}
        kept = {id(unit) for unit in self._list_master_units()}
        for i, unit in enumerate(self._units if self._evaluates_others else ()):
            trained = unit.values if self._trained is None else self._trained[i]
            vectors = {} if id(unit) in kept else {"trained": trained}
            vectors |= {"average": self._averages[i]} if self._averages else {}
            for key, vector in vectors.items():
                for segment in unit.segments:
                    tensors[f"{segment.name}/{key}"] = segment.select_from(vector).cpu().clone()
        return tensors

    def _make_meta(self, counts: dict[str, int]) -> dict[str, Any]:
        meta = {
            "version": 1,
            "name": self.name,
            "rounding": self.rounding,
            "seed": self.seed,
            "lr_factor": self.lr_factor,
            "base_lr": self.base_lr,
            "steps": {name: counts[name] for name in self.params if name in counts},
            "dtypes": {name: str(param.dtype).removeprefix("torch.") for name, param in self.params.items()},
        }
        if self._averages:
            meta["averages"] = True
        if self.name == "prodigy":
            meta["estimates"] = {key: self._optimizers[0].param_groups[0][key] for key in ESTIMATES}
        return meta

    def load_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Restore what `copy_state` returned; the parameters themselves are restored by `adapters.load_state_`.

        Raises:
            UserError: the state belongs to another optimizer, rounding, seed or set of parameters. Then nothing is
                changed.
        """
        self._check_meta(meta)
        state = self._read_state(tensors)
        if wrong := self._find_misfits(state, meta):
            raise UserError(
                Message("the checkpoint's optimizer does not fit these adapters: {names}", names=first_few(wrong, 8))
            )

        for optimizer in self._optimizers:
            optimizer.state.clear()
        for unit in self._units:
            for segment in unit.segments:
                if segment.name in state.masters:
                    segment.select_from(unit.master).copy_(state.masters[segment.name])
        self._load_evaluation(state)
        if self.name not in BY_KEYS:
            library_state.restore_(
                self._units, self._optimizers, self._initial, state.moments, state.shared, meta["library"]
            )
            return
        for unit in self._units:
            if unit.segments[0].name not in meta["steps"]:
                continue
            values: dict[str, Any] = {
                key: _put_together(unit, key, [state.moments[segment.name][key] for segment in unit.segments], state)
                for key in state.moments[unit.segments[0].name]
            }
            values |= state.shared if "absmax1" in values else {}
            count = int(meta["steps"][unit.segments[0].name])
            values["step"] = torch.tensor(float(count), dtype=torch.float32) if self.name == "adamw" else count
            unit.optimizer.state[unit.stepped] = values
        for group in self._optimizers[0].param_groups if self.name == "prodigy" else ():
            group.update(meta["estimates"])

    @torch.no_grad()
    def _load_evaluation(self, state: _SavedState) -> None:
        """Restore the averages and the values that are trained; the masters are set already."""
        for i, unit in enumerate(self._units if self._evaluates_others else ()):
            for segment in unit.segments:
                own = segment.select_from(unit.master) if segment.name in state.masters else state.trained[segment.name]
                segment.select_from(unit.values).copy_(own)
                if self._averages:
                    segment.select_from(self._averages[i]).copy_(state.averages[segment.name])

    def _check_meta(self, meta: dict[str, Any]) -> None:
        """Check that the dict of a saved state is of this optimizer.

        Raises:
            UserError: it is of another one, or incomplete.
        """
        own = self._make_meta({})
        for key in ("version", "name", "rounding", "seed", "dtypes"):
            if meta.get(key) != own[key]:
                given, expected = f"{meta.get(key)!r}", f"{own[key]!r}"
                if key == "dtypes":
                    given, expected = Message("different"), Message("as in this job")
                raise UserError(
                    Message(
                        "the checkpoint's optimizer does not fit: {key} is {given}, expected {expected}",
                        key=key,
                        given=given,
                        expected=expected,
                    )
                )
        if bool(meta.get("averages")) != bool(self._averages):
            kept = Message("has a moving average of the weights, but optimizer.ema_decay is 0")
            missing = Message("has no moving average of the weights, but optimizer.ema_decay needs one")
            line = missing if self._averages else kept
            raise UserError(Message("the checkpoint {line}; resume with the old value of that setting", line=line))
        counts = meta.get("steps")
        if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
            raise UserError(
                Message("the checkpoint's optimizer does not fit: its steps are not whole numbers by parameter name")
            )
        if self.name not in BY_KEYS and not library_state.is_complete(meta.get("library"), self._optimizers):
            raise UserError(Message("the checkpoint's optimizer does not fit: its parameter groups differ"))
        estimates = meta.get("estimates")
        if self.name == "prodigy" and not (
            isinstance(estimates, dict) and all(isinstance(estimates.get(key), int | float) for key in ESTIMATES)
        ):
            names = ", ".join(ESTIMATES)
            raise UserError(
                Message("the checkpoint's optimizer does not fit: Prodigy's {names} are missing", names=names)
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
            elif key == "trained" and self._evaluates_others:
                state.trained[name] = tensor
            elif key == "average" and self._averages:
                state.averages[name] = tensor
            else:
                state.moments[name][key] = tensor
        return state

    def _find_misfits(self, state: _SavedState, meta: Mapping[str, Any]) -> list[str]:
        """Return the names of tensors that are missing, unknown, or of another shape.

        Args:
            state: the tensors.
            meta: the dict; its "steps" say how many steps the parameters have made that have moments.
        """
        wrong = state.unknown + self._find_misfit_weights(state)
        if self.name in BY_KEYS:
            return wrong + self._find_misfit_moments(state, meta["steps"])
        return wrong + library_state.find_misfits(state.moments, state.shared, meta["library"])

    def _find_misfit_weights(self, state: _SavedState) -> list[str]:
        """Return the parameters whose master, own values or average is missing, unknown, or of another shape."""
        with_master = {segment.name for unit in self._list_master_units() for segment in unit.segments}
        with_own_values = self.params.keys() - with_master if self._evaluates_others else set()
        averaged = self.params.keys() if self._averages else set()
        wrong: list[str] = []
        for expected, saved in (
            (with_master, state.masters),
            (with_own_values, state.trained),
            (averaged, state.averages),
        ):
            wrong += sorted(expected ^ saved.keys())
            wrong += [name for name, tensor in saved.items() if tensor.shape != self.params[name].shape]
        return wrong

    def _find_misfit_moments(self, state: _SavedState, steps: Mapping[str, int]) -> list[str]:
        """Return the optimizer's tensors that are missing, unknown, or of another shape.

        Args:
            state: the tensors.
            steps: number of steps of each parameter that has made one; the others have no moments.
        """
        wrong: list[str] = []
        for unit in self._units:  # what is updated together has made the same number of steps
            if len({steps.get(segment.name) for segment in unit.segments}) > 1:
                wrong += [segment.name for segment in unit.segments]
        for name, values in state.moments.items():
            expected = self._list_keys(name) if name in steps else set()
            wrong += sorted(f"{name}/{key}" for key in expected ^ values.keys())
            if name in steps:
                wrong += [f"{name}/{key}" for key, value in values.items() if not self._fits(name, key, value)]
            if "absmax1" in values:
                books = {key.replace("absmax", "qmap") for key in values if "absmax" in key}
                wrong += sorted(books - state.shared.keys())
        return wrong

    def count_bytes(self) -> int:
        """Return the bytes kept between two steps besides the adapters: masters and moments."""
        tensors, _ = self.copy_state()
        return sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("/trained"))

    def _list_keys(self, name: str) -> set[str]:
        """Return the names of the optimizer's tensors for a parameter after its first step."""
        if self.name == "adamw":
            return {"exp_avg", "exp_avg_sq"}
        if self.name == "prodigy":
            return {"s", "p0", "exp_avg_sq"} | ({"exp_avg"} if self._beta1 else set())
        moments = {"state1"} if self.name == "lion8bit" else {"state1", "state2"}
        small = self.params[name].numel() < SMALLEST_8BIT
        return moments if small else moments | {key.replace("state", "absmax") for key in moments}

    def _fits(self, name: str, key: str, value: Tensor) -> bool:
        if key.startswith("absmax"):
            return value.shape == (math.ceil(self.params[name].numel() / ALIGNMENT),)
        if key in ("s", "p0"):  # p0 is a single 0 for a parameter that started as zeros
            return value.shape == (self.params[name].numel(),) or key == "p0" and not value.ndim
        return value.shape == self.params[name].shape

    def _make_generator(self, step: int, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}|{step}|{name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big", signed=True))

    def _release(self) -> None:
        """Free the float32 values of stochastic rounding between steps."""
        for unit in self._units if self.rounding == "stochastic" else ():
            if not unit.direct:
                unit.stepped.data = torch.empty(0, dtype=torch.float32, device=unit.values.device)


def _cut(unit: Unit, segment: Segment, key: str, whole: Tensor) -> Tensor:
    """Return a parameter's elements of a unit's state, as a view."""
    if key.startswith("absmax"):
        return whole[segment.start // ALIGNMENT : -(-segment.stop // ALIGNMENT)]
    if key == "master" or unit.flat:
        return segment.select_from(whole)
    return whole


def _put_together(unit: Unit, key: str, tensors: list[Tensor], state: _SavedState) -> Tensor:
    """Return a unit's state from that of its parameters."""
    device, first = unit.values.device, tensors[0]
    if not unit.flat:
        return first.to(device, copy=True)
    if key.startswith("absmax"):
        return torch.cat(tensors).to(device)
    whole = torch.zeros(unit.values.numel(), dtype=first.dtype)
    if first.dtype == torch.uint8:
        # The code that means zero: another one could be the largest of its block and set its scale.
        whole.fill_(int((state.shared[key.replace("state", "qmap")] == 0).nonzero()[0]))
    for segment, tensor in zip(unit.segments, tensors, strict=True):
        segment.select_from(whole).copy_(tensor)
    return whole.to(device)


def build(
    named_params: list[tuple[str, nn.Parameter]],
    section: Optimizer,
    *,
    base_storage: str,
    seed: int,
    of_text: Collection[str] = (),
) -> AdapterOptimizer:
    """Return the optimizer that the section names, for parameters as `adapters.list_trained_parameters` lists them.

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
