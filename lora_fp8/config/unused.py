"""Find settings that were changed but have no effect in a job, from the `when` of their declarations.

The web form hides these settings; check, plan, estimate and training warn about them. Three warnings are written
elsewhere, as no single setting or fact decides them: LoKr's rank (`adapters`: it depends on the shape of each layer),
adapter.init_from of a resumed run (`stages.resume`: on how the run started), and entries of a table that other entries
override (`precision.names.map_by_name`).
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from .. import families
from ..errors import Joined, Message, Template
from ..families.sources import WEIGHT_ENDINGS
from ..settings import CLASS, FACTS, Except, Folder, Job, Model, Section, is_class, read_options

Rule = tuple[str, tuple[Any, ...]]
"""An entry of a setting's `when`."""
FOLDERS = "dataset.folders"


@cache
def list_defaults() -> Mapping[str, Any]:
    """Return the default of every setting that has one, by key. Settings of folders are not included."""
    fields = {key: field for key, field in _list_fields() if not key.startswith(f"{FOLDERS}.")}
    return {
        key: field.get_default(call_default_factory=True) for key, field in fields.items() if not field.is_required()
    }


@cache
def list_conditions() -> Mapping[str, Mapping[str, tuple[Any, ...]]]:
    """Return the `when` of every setting, by key; {} for a setting that always has an effect."""
    return {key: (field.json_schema_extra or {}).get("when", {}) for key, field in _list_fields()}


def find_unmet_rules(values: Mapping[str, Any], facts: Mapping[str, bool] | None = None) -> dict[str, Rule]:
    """Return the settings that have no effect with these values, each with the first rule that is not met.

    Args:
        values: by key, such as "adapter.rank"; they may be invalid.
        facts: the known facts of `settings.FACTS`; unknown ones count as true.
    """
    family = values["model.family"]
    traits = families.get_traits(family) if family in families.list_families() else {}
    mask_uses = "objective.unmasked_weight", "objective.prior_outside_masks", "dataset.follow_mask"
    known = dict(values) | {f"family.{name}": value for name, value in traits.items()}
    known |= {"masks.matter": [values.get(key) for key in mask_uses] != [1.0, 0.0, False]} | dict(facts or {})
    if isinstance(name := known.get("optimizer.name"), str) and is_class(name):
        known["optimizer.name"] = CLASS
    folders = values[FOLDERS] if isinstance(values[FOLDERS], list) else []
    rows = [row for row in folders if isinstance(row, dict)]
    for name in {name for row in rows for name in row}:
        known[f"{FOLDERS}.{name}"] = [row for row in rows if row.get(name)]
    unmet = {
        key: [rule for rule in when.items() if not _is_met(rule, known)] for key, when in list_conditions().items()
    }
    return {key: rules[0] for key, rules in unmet.items() if rules}


def find_unused_settings(job: Job, facts: Mapping[str, bool] | None = None) -> list[str]:
    """Return warnings about settings of a job that have no effect, one per reason, with their names.

    Args:
        job: the job.
        facts: the known facts of `settings.FACTS`, from `ModelFamily.list_base_facts`, `precision.Plan.facts` and the
            processes; those that model.path decides are added here. An unknown fact causes no warning.
    """
    values, title = flatten(job), families.get(job.model.family).title
    by_rule: dict[Rule, list[str]] = {}
    for key, rule in find_unmet_rules(values, _find_path_facts(job.model) | dict(facts or {})).items():
        if _is_set(job, key, values):
            by_rule.setdefault(rule, []).append(key)
    return [_describe(keys, rule, title) for rule, keys in by_rule.items()]


def list_unused_keys(job: Job) -> set[str]:
    """Return the settings that cannot have an effect in a job as it is, whatever their values.

    Settings of folders are those that its folders have, under "dataset.folders".
    """
    idle = set(find_unmet_rules(flatten(job), _find_path_facts(job.model)))
    if not families.get_traits(job.model.family)["controls"]:
        idle.add(f"{FOLDERS}.control")
    return idle


def flatten(job: Job) -> dict[str, Any]:
    """Return a job's values by key; "dataset.folders" is a list of tables."""
    return flatten_tables(job.model_dump())


def flatten_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config's tables by key, such as "adapter.rank"."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        values |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return values


def _list_fields() -> Iterator[tuple[str, Any]]:
    for name, field in Job.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from ((f"{name}.{key}", inner) for key, inner in field.annotation.model_fields.items())
        else:
            assert get_origin(field.annotation) is not list or get_args(field.annotation) == (str,)
            yield name, field
    yield from ((f"{FOLDERS}.{key}", field) for key, field in Folder.model_fields.items())


def _is_set(job: Job, key: str, values: Mapping[str, Any]) -> bool:
    """Return True if a setting differs from its default, also where a folder or the options of a prompt set it."""
    section, _, name = key.rpartition(".")
    if section == "preview" and any(name in read_options(prompt)[1] for prompt in job.preview.prompts):
        return True
    if key in values:
        return values[key] != list_defaults()[key]
    return any(getattr(folder, name) != Folder.model_fields[name].default for folder in job.dataset.folders)


def _find_path_facts(model: Model) -> dict[str, bool]:
    """Return the facts that model.path decides, without asking the hub."""
    path = os.path.expanduser(model.path)
    local = model.path == "demo" or os.path.exists(path)
    single_file = os.path.isfile(path) or path.endswith(WEIGHT_ENDINGS)  # a missing one is refused later
    return {"base.on_hub": not local, "base.single_file": single_file}


def _is_met(rule: Rule, known: Mapping[str, Any]) -> bool:
    keys, accepted = rule

    def is_key_met(key: str) -> bool:
        if key not in known:
            return not key.startswith(f"{FOLDERS}.")  # unknown families and facts count as met
        value = known[key]
        if accepted and isinstance(value, str | bool | int | float | None):
            return (value in accepted) != isinstance(accepted, Except)
        return bool(value)

    return any(map(is_key_met, keys.split(" | ")))


def _describe(keys: Sequence[str], rule: Rule, title: str) -> Message:
    """Return the warning about settings whose rule is not met."""
    singular, plural = Template("{setting} has no effect {reason}"), Template("{setting} have no effect {reason}")
    if rule[0] in FACTS:
        singular, plural = Template("{setting} has no effect: {reason}"), Template("{setting} have no effect: {reason}")
    template = singular if len(keys) == 1 else plural
    return template(setting=Joined(", ", keys), reason=_explain_rule(rule, title))


def _explain_rule(rule: Rule, title: str) -> Message:
    """Return why a rule is not met, as the end of a sentence."""
    key, accepted = rule
    if key in FACTS:
        return FACTS[key]
    if key.startswith("family."):
        return Message("with {title}, {line}", title=title, line=_explain_family_rule(rule))
    if isinstance(accepted, Except) and " | " not in key:
        return Message("with {setting}", setting=_format_setting(key, accepted))
    return Message("without {setting}", setting=_describe_needed(rule))


def _explain_family_rule(rule: Rule) -> Message:
    """Return why a family does not meet a rule, as a relative clause."""
    key, accepted = rule
    epsilon = accepted == ("FlowMatching",)
    return {
        "family.objective": Message("which predicts epsilon or v")
        if epsilon
        else Message("which is trained with flow matching"),
        "family.text_encoder": Message("which has no text encoder that can be trained here"),
        "family.long_captions": Message("whose text encoders do not read captions in chunks"),
        "family.clip_skip": Message("whose text encoders always use the layer that the model was trained with"),
        "family.controls": Message("which does not use control images"),
        "family.clips": Message("which does not generate clips"),
        "family.guidance": Message("which has no guidance embedding"),
        "family.negative": Message("which generates images without a negative prompt"),
    }[key]


def _describe_needed(rule: Rule) -> str:
    keys, accepted = rule
    names = keys.split(" | ")
    return _format_setting(keys, accepted) if accepted and len(names) == 1 else Joined(" or ", names)


def _format_setting(keys: str, values: Iterable[Any]) -> Message:
    """Return a setting with its values: "optimizer.name = 'adamw' or 'lion8bit'"."""
    return Message("{key} = {values}", key=keys, values=Joined(" or ", map(_format_value, values)))


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
