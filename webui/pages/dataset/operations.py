"""The edits of many captions that the page offers."""

from collections.abc import Callable
from functools import partial

from lora_fp8.data import caption_operations

OPERATIONS: dict[str, tuple[int, Callable[..., caption_operations.Operation]]] = {
    # name: number of text fields, operation
    "add_last": (1, caption_operations.AddTag),
    "add_first": (1, partial(caption_operations.AddTag, first=True)),
    "remove": (1, caption_operations.RemoveTag),
    "rename": (2, caption_operations.RenameTag),
    "replace": (2, caption_operations.Replace),
    "pattern": (2, caption_operations.ReplacePattern),
    "trigger": (1, caption_operations.Trigger),
    "prepend": (1, caption_operations.Prepend),
    "append": (1, caption_operations.Append),
    "dedupe": (0, caption_operations.DedupeTags),
    "sort": (0, caption_operations.SortTags),
    "recode": (1, caption_operations.Recode),
}
