"""The four journeys of the README: each command as it is written there, by a newcomer with an empty home.

The commands are read out of both READMEs and are not changed. What a miniature in place of the released model changes
stands in three tables: `SERVED`, `ENVIRONMENT` and `EDITS`.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import miniatures
import pytest
import single_files
import tomlkit
from hub_server import TOKEN, HubServer
from PIL import Image
from safetensors import safe_open
from test_video_clips import steadily, write_video
from waiting import LONG_SECONDS

from lora_fp8 import config
from lora_fp8.config import dataset_recipe, recipes
from lora_fp8.config.dataset_recipe import Pictures
from lora_fp8.families.sources import known_bases

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"

SERVED = {
    "black-forest-labs/FLUX.1-dev": "flux",
    "Qwen/Qwen-Image-Edit-2511": "qwen_image_edit_plus",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan",
}
"""Ids that the README names -> the miniature that the hub of the tests has under it. The SDXL file is one too."""
ENVIRONMENT = {
    "HF_TOKEN": TOKEN,  # `hf auth login` asks in a browser, unless somebody is logged in already
    "NO_PROXY": "127.0.0.1",
    "CUDA_VISIBLE_DEVICES": "",  # the same on every machine
    "OMP_NUM_THREADS": "1",
}
"""What a user could set as well, beside HF_ENDPOINT, which is the hub of the tests."""
EDITS = {
    "train.steps": 2,
    "dataset.resolution": 64,
    "preview.steps": 1,
    "preview.every": 0,
    "memory.offload": 0,  # a CPU has no memory of its own
}
"""What is changed in the config after `new`, where the README says that it is yours to change: seconds on a CPU."""
EDITS_IF_HELD_OUT = {"validation.every": 2}
EDITS_IF_PAIRS = {
    "dataset.control_resolution": 64,
    "preview": {},  # diffusers' pipeline shows the control image at 1024 x 1024 in any case: minutes on a CPU
}
IMAGES = {"zibo_images": 16, "ink_drawings": 4, "night": 4, "day": 4, "orbit_clips": 3}
"""Number of files in the folders that the README names; of 16, some are held out."""


class Journey(NamedTuple):
    """A journey of a README: its commands as lists of words, and the files that its text names."""

    commands: list[list[str]]
    files: list[str]

    @property
    def new(self) -> dict[str, str]:
        """The options of its `lora-fp8 new`, and under "" the config."""
        (words,) = (words for words in self.commands if words[:2] == ["lora-fp8", "new"])
        return {"": words[2]} | dict(zip(words[3::2], words[4::2], strict=True))


def read_journeys(path: Path) -> list[Journey]:
    text = path.read_text(encoding="utf-8")
    sections = re.findall(r"^### \d\. [^\n]+\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    journeys = []
    for section in sections:
        block = "\n".join(re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
        words = [shlex.split(line, comments=True) for line in block.splitlines()]
        files = re.findall(r"`(runs/[^`]+)`", section)
        journeys.append(Journey([line for line in words if line], files))
    return journeys


JOURNEYS = read_journeys(READMES[0])


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """The hub with the released models' ids, and beside it the SDXL file."""
    root = tmp_path_factory.mktemp("released")
    with HubServer() as server:
        for repo, family in SERVED.items():
            miniatures.save(family, root / family)
            known = known_bases.get(repo)
            assert known is not None
            server.add(repo, root / family, card={"license": known.licence}, gated="auto" if known.gated else False)
        single_files.write(root, {"file.safetensors": single_files.one_file("sdxl", single_files.sdxl(root / "sdxl"))})
        server.add(SDXL, root / "sdxl", only="*token*/*")
        yield server


def make_files(home: Path, journey: Journey) -> None:
    """Make the images, clips and captions of the folders that the journey's `new` names."""
    folders = {name for option, name in journey.new.items() if option in ("--images", "--controls")}
    for name in folders:
        (home / name).mkdir()
        for number in range(IMAGES[name]):
            if "clips" in name:
                write_video(home / name / f"{number}.mp4", steadily(20, 16), size=(96, 64))
            else:
                image = Image.new("RGB", (96, 64), (15 * number, 90, 160))
                image.paste("white", (number, 10, 40 + number, 40))
                image.save(home / name / f"{number}.png")
            if name != journey.new.get("--controls"):
                (home / name / f"{number}.txt").write_text(f"a thing from the side, number {number}", encoding="utf-8")


def edit(path: Path) -> None:
    """Change what the tables have in the config, as a person would in an editor."""
    document, job = tomlkit.parse(path.read_text(encoding="utf-8")), config.load(path)
    edits = EDITS | (EDITS_IF_HELD_OUT if job.validation.pictures else {})
    edits |= EDITS_IF_PAIRS if job.dataset.folders[0].control else {}
    for key, value in edits.items():
        section, _, name = key.rpartition(".")
        (document.setdefault(section, tomlkit.table()) if section else document)[name] = value
    path.write_text(tomlkit.dumps(document), encoding="utf-8")


@pytest.mark.parametrize("number", range(len(JOURNEYS)), ids=[journey.new[""] for journey in JOURNEYS])
def test_a_journey_runs_as_it_is_written(number: int, hub: HubServer, tmp_path: Path) -> None:
    journey = JOURNEYS[number]
    make_files(tmp_path, journey)
    base, name = journey.new["--base"], Path(journey.new[""]).stem
    if base not in SERVED:
        (tmp_path / base).parent.mkdir(parents=True)
        (tmp_path / base).write_bytes((hub.repositories[SDXL].folder.parent / "file.safetensors").read_bytes())
    programs = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    environment = ENVIRONMENT | {"HOME": str(tmp_path), "PATH": programs, "PYTHONPATH": str(ROOT)}
    environment["HF_ENDPOINT"] = hub.endpoint
    said = {}
    for words in journey.commands:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=LONG_SECONDS
        )
        said[words[1]] = done.stdout + done.stderr
        assert done.returncode == 0 and "Traceback" not in done.stderr, (words, done.stdout, done.stderr)
        if words[:2] == ["lora-fp8", "new"]:
            assert len((tmp_path / words[2]).read_text(encoding="utf-8").splitlines()) <= 50
            edit(tmp_path / words[2])
    if known := known_bases.get(base):
        assert f"licence: {known.licence}" in said["check"]
    assert journey.files and all((tmp_path / file).exists() for file in journey.files), journey.files
    verified = json.loads((tmp_path / "runs" / name / "verify.json").read_text(encoding="utf-8"))
    exported = sorted((tmp_path / "runs" / name / "export").glob("*.safetensors"))
    assert {path.name for path in exported} == verified.keys()
    assert {f"runs/{name}/export/{path.name}" for path in exported} <= set(journey.files), "the README names each"
    for path in exported:
        assert verified[path.name]["ok"] is True and len(verified[path.name]["checks"]) > 5
        with safe_open(path, framework="np") as file:
            assert len(list(file.keys())) > 20 and file.metadata()["modelspec.architecture"]


def test_both_readmes_have_the_same_journeys() -> None:
    english, chinese = (read_journeys(path) for path in READMES)
    assert len(english) == 4 and english == chinese


# -- the figures in the table -----------------------------------------------------------------------------------------


def read_table(path: Path) -> dict[str, list[str]]:
    """Return the rows of the table above the journeys, by their first cell."""
    text = path.read_text(encoding="utf-8")
    table = re.search(r"^\| +\| 1\..*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
    return {first: rest for first, *rest in cells}


def numbers(cells: list[str]) -> list[float]:
    return [float(found[0].replace(",", "")) if (found := re.search(r"\d[\d,.]*", cell)) else 0.0 for cell in cells]


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_the_figures_are_the_programs_own(path: Path) -> None:
    """Download, steps and VRAM of the table; the disk of a run takes a minute to estimate and is not repeated here."""
    rows = list(read_table(path).values())
    downloads, examples, steps, cards, peaks = (numbers(rows[number]) for number in (2, 3, 4, 6, 7))
    options = [journey.new for journey in JOURNEYS]
    assert cards == [float(option["--card"]) for option in options]
    for number, option in enumerate(options):
        known = known_bases.get(option["--base"])
        family, goal = known.family if known else "sdxl", option["--goal"]
        if known:
            assert downloads[number] == round(known.total_bytes / known_bases.GIGABYTE)
        count = int(examples[number])
        clips = {"images": 0, "videos": count} if family == "wan" else {"images": count}
        proposed = dataset_recipe.choose_values(goal, family, Pictures(samples=count, **clips))
        assert steps[number] == next(value.value for value in proposed if value.key == "train.steps"), family
        if family == "wan":  # of the smaller model, the text encoder is the largest part
            assert peaks[number] == round(recipes.read_sizes()["wan"].text["none"] / 1024, 1)
        else:
            fit = recipes.fit_card(family, int(cards[number]))
            assert not fit.problem and fit.peak and peaks[number] == float(recipes.format_gib(fit.peak)), family
