"""Send figures and previews of a run to experiment trackers: TensorBoard, Weights & Biases, trackio, SwanLab, MLflow.

The trackers are those of accelerate. They are fed from the run's events, by the main process, so they have what the
page shows. The run of a tracker belongs to the run folder: `tracking.json` has its id, with which a resumed training
goes on in it. A tracker that fails is reported once and left out from then on; training never depends on it. Login,
offline modes and servers are the tracker's own business, by its environment variables and files.

    tensorboard/    event files of TensorBoard
    tracking.json   name of a tracker -> the id of its run
"""

import json
import os
import re
import tomllib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from accelerate import tracking as accelerate_tracking

from .. import settings
from ..common.json_files import write_json
from ..errors import Message, reason
from ..lora_files.export_metadata import without_paths
from ..run import Run
from ..run.folder import ENDS
from ..run.run_log import SCORES
from . import previews

TRACKERS: dict[str, Any] = {
    "tensorboard": accelerate_tracking.TensorBoardTracker,
    "wandb": accelerate_tracking.WandBTracker,
    "trackio": accelerate_tracking.TrackioTracker,
    "swanlab": accelerate_tracking.SwanLabTracker,
    "mlflow": accelerate_tracking.MLflowTracker,
}
OWN_IDS: dict[str, Callable[[Any], Any]] = {"trackio": lambda run: run.name, "mlflow": lambda run: run.info.run_id}
"""Trackers that choose the id of a run themselves -> how it is read. trackio's is the name, changed if it is taken."""
FIGURES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "lr_text_encoder": "train/lr_text_encoder",
    "grad_norm": "train/grad_norm",
    "keys_scaled": "max_norm/keys_scaled",
    "max_key_norm": "max_norm/max_key_norm",
    "step_s": "train/step_seconds",
    "images_per_s": "train/images_per_second",
    "vram_gb": "train/peak_memory_gib",
}
"""Field of an event "step" -> name of the figure."""
LOG_DIR = "tensorboard"


class Tracking:
    """The trackers of a run, which start with its first step.

    Args:
        section: the `[tracking]` table.
        name: of the job.
        config_text: the resolved settings, as TOML.
        run: its folder, which also takes the warnings.
    """

    def __init__(self, section: settings.Tracking, name: str, config_text: str, run: Run) -> None:
        self._section, self._run = section, run
        self._name = name if section.run_name == "auto" else section.run_name
        self._config = without_paths(config_text)  # trackers show it to others
        self._trackers: dict[str, Any] = {}
        self._file = run.path / "tracking.json"

    def watch(self, event: Mapping[str, Any]) -> None:
        """Send what an event says. An end is passed here before it is written, so that a warning stands before it."""
        kind, step = event["event"], event.get("step")
        if kind == "stage" and event.get("stage") == "train":
            self._start(event["step"])
        elif kind == "step":
            self._log(step, {name: event[field] for field, name in FIGURES.items() if event.get(field) is not None})
        elif kind == "validation":
            bands = {f"validation/{_clean(band)}": loss for band, loss in event["bands"].items()}
            self._log(step, {"validation/loss": event["loss"], **bands})
        elif kind == "score":
            self._log(step, {f"previews/{name}": event[name] for name in SCORES if name in event})
        elif kind == "preview" and self._section.log_images:
            self._log_images(step, event["images"])
        elif kind in ENDS:
            for name in list(self._trackers):
                self._use(name, lambda tracker: tracker.finish())

    def _start(self, step: int) -> None:
        """Start each tracker, or continue its run after this step."""
        ids = self._read_ids()
        is_first = not ids
        for name in dict.fromkeys(self._section.to):
            if name in self._trackers:
                continue
            if name not in OWN_IDS:
                ids.setdefault(name, uuid.uuid4().hex[:21])  # SwanLab takes 21 letters and digits, wandb takes any
            try:
                tracker = self._make(name, ids, step)
                tracker.start()
                if name in OWN_IDS:
                    ids[name] = str(OWN_IDS[name](tracker.tracker))
                self._trackers[name] = tracker
                if is_first:
                    self._describe(name, step)
            except Exception as error:  # of a foreign program: no network, no login, a full disk
                self._drop(name, error)
        write_json(self._file, ids, indent=None)

    def _make(self, name: str, ids: Mapping[str, str], step: int) -> Any:
        """Make a tracker of accelerate that has not started."""
        project, kind = self._section.project, TRACKERS[name]
        if name == "tensorboard":
            has_logs = any((self._run.path / LOG_DIR).glob("events.out.tfevents.*"))
            # What a killed process had logged after the checkpoint is logged again.
            return kind(LOG_DIR, self._run.path, **({"purge_step": step + 1 if step else 0} if has_logs else {}))
        if name == "trackio":
            known = name in ids
            return kind(project, name=ids[name] if known else self._name, resume="allow" if known else "never")
        if name == "swanlab":
            place = {} if os.environ.get("SWANLAB_LOG_DIR") else {"logdir": str(self._run.path / "swanlog")}
            return kind(project, experiment_name=self._name, id=ids[name], resume="allow", **place)
        if name == "mlflow":
            return self._make_mlflow(ids.get(name))
        place = {} if os.environ.get("WANDB_DIR") else {"dir": str(self._run.path)}
        return kind(project, name=self._name, id=ids[name], resume="allow", **place)

    def _make_mlflow(self, run_id: str | None) -> Any:
        """Make the tracker of MLflow, which keeps its database in the run folder unless it is told another place."""
        artifacts = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            import mlflow

            folder = (self._run.path / "mlflow").resolve()
            folder.mkdir(exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').as_posix()}")
            artifacts = (folder / "artifacts").as_uri()
        return TRACKERS["mlflow"](self._section.project, artifacts, run_id=run_id, run_name=self._name)

    def _describe(self, name: str, step: int) -> None:
        """Send the settings of the run."""
        if name == "tensorboard":
            lines = "".join(f"    {line}\n" for line in self._config.splitlines())  # code, in Markdown
            self._use(name, lambda tracker: tracker.log({"config": lines}, step=step))
            return
        tables = tomllib.loads(self._config)
        tables["dataset"].pop("folders", None)
        values = {
            f"{table}.{key}": value
            for table, inner in tables.items()
            if isinstance(inner, dict)
            for key, value in inner.items()
        }
        values |= {"seed": tables["seed"], "name": tables["name"]}
        self._use(name, lambda tracker: tracker.store_init_configuration(values))

    def _log(self, step: Any, values: Mapping[str, float]) -> None:
        for name in list(self._trackers):
            self._use(name, lambda tracker: tracker.log(dict(values), step=step))

    def _log_images(self, step: Any, names: list[str]) -> None:
        """Send previews (of clips, the first frames) to the trackers that show images."""
        for name in list(self._trackers):
            self._use(name, lambda tracker: self._send_images(tracker, step, names))

    def _send_images(self, tracker: Any, step: int, names: list[str]) -> None:
        if not hasattr(tracker, "log_images") and tracker.name != "mlflow":
            return
        for number, path in enumerate(names, 1):
            image = previews.read(self._run.path / path)
            if tracker.name == "tensorboard":
                tracker.log_images({f"previews/{number}": np.asarray(image)[None]}, step=step, dataformats="NHWC")
            elif tracker.name == "mlflow":
                import mlflow

                mlflow.log_image(image, key=f"previews/{number}", step=step)
            else:
                tracker.log_images({f"previews/{number}": [image]}, step=step)

    def _use(self, name: str, action: Callable[[Any], None]) -> None:
        """Use a tracker; if it fails, it is left out from now on."""
        if name not in self._trackers:
            return
        try:
            action(self._trackers[name])
        except Exception as error:  # see `_start`
            self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        text = reason(error) if isinstance(error, OSError) else str(error)
        why = next((line.strip() for line in str(text).splitlines() if line.strip()), type(error).__name__)
        self._run.log_event(
            "warning",
            text=Message("tracking.to: {name} failed ({why}). The training continues without it.", name=name, why=why),
        )

    def _read_ids(self) -> dict[str, str]:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return {str(name): str(given) for name, given in content.items()} if isinstance(content, dict) else {}


def _clean(name: str) -> str:
    """Return a name that each tracker takes: letters, digits, spaces, _, - and /."""
    return " ".join(re.sub(r"[^0-9A-Za-z _/-]+", " ", name).split())


def watch(section: settings.Tracking, name: str, config_text: str, run: Run) -> None:
    """Let the trackers follow a run; nothing without any. The arguments are those of `Tracking`."""
    if section.to:
        run.watch = Tracking(section, name, config_text, run).watch
