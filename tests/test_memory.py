"""The peak of memory that a run reports: the process's own, and begun anew where it is asked for."""

import subprocess
import sys


def test_peak_is_of_what_was_used_since_the_reset():
    """In a process of its own: what other tests leave behind is given back at moments of its own choosing."""
    script = (
        "import torch; from lora_fp8.training import memory; cpu = torch.device('cpu'); told = []\n"
        "tell = lambda: told.append(memory.read_peak_gib(cpu))\n"
        "memory.reset_peak(cpu); tell(); tensor = torch.ones(2**26); tell()\n"  # a quarter of a GiB
        "del tensor; tell(); memory.reset_peak(cpu); tell(); print(*told)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, held, freed, anew = map(float, done.stdout.split())
    assert 0.2 < held - before < 0.35
    assert freed > held - 0.01  # a peak stays (the kernel counts in batches of pages)
    assert anew < held - 0.15


def test_peak_is_not_that_of_the_process_that_started_this_one():
    """A trainer that a large program starts must not report the large program's memory."""
    child = "import torch; from lora_fp8.training import memory; print(memory.read_peak_gib(torch.device('cpu')))"
    parent = f"import os, sys; x = b'1' * (5 << 28); os.execv(sys.executable, [sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 0.1 < float(done.stdout) < 1
