"""What the tests share: a random miniature of each family, a small picture folder, and jobs on them.

One thread everywhere: the number of threads changes the last bits of sums, and the tests compare bytes. The network is
off: whatever a test needs, it makes. torch and diffusers take seconds to import, so that what needs them here imports
them itself: tests of rooms without torch start at once.
"""

import ctypes
import gc
import hashlib
import os
import random
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hub_server import HubServer

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(TRANSFORMERS_VERBOSITY="error", DIFFUSERS_VERBOSITY="error")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each process that a test starts compiles all our files

import miniatures
import numpy
import pytest
import short_suite
from PIL import Image
from psutil import virtual_memory

from lora_fp8 import (
    config,
    families,
    settings,
)

PICTURES = (
    ("a.png", (48, 48), "red", "a cat, red, sitting, photo"),
    ("b.jpg", (96, 48), "green", "a dog, green, running, photo"),
    ("c.png", (48, 96), "blue", "a cat, blue, standing"),
    ("d.jpg", (64, 60), "orange", "a dog, orange, sitting, night"),
    ("e.png", (40, 44), "purple", "a bird, purple"),
)

JOB = """
name = "lora"
[quantize]
storage = "fp8"
[adapter]
rank = 4
alpha = 4.0
[dataset]
resolution = 48
bucket_step = 16
[train]
steps = 6
[optimizer]
lr = 1e-3
[memory]
gradient_checkpointing = false
[preview]
steps = 2
[checkpoint]
every = 2
[export]
verify = false
"""


ROOMS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("rooms.toml").read_text(encoding="utf-8"))
"""Test files by the room that they ask about."""

LONGEST = (
    "crash/test_kills.py",
    "crash/test_crash_points.py",
    "crash/test_power_loss.py",
    "test_clean_process.py",
    "test_processes.py",
    "ui/test_newcomer.py",
    "ui/test_try_it.py",
    "ui/test_page_frame.py",
    "test_resume.py",
    "test_remote.py",
    "test_exchange.py",
    "test_jobs_soak.py",
    "fuzz/test_fuzz.py",
    "test_prove_gpu.py",
    "test_loading.py",
    "test_compile.py",
    "test_demo.py",
    "test_journeys.py",
    "test_estimate.py",
    "test_wiring.py",
    "ui/test_form_path.py",
    "test_train.py",
    "test_verify.py",
    "test_page_canaries.py",
)
"""Files of minutes, which go first: handed out last, one of them would keep one core busy while the others wait."""


IN_MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""
FILES_GB, LEFT_GB = 4, 8
"""What the tests' files take of it at most, and what has to be free besides."""


def _place_files_in_memory() -> None:
    """Let pytest's temporary folders be in memory, where there is room for them.

    What is saved is synced to its disk. Waiting for that is a fifth of the time of the whole suite, and asks nothing:
    what a power loss leaves is asked by crash/, by the calls that were made.
    """
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not os.path.ismount(IN_MEMORY):
        return
    place, needed = os.statvfs(IN_MEMORY), (FILES_GB + LEFT_GB) << 30
    if not place.f_flag & os.ST_NOEXEC and min(place.f_bavail * place.f_frsize, virtual_memory().available) > needed:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(IN_MEMORY)


_place_files_in_memory()


def pytest_configure() -> None:
    """Let Ctrl-C interrupt the tests and what they start: a shell's `&` makes a suite in the background ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """The longest files first; what is left out, and what needs a CUDA card where there is none, is counted."""
    if hasattr(config, "workerinput"):  # several at a time
        here = Path(__file__).parent
        place = {here / name: position for position, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path, len(place)))
    if config.getoption("short"):
        items[:], left = short_suite.split(items)
        config.hook.pytest_deselected(items=left)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The queue and the cache of whoever runs the tests are not touched, not even by commands that tests start."""
    places = {"LORA_FP8_HOME": "queue", "XDG_CACHE_HOME": "cache"}
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in places.items():
            patch.setenv(name, str(tmp_path_factory.mktemp(folder)))
        yield


def _freeze() -> None:
    """Take all that is alive out of the garbage collection.

    The library collects whenever it frees an encoder: 0.3 s for all objects of torch, diffusers and transformers,
    nothing once they are frozen.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give back what `_freeze` took: at the end of the process Triton prints a list of all that it finds alive."""
    gc.unfreeze()


_frozen_modules = 0


@pytest.fixture(autouse=True)
def _imported() -> None:
    """Freeze again where a test has imported more: a family's classes, another library."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 20:
        _freeze()
        _frozen_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers with one thread, whichever tests ran before it in its process."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


@pytest.fixture(scope="session")
def some(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """some(values, turn, of=3): all values; with --short each third one, begun with another one in each turn.

    For tests that ask everything about everything: `make test` asks each value, and about each thing, not each pair.
    """
    is_short = request.config.getoption("short")

    def some(values: Sequence[Any], turn: int, of: int) -> list[Any]:
        return [value for number, value in enumerate(values) if not is_short or (number + turn) % of == 0]

    return some


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny("sd15"): folder of a random miniature of the family in the diffusers layout; made once."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            miniatures.save(family, root / family)
        return root / family

    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five captioned pictures of five sizes, PNG and JPEG, with something different in each. Not to be changed."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, (width, height), colour, caption in PICTURES:
        image = Image.new("RGB", (width, height), colour)
        image.paste("white", (width // 4, height // 3, width // 2, height // 2))
        image.paste("black", (width // 2, height // 2, width - 3, height - 5))
        image.save(folder / name)
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def controls(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control picture for each of `pictures`, of its size, but for one of another shape. Not to be changed."""
    folder = tmp_path_factory.mktemp("controls")
    for number, path in enumerate(sorted(pictures.glob("*.png")) + sorted(pictures.glob("*.jpg"))):
        size = (60, 30) if path.stem == "c" else Image.open(path).size
        noise = numpy.random.default_rng(number).integers(0, 255, (6, 8, 3), dtype=numpy.uint8)
        Image.fromarray(noise).resize(size, Image.Resampling.NEAREST).save(folder / f"{path.stem}.png")
    return folder


@pytest.fixture(scope="session")
def make_job(
    tiny: Callable[[str], Path], pictures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., settings.Job]:
    """make_job(folder, "train.steps=8", ..., family="flux"): a job with its run in folder/runs/lora.

    All jobs share one cache of encoded examples; `dataset.cache_dir=...` gives one its own.
    """
    cache = tmp_path_factory.mktemp("cache")
    from lora_fp8 import train  # noqa: F401 - everything that a run imports

    _freeze()

    def make(folder: Path, *overrides: str, family: str = "sd15") -> settings.Job:
        two = [layout for layout in ("diffusers", "kohya") if layout in families.get(family).layouts]
        given = (
            f"export.formats={two}",
            f"output_dir='{folder / 'runs'}'",
            f"dataset.cache_dir='{cache}'",
            f"dataset.folders=[{{path='{pictures}'}}]",
            f"model.family='{family}'",
            f"model.path='{tiny(family)}'",
        )
        return config.loads(JOB, [*given, *overrides])

    return make


@pytest.fixture
def job(make_job: Callable[..., settings.Job], tmp_path: Path) -> Callable[..., settings.Job]:
    """job("train.steps=8", ..., family="flux"): as make_job, in this test's own folder."""
    return lambda *overrides, family="sd15": make_job(tmp_path, *overrides, family=family)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """A worker that ran in this process has taken the signals: the next test gets them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is put away has to be fetched, as if the rest were elsewhere; -> the couriers that were made meanwhile."""
    import torch

    from lora_fp8.precision import stream

    away, made = set(), []
    real_put, courier = stream.copy_to_ram, stream.Courier

    def put_away(tensor: "torch.Tensor") -> "torch.Tensor":
        away.add((found := real_put(tensor)).data_ptr())
        return found

    monkeypatch.setattr(stream, "copy_to_ram", put_away)
    monkeypatch.setattr("lora_fp8.precision.frozen.copy_to_ram", put_away)
    monkeypatch.setattr(stream, "_is_at", lambda tensor, device: tensor.data_ptr() not in away)
    monkeypatch.setattr(stream, "_couriers", {})
    monkeypatch.setattr(stream, "Courier", lambda device: made.append(courier(device)) or made[-1])
    return made


@pytest.fixture
def hub() -> Iterator["HubServer"]:
    """A model hub on the loopback, empty; see `hub_server`. `hub.use(monkeypatch, tmp_path)` for this process."""
    from hub_server import HubServer

    with HubServer() as server:
        yield server


@pytest.fixture
def foreign_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of a model of full size beside a miniature's other parts, which are rightly refused otherwise."""
    monkeypatch.setattr("lora_fp8.families._checks.check_fit", lambda family: None)


@pytest.fixture
def no_privilege() -> Iterator[None]:
    """Root may read and write everything, which would leave nothing to test about rights: not in this test."""
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    kept, sets[0] = sets[0], sets[0] & ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    libc.capset(header, sets)
    yield
    sets[0] = kept
    libc.capset(header, sets)


@pytest.fixture
def small_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `editing.shrink`."""
    import editing

    editing.shrink(monkeypatch)


@pytest.fixture(scope="session")
def tree_hash() -> Callable[[Path], dict[str, str]]:
    """tree_hash(folder): SHA-256 of each file below it, by relative name."""

    def hashes(folder: Path) -> dict[str, str]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    return hashes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden files anew instead of comparing")
    parser.addoption("--short", action="store_true", help="leave out further cases of the same question (short.toml)")
    parser.addoption("--room", choices=sorted(ROOMS), help="only the tests of one room (tests/rooms.toml)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import nothing of other rooms."""
    room = config.getoption("room")
    if room is None or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    name = collection_path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
    return None if name in ROOMS[room] else True
