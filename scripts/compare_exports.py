"""Train the same jobs with two versions of this project and compare what they write, byte for byte.

    python scripts/compare_exports.py OLD NEW [--jobs NAME...] [--steps N] [--new-set [JOB:]KEY=VALUE...]

OLD and NEW are checkouts (folders) or git revisions of this repository, for which temporary worktrees are made.
Every job runs once with each version, in a fresh process with one CPU thread, no GPU, and a home and cache of its own.
The program is driven through its command line only, so that files and modules may move between the two versions.

Jobs: `demo_sd15`, `demo_flux` and `debug` run each version's own config. The others run the configs of this file on
random miniature models (made once, by tests/miniatures of this checkout) and on images that this file draws. Compared
are every exported .safetensors file, the loss column of events.jsonl, and the tensors of the last checkpoint.

A setting that NEW renamed is translated with --new-set: KEY=VALUE sets it in NEW's configs (VALUE is TOML; {side},
{bases} and {data} stand for the folders of this run), KEY= removes it. Such files differ in the metadata key
`lora_fp8_config`; --allow-metadata accepts that, and prints it in the table.

Exit codes: 0 all equal, 1 something differs or a training failed, 2 wrong input.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parent.parent

VERSION_KEYS = ("lora_fp8_version", "modelspec.implementation_version")
"""Metadata that may differ: they name the program's version."""
HASH_OF_LENGTH = "sshs_legacy_hash"
"""May differ where a version key does: it hashes the bytes after 1 MiB, which shift with the header's length."""

COMMON = """
output_dir = "{side}/runs"
[dataset]
cache_dir = "{side}/cache"
"""

MINIATURES: dict[str, tuple[str, str]] = {}
"""Job name -> the family whose miniature it trains, and its config.

adapter.ranks, optimizer.lrs and quantize.override are lists of texts here, which versions before their tables read."""

MINIATURES["sd15"] = (
    "sd15",
    """
# UNet: text-encoder LoRA, masks, regularization, three datasets, caption variants, validation, EMA of the checkpoints.
name = "sd15"
[model]
family = "sd15"
path = "{bases}/sd15"
[quantize]
storage = "fp8"
scale = "tensor"
[adapter]
rank = 4
alpha = 2.0
dropout = 0.1
text_encoder = true
ranks = ["mid_block = 2"]
[dataset]
resolution = 48
bucket_step = 16
flip = true
trigger = "zibo"
caption_dropout = 0.2
shuffle_tags = true
tag_dropout = 0.2
wildcards = true
caption_variants = 3
folders = [
    {path = "{data}/images", repeats = 2, mask = "{data}/masks"},
    {path = "{data}/class", regularization = true, weight = 0.5},
    {path = "{data}/images", resolution = 32, trigger = "zaba"},
]
[train]
steps = 8
batch_size = 2
accumulate = 2
[optimizer]
lr = 1e-3
text_encoder_lr = 5e-4
lrs = ["mid_block = 0.5"]
[schedule]
name = "cosine_with_restarts"
cycles = 2
warmup = 2
[objective]
loss = "huber"
huber_schedule = "snr"
min_snr_gamma = 5.0
noise_offset = 0.05
[memory]
gradient_checkpointing = false
[validation]
every = 4
pictures = 2
[checkpoint]
every = 2
keep = 3
[export]
every = 4
formats = ["diffusers", "kohya"]
verify = false
""",
)
MINIATURES["flux"] = (
    "flux",
    """
# Transformer: DoRA, matmul in FP8 with delayed scales, LoRA+, gradient checkpointing.
name = "flux"
[model]
family = "flux"
path = "{bases}/flux"
[quantize]
storage = "fp8"
compute = "fp8"
recipe = "delayed"
fp8_min_features = 0
[adapter]
type = "dora"
rank = 4
alpha = 4.0
[dataset]
resolution = 48
bucket_step = 16
folders = [{path = "{data}/images"}]
[train]
steps = 6
batch_size = 2
[optimizer]
lr = 1e-3
loraplus_lr_ratio = 4.0
[objective]
timesteps = "logit_normal"
[memory]
gradient_checkpointing = true
[checkpoint]
every = 3
[export]
verify = false
dtype = "fp32"
""",
)
MINIATURES["wan"] = (
    "wan",
    """
# Video clips: LoHa on FP8 with block scales, lion8bit.
name = "wan"
[model]
family = "wan"
path = "{bases}/wan"
[quantize]
storage = "fp8"
scale = "1x64"
[adapter]
type = "loha"
rank = 2
alpha = 2.0
[dataset]
resolution = 32
bucket_step = 16
frames = [5, 9]
fps = 8.0
clip = "chunks"
folders = [{path = "{data}/clips"}, {path = "{data}/images"}]
[train]
steps = 6
batch_size = 2
[optimizer]
name = "lion8bit"
lr = 1e-4
[memory]
gradient_checkpointing = false
[checkpoint]
every = 3
[export]
verify = false
""",
)
MINIATURES["qwen_image_edit"] = (
    "qwen_image_edit",
    """
# Control images: LoKr, FP8 matmul with scales of each step, prodigy.
name = "qwen_image_edit"
[model]
family = "qwen_image_edit"
path = "{bases}/qwen_image_edit"
[quantize]
storage = "fp8"
scale = "row"
compute = "fp8"
recipe = "current"
fp8_min_features = 0
[adapter]
type = "lokr"
rank = 2
alpha = 2.0
factor = 4
decompose_both = true
[dataset]
resolution = 48
bucket_step = 16
control_resolution = 32
folders = [{path = "{data}/images", control = "{data}/controls"}]
[train]
steps = 6
batch_size = 2
[optimizer]
name = "prodigy"
[memory]
gradient_checkpointing = true
[checkpoint]
every = 3
[export]
verify = false
""",
)
MINIATURES["z_image"] = (
    "z_image",
    """
# Prompts of varying length: int8, other storages of single layers, stochastic rounding, AdamW of torch, shift.
name = "z_image"
[model]
family = "z_image"
path = "{bases}/z_image"
text_storage = "fp8"
[quantize]
storage = "int8"
scale = "row"
sensitivity = "auto"
override = ["to_k = bf16", "to_v = fp8 tensor"]
[adapter]
rank = 4
alpha = 8.0
[dataset]
resolution = 48
bucket_step = 16
buckets = false
folders = [{path = "{data}/images"}]
[train]
steps = 6
batch_size = 2
[optimizer]
name = "adamw"
lr = 1e-3
rounding = "stochastic"
[schedule]
name = "linear"
warmup = 0.2
[objective]
loss = "pseudo_huber"
shift = 2.0
t_min = 0.1
[memory]
gradient_checkpointing = false
[checkpoint]
every = 3
[export]
verify = false
""",
)

AVERAGED = ("sd15",)
"""Jobs whose checkpoints are averaged after training (`lora-fp8 average RUN`)."""
DEMOS = {"demo_sd15": "sd15", "demo_flux": "flux"}
DEMO_WARMUP = 20
JOBS = (*DEMOS, "debug", *MINIATURES)

MAKE_BASES = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
import miniatures
for name in sys.argv[2:]:
    miniatures.save(name, Path(sys.argv[1], name))
"""
"""Run in this checkout: the only place that imports the project."""


class InputError(Exception):
    """The command line is wrong: exit code 2."""


@dataclass(frozen=True)
class Side:
    """One of the two versions.

    Attributes:
        name: "OLD" or "NEW".
        checkout: folder with train_lora.py.
        folder: where its configs, runs, caches and home are.
        changes: (job or "", key path, TOML value or None to remove) for its configs.
        average: words of its command line that average a run's checkpoints.
    """

    name: str
    checkout: Path
    folder: Path
    changes: tuple[tuple[str, tuple[str, ...], Any], ...] = ()
    average: tuple[str, ...] = ("average",)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    job: str
    file: str
    result: str
    equal: bool


# -- running the two versions


def make_environment(side: Side) -> dict[str, str]:
    """Return the environment of a version's processes: its own code, home and cache; one thread, no GPU, no network."""
    home = side.folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "VIRTUAL_ENV")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "PYTHONPATH": str(side.checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
        "HF_HOME": str(home / "huggingface"),
        "LORA_FP8_HOME": str(home / "queue"),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def start(side: Side, job: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start Python with this version's code; its output is appended to JOB.log in the version's folder."""
    with open(side.folder / f"{job}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=side.checkout, env=make_environment(side), stdout=log, stderr=log
        )


def check_import(side: Side) -> None:
    """Raise InputError unless this version's processes load the code of its own checkout."""
    if not (side.checkout / "train_lora.py").is_file():
        raise InputError(f"{side.checkout}: no checkout of this project (train_lora.py is missing).")
    where = subprocess.run(
        [sys.executable, "-c", "import lora_fp8; print(lora_fp8.__file__)"],
        cwd=side.checkout,
        env=make_environment(side),
        capture_output=True,
        text=True,
    )
    if where.returncode or not Path(where.stdout.strip()).resolve().is_relative_to(side.checkout):
        raise InputError(f"{side.checkout}: its code is not what Python loads ({where.stdout or where.stderr}).")


def train_job(job: str, sides: tuple[Side, ...]) -> list[str]:
    """Train a job with every version at the same time. Returns a line for each version that failed."""
    waiting = {side: list(list_commands(job, side)) for side in sides}
    running: dict[Side, subprocess.Popen[bytes]] = {}
    failures = []
    try:
        while waiting:
            for side, left in list(waiting.items()):
                process = running.get(side)
                if process is not None and process.poll() is None:
                    continue
                if process is not None and process.returncode:
                    log = side.folder / f"{job}.log"
                    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
                    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
                    failures.append(f"failed in {side.name} (exit code {process.returncode}): {last}")
                    left.clear()
                if left:
                    running[side] = start(side, job, *left.pop(0))
                else:
                    del waiting[side]
            time.sleep(0.05)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
                process.wait()
    return failures


def list_commands(job: str, side: Side) -> Iterator[list[str]]:
    """Yield the Python command lines of a job."""
    yield ["train_lora.py", "--config", str(side.folder / f"{job}.toml")]
    if job in AVERAGED:
        yield ["-m", "lora_fp8", *side.average, str(get_run_folder(job, side))]


def get_run_folder(job: str, side: Side) -> Path:
    """Return where a job's run is, or will be."""
    config = tomllib.loads((side.folder / f"{job}.toml").read_text(encoding="utf-8"))
    return side.folder / "runs" / config["name"]


# -- configs and inputs


def write_config(job: str, side: Side, inputs: Path, steps: int) -> None:
    """Write JOB.toml for one version.

    Args:
        inputs: folder with `bases` and `data`.
        steps: of the demos; 0 keeps theirs.
    """
    if job in MINIATURES:
        config = tomllib.loads(MINIATURES[job][1])
    else:
        config = tomllib.loads(find_own_config(job, side.checkout).read_text(encoding="utf-8"))
        config.setdefault("name", job)
    if job in DEMOS:
        demo = find_own_config(job, side.checkout).parent
        for folder, name in zip(config["dataset"]["folders"], ("dataset", "dataset_plain"), strict=True):
            folder["path"] = str(demo / name)
        if steps:
            config["train"]["steps"] = steps
    for table, values in tomllib.loads(COMMON).items():
        config[table] = config.get(table, {}) | values if isinstance(values, dict) else values
    for only, key, value in side.changes:
        if only in ("", job):
            change(config, key, value)
    folders = {"{side}": side.folder, "{bases}": inputs / "bases", "{data}": inputs / "data"}
    (side.folder / f"{job}.toml").write_text(tomlkit.dumps(fill_folders(config, folders)), encoding="utf-8")


def find_own_config(job: str, checkout: Path) -> Path:
    """Return a version's own config of a job that it brings."""
    if job == "debug":
        return checkout / "configs" / "debug.toml"
    paths = [path for path in (checkout / "lora_fp8").rglob(f"{DEMOS[job]}.toml") if path.parent.name == "demo"]
    if len(paths) != 1:
        raise InputError(f"{checkout}: expected one lora_fp8/**/demo/{DEMOS[job]}.toml, got {len(paths)}.")
    return paths[0]


def change(config: Any, key: tuple[str, ...], value: Any) -> None:
    """Set a value in nested tables and lists, in place; None removes it, if it is there."""
    *parents, last = (int(part) if part.isdigit() else part for part in key)
    for part in parents:
        if value is None and isinstance(config, dict) and part not in config:
            return
        config = config[part] if isinstance(config, list) else config.setdefault(part, {})
    if value is not None:
        config[last] = value
    elif last in config:
        del config[last]


def fill_folders(value: Any, folders: dict[str, Path]) -> Any:
    """Return nested data with the folders in place of their names in all texts."""
    if isinstance(value, dict):
        return {key: fill_folders(item, folders) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_folders(item, folders) for item in value]
    if isinstance(value, str):
        for name, folder in folders.items():
            value = value.replace(name, str(folder))
    return value


def parse_change(text: str) -> tuple[str, tuple[str, ...], Any]:
    """Read `[JOB:]KEY=VALUE`. Returns (job or "", key path, value; None to remove it)."""
    match = re.fullmatch(rf"(?:({'|'.join(JOBS)}):)?([\w.]+)=(.*)", text, re.DOTALL)
    if not match:
        raise InputError(f"--new-set: expected [JOB:]KEY=VALUE, got {text!r}.")
    job, key, value = match.groups(default="")
    if not value:
        return job, tuple(key.split(".")), None
    try:
        return job, tuple(key.split(".")), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return job, tuple(key.split(".")), value  # a bare word, as with --set


def make_bases(folder: Path, families: set[str]) -> None:
    """Make the random miniatures of these families in folder/bases, with the code of this checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    here = Side("HERE", ROOT, folder)
    if start(here, "bases", "-c", MAKE_BASES, str(folder / "bases"), *sorted(families)).wait():
        log = (folder / "bases.log").read_text(encoding="utf-8", errors="replace")
        raise InputError(f"{ROOT}: cannot make miniatures of {', '.join(sorted(families))}.\n{log}")


def draw_data(folder: Path, *, with_clips: bool) -> None:
    """Draw captioned images, masks, control images, images of a class, and video clips; always the same."""
    import numpy
    from PIL import Image

    captions = ("a {red|dark} cat, sitting, photo", "a dog, green, running, night", "a cat, blue, standing", "a bird")
    sizes = ((48, 48), (96, 48), (48, 96), (64, 60), (50, 44))
    random = numpy.random.default_rng(0)

    def draw_picture(width: int, height: int) -> Image.Image:
        coarse = Image.fromarray(random.integers(0, 255, (6, 6, 3), dtype=numpy.uint8))
        return coarse.resize((width, height), Image.Resampling.BICUBIC)

    for name in ("images", "class", "masks", "controls", "clips"):
        (folder / name).mkdir(parents=True)
    for number, (width, height) in enumerate(sizes):
        stem = f"image{number}"
        for kind in ("images", "class"):
            path = folder / kind / (stem + (".png" if number % 2 else ".jpg"))
            draw_picture(width, height).save(path)
            path.with_suffix(".txt").write_text(captions[number % len(captions)], encoding="utf-8")
        draw_picture(width, height).save(folder / "controls" / f"{stem}.png")
        mask = Image.new("L", (width, height))
        mask.paste(255, (width // 4, height // 4, width, 3 * height // 4))
        mask.save(folder / "masks" / f"{stem}.png")
    if with_clips:
        for number, length in enumerate((12, 20)):
            path = folder / "clips" / f"clip{number}.mp4"
            write_clip(path, [draw_picture(48, 32) for _ in range(length)])
            path.with_suffix(".txt").write_text(captions[number], encoding="utf-8")


def write_clip(path: Path, frames: list[Any]) -> None:
    """Write images as a video of 8 frames a second, without loss."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv444p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


# -- comparing what they wrote


def read_header(data: bytes) -> tuple[dict[str, Any], dict[str, str], bytes]:
    """Split a safetensors file into (name -> dtype, shape and offsets), metadata, and the tensors' bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    return header, metadata, data[8 + length :]


def compare_files(old: Path, new: Path, allowed: tuple[str, ...] = ()) -> tuple[bool, str]:
    """Compare two safetensors files.

    Args:
        allowed: metadata keys that may differ beside `VERSION_KEYS`.

    Returns:
        Whether they are equal apart from these keys, and what to print.
    """
    for path, side in ((old, "OLD"), (new, "NEW")):
        if not path.is_file():
            return False, f"differs: not written by {side}"
    before, after = old.read_bytes(), new.read_bytes()
    if before == after:
        return True, "same bytes"
    texts, words = read_header(before)[1], read_header(after)[1]
    keys = sorted(key for key in {*texts, *words} if texts.get(key) != words.get(key))
    accepted = {*VERSION_KEYS, *allowed}
    if accepted.intersection(keys):
        accepted.add(HASH_OF_LENGTH)
    differences = [
        f"metadata {key} (OLD {shorten_value(texts.get(key))}, NEW {shorten_value(words.get(key))})" for key in keys
    ]
    wrong = [line for line, key in zip(differences, keys, strict=True) if key not in accepted]
    if tensors := compare_tensors(old, new):
        wrong.insert(0, tensors)
    if not keys and not wrong:
        wrong = ["header bytes (order or spacing)"]
    if wrong:
        return False, "differs: " + "; ".join(wrong)
    return True, "same bytes but for metadata " + ", ".join(keys)


def shorten_value(text: str | None, most: int = 60) -> str:
    """Return a metadata value, shortened; "none" if there is none."""
    return "none" if text is None else repr(text if len(text) <= most else text[:most] + "...")


def compare_tensors(old: Path, new: Path) -> str:
    """Return how the tensors of two safetensors files differ: the first one and the largest difference; "" if equal."""
    (before, _, left), (after, _, right) = read_header(old.read_bytes()), read_header(new.read_bytes())
    if lost := sorted(before.keys() ^ after.keys()):
        where = "OLD" if lost[0] in before else "NEW"
        return f"{len(lost)} tensors are in one file only, first {lost[0]} (in {where})"
    differing = []
    for name, entry in before.items():
        other = after[name]
        if (entry["dtype"], entry["shape"]) != (other["dtype"], other["shape"]):
            return f"{name} is {entry['dtype']} {entry['shape']} in OLD, {other['dtype']} {other['shape']} in NEW"
        if left[slice(*entry["data_offsets"])] != right[slice(*other["data_offsets"])]:
            differing.append(name)
    if not differing:
        return ""
    from safetensors import safe_open

    with safe_open(old, "pt") as one, safe_open(new, "pt") as two:
        gaps = {n: (one.get_tensor(n).double() - two.get_tensor(n).double()).abs().max().item() for n in differing}
    worst = max(gaps, key=lambda name: (gaps[name] != gaps[name], gaps[name]))  # NaN first
    return (
        f"{len(differing)} of {len(before)} tensors, first {differing[0]} (by {gaps[differing[0]]:.3g}), "
        f"largest difference {gaps[worst]:.3g} in {worst}"
    )


def compare_losses(old: Path, new: Path) -> tuple[bool, str]:
    """Compare the losses of two events.jsonl files, step by step, those of held-out images included."""
    before, after = read_losses(old), read_losses(new)
    if not before or not after:
        return False, f"differs: OLD has {len(before)} losses, NEW {len(after)}"
    if before == after:
        return True, f"same ({len(before)} values)"
    if len(before) != len(after) or [one[:2] for one in before] != [one[:2] for one in after]:
        return False, f"differs: OLD has {len(before)} losses, NEW {len(after)}, or of other events"
    event, step, _ = next(one for one, two in zip(before, after, strict=True) if one != two)
    gap = max(abs(one[2] - two[2]) for one, two in zip(before, after, strict=True))
    return False, f"differs: first at step {step} ({event}), largest difference {gap:.3g}"


def read_losses(path: Path) -> list[tuple[str, int, float]]:
    """Return (event, step, loss) of every event with a loss."""
    if not path.is_file():
        return []
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(one["event"], one.get("step", 0), one["loss"]) for one in events if "loss" in one]


def compare_checkpoints(old: Path, new: Path) -> tuple[bool, str]:
    """Compare the tensors of the last checkpoint of two runs."""
    last = [max(run.glob("checkpoints/step-*"), default=None) for run in (old, new)]
    if last[0] is None or last[1] is None:
        return False, "differs: there is none in " + ("OLD" if last[0] is None else "NEW")
    names = [{path.name for path in folder.glob("*.safetensors")} for folder in last if folder]
    if last[0].name != last[1].name or names[0] != names[1] or not names[0]:
        return False, f"differs: {last[0].name} of {sorted(names[0])}, {last[1].name} of {sorted(names[1])}"
    wrong = [
        f"{name}: {text}" for name in sorted(names[0]) if (text := compare_tensors(last[0] / name, last[1] / name))
    ]
    return not wrong, "differs: " + "; ".join(wrong) if wrong else f"same bytes ({last[0].name}, {len(names[0])} files)"


def compare_runs(job: str, old: Path, new: Path, allowed: tuple[str, ...] = ()) -> list[Row]:
    """Compare two run folders. Returns a row for each exported file, the losses and the last checkpoint."""
    files = sorted({path.relative_to(run) for run in (old, new) for path in run.glob("export/**/*.safetensors")})
    if not files:
        return [Row(job, "export", "differs: neither version exported a file", False)]
    results = [(str(file), compare_files(old / file, new / file, allowed)) for file in files]
    results.append(("loss", compare_losses(old / "events.jsonl", new / "events.jsonl")))
    results.append(("checkpoint", compare_checkpoints(old, new)))
    return [Row(job, file, text, equal) for file, (equal, text) in results]


# -- the command


@contextlib.contextmanager
def checkout_of(given: str, folder: Path) -> Iterator[Path]:
    """Yield the named checkout: a folder, or a revision in a temporary worktree."""
    if Path(given).is_dir():
        yield Path(given).resolve()
        return
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", f"{given}^{{commit}}"], capture_output=True, text=True
    )
    if known.returncode:
        raise InputError(f"{given}: neither a folder nor a git revision of {ROOT}.")
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(folder), known.stdout.strip()], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=True)


def main(arguments: list[str] | None = None) -> int:
    """Train the jobs of both checkouts and compare their files. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="Exit codes: 0 all equal, 1 a difference, 2 wrong input."
    )
    parser.add_argument("old", metavar="OLD", help="checkout (folder) or git revision")
    parser.add_argument("new", metavar="NEW", help="checkout (folder) or git revision")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS, metavar="NAME", help=" | ".join(JOBS))
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help=f"steps of the demos, above {DEMO_WARMUP}; all by default"
    )
    parser.add_argument(
        "--new-set", action="append", default=[], metavar="[JOB:]KEY=VALUE", help="set (KEY=: remove) in NEW's configs"
    )
    for side in ("old", "new"):
        text = f"{side.upper()}'s command that averages checkpoints (default: average; until 2026-11-24 it was ema)"
        parser.add_argument(f"--{side}-average", default="average", metavar="COMMAND", help=text)
    parser.add_argument("--allow-metadata", nargs="+", default=[], metavar="KEY", help="metadata that may differ")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder for configs, logs and runs")
    given = parser.parse_args(arguments)
    try:
        return compare(given)
    except InputError as error:
        print(f"compare_exports: {error}", file=sys.stderr)
        return 2


def compare(given: argparse.Namespace) -> int:
    """Do what the command line asks for. Returns the exit code."""
    if given.steps and given.steps <= DEMO_WARMUP:
        raise InputError(f"--steps: the demos warm up for {DEMO_WARMUP} steps (got {given.steps}). Give more.")
    if given.keep and given.keep.exists():
        raise InputError(f"--keep: {given.keep} exists. Name a new folder.")
    changes = tuple(map(parse_change, given.new_set))
    with contextlib.ExitStack() as stack:
        work = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-exports-")))
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        trees = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-exports-trees-")))
        old = Side(
            "OLD",
            stack.enter_context(checkout_of(given.old, trees / "old")),
            work / "old",
            average=tuple(shlex.split(given.old_average)),
        )
        new = Side(
            "NEW",
            stack.enter_context(checkout_of(given.new, trees / "new")),
            work / "new",
            changes,
            tuple(shlex.split(given.new_average)),
        )
        for side in (old, new):
            check_import(side)
        inputs, jobs = work / "inputs", [name for name in JOBS if name in given.jobs]
        families = {MINIATURES[job][0] for job in jobs if job in MINIATURES}
        if families:
            make_bases(inputs, families)
            draw_data(inputs / "data", with_clips="wan" in families)
        print("job | file | result", flush=True)
        rows: list[Row] = []
        for job in jobs:
            started = time.perf_counter()
            for side in (old, new):
                write_config(job, side, inputs, given.steps)
            failures = train_job(job, (old, new))
            found = [Row(job, "training", line, False) for line in failures]
            if not failures:
                found = compare_runs(
                    job, get_run_folder(job, old), get_run_folder(job, new), tuple(given.allow_metadata)
                )
            for row in found:
                print(f"{row.job} | {row.file} | {row.result}", flush=True)
            print(f"{job} | time | {time.perf_counter() - started:.0f} s", flush=True)
            rows += found
    wrong = sum(not row.equal for row in rows)
    print(f"{len(rows)} lines of {len(jobs)} jobs compared, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that trainings end and worktrees are removed
    sys.exit(main())
