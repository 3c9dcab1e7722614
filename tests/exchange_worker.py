"""One of several processes that exchange made-up gradients with the real code; run by test_exchange.py.

    RANK=0 WORLD_SIZE=2 ... python tests/exchange_worker.py FOLDER

Leaves FOLDER/RANK.safetensors: what was given, what came of it, what was counted.
"""

import os
import socket
import struct
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lora_fp8.distributed import exchange
from lora_fp8.distributed.processes import Processes
from lora_fp8.training.flat import Gradients

VALUES, STEPS, SAMPLES = 100_003, 12, (4, 1)
BIG, TINY, TINY_STEPS = 1.0, 1e-6, 40  # e4m3 under a largest value of 1 knows nothing below 3.8e-6


def made(kind: str, processes: Processes, values: int = VALUES) -> exchange.Exchange:
    return exchange.build(kind, Gradients([("a", nn.Parameter(torch.zeros(values)))]), processes)


def mean(of: exchange.Exchange, gradient: torch.Tensor, samples: int = 1, **figures: float) -> dict[str, float]:
    of.gradients.zero_()
    of.gradients.named["a"].copy_(gradient)
    return of.average_(samples, **figures)


def wired() -> int:
    """Bytes that the kernel has sent on this process's TCP connections, and that were acknowledged."""
    sockets = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket"):
                with socket.socket(fileno=os.dup(int(number))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sockets[target] = struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
        except OSError:  # closed meanwhile, or not TCP
            continue
    return sum(sockets.values())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = Processes()
    rank, found = processes.rank, {}
    generator = torch.Generator().manual_seed(rank)
    sizes = torch.logspace(-9, 1, VALUES)  # as layers differ
    given = torch.stack([torch.randn(VALUES, generator=generator) * sizes for _ in range(STEPS)])
    figures = [{"loss": 1 / 3 + rank, "stop": float(rank == 1), "large": 2.0**53 if rank else 1.0}] * STEPS

    for kind in ("fp32", "fp8"):
        of, came, sums = made(kind, processes), [], []
        processes.wait()
        counted, kernel = processes.sent, wired()
        for step in range(STEPS):
            sums.append([*mean(of, given[step], SAMPLES[step % 2], **figures[step]).values()])
            came.append(of.gradients.named["a"].clone())
        found[f"{kind}.counted"] = torch.tensor(processes.sent - counted)
        processes.wait()
        found[f"{kind}.kernel"] = torch.tensor(wired() - kernel)
        found[f"{kind}.came"], found[f"{kind}.sums"] = torch.stack(came), torch.tensor(sums, dtype=torch.float64)
    residuals = of.collect()
    found |= {"given": given, "residual": of.residual_BE.view(-1)[:VALUES].clone(), **residuals}

    # One component that is large and one that is below the rounding step of its block, the same at every step.
    gradient = torch.zeros(256)
    gradient[0], gradient[1] = BIG, TINY
    for name in ("feedback", "without"):
        of, total = made("fp8", processes, 256), torch.zeros(256, dtype=torch.float64)
        for _ in range(TINY_STEPS):
            mean(of, gradient)
            total += of.gradients.named["a"]
            if name == "without":
                of.residual_BE.zero_()
        found[f"tiny.{name}"] = total

    for bad in ("nan", "inf", "-inf"):
        gradient = torch.ones(1024)
        if rank == processes.world - 1:
            gradient[300] = float(bad)
        of = made("fp8", processes, 1024)
        mean(of, gradient)
        found[f"bad.{bad}"] = of.gradients.named["a"].clone()

    save_file(found, folder / f"{rank}.safetensors")
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
