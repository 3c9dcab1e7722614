"""Kolors: what of a prompt its tokenizer reads, and that it is no SDXL."""

import json

import miniatures
import pytest
import torch
from diffusers import KolorsPipeline
from editing import load_encoders
from test_families import make

from lora_fp8 import families
from lora_fp8.errors import UserError

Family = families.get("kolors")


@pytest.mark.parametrize(
    "text",
    ["the red dog, " * 200, "ｔｈｅ  ｒｅｄ　ｄｏｇ， " * 200, "红狗 the 蓝猫 cat " * 120],
    ids=["ascii", "wide", "chinese"],
)
def test_the_part_that_is_read_is_found_in_any_writing(tmp_path, text):
    """Wide letters and blanks in a row are others to the tokenizer than to the prompt. Judged by its own tokens."""
    miniatures.save(Family.name, tmp_path)
    family = make(Family, tmp_path)
    (cut,) = family.find_overlong([text])
    kept = text.removesuffix(cut.lost)
    tokenizer = family.load_tokenizer("tokenizer")
    whole = tokenizer([text], max_length=256, truncation=True)["input_ids"][0]
    assert len(whole) == 256 and whole[:2] == tokenizer.get_prefix_tokens()
    assert tokenizer([kept])["input_ids"][0] == whole and cut.limit == 254
    assert len(tokenizer([text])["input_ids"][0]) == 256 + cut.num_lost


def test_prompts_are_padded_in_front_to_what_the_pipeline_reads(tmp_path):
    """Its call takes `max_sequence_length` and reads 256 tokens whatever that says: so does training."""
    miniatures.save(Family.name, tmp_path)
    family, pipeline = make(Family, tmp_path), KolorsPipeline.from_pretrained(tmp_path, local_files_only=True)
    load_encoders(family)
    (cond,) = family.encode_prompts(["a red dog"])
    with torch.no_grad():
        theirs, _, pooled, _ = pipeline.encode_prompt("a red dog", do_classifier_free_guidance=False)
    assert torch.equal(cond["prompt_embeds"], theirs[0]) and theirs.shape[1] == Family.prompt_tokens == 256
    assert torch.equal(cond["text_embeds"], pooled[0])


def test_it_is_told_from_sdxl(tmp_path):
    miniatures.save(Family.name, tmp_path / "kolors")
    miniatures.save("sdxl", tmp_path / "sdxl")
    for name, found, title in (("sdxl", "kolors", "Kolors"), ("kolors", "sdxl", "Stable Diffusion XL")):
        with pytest.raises(UserError, match=f"is {title}.*set model.family = '{found}'"):
            make(families.get(name), tmp_path / found)


def test_an_inpainting_model_is_refused(tmp_path):
    miniatures.save(Family.name, tmp_path)
    path = tmp_path / "unet" / "config.json"
    told = json.loads(path.read_text(encoding="utf-8")) | {"in_channels": 9}
    path.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(UserError, match="unet/config.json has in_channels = 9, expected 4"):
        make(Family, tmp_path)


def test_sizes_are_told_exactly(tmp_path):
    """bf16 would make 668 of 667."""
    miniatures.save(Family.name, tmp_path)
    told = {}

    def denoiser(**inputs):
        told.update(inputs)
        return (inputs["sample"],)

    sizes = torch.tensor([[667.0, 401.0, 3.0, 259.0, 512.0, 768.0]])
    cond = {"prompt_embeds": torch.zeros(1, 256, 32), "text_embeds": torch.zeros(1, 32), "time_ids": sizes}
    make(Family, tmp_path, torch.bfloat16).predict(denoiser, torch.zeros(1, 4, 2, 4), torch.tensor([1099]), cond)
    assert torch.equal(told["added_cond_kwargs"]["time_ids"], sizes) and told["timestep"].item() == 1099
