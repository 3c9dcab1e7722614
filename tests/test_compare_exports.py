"""scripts/compare_exports.py: equal code gives equal bytes, and a small change of a number is found and named."""

import importlib.util
import json
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save

ROOT = Path(__file__).resolve().parent.parent
JOB = "z_image"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_exports", ROOT / "scripts" / "compare_exports.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_exports"] = module  # where dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_the_same_code_gives_the_same_bytes_and_another_learning_rate_does_not(script, tmp_path, capsys):
    """The planted change: every learning rate is 1e-9 larger, in a copy of the package."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "lora_fp8", copy / "lora_fp8", ignore=shutil.ignore_patterns("__pycache__", "base"))
    for name in ("presets", "configs"):
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "train_lora.py", copy)
    call = "def compute_learning_rate("
    (planted,) = (path for path in (copy / "lora_fp8").rglob("*.py") if call in path.read_text(encoding="utf-8"))
    larger = f"{call}*values):\n    return _compute(*values) + 1e-9\n\n\ndef _compute("
    planted.write_text(planted.read_text(encoding="utf-8").replace(call, larger), encoding="utf-8")

    kept = tmp_path / "kept"
    assert script.main([str(ROOT), str(copy), "--jobs", JOB, "--keep", str(kept)]) == 1
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(JOB)]
    results = {file: text for _, file, text in rows}
    exported = next(text for file, text in results.items() if file.startswith("export/"))
    assert "differs: " in exported and " tensors, first " in exported and "largest difference " in exported
    assert results["checkpoint"].startswith("differs: adapter.safetensors: ")

    again = script.Side("NEW", ROOT, tmp_path / "again")
    script.check_import(again)
    script.write_config(JOB, again, kept / "inputs", 0)
    assert script.train_job(JOB, (again,)) == []
    old = script.get_run_folder(JOB, script.Side("OLD", ROOT, kept / "old"))
    same = script.compare_runs(JOB, old, script.get_run_folder(JOB, again))
    assert len(same) >= 3 and all(row.equal for row in same), same


def written(path: Path, metadata: dict[str, str], **tensors: torch.Tensor) -> Path:
    """Write a safetensors file; the library itself would write the metadata in another order each time."""
    data = save(tensors or {"a": torch.zeros(2), "b": torch.zeros(2)})
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps({"__metadata__": metadata, **json.loads(data[8:end])}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])
    return path


@pytest.mark.parametrize(
    "metadata, equal, text",
    [
        ({"lora_fp8_version": "1", "ss_seed": "0"}, True, "same bytes"),
        ({"lora_fp8_version": "2", "ss_seed": "0"}, True, "same bytes but for metadata lora_fp8_version"),
        ({"lora_fp8_version": "1", "ss_seed": "1"}, False, "differs: metadata ss_seed (OLD '0', NEW '1')"),
        ({"lora_fp8_version": "2"}, False, "differs: metadata ss_seed (OLD '0', NEW none)"),
        # the hash moves with the header's length, which only a version may change
        ({"lora_fp8_version": "1", "ss_seed": "0", "sshs_legacy_hash": "x"}, False, "differs: metadata sshs_legacy"),
        ({"lora_fp8_version": "2", "ss_seed": "0", "sshs_legacy_hash": "x"}, True, "same bytes but for metadata lora_"),
    ],
)
def test_only_the_version_may_differ_in_metadata(script, tmp_path, metadata, equal, text):
    old = written(tmp_path / "old", {"lora_fp8_version": "1", "ss_seed": "0"})
    found = script.compare_files(old, written(tmp_path / "new", metadata))
    assert found[0] is equal and found[1].startswith(text), found
    if "ss_seed" in text:
        assert script.compare_files(old, tmp_path / "new", ("ss_seed",))[0]


def test_the_largest_difference_is_named(script, tmp_path):
    old = written(tmp_path / "old", {}, a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(3))
    new = written(tmp_path / "new", {}, a=torch.zeros(3), b=torch.full((3,), 0.25), c=torch.full((3,), -2.0))
    equal, text = script.compare_files(old, new)
    assert not equal and "2 of 3 tensors, first b (by 0.25), largest difference 2 in c" in text
    wide = written(tmp_path / "wide", {}, a=torch.zeros(4), b=torch.zeros(3), c=torch.zeros(3))
    assert "a is F32 [3] in OLD, F32 [4] in NEW" in script.compare_files(old, wide)[1]
    fewer = written(tmp_path / "fewer", {}, a=torch.zeros(3))
    assert "2 tensors are in one file only, first b (in OLD)" in script.compare_files(old, fewer)[1]
    assert script.compare_files(old, tmp_path / "none") == (False, "differs: not written by NEW")


def test_a_file_a_loss_or_a_checkpoint_that_is_missing_is_a_difference(script, tmp_path):
    for side in ("old", "new"):
        (tmp_path / side / "export").mkdir(parents=True)
        events = [
            {"event": "start"},
            {"event": "step", "step": 1, "loss": 0.5},
            {"event": "step", "step": 2, "loss": 0.25},
        ]
        (tmp_path / side / "events.jsonl").write_text("\n".join(map(json.dumps, events)), encoding="utf-8")
    old, new = tmp_path / "old", tmp_path / "new"
    assert [row.equal for row in script.compare_runs("job", old, new)] == [False], "nothing was exported"
    written(old / "export" / "a.safetensors", {})
    written(new / "export" / "b.safetensors", {})
    rows = {row.file: row for row in script.compare_runs("job", old, new)}
    assert {file: row.equal for file, row in rows.items()} == {
        "export/a.safetensors": False,
        "export/b.safetensors": False,
        "loss": True,
        "checkpoint": False,
    }
    with open(new / "events.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"event": "step", "step": 3, "loss": 0.1}')
    assert script.compare_losses(old / "events.jsonl", new / "events.jsonl")[0] is False


def test_settings_of_the_new_version_are_translated(script, tmp_path):
    changes = [
        "dataset.cache_dir=",
        "cache.folder='{side}/cache'",
        "flux:train.steps=3",
        "dataset.folders.0.weight=2.0",
    ]
    new = script.Side("NEW", ROOT, tmp_path, tuple(map(script.parse_change, changes)))
    for job in ("flux", "wan"):
        script.write_config(job, new, tmp_path / "inputs", 0)
    flux, wan = (script.tomllib.loads((tmp_path / f"{job}.toml").read_text()) for job in ("flux", "wan"))
    assert flux["cache"]["folder"] == f"{tmp_path}/cache" and "cache_dir" not in flux["dataset"]
    assert (flux["train"]["steps"], wan["train"]["steps"]) == (3, 6)
    assert flux["dataset"]["folders"] == [{"path": f"{tmp_path}/inputs/data/images", "weight": 2.0}]


def test_a_revision_gets_a_worktree_of_its_own_that_goes_again(script, tmp_path):
    with script.checkout_of("HEAD", tmp_path / "tree") as folder:
        assert (folder / "train_lora.py").is_file()
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize(
    "arguments", [["no-such-revision", "."], [".", ".", "--steps", "5"], [".", ".", "--new-set", "x"]]
)
def test_wrong_input_is_told_apart_from_a_difference(script, monkeypatch, capsys, arguments):
    monkeypatch.chdir(ROOT)
    assert script.main(arguments) == 2
    assert capsys.readouterr().err.startswith("compare_exports: ")
