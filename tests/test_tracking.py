"""Experiment trackers: what they get is what the run's log has, once, also after a resume; and none ends a training.

TensorBoard is judged by its own reader. Weights & Biases, trackio, SwanLab and MLflow are stand-ins that keep what they
are called with: these programs send data to servers, or need other versions of packages than the rest.
"""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_fp8 import config
from lora_fp8.config import loads
from lora_fp8.errors import UserError
from lora_fp8.plan import trackers
from lora_fp8.run import Run, ownership
from lora_fp8.settings import Job, Tracking
from lora_fp8.train import run

ON = ("tracking.to=['tensorboard']", "validation.pictures=1", "validation.every=3", "preview.prompts=['a cat']")
SHORT = ("train.steps=6", "checkpoint.every=2", "preview.steps=1", "preview.every=2", "train.log_every=1")


class Broken(RuntimeError):
    """What ends a training in these tests."""


def stop_at(step: int) -> Callable[[dict[str, Any]], None]:
    def echo(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == step:
            raise Broken("the power failed")

    return echo


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's event files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    reader.Reload()
    figures = {tag: [(entry.step, entry.value) for entry in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    for tag in reader.Tags()["images"]:
        figures[tag] = [(entry.step, entry.encoded_image_string) for entry in reader.Images(tag)]
    return figures


def logged(of: Run, kind: str, field: str) -> list[tuple[int, float]]:
    """(step, value) of the run's own log, what was done again at its last value."""
    values = {event["step"]: event[field] for event in of.read_events() if event["event"] == kind and field in event}
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in sorted(values.items())]


def test_tensorboard_has_the_log_once_after_a_failure_and_a_resume(job: Callable[..., Job]) -> None:
    mine = job(*ON, *SHORT)
    with pytest.raises(Broken):
        run(mine, progress=False, echo=stop_at(5))
    result = run(mine, progress=False, resume=True)
    steps = [event["step"] for event in result.run.read_events() if event["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 5, 6], "step 5 came after the checkpoint, and was done again"
    figures = read_scalars(result.run.path / "tensorboard")
    assert [step for step, _ in figures["train/loss"]] == [1, 2, 3, 4, 5, 6]
    for field, name in (("loss", "loss"), ("lr", "lr"), ("grad_norm", "grad_norm"), ("step_s", "step_seconds")):
        assert figures[f"train/{name}"] == logged(result.run, "step", field), field
    assert figures["train/peak_memory_gib"] == logged(result.run, "step", "vram_gb")
    assert figures["validation/loss"] == logged(result.run, "validation", "loss")
    assert [step for step, _ in figures["validation/t 500 of 1000"]] == [0, 3, 6]
    assert [step for step, _ in figures["previews/1"]] == [0, 2, 4, 6]
    import io

    for step, data in figures["previews/1"]:
        with Image.open(io.BytesIO(data)) as sent, Image.open(result.run.samples / f"step-{step:06d}-0.png") as drawn:
            assert np.array_equal(np.asarray(sent.convert("RGB")), np.asarray(drawn.convert("RGB")))
    assert not [
        event for event in result.run.read_events() if event["event"] == "warning" and "tracking" in event["text"]
    ]
    assert ownership.remove(result.run.path) == [], "its files belong to the run"


def test_a_tracked_training_gives_the_same_bytes(job: Callable[..., Job]) -> None:
    plain = run(job(*ON[1:], *SHORT), progress=False)
    tracked = run(job(*ON, *SHORT, "name=tracked"), progress=False)
    states = [
        max(of.run.checkpoints.glob("step-*")).joinpath("adapter.safetensors").read_bytes() for of in (plain, tracked)
    ]
    assert states[0] == states[1]
    assert not (plain.run.path / "tensorboard").exists() and not (plain.run.path / "tracking.json").exists()


class Service:
    """A stand-in for the module of a tracker: keeps its calls, and fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = ""
        self.config: dict[str, Any] = {}

    def call(self, what: str, values: Any) -> None:
        self.calls.append((what, values))
        if what == self.fails:
            raise RuntimeError("no connection to the server\nsecond line")

    def list(self, what: str) -> list[Any]:
        return [values for name, values in self.calls if name == what]


@pytest.fixture(params=["wandb", "trackio", "swanlab"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The module of a tracker, with the names that accelerate uses of it."""
    made = Service()
    module = types.ModuleType(request.param)

    class Config(dict):  # type: ignore[type-arg]
        def update(self, values: dict[str, Any], **_: Any) -> None:
            made.call("config", values)

    def init(**given: Any) -> Any:
        made.call("init", given)
        name = given.get("name", "")
        return types.SimpleNamespace(
            name=name if given["resume"] == "allow" else f"{name}-2",  # trackio chooses a free name for a new run
            log=lambda values, step=None, **_: made.call("log", (step, values)),
            finish=lambda: made.call("finish", None),
        )

    module.init, module.config, module.Image = init, Config(), lambda image: image  # type: ignore[attr-defined]
    module.finish = lambda: made.call("finish", None)  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace(name=request.param)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, request.param, module)
    for variable in ("WANDB_DIR", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(variable, raising=False)
    made.name = request.param  # type: ignore[attr-defined]
    return made


def track(service: Service) -> tuple[str, ...]:
    return (f"tracking.to=['{service.name}']", *ON[1:], *SHORT, "tracking.project=foxes")  # type: ignore[attr-defined]


def test_a_service_gets_the_log_and_goes_on_in_its_run(job: Callable[..., Job], service: Service) -> None:
    mine = job(*track(service), "tracking.run_name=red")
    with pytest.raises(Broken):
        run(mine, progress=False, echo=stop_at(5))
    assert len(service.list("finish")) == 1, "a failed training closes it"
    result = run(mine, progress=False, resume=True)
    first, second = service.list("init")
    assert first["project"] == second["project"] == "foxes" and second["resume"] == "allow"
    kept = json.loads((result.run.path / "tracking.json").read_text(encoding="utf-8"))
    if service.name == "trackio":  # type: ignore[attr-defined]
        assert first == {"project": "foxes", "name": "red", "resume": "never"}
        assert second["name"] == "red-2" == kept["trackio"]
    else:
        assert first["id"] == second["id"] == kept[service.name] and len(first["id"]) == 21  # type: ignore[attr-defined]
        assert first["resume"] == "allow" and "red" in first.values()
        assert str(result.run.path) in str(first["dir" if service.name == "wandb" else "logdir"])  # type: ignore[attr-defined]
    sent = {step: values["train/loss"] for step, values in service.list("log") if "train/loss" in values}
    assert sorted(sent.items()) == logged(result.run, "step", "loss")
    assert {
        step: values["validation/loss"] for step, values in service.list("log") if "validation/loss" in values
    } == dict(logged(result.run, "validation", "loss"))
    images = [(step, values["previews/1"]) for step, values in service.list("log") if "previews/1" in values]
    assert [step for step, _ in images] == ([] if service.name == "trackio" else [0, 2, 4, 6])  # type: ignore[attr-defined]
    (settings,) = service.list("config")
    assert settings["train.steps"] == 6 and settings["name"] == mine.name
    assert str(Path(mine.output_dir)) not in json.dumps(settings), "no path of this computer is sent"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Service:
    """MLflow's module, with the names that accelerate and we use of it."""
    made = Service()
    module: Any = types.ModuleType("mlflow")
    module.set_tracking_uri = lambda uri: made.call("uri", uri)
    module.search_experiments = lambda filter_string: []
    module.create_experiment = lambda name, artifact_location, tags: made.call("experiment", (name, artifact_location))

    def start_run(**given: Any) -> Any:
        made.call("init", given)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=given["run_id"] or "chosen by MLflow"))

    module.start_run = start_run
    module.log_params = lambda values: made.call("config", values)
    module.log_metrics = lambda values, step=None: made.call("log", (step, values))
    module.log_image = lambda image, key, step: made.call("image", (step, key, image.size))
    module.end_run = lambda: made.call("finish", None)
    module.utils = types.SimpleNamespace(
        validation=types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
    )
    module.__spec__ = types.SimpleNamespace(name="mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    made.name = "mlflow"  # type: ignore[attr-defined]
    return made


def test_mlflow_gets_the_log_and_goes_on_in_its_run(
    job: Callable[..., Job], mlflow: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.fails = "init"  # a failed start leaves no id, with which the next one would fail as well
    mine = job(*track(mlflow), "tracking.run_name=red")
    with pytest.raises(Broken):
        run(mine, progress=False, echo=stop_at(3))
    mlflow.fails = ""
    with pytest.raises(Broken):
        run(mine, progress=False, resume=True, echo=stop_at(5))
    result = run(mine, progress=False, resume=True)
    assert [given["run_id"] for given in mlflow.list("init")] == [None, None, "chosen by MLflow"]
    assert {given["run_name"] for given in mlflow.list("init")} == {"red"}
    folder = (result.run.path / "mlflow").resolve()
    assert set(mlflow.list("uri")) == {f"sqlite:///{(folder / 'mlflow.db').as_posix()}"}
    assert set(mlflow.list("experiment")) == {("foxes", (folder / "artifacts").as_uri())}
    sent = {step: values["train/loss"] for step, values in mlflow.list("log") if "train/loss" in values}
    recorded = logged(result.run, "step", "loss")
    assert sorted(sent.items()) == recorded[2:], "steps 1 and 2 came before it could be reached"
    assert {step for step, *_ in mlflow.list("image")} == {4, 6} and mlflow.list("image")[0][1] == "previews/1"
    first, second = mlflow.list("config")  # MLflow takes a hundred at a time
    settings = first | second
    assert len(first) == 100 and settings["train.steps"] == 6 and str(Path(mine.output_dir)) not in json.dumps(settings)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    before = len(mlflow.list("uri"))
    run(job(*track(mlflow), "name=other"), progress=False)
    assert len(mlflow.list("uri")) == before and mlflow.list("experiment")[-1] == ("foxes", None)


@pytest.mark.parametrize("fails", ["init", "config", "log", "finish"])
def test_a_service_that_fails_ends_no_training(fails: str, job: Callable[..., Job], service: Service) -> None:
    service.fails = fails
    result = run(job(*track(service)), progress=False)
    events = result.run.read_events()
    warnings = [event["text"] for event in events if event["event"] == "warning" and "tracking" in event["text"]]
    assert warnings == [
        f"tracking.to: {service.name} failed (no connection to the server). The training continues without it."  # type: ignore[attr-defined]
    ]
    assert events[-1]["event"] == "done" and len(service.list(fails)) == 1, "it is asked once, and the end is the end"


def test_a_missing_package_is_known_before_anything_is_loaded(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    trackers.require_packages(Tracking())
    mine = job("tracking.to=['tensorboard', 'wandb']")
    with pytest.raises(UserError) as error:
        trackers.require_packages(mine.tracking)
    assert "tensorboard is not installed. Install it with `pip install 'lora-fp8[trackers]'`" in str(error.value)
    assert "wandb is not installed. Install it with `pip install wandb`" in str(error.value)
    monkeypatch.undo()
    find = trackers.importlib.util.find_spec
    monkeypatch.setattr(
        trackers.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    with pytest.raises(UserError, match="tensorboard is not installed"):
        run(job("tracking.to=['tensorboard']"), progress=False)
    assert not (Path(mine.output_dir) / mine.name).exists()


def test_only_known_trackers_are_taken() -> None:
    text = 'name = "x"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"\n'
    assert config.loads(text).tracking == Tracking()
    with pytest.raises(UserError, match="tracking.to"):
        loads(text, ["tracking.to=['aim']"])
