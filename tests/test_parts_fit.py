"""The parts of a base are held against each other by their configs: one number changed in one of them is one sentence,
before anything is loaded."""

import json
import shutil

import pytest
import torch

from lora_fp8 import cli, families, settings
from lora_fp8.errors import UserError, UserErrors


def made(name, folder):
    section = settings.Model(family=name, path=str(folder))
    return families.get(name)(section, device="cpu", dtype=torch.float32)


def change(path, entry, by):
    """Change a number of a config, wherever it stands; -> what the file was."""
    before = path.read_text()
    told = json.loads(before)
    entry, _, index = entry.partition(".")
    holder = told if entry in told else told["text_config"]
    if index:
        holder[entry][int(index)] += by
    else:
        holder[entry] += by
    path.write_text(json.dumps(told))
    return before


@pytest.mark.parametrize("name", families.list_families())
def test_a_number_that_does_not_fit_is_one_sentence(tiny, tmp_path, name):
    folder = shutil.copytree(tiny(name), tmp_path / name)
    cls = families.get(name)
    made(name, folder)
    vae = json.loads((folder / "vae/config.json").read_text())
    places = {f"vae.{'z_dim' if 'z_dim' in vae else 'latent_channels'}": 1}
    for entry, terms in cls.text_widths.items():
        sources = [term.rpartition(" * ")[2] for term in terms.split(" + ")]
        own = entry if entry.partition(".")[0] in cls.text_parts else f"{cls.denoiser_name}.{entry}"
        places |= dict.fromkeys([own, *sources], 1)
    for encoder in cls.text_parts:
        if "tokenizer" in encoder and (folder / encoder / "tokenizer.json").is_file():
            reader = encoder.replace("tokenizer", "text_encoder")
            path = folder / reader / "config.json"
            if path.is_file() and '"vocab_size"' in path.read_text():
                places[f"{reader}.vocab_size"] = -400
    assert len(places) > 2
    for place, by in places.items():
        part, _, entry = place.partition(".")
        path = folder / part / "config.json"
        before = change(path, entry, by)
        with pytest.raises(UserError) as caught:
            made(name, folder)
        path.write_text(before)
        problems = getattr(caught.value, "problems", [str(caught.value)])
        assert len(problems) >= 1 and all("\n" not in text and len(text) < 500 for text in problems), place
        assert any(entry.partition(".")[0] in text and "belong to different models" in text for text in problems), (
            place,
            problems,
        )
    made(name, folder)  # nothing was left changed


@pytest.mark.parametrize(
    ("name", "scheduler"), [("flux", "DDIMScheduler"), ("sdxl", "FlowMatchEulerDiscreteScheduler")]
)
def test_a_scheduler_of_the_other_kind_is_told_with_the_rest(tiny, tmp_path, name, scheduler):
    folder = shutil.copytree(tiny(name), tmp_path / name)
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({"_class_name": scheduler, "num_train_timesteps": 1000}))
    change(folder / "vae/config.json", "latent_channels", 12)
    with pytest.raises(UserErrors) as caught:
        made(name, folder)
    latents, sampler = caught.value.problems
    assert "latent_channels = 16" in latents and scheduler in sampler


@pytest.mark.parametrize("command", ["check", "estimate"])
def test_commands_end_with_the_sentence(tiny, tmp_path, pictures, monkeypatch, capsys, command):
    """`check` said all right, and `estimate` ended with torch's traceback."""
    folder = shutil.copytree(tiny("flux"), tmp_path / "flux")
    change(folder / "vae/config.json", "latent_channels", 12)
    toml = tmp_path / "job.toml"
    toml.write_text(
        f'name = "x"\n[model]\nfamily = "flux"\npath = "{folder}"\n[dataset]\nfolders = [{{path = "{pictures}"}}]\n'
    )
    monkeypatch.setattr("sys.argv", ["lora-fp8", command, str(toml)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert ended.value.code == 2 and "belong to different models" in told.err and "Traceback" not in told.err
