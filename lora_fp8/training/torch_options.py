"""Torch's global options, as a training sets them."""

import torch


def set_torch_options(threads: int = 0) -> None:
    """Set what decides about the arithmetic of a training.

    cuDNN's attention, which torch chooses by itself on Hopper and Blackwell, is switched off; FlashAttention and the
    memory-efficient kernel remain. Compiled blocks got gradients from it that were off by a factor of 3, NaN, or an
    illegal memory access, different at every run, while losses looked right (an H100, torch 2.11, cuDNN 9.19; see
    benchmarks/gpu_nvidia-h100-80gb-hbm3). Others report NaN without compiling, up to torch 2.13 (pytorch#196678).

    Args:
        threads: threads of the CPU; 0 keeps torch's choice.
    """
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
