"""`lora-fp8 demo`: train a job on the bundled base, and measure images of the same seeds before and after.

Everything after training is done as any user would do it: diffusers' own `load_lora_weights` loads the exported file
into a plain pipeline on the published base, and nothing from the training is reused. The figures therefore show what a
user of the file gets.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from .. import config, families, train
from ..common.json_files import write_json
from ..errors import Message, UserError
from ..stages import previews
from . import measure, pictures

FOLDER = Path(__file__).resolve().parent
NUM_CONCEPT, NUM_PLAIN, BATCH = 32, 64, 32
LEAST_CONCEPT, MOST_CONCEPT_BEFORE, LEAST_KEPT = 0.8, 0.05, 0.9


@dataclass
class DemoResult:
    """The result of the demo.

    Attributes:
        family: the family of the bundled base.
        files: the LoRA files.
        sheet: the contact sheet, with a row for the base and one for the LoRA; a column has one seed.
        concept_before, concept_after: fraction of the images with the trigger word that show the concept.
        plain_before, plain_after: fraction of plain prompts that are obeyed in shape, colour and background.
        seconds: wall time of training (including encoding, loading and verification), and of everything.
    """

    family: str
    files: list[str]
    sheet: str
    concept_before: float
    concept_after: float
    plain_before: float
    plain_after: float
    seconds: dict[str, float]

    @property
    def ok(self) -> bool:
        """Return True if the LoRA has learned the concept, and the base has kept what it knew."""
        learned = self.concept_after >= LEAST_CONCEPT and self.concept_before <= MOST_CONCEPT_BEFORE
        return learned and self.plain_after >= LEAST_KEPT * self.plain_before

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON types."""
        return asdict(self) | {"ok": self.ok}

    def format_lines(self) -> list[str]:
        """Return the report for people."""
        return [
            "",
            Message(
                "the new concept, {trigger}, in {count} images: {before} before, {after} with the LoRA",
                trigger=repr(pictures.TRIGGER),
                count=NUM_CONCEPT,
                before=f"{self.concept_before:.0%}",
                after=f"{self.concept_after:.0%}",
            ),
            Message(
                "plain prompts followed, of {count}: {before} before, {after} with the LoRA",
                count=NUM_PLAIN,
                before=f"{self.plain_before:.0%}",
                after=f"{self.plain_after:.0%}",
            ),
            Message(
                "time: {job} s for the job, {all} s with these measurements",
                job=f"{self.seconds['job']:.0f}",
                all=f"{self.seconds['all']:.0f}",
            ),
            Message("contact sheet: {path}", path=self.sheet),
            *(f"LoRA: {path}" for path in self.files),
            ""
            if self.ok
            else Message(
                "The LoRA did not reach what the demo requires; the run folder has everything to find out why."
            ),
        ]


def run(family: str, out: Path, echo: Callable[[dict[str, Any]], None] | None = None) -> DemoResult:
    """Train on the bundled dataset and measure the result.

    Args:
        family: a family with a bundled base.
        out: folder in which the run folder `demo-<family>` (or `-2`, `-3` ...) is created.
        echo: called with each event of the run.

    Raises:
        UserError: there is no bundled base for this family.
    """
    settings = FOLDER / f"{family}.toml"
    if not settings.is_file():
        bundled = " | ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
        raise UserError(
            Message(
                "demo: there is no bundled base model for {family}; accepted: {names}",
                family=repr(family),
                names=bundled,
            )
        )
    name, count = f"demo-{family}", 1
    while (out / name).exists():
        count += 1
        name = f"demo-{family}-{count}"
    places = {"name": name, "output_dir": str(out), "dataset.cache_dir": str(out / "cache")}
    places |= {
        f"dataset.folders.{i}.path": str(FOLDER / folder) for i, folder in enumerate(("dataset", "dataset_plain"))
    }
    asked = [config.format_toml_line(key, value) for key, value in places.items()]
    job = config.loads(settings.read_text(encoding="utf-8"), asked, where=settings.name)
    started = time.perf_counter()
    result = train.run(job, echo=echo)
    trained = time.perf_counter()

    if echo:
        echo({"event": "stage", "stage": "measure"})
    base = FOLDER / "base" / family
    sampling = json.loads((base / "measured.json").read_text(encoding="utf-8"))["sampling"]
    concept, plain = make_concept_prompts(), make_plain_prompts()
    pipeline = DiffusionPipeline.from_pretrained(base, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    before = draw(pipeline, sampling, [*concept, *plain])
    pipeline.load_lora_weights(result.run.export, weight_name=find_diffusers_file(family, result.files).name)
    after = draw(pipeline, sampling, [*concept, *plain])

    columns = [*range(8), *range(NUM_CONCEPT, NUM_CONCEPT + 8)]
    chosen = [[*concept, *plain][i] for i in columns]
    sheet = previews.draw_contact_sheet(
        {"base": [before[i] for i in columns], "with the LoRA, same seeds": [after[i] for i in columns]},
        chosen,
        scale=2,
    )
    sheet_path = result.run.path / "contact_sheet.png"
    previews.write_png(sheet, sheet_path)
    outcome = DemoResult(
        family=family,
        files=[str(path) for path in result.files],
        sheet=str(sheet_path),
        concept_before=_compute_share(map(measure.is_concept, before[:NUM_CONCEPT])),
        concept_after=_compute_share(map(measure.is_concept, after[:NUM_CONCEPT])),
        plain_before=_compute_share(map(measure.obeys, before[NUM_CONCEPT:], plain)),
        plain_after=_compute_share(map(measure.obeys, after[NUM_CONCEPT:], plain)),
        seconds={"job": round(trained - started, 1), "all": round(time.perf_counter() - started, 1)},
    )
    write_json(result.run.path / "demo.json", outcome.to_json())
    return outcome


def make_concept_prompts() -> list[str]:
    """Return prompts with the trigger word, on each of the eight backgrounds in turn."""
    backgrounds = list(pictures.COLOURS)
    return [pictures.make_concept_prompt(backgrounds[i % len(backgrounds)]) for i in range(NUM_CONCEPT)]


def make_plain_prompts() -> list[str]:
    """Return prompts drawn at random from the whole world that the base knows."""
    rng = random.Random(7)
    return [pictures.make_prompt(pictures.choose_random_scene(rng)) for _ in range(NUM_PLAIN)]


def draw(pipeline: Any, sampling: dict[str, Any], prompts: list[str]) -> list[Image.Image]:
    """Draw one image per prompt; the i-th always with seed 1000 + i."""
    images: list[Image.Image] = []
    settings = {k: v for k, v in sampling.items() if k != "negative_prompt"}
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        generators = [torch.Generator("cpu").manual_seed(1000 + start + i) for i in range(len(part))]
        negative = (
            {"negative_prompt": [sampling["negative_prompt"]] * len(part)} if "negative_prompt" in sampling else {}
        )
        images += pipeline(part, **settings, **negative, height=64, width=64, generator=generators).images
    return images


def find_diffusers_file(family: str, files: list[Path]) -> Path:
    """Return the first exported file in a layout that diffusers' pipelines read."""
    ends = tuple(f"_{layout}" for layout in families.get(family).layouts_of_diffusers)
    return next(path for path in files if path.stem.endswith(ends))


def _compute_share(answers: Any) -> float:
    answers = list(answers)
    return round(sum(answers) / len(answers), 4)
