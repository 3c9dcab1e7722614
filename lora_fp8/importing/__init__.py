"""Moving in: the settings file of another trainer -> ours, and a list of what became of every key of it.

`recognise` tells which tool a file is of, `convert` makes an `Import` of it: our settings, and each key of the file in
exactly one of four lists: mapped, differs in meaning, no counterpart, not known. What the tool takes for a key that the
file lacks is written too where ours would differ, and listed apart. Nothing is guessed in silence: what the file does
not say becomes a `# TODO` in ours.

One file = one tool: a table (`rules`) of what each of its keys becomes, and a function for what takes more than one key
to tell (epochs, schedules, folders). What the pages around sd-scripts and musubi-tuner have of it is in `kohya_table`,
`kohya_data`, `kohya_training`, `kohya_blocks` and `kohya_previews`; the words that all tools share are in `words`.

Facts about the other tools are as of their documentation and sources of 2026; each table names the version.
No torch here.
"""

from collections.abc import Callable
from pathlib import Path

from lora_fp8.config import UserError

from . import ai_toolkit, diffusion_pipe, kohya_ss, lora_scripts, musubi, onetrainer, sd_scripts, simpletuner
from .base import Draft, Import, Source, Tool, Unfit, hide, read_source
from .render import problems, report, to_json, to_toml

__all__ = ["TOOLS", "Import", "convert", "import_file", "problems", "recognise", "report", "to_json", "to_toml"]

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
"""Every tool whose files are read, by the name that `--from` takes."""


def recognise(source: Source) -> tuple[Tool, str]:
    """The tool that a file is of, and what tells.

    Raises:
        UserError: no tool's file looks like this, or more than one's does.
    """
    found = [(tool, why) for tool in TOOLS.values() if (why := tool.recognise(source))]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(tool.name for tool, _ in found)
        raise UserError(f"{source.path}: may be of {names}; say which with --from")
    raise UserError(
        f"{source.path}: not a settings file of a trainer that is known here ({', '.join(TOOLS)}); "
        "if it is one all the same, say which with --from"
    )


def convert(source: Source, tool: Tool, why: str, family: str = "") -> Import:
    """Every key of the file through the tool's table. `family` overrides what the file says of the architecture."""
    draft = Draft(tool, source, why, family)
    try:
        tool.combine(draft)
    except Unfit as error:
        raise UserError(f"{source.path}: {hide(str(error))}") from None
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return draft.finish()


def import_file(
    path: str | Path, tool: str = "", family: str = "", reach: Callable[[Path], bool] | None = None
) -> Import:
    """The whole way from a file to our settings.

    Args:
        path: TOML, JSON, YAML, or a shell or batch script with the command that starts the training.
        tool: a name in `TOOLS`; empty looks at the file.
        family: our name of the architecture; empty takes it from the file.
        reach: whether a file or folder that it refers to may be looked at; all may where nothing is given.

    Raises:
        UserError: the file cannot be read, is of no known tool, or could be of several.
    """
    if tool and tool not in TOOLS:
        raise UserError(f"--from {tool}: not known; accepted: {', '.join(TOOLS)}")
    source = read_source(Path(path))
    source.reach = reach or source.reach
    try:
        chosen, why = (TOOLS[tool], f"--from {tool}") if tool else recognise(source)
        return convert(source, chosen, why, family)
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
