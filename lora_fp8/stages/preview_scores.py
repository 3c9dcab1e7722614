"""Score previews with an image model that the user has: how near they are to the images, and to their prompts.

The scores are mean cosines of embeddings: of each preview and each reference image (CLIP-I, or DINO with such a model;
Ruiz et al. 2023, "DreamBooth"), and of each preview and its prompt (CLIP-T; models with a text encoder only).
References are the held-out images if there are any, else the images that are trained, at most `MOST_REFERENCES` of
them; neither regularization images nor clips. The training does not depend on the scores.
"""

from collections.abc import Iterable, Sequence

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..data.decoding import open_image
from ..data.examples import Example
from ..errors import Message, first_few, lacks_weights
from ..families._part_files import quiet
from ..plan.score_model import WITH_TEXT, find_score_model
from .session import Session

MOST_REFERENCES = 32


class PreviewScorer:
    """An image model on the CPU, in float32, and the embeddings of the reference images.

    Args:
        session: of the run; it says which model, and has the images.
    """

    def __init__(self, session: Session) -> None:
        import transformers

        job = session.job
        folder = find_score_model(job.preview.score_model)
        self._model, info = transformers.AutoModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        learned = {name for name, _ in self._model.named_parameters()}  # not buffers, which each version computes anew
        if lost := sorted(learned.intersection(info["missing_keys"])):  # transformers fills them with random numbers
            raise lacks_weights(folder, type(self._model).__name__, len(lost), first_few(lost))
        self._model.eval().requires_grad_(False)
        self._processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        reads_text = self._model.config.model_type in WITH_TEXT
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder) if reads_text else None
        examples = choose_references(session)
        pictures = (open_image(example.path, job.dataset.background, example.edit) for example in examples)
        self._references_RD = self.embed_images(pictures)
        self.num_references = len(examples)

    @torch.inference_mode()
    def embed_images(self, pictures: Iterable[Image.Image]) -> Tensor:
        """Return the embeddings of images, of length 1 each (images, D); one image at a time is held."""
        embed = getattr(self._model, "get_image_features", self._model)
        rows = []
        for picture in pictures:
            output = embed(pixel_values=self._processor(images=picture, return_tensors="pt")["pixel_values"])
            rows.append(F.normalize(getattr(output, "pooler_output", output), dim=-1))
        return torch.cat(rows) if rows else torch.empty(0, 0)

    @torch.inference_mode()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts, cut at the model's length, of length 1 each (texts, D)."""
        assert self._tokenizer is not None
        most = min(self._tokenizer.model_max_length, self._model.config.text_config.max_position_embeddings)
        settings = {"padding": "max_length", "truncation": True, "max_length": most}
        inputs = self._tokenizer(list(texts), **settings, return_tensors="pt")
        output = self._model.get_text_features(**inputs)
        return F.normalize(getattr(output, "pooler_output", output), dim=-1)

    def score(self, pictures: Sequence[Image.Image], prompts: Sequence[str]) -> dict[str, float]:
        """Return the mean similarity of previews to the references ("likeness") and to their prompts ("prompt_fit")."""
        previews_ND = self.embed_images(pictures)
        scores: dict[str, float] = {}
        if self.num_references:
            scores["likeness"] = (previews_ND @ self._references_RD.T).mean().item()
        if self._tokenizer is not None:
            scores["prompt_fit"] = (previews_ND * self.embed_texts(prompts)).sum(-1).mean().item()
        return scores


def choose_references(session: Session) -> list[Example]:
    """Return the examples that previews are compared with, spread evenly over the dataset."""
    images, folders = session.plan.images, session.job.dataset.folders

    def choose(examples: Sequence[Example]) -> list[Example]:
        return [
            example for example in examples if not folders[example.folder_index].regularization and not example.frames
        ]

    examples = choose(images.held_out) or choose(images.examples)  # those held out may all be clips
    count = min(len(examples), MOST_REFERENCES)
    return [examples[number * len(examples) // count] for number in range(count)]


class PreviewScores:
    """Scores the previews of a run; the model is loaded with the first ones."""

    def __init__(self) -> None:
        self._scorer: PreviewScorer | None = None
        self._has_failed = False

    def score(self, session: Session, pictures: Sequence[Image.Image], prompts: Sequence[str], step: int) -> None:
        """Log the scores of a step's previews on the main process, which has them. A failure is a warning, once."""
        if not pictures or not session.job.preview.score_model or self._has_failed:
            return
        try:
            with torch.random.fork_rng(devices=[]), quiet():
                self._scorer = self._scorer or PreviewScorer(session)
                scores = self._scorer.score(pictures, prompts)
        except Exception as error:  # of a model that somebody else made: training never depends on it
            self._has_failed = True
            line = (str(error).splitlines() or [type(error).__name__])[0]
            session.warn(Message("the previews have no scores: {line}", line=line))
            return
        rounded = {name: round(value, 4) for name, value in scores.items()}
        session.run.log_event("score", step=step, references=self._scorer.num_references, **rounded)
