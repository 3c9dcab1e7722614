"""What is done with LoRA files after training: resize, merge, extract, average. One file = one command.

`pairs` is what they share: a LoRA file as pairs (A, B) with an effective strength, under the names that the file has.
All of them compute in float64 or float32 and round once, when the file is written.
"""
