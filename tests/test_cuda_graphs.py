"""Passes recorded as CUDA graphs: the same bytes as unrecorded, or a sentence that says why it cannot be.

There is no GPU here; `graph_emulation` says what stands in for one. `scripts/prove_gpu.py` asks real graphs.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_emulation import Graph, graph
from safetensors.torch import load_file
from torch import Tensor

from lora_fp8 import settings, train
from lora_fp8.errors import RunFailure, UserErrors
from lora_fp8.stages import load, previews
from lora_fp8.training import cuda_graphs, memory

SHORT = ("train.steps=5", "export.verify=false", "adapter.rank=4", "checkpoint.every=100", "preview.prompts=[]")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Emulate CUDA graphs, on a machine that is said to have them; -> the graphs as they are made."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(memory, "find_problem", lambda *_: "")
    monkeypatch.setattr(Graph, "made", [])
    return Graph.made


def export_hash(run: Any) -> str:
    files = sorted(Path(run.path, "export").glob("*.safetensors"))
    assert files
    # A header has the run's name and time.
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for file in files for tensor in floats(file))).hexdigest()


def floats(file: Path) -> list[Tensor]:
    return [tensor.float() for _, tensor in sorted(load_file(file).items())]


def double(x: Tensor) -> Tensor:
    return 2 * x


# -- a whole job -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("sd15", ("train.accumulate=2", "train.batch_size=2", "adapter.targets=['attn1.to_q','conv1']")),
        ("flux", ("quantize.compute=fp8", "quantize.recipe=delayed", "memory.keep_attention=true")),
        (
            "sdxl",
            (
                "objective.min_snr_gamma=5.0",
                "memory.gradient_checkpointing=false",
                "quantize.compute=fp8",
                "export.formats=['diffusers']",
                "adapter.type=dora",
            ),
        ),
    ],
)
def test_a_recorded_job_ends_with_the_bytes_of_an_unrecorded_one(
    job: Callable[..., settings.Job],
    graphs: list[Graph],
    family: str,
    more: tuple[str, ...],
) -> None:
    plain = train.run(job(*SHORT, *more, "name=plain", family=family), progress=False).run
    assert not graphs
    seen: list[dict[str, Any]] = []
    recorded = train.run(
        job(*SHORT, *more, "memory.cuda_graphs=true", "name=recorded", family=family), progress=False, echo=seen.append
    ).run
    assert export_hash(recorded) == export_hash(plain)
    assert graphs and sum(graph.replays for graph in graphs) > len(graphs)
    (off,) = [event["gradient_off"] for event in seen if event["event"] == "preflight"]
    assert off == 0


def test_previews_get_the_memory_of_the_recordings(
    job: Callable[..., settings.Job],
    graphs: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    real_load, real_draw = load.load, previews.draw
    held: list[load.Loaded] = []

    def draw(*given: Any, **more: Any) -> Any:
        assert held[0].recorder is not None
        kept.append(held[0].recorder.count)
        return real_draw(*given, **more)

    monkeypatch.setattr(train, "load", lambda *given: held.append(real_load(*given)) or held[0])
    monkeypatch.setattr(previews, "draw", draw)
    drawn = ("preview.prompts=['a cat']", "preview.every=3", "preview.steps=1")
    train.run(job(*SHORT, *drawn, "memory.cuda_graphs=true"), progress=False)
    assert kept == [0, 0, 0] and len(graphs) == 2  # at the start, after step 3, at the end; recorded again in between


def test_a_pass_that_reads_a_value_is_refused_before_training(
    job: Callable[..., settings.Job],
    graphs: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from diffusers import UNet2DConditionModel

    real = UNet2DConditionModel.forward

    def reading(self: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert sample.sum().item() != 0
        return real(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", reading)
    seen: list[dict[str, Any]] = []
    with pytest.raises(RunFailure, match=r"cannot be recorded \(operation not permitted .* use memory.cuda_graphs"):
        train.run(job(*SHORT, "memory.cuda_graphs=true"), progress=False, echo=seen.append)
    assert not any(event["event"] == "step" for event in seen)


def test_a_recording_with_another_gradient_is_refused_before_training(
    job: Callable[..., settings.Job],
    graphs: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a tensor moved after it was recorded: replays would read what is there now."""
    monkeypatch.setattr(Graph, "replay", lambda graph: None)
    with pytest.raises(RunFailure, match="memory.cuda_graphs = true: on this machine, it changes the gradient"):
        train.run(job(*SHORT, "memory.cuda_graphs=true"), progress=False)


# -- the recorder ----------------------------------------------------------------------------------------------------


def test_each_kind_of_inputs_is_recorded_the_second_time(graphs: list[Graph]) -> None:
    recorder = cuda_graphs.Recorder()
    calls: list[int] = []

    def run(given: tuple[Tensor, float]) -> Tensor:
        calls.append(len(given[0]))
        return given[0] * given[1]

    for number in range(4):
        for length, factor in ((2, 3.0), (5, 3.0), (5, 4.0)):  # a number is part of the recording
            x = torch.full((length,), float(number))
            assert torch.equal(recorder.run(run, (x, factor)), x * factor)
    assert len(calls) == 6 and len(graphs) == recorder.count == 3
    assert [graph.replays for graph in graphs] == [3, 3, 3]
    recorder.forget()
    assert recorder.count == 0
    recorder.run(run, (torch.ones(2), 3.0))
    assert len(calls) == 7 and len(graphs) == 3


def test_an_answer_outlives_the_next_replay(graphs: list[Graph]) -> None:
    recorder = cuda_graphs.Recorder()
    answers = [recorder.run(double, torch.full((3,), float(number))) for number in range(4)]
    assert [answer[0].item() for answer in answers] == [0, 2, 4, 6]


def test_beyond_the_most_recordings_passes_run_unrecorded(
    graphs: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST", 2)
    recorder = cuda_graphs.Recorder()
    for _ in range(3):
        for length in (1, 2, 3):
            assert torch.equal(recorder.run(double, torch.ones(length)), 2 * torch.ones(length))
    assert recorder.count == len(graphs) == 2


def test_out_of_memory_is_not_told_as_a_pass_that_cannot_be_recorded(graphs: list[Graph]) -> None:
    def hungry(x: Tensor) -> Tensor:
        if x[0].numel() and len(calls):
            raise torch.OutOfMemoryError("CUDA out of memory")
        calls.append(1)
        return x

    calls: list[int] = []
    recorder = cuda_graphs.Recorder()
    recorder.run(hungry, torch.ones(1))
    with pytest.raises(torch.OutOfMemoryError):
        recorder.run(hungry, torch.ones(1))


@pytest.mark.parametrize(
    ("setting", "usual"),
    [
        ("memory.offload=0.5", "memory.offload = 0"),
        ("adapter.dropout=0.1", "adapter.dropout = 0"),
        ("adapter.rank_dropout=0.1", "adapter.rank_dropout = 0"),
        ("adapter.module_dropout=0.1", "adapter.module_dropout = 0"),
        ("adapter.text_encoder=true", "adapter.text_encoder = false"),
        ("quantize.backend=torchao", "quantize.backend = 'own'"),
    ],
)
def test_what_a_recording_cannot_hold_is_refused(job: Callable[..., settings.Job], setting: str, usual: str) -> None:
    with pytest.raises(UserErrors) as caught:
        job("memory.cuda_graphs=true", setting)
    assert f"true needs {usual}" in str(caught.value)
