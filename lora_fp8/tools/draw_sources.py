"""What `lora-fp8 draw` draws with: the LoRAs of run folders and files, and the base model beside which they act."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import config, families
from ..adapters import kinds
from ..errors import Message, RunFailure, UserError, UserErrors, missing_file
from ..families import read_family_name
from ..families._clip import CHUNK_TOKENS, MOST_CHUNKS
from ..families.base import ModelFamily
from ..lora_files import export, layouts, safetensors_file
from ..run import Run
from ..settings import Job, split_preview
from ..training import checkpoint


@dataclass(frozen=True)
class Lora:
    """A LoRA to draw with.

    Attributes:
        name: its label: "step 500", or the file's name.
        place: run folder or file.
        step: of a run's checkpoint; None for a file.
        adapter: its tensors and scaling, in internal naming.
        moved: lines that `quantize.sensitivity` added in the run.
    """

    name: str
    place: Path
    step: int | None
    adapter: export.Adapter
    moved: tuple[str, ...] = ()


def find_run(source: Path) -> Path | None:
    """Return the run folder of a source, which is the folder itself or has the file in its export/; else None."""
    if source.is_dir():
        return source
    for folder in source.absolute().parents[:3]:
        if folder.name == "export" and (folder.parent / "config.toml").is_file():
            return folder.parent
    return None


def load_job(sources: Sequence[Path], model: str, family: str, overrides: Sequence[str]) -> Job:
    """Load the settings of the base model and of the previews.

    Args:
        sources: run folders and LoRA files. The first one's run has the settings, unless `model` is given. Of its
            preview prompts the first is taken.
        model: base model, as `model.path`; "" takes the run's.
        family: architecture of `model`; "" takes it from the first file.
        overrides: as for `--set`.

    Raises:
        UserError: there is neither a run nor a model, or the settings are wrong.
    """
    run = next((folder for source in sources if (folder := find_run(source))), None)
    if run is not None and not model:
        if family:
            raise UserError(Message("--family applies to a base model; name the base model with --model"))
        job = config.load(Run.open(run).config_file, [])
        without_prompts = job.preview.model_copy(update={"controls": job.preview.controls[:1]})
        preview, *_ = [*split_preview(job.preview), without_prompts]
        job = job.model_copy(update={"preview": preview})
        return config.loads(config.dumps(job), list(overrides), where="draw")
    if not model:
        if missing := [source for source in sources if not source.exists()]:
            raise UserError(Message("{path}: there is no run folder or LoRA file of this name", path=missing[0]))
        raise UserError(Message("no base model is given; name it with --model, or give a run folder"))
    headers = [safetensors_file.read_header(source).metadata for source in sources if source.is_file()]
    if not family:
        family = next(filter(None, map(read_family_name, headers)), "")
    if not family:
        accepted = " | ".join(families.list_families())
        raise UserError(Message("the architecture is unknown; name it with --family ({names})", names=accepted))
    needs_controls = family in families.list_families() and families.get(family).controls[0]
    control = "\ncontrol = '.'" if needs_controls else ""
    text = f"name = 'drawing'\n[model]\n[[dataset.folders]]\npath = '.'{control}\n"
    base = [
        config.Override("model.family", family, "--family"),
        config.Override("model.path", model, "--model"),
    ]
    base += [line for metadata in headers[:1] for line in _read_text_settings(metadata, family)]
    return config.loads(text, [*base, *overrides], where="draw")


def _read_text_settings(metadata: Mapping[str, str], family: str) -> list[config.Override]:
    """Return the settings with which a file's captions were encoded, as for --set, where its metadata tell them."""
    if family not in families.list_families():
        return []
    traits = families.get_traits(family)
    lines: list[config.Override] = []
    tokens, clip_skip = metadata.get("ss_max_token_length", ""), metadata.get("ss_clip_skip", "")
    if traits["long_captions"] and tokens.isdecimal():  # sd-scripts writes "None" for its default
        chunks = min(max(int(tokens) // CHUNK_TOKENS, 1), MOST_CHUNKS)
        lines.append(config.Override("model.caption_tokens", chunks * CHUNK_TOKENS))
    if traits["clip_skip"] and clip_skip in map(str, range(1, 13)):
        lines.append(config.Override("model.clip_skip", int(clip_skip)))
    return lines


def load_loras(sources: Sequence[Path], steps: Sequence[int], family: ModelFamily) -> list[Lora]:
    """Load the LoRAs of all sources, and check that the base model has their layers.

    Args:
        sources: run folders and LoRA files.
        steps: checkpoints of each run folder; 0 is the newest.
        family: the base model.

    Raises:
        UserErrors: with everything that is wrong with any of them.
    """
    loras: list[Lora] = []
    problems: list[str] = []
    for source in sources:
        for step in steps if source.is_dir() else [None]:
            try:
                lora = _read_file(source, family) if step is None else _read_checkpoint(source, step, family)
                _check_layers(lora, family)
                loras.append(lora)
            except (UserError, RunFailure) as error:
                problems += error.problems if isinstance(error, UserError) else [str(error)]
    if problems:
        raise UserErrors(problems)
    several = len({lora.place for lora in loras}) > 1
    return [replace(lora, name=f"{lora.place.name}, {lora.name}") if several and lora.step else lora for lora in loras]


def _read_file(path: Path, family: ModelFamily) -> Lora:
    if not path.is_file():
        raise missing_file(path)
    tensors, _ = export.read_adapter(path)
    try:
        state, scaling = layouts.from_layout(tensors, family, family.read_denoiser_config())
    except UserError as error:
        raise UserError(Message("{path}: {line}", path=path, line=error)) from None
    return Lora(path.stem, path, None, export.Adapter(state, scaling))


def _read_checkpoint(folder: Path, step: int, family: ModelFamily) -> Lora:
    """Read a run's LoRA of a step: its checkpoint, or the LoRA file of that step if the checkpoint is gone."""
    run = Run.open(folder)
    own = config.load(run.config_file, [])
    if own.model.family != family.name:
        raise UserError(
            Message(
                "{path}: this is a run of {family}, but the base model is {other}",
                path=folder,
                family=own.model.family,
                other=family.name,
            )
        )
    bundle = checkpoint.find_path(run.checkpoints, step)
    files = sorted((run.export / f"step-{step:06d}").glob("*.safetensors"))
    if step and not bundle.is_dir() and files:
        return replace(_read_file(files[0], family), name=f"step {step}", place=folder, step=step)
    saved = checkpoint.read(bundle) if step else checkpoint.read_latest(run.checkpoints)[0]
    if saved is None:
        raise UserError(Message("{path}: there is no checkpoint to draw with yet", path=folder))
    scaling = kinds.compute_scalings(saved.adapter, own.adapter)
    moved = tuple(map(str, saved.state.get("moved") or ()))
    return Lora(f"step {saved.step}", folder, saved.step, export.Adapter(saved.adapter, scaling), moved)


def _check_layers(lora: Lora, family: ModelFamily) -> None:
    """Check that the base model has the layers that a LoRA changes, in the same sizes.

    Raises:
        UserError: it has not.
    """
    wrong = layouts.find_misfits(lora.adapter.state, family)
    if wrong:
        raise UserError(
            Message(
                "{path}: {count} of its layers are missing in this base model or have another size, such as "
                "{names}. Choose the base model that it was trained on",
                path=os.fspath(lora.place),
                count=len(wrong),
                names=", ".join(wrong[:3]),
            )
        )
