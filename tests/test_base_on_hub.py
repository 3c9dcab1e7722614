"""Bases on a hub, before and without their weights: described, checked and estimated against a hub on the loopback.

The authority for what a plan says of a base on the hub is the same base in a local folder.
"""

import dataclasses
import errno
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_server
import pytest
import single_files
import torch
from hub_server import STRANGER, TOKEN, HubServer, Repository
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lora_fp8 import cli, config, families, train
from lora_fp8.common import messages
from lora_fp8.common.system import find_cache_folder
from lora_fp8.errors import UserError
from lora_fp8.families import _components, _released, sources
from lora_fp8.families.sources import BaseDescription, headers, hosts, known_bases
from lora_fp8.plan import plan as planning
from lora_fp8.plan import resolve
from lora_fp8.plan.check import Check, check
from lora_fp8.plan.estimate import estimate
from lora_fp8.settings import Job

STEM = "diffusion_pytorch_model"
CARD = {"license": "other", "license_name": "tiny-license", "license_link": "LICENSE.md"}
HF = "https://huggingface.co"


@pytest.fixture
def tiny_copy(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """tiny_copy("sd15", "name"): a copy of a miniature, to be changed and offered."""

    def copy(family: str = "sd15", name: str = "offered") -> Path:
        return Path(shutil.copytree(tiny(family), tmp_path / name))

    return copy


@pytest.fixture
def use(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """use(token): this process takes the server for the hub, with a cache and a memory of its own."""

    def start(token: str | None = None) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
        hub.use(monkeypatch, tmp_path / "home", token)

    return start


@pytest.fixture
def offered(hub: HubServer, use: Callable[..., None], tiny_copy: Callable[..., Path]) -> Repository:
    """The miniature of sd15 as org/tiny."""
    use()
    return hub.add("org/tiny", tiny_copy(), card=CARD)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def only_problem(description: BaseDescription) -> str:
    (problem,) = description.problems
    assert "\n" not in problem and re.search("[一-鿿]", messages.translate("zh-CN", problem)), problem
    return problem


# -- what is described ------------------------------------------------------------------------------------------------


def test_a_base_is_described_by_its_headers(hub: HubServer, offered: Repository, tmp_path: Path) -> None:
    described = sources.describe("org/tiny", family="sd15")
    assert described.problems == () and described.family == "sd15" and described.origin == "asked"
    assert described.revision == offered.sha
    assert described.licence == ("tiny-license", f"{HF}/org/tiny/blob/main/LICENSE.md") and described.gate is None
    needed = {path for path in offered.files if path.endswith(".safetensors")}
    assert described.headers.keys() == needed == {file.path for file in described.missing}
    assert described.missing_bytes == offered.weights
    for file in described.files:
        assert (file.size, file.sha256 or None) == (
            offered.files[file.path].size,
            offered.files[file.path].sha256 if file.path in needed else None,
        )
    folder = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / offered.sha
    assert described.folder == folder and (folder / "tokenizer" / "tokenizer.json").is_file()
    assert not list(folder.rglob("*.safetensors"))
    for path, header in described.headers.items():
        tensors = load_file(offered.folder / path)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {n: s for n, _, s in header.tensors}
    assert hub.downloads() == []


def test_headers_alone_are_transferred(hub: HubServer, offered: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a server that ignores ranges, the connection to which is closed early."""
    monkeypatch.setattr(headers, "FIRST_BYTES", 4096)  # smaller than the headers, so that a second request follows
    weight = f"unet/{STEM}.safetensors"
    tensors = load_file(offered.folder / weight)
    tensors["large"] = next(iter(tensors.values())).new_zeros(1 << 23)  # 32 MiB
    save_file(tensors, offered.folder / weight)
    offered.reread()
    assert sources.describe("org/tiny").problems == ()
    length = int.from_bytes((offered.folder / weight).read_bytes()[:8], "little")
    assert hub.bytes_sent(file=weight) == 8 + length
    shutil.rmtree(find_cache_folder())
    offered.faults.no_range = True
    hub.forget()
    assert sources.describe("org/tiny").problems == ()
    assert hub.bytes_sent(file=weight) < 16 << 20, "what was on its way"


@pytest.mark.parametrize("base", known_bases.read(), ids=lambda base: base.id)
def test_a_known_base_is_told_by_its_id_alone(base: known_bases.KnownBase, hub: HubServer, use: Any) -> None:
    use()
    for given in (base.id, f"{HF}/{base.id}", base.id.lower()):
        assert families.recognize(given) == (base.title, base.family)
    assert hub.seen() == []


def test_new_asks_the_hub_for_the_family_of_a_base(hub: HubServer, use: Any, tiny: Any, tmp_path: Path) -> None:
    """A repository, a single file in one, and those that are not there or that nothing here trains."""
    use()
    hub.add("org/paint", tiny("flux"))
    file = single_files.sdxl(tmp_path / "sdxl")
    single_files.write(tmp_path / "file", {"mix.safetensors": single_files.one_file("sdxl", file)})
    hub.add("org/mixes", tmp_path / "file")
    save_file({"a.lora_A.weight": torch.ones(1, 1)}, tmp_path / "lora.safetensors")
    run = CliRunner().invoke
    for base, family in (("org/paint", "flux"), (f"{HF}/org/mixes/resolve/main/mix.safetensors", "sdxl")):
        config_file = str(tmp_path / f"{family}.toml")
        assert run(cli.app, ["new", config_file, "--base", base, "--card", "24"]).exit_code == 0
        job = config.load(config_file)
        assert (job.model.family, job.model.path) == (family, base)
    assert hub.downloads() == []
    for base, said in (
        ("org/nothing", "'org/nothing' was not found"),
        (str(tmp_path / "lora.safetensors"), "a LoRA, not a base model"),
        (str(tmp_path / "file"), "name its architecture with --family"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            run(
                cli.app,
                ["new", str(tmp_path / "none.toml"), "--base", base],
                catch_exceptions=False,
                standalone_mode=False,
            )
    assert not (tmp_path / "none.toml").exists()


def test_a_second_look_is_one_request(hub: HubServer, offered: Repository) -> None:
    first = sources.describe("org/tiny")
    hub.forget()
    second = sources.describe("org/tiny")
    assert second == dataclasses.replace(first, free_bytes=second.free_bytes)
    assert [request.path.partition("?")[0] for request in hub.seen()] == ["/api/models/org/tiny"]
    hub.forget()
    pinned = sources.describe("org/tiny", first.revision)
    assert pinned.origin == "remembered" and pinned.headers == first.headers
    assert hub.seen() == [], "the files of a commit never change"
    offered.folder.joinpath("README.md").write_text("new", encoding="utf-8")
    offered.reread()
    assert sources.describe("org/tiny").revision == offered.sha != first.revision


def test_one_precision_of_each_weight(offered: Repository) -> None:
    """Full precision is preferred, another is taken where there is no such; shards count all, pickles never."""
    root = offered.folder
    for extra in (
        f"unet/{STEM}.fp16.safetensors",
        f"unet/{STEM}.bin",
        "v1.safetensors",
        "text_encoder/model.bf16.safetensors",
    ):
        (root / extra).write_bytes(b"not wanted")
    (root / "safety_checker").mkdir()
    (root / "safety_checker" / "model.safetensors").write_bytes(b"not wanted")
    vae = root / "vae" / f"{STEM}.safetensors"
    vae.rename(vae.with_name(f"{STEM}.fp16.safetensors"))
    tensors = load_file(root / "unet" / f"{STEM}.safetensors")
    (root / "unet" / f"{STEM}.safetensors").unlink()
    shards: dict[str, dict[str, Any]] = {f"{STEM}-0000{number}-of-00002.safetensors": {} for number in (1, 2)}
    for number, name in enumerate(sorted(tensors)):
        shards[list(shards)[number % 2]][name] = tensors[name]
    for name, part in shards.items():
        save_file(part, root / "unet" / name)
    weight_map = {key: name for name, part in shards.items() for key in part}
    (root / "unet" / f"{STEM}.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )
    offered.reread()
    described = sources.describe("org/tiny", family="sd15")
    assert described.problems == ()
    assert {file.path for file in described.missing} == {
        f"vae/{STEM}.fp16.safetensors", "text_encoder/model.safetensors", *(f"unet/{name}" for name in shards)
    }  # fmt: skip
    assert f"unet/{STEM}.safetensors.index.json" in {file.path for file in described.files}


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_gates(hub: HubServer, use: Callable[..., None], tiny_copy: Callable[..., Path]) -> None:
    folder = tiny_copy()
    use()
    gated = hub.add("org/tiny", folder, card=CARD, gated="auto")
    closed = sources.describe("org/tiny", family="sd15")
    assert only_problem(closed) == (
        f"model.path = 'org/tiny' is gated. Accept its licence at {HF}/org/tiny, then log in: `hf auth login`"
    )
    assert closed.gate == (f"{HF}/org/tiny", False, False)
    assert closed.missing_bytes >= gated.weights, "sizes are public"
    use(STRANGER)
    refused = sources.describe("org/tiny", family="sd15")
    assert "the account of your token has no access" in only_problem(refused)
    assert refused.gate == (f"{HF}/org/tiny", True, False)
    use(TOKEN)
    accepted = sources.describe("org/tiny", family="sd15")
    assert accepted.problems == () and accepted.gate == (f"{HF}/org/tiny", True, True)
    use("hf_expired")
    assert "does not accept the token of this machine. Log in again: `hf auth login`" in only_problem(
        sources.describe("org/tiny", "other")
    )
    assert {request.token for request in hub.seen() if request.site == "cdn"} == {""}, "the CDN gets no token"


def test_a_private_base_is_for_those_who_may_see_it(
    hub: HubServer, use: Callable[..., None], tiny_copy: Callable[..., Path]
) -> None:
    use()
    hub.add("org/tiny", tiny_copy(), private=True)
    assert "if it is private, log in: `hf auth login`" in only_problem(sources.describe("org/tiny"))
    use(STRANGER)
    assert "was not found, neither on this machine nor on 127.0.0.1" in only_problem(sources.describe("org/tiny"))
    use(TOKEN)
    assert sources.describe("org/tiny").problems == ()


def test_a_misspelt_base(hub: HubServer, use: Callable[..., None]) -> None:
    use()
    wrong = sources.describe("stabilityai/stable-difusion-xl-base-9.9")
    assert only_problem(wrong).endswith("did you mean 'stabilityai/stable-diffusion-xl-base-1.0'?")
    assert "did you mean 'black-forest-labs/FLUX.1-dev'?" in only_problem(sources.describe("flux dev"))
    assert "did you mean" not in only_problem(sources.describe("somebody/cats"))


def test_what_is_no_base_of_this_family(hub: HubServer, offered: Repository, tiny_copy: Callable[..., Path]) -> None:
    assert only_problem(sources.describe("org/tiny", family="sdxl")) == (
        "model.path = 'org/tiny' is Stable Diffusion 1.5, and model.family is 'sdxl' (Stable Diffusion XL). "
        "Set model.family = 'sd15', or choose another base"
    )
    assert "model.revision = 'v7' does not exist" in only_problem(sources.describe("org/tiny", "v7"))
    weights = {file.path for file in sources.describe("org/tiny").missing}
    for path in weights:
        if path.startswith("vae/"):
            (offered.folder / path).rename((offered.folder / path).with_suffix(".bin"))
    offered.reread()
    assert "org/tiny: vae contains only diffusion_pytorch_model.bin, a pickle" in only_problem(
        sources.describe("org/tiny")
    )
    index = offered.folder / "model_index.json"
    index.write_text(json.dumps({"_class_name": "MusicPipeline"}), encoding="utf-8")
    offered.reread()
    assert "is made for MusicPipeline, which this program cannot train" in only_problem(
        sources.describe("org/tiny", family="sd15")
    )
    index.unlink()
    offered.reread()
    assert "is not a diffusers repository" in only_problem(sources.describe("org/tiny"))
    (offered.folder / "v1.safetensors").write_bytes(b"1")
    offered.reread()
    assert f"give '{HF}/org/tiny/resolve/main/v1.safetensors'" in only_problem(sources.describe("org/tiny"))
    hub.add("Wan-AI/Wan2.1-T2V-1.3B", offered.folder)
    assert "did you mean 'Wan-AI/Wan2.1-T2V-1.3B-Diffusers'?" in only_problem(
        sources.describe("Wan-AI/Wan2.1-T2V-1.3B")
    )


def test_relatives_with_the_same_pipeline_are_told_apart(
    hub: HubServer, use: Callable[..., None], tiny: Callable[[str], Path]
) -> None:
    """By the denoiser's config, of which the index knows nothing."""
    use()
    names = [name for name in families.list_families() if families.get(name).config_marks]
    shared = [
        name
        for name in names
        if [families.get(n).pipeline_class for n in families.list_families()].count(families.get(name).pipeline_class)
        > 1
    ]
    assert len(shared) >= 2
    for name in shared:
        hub.add(f"org/{name}", tiny(name))
        assert sources.describe(f"org/{name}").family == name


def test_a_damaged_file_is_found_by_its_size(offered: Repository) -> None:
    weight = offered.folder / "vae" / f"{STEM}.safetensors"
    weight.write_bytes(weight.read_bytes()[:-100])
    offered.reread()
    assert f"org/tiny: vae/{STEM}.safetensors is damaged" in only_problem(sources.describe("org/tiny"))


def test_a_full_disk(offered: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr("lora_fp8.run.disk_space.shutil.disk_usage", lambda path: usage)
    described = sources.describe("org/tiny", family="sd15")
    assert described.free_bytes == 1 << 20 < described.missing_bytes
    problem = only_problem(described)
    assert "the disk is too full for the download" in problem and "1 MiB are free" in problem, problem


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"rate_limited": 99, "retry_after": None}, "limits the number of requests (429)"),
        ({"broken": 99}, "answered with status 500"),
        ({"delay": 1.0}, "no connection to 127.0.0.1"),
    ],
)
def test_a_hub_that_cannot_answer(
    offered: Repository, fault: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "TIMEOUT", 0.3)
    for name, value in fault.items():
        setattr(offered.faults, name, value)
    described = sources.describe("org/tiny", family="sd15")
    assert words in only_problem(described) and described.origin == "unknown"
    assert "is not on this machine, and cannot be looked up" in described.problems[0]


# -- without a connection ---------------------------------------------------------------------------------------------


def test_what_was_remembered_serves_offline(
    hub: HubServer, offered: Repository, job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sources.describe("org/tiny", family="sd15")
    offered.faults.rate_limited = 99
    limited = sources.describe("org/tiny", family="sd15")
    assert limited.origin == "remembered" and limited.problems == () and limited.headers == before.headers
    assert "(429)" in limited.notes[0] and f"(commit {offered.sha[:12]})" in limited.notes[0]
    hub.forget()
    go_offline(monkeypatch)
    offline = sources.describe("org/tiny", family="sd15")
    assert (offline.files, offline.headers, offline.problems) == (before.files, before.headers, ())
    assert offline.notes[0].startswith("HF_HUB_OFFLINE forbids connections; the previous answer is used")
    result = check(job("model.path=org/tiny"))
    assert result.problems == [] and any("org/tiny, predicts epsilon" in line for line in result.facts)
    assert hub.seen() == []


def test_the_cache_serves_offline(
    hub: HubServer, offered: Repository, job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another program has filled it, of which nothing is remembered."""
    from huggingface_hub import snapshot_download

    snapshot_download("org/tiny")
    go_offline(monkeypatch)
    described = sources.describe("org/tiny", family="sd15")
    assert described.origin == "local" and described.problems == () and described.missing_bytes == 0
    assert described.revision == offered.sha
    family = planning.make(job("model.path=org/tiny")).family
    family.load_vae()


def test_published_sizes_are_the_last_resort(use: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    use()
    go_offline(monkeypatch)
    known = known_bases.get("black-forest-labs/FLUX.1-dev")
    assert known is not None
    described = sources.describe(known.id, family="flux")
    assert described.origin == "published" and described.total_bytes == described.missing_bytes == known.total_bytes
    assert "HF_HUB_OFFLINE forbids connections" in only_problem(described)
    note = "takes about 31.4 GiB (from the published sizes, without a connection)"
    assert note in described.notes[0], described.notes
    assert described.gate is not None and described.gate.is_open is None
    assert described.licence is not None and described.licence.name == "flux-1-dev-non-commercial-license"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", HF)
    monkeypatch.setattr(
        hosts.HuggingFace, "ask", lambda self: (_ for _ in ()).throw(hosts.NoAnswer("no connection to x"))
    )
    assert "set HF_ENDPOINT=https://hf-mirror.com" in only_problem(sources.describe(known.id))


@pytest.mark.parametrize(
    ("family", "base", "stands_for"),
    [
        ("sd15", "stable-diffusion-v1-5/stable-diffusion-v1-5", "Stable Diffusion 1.5"),
        ("wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan 2.1 T2V 1.3B"),
        ("sdxl", "somebody/a-fine-tune", "Stable Diffusion XL 1.0"),
    ],
)
def test_an_estimate_without_a_hub_is_of_the_published_sizes(
    family: str,
    base: str,
    stands_for: str,
    use: Callable[..., None],
    job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The authority is the published size of the weights, which no estimate is made of."""
    use()
    go_offline(monkeypatch)
    mine = job(f"model.path='{base}'", "quantize.storage='none'", "dataset.resolution=64", family=family)
    described = resolve.describe_for_estimate(mine)
    plan = planning.make(mine, base=described)
    estimated, known = estimate(plan), next(one for one in known_bases.read() if one.title == stands_for)
    published = known.gigabytes[plan.family.denoiser_name] * known_bases.GIGABYTE
    assert min(abs(published / size / estimated.base_bytes - 1) for size in (1, 2)) < 0.01, "bf16, published or half"
    assert estimated.writes[0].likely == known.total_bytes and estimated.peak_bytes
    said = [note for note in estimated.notes if "could not be looked up (HF_HUB_OFFLINE forbids connections)" in note]
    assert len(said) == 1 and f"This estimate uses the published sizes of {stands_for}" in said[0]
    assert re.search("[一-鿿]", messages.translate("zh-CN", said[0]))
    assert len(check(mine).problems) == 1, "a training needs the files"
    with pytest.raises(UserError, match="cannot be looked up"):
        train.run(mine, progress=False)


@pytest.mark.parametrize("family", families.list_families())
def test_every_family_has_a_released_model_to_estimate(family: str, use: Callable[..., None]) -> None:
    use()
    Family = families.get(family)
    base = BaseDescription(sources.parse(Family.example_base), unanswered="no connection")
    model = Job.model_validate({"model": {"family": family, "path": "org/x"}, "dataset": {"folders": []}}).model
    released = _released.make(Family, model, base, device="cpu", dtype=torch.bfloat16)
    config = dict(released.make_empty_denoiser().config)
    assert released.count_vae_bytes() > 100 << 20
    assert max(released.count_encoder_bytes().values()) > 100 << 20
    assert all(all(side > 0 for side in shape) for shape in released.estimate_longest_cond(config).values())
    assert released.make_objective(Job.model_fields["objective"].get_default(call_default_factory=True))
    if Family.trained_text:
        widths = {name: about.width for name, about in Family.trained_text.items()}
        assert {n: encoder.config.hidden_size for n, encoder in released.make_empty_trained_text().items()} == widths


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sd15", "flux", "qwen_image"])
def test_an_estimate_before_the_download_is_that_of_the_files(
    family: str, hub: HubServer, use: Callable[..., None], tiny: Callable[[str], Path], job: Callable[..., Job]
) -> None:
    use()
    repository = hub.add("org/tiny", tiny(family))
    remote, local = (planning.make(job(*given, family=family)) for given in (["model.path=org/tiny"], []))
    before, after = estimate(remote), estimate(local)
    download, *writes = before.writes
    assert (download.what, download.sure, download.likely) == ("the base model", repository.weights, repository.weights)
    assert dataclasses.replace(before, writes=writes) == dataclasses.replace(after, writes=after.writes)
    assert "the base model" in "\n".join(before.format_lines())
    assert remote.layers == local.layers
    # What encoders and layers are cached and compared by is the same before and after, so nothing is encoded twice.
    assert [remote.family.compute_encoder_identity(part) for part in ("vae", "text")] == [
        local.family.compute_encoder_identity(part) for part in ("vae", "text")
    ]
    assert remote.family.compute_base_identity() == local.family.compute_base_identity()
    assert hub.downloads() == []
    for load in (remote.family.load_vae, lambda: list(remote.family.read_denoiser_tensors())):
        with pytest.raises(UserError, match="is not downloaded yet"):
            load()


def test_local_problems_are_reported_with_those_of_the_base(
    hub: HubServer, use: Callable[..., None], tiny_copy: Callable[..., Path], job: Callable[..., Job]
) -> None:
    use()
    hub.add("org/tiny", tiny_copy(), gated=True)
    wrong = job("model.path=org/tiny", "dataset.folders=[{path='/nowhere'}]")
    assert [line.split(" ")[0] for line in check(wrong).problems] == ["folder", "model.path"]
    with pytest.raises(UserError) as caught:
        train.run(wrong, progress=False)
    assert "folder /nowhere does not exist" in str(caught.value) and "is gated" in str(caught.value)
    uneven = job("model.path=org/tiny", "dataset.bucket_step=10")
    assert len(check(uneven).problems) == 2
    assert hub.downloads() == [] and hub.bytes_sent() == 0


def test_nothing_is_transferred_for_a_job_with_a_local_problem(
    hub: HubServer, offered: Repository, job: Callable[..., Job]
) -> None:
    for override in ("dataset.folders=[{path='/nowhere'}]", "adapter.targets=['nothing']", "train.batch_size=3"):
        if override.startswith("train"):
            continue
        with pytest.raises(UserError):
            train.run(job("model.path=org/tiny", override), progress=False)
    assert hub.downloads() == []


BREAKS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda root: None,
    "text encoder of another width": lambda root: edit(root / "text_encoder" / "config.json", intermediate_size=48),
    "text encoder with another layer": lambda root: edit(root / "text_encoder" / "config.json", num_hidden_layers=7),
    "VAE of another width": lambda root: edit(root / "vae" / "config.json", block_out_channels=[32, 32]),
    "denoiser of another width": lambda root: edit(root / "unet" / "config.json", cross_attention_dim=48),
    "no tokenizer": lambda root: [path.unlink() for path in (root / "tokenizer").glob("*")],
    "unknown scheduler": lambda root: edit(root / "scheduler" / "scheduler_config.json", _class_name="Nothing"),
    "VAE without a tensor": lambda root: drop(root / "vae" / f"{STEM}.safetensors", "decoder.conv_in.weight"),
    "text encoder without a tensor": lambda root: drop(root / "text_encoder" / "model.safetensors", "fc1.weight"),
}


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | entries), encoding="utf-8")


def drop(path: Path, ending: str) -> None:
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}, path, {"format": "pt"})


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_base_has_the_same_problems_on_the_hub(
    what: str, offered: Repository, job: Callable[..., Job]
) -> None:
    BREAKS[what](offered.folder)
    offered.reread()
    local, remote = (check(job(f"model.path='{path}'")) for path in (offered.folder, "org/tiny"))
    folder = sources.describe("org/tiny", family="sd15").folder

    def lines(result: Check) -> list[str]:
        return [line.replace(str(folder), "BASE").replace(str(offered.folder), "BASE") for line in result.problems]

    assert lines(remote) == lines(local) and bool(remote.problems) == (what != "nothing")


def test_a_revision_is_trained_and_downloaded_once(
    hub: HubServer, offered: Repository, job: Callable[..., Job]
) -> None:
    offered.revisions.add("v2")
    train.run(job("model.path=org/tiny", "model.revision=v2", "train.steps=1"), progress=False)
    weights = [path for path in offered.files if path.endswith(".safetensors")]
    assert sorted(hub.downloads()) == sorted(weights)
    train.run(job(f"model.path={HF}/org/tiny/tree/v2", "train.steps=1", "name=second"), progress=False)
    assert sorted(hub.downloads()) == sorted(weights)
    assert {request.path for request in hub.seen() if "/api/models/" in request.path and "v2" not in request.path} <= {
        request.path for request in hub.seen() if offered.sha in request.path
    }


# -- other places -----------------------------------------------------------------------------------------------------


def test_modelscope(
    hub: HubServer, offered: Repository, job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.endpoint)
    described = sources.describe("https://modelscope.cn/models/org/tiny", family="sd15")
    assert described.problems == () and described.family == "sd15"
    assert described.missing_bytes == offered.weights and all(file.sha256 for file in described.files)
    plan = planning.make(job("model.path=modelscope:org/tiny"))
    assert estimate(plan).peak_bytes == estimate(planning.make(job())).peak_bytes
    assert hub.downloads() == []
    assert "was not found" in only_problem(sources.describe("modelscope:org/nothing"))


def test_civitai(
    hub: HubServer,
    use: Callable[..., None],
    tmp_path: Path,
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use()
    monkeypatch.setenv("CIVITAI_ENDPOINT", hub.endpoint)
    file = tmp_path / "civitai" / "some.safetensors"
    file.parent.mkdir()
    shutil.copyfile(next((tiny("sd15") / "unet").glob("*.safetensors")), file)
    offered = hub.add_civitai(345, file, "SD 1.5", model=12)
    for text in (
        "civitai:345",
        "https://civitai.com/models/12/some",
        "https://civitai.com/models/12?modelVersionId=345",
    ):
        described = sources.describe(text)
        assert described.problems == (), described.problems
        (single,) = described.files
        assert (single.path, single.size, single.sha256) == (
            file.name,
            file.stat().st_size,
            offered.files[file.name].sha256,
        )
        assert described.headers[file.name].tensors
    assert hub.downloads() == []
    offered.login = True
    shutil.rmtree(find_cache_folder())
    assert "CIVITAI_TOKEN" in only_problem(sources.describe("civitai:345"))
    monkeypatch.setenv("CIVITAI_TOKEN", TOKEN)
    assert sources.describe("civitai:345").problems == ()
    assert "was not found" in only_problem(sources.describe("civitai:999"))


def test_a_single_file_on_the_hub(hub: HubServer, offered: Repository, tmp_path: Path) -> None:
    address = f"{HF}/org/tiny/resolve/main/unet/{STEM}.safetensors"
    described = sources.describe(address, family="sd15")
    assert described.problems == () and [file.path for file in described.files] == [f"unet/{STEM}.safetensors"]
    assert described.headers.keys() == {f"unet/{STEM}.safetensors"}
    assert "there is no file 'x.safetensors'" in only_problem(
        sources.describe(f"{HF}/org/tiny/blob/main/x.safetensors")
    )
    assert hub.downloads() == []


@pytest.mark.parametrize("place", ["org/tiny", "modelscope:org/tiny"])
def test_components_on_the_hub_are_downloaded_when_the_rest_is_right(
    place: str,
    hub: HubServer,
    use: Callable[..., None],
    tmp_path: Path,
    job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file with the denoiser alone: its VAE and text encoder come from a repository, like a base on the hub."""
    use()
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.endpoint)
    folder = single_files.FOLDERS["sd15"](tmp_path / "folder")
    tensors = single_files.one_file("sd15", folder)
    denoiser = {name: tensor for name, tensor in tensors.items() if name.startswith("model.diffusion_model.")}
    file = single_files.write(tmp_path, {"unet/mix.safetensors": denoiser})
    hub.add("org/tiny", folder)
    given = (f"model.path='{file}'", f"model.components={place}", "train.steps=1", "dataset.resolution=32")
    needed = ["text_encoder/model.safetensors", f"vae/{STEM}.safetensors"]
    result = check(job(*given))
    assert result.problems == [] and any(line.startswith("download: ") for line in result.facts), result
    size = sum(hub.repositories["org/tiny"].files[path].size for path in needed)
    assert [need.likely for need in planning.make(job(*given)).estimate_writes() if need.what == "the base model"] == [
        size
    ]
    with pytest.raises(UserError, match="/nowhere"):
        train.run(job(*given, "dataset.folders=[{path='/nowhere'}]"), progress=False)
    assert hub.downloads() == []
    trained = train.run(job(*given), progress=False)
    assert sorted(hub.downloads()) == needed, "not the denoiser of the repository"
    hub.forget()
    go_offline(monkeypatch)
    again = train.run(job(*given, "name=again"), progress=False)
    assert hub.seen() == [] and load_file(again.files[0]).keys() == load_file(trained.files[0]).keys()


def test_what_a_file_lacks_comes_from_modelscope_where_the_hub_cannot_be_reached(
    hub: HubServer, use: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer of a whole single file: from ModelScope's mirror of the released model, asked for once."""
    use()
    folder = single_files.FOLDERS["sd15"](tmp_path / "folder")
    file = single_files.write(tmp_path, {"whole.safetensors": single_files.one_file("sd15", folder)})
    family = families.get("sd15")
    model = Job.model_validate({"model": {"family": "sd15", "path": str(file)}, "dataset": {"folders": []}}).model
    hub_server.use_endpoint(monkeypatch, "http://127.0.0.1:1", tmp_path / "home")
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="could not be downloaded") as error:
        _components.find(family, model)
    assert "stable-diffusion-xl-base-1.0" in str(error.value) and "ModelScope cannot be reached" in str(error.value)
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.endpoint)
    with pytest.raises(
        UserError, match="ModelScope has no copy of it .names tried: stabilityai/stable-diffusion-xl-base-1.0."
    ):
        _components.find(family, model)
    hub.add("AI-ModelScope/stable-diffusion-xl-base-1.0", folder)
    hub.forget()
    parts = _components.find(family, model)
    assert (parts.folder / "tokenizer" / "tokenizer.json").read_bytes() == (
        folder / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    fetched = {request.file for request in hub.seen("AI-ModelScope/stable-diffusion-xl-base-1.0") if request.file}
    assert fetched and all(name.startswith(("tokenizer/", "model_index.json")) for name in fetched), "and no weight"
    hub.forget()
    assert _components.find(family, model).folder == parts.folder and hub.seen() == []


def test_a_file_from_modelscope_is_completed_from_there(
    hub: HubServer, use: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hubs have the tokenizer; the one that the file came from is asked."""
    use()
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.endpoint)
    folder = single_files.FOLDERS["sd15"](tmp_path / "folder")
    single_files.write(tmp_path / "one", {"whole.safetensors": single_files.one_file("sd15", folder)})
    hub.add("org/one", tmp_path / "one")
    hub.add("stabilityai/stable-diffusion-xl-base-1.0", folder)
    path = "modelscope:org/one@master/whole.safetensors"
    model = Job.model_validate({"model": {"family": "sd15", "path": path}, "dataset": {"folders": []}}).model
    parts = _components.find(families.get("sd15"), model)
    assert (parts.folder / "tokenizer" / "tokenizer.json").is_file() and hub.downloads() == []
    asked = [request.path for request in hub.seen("stabilityai/stable-diffusion-xl-base-1.0")]
    assert asked and all(path.startswith(("/api/v1/", "/models/")) for path in asked), "ModelScope's addresses"


def test_a_connection_that_fails_says_why_in_words_that_are_translated() -> None:
    for cause in (
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    ):
        error = RuntimeError("of the client")
        error.__cause__ = cause
        why = hosts._find_innermost_reason(error)
        assert why == cause.strerror, "without a number"
        assert re.search("[\u4e00-\u9fff]", messages.translate("zh-CN", why))
