"""`lora-fp8 kit`: makes a folder with everything needed to publish a LoRA, on hosts and for local clients.

    <name>.safetensors     the file; its header without captions and folder names, unless these are asked for
    <name>.json <name>.png the sidecars that A1111, Forge, SwarmUI and InvokeAI read: trigger words, strength, preview
    README.md images/      a model card for the Hugging Face Hub with its gallery; images carry A1111's parameters
    publish.en.md          what to paste into each host's form, and whether the file is within the host's limits
    publish.zh-CN.md       the same in Chinese

Hosts are data: a TOML file in hosts/ has what a host asks for, its names of base models, its limits, and what is
unknown about it. Nothing is made up: if a host's name for an architecture is unknown, the page says so.

`hub` uploads such a folder to the Hugging Face Hub.
"""

import contextlib
import json
import os
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from .. import config, families, verify
from ..adapters import kinds
from ..common.messages import choose_language, translate
from ..common.writing import atomic_write, sync_folder, write_synced
from ..errors import Joined, Message, UserError, cannot_write, first_few
from ..families import _files
from ..lora_files import export, export_metadata, layouts, safetensors_file
from ..lora_files import header as adapter_header
from ..run import Run
from ..settings import Job, read_options
from ..stages.previews import write_png

HOSTS = Path(__file__).parent / "hosts"
PUBLIC = {*export_metadata.LEVELS["private"], "modelspec.usage_hint", "sshs_model_hash", "modelspec.hash_sha256"}
PUBLIC -= {"ss_training_comment"}
"""Metadata keys that are published. Headers of other programs hold captions, paths and whole configs under their own
keys, so this lists what stays and not what is removed."""

SD_VERSION = {"sd_v1": "SD1", "sd_v2": "SD2", "sdxl_base_v1-0": "SDXL"}
"""kohya's name of a base (`ss_base_model_version`) -> A1111's, which knows no others."""
CARD = "README.md"
LANGUAGES = {"en": "publish.en.md", "zh": "publish.zh-CN.md"}


@dataclass(frozen=True)
class Picture:
    """A sample image and the settings it was generated with, for A1111's parameters. Unknown settings are None."""

    path: Path
    prompt: str
    negative: str = ""
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None


@dataclass(frozen=True)
class Facts:
    """The facts that are published about a LoRA; empty texts are reported as missing."""

    family: str
    title: str
    trigger: str = ""
    description: str = ""
    license: str = ""
    base_model: str = ""
    strength: float = 1.0
    tags: tuple[str, ...] = ()
    steps: str = ""
    autov3: str = ""
    clip_skip: str = ""


@dataclass(frozen=True)
class Kit:
    """A finished kit: the folder, its files, and notes on what to know or add."""

    folder: Path
    files: list[Path]
    notes: list[str]


def load_hosts() -> dict[str, dict[str, Any]]:
    """Return {file stem: content} of all hosts, sorted by name."""
    return {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(HOSTS.glob("*.toml"))}


def list_base_names(host: Mapping[str, Any], family: str) -> list[str] | None:
    """Return a host's names for a family, one of which is right; [] if unknown, None if it is not offered."""
    names = host.get("base_models", {}).get(family, [])
    return None if names == "not offered" else names


# -- collecting the facts


def collect_from_run(
    folder: Path, layout: str = "", among: Sequence[Path] = (), step: int = 0
) -> tuple[Path, Job, list[Picture]]:
    """Return a run's file to publish, its config, and its last previews.

    Args:
        folder: the run.
        layout: layout of the file; empty: the one that most programs read.
        among: files to choose from; empty: the run's exports.
        step: step of the checkpoint that the files come from, whose previews are used; 0: the newest.

    Raises:
        UserError: there is no run, or no such file in it.
    """
    run = Run.open(folder)
    job = config.load(run.config_file, [])
    wanted = [layout] if layout else list(families.get(job.model.family).layouts)
    among = among or sorted(run.export.glob("*.safetensors"))
    # NAME-best comes before NAME, so that the file of the last step counts.
    made = {path.stem.rpartition("_")[2]: path for path in among}
    file = next((made[name] for name in wanted if name in made), None)
    if file is None:
        have = ", ".join(made) or Message("none")
        raise UserError(
            Message(
                "{path}: there is no exported file in the layout {names}; the layouts are: {have}",
                path=folder,
                names=Joined(" or ", wanted),
                have=have,
            )
        )
    known = [
        event
        for event in run.read_events()
        if event["event"] == "preview" and {"step", "images", "prompts"} <= event.keys()
    ]
    drawn = [event for event in known if event["step"] == (step or event["step"])]
    pictures = [
        _make_picture(run.path / image, prompt, i, {**job.preview.model_dump(), **event})
        for event in drawn[-1:]
        for i, (image, prompt) in enumerate(zip(event["images"], event["prompts"], strict=True))
        if isinstance(image, str) and (run.path / image).is_file()
    ]
    return file, job, pictures


def _make_picture(path: Path, prompt: str, number: int, drawn_with: Mapping[str, Any]) -> Picture:
    """Make a sample image of a preview: the run's settings, or those in its log where they were changed meanwhile."""
    counted = drawn_with["seed"] + number if isinstance(drawn_with["seed"], int) else None
    text, options = read_options(prompt)
    drawn_with = {**drawn_with, "seed": counted, **options}
    seed, steps, guidance = (drawn_with[name] for name in ("seed", "steps", "guidance"))
    return Picture(
        path,
        text,
        str(drawn_with["negative"]),
        seed if isinstance(seed, int) else None,
        steps if isinstance(steps, int) else None,
        float(guidance) if isinstance(guidance, int | float) else None,
    )


def collect_facts(file: Path, given: Mapping[str, str], job: Job | None = None, strength: float = 1.0) -> Facts:
    """Return the facts of a file's header; values given by hand (family, title, trigger, description, ...) come first.

    Raises:
        UserError: the architecture is unknown.
    """
    header = safetensors_file.read_header(file).metadata
    named_family = job.model.family if job else verify.read_family_name(header)
    family = given.get("family") or named_family
    if family not in families.list_families():
        accepted = " | ".join(families.list_families())
        raise UserError(verify.UNNAMED_ARCHITECTURE(path=file, names=accepted))
    base = ""
    if job and _files.is_hub_id(job.model.path) and not os.path.exists(os.path.expanduser(job.model.path)):
        base = job.model.path
    return Facts(
        family=family,
        title=given.get("title") or header.get("modelspec.title") or file.stem,
        trigger=given.get("trigger") or header.get("modelspec.trigger_phrase", ""),
        description=given.get("description") or header.get("modelspec.description", ""),
        license=given.get("license") or header.get("modelspec.license", ""),
        base_model=given.get("base_model") or base,
        strength=strength,
        tags=tuple(tag.strip() for tag in header.get("modelspec.tags", "").split(",") if tag.strip()),
        steps=header.get("ss_steps", ""),
        clip_skip=header.get("ss_clip_skip", "").replace("None", ""),
        autov3=safetensors_file.hash_payload(file)[:12].upper(),
    )


# -- the folder


def check_free(folder: Path) -> None:
    """Check that a folder is missing or empty, before other work is done for the kit.

    Raises:
        UserError: it holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            Message(
                "{path}: the folder exists already and is not empty; choose another folder for the kit", path=folder
            )
        )


def make(
    file: Path,
    folder: Path,
    facts: Facts,
    pictures: Sequence[Picture] = (),
    *,
    captions: bool = False,
    repo: str = "OWNER/NAME",
) -> Kit:
    """Write the kit.

    Args:
        file: the LoRA file.
        folder: folder to write to.
        facts: facts to publish.
        pictures: sample images.
        captions: keep the header's entries about captions, folders and settings.
        repo: repository on the Hub, for the model card.

    Raises:
        UserError: the file is no usable adapter, or the folder is not empty or cannot be written.
    """
    check_free(folder)
    _check_adapter(file)
    made_here = not folder.exists()
    slug = export_metadata.make_slug(facts.title)
    lora = folder / f"{slug}.safetensors"
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        _copy(file, lora, whole=captions)
        _draw_all(pictures, folder, facts, slug)
        sidecar = json.dumps(_make_sidecar(facts), ensure_ascii=False, indent=1) + "\n"
        atomic_write(folder / f"{slug}.json", sidecar.encode())
        for language, name in LANGUAGES.items():
            atomic_write(folder / name, render_page(facts, lora, language).encode())
        # Last, as `push` takes a folder with a card for a whole kit: one that was killed before has none.
        atomic_write(folder / CARD, render_card(facts, lora.name, pictures, slug, repo).encode())
    except BaseException as error:  # an incomplete kit would look like a complete one
        _clear_folder(folder, remove=made_here)
        if isinstance(error, OSError):
            raise cannot_write(folder, error) from None
        raise
    notes: list[str] = []
    if not pictures:
        notes.append(
            Message(
                "there are no images, and every host requires one; generate some with preview.prompts, or add your own"
            )
        )
    notes += _list_missing(facts)
    for host in load_hosts().values():
        notes += [
            Message("{name}: {line}", name=host["title"]["en"], line=line) for line in list_problems(host, facts, lora)
        ]
    return Kit(folder, sorted(path for path in folder.rglob("*") if path.is_file()), notes)


def _check_adapter(file: Path) -> None:
    """Check that a file is an adapter of a kind that programs read.

    Raises:
        UserError: it is none.
    """
    tensors = {layouts.rename_kohya_halves(name): tensor for name, tensor in export.read_adapter(file)[0].items()}
    known = {name: tensor for name, tensor in tensors.items() if name.endswith(tuple(f".{p}" for p in kinds.ALL_PARTS))}
    if not known:
        raise UserError(
            Message(
                "{file}: this is not a LoRA, it contains {names}",
                file=file,
                names=first_few(sorted(tensors)) or Message("nothing"),
            )
        )
    for layer, parts in kinds.group_by_layer(known).items():
        kinds.detect_kind(parts, layer)


def _draw_all(pictures: Sequence[Picture], folder: Path, facts: Facts, slug: str) -> None:
    """Write the sample images into the kit's `images`, and the first also beside the LoRA as its cover.

    Without images, the empty folder `images` is removed.
    """
    for i, picture in enumerate(pictures, 1):
        _draw(picture, folder / "images" / f"{slug}-{i}.png", facts, slug)
    if pictures:
        with Image.open(folder / "images" / f"{slug}-1.png") as image:
            write_png(image, folder / f"{slug}.png")
    else:
        (folder / "images").rmdir()


def _clear_folder(folder: Path, remove: bool) -> None:
    """Delete all that is in a folder, and with `remove` the folder too, as far as it can be deleted."""
    with contextlib.suppress(OSError):
        for part in folder.iterdir():
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        if remove:
            folder.rmdir()


def _list_missing(facts: Facts) -> list[Message]:
    lines = {
        Message("the trigger word is missing; give it with --trigger"): facts.trigger,
        Message("the description is missing; give it with --description"): facts.description,
        Message("the licence is missing; give it with --license"): facts.license,
        Message("the base model's id on the Hub is missing; give it with --base-model"): facts.base_model,
    }
    return [line for line, value in lines.items() if not value]


def _copy(source: Path, target: Path, *, whole: bool) -> None:
    """Copy the tensors byte for byte, under the whole header or its `PUBLIC` entries.

    A1111's old hash is never public: it counts from the file's first byte, so another header changes it.
    """
    header = safetensors_file.read_header(source)
    kept = {key: value for key, value in header.metadata.items() if whole or key in PUBLIC}
    if adapter_config := header.metadata.get(adapter_header.KEY):  # without it, the file would have another strength
        kept[adapter_header.KEY] = adapter_config if whole else adapter_header.remove_private_values(adapter_config)
    with open(source, "rb") as read, write_synced(target) as write:
        read.seek(header.data_begin)
        write.write(safetensors_file.make_header(header.entries, kept))
        shutil.copyfileobj(read, write)
    sync_folder(target.parent)


def format_parameters(picture: Picture, facts: Facts, slug: str, size: tuple[int, int]) -> str:
    """Return A1111's parameters of an image, by which hosts link it to a LoRA; `size` is (width, height) in pixels."""
    settings: dict[str, Any] = {
        "Steps": picture.steps,
        "CFG scale": picture.guidance,
        "Seed": picture.seed,
        "Size": f"{size[0]}x{size[1]}",
        "Model": export_metadata.get_basename(facts.base_model) or None,
        "Clip skip": facts.clip_skip or None,
        "Lora hashes": f'"{slug}: {facts.autov3.lower()}"',
    }
    lines = [f"{picture.prompt} <lora:{slug}:{facts.strength:g}>"]
    lines += [f"Negative prompt: {picture.negative}"] if picture.negative else []
    return "\n".join([*lines, ", ".join(f"{key}: {value}" for key, value in settings.items() if value is not None)])


def _draw(picture: Picture, target: Path, facts: Facts, slug: str) -> None:
    with Image.open(picture.path) as image:
        text = PngImagePlugin.PngInfo()
        text.add_text("parameters", format_parameters(picture, facts, slug, image.size))
        write_png(image.convert("RGB"), target, pnginfo=text)


def _make_sidecar(facts: Facts) -> dict[str, Any]:
    civitai = list_base_names(load_hosts()["civitai"], facts.family) or []
    return {
        "name": facts.title,
        "description": facts.description,
        "sd version": SD_VERSION.get(families.get(facts.family).kohya_base_version, "Unknown"),
        "baseModel": civitai[0] if len(civitai) == 1 else "",
        "activation text": facts.trigger,
        "trainedWords": [facts.trigger] if facts.trigger else [],
        "preferred weight": facts.strength,
        "negative text": "",
        "notes": "",
    }


def render_card(facts: Facts, file: str, pictures: Sequence[Picture], slug: str, repo: str = "OWNER/NAME") -> str:
    """Return the model card: YAML for the Hub, and a page. Texts are quoted as JSON, which is valid YAML."""
    family = families.get(facts.family)
    task = "image-to-image" if family.controls[1] else "text-to-video" if family.clips[1] else "text-to-image"
    tags = [task, "diffusers", "diffusers-training", "lora", facts.family, "template:sd-lora", *facts.tags]
    head: dict[str, Any] = {}
    if facts.base_model:
        head |= {"base_model": facts.base_model, "base_model_relation": "adapter"}
    head |= {"library_name": "diffusers", "pipeline_tag": task}
    if facts.license:
        head["license"] = facts.license
    if facts.trigger:
        head["instance_prompt"] = facts.trigger
    head["tags"] = list(dict.fromkeys(tags))
    if pictures:
        head["widget"] = [
            {"text": picture.prompt, "output": {"url": f"images/{slug}-{i}.png"}}
            for i, picture in enumerate(pictures, 1)
        ]
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()), "---"]
    lines += ["", f"# {facts.title}", ""]
    lines += ["<Gallery />", ""] if pictures else []
    lines += [facts.description, ""] if facts.description else []
    clip_skip = f" and clip skip {facts.clip_skip}" if facts.clip_skip else ""
    lines += [f"A LoRA for {family.title}, to be used at a strength of about {facts.strength:g}{clip_skip}.", ""]
    lines += [f"Trigger words: `{facts.trigger}`", ""] if facts.trigger else []
    if facts.base_model:
        lines += [
            "```python",
            "import diffusers",
            "",
            f"pipe = diffusers.{family.pipeline_class}.from_pretrained({facts.base_model!r})",
            f"pipe.load_lora_weights({repo!r}, weight_name={file!r})  # this repository, or a folder",
            "```",
            "",
        ]
    return "\n".join(lines)


def list_problems(host: Mapping[str, Any], facts: Facts, file: Path) -> list[Message]:
    """List how a file exceeds a host's limits or misses its base models, and what is unknown, one line each."""
    problems = []
    if file.suffix not in host["extensions"]:
        problems.append(Message("{suffix} files are not accepted", suffix=file.suffix))
    size, limit = file.stat().st_size / 2**20, host.get("max_mb", 0)
    if limit and size > limit:
        problems.append(
            Message(
                "the file has {size} MB, more than the limit of {limit} MB; make it smaller with lora-fp8 resize",
                size=f"{size:.0f}",
                limit=limit,
            )
        )
    header, limit = safetensors_file.read_header(file).data_begin / 2**20, host["max_header_mb"]
    if limit and header > limit:
        problems.append(
            Message("the header has {size} MB, more than the limit of {limit} MB", size=f"{header:.0f}", limit=limit)
        )
    beside = len(list(file.parent.glob("*.safetensors")))
    if host["root_safetensors"] and beside > host["root_safetensors"]:
        problems.append(
            Message("there are {count} .safetensors files in one folder, but only one is accepted", count=beside)
        )
    known = list_base_names(host, facts.family)
    if host.get("base_is_hub_id") and facts.base_model:
        known = [facts.base_model]
    title = families.get(facts.family).title
    if known is None:
        problems.append(Message("the host does not offer {title}", title=title))
    elif not known:
        problems.append(Message("the host's name for {title} is unknown; choose it on the page", title=title))
    elif len(known) > 1:
        problems.append(Message("choose the base model that you trained on: {names}", names=" | ".join(known)))
    return problems


def render_page(facts: Facts, file: Path, language: str) -> str:
    """Return the page with what to paste into each host's form, in "en" or "zh"."""
    tag = choose_language(language)
    unfilled = translate(tag, Message("(to fill in)"))
    lines = [f"# {facts.title}", ""]
    for host in load_hosts().values():
        known = list_base_names(host, facts.family) or []
        base = facts.base_model if host.get("base_is_hub_id") else ""
        values = {
            "title": facts.title,
            "slug": file.stem,
            "kind": "LoRA",
            "version": "1.0",
            "trigger": facts.trigger,
            "description": facts.description,
            "license": facts.license,
            "tags": ", ".join(facts.tags),
            "strength": f"{facts.strength:g}",
            "steps": facts.steps,
            "autov3": facts.autov3,
            "base_model": base or " | ".join(known),
        }
        lines += [f"## {host['title'][language]}", ""]
        for row in host["fields"]:
            lines.append(f"- {row[language]}: {values[row['value']] or unfilled}")
        lines += ["", *(f"! {translate(tag, line)}" for line in list_problems(host, facts, file))]
        lines += [host["unknown"][language], ""]
    return "\n".join(lines)
