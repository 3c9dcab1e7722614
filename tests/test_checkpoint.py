"""Checkpoints are whole or absent: no damage, full disk or crash at any point may cost more than the newest save."""

import errno
import hashlib
import json
import os
import resource
import shutil

import pytest
import torch

from lora_fp8 import config
from lora_fp8.common import writing
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.training import checkpoint

FILES = ("adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def content(step: int) -> tuple[dict, dict, dict]:
    adapter = {"b.lora_A.weight": torch.full((3, 5), float(step), dtype=torch.bfloat16)}
    adapter["b.lora_B.weight"] = torch.arange(15.0).view(5, 3).T + step  # not contiguous
    optimizer = {"b.lora_A.weight/state1": torch.arange(4096, dtype=torch.uint8) + step, "qmap1": torch.rand(256)}
    state = {"step": step, "optimizer": {"steps": {"b": step}}, "pinned": {"seed": 3}, "settings": {}}
    return adapter, optimizer, state | {"base": "b", "data": "d"}


def save(folder, step, keep=2):
    return checkpoint.save(folder, *content(step), keep=keep)[0]


@pytest.fixture
def two(tmp_path):
    """A folder with the whole bundles of steps 2 and 4."""
    for step in (2, 4):
        save(tmp_path, step)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_is_exact_with_dtype_shape_and_state(two):
    found, skipped = checkpoint.read_latest(two)
    adapter, optimizer, state = content(4)
    assert found.step == 4 and skipped == [] and found.path == two / "step-000004"
    assert found.state == {"schema": 1, **state}
    assert found.adapter.keys() == adapter.keys() and found.optimizer.keys() == optimizer.keys()
    for name, tensor in adapter.items():
        assert found.adapter[name].dtype == tensor.dtype
        assert torch.equal(found.adapter[name], tensor)
    assert torch.equal(found.optimizer["b.lora_A.weight/state1"], optimizer["b.lora_A.weight/state1"])


def test_the_newest_is_by_number_not_by_name(tmp_path):
    for step in (999_999, 1_000_000):  # as text, "step-1000000" comes before "step-999999"
        save(tmp_path, step)
    assert checkpoint.read_latest(tmp_path)[0].step == 1_000_000


def test_no_checkpoint_at_all_is_not_an_error(tmp_path):
    assert checkpoint.read_latest(tmp_path) == (None, [])
    assert checkpoint.read_latest(tmp_path / "absent") == (None, [])


def test_the_same_content_gives_the_same_bytes(tmp_path, tree_hash):
    content_once = content(2)
    hashes = [tree_hash(checkpoint.save(tmp_path / name, *content_once, keep=2)[0]) for name in "ab"]
    assert hashes[0] == hashes[1]


# -- damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def remove(path):
    path.unlink()


def become_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, halve, empty, remove, become_a_folder])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_bundle_is_passed_over_and_told(two, name, damage):
    damage(two / "step-000004" / name)
    found, skipped = checkpoint.read_latest(two)
    assert found.step == 2 and torch.equal(found.adapter["b.lora_A.weight"], content(2)[0]["b.lora_A.weight"])
    assert len(skipped) == 1 and "\n" not in skipped[0] and skipped[0].startswith("step-000004 was skipped: ")
    if damage is remove:
        assert f"{name} is missing" in skipped[0]
    assert (two / "step-000004").exists()  # evidence is not removed by reading
    with pytest.raises(RunFailure, match="step-000004 is incomplete"):
        checkpoint.read(two / "step-000004")


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"adapter.safetensors": 3}', '"x"', "{"])
def test_a_manifest_of_another_shape_counts_as_broken(two, text):
    (two / "step-000004" / "manifest.json").write_text(text, encoding="utf-8")
    found, skipped = checkpoint.read_latest(two)
    assert found.step == 2 and len(skipped) == 1


@pytest.mark.parametrize("name", FILES[:3])
def test_each_file_of_another_bundle_is_noticed(two, name):
    """Files that are whole but of another step: only a hash of all of them together can tell."""
    shutil.copy(two / "step-000002" / name, two / "step-000004" / name)
    assert checkpoint.read_latest(two)[0].step == 2


def test_what_is_being_saved_is_neither_read_nor_cleared(two):
    """`lora-fp8 export` reads while a run trains. What a killed one left is cleared by `Run.create`, under the lock."""
    leftovers = [".tmp-step-000002-old", ".tmp-step-000006-123"]
    for leftover in leftovers:
        shutil.copytree(two / "step-000004", two / leftover)
    found, skipped = checkpoint.read_latest(two)
    assert found.step == 4 and skipped == [] and names(two) == [*leftovers, "step-000002", "step-000004"]


def test_other_names_are_left_alone(two):
    (two / "step-000009.bak").mkdir()
    (two / "notes.txt").write_text("mine", encoding="utf-8")
    (two / "step-final").mkdir()
    save(two, 6)
    assert checkpoint.read_latest(two)[0].step == 6
    assert {"step-000009.bak", "notes.txt", "step-final"} <= set(names(two))


def test_none_whole_is_a_failure_and_nothing_is_overwritten(two, tree_hash):
    flip(two / "step-000004" / "adapter.safetensors")
    remove(two / "step-000002" / "manifest.json")
    before = tree_hash(two)
    with pytest.raises(RunFailure) as failure:
        checkpoint.read_latest(two)
    text = str(failure.value)
    assert "checkpoints are incomplete" in text and "step-000004" in text and "step-000002" in text and "\n" not in text
    assert tree_hash(two) == before


def test_another_schema_is_refused(two):
    path = two / "step-000004"
    state = json.loads((path / "state.json").read_text(encoding="utf-8")) | {"schema": 99}
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["state.json"] = hashlib.sha256((path / "state.json").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(RunFailure, match="schema 99"):
        checkpoint.read_latest(two)


def test_a_step_that_is_not_there_names_those_that_are(two):
    with pytest.raises(UserError, match="step-000002, step-000004"):
        checkpoint.read(two / "step-000003")
    assert checkpoint.read(two / "step-000002").step == 2


# -- pruning


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_the_newest_are_kept(tmp_path, keep):
    for step in range(1, 8):
        save(tmp_path, step, keep)
    assert names(tmp_path) == [f"step-{step:06d}" for step in range(8 - keep, 8)]


def test_a_broken_one_never_counts_as_kept(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step, keep=9)
    flip(tmp_path / "step-000006" / "optimizer.safetensors")
    save(tmp_path, 8, keep=2)
    # Two whole ones are left, and the broken one in between took nobody's place.
    assert names(tmp_path) == ["step-000004", "step-000006", "step-000008"]
    save(tmp_path, 10, keep=2)
    assert names(tmp_path) == ["step-000008", "step-000010"]


def test_a_bundle_of_the_same_step_is_replaced(two):
    flip(two / "step-000004" / "adapter.safetensors")  # a resumed run gets to step 4 again
    save(two, 4)
    assert checkpoint.read_latest(two)[0].step == 4 and names(two) == ["step-000002", "step-000004"]


# -- what somebody else put into a bundle


NOTES = ("notes.txt", "backup/state.json", "state.json.bak")
TOLD = (
    "step-000002 was removed, except for files that this program did not write (3 entries: backup, notes.txt, "
    "state.json.bak)"
)


def put_notes(folder):
    for name in NOTES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine", encoding="utf-8")


def left_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_pruning_leaves_what_somebody_else_put_into_a_bundle_and_names_it(two):
    put_notes(two / "step-000002")
    put_notes(two / "step-000004")
    assert checkpoint.save(two, *content(6), keep=2)[1] == [TOLD]
    assert left_in(two / "step-000002") == sorted(NOTES)
    assert sorted(left_in(two / "step-000004")) == sorted((*NOTES, *FILES))
    assert checkpoint.save(two, *content(8), keep=3)[1] == [], "told once"
    # What is left is no checkpoint, damaged or not: nothing looks into it, and training may begin again beside it.
    assert checkpoint.count_bundles(two) == 3 and checkpoint.read_latest(two)[0].step == 8
    for step in (4, 6, 8):
        shutil.rmtree(two / f"step-{step:06d}")
    assert checkpoint.read_latest(two) == (None, []) and checkpoint.find_newest(two) is None
    save(two, 2)
    assert checkpoint.read_latest(two)[0].step == 2
    assert left_in(two / "step-000002") == sorted((*NOTES, *FILES))
    assert not any(name.startswith(".tmp") for name in os.listdir(two))


def test_a_link_in_a_bundle_is_left_and_its_target_too(two, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    put_notes(outside)
    state = two / "step-000002/state.json"
    state.unlink()
    state.symlink_to(outside / "notes.txt")
    (two / "step-000002/mine").symlink_to(outside)
    (line,) = checkpoint.save(two, *content(6), keep=2)[1]
    assert line.endswith("(2 entries: mine, state.json)") and state.is_symlink() and left_in(outside) == sorted(NOTES)


def test_making_room_on_a_full_disk_leaves_notes_too(two, monkeypatch):
    put_notes(two / "step-000002")
    real = writing.write_synced

    def full(path):
        if (two / "step-000002/manifest.json").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    lines = checkpoint.save(two, *content(6), keep=2)[1]
    assert lines == ["the disk is full: step-000002 was removed before step-000006 was saved", TOLD]
    assert left_in(two / "step-000002") == sorted(NOTES) and checkpoint.read_latest(two)[0].step == 6


def test_a_file_that_comes_while_a_bundle_is_removed_is_left(two, monkeypatch):
    real = os.rename

    def rename(source, target):
        real(source, target)
        if os.path.basename(target) == ".tmp-step-000002-old":
            put_notes(two / os.path.basename(target))

    monkeypatch.setattr(os, "rename", rename)
    save(two, 6)
    monkeypatch.undo()
    save(two, 8)
    shutil.copytree(two / "step-000008", two / "step-000002")
    save(two, 10)  # the same step is removed once more
    assert left_in(two / ".tmp-step-000002-old") == sorted(NOTES)
    assert names(two) == [".tmp-step-000002-old", "step-000008", "step-000010"]


# -- the disk refuses


@pytest.mark.parametrize("limit", [0, 40, 700, 3000])
def test_a_full_disk_is_one_line_and_earlier_bundles_stay(two, tree_hash, limit):
    """RLIMIT_FSIZE makes the kernel refuse (EFBIG), in a child because a process cannot raise its limit again."""
    before = tree_hash(two)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        message = "saved"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            save(two, 6)
        except RunFailure as failure:
            message = str(failure)
        except BaseException as error:
            message = f"another exception: {error!r}"
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    assert str(two / "step-000006") in text and "could not be written (File too large)" in text
    assert "MiB are free" in text and text.endswith("the previous checkpoint, step-000004, is intact")
    assert "\n" not in text
    assert tree_hash(two) == before and names(two) == ["step-000002", "step-000004"]
    save(two, 6)  # and when there is room again, it goes on
    assert checkpoint.read_latest(two)[0].step == 6


def test_no_space_left_is_named(two, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailure, match="No space left on device"):
        save(two, 6)
    with pytest.raises(RunFailure, match="there is no earlier checkpoint$"):  # of the very first nothing is intact
        save(two / "new", 2)
    monkeypatch.undo()
    assert checkpoint.read_latest(two)[0].step == 4


def test_what_reads_back_differently_is_not_acknowledged(two, monkeypatch):
    """A disk that takes everything and returns something else: told, and older bundles are not pruned."""
    real = writing.write_synced

    def rotten(path):
        return real(path.with_name("elsewhere")) if path.name == "adapter.safetensors" else real(path)

    monkeypatch.setattr(checkpoint, "write_synced", rotten)
    with pytest.raises(RunFailure, match="differs from what was written"):
        save(two, 6)
    monkeypatch.undo()
    found, skipped = checkpoint.read_latest(two)
    assert found.step == 4 and len(skipped) == 1 and (two / "step-000002").exists()


# -- a crash at every point


class Crash(BaseException):
    """Not an Exception: like a kill, it must get past every handler that means to go on."""


class CrashingDisk:
    """Counts the calls that change the disk and raises at the n-th, before or after it is done."""

    def __init__(self, monkeypatch, at: int, afterwards: bool, error: BaseException):
        self.count, self.at, self.afterwards, self.error, self.dead = 0, at, afterwards, error, False
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted, but no power is cut here: save the time
        for name in ("mkdir", "fsync", "rename", "replace", "rmdir", "unlink"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))
        real = writing.write_synced

        def write_synced(path):
            return Writing(self, self.wrap(real)(path))

        monkeypatch.setattr(checkpoint, "write_synced", write_synced)

    def wrap(self, call):
        def counted(*args, **kwargs):
            if self.dead:  # after a kill nothing runs any more, clean-up neither
                raise self.error
            self.count += 1
            mine = self.count == self.at
            if mine and not self.afterwards:
                self.die()
            result = call(*args, **kwargs)
            if mine:
                self.die()
            return result

        return counted

    def die(self):
        self.dead = isinstance(self.error, Crash)
        raise self.error


class Writing:
    """A file whose write is cut in the middle when it is the fatal one."""

    def __init__(self, disk, context):
        self.disk, self.context = disk, context

    def __enter__(self):
        self.file = self.context.__enter__()
        return self

    def __exit__(self, *error):
        return self.context.__exit__(*error)

    def write(self, data):
        self.disk.wrap(lambda: self.file.write(data[: len(data) // 2]))()
        self.disk.wrap(lambda: self.file.write(data[len(data) // 2 :]))()


@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("again", [False, True], ids=["new step", "broken step"])
@pytest.mark.parametrize("error", [Crash(), OSError(errno.EIO, "Input/output error")], ids=["crash", "EIO"])
@pytest.mark.parametrize("noted", [False, True], ids=["ours alone", "notes"])
def test_a_crash_at_every_call_leaves_the_old_or_the_new(tmp_path, afterwards, again, error, noted):
    """`again`: a broken bundle of that very step is in the way, as after a damaged newest checkpoint."""
    points = 0
    outcomes = set()
    for step in (2, 4):
        save(tmp_path / "start", step)
    if again:
        shutil.copytree(tmp_path / "start" / "step-000004", tmp_path / "start" / "step-000006")
        remove(tmp_path / "start" / "step-000006" / "state.json")
    noted_steps = [path.name for path in (tmp_path / "start").iterdir() if noted]
    for name in noted_steps:
        put_notes(tmp_path / "start" / name)
    for at in range(1, 500):
        folder = shutil.copytree(tmp_path / "start", tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch:
            disk = CrashingDisk(patch, at, afterwards, error)
            try:
                save(folder, 6)
                acknowledged = True
            except (Crash, RunFailure, OSError) as caught:
                acknowledged = False
                assert isinstance(caught, Crash | RunFailure), f"call {at}: {caught!r} is not told in words"
        if disk.count < at:
            assert acknowledged
            break
        points += 1
        found, _ = checkpoint.read_latest(folder)
        outcomes.add(found.step)
        assert found.step in (4, 6), f"call {at}: {found.step}"
        assert found.step == 6 or not acknowledged, f"call {at}: acknowledged and lost"
        assert torch.equal(found.adapter["b.lora_A.weight"], content(found.step)[0]["b.lora_A.weight"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)
            save(folder, 8)  # and the next run goes on from there
        assert checkpoint.read_latest(folder)[0].step == 8
        assert all({*NOTES} <= {*left_in(folder / name)} for name in noted_steps)
    assert points >= 20 and outcomes == {4, 6}


def test_everything_is_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    """The order that a power cut demands: files, then their folder, then the name, then the parent."""
    order = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return fsync(descriptor)

    def recorded_rename(source, target):
        order.append("-> " + os.path.basename(target))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path / "checkpoints", 2)
    staged = f".tmp-step-000002-{os.getpid()}"
    assert order == [*FILES, staged, "-> step-000002", "checkpoints"]


def test_tables_of_layers_are_compared_with_their_order_and_with_the_lists_of_older_bundles():
    least = "model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}\n"

    def remembered(*given):
        state = checkpoint.describe_job(config.loads(least, given), "base", "data")
        return json.loads(json.dumps(state, sort_keys=True))  # as a bundle keeps it

    ranks, rates = "adapter.ranks={b = 8, a = 4}", "optimizer.lrs={a = 0.5, b = 2}"
    storage = "quantize.override={to_q = 'int8 1x128'}"
    now = remembered(ranks, rates, storage)
    assert checkpoint.compare(now, remembered(ranks, rates, storage)) == ([], [])
    old = json.loads(json.dumps(now))
    old["pinned"]["adapter.ranks"] = ["b=8", "a = 4"]  # as the user had written them
    old["settings"] |= {"optimizer.lrs": ["a = .5", "b = 2.0"], "quantize.override": ["to_q =  int8 1x128"]}
    assert checkpoint.compare(old, now) == ([], [])
    refused, told = checkpoint.compare(old, remembered("adapter.ranks={a = 4, b = 8}", rates, storage))
    assert refused == ["adapter.ranks: was ['b = 8', 'a = 4'], is ['a = 4', 'b = 8']"] and not told
    assert checkpoint.compare(old, remembered(ranks, storage))[1] == [
        "changed since the checkpoint and used from now on: optimizer.lrs: ['a = 0.5', 'b = 2'] -> []"
    ]
    del old["settings"]["optimizer.lrs"]  # a bundle from before the setting
    assert checkpoint.compare(old, remembered(ranks, storage)) == ([], [])


def test_convolutions_of_older_bundles_were_not_quantized():
    """Without the setting, their base had the convolutions of its file; a resumed run is told that this changes."""
    least = "model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}\n"
    now = checkpoint.describe_job(config.loads(least), base="b", data="d")
    before = json.loads(json.dumps(now))
    del before["settings"]["quantize.convolutions"]
    refused, warnings = checkpoint.compare(before, now)
    assert not refused
    (line,) = warnings
    assert "quantize.convolutions: bf16 -> auto" in line
    same = checkpoint.describe_job(config.loads(least, ["quantize.convolutions=bf16"]), base="b", data="d")
    assert checkpoint.compare(before, same) == ([], [])
