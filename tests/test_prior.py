"""What the base predicts as a target: the judge is a second, plain model of the same base, in float64."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lora_fp8 import adapters, settings, train
from lora_fp8.data.caption_text import with_class_word
from lora_fp8.data.loader import Batch
from lora_fp8.distributed import processes
from lora_fp8.errors import Stopped, UserErrors
from lora_fp8.lora_files import safetensors_file
from lora_fp8.objectives import Diffusion
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Job
from lora_fp8.stages import cache, load
from lora_fp8.stages.prior import make_class_pass, with_prior_targets
from lora_fp8.stages.session import Session, UnwrittenRun
from lora_fp8.stages.step import add_noise, backward_

EXACT = (
    "model.dtype=fp32",
    "adapter.dtype=fp32",
    "quantize.storage=none",
    "optimizer.name=adamw",
    "train.batch_size=2",
)
SHORT = ("train.steps=3", "preview.prompts=[]", "export.verify=false")
REG = ("dataset.folders.0.regularization=true", "objective.prior_for_regularization=true")
MASKS = ("dataset.folders.0.mask=alpha", "objective.prior_outside_masks=0.7")
"""With the folder of `cut_out`."""
CLASS = ("dataset.trigger=zobi", "dataset.class_word=dog", "objective.prior_for_class=0.6")


@pytest.mark.parametrize(
    ("caption", "wanted"),
    [
        ("sks dog on grass", "dog on grass"),
        ("sks, dog, grass", "dog, grass"),
        ("sks on grass", "dog on grass"),
        ("a photo of sks", "a photo of dog"),
        ("sks dogs", "dog dogs"),
        ("sksy dog", "sksy dog"),
        ("grass", "grass"),
        ("", ""),
        ("old sks, a tree", "dog, a tree"),
        ("一只sks在草地上", "一只dog在草地上"),
    ],
)
def test_the_class_word_takes_the_triggers_place(caption: str, wanted: str) -> None:
    assert with_class_word(caption, ["sks", "old sks"], "dog") == wanted
    assert with_class_word(caption, ["sks", "old sks"], "") == caption


@pytest.fixture
def cut_out(pictures: Path, tmp_path: Path) -> str:
    """The setting that names a folder of the pictures whose background is transparent."""
    folder = tmp_path / "cut_out"
    folder.mkdir()
    for file in sorted(pictures.iterdir()):
        if file.suffix == ".txt":
            shutil.copy(file, folder)
            continue
        with Image.open(file) as image:
            width, height = image.size
            alpha = Image.new("L", image.size, 0)
            alpha.paste(255, (width // 4, height // 4, width // 2, height // 2))
            image = image.convert("RGB")
            image.putalpha(alpha)
            image.save(folder / f"{file.stem}.png")
    return f"dataset.folders=[{{path='{folder}'}}]"


def prepare(job: Job, number: int = 0) -> tuple[Session, load.Loaded, Batch, Batch]:
    """The session and model of a job, all in float64, with adapters that change the predictions; and a batch, twice."""
    session = Session(planning.make(job), UnwrittenRun(None), processes.Processes())
    data = cache.cache(session)
    one, same = (data.loader.take_batch(0, number) for _ in range(2))  # before the cache is asked in another dtype
    assert one is not None and same is not None
    loaded = load.load(session)
    draw = torch.Generator().manual_seed(11)
    session.family.dtype = torch.float64
    loaded.denoiser.double()
    for name, parameter in adapters.list_trained_parameters(loaded.denoiser):
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return session, loaded, one, same


def gradients_of(session: Session, loaded: load.Loaded, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradients of `backward_`, parameter by parameter, before they are rounded into the flat vector."""
    named = adapters.list_trained_parameters(loaded.denoiser)
    monkeypatch.setattr(loaded.exchange, "gradients", type("Kept", (), {"collect_": lambda self: None})())
    for _, parameter in named:
        parameter.grad = None
    backward_(session, loaded, batch, None)
    return [parameter.grad.clone() for _, parameter in named if parameter.grad is not None]


def second_model(session: Session) -> nn.Module:
    """The base once more, without adapters."""
    plain, *_ = load.load_base(session.family, session.job.quantize)
    return plain.double()


@pytest.mark.parametrize("family", ["sd15", "flux"])
@pytest.mark.parametrize("use", ["regularization", "masks", "class"])
def test_gradients_are_those_of_two_models(
    use: str, family: str, job: Callable[..., Job], cut_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"regularization": REG, "masks": (cut_out, *MASKS), "class": CLASS}[use]
    session, loaded, one, batch = prepare(job(*EXACT, *given, family=family))
    section, objective, made = session.job.objective, loaded.objective, session.family
    ours = gradients_of(session, loaded, one, monkeypatch)

    plain = second_model(session)
    t_B = objective.sample_t(batch.t_generators, made.count_image_tokens(batch.latent_hw))
    noisy = objective.add_noise(batch.latents_BCHW, batch.noise_BCHW, t_B).double()
    target = objective.compute_target(batch.latents_BCHW, batch.noise_BCHW, t_B)

    def predict(model: nn.Module, cond: dict[str, Tensor]) -> Tensor:
        return made.predict_prepared(model, made.prepare(model, noisy, t_B, cond, section.guidance), noisy)

    def error(prediction: Tensor, wanted: Tensor, area: Tensor | float = 1.0) -> Tensor:
        return ((prediction.float() - wanted.float()).square() * area).flatten(1).mean(1)

    with torch.no_grad():
        base = predict(plain, batch.cond)
    if use == "regularization":
        losses = error(predict(loaded.denoiser, batch.cond), base)
        assert batch.regularization == [True, True]
    elif use == "masks":
        mask = batch.mask_BHW[:, None]
        assert 0 < mask.mean() < 1
        prediction = predict(loaded.denoiser, batch.cond)
        losses = error(prediction, target, mask + 0.1 * (1 - mask)) + 0.7 * error(prediction, base, 1 - mask)
    else:
        assert all(caption.startswith("zobi") for caption in batch.captions)
        assert not any("zobi" in caption for caption in batch.class_captions)
        with torch.no_grad():
            base = predict(plain, batch.class_cond)
        losses = error(predict(loaded.denoiser, batch.cond), target)
        losses = losses + 0.6 * error(predict(loaded.denoiser, batch.class_cond), base)
    named = adapters.list_trained_parameters(loaded.denoiser)
    wanted = torch.autograd.grad((losses * torch.tensor(batch.weights)).sum(), [parameter for _, parameter in named])
    assert len(ours) == len(wanted)
    for own, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-9)


def test_a_base_that_is_its_own_target_is_not_moved(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first update the adapters change nothing, so regularization images give no gradient."""
    session, loaded, batch, _ = prepare(job(*EXACT, *REG))
    for name, parameter in adapters.list_trained_parameters(loaded.denoiser):
        if "lora_B" in name:
            parameter.data.zero_()
    gradients = gradients_of(session, loaded, batch, monkeypatch)
    assert all(not gradient.any() for gradient in gradients)


def test_only_the_regularization_images_of_a_batch_get_the_bases_target(
    job: Callable[..., Job], pictures: Path
) -> None:
    folders = f"dataset.folders=[{{path='{pictures}'}}, {{path='{pictures}', regularization=true}}]"
    session, loaded, mixed, _ = prepare(job(*EXACT, folders, REG[1], "train.batch_size=4"))
    assert set(mixed.regularization) == {True, False}
    noised = add_noise(session.family, loaded.denoiser, loaded.objective, mixed, 1.0)
    taught = with_prior_targets(session.family, loaded, session.job.objective, mixed, noised)
    same = (taught.target_BCHW == noised.target_BCHW).flatten(1).all(1).tolist()
    assert same == [not chosen for chosen in mixed.regularization]
    assert all(not layer.disable_adapters for layer in adapters.injection.find_adapted_layers(loaded.denoiser).values())


def test_samples_without_a_trigger_have_no_second_pass(job: Callable[..., Job]) -> None:
    """A dropped caption says nothing of the class: to keep the base there would hold back what is trained."""
    _, _, batch, _ = prepare(job(*EXACT, *CLASS, "dataset.caption_dropout=1.0"))
    assert batch.captions == ["", ""] and batch.class_cond is None


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_stopped_and_resumed_it_gives_the_same_bytes(family: str, job: Callable[..., Job], cut_out: str) -> None:
    """All at once, with trained text encoders where the family has them, and quantized layers."""
    given = (cut_out, *CLASS, *MASKS, "train.steps=4", "preview.prompts=[]", "export.verify=true", "checkpoint.every=2")
    given += ("adapter.text_encoder=true",) if family == "sd15" else ()
    whole = train.run(job(*given, "name=whole", family=family), progress=False)
    mine = job(*given, "name=parted", family=family)
    control = Path(mine.output_dir) / "parted" / "control"

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1:
            (control / "stop").touch()

    with pytest.raises(Stopped):
        train.run(mine, echo=stop, progress=False)
    parted = train.run(mine, resume=True, progress=False)
    assert all(report.ok for report in (*whole.reports, *parted.reports)) and whole.reports
    for one, other in zip(whole.files, parted.files, strict=True):
        assert safetensors_file.hash_payload(one) == safetensors_file.hash_payload(other)


def test_the_class_word_needs_a_trigger_of_its_own(job: Callable[..., Job]) -> None:
    with pytest.raises(
        UserErrors, match=r"dataset\.class_word: .* no image folder has a trigger word .*; set dataset\.trigger"
    ):
        job("dataset.class_word=dog")
    with pytest.raises(UserErrors, match=r"dataset\.class_word: 'zobi' is the trigger word itself"):
        job("dataset.class_word=zobi", "dataset.trigger=zobi")


def test_the_area_of_a_mask_can_be_divided_by() -> None:
    config_ = {"num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    plain, divided = (
        Diffusion(config_, settings.Objective(unmasked_weight=0.2, normalize_mask=on)) for on in (False, True)
    )
    prediction, target = torch.randn(2, 2, 4, 8, 8)
    mask = torch.zeros(2, 8, 8)
    mask[0, :4], mask[1, :1, :2] = 1, 1
    t = torch.tensor([10, 500])
    area = (0.2 + 0.8 * mask).mean(dim=(1, 2))
    torch.testing.assert_close(
        divided.compute_loss(prediction, target, t, mask), plain.compute_loss(prediction, target, t, mask) / area
    )
    empty = divided.compute_loss(prediction, target, t, torch.zeros(2, 8, 8), unmasked_weight=0.0)
    assert not empty.any()


def test_in_the_second_pass_a_sample_without_a_trigger_weighs_nothing(job: Callable[..., Job], pictures: Path) -> None:
    folders = f"dataset.folders=[{{path='{pictures}'}}, {{path='{pictures}', regularization=true}}]"
    session, loaded, batch, _ = prepare(job(*EXACT, folders, *CLASS, "train.batch_size=4"))
    assert set(batch.regularization) == {True, False}
    noised = add_noise(session.family, loaded.denoiser, loaded.objective, batch, 1.0)
    again = make_class_pass(session.family, loaded, session.job.objective, batch, noised)
    assert again is not None
    assert again[1].tolist() == pytest.approx([0.0 if chosen else 0.6 for chosen in batch.regularization])
