"""Latents in `ModelFamily`: encoding and decoding with the VAE, and the layouts that denoisers take latents in.

The VAE always runs in float32: it is small and runs once per image; in half precision SDXL's overflows and the others
lose detail. A family states the rest as facts; the VAE's own config says how its latents are normalized.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from ._facts import Facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

TILE = 512
"""Side in pixels of the tiles of an AutoencoderKL, whose own are as large as the images it was trained on. The other
VAEs have smaller ones of their own."""


class Latents(Facts):
    """Defaults for a family with a VAE from diffusers."""

    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to float32 latents as the denoiser takes them. Needs `load_vae`.

        This takes the mode of the VAE's posterior instead of a sample: its spread is far below the training noise, and
        a cache that can be reproduced byte for byte is worth more.
        """
        import torch

        with torch.no_grad():
            vae = self._require_vae("encode_images")
            pixels_BCHW = pixels_BCHW.to(self.device, torch.float32)
            answer = vae.encode(as_clip(pixels_BCHW) if _takes_clips(vae) else pixels_BCHW)
            # A deep compression autoencoder returns latents; all others return a distribution of them.
            latents = answer.latent if hasattr(answer, "latent") else answer.latent_dist.mode()
            return self.normalise(as_picture(latents) if _takes_clips(vae) else latents)

    def decode_latents(self, latents_BCHW: Tensor, *, tiled: bool = False) -> Tensor:
        """Decode latents to float32 pixels in about [-1, 1]; the inverse of `encode_images`, nearly so in tiles."""
        import torch

        vae = self._require_vae("decode_latents")
        with torch.no_grad(), decode_in_tiles(vae) if tiled else contextlib.nullcontext():
            latents = self.denormalise(latents_BCHW.to(self.device, torch.float32))
            pixels = self.decode_plain(vae, as_clip(latents) if _takes_clips(vae) else latents)
            return as_picture(pixels) if _takes_clips(vae) else pixels

    def decode_plain(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode the VAE's own latents."""
        return vae.decode(latents, return_dict=False)[0]

    def _require_vae(self, wanted: str) -> Any:
        if self.vae is None:
            raise RuntimeError(f"{wanted} before load_vae")
        return self.vae

    def normalise(self, latents: Tensor) -> Tensor:
        """Convert the VAE's latents, of images or clips, to the denoiser's.

        They are normalized with the numbers in the VAE's config. If the VAE has a batch norm, its 2 x 2 patches become
        channels and are normalized with the running statistics.
        """
        if not hasattr(self.vae, "bn"):
            return normalise_latents(self.vae, latents)
        mean_1C11, std_1C11 = self._compute_statistics()
        pixels = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # B C H/2 2 W/2 2
        order = (0, 1, 3, 5, 2, 4) if self.patch_channels == "C22" else (0, 3, 5, 1, 2, 4)
        return (pixels.permute(order).flatten(1, 3) - mean_1C11) / std_1C11

    def denormalise(self, latents: Tensor) -> Tensor:
        """Convert the denoiser's latents to the VAE's; the inverse of `normalise`."""
        if not hasattr(self.vae, "bn"):
            return denormalise_latents(self.vae, latents)
        mean_1C11, std_1C11 = self._compute_statistics()
        patches = latents * std_1C11 + mean_1C11
        if self.patch_channels == "C22":
            pixels = patches.unflatten(1, (-1, 2, 2)).permute(0, 1, 4, 2, 5, 3)
        else:
            pixels = patches.unflatten(1, (2, 2, -1)).permute(0, 3, 4, 1, 5, 2)
        return pixels.flatten(4, 5).flatten(2, 3)

    def _compute_statistics(self) -> tuple[Tensor, Tensor]:
        import torch

        mean_1C11, var_1C11 = (x.view(1, -1, 1, 1) for x in (self.vae.bn.running_mean, self.vae.bn.running_var))
        eps = self.vae.config.batch_norm_eps if self.batch_norm_eps is None else self.batch_norm_eps
        return mean_1C11, torch.sqrt(var_1C11 + eps)

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        """Lay out latents as the pipeline does in `latents=`, in its scheduler's steps and its output "latent"."""
        if self.latents_as == "BCFHW":
            return as_clip(latents_BCHW)
        if self.latents_as == "BSD":
            clip = as_clip(latents_BCHW)
            patches = clip.unflatten(4, (-1, self.patch)).unflatten(3, (-1, self.patch))  # B C F H/p p W/p p
            return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        return latents_BCHW

    def unpack(self, packed: Tensor, latent_hw: tuple[int, ...]) -> Tensor:
        """Convert the pipeline's layout to BCHW, or BCFHW for several frames; the inverse of `pack`."""
        if self.latents_as == "BCFHW":
            return as_picture(packed)
        if self.latents_as == "BSD":
            rows, columns = (side // self.patch for side in latent_hw)
            patches = packed.unflatten(2, (-1, self.patch, self.patch)).unflatten(1, (-1, rows, columns))
            return as_picture(patches.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4))
        return packed

    def count_image_tokens(self, latent_hw: tuple[int, ...]) -> int:
        """Return the number of image tokens that the denoiser sees; a resolution-dependent shift depends on it.

        Args:
            latent_hw: (height, width) of the latents; for clips (frames, height, width).
        """
        *num_frames, height, width = latent_hw
        return math.prod(num_frames) * (height // self.patch) * (width // self.patch)


@contextlib.contextmanager
def decode_in_tiles(vae: Any) -> Iterator[None]:
    """Decode in overlapping tiles inside this context, as diffusers does it: less memory, and sometimes faint seams."""
    if hasattr(vae, "tile_latent_min_size"):
        vae.tile_sample_min_size = TILE
        vae.tile_latent_min_size = TILE // 2 ** (len(vae.config.block_out_channels) - 1)
    vae.enable_tiling()
    try:
        yield
    finally:
        vae.disable_tiling()


def normalise_latents(vae: Any, latents: Tensor) -> Tensor:
    """Normalize this VAE's latents with the numbers in its config: one per channel, or one for all."""
    settings = vae.config
    if settings.get("latents_mean") is not None:
        return (latents - _make_channel_tensor(settings.latents_mean, latents)) / _make_channel_tensor(
            settings.latents_std, latents
        )
    return (latents - (settings.get("shift_factor") or 0.0)) * settings.scaling_factor


def denormalise_latents(vae: Any, latents: Tensor) -> Tensor:
    """Undo `normalise_latents`."""
    settings = vae.config
    if settings.get("latents_mean") is not None:
        return latents * _make_channel_tensor(settings.latents_std, latents) + _make_channel_tensor(
            settings.latents_mean, latents
        )
    return latents / settings.scaling_factor + (settings.get("shift_factor") or 0.0)


def _takes_clips(vae: Any) -> bool:
    return next(vae.encoder.parameters()).ndim == 5


def _make_channel_tensor(numbers: list[float], like: Tensor) -> Tensor:
    import torch

    return torch.tensor(numbers).to(like).view(1, -1, *[1] * (like.ndim - 2))


def as_clip(tensor: Tensor) -> Tensor:
    """Return BCHW or BCFHW as BCFHW, with an image as a clip of one frame; video networks take both so."""
    return tensor if tensor.ndim == 5 else tensor[:, :, None]


def as_picture(tensor: Tensor) -> Tensor:
    """Return BCFHW as BCHW if there is one frame; the inverse of `as_clip`."""
    return tensor[:, :, 0] if tensor.shape[2] == 1 else tensor
