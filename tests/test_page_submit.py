"""What a browser or a program may make a training read and write: below the roots, whatever the config says."""

import re
import typing
from pathlib import Path

import pydantic
import pytest

from lora_fp8 import config, jobs, settings
from lora_fp8.errors import UserError
from webui import submission
from webui.context import Place

TEXT = """
name = "cat"
[model]
family = "sd15"
path = "demo"
[[dataset.folders]]
path = "{folder}"
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "data/cats").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/x.toml").write_text('name = "stolen"', encoding="utf-8")
    (tmp_path / "home").mkdir()
    return Place(tmp_path / "home", [tmp_path / "data"])


def test_paths_become_absolute_below_the_home(place: Place) -> None:
    job = submission.check_config(place, TEXT.format(folder=f"{place.given[0]}/cats"))
    assert (job.output_dir, job.dataset.cache_dir) == (str(place.home / "runs"), str(place.home / "cache"))
    assert job.model.path == "demo" and job.dataset.folders[0].path == str(place.given[0] / "cats")
    job = submission.check_config(place, TEXT.format(folder="datasets/pets"))
    assert job.dataset.folders[0].path == str(place.home / "datasets/pets")
    # So do masks that are no folder.
    for mask in ("alpha", "*_mask"):
        text = TEXT.format(folder="datasets/pets").replace('pets"', f'pets"\nmask = "{mask}"')
        assert submission.check_config(place, text).dataset.folders[0].mask == mask
    # A base of the hub stays as it is.
    text = TEXT.format(folder="datasets/pets").replace("demo", "stable-diffusion-v1-5/stable-diffusion-v1-5")
    assert submission.check_config(place, text).model.path == "stable-diffusion-v1-5/stable-diffusion-v1-5"


@pytest.mark.parametrize("key", settings.PATHS)
@pytest.mark.parametrize(
    "path", ["/etc", "{0}/secret", "../secret", "{0}/data-evil", "datasets/../../secret", "~/.ssh", "~nobody-here/x"]
)
def test_every_path_outside_is_refused(place: Place, key: str, path: str) -> None:
    import tomlkit

    data = tomlkit.parse(TEXT.format(folder="datasets/pets"))
    *parts, name = key.split(".")
    table = data
    for part in parts:
        table = table.setdefault(part, {})
        table = table[0] if part == "folders" else table
    given = path.format(place.home.parent)
    if key == "preview.controls":  # they belong to an editing model
        data["model"]["family"], table["prompts"], given = "flux_kontext", ["a cat"], [given]
    if key == "dataset.folders.control":
        data["model"]["family"] = "flux_kontext"
    table[name] = {"vae": given} if key == "model.files" else given
    with pytest.raises(UserError, match=rf"{name}.*(may not use this path|without \.\.)"):
        submission.check_config(place, tomlkit.dumps(data))
    with pytest.raises(UserError):
        submission.submit_training(place, tomlkit.dumps(data))
    assert jobs.Queue(place.home).list_jobs() == []


@pytest.mark.parametrize(
    "preset", ["{0}/secret/x.toml", "../../secret/x.toml", "/etc/x.toml", "../x", "~/x.toml", "~no/x.toml"]
)
def test_presets_outside_are_not_read(place: Place, preset: str) -> None:
    text = f'preset = ["{preset.format(place.home.parent)}"]\n' + TEXT.format(folder="datasets/pets")
    with pytest.raises(UserError, match="preset") as refused:
        submission.check_config(place, text)
    assert "stolen" not in str(refused.value)


def test_a_learning_rate_test_is_queued_with_the_draft_and_starts_no_training(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ensure_worker", lambda home: None)
    text = TEXT.format(folder=f"{place.given[0]}/cats") + "[optimizer]\nlr = 3e-4\n"
    ids = [submission.submit_rate_test(place, text) for _ in range(2)]
    (view,) = (view for view in jobs.Queue(place.home).list_jobs() if view.id == ids[0])
    assert (view.kind, view.name, view.command[:2]) == ("command", "lr-find cat", ("lr-find", "--"))
    file = Path(view.command[2])
    assert file.parent == place.home / "lr-find" and list(file.parent.iterdir()) == [file]
    job = config.load(file)
    assert job == submission.check_config(place, text) and job.optimizer.lr == 3e-4
    with pytest.raises(UserError, match=r"path.*may not use this path"):
        submission.submit_rate_test(place, TEXT.format(folder="/etc"))
    assert sorted(view.id for view in jobs.Queue(place.home).list_jobs()) == ids and not (place.home / "runs").exists()


def test_what_the_check_finds_is_told_as_always(place: Place) -> None:
    with pytest.raises(UserError, match="rnak"):
        submission.check_config(place, TEXT.format(folder="datasets/pets") + "[adapter]\nrnak = 4\n")


NO_PATHS = {
    "name": "a name",
    "preset": "looked at by itself, before it is read",
    "dataset.folders.trigger": "a word",
    "dataset.folders.prefix": "text of a caption",
    "dataset.folders.suffix": "text of a caption",
    "export.title": "text in the file",
    "export.author": "text in the file",
    "export.description": "text in the file",
    "export.license": "text in the file",
}
"""Free text that speaks of files or folders and is none."""


def strings(model: type[pydantic.BaseModel], prefix: str = ""):
    """(key, description) of each setting that takes free text."""
    for name, field in model.model_fields.items():
        key, parts = f"{prefix}{name}", [field.annotation]
        while parts:
            part = parts.pop()
            if isinstance(part, type) and issubclass(part, pydantic.BaseModel):
                yield from strings(part, f"{key}.")
            elif part is str:
                yield key, field.description or ""
            elif typing.get_origin(part) is not typing.Literal:
                parts += typing.get_args(part)


def test_no_setting_that_is_a_path_is_forgotten() -> None:
    """A new setting whose name or description speaks of a file or folder says what it names, or belongs above."""
    found = {
        key
        for key, description in strings(settings.Job)
        if re.search(r"path|dir|file|folder", key.rpartition(".")[2])
        or re.search(r"(?i)\b(folder|file)\b", description)
    }
    assert set(settings.PATHS) <= found
    assert found - set(settings.PATHS) - set(NO_PATHS) == set(), "is this a path? declare what it names"
