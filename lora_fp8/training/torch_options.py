"""Torch's global options, as a training sets them."""

import os

import torch


def set_torch_options(threads: int = 0, *, deterministic: bool = False) -> None:
    """Set what decides about the arithmetic of a training.

    cuDNN's attention, which torch chooses by itself on Hopper and Blackwell, is switched off; FlashAttention and the
    memory-efficient kernel remain. Compiled blocks got gradients from it that were off by a factor of 3, NaN, or an
    illegal memory access, different at every run, while losses looked right (an H100, torch 2.11, cuDNN 9.19; see
    benchmarks/gpu_nvidia-h100-80gb-hbm3). Others report NaN without compiling, up to torch 2.13 (pytorch#196678).

    Args:
        threads: threads of the CPU; 0 keeps torch's choice.
        deterministic: use kernels that give the same bits each time, and refuse operations that have none. Without
            it, FlashAttention adds up the gradient of Q in an order that changes: a repeated FLUX gradient was off by
            0.1 to 0.2 % in bf16 (H100).
    """
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        # cuBLAS wants this in the environment before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time
    torch.use_deterministic_algorithms(deterministic)
