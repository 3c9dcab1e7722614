"""Check before a training that the packages of its experiment trackers are installed."""

import importlib.util

from .. import settings
from ..errors import Message, combine

PACKAGES = {
    "tensorboard": "'lora-fp8[trackers]'",
    "wandb": "wandb",
    "trackio": "trackio",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
}
"""Name of a tracker, which is also that of its module -> what pip installs for it."""


def require_packages(section: settings.Tracking) -> None:
    """Check that each tracker's package is installed.

    Raises:
        UserError: one is missing; UserErrors: several are.
    """
    missing: list[str] = [
        Message(
            "tracking.to: {name} is not installed. Install it with `{command}`, or take it out of tracking.to.",
            name=name,
            command=f"pip install {PACKAGES[name]}",
        )
        for name in dict.fromkeys(section.to)
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise combine(missing)
