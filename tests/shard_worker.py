"""One of several processes that share the bases of miniatures, with the real code; run by test_shard_base.py.

    RANK=0 WORLD_SIZE=2 ... python tests/shard_worker.py FOLDER CASES

CASES is JSON, a list of cases: {"family", "path" of its miniature, "dtype", "quantize", "adapter", "recomputes"}.
Leaves FOLDER/RANK.json: how far the model that is shared is from the same model that this process holds alone, for two
forward and backward passes and one without gradient; and the bytes of its real tensors.

A case without "adapter" is only loaded: which tensors differ, all rows of them gathered, and which shares of the bytes
a process reads and holds for the model that is shared.
"""

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import miniatures
import torch
from editing import encode, load_encoders
from torch.distributed.tensor import DTensor

from lora_fp8 import adapters, families, precision
from lora_fp8.distributed.processes import Processes
from lora_fp8.families import _weights
from lora_fp8.precision.dtypes import DTYPES
from lora_fp8.settings import Adapter, Memory, Model, Quantize
from lora_fp8.stages.load import load_base
from lora_fp8.training import memory

Answers = dict[str, torch.Tensor]


def count(model: torch.nn.Module, local: bool) -> int:
    """Bytes of what is frozen; of what is shared, those of this process's rows."""
    frozen = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.requires_grad]
    return sum((t.to_local() if local and isinstance(t, DTensor) else t).nbytes for t in frozen)


def build(family: Any, case: dict, sharing: Processes | None) -> torch.nn.Module:
    denoiser, *_ = load_base(family, Quantize(**case["quantize"]), sharing=sharing)
    section = Adapter(rank=4, **case["adapter"])
    adapters.inject(denoiser, section, family.choose_adapter_layers(denoiser, []), seed=0)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in adapters.list_trained_parameters(denoiser):
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    memory.apply_(denoiser, Memory(gradient_checkpointing=case["recomputes"]))
    return denoiser


def answer(family: Any, denoiser: torch.nn.Module, inputs: tuple[Any, ...]) -> Answers:
    answers = {}
    with torch.no_grad():
        answers["without gradient"] = family.predict(denoiser.eval(), *inputs).clone()
    for number in range(2):
        prediction = family.predict(denoiser.train(), *inputs)
        prediction.float().square().sum().backward()
        answers[f"prediction {number}"] = prediction.detach()
        for name, parameter in adapters.list_trained_parameters(denoiser):
            answers[f"gradient {number} {name}"], parameter.grad = parameter.grad, None
    return answers


def make_inputs(family: Any) -> tuple[Any, ...]:
    load_encoders(family)
    facts = family.make_image_conditioning((40, 56), (4, 6), miniatures.get_hw(family.name))
    cond = family.collate([{**cond, **facts} for cond in encode(family, ["a cat", "a dog"])])
    latents = family.encode_images(torch.zeros(2, 3, *miniatures.get_hw(family.name)))
    family.vae = None
    noisy = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    return noisy, torch.full((2,), 0.5) if family.objective == "FlowMatching" else torch.tensor([500, 500]), cond


class Counting:
    """A safetensors file that counts the bytes of the weights that are taken out of it."""

    read = 0
    real = staticmethod(_weights.safe_open)

    def __init__(self, *given: Any, **more: Any) -> None:
        self.file = self.real(*given, **more)

    def __enter__(self) -> "Counting":
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *ending: Any) -> None:
        self.file.__exit__(*ending)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self.opened.get_tensor(name)
        Counting.read += tensor.nbytes
        return tensor

    def get_slice(self, name: str) -> "Counting":
        self.slice = self.opened.get_slice(name)
        return self

    def __getitem__(self, rows: slice) -> torch.Tensor:
        tensor = self.slice[rows]
        Counting.read += tensor.nbytes
        return tensor


def load(family: Any, case: dict, sharing: Processes | None) -> tuple[Answers, int, int]:
    """Every tensor of a base, by name, whole; how many bytes were read for it; and how many this process holds."""
    Counting.read = 0
    denoiser, *_ = load_base(family, Quantize(**case["quantize"]), sharing=sharing)
    named = [*denoiser.named_parameters(), *denoiser.named_buffers()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for _, tensor in named]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    whole = {name: precision.gather_whole(tensor.detach()) for name, tensor in named}
    return whole, Counting.read, sum(storages.values())


def compare_loads(family: Any, case: dict, processes: Processes) -> dict[str, Any]:
    alone, read_alone, held_alone = load(family, case, None)
    shared, read, held = load(family, case, processes)
    assert alone.keys() == shared.keys()
    differing = [name for name in alone if not torch.equal(alone[name], shared[name])]
    return {"differing": differing, "read": read / read_alone, "held": held / held_alone}


def main(folder: Path, cases: list[dict]) -> None:
    torch.set_num_threads(1)
    _weights.safe_open = Counting
    processes, found = Processes(), []
    for case in cases:
        Family = families.get(case["family"])
        model = Model(family=case["family"], path=case["path"], components=case.get("components", ""))
        family = Family(model, device="cpu", dtype=DTYPES[case["dtype"]])
        if "adapter" not in case:
            found.append(compare_loads(family, case, processes))
            continue
        inputs = make_inputs(family)
        alone = answer(family, build(family, case, None), inputs)
        shared = build(family, case, processes)
        whole, local = count(shared, local=False), [count(shared, local=True)]
        together = answer(family, shared, inputs)
        local.append(count(shared, local=True))
        gaps = {name: float((together[name] - alone[name]).norm() / alone[name].norm()) for name in alone}
        exact = {name: torch.equal(together[name], alone[name]) for name in alone}
        found.append({"gaps": gaps, "exact": exact, "local": local, "whole": whole})
    (folder / f"{processes.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    group = weakref.ref(torch.distributed.group.WORLD)
    processes.leave()
    alone = shared = together = None
    gc.collect()
    assert group() is None  # otherwise its threads may abort the process when it exits


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
