"""Compile the Triton kernels for the architectures named as arguments; print what each takes, as JSON."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_fp8.precision import kernels

ALIGNED = [["tt.divisibility", 16]]
"""What Triton's launcher finds out about pointers of torch tensors and about multiples of 16."""


def quantize(num_columns: int, fold: bool) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    block = min(triton.next_power_of_2(num_columns), kernels._WIDEST)
    pointers = {"x_ptr": "*bf16", "factor_ptr": "*fp32", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    numbers = dict.fromkeys(("K", "x_stride"), "i32") | {"factor_stride": "constexpr"}
    constants = {"FOLD": fold, "BLOCK": block, "WHOLE": num_columns <= block, "factor_stride": int(fold)}
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    return kernels._quantize_rows, pointers | numbers, constants, warps


def transpose() -> tuple[Any, dict[str, str], dict[str, Any], int]:
    signature = {"bytes_ptr": "*u8", "transposed_ptr": "*u8", "N": "i32", "K": "i32"}
    return kernels._transpose_bytes, signature, {"TILE": kernels._TILE}, 8


def epilogue(dtype: str, rank: int) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    own = dict.fromkeys(("sum_ptr", "h_ptr", "b_ptr", "y_ptr", "bias_ptr"), f"*{dtype}")
    signature = own | dict.fromkeys(("a_scale_ptr", "w_scale_ptr"), "*fp32")
    signature |= dict.fromkeys(("M", "N", "R", "b_stride_n"), "i32") | {"scaling": "fp32"}
    constants = {"w_stride": 1, "b_stride_r": 1, "SCALED": True, "BIASED": True, "ADAPTED": rank > 0, "WIDE": False}
    constants |= {
        "BLOCK_M": 64,
        "BLOCK_N": 128,
        "BLOCK_R": min(kernels._LARGEST_RANK_BLOCK, max(16, triton.next_power_of_2(rank))),
    }
    return kernels._epilogue, signature, constants, 8


KERNELS = {
    "quantize 3072": quantize(3072, False),
    "quantize 15360": quantize(15360, False),
    "quantize 15360 folded": quantize(15360, True),
    "quantize 55296": quantize(55296, False),
    "quantize 55296 folded": quantize(55296, True),
    "transpose": transpose(),
    "epilogue bf16, rank 16": epilogue("bf16", 16),
    "epilogue bf16, rank 64": epilogue("bf16", 64),
    "epilogue bf16, no LoRA": epilogue("bf16", 0),
    "epilogue fp32, rank 16": epilogue("fp32", 16),
}


def compile_for(arch: str, fn: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> dict[str, int]:
    """Return the registers a thread, shared and spilled bytes."""
    signature = {name: "constexpr" if name in constants else signature[name] for name in fn.arg_names}
    numbers = {"K", "N", "M", "R", "x_stride", "b_stride_n"}
    aligned = {
        (place,): ALIGNED
        for place, name in enumerate(fn.arg_names)
        if signature[name].startswith("*") or name in numbers and name not in constants
    }
    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch), 32)
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    kernel = triton.compile(source, target=target, options={"num_warps": warps})
    shared = kernel.metadata.shared
    if amd:
        text = kernel.asm["amdgcn"]
        spilled = sum(int(number) for number in re.findall(r"[vs]gpr_spill_count:\s*(\d+)", text))
        return {"registers": int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0]), "shared": shared, "spilled": spilled}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "shared": shared, "spilled": found["STACK"] + found["LOCAL"]}


if __name__ == "__main__":
    print(json.dumps({arch: {name: compile_for(arch, *how) for name, how in KERNELS.items()} for arch in sys.argv[1:]}))
