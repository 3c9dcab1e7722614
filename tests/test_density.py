"""Which noise levels training draws: per family, against the trainers that people use.

The loss goes down whatever the density is, so that nothing else here would see a wrong one. Z-Image once drew 4 % of
its timesteps below one half, where its peers draw 14 to 50 %.
"""

import math
import tomllib
from pathlib import Path

import pytest
import torch

from lora_fp8 import families, settings
from lora_fp8.objectives import FlowMatching

TOKENS = 4096
"""Of a picture of 1024 x 1024 with 16 pixels a token."""
FACTS = tomllib.loads((Path(__file__).parent / "data" / "facts.toml").read_text(encoding="utf-8"))
# What each family's released scheduler says, and the peers' (shape, shift, scale of the logit-normal density).
PEERS = {name: (facts["scheduler"], facts["densities"]) for name, facts in FACTS.items() if "densities" in facts}


def share_below(level: float, shape: str, shift: float, scale: float) -> float:
    """The part of a density's timesteps that lies below a noise level."""
    unshifted = level / (shift - (shift - 1) * level)
    if shape == "uniform":
        return unshifted
    return torch.special.ndtr(torch.tensor(math.log(unshifted / (1 - unshifted)) / scale)).item()


def objective_of(name: str, scheduler: dict, section: settings.Objective) -> FlowMatching:
    family = families.get(name).__new__(families.get(name))  # without files: the scheduler's config is the table's
    family.read_scheduler_config = lambda: scheduler
    return family.make_objective(section)


def test_the_table_has_every_flow_family() -> None:
    flows = {name for name in families.list_families() if families.get_traits(name)["objective"] == "FlowMatching"}
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
    own = FlowMatching(scheduler, settings.Objective()).compute_model_shift(TOKENS)
    assert objective_of(name, scheduler, settings.Objective(shift="scheduler")).compute_shift(TOKENS) == own
    assert objective_of(name, scheduler, settings.Objective(shift=5.0)).compute_shift(TOKENS) == 5.0
    assert (
        objective_of(name, scheduler, settings.Objective()).compute_shift(TOKENS)
        == families.get(name).train_shift
        != own
    )
