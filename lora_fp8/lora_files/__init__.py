"""LoRA files: key names, layouts, headers, reading and writing."""
