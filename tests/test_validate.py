"""Held-out loss: what it measures, on which pictures, and that measuring changes nothing."""

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline

from lora_fp8 import settings
from lora_fp8.errors import Stopped, UserError
from lora_fp8.run import Run
from lora_fp8.stages import validate
from lora_fp8.train import run

HELD = ("validation.pictures=2", "validation.every=2")


def told(of: Run) -> dict[int, dict]:
    """step -> validation event, without its time."""
    return {e["step"]: {k: v for k, v in e.items() if k != "t"} for e in of.read_events() if e["event"] == "validation"}


def trained(of: Run) -> bytes:
    return max(of.checkpoints.glob("step-*")).joinpath("adapter.safetensors").read_bytes()


def test_the_loss_is_that_of_the_published_base_before_training(job, monkeypatch):
    seen = []
    real = validate.measure
    monkeypatch.setattr(
        validate, "measure", lambda session, data, *rest: seen.append(data) or real(session, data, *rest)
    )
    mine = job(*HELD, "train.steps=2", "quantize.storage=none", "model.dtype=fp32", "objective.min_snr_gamma=0.0")
    event = told(run(mine, progress=False).run)[0]
    held_out = seen[0].held_out
    pipeline = StableDiffusionPipeline.from_pretrained(mine.model.path, torch_dtype=torch.float32)
    scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    bands = {}
    for step in (100, 300, 500, 699, 899):
        losses = []
        for picture in range(2):
            batch = held_out.take_batch(0, picture)
            embeds, _ = pipeline.encode_prompt(batch.captions, "cpu", 1, False)
            noisy = scheduler.add_noise(batch.latents_BCHW, batch.noise_BCHW, torch.tensor([step]))
            with torch.no_grad():
                answer = pipeline.unet(noisy, torch.tensor([step]), encoder_hidden_states=embeds).sample
            losses.append(torch.nn.functional.mse_loss(answer, batch.noise_BCHW).item())
        bands[f"t = {step} of 1000"] = pytest.approx(sum(losses) / 2, rel=1e-4)
    assert event["bands"] == bands and event["pictures"] == 2
    assert event["loss"] == pytest.approx(sum(event["bands"].values()) / 5)


def test_what_is_kept_out_is_not_trained_on(job, monkeypatch):
    from lora_fp8.data.loader import Loader

    shown: dict[int, set[str]] = {}
    real = Loader.take_batch

    def watched(self, *args, **kwargs):
        batch = real(self, *args, **kwargs)
        if batch is not None:
            shown.setdefault(id(self), set()).update(uid.partition("#")[0] for uid in batch.uids)
        return batch

    monkeypatch.setattr(Loader, "take_batch", watched)
    # Named twice, at two sizes: what is held out of the one must not be trained on in the other.
    path = job().dataset.folders[0].path
    twice = f"dataset.folders=[{{path='{path}', repeats=2}}, {{path='{path}', resolution=32}}]"
    result = run(job(*HELD, "train.steps=8", "train.batch_size=3", twice), progress=False)
    events = {e["event"]: e for e in result.run.read_events()}
    data = events["data"]
    parts = sorted(shown.values(), key=len)
    assert [len(part) for part in parts] == [data["held_out"], data["images"]] == [2, len(parts[1])]
    files = [{uid.partition("/")[2] for uid in part} for part in parts]
    assert not files[0] & files[1] and len(parts[1]) == 2 * len(files[1])
    assert events["validation"]["pictures"] == 2  # each once, however often it would be shown
    assert events["export"] and str(data["samples_per_epoch"]) == _metadata(result.files[0])["ss_num_train_images"]


def _metadata(path):
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()


def test_measuring_changes_nothing_and_resuming_measures_the_same(job, monkeypatch):
    # Dropout draws from torch's own generator, and the delayed recipe remembers what it saw: both must not notice.
    base = (
        "validation.pictures=2",
        "train.steps=3",
        "checkpoint.every=2",
        "adapter.dropout=0.3",
        "export.verify=false",
    )
    base += ("quantize.compute=fp8", "quantize.fp8_min_features=0", "quantize.recipe=delayed", "optimizer.lr=1e-2")
    real = validate.measure

    def watched(session, data, loaded, *rest):
        found = real(session, data, loaded, *rest)
        newest = [layer.amax_newest for layer in loaded.denoiser.modules() if hasattr(layer, "amax_newest")]
        assert newest and not any(seen.any() for seen in newest)
        return found

    monkeypatch.setattr(validate, "measure", watched)
    often = run(job(*base, "validation.every=1", "name='often'"), progress=False).run
    rarely = run(job(*base, "validation.every=3", "name='rarely'"), progress=False).run
    assert sorted(told(often)) == list(range(4)) and sorted(told(rarely)) == [0, 3]
    assert trained(often) == trained(rarely)
    assert told(often)[3] == told(rarely)[3] != told(rarely)[0] | {"step": 3}
    other = run(job(*base, "validation.every=3", "name='other'", "objective.loss=huber"), progress=False).run
    # Trained otherwise, and measured alike: before the first step there is no difference.
    assert told(other)[0] == told(rarely)[0] and told(other)[3] != told(rarely)[3]

    halting = job(*base, "validation.every=1", "name='halting'")

    def stop(event):
        if event["event"] == "step" and event["step"] == 1:
            Run(often.path.parent / "halting").request("stop")

    with pytest.raises(Stopped):
        run(halting, progress=False, echo=stop)
    again = run(halting, progress=False, resume=True).run
    assert told(again) == told(often) and trained(again) == trained(often)


def test_mistakes_are_told(job):
    with pytest.raises(UserError, match="would be left to train on"):
        run(job("validation.pictures=99", "validation.every=1"), progress=False)
    for given, where in (("every=5", "validation.pictures"), ("pictures=1", "validation.every")):
        with pytest.raises(UserError, match=where):
            job(f"validation.{given}")
    assert settings.Validation().every == 0
    others = job("dataset.folders.0.regularization=true", "validation.pictures=1", "validation.every=1")
    with pytest.raises(UserError, match="of 0 images"):  # none of a folder for regularization
        run(others, progress=False)
