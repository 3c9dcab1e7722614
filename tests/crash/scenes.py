"""What the rig plays: each scene is a list of acts on the files of one folder, and a view of what a reader sees.

An act is acknowledged when its call returns. After a crash in the middle of act m + 1 and `mend`, what is seen must be
what was seen after act m or after act m + 1, whole. That is the promise, and `judge` is where it stands.
"""

import contextlib
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Act = tuple[str, Callable[[Path], Any]]


class Scene:
    """A ladder of acts; see the module."""

    mistakes: tuple[str, ...] = ("nothing is synced", "files are not synced", "folders are not synced", "no rename")
    """Those of MISTAKES that a power loss makes a loss of."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings

    def load(self) -> None:
        """Import what the acts need, before any child is forked."""

    def prepare(self, place: Path) -> None:
        """Make what is there before the first act."""

    def acts(self) -> list[Act]:
        """Return the acts by name, in their order."""
        return []

    def act(self, place: Path, first: int, mark: Callable[[str], None]) -> None:
        """Do the acts from number `first` on, and mark each that returns."""
        for name, action in self.acts()[first:]:
            action(place)
            mark(name)

    def torn(self, place: Path, views: list[Any]) -> list[str]:
        """Return the files that somebody who reads before `mend` finds half written."""
        return []

    def mend(self, place: Path) -> None:
        """Do what a person does after a crash."""

    def view(self, place: Path) -> Any:
        """Return what a reader sees. Raises where something cannot be read."""

    def views(self, place: Path) -> list[Any]:
        """Return the view before the first act and after each."""
        found = [self.view(place)]
        for _, action in self.acts():
            action(place)
            found.append(self.view(place))
        return found


class Captions(Scene):
    """Edits of captions, undone and done again. One picture has no caption before, one has two lines."""

    # Written in place, a caption is torn for who reads meanwhile, but the journal brings it back.
    mistakes = ("nothing is synced", "files are not synced", "folders are not synced", "the journal comes last")

    def load(self) -> None:
        from lora_fp8.data import captions  # noqa: F401

    def prepare(self, place: Path) -> None:
        from PIL import Image

        for number, text in enumerate(["a cat, red", "a dog, green\nsitting", None, "a bird, purple"]):
            Image.new("RGB", (16, 16), (40 * number, 90, 90)).save(place / f"{number}.png")
            if text is not None:
                (place / f"{number}.txt").write_text(text, encoding="utf-8")

    def acts(self) -> list[Act]:
        from lora_fp8.data import caption_operations, captions

        def apply(*operations: Any) -> Callable[[Path], Any]:
            return lambda place: captions.apply(place, captions.preview(place, list(operations)))

        return [
            ("apply", apply(caption_operations.SetText("a long caption, of many words " * 20))),
            ("undo", captions.undo),
            ("redo", captions.redo),
            ("undo again", captions.undo),
            ("apply another", apply(caption_operations.Trigger("zibo"), caption_operations.Replace("a ", "the "))),
            ("undo the other", captions.undo),
        ]

    def torn(self, place: Path, views: list[Any]) -> list[str]:
        return [name for name, raw in self.view(place).items() if raw not in [view.get(name) for view in views]]

    def mend(self, place: Path) -> None:
        from lora_fp8.data import captions

        captions.repair(place)

    def view(self, place: Path) -> Any:
        return {path.name: path.read_bytes() for path in sorted(place.glob("*.txt"))}


class Page(Scene):
    """What the web page keeps: settings, draft, presets, sessions, uploaded files."""

    def load(self) -> None:
        import webui.image_folders  # noqa: F401

    def prepare(self, place: Path) -> None:
        for name in ("work", "more", "sent"):
            (place / name).mkdir()
        for name in ("a", "b"):
            (place / "sent" / f"{name}.txt").write_text(f"a caption of {name}, and so on. " * 300, encoding="utf-8")

    def acts(self) -> list[Act]:
        from webui import base_models, image_folders
        from webui.context import Place
        from webui.draft import Draft
        from webui.login import Login

        def home(place: Path) -> Path:
            return place / "home"

        def upload(name: str) -> Callable[[Path], Any]:
            return lambda place: image_folders.add_file(place / "sent" / name, home(place) / "datasets" / "new", name)

        return [
            ("root", lambda place: Place(home(place)).add_root(str(place / "work"))),
            ("set", lambda place: Draft(home(place)).put("train.steps", 700)),
            ("second root", lambda place: Place(home(place)).add_models(str(place / "more"))),
            ("replace", lambda place: Draft(home(place)).replace('name = "another"\n')),
            ("preset", lambda place: base_models.save_preset(home(place), "mine", "[train]\nsteps = 12\n")),
            ("bring back", lambda place: Draft(home(place)).restore_earlier()),
            ("upload", upload("a.txt")),
            ("log in", lambda place: Login("user", "a long password", home(place) / "sessions.json").start_session()),
            ("upload another", upload("b.txt")),
            ("replace again", lambda place: Draft(home(place)).replace('name = "third"\n')),
            ("remove", lambda place: Place(home(place)).remove_root(str(place / "work"))),
        ]

    def view(self, place: Path) -> Any:
        from webui import base_models
        from webui.context import Place
        from webui.draft import Draft

        home = place / "home"
        settings = {key: [Path(path).name for path in paths] for key, paths in Place(home).read_settings().items()}
        drafts = Draft(home).load_text(), Draft(home).read_earlier()
        presets = {path.name: path.read_text(encoding="utf-8") for path in base_models.list_own_presets(home)}
        uploads = {path.name: path.read_bytes() for path in sorted(home.glob("datasets/new/[!.]*"))}
        file = home / "sessions.json"
        sessions = len(json.loads(file.read_text(encoding="utf-8"))["sessions"]) if file.exists() else 0
        return settings, drafts, presets, uploads, sessions


class Queue(Scene):
    """Jobs that are submitted, moved, cancelled, queued again and deleted."""

    def load(self) -> None:
        import lora_fp8.jobs  # noqa: F401

    def acts(self) -> list[Act]:
        from lora_fp8.jobs import Queue

        def on(change: Callable[[Any], Any]) -> Callable[[Path], Any]:
            return lambda place: change(Queue(place / "home"))

        return [
            ("open", on(lambda queue: queue.list_jobs())),
            ("submit", on(lambda queue: queue.submit_command("resize", ["a.safetensors"]))),
            ("submit another", on(lambda queue: queue.submit_command("merge", ["b.safetensors"]))),
            ("move", on(lambda queue: queue.move(2, 1))),
            ("cancel", on(lambda queue: queue.cancel(1))),
            ("queue again", on(lambda queue: queue.requeue(1))),
            ("priority", on(lambda queue: queue.set_priority(2, 5))),
            ("cancel the other", on(lambda queue: queue.cancel(2))),
            ("delete", on(lambda queue: queue.delete(2))),
        ]

    def view(self, place: Path) -> Any:
        from lora_fp8.jobs import Queue

        jobs = Queue(place / "home").list_jobs()
        rows = Queue(place / "home").store.read_rows()
        assert len(jobs) == len(rows)
        return [(row.id, row.name, row.command, row.phase, row.wanted, row.priority) for row in rows]


class Rescue(Scene):
    """A damaged queue is rebuilt. As long as it is said to be damaged, the command is given again."""

    mistakes = ()

    def load(self) -> None:
        import lora_fp8.jobs.rescue  # noqa: F401

    def prepare(self, place: Path) -> None:
        from lora_fp8.jobs import Queue

        queue = Queue(place / "home")
        for number in range(4):
            queue.submit_command("resize", [f"{number}.safetensors"])
        queue.store.close()
        queue.store.file.write_bytes(b"no database " * 400)

    def acts(self) -> list[Act]:
        from lora_fp8.jobs.rescue import rescue

        return [("rescue", lambda place: rescue(place / "home"))]

    def mend(self, place: Path) -> None:
        from lora_fp8.errors import UserError
        from lora_fp8.jobs.rescue import rescue

        with contextlib.suppress(UserError):  # it is not damaged
            rescue(place / "home")

    def view(self, place: Path) -> Any:
        from lora_fp8.jobs import Damaged
        from lora_fp8.jobs.store import Store

        try:
            rows = Store(place / "home").read_rows()
        except Damaged:
            return "damaged"
        return [(row.id, row.command, row.phase) for row in rows]


class Training(Scene):
    """A miniature training from its config to its files, begun or gone on with. One act, marks at each checkpoint.

    settings: {"job": a config file}. The run goes into `place`/runs, its cache into `place`/cache.
    """

    mistakes = (*Scene.mistakes, "rename before the sync")

    def load(self) -> None:
        import torch

        torch.set_num_threads(1)
        import bitsandbytes  # noqa: F401
        import diffusers
        import transformers  # noqa: F401

        from lora_fp8 import (
            families,
            train,  # noqa: F401
        )

        families.get(self.job(Path("/")).model.family)
        for name in ("AutoencoderKL", "UNet2DConditionModel", "StableDiffusionPipeline", "DDIMScheduler"):
            getattr(diffusers, name)  # imported on first use

    def job(self, place: Path) -> Any:
        """Return the job in this folder; the last parts of its paths, which are in its files, stay the same."""
        from lora_fp8 import config

        job = config.load(self.settings["job"])
        data = job.dataset.model_copy(update={"cache_dir": str(place / "cache")})
        return job.model_copy(update={"output_dir": str(place / "runs"), "dataset": data})

    def run(self, place: Path) -> Path:
        return place / "runs" / self.job(place).name

    def act(self, place: Path, first: int, mark: Callable[[str], None]) -> None:
        from lora_fp8 import train
        from lora_fp8.errors import UserError
        from lora_fp8.stages import resume
        from lora_fp8.training import checkpoint

        save = checkpoint.save

        def marked(folder: Path, adapter: Any, optimizer: Any, state: dict[str, Any], keep: int) -> Any:
            found = save(folder, adapter, optimizer, state, keep)
            mark(f"step-{state['step']:06d}")
            return found

        for module in (checkpoint, resume):
            if getattr(module, "save", None) is save:
                module.save = marked
        job = self.job(place)
        try:
            train.run(job, progress=False)
        except UserError:  # there is something of an earlier attempt already
            if not self.run(place).exists():
                raise
            train.run(job, resume=True, progress=False)
        mark("done")

    def view(self, place: Path) -> Any:
        """Read all that the run announces.

        Returns:
            The newest whole checkpoint (name, hashes) with the best LoRA and the held-out losses; and the files.
        """
        from PIL import Image

        from lora_fp8 import config
        from lora_fp8.run import Run
        from lora_fp8.training import checkpoint

        run = Run(self.run(place))
        if run.config_file.exists():
            config.load(run.config_file)
        newest, _ = checkpoint.read_latest(run.checkpoints)
        run.read_events()
        for picture in [*run.samples.glob("[!.]*.png"), *run.samples.glob("[!.]*.webp")]:
            with Image.open(picture) as image:
                image.load()
        if run.verify_file.exists():
            json.loads(run.verify_file.read_bytes())
        files = sorted(run.export.rglob("[!.]*.safetensors"))
        exported = {str(path.relative_to(run.export)): _hash(path) for path in files}
        saved = {path.name: _hash(path) for path in newest.path.iterdir()} if newest else {}
        best = {str(path.relative_to(run.path)): _hash(path) for path in sorted(run.checkpoints.glob("best-*/*"))}
        if run.validation_file.exists():
            best["validation.json"] = _hash(run.validation_file)
        return (newest.path.name if newest else "", saved, best), exported


class Fetch(Scene):
    """A run is brought back from another machine, trained on there, and brought back again. That machine is this one.

    Its folders are `place`/there-1 and there-2. A fetch is not one change: what a killed one left is whole after the
    next, which the handle asks for by the names that are still coming.
    """

    mistakes = ("nothing is synced", "files are not synced", "folders are not synced")
    name = "zibo"
    config = """
name = "zibo"
[model]
family = "sd15"
path = "demo"
[[dataset.folders]]
path = "photos"
[train]
steps = 6
"""

    def load(self) -> None:
        import lora_fp8.jobs.remote.fetch  # noqa: F401

    def prepare(self, place: Path) -> None:
        from lora_fp8.jobs.remote import handle, machine

        for number, steps in ((1, (2, 4)), (2, (4, 6))):
            there = place / f"there-{number}"
            files = {
                machine.MARKER: "",
                "exit": "0\n",
                "runs/zibo/.lora-fp8-run": json.dumps({"version": 1, "id": "one run"}),
                "runs/zibo/config.toml": self.config,
                "runs/zibo/events.jsonl": "a line of the log\n" * 400 * number,
                "runs/zibo/export/zibo_kohya.safetensors": f"the adapters of pass {number}, " * 900,
            }
            for step in steps:
                files[f"runs/zibo/checkpoints/step-{step:06d}/adapter.safetensors"] = f"those of step {step}, " * 500
            for name, text in files.items():
                (there / name).parent.mkdir(parents=True, exist_ok=True)
                (there / name).write_text(text, encoding="utf-8")
        run = str(place / "runs" / self.name)
        with _environment("LORA_FP8_HOME", place / "home"):
            handle.save(handle.Handle(self.name, "ssh", "", str(place / "there-1"), "runs/zibo", run, created=1.0))

    def acts(self) -> list[Act]:
        return [("fetch", self._fetch), ("train on there", self._train_on), ("fetch again", self._fetch)]

    def mend(self, place: Path) -> None:
        with self._loaded(place) as job:
            is_interrupted = any(name.startswith("coming/") for name in job.fetched)
        if is_interrupted:
            self._fetch(place)

    def view(self, place: Path) -> Any:
        run = place / "runs" / self.name
        files = {str(path.relative_to(run)): _hash(path) for path in sorted(run.rglob("*")) if path.is_file()}
        own = ("lock", "config.toml")  # the config names `place`
        with self._loaded(place) as job:
            return Path(job.folder).name, {name: files[name] for name in files if name not in own}

    def _fetch(self, place: Path) -> None:
        from lora_fp8.jobs.remote import fetch

        with self._loaded(place) as job:
            fetch.fetch(job)

    def _train_on(self, place: Path) -> None:
        from lora_fp8.jobs.remote import handle

        with self._loaded(place) as job:
            handle.update(job, folder=str(place / "there-2"))

    @contextlib.contextmanager
    def _loaded(self, place: Path) -> Iterator[Any]:
        """Yield the job. Where `place` was laid out from a trace, its paths are those of another folder."""
        from lora_fp8.jobs.remote import handle

        with _environment("LORA_FP8_HOME", place / "home"):
            job = handle.load(self.name)
            here = {"folder": str(place / Path(job.folder).name), "output": str(place / "runs" / self.name)}
            yield job if (job.folder, job.output) == tuple(here.values()) else handle.update(job, **here)


class Made(Scene):
    """Folders that are made from something else: the configs of a single file, and images out of a tar shard.

    Their source is deleted afterwards, as `dataset import` does with what it has downloaded. While it is there, the
    command is repeated after a crash.
    """

    mistakes = ("nothing is synced", "files are not synced", "folders are not synced")

    def load(self) -> None:
        import lora_fp8.data.dataset_import
        import lora_fp8.families._components  # noqa: F401

    def prepare(self, place: Path) -> None:
        import io
        import tarfile

        from PIL import Image

        with tarfile.open(place / "shard.tar", "w") as archive:
            for number in range(4):
                picture = io.BytesIO()
                Image.frombytes("RGB", (48, 48), random.Random(number).randbytes(48 * 48 * 3)).save(picture, "PNG")
                for name, data in ((f"{number}.png", picture.getvalue()), (f"{number}.txt", b"a bird")):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))

    def acts(self) -> list[Act]:
        return [
            ("write configs", self._write_configs),
            ("import", self._import),
            ("delete the source", lambda place: (place / "shard.tar").unlink()),
        ]

    def mend(self, place: Path) -> None:
        self._write_configs(place)  # before each use, so that only half a folder is a loss
        if (place / "birds").exists() and (place / "shard.tar").exists():
            self._import(place)

    def view(self, place: Path) -> Any:
        folders = (place / "cache/lora_fp8/components").glob("sd15-*/*/"), [place / "birds"]
        files = [path for found in folders for folder in found for path in sorted(folder.glob("[!.]*"))]
        return {path.name: _hash(path) for path in files}

    def _write_configs(self, place: Path) -> None:
        from lora_fp8.families import _components

        configs = {"unet/config.json": {"layers": list(range(900))}, "vae/vae_config.json": {"channels": [4] * 600}}
        with _environment("XDG_CACHE_HOME", place / "cache"):
            _components.write_configs("sd15", configs, {})

    def _import(self, place: Path) -> None:
        from lora_fp8.data import dataset_import, foreign_datasets

        dataset_import.import_images(foreign_datasets.find_source(place / "shard.tar"), place / "birds")


@contextlib.contextmanager
def _environment(name: str, value: Path) -> Iterator[None]:
    """Set a variable for as long as this lasts: a scene is also played in the tests' own process."""
    before = os.environ.get(name)
    os.environ[name] = str(value)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


SCENES = {
    "captions": Captions,
    "page": Page,
    "queue": Queue,
    "rescue": Rescue,
    "fetch": Fetch,
    "made": Made,
    "training": Training,
}


def get(name: str, settings: dict[str, Any] | None = None) -> Scene:
    """Return the scene of this name."""
    return SCENES[name](settings or {})


def judge(seen: Any, views: list[Any], acknowledged: int) -> int:
    """Return the number of acts whose result is seen. Raises AssertionError if that is not what was acknowledged.

    One more act may be done than was acknowledged: it was at work when the crash came.
    """
    for number in (acknowledged, acknowledged + 1):
        if number < len(views) and seen == views[number]:
            return number
    where = [number for number, view in enumerate(views) if view == seen]
    raise AssertionError(f"{acknowledged} acts were acknowledged, and what is seen is of act {where or 'none'}: {seen}")


# ------------------------------------------------------------------------------------------------- planted mistakes


def _everywhere(function: Any, by: Any) -> None:
    """Put another function in the place of this one in every module that has it."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("lora_fp8", "webui")):
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, by)


def _no_sync() -> None:
    os.fsync = lambda descriptor: None
    os.sync = lambda: None


def _no_sync_of_files() -> None:
    import stat

    real = os.fsync

    def only_folders(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if stat.S_ISDIR(os.fstat(number).st_mode):
            real(number)

    os.fsync = only_folders


def _no_sync_of_folders() -> None:
    from lora_fp8.common import writing

    _everywhere(writing.sync_folder, lambda path: None)


def _no_rename() -> None:
    """Write where the file belongs: synced, but torn for whoever reads meanwhile."""
    from lora_fp8.common import writing
    from lora_fp8.training import checkpoint

    def in_place(path: Path, data: bytes) -> None:
        with writing.write_synced(path) as file:
            file.write(data)
        writing.sync_folder(path.parent)

    def bundle_in_place(staged: Path, final: Path, files: dict[str, bytes]) -> None:
        final.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            in_place(final / name, data)

    _everywhere(writing.atomic_write, in_place)
    _everywhere(checkpoint._write, bundle_in_place)


def _captions_in_place() -> None:
    from lora_fp8.data import caption_files

    def place(swap: Any) -> None:
        for path, (_, raw) in swap.changing.items():
            swap.placed.append(path)
            if raw is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(raw)

    caption_files.Swap.place = place


def _journal_last() -> None:
    """Log an edit when its captions are written, and not before."""
    from lora_fp8.data.caption_journal import Journal

    begin, end, waiting = Journal.begin, Journal.end, []

    def later(journal: Any, line: dict[str, Any], keep: Any = ()) -> None:
        waiting.append((line, keep))
        journal._began = journal._size
        journal._apply_line(line)

    def both(journal: Any) -> None:
        journal._forget()
        journal.refresh()
        begin(journal, *waiting.pop())
        end(journal)

    Journal.begin, Journal.end = later, both


def _rename_first() -> None:
    """Sync only after the rename."""
    from lora_fp8.common import writing

    def late(path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)
        writing.sync_folder(path.parent)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    _everywhere(writing.atomic_write, late)
    _everywhere(writing.write_synced, _unsynced)


@contextlib.contextmanager
def _unsynced(path: Path) -> Any:
    with open(path, "wb") as file:
        yield file


MISTAKES: dict[str, Callable[[], None]] = {
    "nothing is synced": _no_sync,
    "files are not synced": _no_sync_of_files,
    "folders are not synced": _no_sync_of_folders,
    "no rename": _no_rename,
    "rename before the sync": _rename_first,
    "captions in place": _captions_in_place,
    "the journal comes last": _journal_last,
}
"""Ways of writing that lose something, to see that the replay finds it."""


def plant(name: str) -> None:
    """Make this mistake in this process, from now on."""
    from lora_fp8.common import writing  # noqa: F401 - so that they are there to be changed
    from lora_fp8.training import checkpoint  # noqa: F401 - so that they are there to be changed

    MISTAKES[name]()
