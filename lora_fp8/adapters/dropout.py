"""Dropout of ranks and of whole adapters, which the layers of every kind apply in training.

* `rank_dropout` of LoRA and DoRA: each sample loses ranks, and the others are divided by 1 - p (sd-scripts).
* `rank_dropout` of LoKr and LoHa: each pass loses rows of the delta, for all samples. The others stay, or are divided
  by their share with `rank_dropout_scale` (LyCORIS).
* `module_dropout` of every kind: in a pass, a layer loses its whole adapter and is the base alone.

The draws come from torch's global generator, like those of torch's own dropout: it is keyed before each micro-batch
(`stages.step`), and restored where activations are recomputed. Nothing depends on a drawn value except values, so that
a layer can be compiled.

Sources: kohya-ss/sd-scripts networks/lora.py (`LoRAModule.forward`); LyCORIS modules/loha.py and lokr.py.

Shapes: B samples, N output features, R rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings import Adapter


@dataclass(frozen=True)
class Dropout:
    """What a layer drops in training.

    Attributes:
        ranks: probability of dropping a rank, or a row of the delta.
        modules: probability of dropping the whole adapter in a pass.
        rescales: divide the rows that are left by their share.
    """

    ranks: float = 0.0
    modules: float = 0.0
    rescales: bool = False

    @classmethod
    def from_section(cls, section: Adapter) -> "Dropout":
        """Return what the job's `[adapter]` table asks for."""
        return cls(section.rank_dropout, section.module_dropout, section.rank_dropout_scale)

    def drop_ranks(self, reduced: Tensor, dim: int, copies: int = 1) -> Tensor:
        """Drop ranks of each sample.

        Args:
            reduced: (B, ..., R, ...), the adapter's input times A.
            dim: dimension of the ranks.
            copies: how often the ranks stand there, one after the other; all copies lose the same.
        """
        if not self.ranks:
            return reduced
        shape = [1] * reduced.ndim
        shape[0], shape[dim] = reduced.shape[0], reduced.shape[dim] // copies
        kept = torch.cat([torch.rand(shape, device=reduced.device) > self.ranks] * copies, dim)
        return reduced * (kept / (1 - self.ranks)).to(reduced.dtype)

    def drop_rows(self, update: Tensor, dim: int) -> Tensor:
        """Drop rows of the delta: output features of the update, the same for all samples.

        Args:
            update: (B, ..., N, ...).
            dim: dimension of the output features.
        """
        if not self.ranks:
            return update
        shape = [1] * update.ndim
        shape[dim] = update.shape[dim]
        kept = (torch.rand(shape, device=update.device) > self.ranks).float()
        if self.rescales:
            kept = kept / kept.mean().clamp_min(1 / kept.numel())  # where no row is left, nothing is divided by zero
        return update * kept.to(update.dtype)

    def drop_module(self, update: Tensor) -> Tensor:
        """Drop the whole update, or return it as it is."""
        if not self.modules:
            return update
        return update * (torch.rand((), device=update.device) > self.modules).to(update.dtype)


NONE = Dropout()
