"""Room on the disks: what a job will write is what it writes, and too little is told before anything is made."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_fp8 import families, train
from lora_fp8.common import writing
from lora_fp8.common.numbers import format_bytes
from lora_fp8.errors import RunFailure, UserError, UserErrors
from lora_fp8.plan import disk_budget
from lora_fp8.precision import dtypes
from lora_fp8.run import Run, disk_space
from lora_fp8.run.disk_space import Need
from lora_fp8.settings import Job
from lora_fp8.training import checkpoint
from webui import translations

MIB = 2**20


def run_of(job: Job) -> Path:
    return job.run_folder


def named_of(job: Job) -> disk_budget.Named:
    family = families.get(job.model.family)(job.model, device="cpu", dtype=dtypes.DTYPES[job.model.dtype])
    return disk_budget.list_trainable(job, family)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Need]]:
    """What trainings held against the disks."""
    found: list[list[Need]] = []
    real = disk_space.find_shortages
    monkeypatch.setattr(disk_space, "find_shortages", lambda needs: real(found.append(list(needs)) or found[-1]))
    return found


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """free(bytes): as much is left on every disk, as the system tells."""

    def leave(num: int) -> None:
        monkeypatch.setattr(
            disk_space.shutil, "disk_usage", lambda path: SimpleNamespace(total=2 * num, used=num, free=num)
        )

    return leave


# ------------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("sd15", ["optimizer.name=adamw8bit"]),
        ("sd15", ["optimizer.name=adamw", "adapter.dtype=fp32"]),
        ("sd15", ["optimizer.name=lion8bit", "optimizer.rounding=stochastic"]),
        ("sd15", ["optimizer.name=prodigy", "optimizer.lr=auto"]),
        ("sd15", ["optimizer.name=came"]),
        ("sd15", ["optimizer.name=adamw_schedulefree", "optimizer.rounding=stochastic"]),
        ("sd15", ["optimizer.ema_decay=0.9", "optimizer.rounding=stochastic"]),
        ("sdxl", ["adapter.text_encoder=true"]),
        ("flux", ["adapter.type=dora", "export.formats=['auto']"]),
        ("qwen_image", ["adapter.type=lokr", "export.formats=['auto']"]),
    ],
)
def test_a_run_writes_what_was_reckoned(
    family: str, settings: list[str], job: Callable[..., Job], tmp_path: Path, asked: list[list[Need]]
) -> None:
    """Against the files: each checkpoint, the cache and the LoRA files, names of layers included."""
    mine = job("train.steps=2", f"dataset.cache_dir='{tmp_path / 'cache'}'", *settings, family=family)
    result = train.run(mine, progress=False)
    saved, files, _, cached = (
        next(need for need in asked[0] if what in need.what) for what in ("checkpoints", "LoRA", "previews", "cache of")
    )
    folder = run_of(mine)
    # Names weigh a lot in a miniature, and prodigyopt holds a single number for what begins as zeros.
    assert saved.sure == pytest.approx(size_of(folder / "checkpoints"), rel=0.1)
    assert 0.25 * size_of(folder / "export") < files.sure <= sum(path.stat().st_size for path in result.files)
    entries = list((tmp_path / "cache").rglob("*.safetensors"))
    held = size_of(tmp_path / "cache") - 340 * len(entries)  # a header each, which weighs little beside a real picture
    assert cached.sure <= held + 100 * len(entries) and held <= cached.likely * 1.02
    if not families.get(family).prompts_vary:
        assert cached.sure == cached.likely == pytest.approx(held, rel=0.05)


def test_as_many_checkpoints_are_counted_as_lie_side_by_side(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    real = checkpoint._prune
    monkeypatch.setattr(
        checkpoint, "_prune", lambda folder, keep: (most.append(checkpoint.count_bundles(folder)), real(folder, keep))
    )

    def counted(mine: Job) -> int:
        named = named_of(mine)
        need = disk_budget.estimate_run(mine, named, run_of(mine))[0]
        assert need.what == "checkpoints"
        return round(need.sure / disk_budget.count_checkpoint_bytes(mine, named))

    few = ("adapter.targets=['to_q']", "dataset.resolution=32")
    for steps, every, keep in ((6, 2, 2), (3, 2, 2), (5, 1, 4), (2, 5, 2)):
        times = (f"train.steps={steps}", f"checkpoint.every={every}", f"checkpoint.keep={keep}")
        mine = job(*few, *times, f"name='r{steps}'")
        before = counted(mine)
        train.run(mine, progress=False)
        assert before == max(most), (steps, every, keep)
        assert counted(mine) == 0  # all is saved
        more = mine.model_copy(update={"train": mine.train.model_copy(update={"steps": 3 * steps})})
        lying = checkpoint.count_bundles(run_of(mine) / "checkpoints")
        most.clear()
        assert 1 <= counted(more) <= keep + 1 - min(lying, keep)
        expected = counted(more) + lying
        train.run(more, resume=True, progress=False)
        assert expected == max(most)
        most.clear()


def test_the_best_lora_is_counted_as_what_may_come(job: Callable[..., Job]) -> None:
    """It lies beside the checkpoints at most twice, and is written as files unless it is the last one."""
    held = ("validation.pictures=2", "validation.every=1")
    mine, without = job(*held), job(*held, "validation.keep_best=false")
    named = named_of(mine)
    needs = [disk_budget.estimate_run(each, named, run_of(each)) for each in (mine, without)]
    adapter = sum(parameter.nbytes for _, parameter in named)
    assert [need.sure for need in needs[0]] == [need.sure for need in needs[1]]
    more = [with_best.likely - plain.likely for with_best, plain in zip(*needs, strict=True)]
    assert more == [2 * adapter, sum(disk_budget.count_file_bytes(mine, named).values()), 0]
    result = train.run(mine, progress=False)
    (best,) = result.run.checkpoints.glob("best-*")
    assert size_of(best) < 2 * adapter


# ------------------------------------------------------------------------------------------------- before it is started


def test_too_little_is_told_before_anything_is_encoded_and_enough_is_enough(
    job: Callable[..., Job], tmp_path: Path, asked: list[list[Need]], free: Callable[[int], None]
) -> None:
    cache = tmp_path / "cache"
    mine = job("train.steps=2", f"dataset.cache_dir='{cache}'", "preview.prompts=['a cat']", "preview.steps=1")
    free(0)
    with pytest.raises(UserError) as told:
        train.run(mine, progress=False)
    line = str(told.value)
    sure, likely = (sum(getattr(need, of) for need in asked[0]) for of in ("sure", "likely"))
    assert line.startswith(f"{run_of(mine).parent}, {cache}: ")
    assert "0 B are free" in line and format_bytes(sure) in line
    assert "\n" not in line and "output_dir" in line and "checkpoint.keep" in line
    assert "没有" in translations.translate("zh-CN", line) or "磁盘空间不够" in translations.translate("zh-CN", line)
    assert not cache.exists() and not run_of(mine).exists()

    free(sure - 1)
    with pytest.raises(UserError):
        train.run(mine, progress=False)
    free(sure)
    train.run(mine, progress=False)
    assert sure < likely
    (warned,) = [
        event["text"]
        for event in Run.open(run_of(mine)).read_events()
        if "disk may become full" in event.get("text", "")
    ]
    assert "of previews" in warned and "预览图" in translations.translate("zh-CN", warned)

    asked.clear()
    other = mine.model_copy(update={"name": "other"})
    free(10**9)
    train.run(other, progress=False)
    assert [need.likely for need in asked[0] if "cache of" in need.what] == [0]  # what is there does not count again
    assert not any("disk" in event.get("text", "") for event in Run.open(run_of(other)).read_events())


def test_resuming_asks_as_well(job: Callable[..., Job], free: Callable[[int], None]) -> None:
    mine = job("train.steps=2")
    train.run(mine, progress=False)
    free(0)
    more = mine.model_copy(update={"train": mine.train.model_copy(update={"steps": 4})})
    with pytest.raises(UserError, match="too full for this job.*of checkpoints"):
        train.run(more, resume=True, progress=False)
    assert checkpoint.read_latest(run_of(mine) / "checkpoints")[0].step == 2


def test_each_disk_is_asked_for_what_comes_onto_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders on one share its room; of one that is not there yet, the nearest above it says which disk it is."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    room = {"a": 10 * MIB, "b": 3 * MIB}
    devices = {"a": 1, "b": 2}

    def disk_of(path: os.PathLike[str]) -> str:
        assert os.path.exists(path)
        return Path(path).relative_to(tmp_path).parts[0]

    monkeypatch.setattr(disk_space, "_get_device", lambda path: devices[disk_of(path)])
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: SimpleNamespace(free=room[disk_of(path)]))
    runs, cache = Need(tmp_path / "a/runs/x", "checkpoints", 6 * MIB, 6 * MIB), tmp_path / "b" / "cache" / "deep"

    assert disk_space.find_shortages([runs, Need(cache, "cache of images and captions", 3 * MIB, 3 * MIB)]) == ([], [])
    (problem,), warnings = disk_space.find_shortages(
        [runs, Need(cache, "cache of images and captions", 4 * MIB, 4 * MIB)]
    )
    assert problem.startswith(f"{cache}: ") and "4 MiB" in problem and "3 MiB are free" in problem and not warnings
    together = [runs, Need(tmp_path / "a" / "cache", "cache of images and captions", 4 * MIB, 5 * MIB)]
    problems, (warned,) = disk_space.find_shortages(together)
    assert not problems and "up to 11 MiB" in warned and "10 MiB are free" in warned
    with pytest.raises(UserErrors):
        disk_space.require_space([Need(tmp_path / name, "checkpoints", 99 * MIB, 99 * MIB) for name in "ab"])


def test_what_can_be_written_is_tried_and_nothing_is_left(tmp_path: Path, no_privilege: None) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "locked").mkdir(mode=0o500)
    (tmp_path / "lost").symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.rglob("*"))
    assert (
        disk_space.find_write_obstacle(tmp_path) is disk_space.find_write_obstacle(tmp_path / "new" / "deeper") is None
    )
    assert disk_space.find_write_obstacle(tmp_path / "file") == "Not a directory"
    assert disk_space.find_write_obstacle(tmp_path / "file" / "x") == f"{tmp_path / 'file'}: Not a directory"
    assert disk_space.find_write_obstacle(tmp_path / "locked" / "x") == f"{tmp_path / 'locked'}: Permission denied"
    assert disk_space.find_write_obstacle(tmp_path / "lost") == "No such file or directory"
    assert sorted(tmp_path.rglob("*")) == before


# --------------------------------------------------------------------------------------------- full while it is trained


class SmallDisk:
    """So many bytes for a run: what is written beyond is refused as the kernel does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        self.folder, self.room = folder, 10**12
        real = writing.write_synced
        monkeypatch.setattr(checkpoint, "write_synced", lambda path: _Limited(self, real, path))


class _Limited:
    def __init__(self, small: SmallDisk, real, path: Path):
        self.small, self.real, self.path = small, real, path

    def __enter__(self):
        self.opened = self.real(self.path)
        self.file = self.opened.__enter__()
        return self

    def write(self, data: bytes) -> None:
        if size_of(self.small.folder) + len(data) > self.small.room:
            self.file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device", str(self.path))
        self.file.write(data)

    def __exit__(self, *error):
        return self.opened.__exit__(*error)


def exported(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_of(job) / "export").glob("*.safetensors")}


def test_an_older_checkpoint_goes_first_where_the_disk_is_full(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two, and three lie side by side otherwise: nothing is lost, and it is told."""
    mine = job("train.steps=8")
    one = disk_budget.count_checkpoint_bytes(mine, named_of(mine))
    folder = run_of(mine) / "checkpoints"
    SmallDisk(monkeypatch, folder).room = round(2.5 * one)
    train.run(mine, progress=False)
    told = [event["text"] for event in Run.open(run_of(mine)).read_events() if event["event"] == "warning"]
    assert [text for text in told if "disk is full" in text] == [
        f"the disk is full: step-{old:06d} was removed before step-{new:06d} was saved" for old, new in ((2, 6), (4, 8))
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["step-000006", "step-000008"]


def test_the_last_whole_checkpoint_never_goes(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one and a half: the save fails in one line, the one before is intact, and with room it goes on."""
    plain = job("train.steps=6", "name=plain")
    train.run(plain, progress=False)
    mine = job("train.steps=6")
    folder = run_of(mine) / "checkpoints"
    small = SmallDisk(monkeypatch, folder)
    small.room = round(1.5 * disk_budget.count_checkpoint_bytes(mine, named_of(mine)))
    with pytest.raises(RunFailure) as failure:
        train.run(mine, progress=False)
    assert "step-000004: the checkpoint could not be written (No space left on device)" in str(failure.value)
    assert str(failure.value).endswith("the previous checkpoint, step-000002, is intact")
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    small.room = 10**12
    train.run(mine, resume=True, progress=False)
    assert [data for data in _tensors(mine)] == [data for data in _tensors(plain)]


def test_a_log_without_room_costs_no_step(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is written most often, and so meets a full disk first: what was learned is saved before it ends."""
    mine = job("train.steps=9", "checkpoint.every=4")
    real = Run.log_event
    full = []

    def log_event(self: Run, event: str, **fields) -> None:
        if full and event == "step":
            raise OSError(28, "No space left on device", str(self.events_file))
        real(self, event, **fields)
        if event == "step" and fields["step"] == 5:
            full.append(1)

    monkeypatch.setattr(Run, "log_event", log_event)
    with pytest.raises(RunFailure, match="No space left on device.*MiB are free"):
        train.run(mine, progress=False)
    assert checkpoint.read_latest(run_of(mine) / "checkpoints")[0].step == 7
    full.clear()
    train.run(mine, resume=True, progress=False)
    assert checkpoint.read_latest(run_of(mine) / "checkpoints")[0].step == 9


def _tensors(job: Job) -> list[bytes]:
    found = checkpoint.read_latest(run_of(job) / "checkpoints")[0]
    return [found.adapter[name].view(-1).float().numpy().tobytes() for name in sorted(found.adapter)]
