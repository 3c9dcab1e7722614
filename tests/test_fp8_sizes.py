"""What the documents say FP8 storage saves, against a count on the meta device."""

import importlib.util
from pathlib import Path

import pytest

from lora_fp8 import families

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("fp8_sizes", ROOT / "scripts/fp8_sizes.py")
assert spec and spec.loader
fp8_sizes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fp8_sizes)


@pytest.mark.parametrize(
    ("argument", "code", "told"), [("--help", 0, "default: all"), ("dall_e", 2, "dall_e: unknown")]
)
def test_the_script_takes_names_of_families_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, code: int, told: str
) -> None:
    monkeypatch.setattr("sys.argv", ["fp8_sizes.py", argument])
    with pytest.raises(SystemExit) as stopped:
        fp8_sizes.main()
    assert stopped.value.code == code and told in "".join(capsys.readouterr())


def table(name: str) -> list[str]:
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| `") and line.split("`")[1] in families.list_families()]


def test_both_languages_have_all_families() -> None:
    english = table("fp8.md")
    assert english == table("fp8.zh-CN.md")
    assert [line.split("`")[1] for line in english] == sorted(families.list_families())


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "sana", "flux", "z_image"])
def test_the_figures_are_those_of_the_layers(name: str) -> None:
    """One of each make: UNets, and transformers with and without convolutions."""
    row = fp8_sizes.format_row(name)
    assert row in table("fp8.md")
    saved = row.split("|")[4].strip()
    if name in ("sd15", "sdxl"):
        for page in ("README.md", "README.zh-CN.md"):
            assert saved in (ROOT / page).read_text(encoding="utf-8")
