"""Which noise levels training draws: per family, against the trainers that people use.

The loss goes down whatever the density is, so that nothing else here would see a wrong one. Z-Image once drew 4 % of
its timesteps below one half, where its peers draw 14 to 50 %.
"""

import math

import pytest
import torch

from lora_fp8 import families, settings
from lora_fp8.objectives import FlowMatching

TOKENS = 4096
"""Of a picture of 1024 x 1024 with 16 pixels a token."""
LINE = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
QWEN = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192}
LTX = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024}
UNIPC = {"flow_shift": 3.0, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}

# What each family's released scheduler says, and the peers' (shape, shift, scale of the logit-normal density).
PEERS = {
    # OneTrainer's preset and diffusion-pipe; musubi-tuner docs/zimage.md; diffusers' script with the scheduler's shift
    "z_image": ({"shift": 6.0}, [("normal", 1.0, 1), ("normal", 2.0, 1), ("uniform", 6.0, 1)]),
    "anima": ({"shift": 3.0}, [("normal", 1.0, 1)]),  # sd-scripts docs/anima_train_network.md, diffusion-pipe
    # sd-scripts docs/flux_train_network.md; diffusion-pipe with flux_shift
    "chroma": (LINE, [("normal", 1.0, 1), ("normal", math.exp(1.15), 1)]),
    "ernie_image": ({"shift": 4.0}, [("normal", 4.0, 1), ("normal", 3.0, 1)]),  # musubi-tuner, diffusion-pipe
    "wan": (UNIPC | {"flow_shift": 12.0}, [("normal", 3.0, 1), ("normal", 1.0, 1)]),  # musubi-tuner, diffusion-pipe
    "sd3": ({"shift": 3.0}, [("normal", 3.0, 1), ("uniform", 1.0, 1)]),  # its paper; sd-scripts
    "sana": (UNIPC, [("normal", 3.0, 1)]),  # its makers' configs
    "hidream": (UNIPC | {"flow_shift": 6.0}, [("normal", 3.0, 1), ("normal", 1.0, 1)]),  # diffusers, diffusion-pipe
    "flux": (LINE, [("normal", math.exp(1.15), 1)]),  # sd-scripts' flux_shift
    "flux_kontext": (LINE, [("normal", math.exp(1.15), 1)]),
    "flux2": (LINE, [("normal", 3.0, 1), ("normal", math.exp(1.15), 1)]),  # diffusion-pipe
    "flux2_klein": (LINE, [("normal", 3.0, 1), ("normal", math.exp(1.15), 1)]),
    "qwen_image": (QWEN, [("normal", 2.0, 1), ("normal", 2.2, 1)]),  # musubi-tuner: qwen_shift, docs/qwen_image.md
    "qwen_image_edit": (QWEN, [("normal", 2.0, 1), ("normal", 2.2, 1)]),
    "qwen_image_edit_plus": (QWEN, [("normal", 2.0, 1), ("normal", 2.2, 1)]),
    "krea2": (LINE | {"max_shift": 0.91}, [("normal", 2.5, 1)]),  # musubi-tuner docs/krea2.md
    "ideogram4": (LINE, [("normal", 2.0, 1.5)]),  # musubi-tuner's ideogram4_shift
    "lumina2": ({"shift": 6.0}, [("normal", 6.0, 1)]),  # sd-scripts' default
    "hunyuan_video": ({"shift": 7.0}, [("normal", 7.0, 1)]),  # musubi-tuner docs/hunyuan_video.md
    "aura_flow": ({"shift": 1.73}, [("normal", 1.0, 1), ("normal", 3.0, 1)]),  # diffusion-pipe, SimpleTuner
    "ltx_video": (LTX, [("normal", math.exp(2.05), 1)]),  # its makers' trainer: the line of its scheduler
}


def share_below(level: float, shape: str, shift: float, scale: float) -> float:
    """The part of a density's timesteps that lies below a noise level."""
    unshifted = level / (shift - (shift - 1) * level)
    if shape == "uniform":
        return unshifted
    return torch.special.ndtr(torch.tensor(math.log(unshifted / (1 - unshifted)) / scale)).item()


def objective_of(name: str, scheduler: dict, section: settings.Objective) -> FlowMatching:
    family = families.get(name).__new__(families.get(name))  # without files: the scheduler's config is the table's
    family.scheduler_config = lambda: scheduler
    return family.make_objective(section)


def test_the_table_has_every_flow_family() -> None:
    flows = {name for name in families.available() if families.traits(name)["objective"] == "FlowMatching"}
    assert flows == PEERS.keys()


@pytest.mark.parametrize("name", PEERS)
def test_training_draws_the_noise_levels_that_the_peers_draw(name: str) -> None:
    scheduler, peers = PEERS[name]
    objective = objective_of(name, scheduler, settings.Objective())
    t_B = objective.sample_t([torch.Generator().manual_seed(i) for i in range(4000)], TOKENS)
    for level in (0.25, 0.5):
        found = (t_B < level).float().mean().item()
        shares = [share_below(level, *peer) for peer in peers]
        assert min(shares) - 0.02 <= found <= max(shares) + 0.02, f"{found:.1%} of the steps are below {level}"


@pytest.mark.parametrize("name", ["z_image", "wan", "chroma"])
def test_the_schedulers_own_shift_and_a_number_are_there_to_be_chosen(name: str) -> None:
    scheduler, _ = PEERS[name]
    own = FlowMatching(scheduler, settings.Objective()).model_shift(TOKENS)
    assert objective_of(name, scheduler, settings.Objective(shift="scheduler")).shift(TOKENS) == own
    assert objective_of(name, scheduler, settings.Objective(shift=5.0)).shift(TOKENS) == 5.0
    assert objective_of(name, scheduler, settings.Objective()).shift(TOKENS) == families.get(name).train_shift != own
