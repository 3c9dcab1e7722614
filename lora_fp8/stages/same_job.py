"""Checks that all processes of a job train the same: a machine may have another config, other images or another base.

Nothing else would notice. Each process makes its own plan, takes its share of each batch by it, and adds its gradients
to those of the others.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..distributed.processes import Processes
from ..errors import Message, UserError
from ..plan.plan import Plan
from ..settings.paths import find_path_places
from .cache import hash_held_out, hash_images

OWN = ("train.threads", "tracking.")
"""Beginnings of the settings that may differ, besides paths: of the machine, and of the first process alone."""


class _Facts(NamedTuple):
    """What a process trains."""

    settings: dict[str, Any]
    images: tuple[str, ...]
    num_images: int
    base: str


def require_same_job(plan: Plan, processes: Processes) -> None:
    """Check that all processes have the same settings, images and base model. They must call it together.

    Raises:
        UserError: they have not; names the first difference.
    """
    if processes.world == 1:
        return
    first, *others = processes.gather(
        _Facts(
            {name: value for name, value in _list_settings(plan) if not name.startswith(OWN)},
            (hash_images(plan), hash_held_out(plan)),
            len(plan.images.examples) + len(plan.images.held_out),
            plan.base_identity,
        )
    )
    for rank, other in enumerate(others, 1):
        for name in first.settings | other.settings:
            if (value := other.settings.get(name)) != (expected := first.settings.get(name)):
                raise UserError(
                    Message(
                        "{key}: process {rank} has {value}, and process 0 has {expected}. Start all processes with the "
                        "same config and options",
                        key=name,
                        rank=rank,
                        value=value,
                        expected=expected,
                    )
                )
        if other.images != first.images:
            raise UserError(
                Message(
                    "process {rank} has other images or captions than process 0 ({count} and {expected} images). Put "
                    "them on a disk that all machines share, or copy them again",
                    rank=rank,
                    count=other.num_images,
                    expected=first.num_images,
                )
            )
        if other.base != first.base:
            raise UserError(
                Message(
                    "process {rank} has another base model than process 0. Put it on a disk that all machines share, "
                    "or copy it again",
                    rank=rank,
                )
            )


def _list_settings(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield the job's settings that are no paths, by their full names."""
    data = plan.job.model_dump(mode="json")
    for place in find_path_places(data):
        place.table[place.name] = ""
    yield from _flatten(data, "")


def _flatten(data: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(data, dict | list):
        yield prefix, data
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
