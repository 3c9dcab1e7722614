"""Images and other prompts that are asked for while a run trains: they are drawn, kept, and change nothing else."""

import json
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from lora_fp8 import train
from lora_fp8.config import apply_preview_changes
from lora_fp8.errors import Stopped, UserError, UserErrors
from lora_fp8.run import Run, preview_requests
from lora_fp8.stages import live_previews
from lora_fp8.tools import kit
from webui import setting_values
from webui.context import Place, Ui

SMALL = ("adapter.rank=16", "adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']", "train.steps=6")
DRAWING = ("preview.prompts=['a cat', 'a dog']", "preview.every=3", "preview.at_start=false")
RANDOM = ("dataset.caption_dropout=0.3", "dataset.flip=true", "adapter.dropout=0.1", "checkpoint.every=3")


def folder_of(job) -> Path:
    return Path(job.output_dir) / job.name


def run(job, *actions, resume=False):
    """Train; `actions` are (step, function), each called when that step has been logged."""

    def echo(event):
        for step, action in actions:
            if event["event"] == "step" and event["step"] == step:
                action()

    return train.run(job, resume=resume, progress=False, echo=echo)


def events(job, kind):
    return [event for event in Run.open(folder_of(job)).read_events() if event["event"] == kind]


def weights(job) -> dict[str, bytes]:
    """The bytes of the LoRA files and of the last checkpoint's tensors."""
    folder = folder_of(job)
    last = max((folder / "checkpoints").iterdir())
    files = [*(folder / "export").glob("*.safetensors"), *last.glob("*.safetensors")]
    return {path.name: path.read_bytes() for path in files}


def pixels(job, step, number=0) -> bytes:
    return Image.open(folder_of(job) / "samples" / f"step-{step:06d}-{number}.png").tobytes()


def sample(job, **changes):
    return lambda: preview_requests.request_sample(Run.open(folder_of(job)), changes)


def change(job, **changes):
    return lambda: preview_requests.write_changes(Run.open(folder_of(job)), changes)


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_the_bytes_are_those_of_an_undisturbed_run(make_job, tmp_path, family):
    """Also with text encoders that load anew in the middle, and with a stop and a resume between."""
    small = (*RANDOM, "train.steps=6", *(SMALL if family == "sd15" else ()))
    undisturbed, asked = (make_job(tmp_path / name, *small, *DRAWING, family=family) for name in ("a", "b"))
    run(undisturbed)
    stop = lambda: Run.open(folder_of(asked)).request("stop")  # noqa: E731
    new = change(asked, prompts=["a bird of the sea", "a house"], negative="fog", seed=5)
    with pytest.raises(Stopped):
        run(asked, (1, sample(asked, prompts=["never seen before"], seed=7)), (2, new), (3, stop))
    config = (folder_of(asked) / "config.toml").read_bytes()
    run(asked, (5, sample(asked, prompts=["another one"])), resume=True)
    assert weights(asked) == weights(undisturbed) and len(weights(asked)) >= 4
    assert (folder_of(asked) / "config.toml").read_bytes() == config
    assert tomllib.loads(config.decode())["preview"]["prompts"] == ["a cat", "a dog"]

    drawn = [(event["step"], event["prompts"], event["seed"]) for event in events(asked, "sample")]
    assert drawn == [(2, ["never seen before"], 7), (6, ["another one"], 5)]
    # Changed prompts are drawn at once, and by the resumed run too.
    told = [(event["step"], event["prompts"]) for event in events(asked, "preview")]
    assert told == [(3, ["a bird of the sea", "a house"]), (6, ["a bird of the sea", "a house"])]
    (changed,) = events(asked, "previews_changed")
    assert (changed["step"], changed["negative"], changed["seed"]) == (3, "fog", 5)
    assert {event["text"] for event in events(asked, "warning")} == {e["text"] for e in events(undisturbed, "warning")}
    assert preview_requests.list_samples(Run.open(folder_of(asked))) == []


def test_a_sample_is_the_preview_of_that_prompt_at_that_step(make_job, tmp_path):
    """Pixel by pixel what a run draws whose config has had the prompt, its negative prompt and its seed all along."""
    given = ("preview.prompts=['a cat', 'on the moon']", "preview.negative='fog'", "preview.seed=8", "preview.every=3")
    known = make_job(tmp_path / "a", *SMALL, *given, "preview.guidance=4.0", "preview.at_start=false")
    run(known)
    asked = make_job(tmp_path / "b", *SMALL)
    request = sample(asked, prompts=["on the moon"], negative="fog", seed=9, guidance=4.0)
    run(asked, (2, request), (2, request))
    assert [event["images"] for event in events(asked, "sample")] == [
        [f"samples/step-000003-now-{i}.png"] for i in (0, 1)
    ]
    now = [Image.open(folder_of(asked) / "samples" / f"step-000003-now-{i}.png").tobytes() for i in (0, 1)]
    assert now == [pixels(known, 3, 1)] * 2 != [pixels(known, 3, 0)] * 2


def test_prompts_may_come_to_a_run_without_any_and_be_taken_back(job):
    mine = job(*SMALL, "preview.every=2")
    run(mine, (1, change(mine, prompts=["a cat"])), (3, change(mine)))
    assert [(event["step"], event["prompts"]) for event in events(mine, "preview")] == [(2, ["a cat"])]
    assert ("previews", 0, 1) in [(event["stage"], event["done"], event["total"]) for event in events(mine, "progress")]
    assert not (folder_of(mine) / "previews.json").exists()


def test_what_cannot_be_drawn_is_a_warning_and_the_run_goes_on(job, monkeypatch):
    mine = job(*SMALL, *DRAWING, "preview.every=2")
    path = folder_of(mine)

    def ask():
        for content in ("not a JSON", "[]", '{"prompts": 5}', '{"prompts": ["a"], "steps": 0}', '{"every": 1}'):
            preview_requests.request_sample(Run.open(path), {}).write_text(content, encoding="utf-8")
        (path / "previews.json").write_text('{"prompts": ["a", 7], "width": 13}', encoding="utf-8")

    result = run(mine, (1, ask), (4, lambda: (path / "previews.json").write_text("{", encoding="utf-8")))
    told = [event["text"] for event in events(mine, "warning")]
    dropped = [text for text in told if text.startswith("a request for an image was ignored")]
    assert len(dropped) == 5 and sum("not a JSON object with a list of prompts" in text for text in dropped) == 4
    assert not any("\n" in text for text in told)
    assert dropped[3].endswith("at most 500, got 0"), "no option gave it"
    kept = [text for text in told if text.startswith("the previews are unchanged")]
    assert len(kept) == 2 and "preview.prompts" in kept[0] and "previews.json" in kept[1]
    assert [event["prompts"] for event in events(mine, "preview")] == [["a cat", "a dog"]] * 3
    assert len(result.files) == 2 and not list((path / "control").iterdir())


def test_prompts_that_cannot_be_encoded_leave_the_former_ones(job, monkeypatch):
    mine = job(*SMALL, *DRAWING)

    def fail(*arguments, **given):
        raise OSError(28, "No space left on device")

    def ask():
        monkeypatch.setattr(live_previews.Cache, "fill", fail)
        change(mine, prompts=["a word that is not in the cache"])()
        sample(mine, prompts=["nor is this"])()

    result = run(mine, (1, ask))
    told = [event["text"] for event in events(mine, "warning")]
    assert sum("could not be encoded: [Errno 28] No space left" in text for text in told) == 2
    assert [event["prompts"] for event in events(mine, "preview")] == [["a cat", "a dog"]] * 2 and result.files


def test_a_prompt_is_encoded_on_the_cpu_where_the_gpu_has_no_room(job, monkeypatch, tiny):
    family = live_previews.make_family(job(*SMALL))
    largest = max(family.count_encoder_bytes().values())
    for free, expected in ((None, "meta"), (2 * largest, "meta"), (largest, "cpu")):
        monkeypatch.setattr(live_previews.memory, "count_free_bytes", lambda device, free=free: free)
        family.device = live_previews.torch.device("meta")
        assert live_previews._choose_device(family).type == expected


def test_requests_are_refused_where_no_run_is_and_when_too_many_wait(tmp_path, job):
    (tmp_path / "notes").mkdir()
    for ask in (preview_requests.request_sample, preview_requests.write_changes):
        with pytest.raises(UserError, match="not a run folder"):
            ask(Run(tmp_path / "notes"), {"prompts": ["a"]})
    assert list((tmp_path / "notes").iterdir()) == []
    created = Run.create(tmp_path / "run", 'name = "x"\n')
    names = [preview_requests.request_sample(created, {"prompts": [str(i)]}).name for i in range(100)]
    assert [path.name for path in preview_requests.list_samples(created)] == names == sorted(names)
    with pytest.raises(UserError, match="100 images are already waiting"):
        preview_requests.request_sample(created, {"prompts": ["more"]})
    assert [request["prompts"] for request in preview_requests.take_samples(created)] == [[str(i)] for i in range(100)]
    preview_requests.request_sample(created, {"prompts": ["never read"]})
    created.close()
    Run.create(tmp_path / "run", 'name = "x"\n', resume=True).close()
    assert preview_requests.list_samples(created) == []


def test_a_kit_says_with_what_its_samples_were_drawn(job):
    mine = job(*SMALL, *DRAWING, "preview.negative='text'")
    run(mine, (1, change(mine, prompts=["a bird"], negative="fog", seed=7, steps=3, guidance=2.5)))
    (picture,) = kit.collect_from_run(folder_of(mine))[2]
    drawn_with = (picture.prompt, picture.negative, picture.seed, picture.steps, picture.guidance)
    assert drawn_with == ("a bird", "fog", 7, 3, 2.5)
    log = folder_of(mine) / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    for line in lines:  # of an earlier version, which logged none of these
        for name in ("negative", "seed", "steps", "guidance"):
            line.pop(name, None)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (picture,) = kit.collect_from_run(folder_of(mine))[2]
    assert (picture.negative, picture.seed, picture.steps, picture.guidance) == ("text", 42, 2, None)


def test_on_the_page_what_is_wrong_with_prompts_bears_the_settings_name(job, tmp_path):
    """The keys of a config's lines, such as preview.prompts.0, mean nothing to who types into a field."""
    with pytest.raises(UserErrors) as raised:
        apply_preview_changes(job(), {"prompts": ["a cat --s many", "a dog --x 3"], "seed": -1})
    lines = [setting_values.describe_problem(Ui("zh-CN", Place(tmp_path, [])), line) for line in raised.value.problems]
    assert len(lines) == 3 and [line.partition("：")[0] for line in lines] == ["预览种子", "预览提示词", "预览提示词"]
    assert "many" in lines[1] and "--x" in lines[2] and not any("preview." in line for line in lines)
