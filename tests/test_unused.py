"""Every setting always has an effect, or its declaration says when; where it has none, a job that sets it is warned."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from lora_fp8 import config, families
from lora_fp8 import config as unused
from lora_fp8.settings import FACTS, Except, Folder, Job
from webui import translations

ALWAYS = {
    "model.files",
    "model.training_adapter",
    *("name", "output_dir", "seed", "preset"),
    *("model.family", "model.path", "model.dtype", "model.text_storage", "quantize.storage"),
    *("adapter.type", "adapter.ranks", "adapter.targets"),
    *(
        "adapter.module_dropout",
        "adapter.scale_weight_norms",
        "adapter.init_from",
        "adapter.dtype",
    ),
    *("dataset.folders", "dataset.resolution", "dataset.buckets", "dataset.bucket_step", "dataset.upscale"),
    *("dataset.flip", "dataset.background", "dataset.trigger", "dataset.class_word", "dataset.missing_caption"),
    *("dataset.random_crop", "dataset.zoom", "dataset.rotate", "dataset.color_jitter"),
    "dataset.caption_dropout",
    *(
        "dataset.shuffle_tags",
        "dataset.keep_separator",
        "dataset.caption_lines",
        "dataset.tag_dropout",
        "dataset.wildcards",
        "dataset.cache_dir",
        "dataset.cache_limit",
        "dataset.max_pixels",
    ),
    *(
        "train.steps",
        "train.batch_size",
        "train.accumulate",
        "train.max_grad_norm",
        "train.threads",
        "train.deterministic",
        "train.log_every",
    ),
    *("optimizer.name", "optimizer.lr", "optimizer.lr_scale", "optimizer.ema_decay"),
    *("schedule.name", "objective.loss", "objective.t_min", "objective.t_max"),
    *("objective.timesteps", "objective.even_timesteps"),
    *("memory.gradient_checkpointing", "memory.offload", "memory.compile", "memory.cuda_graphs"),
    "preview.prompts",
    *("validation.every", "validation.pictures", "checkpoint.every", "checkpoint.keep", "tracking.to"),
    *("export.every", "export.formats", "export.dtype", "export.title", "export.metadata", "export.verify"),
}
FOLDER = {
    f"dataset.folders.{name}"
    for name in ("path", "repeats", "trigger", "prefix", "suffix", "regularization", "weight", "resolution", "control")
}
CONDITIONAL = [(key, rule) for key, when in unused.list_conditions().items() for rule in when.items()]


def test_every_setting_always_has_an_effect_or_says_when() -> None:
    """A new setting is added here, or declared with `when`."""
    without = {key for key, when in unused.list_conditions().items() if not when}
    assert without == ALWAYS | FOLDER


def others_than(default: Any, annotation: Any, avoid: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Values of a setting's type that are neither its default nor among these; its bounds may forbid some."""
    parts = get_args(annotation) if get_origin(annotation) not in (None, Literal, list, dict) else (annotation,)
    parts = tuple(get_args(part)[0] if get_origin(part) is Annotated else part for part in parts)
    words_known = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    wanted = [*words_known, False, True, 7, 48, 150, 1.5, 0.25, "x", ["x"], [5], {"x": 1}, {"x": "bf16"}]
    fitting = {bool: bool, int: int, float: float, str: str}
    for value in wanted:
        plain = [fitting[part] for part in parts if part in fitting]
        lists = [get_args(part)[0] for part in parts if get_origin(part) is list]
        tables = any(get_origin(part) is dict for part in parts)
        of_type = value in words_known or type(value) in plain
        of_type |= isinstance(value, list) and any(isinstance(value[0], one) or get_args(one) for one in lists)
        of_type |= isinstance(value, dict) and tables
        if of_type and value != default and value not in avoid:
            yield value


def annotation_of(key: str) -> Any:
    return field_of(key).annotation


def field_of(key: str) -> Any:
    section, _, name = key.rpartition(".")
    if section == "dataset.folders":
        return Folder.model_fields[name]
    model = Job.model_fields[section].annotation if section else Job
    return model.model_fields[name]  # type: ignore[union-attr]


def job_where(setting: str, rule: unused.Rule) -> Job:
    """A job with the setting at another value than its default, in which this rule of its `when` does not hold.

    A rule about a fact holds or not beside the job; the other rules of the setting then do.
    """
    keys, accepted = rule
    family = "sd15"
    tables: dict[str, Any] = {"dataset": {"folders": [{"path": "p"}]}}

    def put(key: str, value: Any) -> None:
        section, _, name = key.rpartition(".")
        if section == "dataset.folders":
            tables["dataset"]["folders"][0][name] = value
            return
        tables.setdefault(section, {})[name] = value

    for other, values in unused.list_conditions()[setting].items() if keys in FACTS else ():
        if other.startswith("family."):
            family = next(name for name in families.list_families() if families.get_traits(name)[other[7:]] in values)
        elif other not in FACTS:
            put(other, values[0] if values else 1)
    for key in keys.split(" | "):
        if key in FACTS:
            continue
        if key.startswith("family."):
            trait = key.removeprefix("family.")
            family = next(name for name in families.list_families() if families.get_traits(name)[trait] not in accepted)
        elif key.startswith("dataset.folders.") or not accepted:
            if not key.startswith("dataset.folders.") and unused.list_defaults()[key]:
                put(key, 0)
        elif isinstance(accepted, Except):
            if unused.list_defaults().get(key) not in accepted:
                put(key, accepted[0])
        elif accepted:
            put(key, next(others_than(None, annotation_of(key), accepted)))
    for value in others_than(field_of(setting).get_default(call_default_factory=True), annotation_of(setting)):
        put(setting, value)
        with contextlib.suppress(ValidationError):
            return Job.model_validate(tables | {"model": {"family": family, "path": "demo", **tables.get("model", {})}})
    raise AssertionError(f"no other value is known for {setting}")


@pytest.mark.parametrize(("key", "rule"), CONDITIONAL, ids=lambda one: one if isinstance(one, str) else one[0])
def test_where_it_has_no_effect_it_is_told(key: str, rule: unused.Rule) -> None:
    job = job_where(key, rule)
    facts = {"base.on_hub": True, "base.single_file": True} | ({rule[0]: False} if rule[0] in FACTS else {})
    told = [line for line in unused.find_unused_settings(job, facts) if key in line.split(" ha")[0].split(", ")]
    assert len(told) == 1, unused.find_unused_settings(job, facts)
    chinese = translations.translate("zh-CN", told[0])
    assert "不起作用" in chinese and "no effect" not in chinese and "without" not in chinese, chinese


def test_settings_of_one_reason_are_one_message() -> None:
    text = "preview = {steps = 30, seed = 7, width = 640}\nschedule = {cycles = 2}\n"
    base = "model = {family = 'flux', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}\n"
    assert unused.find_unused_settings(config.loads(base + text)) == [
        "schedule.cycles has no effect without schedule.name = 'cosine_with_restarts'",
        "preview.steps, preview.width, preview.seed have no effect without preview.prompts",
    ]
    assert unused.find_unused_settings(config.loads(base)) == []
    (line,) = unused.find_unused_settings(config.loads(base + "objective = {min_snr_gamma = 5.0, noise_offset = 0.1}"))
    both = "objective.min_snr_gamma, objective.noise_offset"
    assert line == f"{both} have no effect with FLUX.1, which is trained with flow matching"
    masks = "objective = {unmasked_weight = 1.0}\n" + base.replace("'p'", "'p', mask = 'alpha'")
    assert unused.find_unused_settings(config.loads(masks)) == [
        (
            "dataset.folders.mask has no effect: objective.unmasked_weight = 1 gives the area outside the masks its "
            "full weight"
        )
    ]
    for used in ("dataset.follow_mask=true", "objective.prior_outside_masks=1.0"):
        assert unused.find_unused_settings(config.loads(masks, overrides=[used])) == []


def test_what_files_and_processes_tell_is_told_once_it_is_known(tmp_path: Path) -> None:
    base = "model = {family = 'flux', path = 'owner/name', revision = 'v2', components = 'c'}\n"
    base += "dataset = {folders = [{path = 'p'}]}\ntrain = {gradient_exchange = 'fp8'}\nobjective = {guidance = 2.0}"
    assert unused.find_unused_settings(config.loads(base)) == [
        "model.components has no effect: model.path is a whole model, not a single file"
    ]
    (tmp_path / "m.safetensors").touch()
    job = config.loads(base, [f"model.path={tmp_path}/m.safetensors"])
    assert unused.find_unused_settings(job, {"run.several_processes": False, "base.guidance": False}) == [
        "model.revision has no effect: model.path is a local path",
        "train.gradient_exchange has no effect: the job runs in one process",
        "objective.guidance has no effect: this model has no guidance embedding",
    ]
    assert len(unused.find_unused_settings(job, {"run.several_processes": True, "base.guidance": True})) == 1


def test_a_rule_names_settings_and_facts_that_exist() -> None:
    traits = {f"family.{name}" for name in families.get_traits("sd15")}
    for key, when in unused.list_conditions().items():
        for other in (one for keys in when for one in keys.split(" | ")):
            assert other in unused.list_conditions() or other in traits or other in FACTS, key
    assert FACTS.keys() <= {keys for when in unused.list_conditions().values() for keys in when}
