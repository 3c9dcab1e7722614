"""Tools before and after training: captions by a model, and resize, merge, extract, average for LoRA files.

One file is one command. `wd_tagger` runs the taggers of `captioner`. `pairs` is shared by the tools for LoRA files: a
LoRA file as pairs (A, B) with an effective strength, under the file's own names. These compute in float64 or float32
and round once, when a file is written.
"""
