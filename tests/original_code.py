"""Weights of diffusers and transformers in the names and shapes of the original code, as single files have them.

Written down from the original code: latent-diffusion and generative-models (Stability AI), open_clip, flux (Black
Forest Labs), Wan2.1 (Alibaba). Not from `lora_fp8`, which is judged by them.
"""

import re

import torch


def ldm_names(unet, layers_per_block):
    """diffusers' UNet parameter names -> those of the original code, written down from the two architectures."""
    parts = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3"}
    parts |= {"time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}
    top = {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
    top |= {f"time_embedding.linear_{i}": f"time_embed.{2 * i - 2}" for i in (1, 2)}
    top |= {f"add_embedding.linear_{i}": f"label_emb.0.{2 * i - 2}" for i in (1, 2)}
    with_attention = {name.split(".attentions.")[0] for name in unet if ".attentions." in name}
    names = {}
    for name in unet:
        kind = name.split(".")
        if kind[0] in ("down_blocks", "up_blocks"):
            block, what, layer = int(kind[1]), kind[2], int(kind[3])
            down = kind[0] == "down_blocks"
            index = block * (layers_per_block + 1) + layer + (1 if down else 0)
            if what == "downsamplers":
                names[name] = f"input_blocks.{(block + 1) * (layers_per_block + 1)}.0.op.{kind[-1]}"
                continue
            if what == "upsamplers":
                slot = 2 if f"up_blocks.{block}" in with_attention else 1
                names[name] = f"output_blocks.{(block + 1) * (layers_per_block + 1) - 1}.{slot}.conv.{kind[-1]}"
                continue
            rest = [parts.get(kind[4], kind[4]), *kind[5:]] if what == "resnets" else kind[4:]
            place = f"{'input' if down else 'output'}_blocks.{index}.{0 if what == 'resnets' else 1}"
            names[name] = ".".join([place, *rest])
        elif kind[0] == "mid_block":
            resnet = kind[1] == "resnets"
            rest = [parts.get(kind[3], kind[3]), *kind[4:]] if resnet else kind[3:]
            names[name] = ".".join([f"middle_block.{2 * int(kind[2]) if resnet else 1}", *rest])
        else:
            module, _, parameter = name.rpartition(".")
            names[name] = f"{top[module]}.{parameter}"
    return {name: f"model.diffusion_model.{old}" for name, old in names.items()}


def ldm_vae(vae, prefix="first_stage_model."):
    """A VAE of diffusers in the names and shapes of the original code."""
    up = 1 + max(int(n.split(".")[2]) for n in vae if n.startswith("decoder.up_blocks."))
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    tensors = {}
    for name, tensor in vae.items():
        kind = name.split(".")
        new = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        if kind[1] in ("down_blocks", "up_blocks"):
            down = kind[1] == "down_blocks"
            index = int(kind[2]) if down else up - 1 - int(kind[2])
            if kind[3] == "resnets":
                new = ".".join([kind[0], "down" if down else "up", str(index), "block", *new.split(".")[4:]])
            else:
                place = f"down.{index}.downsample" if down else f"up.{index}.upsample"
                new = f"{kind[0]}.{place}.conv.{kind[-1]}"
        elif kind[1] == "mid_block" and kind[2] == "resnets":
            new = ".".join([kind[0], "mid", f"block_{int(kind[3]) + 1}", *kind[4:]])
        elif kind[1] == "mid_block":
            part = name.split("attentions.0.")[1].removesuffix(f".{kind[-1]}")
            new = f"{kind[0]}.mid.attn_1.{attention[part]}.{kind[-1]}"
            if tensor.ndim == 2:
                tensor = tensor[:, :, None, None]  # 1x1 convolutions in the original
        tensors[f"{prefix}{new}"] = tensor.clone()
    return tensors


def open_clip(text, prefix="conditioner.embedders.1.model."):
    """OpenCLIP's names: fused attention inputs, a transposed projection."""
    tensors = {}
    for name, tensor in text.items():
        new = name.removeprefix("text_model.").replace("embeddings.token_embedding", "token_embedding")
        if "position_embedding" in name:
            new = "positional_embedding"
        elif name == "text_projection.weight":
            new, tensor = "text_projection", tensor.T.contiguous()
        elif "self_attn.q_proj" in name:
            tensor = torch.cat([text[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")])
            new = new.replace("self_attn.q_proj.", "attn.in_proj_")
        elif "self_attn" in name and "out_proj" not in name:
            continue
        for old, original in {
            "encoder.layers.": "transformer.resblocks.",
            "layer_norm1": "ln_1",
            "layer_norm2": "ln_2",
            "mlp.fc1": "mlp.c_fc",
            "mlp.fc2": "mlp.c_proj",
            "self_attn.": "attn.",
            "final_layer_norm": "ln_final",
        }.items():
            new = new.replace(old, original)
        tensors[f"{prefix}{new}"] = tensor
    return tensors


def bfl_tensors(transformer):
    """A FLUX transformer of diffusers in the original's names: fused q, k, v (and MLP), shift before scale."""
    tensors = {}
    for kind in ("weight", "bias"):

        def take(name, kind=kind):
            return transformer[f"{name}.{kind}"]

        for new, old in {
            "time_in": "timestep_embedder",
            "vector_in": "text_embedder",
            "guidance_in": "guidance_embedder",
        }.items():
            tensors[f"{new}.in_layer.{kind}"] = take(f"time_text_embed.{old}.linear_1")
            tensors[f"{new}.out_layer.{kind}"] = take(f"time_text_embed.{old}.linear_2")
        tensors[f"txt_in.{kind}"] = take("context_embedder")
        tensors[f"img_in.{kind}"] = take("x_embedder")
        tensors[f"final_layer.linear.{kind}"] = take("proj_out")
        scale, shift = take("norm_out.linear").chunk(2)
        tensors[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([shift, scale])
        for i in range(2):
            new, old = f"double_blocks.{i}", f"transformer_blocks.{i}"
            for stream, suffix, qkv, out in (
                ("img", "", ("to_q", "to_k", "to_v"), "to_out.0"),
                ("txt", "_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"),
            ):
                tensors[f"{new}.{stream}_mod.lin.{kind}"] = take(f"{old}.norm1{suffix}.linear")
                tensors[f"{new}.{stream}_attn.qkv.{kind}"] = torch.cat([take(f"{old}.attn.{n}") for n in qkv])
                tensors[f"{new}.{stream}_attn.proj.{kind}"] = take(f"{old}.attn.{out}")
                tensors[f"{new}.{stream}_mlp.0.{kind}"] = take(f"{old}.ff{suffix}.net.0.proj")
                tensors[f"{new}.{stream}_mlp.2.{kind}"] = take(f"{old}.ff{suffix}.net.2")
            new, old = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
            tensors[f"{new}.modulation.lin.{kind}"] = take(f"{old}.norm.linear")
            names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            tensors[f"{new}.linear1.{kind}"] = torch.cat([take(f"{old}.{n}") for n in names])
            tensors[f"{new}.linear2.{kind}"] = take(f"{old}.proj_out")
    for i in range(2):
        for part, letter in (("query", "q"), ("key", "k")):
            old = f"transformer_blocks.{i}.attn"
            for stream, added in (("img", ""), ("txt", "added_")):
                name = f"double_blocks.{i}.{stream}_attn.norm.{part}_norm.scale"
                tensors[name] = transformer[f"{old}.norm_{added}{letter}.weight"]
            tensors[f"single_blocks.{i}.norm.{part}_norm.scale"] = transformer[f"single_{old}.norm_{letter}.weight"]
    return tensors


def wan_transformer(tensors):
    """A Wan transformer of diffusers in the names of wan/modules/model.py."""
    embedders = {
        "time_embedder.linear_1": "time_embedding.0",
        "time_embedder.linear_2": "time_embedding.2",
        "text_embedder.linear_1": "text_embedding.0",
        "text_embedder.linear_2": "text_embedding.2",
        "time_proj": "time_projection.1",
    }
    inner = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
    found = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if name == "scale_shift_table":
            new = "head.modulation"
        elif module == "proj_out":
            new = f"head.head.{kind}"
        elif module.startswith("condition_embedder."):
            new = f"{embedders[module.removeprefix('condition_embedder.')]}.{kind}"
        elif match := re.fullmatch(r"(blocks\.\d+)\.attn([12])\.(.+)", module):
            new = f"{match[1]}.{'self' if match[2] == '1' else 'cross'}_attn.{inner[match[3]]}.{kind}"
        elif match := re.fullmatch(r"(blocks\.\d+)\.ffn\.net\.(0\.proj|2)", module):
            new = f"{match[1]}.ffn.{match[2][0]}.{kind}"
        else:
            new = name.replace(".norm2.", ".norm3.").replace("scale_shift_table", "modulation")
        found[new] = tensor
    return found


def wan_vae(tensors, levels=4, blocks=2):
    """A VAE of Wan or Qwen-Image of diffusers in the names of wan/modules/vae.py, which numbers all layers in a row."""
    parts = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
    parts |= {"conv_shortcut": "shortcut"}
    found = {}
    for name, tensor in tensors.items():
        side, _, rest = name.partition(".")
        if side in ("quant_conv", "post_quant_conv"):
            new = f"{'conv1' if side == 'quant_conv' else 'conv2'}.{rest}"
        elif rest.startswith("conv_in."):
            new = f"{side}.conv1.{rest.removeprefix('conv_in.')}"
        elif rest.startswith(("norm_out.", "conv_out.")):
            new = f"{side}.head.{0 if rest.startswith('norm') else 2}.{rest.partition('.')[2]}"
        elif match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d)\.(.+)", rest):
            place = 1 if match[1] == "attentions" else 2 * int(match[2])
            layer, _, kind = match[3].rpartition(".")
            new = f"{side}.middle.{place}.{parts.get(layer, layer) if place != 1 else layer}.{kind}"
        elif match := re.fullmatch(r"down_blocks\.(\d+)\.(.+)", rest):
            layer, _, kind = match[2].rpartition(".")
            new = f"{side}.downsamples.{match[1]}.{parts.get(layer, layer)}.{kind}"
        elif match := re.fullmatch(r"up_blocks\.(\d)\.resnets\.(\d)\.(.+)", rest):
            layer, _, kind = match[3].rpartition(".")
            number = int(match[1]) * (blocks + 2) + int(match[2])
            new = f"{side}.upsamples.{number}.{parts.get(layer, layer)}.{kind}"
        else:
            match = re.fullmatch(r"up_blocks\.(\d)\.upsamplers\.0\.(.+)", rest)
            new = f"{side}.upsamples.{int(match[1]) * (blocks + 2) + blocks + 1}.{match[2]}"
        found[new] = tensor
    return found


def wan_umt5(tensors):
    """A UMT5 encoder of transformers in the names of wan/modules/t5.py."""
    inner = {
        "layer.0.layer_norm": "norm1",
        "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
        "layer.1.layer_norm": "norm2",
        "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
        "layer.1.DenseReluDense.wi_1": "ffn.fc1",
        "layer.1.DenseReluDense.wo": "ffn.fc2",
    }
    inner |= {f"layer.0.SelfAttention.{one}": f"attn.{one}" for one in "qkvo"}
    found = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in ("shared", "encoder.embed_tokens"):
            found[f"token_embedding.{kind}"] = tensor
        elif module == "encoder.final_layer_norm":
            found[f"norm.{kind}"] = tensor
        else:
            number, _, layer = module.removeprefix("encoder.block.").partition(".")
            found[f"blocks.{number}.{inner[layer]}.{kind}"] = tensor
    return found
