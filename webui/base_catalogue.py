"""The base models that New training shows as cards: released ones, the demo models, and files of this machine."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_fp8 import demo, families
from lora_fp8.config import recipes
from lora_fp8.families.sources import description, known_bases

from . import base_models

GROUPS = ("suggested", "stable", "flux", "others", "editing", "video", "mine")
"""In the order of the page; "mine" are files and folders of this machine."""
SUGGESTED = (
    "stabilityai/stable-diffusion-xl-base-1.0",
    "Laxhar/noobai-XL-1.1",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.2-klein-base-4B",
    "Qwen/Qwen-Image-2512",
    "Tongyi-MAI/Z-Image",
)
"""The bases that most people start with."""
SERIES = {"stable": "Stable Diffusion", "flux": "FLUX"}
"""Begin the titles of a series' families; editing and video are told by the families' facts, the rest are "others"."""
DEMOS = Path(demo.__file__).resolve().parent / "base"


@dataclass(frozen=True)
class Card:
    """A base model that can be chosen.

    Attributes:
        path: what `model.path` becomes.
        title: what people call it.
        family: its architecture; "" if the file does not tell.
        groups: of `GROUPS`.
        known: what is published of it; None for a demo model and for a file of this machine.
    """

    path: str
    title: str
    family: str
    groups: tuple[str, ...]
    known: known_bases.KnownBase | None = None

    @property
    def key(self) -> str:
        """Tells cards apart: demo models share their path."""
        return f"demo-{self.family}" if self.path == "demo" else self.path

    @property
    def is_mine(self) -> bool:
        """Return True for a file or folder of this machine."""
        return "mine" in self.groups


@cache
def list_released() -> tuple[Card, ...]:
    """List the demo models and the released models that can be trained, the suggested ones first."""
    known = [base for base in known_bases.read() if base.kind != "distilled"]
    known.sort(key=lambda base: SUGGESTED.index(base.id) if base.id in SUGGESTED else len(SUGGESTED))
    cards = [Card(base.id, base.title, base.family, _find_groups(base), base) for base in known]
    demos = [Card("demo", families.get(name).title, name, ("suggested",)) for name in base_models.list_demo_families()]
    return (*cards, *demos)


def _find_groups(base: known_bases.KnownBase) -> tuple[str, ...]:
    traits = families.get_traits(base.family)
    title = families.get(base.family).title
    series = next((name for name, beginning in SERIES.items() if title.startswith(beginning)), "others")
    group = "video" if traits["clips"] else "editing" if traits["controls"] else series
    return ("suggested", group) if base.id in SUGGESTED else (group,)


def list_mine(models: Iterable[Path], roots: Iterable[Path]) -> list[Card]:
    """List the base models in these folders; see `base_models.find_base_models`."""
    cards = []
    for label, path in base_models.find_base_models(models, roots):
        if Path(path).parent == DEMOS:  # a card of their own
            continue
        family = base_models.inspect_base(Path(path)).family
        cards.append(Card(path, label.partition(" · ")[0], family, ("mine",)))
    return cards


def find_vram(card: Card) -> tuple[int, int]:
    """Find the GB of GPU memory that a released model takes at least, without and with offloading to RAM.

    Returns:
        Both; 0 where it is not known.
    """
    return recipes.find_least_cards(card.family, card.path) if card.known else (0, 0)


@dataclass(frozen=True)
class Presence:
    """Size of a base model and what of it is here.

    Attributes:
        total: bytes of its files.
        missing: bytes that must be downloaded; 0 if it is complete.
        is_counted: the size is counted from published facts, not stated by its hub.
    """

    total: int
    missing: int
    is_counted: bool = False


def find_presence(card: Card) -> Presence | None:
    """Find what of a released model is on this machine; no hub is asked. Returns None for other cards."""
    if card.known is None:
        return None
    if counted := description.count_files(card.path, card.family):
        return Presence(*counted)
    return Presence(card.known.total_bytes, card.known.total_bytes, is_counted=True)
