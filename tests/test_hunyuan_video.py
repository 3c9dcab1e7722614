"""HunyuanVideo: Llama 3's tokens whatever class the folder names, and which of its models a file is."""

import json

import diffusers
import miniatures
import torch
from editing import load_encoders
from test_families import make, write_header
from tokenizers import Tokenizer

from lora_fp8 import families, precision
from lora_fp8.settings import Model


def hunyuan(tmp_path):
    model = Model(family="hunyuan_video", path=str(tmp_path))
    return families.get("hunyuan_video")(model, device="cpu", dtype=torch.float32)


def test_text_is_cut_into_tokens_as_the_file_says(tmp_path):
    """The released folder names LlamaTokenizerFast, which in transformers 5 would bring the rules of Llama 2."""
    miniatures.save("hunyuan_video", tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "LlamaTokenizerFast"}
    path.write_text(json.dumps(settings), encoding="utf-8")
    text = "the main cat, détail\n\n by detailing  aspects"
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json")).encode(text).ids
    assert hunyuan(tmp_path).load_tokenizer("tokenizer")(text).input_ids == expected


def test_a_model_without_guidance_embedding(tmp_path):
    miniatures.save("hunyuan_video", tmp_path)
    assert hunyuan(tmp_path).list_base_facts() == {"base.guidance": True}
    plain = {**hunyuan(tmp_path).read_denoiser_config(), "guidance_embeds": False}
    diffusers.HunyuanVideoTransformer3DModel.from_config(plain).save_pretrained(tmp_path / "transformer")
    family = hunyuan(tmp_path)
    assert family.list_base_facts() == {"base.guidance": False}
    denoiser = family.make_empty_denoiser()
    precision.fill_(denoiser, family.read_denoiser_tensors(), torch.float32, "cpu")
    load_encoders(family)
    cond = family.collate(family.encode_prompts(["a cat"]))
    noisy = torch.randn(1, 4, 4, 6)
    with torch.no_grad():
        one, other = (family.predict(denoiser, noisy, torch.tensor([0.5]), cond, guidance=g) for g in (1.0, 6.0))
    assert one.isfinite().all() and torch.equal(one, other)


def test_image_to_video_with_the_same_tensors_is_told_by_its_name(tmp_path):
    Family = families.get("hunyuan_video")
    miniatures.save(Family.name, tmp_path)
    for name, num in (("hunyuan_video_t2v_720p", 0), ("hunyuan_v2_replace_image_to_video_720p", 1), ("hy_I2V", 1)):
        header = {"img_in.proj.weight": (32, 4, 1, 2, 2), "final_layer.linear.weight": (16, 32)}
        header |= {"double_blocks.0.img_attn_qkv.weight": (96, 32), "vector_in.in_layer.weight": (32, 32)}
        write_header(tmp_path / f"{name}.safetensors", header)
        found = make(Family, tmp_path / f"{name}.safetensors", components=str(tmp_path)).warnings
        assert ["suggests an image-to-video model" in warning for warning in found] == [True] * num


def test_image_to_video_is_another_model():
    shapes = {"img_in.proj.weight": (3072, 16, 1, 2, 2), "final_layer.linear.weight": (64, 3072)}
    shapes |= {"double_blocks.0.img_attn_qkv.weight": (9216, 3072), "vector_in.in_layer.weight": (3072, 768)}
    recognises = families.get("hunyuan_video").recognises
    assert recognises(shapes)
    assert not recognises({**shapes, "img_in.proj.weight": (3072, 33, 1, 2, 2)})
