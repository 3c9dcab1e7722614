"""The processor of Qwen2.5-VL, which prepares images and prompts, without the part that needs torchvision."""

from __future__ import annotations

from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor


class Processor(Qwen2VLProcessor):
    """transformers' processor without its video part, which needs torchvision.

    A processor loads the parts that its `__init__` names.
    """

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, tokenizer: Qwen2Tokenizer):
        super().__init__(image_processor, tokenizer)
