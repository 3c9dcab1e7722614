"""Compare the bytes of each family's released denoiser in FP8 storage and in bf16, for the table of docs/fp8.md.

    python scripts/fp8_sizes.py [FAMILY...]

Sizes are counted on torch's meta device from `reference_config`, without weights: every parameter and buffer as
`precision.quantize_` stores it, scales included. Norms and the layers of `keep_precise` stay in bf16.
"""

import argparse

import diffusers
import torch

from lora_fp8 import families, precision, settings


def count_bytes(name: str) -> tuple[int, int]:
    """Return the bytes of a released denoiser in bf16 and with quantize.storage = "fp8"."""
    Family = families.get(name)
    found = []
    for storage in ("none", "fp8"):
        cls = getattr(diffusers, Family.denoiser_class)
        with torch.device("meta"):
            denoiser = cls.from_config(dict(Family.reference_config))
        precision.quantize_(
            denoiser, settings.Quantize(storage=storage), Family.keep_precise, torch.bfloat16, Family.modulation
        )
        tensors = [*denoiser.parameters(), *denoiser.buffers()]
        found.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return found[0], found[1]


def format_row(name: str) -> str:
    """Return a line of the table: the family, GB in bf16 and in fp8, and the saved share."""
    wide, narrow = count_bytes(name)
    return f"| `{name}` | {wide / 1e9:.2f} | {narrow / 1e9:.2f} | {100 * (1 - narrow / wide):.0f} % |"


def main() -> None:
    """Print the rows of the families named on the command line, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all families")
    given, known = parser.parse_args().families, families.list_families()
    if unknown := sorted(set(given) - set(known)):
        parser.error(f"{', '.join(unknown)}: unknown; the families are {', '.join(known)}")
    for family in given or known:
        print(format_row(family), flush=True)


if __name__ == "__main__":
    main()
