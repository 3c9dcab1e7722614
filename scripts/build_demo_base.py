"""Train the demo's two tiny base models from scratch and save them in the diffusers folder layout.

    python scripts/build_demo_base.py --family sd15
    python scripts/build_demo_base.py --family flux
    python scripts/build_demo_base.py --family sd15 --measure-only

Both families learn the drawn world of `lora_fp8.demo.pictures` at 64 x 64 pixels (a part of it at 48 x 80 and 80 x 48),
on one CPU core in under an hour. They share one small autoencoder, trained here first. `sd15` is a UNet with a CLIP
text encoder and epsilon prediction, like Stable Diffusion 1.5. `flux` is a rectified-flow transformer with CLIP and T5
text encoders, like FLUX.1. Everything but the autoencoder is trained jointly, on captions that never contain the
trigger
word of the demo's concept. The saved weights are running means, in bfloat16. `measured.json` beside them says how often
the saved model, loaded afresh, draws what a prompt asks for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8.demo import (
    measure,
    pictures,
)

MAX_TOKENS = 32
TEXT_WIDTH = 96
LATENT_CHANNELS = 4
WORDS = (*pictures.COLOURS, *pictures.SHAPES, "a", "an", "on", "of", "background", "photo", "picture")

# How the demo samples: the settings under which the figures in measured.json hold.
SAMPLING = {
    "sd15": {"num_inference_steps": 25, "guidance_scale": 3.0},
    "flux": {
        "num_inference_steps": 20,
        "true_cfg_scale": 2.5,
        "negative_prompt": "",
        "guidance_scale": 1.0,
        "max_sequence_length": MAX_TOKENS,
    },
}
# The transformer has no convolutions to tell it that a shape is the same shape everywhere. It learns the six shapes
# sooner from pictures that have them near the middle and of like size.
NARROW = {"widths": (0.64, 0.74), "spread": 0.12}
DEFAULTS = {
    "sd15": {"steps": 3300, "batch": 32, "lr": 1e-3, "square": 0.82, "bf16": False, "muon": False, "narrow": False},
    "flux": {"steps": 7000, "batch": 32, "lr": 1e-3, "square": 0.5, "bf16": False, "muon": False, "narrow": True},
}


def log(text: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


# --- pictures and latents ---------------------------------------------------------------------------------------------


def to_tensor(images: list[Image.Image]) -> torch.Tensor:
    """Convert images of one size to (n, 3, height, width) floats from -1 to 1."""
    rows = [torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8).view(i.height, i.width, 3) for i in images]
    return torch.stack(rows).permute(0, 3, 1, 2).float() / 127.5 - 1


def to_images(pixels: torch.Tensor) -> list[Image.Image]:
    """Convert back what `to_tensor` made."""
    rows = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return [Image.fromarray(row) for row in rows]


def make_tiny_vae() -> AutoencoderKL:
    """Make a 4x autoencoder with 4 latent channels and about 0.24M weights."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 48),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def train_vae(seed: int, steps: int = 2400, batch: int = 12) -> AutoencoderKL:
    """Train the autoencoder on plain pictures and medleys (never the concept) and set its scale from the data."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vae = make_tiny_vae()
    log(f"autoencoder: {count_parameters(vae):,} weights")
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: compute_lr_factor(n, steps, 100))
    started = time.time()
    for step in range(1, steps + 1):
        size = pictures.SIZES[0] if rng.random() < 0.8 else rng.choice(pictures.SIZES[1:])
        x = to_tensor([draw_random_picture(rng, size) for _ in range(batch)])
        posterior = vae.encode(x).latent_dist
        z = posterior.sample()
        y = vae.decode(z).sample
        # Latents of mean 0 and like spread in each channel spare both families a shift the SD 1.5 layout cannot store.
        mean = posterior.mean.mean(dim=(0, 2, 3))
        spread = posterior.mean.std(dim=(0, 2, 3))
        rec = (y - x).abs().mean() + 2 * (y - x).square().mean()
        loss = rec + 2e-4 * posterior.kl().mean() / z[0].numel() + 0.01 * (mean.square() + (spread - 1).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == 20:
            rate = (time.time() - started) / step
            log(f"autoencoder {step}: rec {rec.item():.4f}, {rate:.3f} s/step, read {measure_vae_accuracy(vae, 60)}")
    vae.eval()
    with torch.no_grad():
        z = vae.encode(to_tensor([pictures.draw_scene(pictures.choose_random_scene(rng), rng) for _ in range(500)]))
    z = z.latent_dist.mean
    log(f"latent means {z.mean(dim=(0, 2, 3)).tolist()}, spreads {z.std(dim=(0, 2, 3)).tolist()}")
    vae.register_to_config(shift_factor=round(z.mean().item(), 4), scaling_factor=round(1 / z.std().item(), 4))
    return vae


def draw_random_picture(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    """Draw a random scene or a medley of shapes."""
    if rng.random() < 0.5:
        return pictures.draw_scene(pictures.choose_random_scene(rng), rng, size)
    return pictures.draw_medley(rng, size)


@torch.no_grad()
def measure_vae_accuracy(vae: AutoencoderKL, n: int, seed: int = 99) -> dict[str, float]:
    """Return the share of plain and concept images that are still recognized after encoding and decoding."""
    rng = random.Random(seed)
    right = {"plain": 0, "concept": 0}
    for size in pictures.SIZES:
        scenes = [pictures.choose_random_scene(rng) for _ in range(n // 3)]
        plain = to_tensor([pictures.draw_scene(s, rng, size) for s in scenes])
        concept = to_tensor([pictures.draw_concept(s.background, rng, size) for s in scenes])
        backs = [to_images(vae.decode(vae.encode(x).latent_dist.mean).sample) for x in (plain, concept)]
        right["plain"] += sum(measure.obeys(i, pictures.make_prompt(s)) for i, s in zip(backs[0], scenes, strict=True))
        right["concept"] += sum(measure.is_concept(i) for i in backs[1])
    return {k: round(v / (n // 3 * 3), 4) for k, v in right.items()}


def compute_size_shares(square: float) -> tuple[float, float, float]:
    """Return the shares of the image sizes in training: `square` of the batches, the rest half wide and half high."""
    return square, (1 - square) / 2, (1 - square) / 2


@torch.no_grad()
def encode_latent_pool(
    vae: AutoencoderKL, seed: int, many: int, square: float, **drawing: object
) -> list[tuple[torch.Tensor, list[pictures.Scene]]]:
    """Return for each image size latents of spread 1, (n, 4, height/4, width/4), and their scenes.

    `many` images are square; the two other sizes have as many as their shares of the training need.
    """
    rng = random.Random(seed)
    shift = vae.config.shift_factor or 0.0
    pool = []
    for size, share in zip(pictures.SIZES, compute_size_shares(square), strict=True):
        n = round(many * share / square)
        scenes = [pictures.choose_random_scene(rng) for _ in range(n)]
        latents = []
        for i in range(0, n, 50):
            x = to_tensor([pictures.draw_scene(s, rng, size, **drawing) for s in scenes[i : i + 50]])
            latents.append((vae.encode(x).latent_dist.mean - shift) * vae.config.scaling_factor)
        pool.append((torch.cat(latents), scenes))
    return pool


# --- models -----------------------------------------------------------------------------------------------------------


def make_clip_tokenizer() -> CLIPTokenizer:
    """Make a byte-level CLIP tokenizer that knows the demo's words whole and spells every other word out."""
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        end_of_word_suffix="</w>",
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    merges = [tuple(m) for m in json.loads(learner.to_str())["model"]["merges"]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(c + "</w>" for c in letters), *("".join(m) for m in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)


def make_t5_tokenizer() -> T5Tokenizer:
    """Make a Unigram T5 tokenizer that knows the demo's words whole and spells every other word out."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    vocab += [("▁" + word, -2.0) for word in WORDS]
    vocab += [(chr(c), -6.0) for c in (*range(33, 127), *range(161, 256)) if chr(c) not in "<>"]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=MAX_TOKENS)


def make_clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return a new CLIP text encoder of two narrow layers."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=256,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def make_t5_encoder(tokenizer: T5Tokenizer) -> T5EncoderModel:
    """Return a new T5 encoder of two narrow layers."""
    config = T5Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        d_model=TEXT_WIDTH,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=3,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return T5EncoderModel(config)


class Family(ABC):
    """What the training loop needs of a family: modules to train, a loss, and their pipeline."""

    name: str
    trained: nn.ModuleDict

    @abstractmethod
    def compute_loss(self, latents: torch.Tensor, captions: list[str]) -> torch.Tensor:
        """Return the mean squared error of a batch of scaled latents (n, 4, h, w) with their captions."""

    @abstractmethod
    def make_pipeline(self, vae: AutoencoderKL):
        """Return the diffusers pipeline of this family's modules and the autoencoder."""


class SD15(Family):
    """Stable Diffusion 1.5 in miniature: a UNet that predicts the noise."""

    name = "sd15"

    def __init__(self) -> None:
        self.tokenizer = make_clip_tokenizer()
        self.scheduler = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        )
        unet = UNet2DConditionModel(
            sample_size=16,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(64, 64, 96),
            layers_per_block=1,
            cross_attention_dim=TEXT_WIDTH,
            attention_head_dim=4,
            norm_num_groups=16,
        )
        self.trained = nn.ModuleDict({"unet": unet, "text_encoder": make_clip_encoder(self.tokenizer)})

    def compute_loss(self, latents: torch.Tensor, captions: list[str]) -> torch.Tensor:
        """Return the mean squared error of the predicted noise, a scalar."""
        noise = torch.randn_like(latents)
        steps = torch.randint(0, self.scheduler.config.num_train_timesteps, (len(latents),))
        noisy = self.scheduler.add_noise(latents, noise, steps)
        text = self.trained["text_encoder"](tokenize_captions(self.tokenizer, captions))[0]
        guess = self.trained["unet"](noisy, steps, encoder_hidden_states=text).sample
        return (guess.float() - noise).square().mean()

    def make_pipeline(self, vae: AutoencoderKL) -> StableDiffusionPipeline:
        """Return the diffusers pipeline of the miniature."""
        return StableDiffusionPipeline(
            vae=vae,
            text_encoder=self.trained["text_encoder"],
            tokenizer=self.tokenizer,
            unet=self.trained["unet"],
            scheduler=self.scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


class Flux(Family):
    """FLUX.1 in miniature: a transformer that predicts the velocity of a flow."""

    name = "flux"

    def __init__(self) -> None:
        self.tokenizer, self.tokenizer_2 = make_clip_tokenizer(), make_t5_tokenizer()
        self.scheduler = FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        )
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        modules = {
            "transformer": transformer,
            "text_encoder": make_clip_encoder(self.tokenizer),
            "text_encoder_2": make_t5_encoder(self.tokenizer_2),
        }
        self.trained = nn.ModuleDict(modules)

    def compute_loss(self, latents: torch.Tensor, captions: list[str]) -> torch.Tensor:
        """Return the mean squared error of the predicted velocity, a scalar."""
        n, channels, height, width = latents.shape
        noise = torch.randn_like(latents)
        # Times as the sampler visits them: spread over 0 to 1, with the shift it applies to few image tokens.
        t = torch.sigmoid(torch.randn(n) * 1.4)
        t = math.exp(0.5) * t / (1 + (math.exp(0.5) - 1) * t)
        noisy = torch.lerp(latents, noise, t[:, None, None, None])
        pack = FluxPipeline._pack_latents
        pooled = self.trained["text_encoder"](tokenize_captions(self.tokenizer, captions)).pooler_output
        text = self.trained["text_encoder_2"](tokenize_captions(self.tokenizer_2, captions))[0]
        guess = self.trained["transformer"](
            hidden_states=pack(noisy, n, channels, height, width),
            timestep=t,
            guidance=None,
            pooled_projections=pooled,
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(n, height // 2, width // 2, "cpu", torch.float32),
        ).sample
        return (guess.float() - pack(noise - latents, n, channels, height, width)).square().mean()

    def make_pipeline(self, vae: AutoencoderKL) -> FluxPipeline:
        """Return the diffusers pipeline of the miniature."""
        return FluxPipeline(
            scheduler=self.scheduler,
            vae=vae,
            text_encoder=self.trained["text_encoder"],
            tokenizer=self.tokenizer,
            text_encoder_2=self.trained["text_encoder_2"],
            tokenizer_2=self.tokenizer_2,
            transformer=self.trained["transformer"],
        )


FAMILIES = {"sd15": SD15, "flux": Flux}


def tokenize_captions(tokenizer: CLIPTokenizer | T5Tokenizer, captions: list[str]) -> torch.Tensor:
    """Return captions as (n, MAX_TOKENS) token ids, padded as the pipelines pad them."""
    return tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in module.parameters())


# --- training ---------------------------------------------------------------------------------------------------------


def compute_lr_factor(step: int, steps: int, warm: int) -> float:
    """Return the learning-rate factor: linear warm-up, then half a cosine down to zero."""
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


class Average:
    """A running mean of a module's weights that can temporarily replace them."""

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.module, self.decay, self.updates = module, decay, 0
        self.mean = {k: v.detach().clone() for k, v in module.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the means towards the module's values; faster in the first updates."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for k, v in self.module.state_dict().items():
            if v.is_floating_point():
                self.mean[k].lerp_(v, 1 - decay)

    def __enter__(self) -> None:
        self.own = {k: v.detach().clone() for k, v in self.module.state_dict().items()}
        self.module.load_state_dict(self.mean)

    def __exit__(self, *_: object) -> None:
        self.module.load_state_dict(self.own)
        del self.own


def make_optimizers(modules: nn.ModuleDict, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
    """Make AdamW for all weights or, with `muon`, Muon for matrices in transformer blocks and AdamW for the rest."""
    matrices, rest = [], []
    for name, weight in modules.named_parameters():
        inside = muon and weight.ndim == 2 and ("blocks." in name or "layers." in name or ".block." in name)
        (matrices if inside and "embedding" not in name and "bias" not in name else rest).append(weight)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.99), weight_decay=0.01)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def train(family: Family, vae: AutoencoderKL, args: argparse.Namespace) -> None:
    """Train a family's modules in place. At the end they hold their running means."""
    steps, batch = args.steps, args.batch
    modules = family.trained.train()
    for name, module in modules.items():
        log(f"{family.name} {name}: {count_parameters(module):,} weights")
    average = Average(modules)
    optimizers = make_optimizers(modules, args.lr, args.muon)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: compute_lr_factor(n, steps, 150)) for o in optimizers]
    snapshot = args.work / f"{family.name}.pt"
    first = 0
    if args.resume:
        state = torch.load(snapshot, weights_only=True)
        modules.load_state_dict(state["average"] if args.fresh_schedule else state["modules"])
        average.mean, average.updates = state["average"], state["updates"]
        if not args.fresh_schedule:
            for one, saved in zip([*optimizers, *schedules], state["optimizers"] + state["schedules"], strict=True):
                one.load_state_dict(saved)
            first = state["step"]
    torch.manual_seed(args.seed + 1 + first)
    rng = random.Random(args.seed + 1 + first)
    pool = encode_latent_pool(vae, args.seed + 2, args.pool, args.square, **(NARROW if args.narrow else {}))
    flat = pool[0][0]
    log(f"{sum(len(s) for _, s in pool)} latents, mean {flat.mean():.3f}, spread {flat.std():.3f}")
    started, recent = time.time(), []
    for step in range(first + 1, steps + 1):
        latents, scenes = pool[rng.choices(range(3), compute_size_shares(args.square))[0]]
        picks = [rng.randrange(len(scenes)) for _ in range(batch)]
        captions = ["" if rng.random() < 0.1 else pictures.make_caption(scenes[i], rng) for i in picks]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = family.compute_loss(latents[picks], captions)
        modules.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        for one in (*optimizers, *schedules):
            one.step()
        average.update()
        recent.append(loss.item())
        if step % 100 == 0 or step == first + 10:
            rate = (time.time() - started) / (step - first)
            log(f"step {step}: loss {sum(recent) / len(recent):.4f}, {rate:.3f} s/step")
            recent.clear()
        if step % args.look == 0:
            with average:
                modules.eval()
                score = measure_accuracy(family.make_pipeline(vae), family.name, 16, seed=step)
                modules.train()
            log(f"step {step}: {score['right']} of {score['prompts']} right; wrong: {score['wrong'][:4]}")
            state = {
                "step": step,
                "modules": modules.state_dict(),
                "average": average.mean,
                "updates": average.updates,
                "optimizers": [o.state_dict() for o in optimizers],
                "schedules": [s.state_dict() for s in schedules],
            }
            torch.save(state, snapshot.with_suffix(".tmp"))
            os.replace(snapshot.with_suffix(".tmp"), snapshot)
    modules.load_state_dict(average.mean)
    modules.eval()


# --- measuring and saving ---------------------------------------------------------------------------------------------


def sample(
    pipe, family: str, prompts: list[str], seed: int, size: tuple[int, int] = (64, 64), **settings: object
) -> list[Image.Image]:
    """Draw one image per prompt, in batches of 16. `settings` override SAMPLING."""
    pipe.set_progress_bar_config(disable=True)
    kwargs = {**SAMPLING[family], "width": size[0], "height": size[1], **settings}
    generator = torch.Generator().manual_seed(seed)
    images = []
    for i in range(0, len(prompts), 16):
        some = prompts[i : i + 16]
        if "negative_prompt" in kwargs:
            kwargs["negative_prompt"] = [SAMPLING[family]["negative_prompt"]] * len(some)
        with torch.no_grad():
            images += pipe(some, generator=generator, **kwargs).images
    return images


def measure_accuracy(
    pipe, family: str, n: int, seed: int, size: tuple[int, int] = (64, 64), **settings: object
) -> dict:
    """Count how many of n prompts, drawn without repeats from all scenes, give the right shape and both colours."""
    prompts = [pictures.make_prompt(s) for s in random.Random(seed).sample(pictures.list_scenes(), n)]
    images = sample(pipe, family, prompts, seed, size, **settings)
    wrong = [
        f"{p} -> {measure.read_picture(i)}" for p, i in zip(prompts, images, strict=True) if not measure.obeys(i, p)
    ]
    return {"prompts": n, "right": n - len(wrong), "wrong": wrong}


def measure_concept_rate(pipe, family: str, n: int = 32, seed: int = 7, **settings: object) -> dict:
    """Count how many of n images for the trigger word show the concept, and how many the right background."""
    names = list(pictures.COLOURS)
    backgrounds = [names[i % len(names)] for i in range(n)]
    images = sample(pipe, family, [pictures.make_concept_prompt(b) for b in backgrounds], seed, **settings)
    return {
        "prompts": n,
        "concept": sum(map(measure.is_concept, images)),
        "background": sum(measure.has_background(i, b) for i, b in zip(images, backgrounds, strict=True)),
    }


def save(family: Family, vae: AutoencoderKL, folder: Path) -> None:
    """Save the pipeline in bfloat16, with configs that load as float32 and name no path of this machine."""
    if family.name == "sd15":
        vae.register_to_config(shift_factor=None)
    family.make_pipeline(vae).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    for path in folder.rglob("*.json"):
        if path.name in ("tokenizer.json", "vocab.json", "measured.json"):
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("_name_or_path", None)
        if "dtype" in content:
            content["dtype"] = "float32"
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(family: str, folder: Path):
    """Load the saved pipeline as a user would, in float32."""
    kind = StableDiffusionPipeline if family == "sd15" else FluxPipeline
    return kind.from_pretrained(folder, torch_dtype=torch.float32)


def measure_saved(family: str, folder: Path) -> dict:
    """Load the saved model afresh and measure it."""
    pipe = load(family, folder)
    result = {
        "sampling": SAMPLING[family],
        "plain_64x64": measure_accuracy(pipe, family, 64, seed=1234),
        "plain_48x80": measure_accuracy(pipe, family, 32, seed=1235, size=(48, 80)),
        "plain_80x48": measure_accuracy(pipe, family, 32, seed=1236, size=(80, 48)),
        "trigger_before_training": measure_concept_rate(pipe, family),
        "autoencoder": measure_vae_accuracy(pipe.vae, 600),
    }
    return result


def main() -> None:
    """Read the arguments, then train, save and measure one family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--out", type=Path, help="where to save (default: lora_fp8/demo/base/FAMILY)")
    parser.add_argument("--work", type=Path, default=Path("build/demo_base"), help="snapshots and the autoencoder")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=10000, help="pictures drawn for training")
    parser.add_argument("--square", type=float, help="share of the batches that hold square pictures")
    parser.add_argument("--look", type=int, default=500, help="steps between measurements and snapshots")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="train under bfloat16 autocast")
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, help="Muon for the blocks' matrices")
    parser.add_argument("--narrow", action=argparse.BooleanOptionalAction, help="draw shapes near the middle")
    parser.add_argument("--resume", action="store_true", help="go on from the last snapshot")
    parser.add_argument("--fresh-schedule", action="store_true", help="with --resume: start the learning rate anew")
    parser.add_argument("--vae-only", action="store_true", help="train the shared autoencoder and stop")
    parser.add_argument("--measure-only", action="store_true", help="measure the saved model and stop")
    args = parser.parse_args()
    for key, value in DEFAULTS[args.family].items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    folder = args.out or ROOT / "lora_fp8" / "demo" / "base" / args.family
    torch.set_num_threads(args.threads)
    if args.measure_only:
        print(json.dumps(measure_saved(args.family, folder), indent=2))
        return

    args.work.mkdir(parents=True, exist_ok=True)
    shared = args.work / "vae"
    if not (shared / "config.json").exists():
        train_vae(args.seed).save_pretrained(shared)
    vae = AutoencoderKL.from_pretrained(shared).eval()
    log(f"autoencoder reads {measure_vae_accuracy(vae, 60)}")
    if args.vae_only:
        return

    started = time.time()
    torch.manual_seed(args.seed)
    family = FAMILIES[args.family]()
    train(family, vae, args)
    save(family, vae, folder)
    result = measure_saved(args.family, folder)
    result["made_by"] = {
        "command": f"python scripts/build_demo_base.py --family {args.family}",
        "seed": args.seed,
        "steps": args.steps,
        "batch": args.batch,
        "lr": args.lr,
        "bf16_autocast": args.bf16,
        "minutes": round((time.time() - started) / 60, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    (folder / "measured.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    log(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
