"""The rules by which a table converts the keys of a tool, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import Message
from .readers import keep_value


@dataclass(frozen=True)
class Rule:
    """How one key of another tool is converted.

    Attributes:
        kind: mapped (same meaning), differs, none (no counterpart), idle (no effect on what is learned), or joint
            (`Tool.combine` converts it).
        to: our setting, such as "adapter.rank"; empty if there is none.
        read: converts the tool's value to ours; raises `Unfit`.
        note: a remark, the difference, or why there is no counterpart and what to do instead.
        off: values, besides those of `is_off`, at which a key without a counterpart has no effect anyway.
    """

    kind: str
    to: str = ""
    read: Callable[[Any], Any] = keep_value
    note: str = ""
    off: tuple[Any, ...] = ()


JOINT = Rule("joint")
OF_MACHINE = Message("this setting affects how the machine is used, not what is learned")


def map_to(setting: str, read: Callable[[Any], Any] = keep_value, note: str = "") -> Rule:
    """Return the rule of a key that means the same in our settings."""
    return Rule("mapped", setting, read, note)


def map_near(setting: str, read: Callable[[Any], Any], note: str) -> Rule:
    """Return the rule of a key whose counterpart in our settings differs in meaning."""
    return Rule("differs", setting, read, note)


def map_always(note: str) -> Rule:
    """Return the rule of a feature that is always on in ours; switching it off changes what is learned."""
    return Rule("mapped", "", keep_value, note)


def map_immaterial(note: str) -> Rule:
    """Return the rule of a feature that is always on in ours; switching it off does not change what is learned."""
    return Rule("mapped", "", keep_value, note, (False,))


def map_none(note: str, *off: Any) -> Rule:
    """Return the rule of a key that has no counterpart."""
    return Rule("none", "", keep_value, note, off)


def map_idle(note: str = OF_MACHINE) -> Rule:
    """Return the rule of a key that has no counterpart and needs none."""
    return Rule("idle", "", keep_value, note)
