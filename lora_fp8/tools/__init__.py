"""Tools for LoRA files after training: resize, merge, extract, average. One file is one command.

`pairs` is shared by all: a LoRA file as pairs (A, B) with an effective strength, under the file's own names. The tools
compute in float64 or float32 and round once, when a file is written.
"""
