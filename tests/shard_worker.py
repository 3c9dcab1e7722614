"""One of several processes that share the bases of miniatures, with the real code; run by test_shard_base.py.

    RANK=0 WORLD_SIZE=2 ... python tests/shard_worker.py FOLDER CASES

CASES is JSON: a list of (family, folder of its miniature, [quantize] table, adapter type, gradient checkpointing).
Leaves FOLDER/RANK.json: for each of them what the same model gives that this process holds alone.
"""

import json
import sys
from pathlib import Path

import miniatures
import torch
from editing import encode, load_encoders, shown
from torch.distributed.tensor import DTensor

from lora_fp8 import adapters, families
from lora_fp8.distributed.processes import Processes
from lora_fp8.settings import Adapter, Memory, Model, Quantize
from lora_fp8.stages.load import load_base
from lora_fp8.training import memory


def count(model: torch.nn.Module, local: bool) -> int:
    """Bytes of the frozen parameters; of those that are shared, this process's rows."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return sum((p.to_local() if local and isinstance(p, DTensor) else p).nbytes for p in frozen)


def build(family, section: Quantize, kind: str, recomputes: bool, sharing: Processes | None):
    denoiser, plan, _ = load_base(family, section, sharing=sharing)
    names = family.adapter_names(denoiser, [])
    init = "pissa" if kind == "pissa" else "default"
    adapters.inject(denoiser, Adapter(type="lora" if kind == "pissa" else kind, rank=4, init=init), names, seed=0)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in adapters.parameters(denoiser):
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    memory.apply_(denoiser, Memory(gradient_checkpointing=recomputes))
    return denoiser.train()


def step(family, denoiser, cond) -> dict[str, torch.Tensor]:
    high, wide = miniatures.get_hw(family.name)
    generator = torch.Generator().manual_seed(2)
    channels, per_side = family.latent_shape if hasattr(family, "latent_shape") else (None, None)
    latents = family.example_latents
    noisy = torch.randn(latents.shape, generator=generator)
    t = torch.full((len(noisy),), 0.5) if family.objective == "FlowMatching" else torch.tensor([500] * len(noisy))
    answers = {}
    with torch.no_grad():
        answers["eval"] = family.predict(denoiser.eval(), noisy, t, cond).clone()
    for number in range(2):
        answer = family.predict(denoiser.train(), noisy, t, cond)
        answer.float().square().sum().backward()
        answers[f"forward {number}"] = answer.detach()
        for name, parameter in adapters.parameters(denoiser):
            answers[f"{number} {name}"], parameter.grad = parameter.grad, None
    return answers


def main(folder: Path, cases: list) -> None:
    torch.set_num_threads(1)
    processes, found = Processes(), []
    made = {}
    for name, path, table, kind, recomputes in cases:
        if name not in made:
            Family = families.get(name)
            family = Family(Model(family=name, path=path), device="cpu", dtype=torch.bfloat16)
            load_encoders(family)
            facts = family.image_conditioning((40, 56), (4, 6), miniatures.get_hw(name)) | shown(family)
            cond = family.collate([{**cond, **facts} for cond in encode(family, ["a cat", "a dog"])])
            pixels = torch.zeros(2, 3, *miniatures.get_hw(name))
            family.example_latents = family.encode_images(pixels)
            family.vae = None
            made[name] = family, cond
        family, cond = made[name]
        section = Quantize(**table)
        alone = step(family, build(family, section, kind, recomputes, None), cond)
        shared = build(family, section, kind, recomputes, processes)
        before = count(shared, local=True)
        together = step(family, shared, cond)
        found.append(
            {
                "differ": [key for key in alone if not torch.equal(alone[key], together[key])],
                "compared": len(alone),
                "local": before,
                "after": count(shared, local=True),
                "whole": count(shared, local=False),
                "buffers": sum(buffer.nbytes for buffer in shared.buffers()),
            }
        )
        if not processes.rank: print(name, table, kind, recomputes, found[-1]["differ"][:3], {k:v for k,v in found[-1].items() if k!="differ"}, flush=True)
    (folder / f"{processes.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
