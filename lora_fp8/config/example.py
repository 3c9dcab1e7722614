"""Make the config that `lora-fp8 new` writes."""

from __future__ import annotations

from collections.abc import Sequence

import tomlkit

from .. import settings
from ..families import get, list_families
from . import loading


def make_example(name: str, family: str, presets: Sequence[str] = ()) -> settings.Job:
    """Return a job to start from: the family's released base model, and a placeholder for the image folder.

    Raises:
        UserErrors: everything that is wrong with the arguments.
    """
    known = family in list_families()  # loads refuses an unknown family, together with everything else that is wrong
    base = get(family).example_base if known else "put/the-base-model-here"
    given = {"name": name, "preset": list(presets), "model": {"family": family, "path": base}}
    needed = {"control": "my_control_pictures"} if known and get(family).controls[0] else {}
    given["dataset"] = {"folders": [{"path": "my_pictures", **needed}]}
    return loading.loads(tomlkit.dumps(given), where="new")
