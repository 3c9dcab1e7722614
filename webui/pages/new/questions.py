"""What the simple view asks, and the ids of fields."""

from lora_fp8.config import recipes

GOALS = recipes.GOALS
"""Presets for what the LoRA is to learn."""
SIMPLE = (
    "model.family",
    "model.path",
    "model.components",
    "dataset.folders",
    "dataset.trigger",
    "dataset.missing_caption",
    "dataset.frames",
    "dataset.fps",
    "dataset.clip",
    "train.steps",
    "preview.prompts",
    "name",
)
"""Settings of the simple view. Its other questions (goal, VRAM) are cards that write to `preset`."""
PROPOSING = ("dataset.folders", "dataset.trigger")
PROPOSED = ("train.steps", "preview.prompts")
"""Fields of the simple view that a recipe's values depend on, and those that show such values."""
CLIPS = ("dataset.frames", "dataset.fps", "dataset.clip")


def make_id(prefix: str, key: str) -> str:
    """Return the id of a setting's field; the prefix is "new" in the simple view, "set" in that of all settings."""
    return f"{prefix}-{key.replace('.', '-') or 'job'}"
