"""The image model of `preview.score_model`: where its files are, and whether it can compare images."""

from pathlib import Path

from ..errors import Message, UserError
from ..families import _files

WITH_TEXT = ("clip", "chinese_clip", "siglip")
"""Types of models that compare an image with a text as well."""
KNOWN = (*WITH_TEXT, "dinov2", "dinov2_with_registers", "dinov3_vit")


def find_score_model(name: str) -> Path:
    """Return the folder of an image model: a folder itself, or a model of the Hub that is in its cache.

    Raises:
        UserError: there is none, or it is not a model that compares images.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _find_cached(name)
    kind = _files.read_json(folder / "config.json").get("model_type")
    if kind not in KNOWN:
        raise UserError(
            Message(
                "preview.score_model = {name}: this is a model of type {kind}; models that compare images are {names}",
                name=repr(name),
                kind=repr(kind),
                names=", ".join(KNOWN),
            )
        )
    return folder


def _find_cached(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError:
        raise UserError(
            Message(
                "preview.score_model = {name}: there is no such folder, and this is not a Hugging Face id",
                name=repr(name),
            )
        ) from None
    except LocalEntryNotFoundError:
        raise UserError(
            Message(
                "preview.score_model = {name}: there is no such folder, and the Hugging Face cache does not have "
                "it; download it with `hf download {id}`",
                name=repr(name),
                id=name,
            )
        ) from None
