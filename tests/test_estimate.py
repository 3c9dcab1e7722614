"""`lora-fp8 estimate`: what it reckons on no device is what a real step, a real optimizer and real files take."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from editing import encode, load_encoders

from lora_fp8 import adapters, config, demo, families, precision, train
from lora_fp8.families.base import ModelFamily
from lora_fp8.plan import dry_run, estimate
from lora_fp8.plan import plan as planning
from lora_fp8.precision import dtypes
from lora_fp8.run import Run
from lora_fp8.settings import OPTIMIZERS, Job, Optimizer
from lora_fp8.stages import load, step
from lora_fp8.training import optim

FAMILIES = families.list_families()
ROUTED = {"hidream"}  # its experts are chosen by the activations
LONG = "a very long sentence about a cat that sits in front of a house and looks at a dog, " * 12


def job_of(family: str, base: Path, pictures: Path, tmp_path: Path, *more: str) -> Job:
    text = f"""
[model]
family = "{family}"
path = {json.dumps(str(base))}
[dataset]
cache_dir = {json.dumps(str(tmp_path / "cache"))}
[[dataset.folders]]
path = {json.dumps(str(pictures))}
"""
    return config.loads(text, list(more))


def family_of(job: Job) -> ModelFamily:
    return families.get(job.model.family)(job.model, device="cpu", dtype=dtypes.DTYPES[job.model.dtype])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_reckoned(
    name: str, tiny: Callable[[str], Path], pictures: Path, controls: Path, small_controls: None, tmp_path: Path
) -> None:
    """The longest conditioning has the shapes that the text encoders give; the step and the VAE are counted."""
    editing = [f"dataset.folders.0.control='{controls}'"] if families.get(name).controls[0] else []
    settings = ["train.batch_size=2", "dataset.resolution=64", "memory.gradient_checkpointing=false", *editing]
    job = job_of(name, tiny(name), pictures, tmp_path, *settings)
    family = family_of(job)
    found = estimate.estimate(planning.make(job))
    assert (found.step_bytes is None) == (name in ROUTED) == bool(found.notes), found.notes
    assert found.vae_encode_bytes and found.base_bytes and found.text_bytes and found.vae_bytes
    expected = family.estimate_longest_cond(dict(family.make_empty_denoiser().config))
    load_encoders(family)
    texts = [LONG if not family.find_overlong([LONG]) else LONG[: len(LONG) // 2], "a cat"]
    for cond in encode(family, texts[:1]) + encode(family, texts[1:]):
        assert cond.keys() == expected.keys()
        for key, tensor in cond.items():
            assert tensor.ndim == len(expected[key])
            assert all(own <= most for own, most in zip(tensor.shape, expected[key], strict=True)), (key, tensor.shape)
            different = [i for i, size in enumerate(tensor.shape) if size != expected[key][i]]
            assert len(different) <= 1, f"{key}: only the number of tokens may differ, {tensor.shape}, {expected[key]}"


def peak_of(step: Callable[[], None]) -> int:
    """The most bytes that torch's allocator gave out at one time, by its profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["sd15", "flux", "lumina2"])
def test_a_step_takes_what_was_reckoned(
    name: str,
    checkpointing: bool,
    tiny: Callable[[str], Path],
    pictures: Path,
    tmp_path: Path,
) -> None:
    """Against the allocator, on the CPU; attention there keeps no other tensors than a GPU's at these sizes.

    Convolutions in float32: in bf16 `precision.cpu` would keep copies, which no GPU has.
    """
    dtype = torch.float32 if name == "sd15" else torch.bfloat16
    side = 128 if name == "sd15" else 256  # its convolutions take a minute at 256
    settings = ["train.batch_size=2", f"dataset.resolution={side}", "dataset.buckets=false", "adapter.rank=4"]
    settings += [f"memory.gradient_checkpointing={str(checkpointing).lower()}"]
    settings += ["model.dtype=fp32"] if name == "sd15" else []
    job = job_of(name, tiny(name), pictures, tmp_path, *settings)
    family = family_of(job)
    found = estimate.estimate(planning.make(job))

    denoiser, _, _ = load.load_base(family, job.quantize)
    names = family.choose_adapter_layers(denoiser)
    adapters.inject(denoiser, job.adapter, names, seed=0)
    if checkpointing:
        denoiser.enable_gradient_checkpointing()
    denoiser.train()
    held = sum(tensor.nbytes for tensor in (*denoiser.parameters(), *denoiser.buffers()))
    assert found.base_bytes + found.adapter_bytes == held
    family.load_vae()
    latents = family.encode_images(torch.zeros(2, 3, side, side))
    family.free_encoders()
    shapes = family.estimate_longest_cond(dict(denoiser.config))
    facts = family.make_image_conditioning((side, side), (0, 0), (side, side))
    one = {key: torch.zeros(shape, dtype=dtype) for key, shape in shapes.items()} | facts
    objective = family.make_objective(job.objective)

    class Batch:  # what `compute_loss` reads of one
        mask_BHW = None
        latents_BCHW, noise_BCHW, cond = latents, torch.randn_like(latents), family.collate([one, one])
        t_generators = [torch.Generator().manual_seed(i) for i in range(2)]
        to = staticmethod(lambda device: Batch)

    def one_step() -> None:
        step.compute_loss(family, denoiser, objective, Batch, 1.0).sum().backward()

    one_step()
    for _, parameter in adapters.list_trained_parameters(denoiser):
        parameter.grad = None
    assert found.step_bytes == pytest.approx(peak_of(one_step), rel=0.15)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rounding", ["master", "nearest"])
@pytest.mark.parametrize("sizes", [((16, 64), (64, 64), (320, 100)), ((16, 64), (8, 8))], ids=["large", "small"])
def test_the_optimizer_takes_what_was_reckoned(sizes: tuple[tuple[int, int], ...], name: str, rounding: str) -> None:
    """To the byte: moments, masters, and the code books that 8-bit moments share (small tensors have none)."""
    named = [(str(size), torch.nn.Parameter(torch.randn(size).bfloat16())) for size in sizes]
    section = Optimizer(name=name, rounding=rounding)
    expected = optim.estimate_state_bytes([parameter for _, parameter in named], section)
    made = optim.build(named, section, base_storage="fp8", seed=0)
    made.step(made.layout.join({key: torch.randn_like(parameter.float()) for key, parameter in named}), 1e-3, 0)
    assert made.count_bytes() == expected


def test_a_run_takes_what_was_reckoned(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    """Steps of an epoch, the cache's bytes, the encoders' and the file's, against a training."""
    more = ["train.steps=3", "train.batch_size=2", "dataset.resolution=64", "export.verify=false", "dataset.flip=true"]
    more += ["validation.pictures=1", "validation.every=3"]
    job = job_of("sdxl", tiny("sdxl"), pictures, tmp_path, *more, f'output_dir="{tmp_path}"', 'name="x"')
    family = family_of(job)
    found = estimate.estimate(planning.make(job))
    load_encoders(family)
    parts = [family.vae, family.text_pipeline.text_encoder, family.text_pipeline.text_encoder_2]
    vae, *texts = (sum(parameter.nbytes for parameter in part.parameters()) for part in parts)
    assert (found.vae_bytes, found.text_bytes) == pytest.approx((vae, max(texts)), rel=0.02)
    assert found.device == "cpu" and any("Python and its libraries" in line for line in found.format_lines())
    assert found.to_json()["device"] == "cpu" and not any("CUDA" in line for line in found.format_lines())
    on_gpu = estimate.estimate(planning.make(job), "cuda")
    assert any("CUDA" in line for line in on_gpu.format_lines()) and on_gpu.process_bytes == 0
    assert found.peak_bytes - on_gpu.peak_bytes == found.process_bytes > 0, "a GPU's memory has no Python in it"
    result = train.run(job, progress=False)
    (data,) = (event for event in result.run.read_events() if event["event"] == "data")
    assert found.steps_per_epoch == data["steps_per_epoch"] and found.pictures == data["images"]
    assert found.held_out == data["held_out"] == 1 and "1 held out" in found.format_lines()[0]
    cached = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.safetensors"))
    entries = sum(1 for _ in (tmp_path / "cache").rglob("*.safetensors"))
    assert found.cache_bytes == pytest.approx(cached - 300 * entries, rel=0.2)  # about 300 bytes of header each
    assert sum(found.file_bytes.values()) < sum(path.stat().st_size for path in result.files)
    tensors = sum(path.stat().st_size for path in result.files)
    assert sum(found.file_bytes.values()) == pytest.approx(tensors, rel=0.35)  # the miniature's names weigh a lot
    again = estimate.estimate(planning.make(job))
    assert again.cache_bytes == 0


def test_on_a_cpu_the_estimate_is_the_peak_that_a_run_reports(tmp_path: Path) -> None:
    """To 20 %, of a process of its own: what the page says before the start and the chart of the run after it."""
    (tmp_path / "pictures").mkdir()
    for path in (Path(demo.__file__).parent / "dataset").glob("zibo_0[12].*"):
        shutil.copy(path, tmp_path / "pictures")
    text = f"""
name = "x"
output_dir = {json.dumps(str(tmp_path))}
[model]
family = "sd15"
path = "demo"
[dataset]
resolution = 128
cache_dir = {json.dumps(str(tmp_path / "cache"))}
[[dataset.folders]]
path = {json.dumps(str(tmp_path / "pictures"))}
[train]
steps = 1
[export]
verify = false
"""
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "lora_fp8", *arguments]
        done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
        assert "leaked" not in done.stderr, done.stderr[-3000:]
        return done.stdout

    found = json.loads(ask("estimate", str(tmp_path / "job.toml"), "--json"))
    ask("train", str(tmp_path / "job.toml"))
    (step,) = (event for event in Run(tmp_path / "x").read_events() if event["event"] == "step")
    assert found["peak_bytes"] / 2**30 == pytest.approx(step["vram_gb"], rel=0.2)


def test_an_unknown_peak_of_previews_is_not_0(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    job = job_of("sd15", tiny("sd15"), pictures, tmp_path, "dataset.resolution=64", "preview.prompts=['a cat']")
    found = estimate.estimate(planning.make(job))
    assert (found.peaks["preview"] or 0) > found.held_bytes
    found.vae_decode_bytes = None
    assert found.peaks["preview"] is None and "0.00 GiB" not in next(x for x in found.format_lines() if "previews" in x)
    found.vae_decode_bytes = 0  # there are none
    assert found.peaks["preview"] == 0


def test_offloaded_weights_are_not_on_the_device(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    found = []
    for share in (0, 0.5, 1):
        job = job_of("flux", tiny("flux"), pictures, tmp_path, "dataset.resolution=64", f"memory.offload={share}")
        found.append(estimate.estimate(planning.make(job)))
    kept, half, none = found
    denoiser, plan, _ = load.load_base(family_of(job), job.quantize)
    sizes = [layer.qweight.nbytes for layer in precision.find_frozen_layers(denoiser).values()]
    assert (kept.waiting_bytes, none.waiting_bytes) == (0, sum(sizes))
    assert half.waiting_bytes == pytest.approx(sum(sizes) / 2, abs=max(sizes))
    assert none.base_bytes == kept.base_bytes - sum(sizes) + precision.stream.BUFFERS * max(sizes)
    assert "offloaded to RAM" in " ".join(none.format_lines()) and none.step_bytes == kept.step_bytes

    # Compiled blocks fetch all of theirs together, into one of two places.
    compiled = estimate.estimate(
        planning.make(job.model_copy(update={"memory": job.memory.model_copy(update={"compile": "blocks"})}))
    )
    rooms = [
        sum(-(-layer.qweight.nbytes // 512) * 512 for layer in precision.find_frozen_layers(block).values())
        for block in precision.find_blocks(denoiser).values()
    ]
    assert compiled.waiting_bytes == sum(sizes) and compiled.base_bytes == none.base_bytes + 2 * max(rooms)


def test_text_encoders_that_are_trained_stay(tiny: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    """With adapter.text_encoder both CLIPs of SDXL are beside the denoiser in every step."""
    jobs = [job_of("sdxl", tiny("sdxl"), pictures, tmp_path, "dataset.resolution=64", *more)
            for more in ((), ("adapter.text_encoder=true",))]  # fmt: skip
    without, trained = (estimate.estimate(planning.make(job)) for job in jobs)
    family = family_of(jobs[0])
    load_encoders(family)
    held = sum(p.nbytes for name in ("text_encoder", "text_encoder_2") for p in
               getattr(family.text_pipeline, name).parameters())  # fmt: skip
    assert trained.base_bytes - without.base_bytes == pytest.approx(held, rel=0.02)


def test_a_mask_of_each_pair_of_positions_is_counted_and_not_made() -> None:
    """As HunyuanVideo's VAE makes it: for a clip at full resolution it would fill the memory of the machine."""
    length = 2**14
    with dry_run.on_meta(), dry_run.Tally() as tally:
        earlier, later = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
        mask = torch.where(earlier <= later, 0.0, float("-inf"))
    assert mask.is_meta and mask.shape == (length, length)
    assert tally.most == pytest.approx(length**2 * (1 + 4), rel=0.01), "a bool and a float for each pair"


@pytest.mark.parametrize("name", ["sd15", "flux", "wan", "kolors", "sana"])
def test_a_remembered_result_is_what_torch_returns(
    name: str, tiny: Callable[[str], Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation of an estimate is run again by torch: shapes, strides and dtypes are the same."""
    run, make, remembered = dry_run._run_operation, dry_run._Result.make, 0

    def describe(out: Any) -> Any:
        if isinstance(out, tuple | list):
            return [type(out), *map(describe, out)]
        if not isinstance(out, torch.Tensor):
            return out
        storage = out.untyped_storage().nbytes()
        return out.shape, out.stride(), out.dtype, out.device, out.storage_offset(), storage, out.requires_grad

    def count(self: Any) -> Any:
        nonlocal remembered
        remembered += 1
        return make(self)

    def compare(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = run(func, args, kwargs)
        if not any(value.alias_info for value in func._schema.arguments):  # otherwise it would be changed twice
            with monkeypatch.context() as patch:
                patch.setattr(dry_run, "_make_key", lambda *_: None)
                assert describe(run(func, args, kwargs)) == describe(out), func
        return out

    monkeypatch.setattr(dry_run, "_results", {})
    monkeypatch.setattr(dry_run._Result, "make", count)
    monkeypatch.setattr(dry_run, "_run_operation", compare)
    job = job_of(name, tiny(name), pictures, tmp_path, "train.batch_size=2", "dataset.resolution=64")
    assert estimate.estimate(planning.make(job)).step_bytes
    assert remembered > 200
