"""The notebook for Colab and Kaggle: every cell runs, on the bundled base, as it is shipped but for its settings."""

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(ROOT / "notebooks/train.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "it is shipped without results"
    quick = {"PACKAGE": "", "WORK": str(tmp_path / "work"), "DEMO_STEPS": 2}
    for name, value in quick.items():
        cells[0].source, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", cells[0].source, flags=re.MULTILINE)
        assert count == 1, name
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert list((tmp_path / "work/runs/demo/export").glob("*.safetensors")) and "step 2 of 2" in text
    assert "rank" in "".join(output.get("text", "") for output in cells[-1].outputs), "the file was looked at"


def test_the_steps_for_your_images_are_commands_that_exist() -> None:
    """That cell is left out above, as it needs a base from the hub."""
    from typer.main import get_command

    from lora_fp8 import cli, families

    commands = get_command(cli.app).commands
    source = (ROOT / "notebooks/train.ipynb").read_text(encoding="utf-8")
    for command in re.findall(r'run\(\\"(\w+)\\"', source):
        assert command in commands, command
    options = {option for parameter in commands["new"].params for option in parameter.opts}
    assert set(re.findall(r"--[a-z]+", source.partition("about = ")[2].partition("]")[0])) <= options
    assert families.get("sdxl").example_base in source
