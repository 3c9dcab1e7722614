"""Every Triton kernel compiled for GPUs that are not here: registers, shared memory, and nothing spilled.

Triton compiles for any architecture without a card, and its package brings `cuobjdump`, which reads what a compiled
kernel takes. Spilled registers go through memory at every use, which is why none may spill.
The table holds for Triton 3.7.1 and 3.8.0, which PyTorch 2.13 and 2.14 with CUDA ask for, and for 3.9.0.
In a process of its own: other tests set TRITON_INTERPRET, after which nothing can be compiled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NVIDIA = (89, 90, 100, 120)
MOST = {
    # kernel: registers a thread, bytes of shared memory, at most, on any of NVIDIA
    "quantize 3072": (48, 64),
    "quantize 15360": (88, 64),
    "quantize 15360 folded": (88, 64),
    "quantize 55296": (104, 64),
    "quantize 55296 folded": (128, 64),
    "transpose": (48, 16384),
    "epilogue bf16, rank 16": (128, 18448),
    "epilogue bf16, rank 64": (152, 36880),
    "epilogue bf16, no LoRA": (64, 0),
    "epilogue fp32, rank 16": (216, 24576),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, int]]]:
    """architecture -> kernel -> what it takes."""
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), *map(str, NVIDIA), "gfx942"],
        env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", [*map(str, NVIDIA), "gfx942"])
def test_no_kernel_spills_and_none_takes_more_than_the_table(compiled: dict, arch: str) -> None:
    assert compiled[arch].keys() == MOST.keys()
    beyond = {}
    for name, taken in compiled[arch].items():
        registers, shared = MOST[name] if arch != "gfx942" else (512, 65536)
        if taken["spilled"] or taken["registers"] > registers or taken["shared"] > shared:
            beyond[name] = taken
    assert not beyond, json.dumps(compiled[arch], indent=1)


def test_the_table_is_of_every_kernel() -> None:
    source = (ROOT / "lora_fp8" / "precision" / "kernels.py").read_text(encoding="utf-8")
    jitted = {line.split("def ")[1].split("(")[0] for line in source.split("@triton.jit\n")[1:]}
    # `_load_row` is inlined into the kernel that calls it.
    assert jitted == {"_load_row", "_quantize_rows", "_transpose_bytes", "_epilogue"}
