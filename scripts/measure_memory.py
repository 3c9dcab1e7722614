"""Estimate what each family's released model takes in training, and write it to lora_fp8/config/memory.json.

    python scripts/measure_memory.py [FAMILY | BASE ...]      default: every family and size; an hour on two cores

A family's entry is of its usual base; entries named by the id of a base are of released models of another size.

The recipes (lora_fp8/config/recipes.py) choose memory settings from this file, because `lora-fp8 estimate` takes up to
a minute for a large model. Run it again for a family whose numbers tests/test_recipes.py calls outdated.

No model is downloaded: see lora_fp8/families/_released.py.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import tomlkit
from PIL import Image

from lora_fp8 import config, families
from lora_fp8.common.writing import atomic_write
from lora_fp8.families import _released
from lora_fp8.families.sources import BaseDescription, known_bases, parse
from lora_fp8.plan import dry_run, training_memory
from lora_fp8.plan.placement import place_images
from lora_fp8.plan.plan import Plan, plan_layers
from lora_fp8.plan.resolve import resolve_auto
from lora_fp8.plan.scan import scan
from lora_fp8.precision.dtypes import DTYPES
from lora_fp8.settings import Job

OTHER_SIZES = (
    "stabilityai/stable-diffusion-3-medium-diffusers",
    "stabilityai/stable-diffusion-3.5-large",
    "black-forest-labs/FLUX.2-klein-base-9B",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
)
"""Released models whose denoiser is larger or smaller than that of their family's usual base."""
FILE = Path(config.__file__).with_name("memory.json")

MIB = 2**20
RANK = 32
"""The highest rank of a recipe."""
OFFLOADS = (0.0, 0.25, 0.5, 0.75, 1.0)
FRACTIONS = (1.0, 0.75, 0.5)
"""Training resolutions, as fractions of the family's own."""
CLIPS = (9, 17, 49, 81)
"""Numbers of frames of clips; what lies between them lies on a line (`recipes.Sizes.with_clips`)."""
LARGEST_CARD = 80 * 2**30
PLAIN = {"memory.gradient_checkpointing": False, "preview.prompts": [], "preview.controls": []}
TIGHT = 6 * 2**30
"""Free bytes of the smallest card of a recipe."""


def make_job(name: str, folder: Path, values: dict[str, Any], base: str = "") -> Job:
    """Return a job on two square images, with control images where the family takes any; `base` is its base's id."""
    pictures, controls = folder / "pictures", folder / "controls"
    side = values["dataset.resolution"]
    for place in (pictures, controls):
        place.mkdir(parents=True, exist_ok=True)
        for number in range(2):
            Image.new("RGB", (side, side)).save(place / f"{number}.png")
            (pictures / f"{number}.txt").write_text("a picture", encoding="utf-8")
    given: dict[str, Any] = {"model": {"family": name, "path": base or families.get(name).example_base}}
    given["output_dir"] = str(folder)
    given["dataset"] = {"folders": [{"path": str(pictures)}], "cache_dir": str(folder / "cache")}
    given |= {"adapter": {"rank": RANK, "alpha": float(RANK)}, "preview": {"prompts": ["a"]}}
    if any(families.get(name).controls):
        given["dataset"]["folders"][0]["control"] = str(controls)
        given["preview"]["controls"] = [str(controls / "0.png")]
    for key, value in values.items():
        section, _, last = key.partition(".")
        given.setdefault(section, {})[last] = value
    return resolve_auto(config.loads(tomlkit.dumps(given)), families.get(name))


def make_plan(name: str, folder: Path, values: dict[str, Any], of: str = "") -> Plan:
    """Return the Plan of a job with these values on the released model; `of` is its id if it is not the usual one."""
    job = make_job(name, folder, values, of)
    base = BaseDescription(parse(job.model.path), unanswered="not asked")
    family = _released.make(families.get(name), job.model, base, device="cpu", dtype=DTYPES[job.model.dtype])
    placed = place_images(job, scan(job))
    return Plan(job, family, placed, plan_layers(job, family))


def list_sides(name: str) -> list[int]:
    """Return the training resolutions that recipes choose from, the family's own first."""
    native = families.get(name).native_resolution
    return [int(native * fraction) // 32 * 32 for fraction in FRACTIONS]


class Released:
    """A family's released model on the meta device, with adapters, as training builds it."""

    def __init__(self, name: str, folder: Path, base: str = ""):
        self.name, self.folder, self.sides, self.base = name, folder, list_sides(name), base
        self.plan = make_plan(name, folder, {"dataset.resolution": self.sides[0], **PLAIN}, base)
        self.denoiser = training_memory.build_denoiser(self.plan.job, self.plan.family)
        self.training = training_memory.measure_training(self.plan, None)

    def count_weights(self) -> dict[str, list[int]]:
        """Return, by share of offload, the MiB of the base on the GPU and of its part in RAM."""
        return {f"{share:g}": [convert_to_mib(size) for size in self.training.base.count(share)] for share in OFFLOADS}

    def count_trained(self) -> int:
        """Return the bytes of adapters and optimizer."""
        return self.training.adapter_bytes + self.training.optimizer_bytes

    def measure_step(self, side: int, batch: int, frames: int = 1) -> int | None:
        """Return the bytes of a training step beside the weights; None if only trying tells."""
        plan = self.plan
        if side != self.sides[0]:
            plan = make_plan(self.name, self.folder, {"dataset.resolution": side, **PLAIN}, self.base)
        bucket = training_memory.find_heaviest_bucket(plan)[0]
        latents = training_memory.measure_vae(plan.family, bucket, "encode", [])[1]
        assert latents is not None
        if frames > 1:
            latents = (latents[0], plan.family.count_latent_frames(frames), *latents[1:])
        conds = training_memory.find_cond_shapes(plan, self.denoiser, latents)
        try:
            return training_memory.measure_step(plan.job, plan.family, self.denoiser, latents, conds, batch)
        except dry_run.Undecided:
            return None

    def measure_steps(self, held: int, frames: int = 1) -> dict[str, int]:
        """Return the steps that a card could choose from, in MiB.

        Args:
            held: bytes of adapters and optimizer.
            frames: length of the clips; 1 for images.
        """
        native, found = self.sides[0], {}
        self.denoiser.disable_gradient_checkpointing()  # type: ignore[operator]
        single = self.measure_step(native, 1, frames)
        if single is None:
            return {}
        found[f"{native} x1"] = single
        if single < LARGEST_CARD / 3:
            found[f"{native} x2"] = self.measure_step(native, 2, frames)
        self.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
        for batch in (1, 2):
            found[f"{native} x{batch} checkpointed"] = self.measure_step(native, batch, frames)
        is_tight = held + (found[f"{native} x1 checkpointed"] or 0) > TIGHT * 2 / 3
        if is_tight or any(self.plan.family.clips):  # clips may need a smaller side where images do not
            for side in self.sides[1:]:
                found[f"{side} x1 checkpointed"] = self.measure_step(side, 1, frames)
        return {key: convert_to_mib(size) for key, size in found.items() if size is not None}

    def measure_encoding(self, frames: int = 1) -> dict[str, int]:
        """Return the VAE's work on an image or clip by its side, in MiB."""
        found = {}
        for side in self.sides:
            bucket = (side, side) if frames == 1 else (side, side, frames)
            if (size := training_memory.measure_vae(self.plan.family, bucket, "encode", [])[0]) is not None:
                found[str(side)] = convert_to_mib(size)
        return found

    def measure_clips(self, held: int) -> dict[str, dict[str, dict[str, int]]]:
        """Return the steps and the encoding of clips by their frames; {} for families of images."""
        if not any(self.plan.family.clips):
            return {}
        return {
            str(frames): {"steps": self.measure_steps(held, frames), "encode": self.measure_encoding(frames)}
            for frames in CLIPS
        }


def convert_to_mib(size: int) -> int:
    """Return bytes as MiB, rounded up."""
    return math.ceil(size / MIB)


def measure(name: str, folder: Path, base: str = "") -> dict[str, Any]:
    """Return what the recipes need to know of a family, or of another base of it, in MiB: see `recipes.Sizes`."""
    model = Released(name, folder, base)
    sides, family = model.sides, model.plan.family
    trained = model.count_trained()
    decode, tiles = (
        {side: training_memory.measure_vae(family, (side, side), "decode", [], tiled=tiled)[0] for side in sides}
        for tiled in (False, True)
    )
    steps, clips = model.measure_steps(trained), model.measure_clips(trained)
    return {
        "base": base or families.get(name).example_base,
        "sides": sides,
        "weights": model.count_weights(),
        "trained": convert_to_mib(trained),
        "steps": steps,
        "vae": convert_to_mib(family.count_vae_bytes()),
        "encode": model.measure_encoding(),
        "decode": {str(side): convert_to_mib(size) for side, size in decode.items() if size is not None},
        "decode_tiled": {str(side): convert_to_mib(size) for side, size in tiles.items() if size is not None},
        "text": {
            storage: convert_to_mib(_released.count_text_bytes(families.get(name), storage, family.known))
            for storage in ("none", "fp8", "nf4")
        },
    } | ({"clips": clips} if clips else {})


def main() -> None:
    """Measure the families named on the command line, or all, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAMILY | BASE", help="a family, or the id of a known base")
    given, every = parser.parse_args().names, families.list_families()
    if unknown := [name for name in given if name not in every and known_bases.get(name) is None]:
        parser.error(f"{', '.join(unknown)}: neither a known base nor a family; the families are {', '.join(every)}")
    for name in given or [*every, *OTHER_SIZES]:
        known_base = known_bases.get(name)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(known_base.family, Path(folder), name) if known_base else measure(name, Path(folder))
        known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        known = dict(sorted((known | {name: found}).items()))
        atomic_write(FILE, (json.dumps(known, indent=1) + "\n").encode())
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
