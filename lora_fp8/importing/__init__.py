"""Convert the settings file of another trainer to ours, and report what became of each of its keys.

`recognise` finds out which tool a file belongs to. `convert` turns it into an `Import`: our settings, and each key of
the file in exactly one of four lists: mapped, differs in meaning, no counterpart, unknown. Where the tool's default for
a missing key differs from ours, it is written too, and listed separately. Nothing is guessed silently: what the file
does not say becomes a `# TODO` in ours.

Each tool has one file: a table (`rules`) that converts its keys one by one, and a function for whatever depends on
several keys (epochs, schedules, folders). What sd-scripts, musubi-tuner and the graphical interfaces around them share
is in `kohya_table`, `kohya_data`, `kohya_training`, `kohya_blocks` and `kohya_previews`; what all tools share is in the
files named `..._settings`, one for each part of our settings, and in `common_values` and `remarks`.

The facts about the other tools are from their documentation and sources of 2026; each table names the version.
This package does not import torch.
"""

from collections.abc import Callable
from pathlib import Path

from ..errors import Joined, Message, UserError, cannot_read
from . import ai_toolkit, diffusion_pipe, kohya_ss, lora_scripts, musubi, onetrainer, sd_scripts, simpletuner
from .dataset_settings import convert_epochs, find_epochs
from .import_draft import Draft, Import, Tool
from .readers import Unfit, hide
from .render import (
    describe_verdict,
    find_problems,
    format_few,
    group_by_note,
    list_differences,
    relocate,
    report,
    to_json,
    to_toml,
)
from .source_files import Source, read_source

__all__ = ["TOOLS", "Import", "convert", "import_file", "find_problems", "recognise", "relocate", "report", "to_json"]
__all__ += [
    "list_differences",
    "format_few",
    "group_by_note",
    "to_toml",
    "describe_verdict",
    "convert_epochs",
    "find_epochs",
]

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        sd_scripts.TOOL,
        kohya_ss.TOOL,
        lora_scripts.TOOL,
        musubi.TOOL,
        diffusion_pipe.TOOL,
        ai_toolkit.TOOL,
        onetrainer.TOOL,
        simpletuner.TOOL,
    )
}
"""All tools whose files can be read, by the name that `--from` takes."""


def recognise(source: Source) -> tuple[Tool, str]:
    """Find out which tool a file belongs to, and what shows it.

    Raises:
        UserError: no tool's files look like this, or more than one tool's do.
    """
    matching = [(tool, why) for tool in TOOLS.values() if (why := tool.recognise(source))]
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = Joined(" or ", [tool.name for tool, _ in matching])
        raise UserError(
            Message(
                "{path}: this may be a file of {names}. Name the trainer with --from", path=source.path, names=names
            )
        )
    raise UserError(
        Message(
            "{path}: this is not a settings file of a known trainer ({names}). If it is one, name the trainer "
            "with --from",
            path=source.path,
            names=", ".join(TOOLS),
        )
    )


def convert(source: Source, tool: Tool, why: str, family: str = "") -> Import:
    """Convert every key of the file by the tool's table.

    Args:
        source: the file.
        tool: the tool that it belongs to.
        why: what shows that the file belongs to this tool.
        family: overrides the architecture that the file names.

    Raises:
        UserError: the file has no table of settings, or a value that the tool itself could not use.
    """
    if not isinstance(source.data, dict) and not tool.recognise(source):
        raise UserError(
            Message("{path}: the file has no settings that {tool} could read", path=source.path, tool=tool.name)
        )
    draft = Draft(tool, source, why, family)
    try:
        tool.combine(draft)
    except Unfit as error:
        raise UserError(Message("{path}: {line}", path=source.path, line=hide(str(error)))) from None
    except OSError as error:
        raise cannot_read(error.filename, error) from None
    return draft.finish()


def import_file(
    path: str | Path, tool: str = "", family: str = "", reach: Callable[[Path], bool] | None = None
) -> Import:
    """Read a file and convert it to our settings.

    Args:
        path: TOML, JSON, YAML, or a shell or batch script with the command that starts the training.
        tool: a name in `TOOLS`; "" recognises the tool by the file.
        family: our name of the architecture; "" takes it from the file.
        reach: returns True if a file or folder that the file refers to may be accessed; None allows all.

    Raises:
        UserError: the file cannot be read, belongs to no known tool, or could belong to several.
    """
    if tool and tool not in TOOLS:
        raise UserError(
            Message("--from: {tool} is not a known trainer. Choose one of {names}", tool=tool, names=", ".join(TOOLS))
        )
    source = read_source(Path(path))
    source.reach = reach or source.reach
    try:
        chosen, why = (TOOLS[tool], f"--from {tool}") if tool else recognise(source)
        return convert(source, chosen, why, family)
    except RecursionError:
        raise UserError(Message("{path}: nested too deeply", path=path)) from None
