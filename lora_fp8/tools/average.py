"""`lora-fp8 average`: averages a run's checkpoints, or LoRA files, after training.

There are two averages, which differ:

* "delta": the mean of the deltas, mean(B_i @ A_i). Its rank is the sum of the ranks. The best pair of the wanted rank
  is written, and the share of the mean's energy that it keeps is reported.
* "factors": mean(B_i) @ mean(A_i). Its delta is the mean of all B_i @ A_j, including i != j. Checkpoints of one run
  share a basis and move little between saves, and for them this is the usual average (as from an EMA while training).
  For two runs it is meaningless, because their bases are unrelated.

With a half-life, older checkpoints or files weigh less: half as much for each `half_life` steps (of a run) or places in
the list (of files) before the newest. Without it, all weigh the same.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .. import config, verify
from ..adapters import kinds
from ..errors import Joined, Message, RunFailure, UserError, first_few
from ..run import Run, ownership
from ..settings import Adapter
from ..stages import finish
from ..training import checkpoint
from . import merge, pairs, resize
from .pairs import Lora, Pair

WHAT = ("factors", "delta")


def compute_weights(ages: Sequence[float], half_life: float) -> list[float]:
    """Return weights that sum to 1 for items of these ages; the newest has age 0.

    Args:
        ages: ages in steps or places.
        half_life: age at which an item weighs half; 0 gives all the same weight.

    Raises:
        UserError: the half-life is negative.
    """
    if half_life < 0 or not math.isfinite(half_life):
        raise UserError(
            Message(
                "--half-life {given}: this is the number of steps (or positions) that halve the weight; give 0 "
                "(equal weights) or more",
                given=f"{half_life:g}",
            )
        )
    plain = [0.5 ** (age / half_life) if half_life else 1.0 for age in ages]
    return [value / sum(plain) for value in plain]


def average_loras(
    loras: Sequence[Lora], shares: Sequence[float], what: str, rank: int
) -> tuple[Lora, resize.Report | None]:
    """Return the average of LoRAs of one layout, and the report of resizing it ("delta" only).

    Args:
        loras: the LoRAs.
        shares: their weights.
        what: "factors" or "delta"; see the module's docstring.
        rank: rank for "delta"; 0: the largest of the files.

    Raises:
        UserError: the layers differ or, for "factors", their ranks or strengths.
    """
    if what not in WHAT:
        raise UserError(
            Message(
                "--average {given}: there is no such kind; accepted: {names}", given=repr(what), names=", ".join(WHAT)
            )
        )
    first = loras[0]
    for lora in loras[1:]:
        if lora.pairs.keys() != first.pairs.keys():
            odd = sorted(lora.pairs.keys() ^ first.pairs.keys())
            raise UserError(
                Message("{names}: not all files have this layer, so they cannot be averaged", names=first_few(odd))
            )
    if what == "delta":
        made, report = resize.shrink(merge.concatenate(loras, shares), rank or first.rank, 0.0, uniform=False)
        return replace(first, pairs=made, metadata=merge.find_common_metadata(loras)), report
    if rank:
        raise UserError(Message("--rank needs --average delta: the average of the factors keeps the rank of the files"))
    made = {}
    for module, pair in first.pairs.items():
        same_layer = [lora.pairs[module] for lora in loras]
        kinds = {(pair_of.a.shape, pair_of.b.shape, pair_of.scale) for pair_of in same_layer}
        if len(kinds) > 1:
            raise UserError(
                Message("{name} differs in rank or strength between the files; use --average delta", name=module)
            )
        a = _sum([pair_of.a for pair_of in same_layer], shares)
        made[module] = Pair(a, _sum([pair_of.b for pair_of in same_layer], shares), pair.scale)
    return replace(first, pairs=made, metadata=merge.find_common_metadata(loras)), None


def _sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    return sum(
        (tensor.double() * share for tensor, share in zip(tensors, shares, strict=True)), torch.zeros(())
    ).float()


def average_files(
    sources: Sequence[Path], output: Path, *, what: str, half_life: float, rank: int, dtype: str
) -> tuple[list[float], resize.Report | None]:
    """Write the average of LoRA files, which are given from the oldest to the newest.

    Returns:
        The weights, and the report of resizing.

    Raises:
        UserError: there are fewer than two files, their layers or layouts differ, or the output exists.
    """
    if len(sources) < 2:
        raise UserError(
            Message("there is nothing to average; give a run folder, or at least two LoRA files, the oldest first")
        )
    loras = [pairs.read(path) for path in sources]
    merge.require_same_naming(sources, loras)
    held = pairs.parse_dtype(dtype, max((lora.dtype for lora in loras), key=lambda held: torch.finfo(held).bits))
    shares = compute_weights([len(loras) - 1 - i for i in range(len(loras))], half_life)
    made, report = average_loras(loras, shares, what, rank)
    origin = f"average of {what}, half-life {half_life:g}: {', '.join(path.name for path in sources)}"
    pairs.write(made, output, held, {**pairs.make_name_metadata(output), "lora_fp8_tool": origin})
    return shares, report


def average_run(folder: Path, *, what: str, half_life: float, last: int) -> tuple[dict[int, float], list[Path]]:
    """Write the average of a run's checkpoints to export/average/, in the formats of the run's own files.

    Args:
        folder: the run.
        what: "factors" or "delta".
        half_life: age in steps at which a checkpoint weighs half; 0: all weigh the same.
        last: number of newest checkpoints to average; 0: all that the run has kept (`checkpoint.keep`).

    Returns:
        The weights by step, and the files, which `verify.check_file` has passed.

    Raises:
        UserError: there is no run, there are fewer than two checkpoints, or "delta" is asked of another kind than LoRA.
        RunFailure: a checkpoint is not complete, or a file fails verification.
    """
    opened = Run.open(folder)
    ownership.require_ours(opened.path)
    job = config.load(opened.config_file, [])
    matches = [(checkpoint.NAME.match(path.name), path) for path in opened.checkpoints.glob("step-*")]
    bundles = sorted((int(match[1]), path) for match, path in matches if match)
    bundles = bundles[-last:] if last else bundles
    if last < 0 or len(bundles) < 2:
        raise UserError(
            Message(
                "{folder}: an average needs at least two checkpoints, but there are {count}; checkpoint.keep sets "
                "how many a run keeps, --last how many are used",
                folder=folder,
                count=len(bundles),
            )
        )
    held = [checkpoint.read(path) for _, path in bundles]
    newest = held[-1].step
    shares = compute_weights([newest - bundle.step for bundle in held], half_life)
    if job.adapter.type == "lora":
        state = _average_pairs(held, shares, what, job.adapter)
    elif what == "factors":
        state = {name: _sum([bundle.adapter[name] for bundle in held], shares) for name in held[-1].adapter}
    else:
        raise UserError(
            Message(
                "--average {what}: the average of the effects of several {kind}s is not a {kind}; use --average "
                "factors",
                what=what,
                kind=kinds.TITLES[job.adapter.type],
            )
        )
    written = finish.export_adapter(job, state, newest, opened.export / "average")
    for path in written:
        report = verify.check_file(path, family_name=job.model.family)
        if not report.ok:
            raise RunFailure(Message("{key}: {line}", key=path, line=Joined("; ", report.list_failures())))
    return {bundle.step: share for bundle, share in zip(held, shares, strict=True)}, written


def _average_pairs(
    held: Sequence[checkpoint.Checkpoint], shares: Sequence[float], what: str, section: Adapter
) -> dict[str, Tensor]:
    """Return the mean of a LoRA's checkpoints, in internal naming at the scaling of the job's `[adapter]` table."""
    halves = pairs.HALVES[0]
    loras = []
    for bundle in held:
        scaling = kinds.compute_scalings(bundle.adapter, section)
        made = {
            name: Pair(bundle.adapter[name + halves[0]], bundle.adapter[name + halves[1]], scale)
            for name, scale in scaling.items()
        }
        loras.append(Lora(made, halves, False, torch.float32))
    average, _ = average_loras(loras, shares, what, 0)
    state = {}
    for name, pair in average.pairs.items():
        state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"] = pair.a, pair.b
    # B is brought to the scaling of the layer's rank, so that rank and alpha in the run's metadata stay right.
    own = kinds.compute_scalings(state, section)
    for name, pair in average.pairs.items():
        state[f"{name}.lora_B.weight"] = pair.b * (pair.scale / own[name])
    return state
