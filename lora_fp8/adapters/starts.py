"""The initial values of adapters (`adapter.init`).

| init | A | B | source |
|---|---|---|---|
| default | uniform within 1 / sqrt(fan in) | 0 | peft, LyCORIS, Hu et al.'s code |
| gaussian | normal, standard deviation 1 / rank | 0 | peft, diffusers' scripts |
| orthogonal | orthonormal rows | 0 | Saxe et al. 2014, for A alone |
| pissa | sqrt(S) V^T / sqrt(s) of the largest singular values | U sqrt(S) / sqrt(s) | Meng et al. 2024 |
| olora | the first rows of R, where W = Q R | the first columns of Q | Buyukakyuz 2024 |

All values are drawn in float32 from a generator keyed by the seed and the layer's name.

The last two take their start A0, B0 from the base's weight W, and train W - s B0 A0 + s B A. peft writes the difference
W - s B0 A0 into the base. Here the base is quantized and stays as it is: storing the difference would round it anew,
and every program that loads the file has W. So A0 and B0 are kept frozen, and what is trained is the change from them,
dA and dB, which begin at zero:

    B A - B0 A0  =  dB (A0 + dA) + B0 dA  =  [dB, B0] [A0 + dA; dA]

This is exactly a LoRA of twice the rank without the large products B A and B0 A0, whose difference bf16 would lose. It
is what the forward pass computes, what checkpoints and files hold, and zero before the first step. Adam's updates do
not depend on where zero is, so the training is PiSSA's; weight decay pulls towards the base, as it does for LoRA.

Shapes: N output features, K input features, R rank.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from ..settings import Adapter

OVERSAMPLED, ITERATIONS = 16, 16
"""Columns beside the rank, and iterations, of the singular value decomposition of a large weight."""


def draw_start(part: str, shape: torch.Size, key: str, init: str) -> Tensor:
    """Draw the initial value of a tensor in float32.

    For LoRA, DoRA and LoKr it is uniform within 1 / sqrt(fan in), as in peft, LyCORIS and Hu et al.'s code (kaiming
    uniform with a = sqrt 5). For LoHa it is normal, as in LyCORIS, whose learning rates people know.

    Args:
        part: last part of the tensor's name.
        shape: of the tensor.
        key: keys the generator.
        init: `adapter.init`, for LoRA's A.
    """
    generator = _make_generator(key if part == "lora_A.weight" else f"{key}|{part}")
    empty = torch.empty(shape, dtype=torch.float32)
    if part.startswith("hada_"):
        return nn.init.normal_(empty, std=0.1 if part == "hada_w1_a" else 1.0, generator=generator)
    if part == "lora_A.weight" and init == "gaussian":
        return nn.init.normal_(empty, std=1 / shape[0], generator=generator)
    if part == "lora_A.weight" and init == "orthogonal":
        return nn.init.orthogonal_(empty, generator=generator)
    return nn.init.kaiming_uniform_(empty, a=math.sqrt(5), generator=generator)


def split_weight(weight_NK: Tensor, rank: int, scale: float, section: Adapter, key: str) -> tuple[Tensor, Tensor]:
    """Return A0 (R, K) and B0 (N, R) of a weight for "pissa" or "olora", in float32.

    Where the weight has no `rank` directions, the rest is zero.

    Args:
        weight_NK: the dequantized weight as a matrix.
        rank: of the layer.
        scale: factor of the layer's product.
        section: the job's `[adapter]` table.
        key: keys the draws.
    """
    weight_NK = weight_NK.float()
    most = min(rank, *weight_NK.shape)
    if section.init == "olora":
        # The first columns of Q depend on the first columns of W alone.
        b_NR = torch.linalg.qr(weight_NK[:, :most]).Q
        a_RK = b_NR.T @ weight_NK
    else:
        u_NR, s_R, v_KR = _decompose(weight_NK, most, key)
        root_R = (s_R / scale).sqrt()
        a_RK, b_NR = root_R[:, None] * v_KR.T, u_NR * root_R
    missing = rank - most
    return nn.functional.pad(a_RK, (0, 0, 0, missing)), nn.functional.pad(b_NR, (0, missing))


def _decompose(weight_NK: Tensor, rank: int, key: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (N, R), S (R) and V (K, R) of the largest singular values."""
    width = rank + OVERSAMPLED
    if width >= min(weight_NK.shape):
        u, s, vh = torch.linalg.svd(weight_NK, full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank].T
    device = weight_NK.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_make_generator(key).initial_seed())
        u, s, v = torch.svd_lowrank(weight_NK, q=width, niter=ITERATIONS)
    return u[:, :rank], s[:rank], v[:, :rank]


def _make_generator(key: str) -> torch.Generator:
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big", signed=True)
    return torch.Generator().manual_seed(number)
