"""The peak of memory that a run reports: the process's own, and begun anew where it is asked for."""

import subprocess
import sys

import torch

from lora_fp8 import memory

CPU = torch.device("cpu")


def test_peak_is_of_what_was_used_since_the_reset():
    memory.reset_peak(CPU)
    before = memory.peak_gib(CPU)
    tensor = torch.ones(2**26)  # a quarter of a GiB
    held = memory.peak_gib(CPU)
    assert 0.2 < held - before < 0.35
    del tensor
    assert memory.peak_gib(CPU) > held - 0.01  # a peak stays (the kernel counts in batches of pages)
    memory.reset_peak(CPU)
    assert memory.peak_gib(CPU) < held - 0.15


def test_peak_is_not_that_of_the_process_that_started_this_one():
    """A trainer that a large program starts must not report the large program's memory."""
    child = "import torch; from lora_fp8 import memory; print(memory.peak_gib(torch.device('cpu')))"
    parent = f"import os, sys; x = b'1' * (5 << 28); os.execv(sys.executable, [sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 0.1 < float(done.stdout) < 1
