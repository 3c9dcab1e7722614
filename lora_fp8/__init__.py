"""lora_fp8: LoRA training for diffusion models on a base that is frozen in FP8."""

__version__ = "0.1.0"
