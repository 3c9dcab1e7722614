"""The stages of `scripts/prove_gpu.py`. Each is a module whose `run(record, context)` writes a row per question."""
