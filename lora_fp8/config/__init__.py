"""Read a TOML config into a checked job, and write it back."""

from .example import make_example
from .loading import (
    MOST_PROBLEMS,
    InvalidConfig,
    Override,
    dumps,
    format_toml_line,
    format_toml_value,
    format_with_comments,
    list_preset_names,
    load,
    loads,
    read_layers,
    read_toml,
)
from .preview_changes import apply_preview_changes
from .unused import Rule, find_unmet_rules, find_unused_settings, list_conditions, list_defaults

__all__ = [
    "MOST_PROBLEMS",
    "InvalidConfig",
    "Override",
    "Rule",
    "apply_preview_changes",
    "format_with_comments",
    "list_conditions",
    "list_defaults",
    "dumps",
    "make_example",
    "find_unmet_rules",
    "find_unused_settings",
    "read_layers",
    "load",
    "loads",
    "list_preset_names",
    "read_toml",
    "format_toml_line",
    "format_toml_value",
]
