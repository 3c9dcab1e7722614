"""Read a TOML config into a checked job, and write it back."""

from .example import example
from .loading import (
    MOST_PROBLEMS,
    InvalidConfig,
    Override,
    commented,
    dumps,
    layers,
    load,
    loads,
    preset_names,
    read_toml,
    toml_line,
    toml_value,
)
from .preview_changes import apply_preview_changes
from .unused import Rule, conditions, defaults, find_idle, find_unused_settings

__all__ = [
    "MOST_PROBLEMS",
    "InvalidConfig",
    "Override",
    "Rule",
    "apply_preview_changes",
    "commented",
    "conditions",
    "defaults",
    "dumps",
    "example",
    "find_idle",
    "find_unused_settings",
    "layers",
    "load",
    "loads",
    "preset_names",
    "read_toml",
    "toml_line",
    "toml_value",
]
