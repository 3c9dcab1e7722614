"""LoRA of the text encoders: judged by transformers' encoders, torch's autograd, and diffusers' pipelines and loader.

Names at full size are written out here from transformers' own module names and the published rule of kohya's scripts,
without a look at the exporter.
"""

import json
import math
from pathlib import Path

import diffusers
import miniatures
import pytest
import torch
import transformers
from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers, convert_state_dict_to_peft
from editing import load_encoders, load_probe
from safetensors.torch import load_file, save_file
from test_export import flux_names, sd15_names, sdxl_names
from test_families import PROMPTS, make, original_layout
from test_processes import FLOAT32, run_forked
from test_resume import run_until

from lora_fp8 import adapters, families, train, verify
from lora_fp8.errors import UserError
from lora_fp8.lora_files import export, export_metadata, layouts, safetensors_file
from lora_fp8.plan import estimate, resolve
from lora_fp8.plan import plan as planning
from lora_fp8.run import Run
from lora_fp8.settings import Adapter, Export, Objective, Optimizer
from lora_fp8.stages import step as step_stage
from lora_fp8.tools import average, extract, files, merge, pairs, resize
from lora_fp8.training import checkpoint, optim, text_encoders

CLIPS = ("sd15", "sd2", "sdxl", "sd3", "flux", "flux_kontext")
ON = ("adapter.text_encoder=true", "optimizer.lr=1e-2", "train.batch_size=2")
SHOWN = ("preview.prompts=['a cat']", "preview.negative=blue", "preview.guidance=2.0", "preview.at_start=false")


def run(job, resume=False, echo=None):
    return train.run(job, resume=resume, progress=False, echo=echo)


def folder_of(job) -> Path:
    return Path(job.output_dir) / job.name


def events(job, kind):
    return [event for event in Run.open(folder_of(job)).read_events() if event["event"] == kind]


def test_trained_are_the_clips_that_diffusers_loads_loras_into():
    for name in families.list_families():
        Family = families.get(name)
        loadable = getattr(Family.get_pipeline_type(), "_lora_loadable_modules", [])
        clips = [part for part, cls in Family.text_parts.items() if cls.startswith("CLIPText")]
        # What SD 3's loader takes beside its list stands in its load_lora_weights: both CLIPs, never T5.
        wanted = [part for part in clips if part in loadable]
        assert list(Family.trained_text) == wanted, name
    assert {name for name in families.list_families() if families.get(name).trained_text} == set(CLIPS)


# -- names at full size

CONFIGS = {  # of the released encoders, by what their config.json files say
    "clip_l": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "clip_g": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20},
    "clip_h": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16},
}
KOHYA_TEXT = {  # kohya's prefix and the layers, by family and encoder; 6 to a layer
    "sd15": {"text_encoder": ("lora_te_", "clip_l", 72)},
    "sd2": {"text_encoder": ("lora_te_", "clip_h", 138)},
    "sdxl": {"text_encoder": ("lora_te1_", "clip_l", 72), "text_encoder_2": ("lora_te2_", "clip_g", 192)},
    "sd3": {"text_encoder": ("lora_te1_", "clip_l", 72), "text_encoder_2": ("lora_te2_", "clip_g", 192)},
    "flux": {"text_encoder": ("lora_te1_", "clip_l", 72)},
    "flux_kontext": {"text_encoder": ("lora_te1_", "clip_l", 72)},
}


def full_clip(kind):
    with torch.device("meta"):
        return transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**CONFIGS[kind]))


def clip_linears(kind):
    """{path as transformers has it with `text_model` in front: (out, in)} of the linears inside the layers."""
    return {
        path: tuple(module.weight.shape)
        for path, module in full_clip(kind).named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in path
    }


def full_text_state(name, rank=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for encoder, (_, kind, count) in KOHYA_TEXT[name].items():
        linears = clip_linears(kind)
        assert len(linears) == count
        for path, (num_out, num_in) in linears.items():
            state[f"{encoder}.{path}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator)
            state[f"{encoder}.{path}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator)
    return state


def kohya_text_names(name):
    found = set()
    for prefix, kind, _ in KOHYA_TEXT[name].values():
        found |= {prefix + path.replace(".", "_") for path in clip_linears(kind)}
    return found


@pytest.mark.parametrize("name", CLIPS)
def test_kohya_names_of_text_encoders_at_full_size(name):
    Family = families.get(name)
    state = full_text_state(name)
    tensors = layouts.to_layout(state, 0.5, Family, Family.reference_config, "kohya")
    names = kohya_text_names(name)
    assert set(tensors) == {
        f"{stem}.{end}" for stem in names for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    assert {float(tensor) for key, tensor in tensors.items() if key.endswith(".alpha")} == {0.5}
    for layout in Family.layouts:
        back, scaling = layouts.from_layout(
            layouts.to_layout(state, 0.5, Family, Family.reference_config, layout), Family, Family.reference_config
        )
        assert back.keys() == state.keys() and set(scaling.values()) == {0.5 if layout == "kohya" else 1.0}
        half = 1 if layout == "kohya" else 0.5
        assert all(torch.equal(back[k], state[k] * (half if "lora_B" in k else 1)) for k in state), layout


@pytest.mark.parametrize(
    ("name", "unet", "counts"),
    [("sd15", sd15_names, (192, 72)), ("sdxl", sdxl_names, (722, 264)), ("flux", flux_names, (304, 72))],
)
def test_a_whole_kohya_file_is_read_by_diffusers(name, unet, counts):
    """All modules of kohya's file, both parts: the names are the known ones, and diffusers takes every key."""
    Family = families.get(name)
    denoiser_config = Family.reference_config
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(denoiser_config)
    inside = ".attentions." if name != "flux" else "transformer_blocks."
    state = full_text_state(name)
    for path, module in denoiser.named_modules():
        if inside in path and isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            out, inner, *kernel = module.weight.shape
            state[f"{path}.lora_A.weight"] = torch.ones(1, inner, *kernel)
            state[f"{path}.lora_B.weight"] = torch.ones(out, 1, *(1 for _ in kernel))
    tensors = layouts.to_layout(state, 0.5, Family, dict(denoiser.config), "kohya")
    stems = {key.split(".")[0] for key in tensors}
    assert stems == {f"lora_unet_{one}" for one in unet()} | kohya_text_names(name)
    assert (len(unet()), len(kohya_text_names(name))) == counts
    options = {"unet_config": denoiser.config} if name == "sdxl" else {}
    found = Family.get_pipeline_type().lora_state_dict({k: t.clone() for k, t in tensors.items()}, **options)
    converted, alphas = found if isinstance(found, tuple) else (found, None)
    of_text = {key: tensor for key, tensor in converted.items() if key.startswith("text_encoder")}
    of_text = convert_state_dict_to_peft(convert_state_dict_to_diffusers(of_text))  # as its loader goes on
    of_text = {key: tensor for key, tensor in of_text.items() if "lora_" in key}
    assert set(of_text) == {key for key in state if key.startswith("text_encoder")} and len(of_text) == 2 * counts[1]
    assert alphas is None or (len(alphas) == sum(counts) and set(map(float, alphas.values())) == {0.5})
    for module in sorted({key.rpartition(".lora_")[0] for key in of_text})[::11]:
        pairs = [[one[f"{module}.lora_{half}.weight"] for half in "AB"] for one in (of_text, state)]
        assert verify.compute_delta_error((*pairs[0], 0.5 if alphas else 1.0), (*pairs[1], 0.5)) < 1e-6


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_comfyui_resolves_every_text_key(name):
    """Its rule: `text_encoders.` and its model's key, in which a CLIP is `clip_l.transformer.` or `clip_g...`."""
    Family = families.get(name)
    tensors = layouts.to_layout(full_text_state(name), 0.5, Family, Family.reference_config, "comfy")
    expected = {
        f"text_encoders.{kind}.transformer.{path}.lora_{half}.weight"
        for _, kind, _ in KOHYA_TEXT[name].values()
        for path in clip_linears(kind)
        for half in "AB"
    }
    assert set(tensors) == expected


def test_both_spellings_of_diffusers_files_are_read():
    """Files saved with transformers 5 have no `text_model` in the names of CLIPTextModel's layers, older ones have."""
    Family = families.get("sd15")
    state = full_text_state("sd15")
    flat = {key.replace(".text_model.", "."): tensor for key, tensor in state.items()}
    for spelling in (state, flat):
        back, _ = layouts.from_layout(spelling, Family, Family.reference_config)
        assert back.keys() == state.keys()


def test_other_parts_of_a_text_encoder_are_named():
    Family = families.get("sdxl")
    with pytest.raises(UserError, match="lora_te2_text_projection: CLIP's text_encoder_2 has no layer"):
        pair = {"lora_down.weight": torch.ones(1, 8), "lora_up.weight": torch.ones(8, 1)}
        tensors = {f"lora_te2_text_projection.{end}": tensor for end, tensor in pair.items()}
        layouts.from_layout(tensors, Family, Family.reference_config)
    with pytest.raises(UserError, match="lora_te3_.*: a LoRA of the transformer, text_encoder has no such names"):
        tensors = {f"lora_te3_encoder_block_0_layer_0_SelfAttention_q.{end}": t for end, t in pair.items()}
        tensors["lora_unet_double_blocks_0_img_attn_proj.lora_down.weight"] = torch.ones(1, 8)
        layouts.from_layout(tensors, families.get("flux"), families.get("flux").reference_config)


# -- the live conditioning


def told(family, prompts=PROMPTS):
    """Collated conditioning of the cache's way: each prompt encoded by itself."""
    return family.collate([family.encode_prompts([prompt])[0] for prompt in prompts])


@pytest.mark.parametrize("name", CLIPS)
def test_with_fresh_adapters_live_conditioning_is_the_cached_one(tiny, name):
    family = make(families.get(name), tiny(name))
    load_encoders(family)
    cached, alone = told(family), told(family, PROMPTS[:1])
    family.free_encoders()
    text = text_encoders.TextEncoders(family, Adapter(dtype="fp32"), seed=0)
    text.train()
    live = text.encode(PROMPTS, cached)
    assert live.keys() == cached.keys()
    for key, tensor in live.items():
        assert tensor.shape == cached[key].shape and tensor.dtype == cached[key].dtype
        torch.testing.assert_close(tensor, cached[key], rtol=0, atol=1e-5)
    assert any(tensor.requires_grad for tensor in live.values())
    single = text.encode(PROMPTS[:1], alone)
    assert all(torch.equal(tensor, alone[key]) for key, tensor in single.items())
    # what the encoders do not say is the cache's, to the bit, and what they say is not
    marked = {key: torch.full_like(tensor, 7.0) for key, tensor in cached.items()}
    mixed = text.encode(PROMPTS, marked)
    if name in ("flux", "flux_kontext"):
        assert torch.equal(mixed["prompt_embeds"], marked["prompt_embeds"])
        assert torch.equal(mixed["pooled_prompt_embeds"], live["pooled_prompt_embeds"])
    elif name == "sd3":
        assert (mixed["prompt_embeds"][:, 77:] == 7).all() and mixed["prompt_embeds"].shape[1] > 77
        assert torch.equal(mixed["prompt_embeds"][:, :77], live["prompt_embeds"][:, :77])
    else:
        assert all(torch.equal(mixed[key], live[key]) for key in live)


def reference_conditioning(name, folder, state, scale):
    """Each family's conditioning by transformers alone, with W + scale * B @ A in place of each adapted weight."""
    names = [part for part in families.get(name).trained_text]
    made = []
    for part in names:
        cls = getattr(transformers, families.get(name).text_parts[part])
        encoder = cls.from_pretrained(folder / part, dtype=torch.float32).requires_grad_(False)
        tokenizer = transformers.CLIPTokenizer.from_pretrained(folder / part.replace("text_encoder", "tokenizer"))
        ids = tokenizer(PROMPTS, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        weights = {}
        for path, module in encoder.named_modules():
            stem = f"{part}.text_model.{path.removeprefix('text_model.')}"
            if f"{stem}.lora_A.weight" in state:
                delta = state[f"{stem}.lora_B.weight"] @ state[f"{stem}.lora_A.weight"] * scale
                weights[f"{path}.weight"] = module.weight + delta
        made.append(torch.func.functional_call(encoder, weights, (ids,), {"output_hidden_states": True}))
    if name in ("sd15", "sd2"):
        return {"prompt_embeds": made[0].last_hidden_state}
    if name in ("flux", "flux_kontext"):
        return {"pooled_prompt_embeds": made[0].pooler_output}
    embeds = torch.cat([one.hidden_states[-2] for one in made], -1)
    if name == "sdxl":
        return {"prompt_embeds": embeds, "text_embeds": made[1].text_embeds}
    pooled = torch.cat([one.text_embeds for one in made], -1)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", CLIPS)
def test_gradients_of_text_adapters_are_autograds(tiny, name, checkpointing):
    """Of the loss itself, in float32, through a denoiser that diffusers loaded, against weights added up by hand."""
    if checkpointing and name not in ("sd15", "sdxl"):
        return  # the same encoders
    family = make(families.get(name), tiny(name))
    load_encoders(family)
    cached = told(family)
    facts = family.make_image_conditioning((40, 56), (4, 6), miniatures.get_hw(family.name))
    cached |= {key: torch.stack([tensor] * 2) for key, tensor in facts.items()}
    text = text_encoders.TextEncoders(family, Adapter(rank=4, alpha=2.0, dtype="fp32"), seed=0)
    if checkpointing:
        text.checkpoint_()
    text.train()
    generator = torch.Generator().manual_seed(1)
    cls = getattr(diffusers, family.denoiser_class)
    denoiser = cls.from_pretrained(tiny(name) / family.denoiser_name).requires_grad_(False)
    adapted = text_encoders.Adapted(denoiser, text.encoders)
    named = dict(adapters.list_trained_parameters(adapted))
    with torch.no_grad():
        for key, parameter in named.items():
            if ".lora_B." in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    shape = family.encode_images(torch.zeros(1, 3, *miniatures.get_hw(family.name))).shape[1:]
    noisy = torch.randn(2, *shape, generator=generator)
    target = torch.randn(noisy.shape, generator=generator)
    t_B = torch.tensor([100, 700]) if name in ("sd15", "sd2", "sdxl") else torch.tensor([0.1, 0.7])
    family.predict(denoiser, noisy, t_B, text.encode(PROMPTS, cached)).sub(target).square().mean().backward()

    leaves = {key: parameter.detach().clone().requires_grad_() for key, parameter in named.items()}
    cond = reference_conditioning(name, tiny(name), leaves, 2.0 / 4)
    if name == "sd3":
        width = cached["prompt_embeds"].shape[-1]
        clip = torch.nn.functional.pad(cond["prompt_embeds"], (0, width - cond["prompt_embeds"].shape[-1]))
        cond["prompt_embeds"] = torch.cat([clip, cached["prompt_embeds"][:, 77:]], 1)
    family.predict(denoiser, noisy, t_B, {**cached, **cond}).sub(target).square().mean().backward()
    assert len(named) >= 2 * 6
    for key, parameter in named.items():
        assert parameter.grad is not None and parameter.grad.any(), key
        error = float((parameter.grad - leaves[key].grad).norm() / leaves[key].grad.norm())
        assert error < 2e-4, (key, error)


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 1), (True, 2)])
def test_checkpointing_recomputes_each_layer(tiny, checkpointing, times):
    family = make(families.get("sdxl"), tiny("sdxl"))
    text = text_encoders.TextEncoders(family, Adapter(dtype="fp32"), seed=0)
    if checkpointing:
        text.checkpoint_()
    text.train()
    calls = []
    for encoder in text.encoders.values():
        for path, module in encoder.named_modules():
            if path.endswith(".mlp"):
                module.register_forward_pre_hook(lambda *_, path=path: calls.append(path))
    text.encode(PROMPTS, {})["prompt_embeds"].sum().backward()
    read = [path for path in calls if ".0." in path]
    assert len(read) == 2 * times


def test_layers_that_nothing_reads_get_no_adapter(tiny):
    """SDXL takes the first CLIP's embeddings before its last layer, and nothing behind it."""
    family = make(families.get("sdxl"), tiny("sdxl"))
    text = text_encoders.TextEncoders(family, Adapter(), seed=0)
    numbers = {
        name: {int(layer.split(".")[-3]) for layer in adapters.find_adapted_layers(e)}
        for name, e in text.encoders.items()
    }
    assert numbers == {"text_encoder": {0}, "text_encoder_2": {0, 1}}
    full = full_clip("clip_l")
    assert len(text_encoders.list_adapted_layers(families.get("sdxl"), "text_encoder", full)) == 66
    assert len(text_encoders.list_adapted_layers(families.get("sd3"), "text_encoder", full)) == 72


def test_start_values_of_two_encoders_differ_and_depend_on_names_only(tiny):
    family = make(families.get("sd3"), tiny("sd3"))
    text = text_encoders.TextEncoders(family, Adapter(rank=2), seed=3)
    state = adapters.copy_state(text_encoders.Adapted(torch.nn.Identity(), text.encoders))
    ends = "text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    assert f"text_encoder.{ends}" in state and f"text_encoder_2.{ends}" in state
    one, two = (state[f"{name}.{ends}"].float().flatten()[:8] for name in ("text_encoder", "text_encoder_2"))
    assert not torch.allclose(one / one.abs().max(), two / two.abs().max(), atol=1e-2)


# -- runs


@pytest.mark.parametrize("name", CLIPS)
def test_a_run_trains_them_and_its_files_do_the_same_in_diffusers(job, name):
    """Every layout passes: keys consumed whole, deltas, conditioning, prediction and previews of a clean pipeline."""
    formats = list(families.get(name).layouts)
    mine = job(
        *ON,
        "train.steps=2",
        "export.verify=true",
        *(SHOWN if name in ("sd15", "sdxl") else ()),
        f"export.formats={formats}",
        "memory.gradient_checkpointing=true",
        family=name,
    )
    result = run(mine)
    assert [report.ok for report in result.reports] == [True] * len(formats)
    for report in result.reports:
        assert report.measured["text_effect"] > 0.01 and report.measured["text_error"] <= 0.01
        assert report.measured.get("preview_psnr", math.inf) == math.inf  # the same numbers on the way to each pixel
    state = load_file(folder_of(mine) / "checkpoints" / "step-000002" / "adapter.safetensors")
    of_text = {key for key in state if key.startswith("text_encoder")}
    assert {key.split(".")[0] for key in of_text} == set(families.get(name).trained_text)
    assert all(state[key].any() for key in of_text)
    (model,) = events(mine, "model")
    assert model["lr_text_encoder"] == 5e-3 and any("stay loaded" in line for line in model["memory"])
    assert [event["lr_text_encoder"] for event in events(mine, "step")] == pytest.approx([5e-3] * 2)
    metadata = safetensors_file.read_header(result.files[0]).metadata
    assert metadata["ss_text_encoder_lr"] == "0.005"


def test_the_frozen_weights_stay_and_the_order_of_data_is_the_same(job, monkeypatch):
    seen, held = [], []
    real_noise, real_load, real_finish = step_stage.add_noise, train.load, train.finish

    def add_noise(family, denoiser, objective, batch, *more):
        seen[-1].append((batch.uids, batch.captions, batch.flipped, float(batch.noise_BCHW.sum())))
        return real_noise(family, denoiser, objective, batch, *more)

    def frozen(loaded):
        text = loaded.text.encoders if loaded.text else {}
        return {
            f"{part}.{key}": tensor.clone()
            for part, encoder in text.items()
            for key, tensor in encoder.state_dict().items()
            if ".lora_" not in key
        }

    monkeypatch.setattr(step_stage, "add_noise", add_noise)
    monkeypatch.setattr(train, "load", lambda *given: (held.append(frozen(loaded := real_load(*given))), loaded)[1])
    monkeypatch.setattr(train, "finish", lambda *given: (held.append(frozen(given[2])), real_finish(*given))[1])
    random = ("dataset.caption_dropout=0.4", "dataset.shuffle_tags=true", "dataset.keep_tokens=0", "dataset.flip=true")
    for number, settings in enumerate((("optimizer.lr=1e-2", "train.batch_size=2"), ON)):
        seen.append([])
        run(job(*settings, *random, "train.steps=4", f"name=run{number}", "adapter.targets=['attn2.to_k']"))
    assert seen[0] == seen[1] and len({caption for _, captions, *_ in seen[0] for caption in captions}) > 3
    assert "" in {caption for _, captions, *_ in seen[0] for caption in captions}
    assert held[2].keys() == held[3].keys() and len(held[2]) > 10
    assert all(torch.equal(tensor, held[3][key]) for key, tensor in held[2].items())


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_resumed_is_the_same_to_the_bit(make_job, tmp_path, tree_hash, name):
    settings = (
        *ON,
        *("train.steps=4", "adapter.dropout=0.2", "dataset.caption_dropout=0.3", "dataset.shuffle_tags=true"),
        *("schedule.name=cosine", "schedule.warmup=2", "memory.gradient_checkpointing=true", "checkpoint.every=2"),
        f"adapter.targets=['{'attn2.to_k' if name == 'sd15' else 'attn.to_q'}']",
    )
    whole, pieces = (make_job(tmp_path / part, *settings, family=name) for part in "ab")
    run(whole)
    run_until(pieces, 1)
    run_until(pieces, 3, resume=True, how="crash")
    run(pieces, resume=True)
    told = []
    for one in (whole, pieces):
        hashes = tree_hash(folder_of(one))
        told.append({k: v for k, v in hashes.items() if k.startswith(("export/", "checkpoints/step-000004/"))})
    assert told[0] == told[1] and len(told[0]) == 6
    tensors = load_file(folder_of(whole) / "checkpoints" / "step-000004" / "optimizer.safetensors")
    assert any(key.startswith("text_encoder.") and key.endswith("/master") for key in tensors)


def test_two_processes_end_with_the_weights_of_one(make_job, tmp_path):
    ends = {}
    for number in (1, 2):
        folder = tmp_path / str(number)
        settings = (
            "adapter.text_encoder=true",
            "adapter.targets=['attn2.to_k']",
            "train.steps=3",
            "checkpoint.every=3",
        )
        mine = make_job(folder, *settings, "train.batch_size=4", "optimizer.lr=1e-3", *FLOAT32)
        done = run_forked(mine, folder, number)
        assert not done.returncode, done.stderr[-3000:]
        ends[number] = load_file(folder_of(mine) / "checkpoints" / "step-000003" / "adapter.safetensors")
    assert ends[1].keys() == ends[2].keys() and any(key.startswith("text_encoder") for key in ends[1])
    # Adam divides each gradient by its own size, and so magnifies the rounding of sums in another order where that is
    # near zero: a few elements of a tensor.
    gaps = {key: float((ends[2][key] - tensor).norm()) for key, tensor in ends[1].items()}
    sizes = {key: float(tensor.norm()) for key, tensor in ends[1].items()}
    assert sum(gap**2 for gap in gaps.values()) < 1e-10 * sum(size**2 for size in sizes.values())
    assert all(gap < 1e-2 * sizes[key] for key, gap in gaps.items())


def test_a_file_without_the_text_encoders_or_with_others_fails(job, tmp_path):
    mine = job(*ON, "train.steps=2", "adapter.targets=['attn2.to_k']", "export.formats=['diffusers']")
    (file,) = run(mine).files
    family = make(families.get("sd15"), mine.model.path, torch.bfloat16)
    adapter = load_file(folder_of(mine) / "checkpoints" / "step-000002" / "adapter.safetensors")
    load_encoders(family)
    prompts = ["a cat", "a dog, green"]
    batch = type("Batch", (), {})()
    batch.captions, batch.cond = prompts, told(family, prompts)
    batch.latents_BCHW = batch.noise_BCHW = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    batch.t_generators = [torch.Generator().manual_seed(i) for i in range(2)]
    pipeline = verify.build_clean_pipeline(family, text=True)
    verify.load(pipeline, file, family)
    objective = family.get_objective_type()(family.read_scheduler_config(), Objective())
    text = type("Text", (), {"pipeline": pipeline})()
    probe = verify.make_probe(family, pipeline.unet, objective, batch, text=text)
    assert probe.captions == tuple(prompts)
    verify.save_probe(probe, tmp_path / "probe.safetensors")
    assert load_probe(tmp_path / "probe.safetensors").captions == probe.captions
    assert verify.check(file, family, verify.Reference(export.Adapter(adapter), probe=probe)).ok

    def failed(change):
        tensors, metadata = safetensors_file.read(file)
        path = tmp_path / "changed.safetensors"
        safetensors_file.write_file(
            path, change(dict(tensors)), {k: v for k, v in metadata.items() if "hash" not in k}, hashes=True
        )
        report = verify.check(path, family, verify.Reference(export.Adapter(adapter), probe=probe))
        return {check.name for check in report.checks if not check.ok}

    assert failed(lambda tensors: {k: v for k, v in tensors.items() if not k.startswith("text_encoder")}) == {
        "delta",
        "text",
    }
    one = "text_encoder.text_model.encoder.layers.1.mlp.fc1.lora_B.weight"
    assert failed(lambda tensors: tensors | {one: -tensors[one]}) == {"delta", "text"}
    renamed = one.replace("layers.1", "layers.7")
    assert "load" in failed(lambda tensors: {k.replace("layers.1", "layers.7"): v for k, v in tensors.items()}), renamed


# -- settings


def test_the_two_rates_are_torchs_two_groups():
    section = Optimizer(name="adamw", lr=1e-2, text_encoder_lr=2e-3, lr_scale="none")
    names = ["to_q", "text_encoder.fc1"]
    ours = [(name, torch.nn.Parameter(torch.ones(3))) for name in names]
    theirs = [torch.nn.Parameter(torch.ones(3)) for _ in names]
    stepper = optim.build(ours, section, base_storage="none", seed=0, of_text=names[1:])
    groups = [{"params": [p], "lr": lr} for p, lr in zip(theirs, (1e-2, 2e-3), strict=True)]
    judge = torch.optim.AdamW(groups, weight_decay=section.weight_decay)
    for step in range(3):
        grads = {name: torch.tensor([0.1, -0.2, 0.3]) * (step + 1) for name in names}
        stepper.step(stepper.layout.join(grads), 1e-2, step)
        for parameter, name in zip(theirs, names, strict=True):
            parameter.grad = grads[name].clone()
        judge.step()
    for (_, mine), parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, parameter, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("scale", "expected"), [("auto", 5e-5), ("none", 5e-5), ("3.0", 5e-5)])
def test_auto_is_half_of_lr_and_no_part_of_lr_scale(job, scale, expected):
    section = job("optimizer.lr=1e-4", f"optimizer.lr_scale={scale}").optimizer
    assert optim.resolve_text_encoder_lr(section) == expected
    assert optim.resolve_text_encoder_lr(section.model_copy(update={"text_encoder_lr": 7e-6})) == 7e-6


def test_what_does_not_fit_is_told(job):
    for name in ("wan", "qwen_image", "chroma"):
        with pytest.raises(UserError, match=r"adapter\.text_encoder = true: .* use false"):
            resolve.resolve_auto(job("adapter.text_encoder=true", family=name), families.get(name))
    with pytest.raises(UserError, match=r"optimizer\.text_encoder_lr: must be above 0 and below 1, got 0"):
        job("optimizer.text_encoder_lr=0.0")
    mine = job("optimizer.text_encoder_lr=1e-5", "train.steps=1")
    run(mine)
    assert "optimizer.text_encoder_lr has no effect without adapter.text_encoder = true" in [
        event["text"] for event in events(mine, "warning")
    ]


def test_a_checkpoint_of_before_the_setting_goes_on(job):
    mine = job("train.steps=2")
    now = checkpoint.describe_job(mine, "base", "data")
    before = json.loads(json.dumps(now))
    assert before["pinned"].pop("adapter.text_encoder") is False
    before["settings"].pop("optimizer.text_encoder_lr")
    assert checkpoint.compare(before, now) == ([], [])
    other = checkpoint.describe_job(job("train.steps=2", "adapter.text_encoder=true"), "base", "data")
    assert checkpoint.compare(before, other)[0] == ["adapter.text_encoder: was False, is True"]


def test_prompts_that_are_too_long_are_told_of_once(tiny, caplog):
    family = make(families.get("sd15"), tiny("sd15"))
    text = text_encoders.TextEncoders(family, Adapter(), seed=0)
    before = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_warning()
    diffusers.utils.logging.enable_propagation()
    try:
        text.encode(["a cat " * 200], {})
        assert not caplog.records
        text.pipeline.encode_prompt(["a cat " * 200], "cpu", 1, False)
        assert caplog.records
    finally:
        diffusers.utils.logging.disable_propagation()
        diffusers.utils.logging.set_verbosity(before)


# -- the tools


def text_and_denoiser_lora(family, rank=2, seed=0):
    """A LoRA of a miniature: of all text layers, and of two of the denoiser; internal naming, float32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {}
    for name in family.trained_text:
        encoder = family._load_text_part(name, "none")
        for path, module in encoder.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in path:
                shapes[f"{name}.text_model.{path.removeprefix('text_model.')}"] = tuple(module.weight.shape)
    denoiser = family.make_empty_denoiser()
    for path in family.choose_adapter_layers(denoiser)[:2]:
        shapes[path] = tuple(denoiser.get_submodule(path).weight.shape)
    state = {}
    for path, (out, inner, *kernel) in shapes.items():
        state[f"{path}.lora_A.weight"] = torch.randn(rank, inner, *kernel, generator=generator) * 0.1
        state[f"{path}.lora_B.weight"] = torch.randn(out, rank, *(1 for _ in kernel), generator=generator)
    return state


def as_file(family, state, path, layout="diffusers", scale=1.0):
    tensors = layouts.to_layout(state, scale, family, family.read_denoiser_config(), layout)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        path,
        {"ss_base_model_version": family.kohya_base_version},
    )
    return path


def text_weights(family):
    return {name: tensor.clone() for name, tensor in family.read_trained_text_tensors()}


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_merged_into_a_folder_text_encoders_are_as_diffusers_fuses_them(tiny, tmp_path, name):
    family = make(families.get(name), tiny(name))
    state = text_and_denoiser_lora(family)
    file = as_file(family, state, tmp_path / "lora.safetensors")
    merged = merge.merge_into_base([(file, 0.7)], str(tiny(name)), tmp_path / "merged")
    assert merged.layers == len(state) // 2
    pipe = getattr(diffusers, family.pipeline_class).from_pretrained(tiny(name))
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name)
    parts = [family.denoiser_name, *family.trained_text]
    pipe.fuse_lora(components=parts, lora_scale=0.7)
    pipe.unload_lora_weights()
    ours = getattr(diffusers, family.pipeline_class).from_pretrained(tmp_path / "merged")
    for part in parts:
        expected, found = (getattr(one, part).state_dict() for one in (pipe, ours))
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
    before = text_weights(family)
    after = text_weights(make(families.get(name), tmp_path / "merged"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {
        f"{key.removesuffix('.lora_A.weight')}.weight" for key in state if key.startswith("text") and "_A" in key
    }


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_merged_into_a_single_file_text_encoders_gain_the_delta(tmp_path, name):
    """In the original's names, OpenCLIP's fused q, k and v too; read back as the family reads a single file."""
    Family, base = families.get(name), tmp_path / "base"
    miniatures.save(Family.name, base)
    save_file(original_layout(Family, base), tmp_path / "one.safetensors")
    family = make(Family, base)
    state = text_and_denoiser_lora(family)
    file = as_file(family, state, tmp_path / "lora.safetensors", "kohya", 0.5)
    out = tmp_path / "merged.safetensors"
    merge.merge_into_base([(file, 1.0)], str(tmp_path / "one.safetensors"), out, components=str(base))
    before, after = text_weights(family), text_weights(make(Family, out, components=str(base)))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        module = key.removesuffix(".weight")
        if f"{module}.lora_A.weight" in state:
            tensor = tensor + 0.5 * state[f"{module}.lora_B.weight"] @ state[f"{module}.lora_A.weight"]
        torch.testing.assert_close(after[key], tensor, rtol=1e-5, atol=1e-6)


def test_a_single_file_without_text_encoders_is_told(tmp_path):
    Family, base = families.get("flux"), tmp_path / "base"
    miniatures.save(Family.name, base)
    save_file(original_layout(Family, base), tmp_path / "one.safetensors")
    family = make(Family, base)
    file = as_file(family, text_and_denoiser_lora(family), tmp_path / "lora.safetensors")
    with pytest.raises(UserError, match="one.safetensors has no text_encoder, .* merge into a diffusers folder"):
        merge.merge_into_base(
            [(file, 1.0)], str(tmp_path / "one.safetensors"), tmp_path / "x.safetensors", components=str(base)
        )


def test_extract_finds_what_was_merged_into_text_encoders(tiny, tmp_path):
    family = make(families.get("sdxl"), tiny("sdxl"))
    state = text_and_denoiser_lora(family)
    file = as_file(family, state, tmp_path / "lora.safetensors")
    merge.merge_into_base([(file, 1.0)], str(tiny("sdxl")), tmp_path / "merged")
    out = tmp_path / "found.safetensors"
    models = extract.Models(str(tiny("sdxl")), str(tmp_path / "merged"), "sdxl")
    extract.extract(models, out, extract.Options(rank=2, dtype="fp32", layout="kohya"))
    found, scaling = layouts.from_layout(load_file(out), family, family.read_denoiser_config())
    assert found.keys() == state.keys()
    for module in layouts.list_modules(found):
        mine, theirs = ([one[f"{module}.lora_{half}.weight"] for half in "AB"] for one in (found, state))
        assert verify.compute_delta_error((*mine, scaling[module]), (*theirs, 1.0)) < 1e-4
    options = extract.Options(rank=2, layers=["to_q", "proj_in"])
    report = extract.extract(models, tmp_path / "few.safetensors", options)
    assert any(name.startswith("text_encoder_2.") for name in report.left_out)


@pytest.mark.parametrize("name", CLIPS)
def test_inspect_and_convert_know_the_family_by_its_text_layers(tmp_path, name):
    """Files of the released sizes, of text encoders alone: what kohya's network_train_text_encoder_only gives."""
    Family = families.get(name)
    file = tmp_path / "lora.safetensors"
    tensors = layouts.to_layout(full_text_state(name), 0.5, Family, Family.reference_config, "kohya")
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, file)
    about = files.inspect(file)
    large = {"sdxl", "sd3"}  # all of whose first encoders are one, and that of FLUX.1
    alike = large if name in large else large | {"flux", "flux_kontext"} if name.startswith("flux") else {name}
    assert set(about.families) == alike and about.layout == "kohya"
    out = tmp_path / "converted.safetensors"
    assert files.convert(file, out, "diffusers", family=name) == len(tensors) // 3
    back, _ = layouts.from_layout(load_file(out), Family, Family.reference_config)
    state = full_text_state(name)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[k], state[k] * (0.5 if "lora_B" in k else 1)) for k in state)


def test_resize_merge_and_average_take_text_layers_as_any_other(tiny, tmp_path):
    family = make(families.get("sd15"), tiny("sd15"))
    states = [text_and_denoiser_lora(family, rank=4, seed=seed) for seed in (0, 1)]
    one, two = (as_file(family, state, tmp_path / f"{i}.safetensors", "kohya") for i, state in enumerate(states))
    modules = len(states[0]) // 2
    resize.resize(one, tmp_path / "small.safetensors", rank=2, energy=0, uniform=False, dtype="")
    assert {pair.rank for pair in pairs.read(tmp_path / "small.safetensors").pairs.values()} == {2}
    merge.merge([(one, 0.5), (two, 0.5)], tmp_path / "both.safetensors", rank=0, energy=0, dtype="")
    average.average_files([one, two], tmp_path / "mean.safetensors", what="delta", half_life=0, rank=8, dtype="")
    for made in ("both", "mean"):
        found = pairs.read(tmp_path / f"{made}.safetensors").pairs
        assert len(found) == modules and any(name.startswith("lora_te_") for name in found)
        for name, pair in found.items():
            wanted = sum(pairs.read(path).pairs[name].compute_delta() for path in (one, two)) / 2
            torch.testing.assert_close(pair.compute_delta(), wanted, rtol=1e-4, atol=1e-5)


def test_an_average_of_a_runs_checkpoints_holds_the_text_encoders(job):
    mine = job(*ON, "train.steps=4", "adapter.targets=['attn2.to_k']", "export.formats=['kohya']")
    run(mine)
    _, (file,) = average.average_run(folder_of(mine), what="factors", half_life=0, last=0)
    names = pairs.read(file).pairs
    assert sum(name.startswith("lora_te_") for name in names) == 12 and len(names) > 12


def test_the_estimate_counts_what_they_hold(job, tiny):
    found = {}
    for setting in ("false", "true"):
        mine = job(f"adapter.text_encoder={setting}", family="sdxl")
        found[setting] = estimate.estimate(planning.make(mine))
    text = text_encoders.TextEncoders(make(families.get("sdxl"), tiny("sdxl"), torch.bfloat16), mine.adapter, 0)
    text.train()
    adapted = [p for encoder in text.encoders.values() for p in encoder.parameters() if p.requires_grad]
    assert found["true"].adapter_bytes - found["false"].adapter_bytes == sum(p.nbytes for p in adapted)
    buffers = sum(b.nbytes for encoder in text.encoders.values() for b in encoder.buffers())
    assert found["true"].base_bytes - found["false"].base_bytes == text.count_bytes() + buffers
    assert found["true"].step_bytes > found["false"].step_bytes
    assert found["true"].optimizer_bytes > found["false"].optimizer_bytes


def test_a_file_of_text_encoders_alone_is_verified(tiny, tmp_path):
    """As network_train_text_encoder_only of kohya leaves one; `lora-fp8 verify --base` asks of merging too."""
    family = make(families.get("sd15"), tiny("sd15"))
    state = {key: tensor for key, tensor in text_and_denoiser_lora(family).items() if key.startswith("text_encoder.")}
    mine = export_metadata.ExportFacts("lora", 1, 2, 2.0, 1e-4, 0, (48, 48))
    section = Export(formats=["kohya", "diffusers"], dtype="fp32")
    for path in export.write(export.Adapter(state), family, family.read_denoiser_config(), section, mine, tmp_path):
        report = verify.check(path, family, verify.Reference(export.Adapter(state)), merged=True)
        assert report.ok, report.list_failures()
        assert not any(check.name.startswith("merged") for check in report.checks)
        with_denoiser = verify.check_file(path, str(tiny("sd15")))
        assert with_denoiser.ok, with_denoiser.list_failures()
