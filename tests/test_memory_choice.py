"""Memory settings left to "auto": what is chosen fits by the estimate, nothing faster does, training is the same."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_fp8 import config, train
from lora_fp8.families import _latents
from lora_fp8.plan import estimate, memory_choice
from lora_fp8.plan import plan as planning
from lora_fp8.plan.memory_choice import MARGIN, UNKNOWN_STEP, WORKSPACE, choose_memory
from lora_fp8.precision import stream
from lora_fp8.settings import Job
from lora_fp8.training import memory

MANY = 2**40


def job_of(family: str, base: Path, pictures: Path, tmp_path: Path, *more: str) -> Job:
    text = f"""
[model]
family = "{family}"
path = {json.dumps(str(base))}
[dataset]
resolution = 64
cache_dir = {json.dumps(str(tmp_path / "cache"))}
[[dataset.folders]]
path = {json.dumps(str(pictures))}
"""
    return config.loads(text, list(more))


def free_for(budget: int) -> int:
    """The free bytes of which so many can be used."""
    free = math.ceil((budget + WORKSPACE) / (1 - MARGIN))
    while int(free * (1 - MARGIN)) - WORKSPACE < budget:
        free += 1
    return free


@pytest.mark.parametrize("family", ["sd15", "flux", "wan"])
def test_the_fastest_that_fits_is_chosen(
    family: str, tiny: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    """The authority is the estimate of a job that names the settings; `estimate` is held against real trainings."""
    plan = planning.make(job_of(family, tiny(family), pictures, tmp_path))
    wanted = [(False, 0.0), (True, 0.0), (True, 0.3), (True, 1.0)]
    peaks = []
    for recomputes, share in wanted:
        more = (f"memory.gradient_checkpointing={str(recomputes).lower()}", f"memory.offload={share}")
        named = planning.make(job_of(family, tiny(family), pictures, tmp_path, *more))
        peaks.append(estimate.estimate(named, "cuda").peaks["train"] or 0)
    # In a miniature, buffers for the offloaded part can be as large as the part: what is offloaded then saves nothing.
    useful = [(choice, peak) for choice, peak in zip(wanted, peaks, strict=True) if choice[1] == 0 or peak < peaks[1]]
    assert len(useful) >= 2 and peaks[0] > peaks[1]
    for (recomputes, share), peak in useful:
        choice = choose_memory(plan, free_for(peak))
        assert choice.peak <= peak and not choice.advice
        assert (choice.section.recomputes, choice.section.share_in_ram) <= (recomputes, share), "nothing slower"
        if share == 0:
            assert (choice.section.recomputes, choice.section.share_in_ram, choice.peak) == (recomputes, 0, peak)
    least = choose_memory(plan, free_for(peaks[1] // 2))
    assert least.advice and "it may run out of memory" in least.format_warning()
    again = choose_memory(plan, free_for(MANY))
    assert not again.section.recomputes and again.tiled is False


def test_what_a_user_says_is_kept(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    def choose(*more: str, free: int | None = 2**20) -> memory_choice.MemoryChoice:
        return choose_memory(planning.make(job_of("flux", tiny("flux"), pictures, tmp_path, *more)), free)

    on_cpu = choose(free=None)
    assert on_cpu.section.gradient_checkpointing is True and on_cpu.section.offload == 0 and on_cpu.format_lines() == []
    assert choose("memory.gradient_checkpointing=false").section.gradient_checkpointing is False
    assert choose("memory.offload=0.2").section.offload == 0.2
    assert choose("preview.tiled=false").tiled is False and choose("preview.tiled=true", free=MANY).tiled
    assert choose().tiled, "nothing fits into a MiB"
    for clash in ("quantize.storage=bf16", "quantize.backend=torchao"):
        chosen = choose(clash)
        assert chosen.section.offload == 0 and chosen.section.recomputes
        assert clash.partition("=")[0] in chosen.advice
    assert choose("memory.cuda_graphs=true").section.offload == 0
    everything = ("memory.gradient_checkpointing=true", "memory.offload=0", "preview.tiled=false")
    assert choose(*everything).format_lines() == [], "nothing is measured where nothing is left to choose"


def test_a_step_that_cannot_be_measured_gets_room(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    """HiDream's experts are chosen by the activations."""
    plan = planning.make(job_of("hidream", tiny("hidream"), pictures, tmp_path))
    choice = choose_memory(plan, free_for(2 * UNKNOWN_STEP))
    assert choice.section.recomputes and choice.section.offload == 0
    assert UNKNOWN_STEP < choice.peak < 1.1 * UNKNOWN_STEP


def test_a_drawing_offloads_no_more_than_it_must(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    plan = planning.make(job_of("flux", tiny("flux"), pictures, tmp_path))

    def choose(free: int | None) -> tuple[float, bool]:
        return memory_choice.choose_for_drawing(plan.job, plan.family, (64, 64), free)

    assert choose(None) == (0, False) and choose(MANY) == (0, False)
    assert choose(2**20) == (1, True)


def test_it_trains_with_what_was_chosen_to_the_same_bytes(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, as_if_on_a_gpu: list[stream.Courier]
) -> None:
    """On a CPU that counts as a GPU with little memory; the run goes on where there is more."""
    steps = ("train.steps=4", "checkpoint.every=2")
    settings = [*steps, "preview.prompts=[]", "export.verify=false", "memory.gradient_checkpointing=auto"]
    monkeypatch.setattr(memory, "find_problem", lambda *_: "")
    plain = train.run(job(*settings, "name=plain"), progress=False)
    assert not as_if_on_a_gpu and not [event for event in plain.run.read_events() if event["event"] == "memory"]

    files = []
    for name, frees in (("tight", (2**20, 2**20)), ("moved", (2**20, MANY))):
        for free, total in zip(frees, (2, 4), strict=True):
            monkeypatch.setattr(memory, "count_free_bytes", lambda device, free=free: free)
            mine = job(*settings, f"name={name}", f"train.steps={total}", "schedule.name=constant")
            result = train.run(mine, resume=total == 4, progress=False)
        events = [event for event in result.run.read_events() if event["event"] == "memory"]
        assert [event["offload"] for event in events] == [1.0 if free == 2**20 else 0.0 for free in frees]
        assert [event["gradient_checkpointing"] for event in events] == [free == 2**20 for free in frees]
        assert 'offload = "auto"' in (result.run.path / "config.toml").read_text(encoding="utf-8")
        files.append(result.files)
    assert as_if_on_a_gpu
    for ours, tight, moved in zip(plain.files, *files, strict=True):
        tensors = [load_file(file) for file in (ours, tight, moved)]
        for other in tensors[1:]:
            assert other.keys() == tensors[0].keys()
            assert all(torch.equal(other[key], tensors[0][key]) for key in other)


@pytest.mark.parametrize("name", ["sd15", "wan"])
def test_previews_in_tiles_are_those_of_diffusers(
    name: str, tiny: Callable[[str], Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority is the pipeline's own VAE after `enable_tiling`, called with float32 latents."""
    monkeypatch.setattr(_latents, "TILE", 32)
    family = planning.make(job_of(name, tiny(name), pictures, tmp_path)).family
    family.load_vae()
    if name == "wan":  # its own tiles are larger than these images
        tiles = {f"tile_sample_{kind}_{side}": size
                 for kind, size in (("min", 32), ("stride", 16)) for side in ("height", "width")}  # fmt: skip
        for key, value in tiles.items():
            setattr(family.vae, key, value)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(1, 3, 96, 96, generator=generator) * 2 - 1
    latents = family.encode_images(pixels)
    own = _latents.as_clip(latents) if name == "wan" else latents
    plain = family.decode_latents(latents)

    theirs = family.vae
    scaled = family.denormalise(own)
    if name == "sd15":
        theirs.tile_sample_min_size, theirs.tile_latent_min_size = 32, 32 // (96 // latents.shape[-1])
    theirs.enable_tiling()
    wanted = theirs.decode(scaled, return_dict=False)[0]
    encoded_in_tiles = family.encode_images(pixels)
    theirs.disable_tiling()

    pipeline = family.make_pipeline(tiled=True)
    drawn = pipeline.vae.decode(scaled.to(torch.bfloat16).to(torch.float32), return_dict=False)[0]
    exact = family.decode_latents(latents, tiled=True)
    assert torch.equal(_latents.as_clip(exact), _latents.as_clip(wanted)) and not torch.equal(exact, plain)
    assert not torch.equal(drawn, wanted), "the pipeline's latents are rounded"
    assert torch.equal(pipeline.vae.decode(scaled, return_dict=False)[0], wanted)
    assert torch.equal(family.encode_images(pixels), latents) and not torch.equal(latents, encoded_in_tiles)
    assert torch.equal(family.make_pipeline().vae.decode(scaled, return_dict=False)[0], plain.view_as(wanted))


def test_the_estimate_is_of_what_would_be_chosen(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    plan = planning.make(job_of("flux", tiny("flux"), pictures, tmp_path, "preview.prompts=['a']"))
    rich, poor = (estimate.estimate(plan, "cuda", free) for free in (MANY, 2**20))
    assert (rich.waiting_bytes, rich.peaks["train"]) == (0, choose_memory(plan, MANY).peak)
    assert poor.waiting_bytes > 0 and any(line.startswith("memory:") for line in poor.notes)
    named = dataclasses.replace(plan, job=config.loads(config.dumps(plan.job), ["memory.gradient_checkpointing=false"]))
    assert estimate.estimate(named, "cuda").step_bytes == rich.step_bytes
