"""Gradients in e4m3 bytes with error feedback: made-up ones between real processes, and real training.

Bytes are counted three times: by the exchange itself (what a run tells), by wrapping the collectives while training,
and by the kernel, from its TCP connections.
"""

import json
from pathlib import Path

import exchange_worker as worker
import forked
import pytest
import torch
from safetensors.torch import load_file
from test_processes import FLOAT32, RECORDING, SMALL, folder_of, kept, losses, noted, wait_for_step, write
from torch import nn
from waiting import LONG_SECONDS

from lora_fp8 import config, settings, train
from lora_fp8.distributed import exchange
from lora_fp8.errors import UserError
from lora_fp8.run import Run
from lora_fp8.training.flat import Gradients

# -- bytes


def test_a_block_comes_back_as_near_as_e4m3_allows():
    """Over all sizes that float32 has but its last factor of four; 3 bits of mantissa are off by at most 1 in 17."""
    generator = torch.Generator().manual_seed(0)
    values_BE = torch.randn(4096, 256, generator=generator) * 2.0 ** torch.linspace(-110, 120, 4096)[:, None]
    rows = exchange.encode(values_BE)
    back_BE = exchange.decode(rows)
    assert rows.dtype == torch.uint8 and rows.shape == (4096, 257)
    top = values_BE.abs().amax(dim=1, keepdim=True)
    normal = values_BE.abs() > top / 2**13  # what is far below its block's largest has fewer bits
    assert ((back_BE - values_BE).abs() / values_BE.abs())[normal].max() <= 1 / 17 + 1e-6
    error = (back_BE.double() - values_BE).norm(dim=1) / values_BE.double().norm(dim=1)
    print(f"\nrelative error of a block: {error.mean():.4f}, the worst {error.max():.4f}")
    assert 0.02 < error.mean() < 0.028 and error.max() < 0.035
    # The largest of a block lies in the upper half of what e4m3 holds, and is not cut off.
    assert (back_BE.abs().amax(dim=1, keepdim=True) / top).min() > 0.94


def test_what_e4m3_holds_comes_back_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[127] = codes[255] = 0  # NaN
    values_BE = codes.view(torch.float8_e4m3fn).to(torch.float32)[None]
    for factor in (1.0, 2.0**-100, 2.0**100):
        assert torch.equal(exchange.decode(exchange.encode(values_BE * factor)), values_BE * factor)
    assert torch.equal(exchange.decode(exchange.encode(torch.zeros(1, 256))), torch.zeros(1, 256))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_come_back_finite(bad):
    values_BE = torch.ones(3, 256)
    values_BE[1, 7] = bad
    back_BE = exchange.decode(exchange.encode(values_BE))
    assert back_BE[[0, 2]].eq(1).all() and not torch.isfinite(back_BE[1]).any()


# -- between processes


@pytest.fixture(scope="module", params=[2, 3])
def told(request, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """What each of so many processes has of exchange_worker.py; two gather, three scatter."""
    folder, world = tmp_path_factory.mktemp("worker"), request.param
    started = forked.start_group([worker.__file__, str(folder)], world, cwd=folder, env={})
    try:
        errors = [process.communicate(timeout=LONG_SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world, errors
    return [load_file(folder / f"{rank}.safetensors") for rank in range(world)]


def true_means(told) -> torch.Tensor:
    samples = torch.tensor([worker.SAMPLES[step % 2] for step in range(worker.STEPS)])
    return sum(one["given"].double() for one in told) / samples[:, None]


def test_all_hold_the_same_bits_near_the_true_mean(told):
    for one in told[1:]:
        assert all(torch.equal(one[f"{kind}.came"], told[0][f"{kind}.came"]) for kind in ("fp32", "fp8"))
    first, exact = told[0]["fp8.came"][0].double(), true_means(told)[0]
    error = float((first - exact).norm() / exact.norm())
    print(f"\n{len(told)} processes: one exchange is off by {100 * error:.2f} %")
    assert 0.005 < error < 0.04
    assert (told[0]["fp32.came"].double() - true_means(told)).norm() < 1e-6 * true_means(told).norm()


def test_nothing_is_lost_only_late(told):
    """What came of all steps and what is still held back are together what was given, to float32's precision."""
    given, came = true_means(told).sum(dim=0), told[0]["fp8.came"].double().sum(dim=0)
    late = sum(one["residual"].double() for one in told)
    off = ((came + late - given).abs() / true_means(told).abs().amax(dim=0)).max()
    assert off < 1e-4
    assert 1e-3 < (came - given).norm() / given.norm() < 0.05  # so the residuals do matter


def test_tiny_components_arrive_with_feedback_and_never_without(told):
    """The planted bug: the residual forgotten after every step."""
    world, steps = len(told), worker.TINY_STEPS
    with_it, without = told[0]["tiny.feedback"], told[0]["tiny.without"]
    assert with_it[0] == pytest.approx(worker.BIG * world * steps) and without[0] == with_it[0]
    assert with_it[1] == pytest.approx(worker.TINY * world * steps, abs=world * 2.0**-17) and with_it[1] > 0
    assert without[1] == 0


def test_the_figures_travel_as_they_are(told):
    world = len(told)
    expected = [sum(1 / 3 + rank for rank in range(world)), 1.0, 1.0 + (world - 1) * 2.0**53]
    for one in told:
        assert one["fp8.sums"].tolist() == [expected] * worker.STEPS


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_what_is_not_finite_on_one_is_so_on_all(told, bad):
    for one in told:
        came = one[f"bad.{bad}"]
        assert not torch.isfinite(came[300]) and torch.isfinite(came[:256]).all() and torch.isfinite(came[512:]).all()


def test_a_quarter_of_the_bytes_by_the_kernels_count(told):
    for rank, one in enumerate(told):
        counted, kernel = ({k: int(one[f"{k}.{who}"]) for k in ("fp32", "fp8")} for who in ("counted", "kernel"))
        print(f"\nprocess {rank} of {len(told)}: {counted} bytes counted, {kernel} by the kernel")
        assert kernel["fp8"] == pytest.approx(counted["fp8"], rel=0.02)
        assert kernel["fp32"] == pytest.approx(counted["fp32"], rel=0.02)
        assert 0.24 < kernel["fp8"] / kernel["fp32"] < 0.27


def test_a_checkpoint_holds_every_residual(told):
    for rank, one in enumerate(told):
        assert torch.equal(told[0][f"residual.{rank}"], one["residual"]) and one["residual"].any()
        assert rank == 0 or not any(name.startswith("residual.") for name in one)


# -- taken up again


class Group:
    """A process among others, for what needs no exchange."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world


def taken_up(kind: str, rank: int, world: int, tensors: dict[str, torch.Tensor]):
    of = exchange.build(kind, Gradients([("a", nn.Parameter(torch.zeros(300)))]), Group(rank, world))
    return of, of.load_(tensors)


def test_another_number_of_processes_takes_over_what_is_still_to_come():
    saved = {f"residual.{rank}": torch.randn(300, generator=torch.Generator().manual_seed(rank)) for rank in range(2)}
    for rank in range(2):
        of, warnings = taken_up("fp8", rank, 2, saved)
        assert warnings == [] and torch.equal(of.residual_BE.view(-1)[:300], saved[f"residual.{rank}"])
        assert of.residual_BE.view(-1)[300:].eq(0).all()
    held = []
    for rank in range(3):
        of, warnings = taken_up("fp8", rank, 3, saved)
        assert len(warnings) == 1 and "has 2 processes, this run has 3" in warnings[0] and "\n" not in warnings[0]
        held.append(of.residual_BE.view(-1)[:300])
    assert torch.equal(sum(held), saved["residual.0"] + saved["residual.1"])
    for kind, world in (("fp8", 1), ("fp32", 2)):
        of, warnings = taken_up(kind, 0, world, saved)
        assert type(of) is exchange.Exchange and len(warnings) == 1 and "residuals of 2 processes" in warnings[0]
        assert taken_up(kind, 0, world, {})[1] == []


def test_two_gather_and_more_scatter():
    gradients = Gradients([("a", nn.Parameter(torch.zeros(300)))])
    assert [exchange.Fp8Exchange(gradients, Group(0, world)).way for world in (2, 3, 8)] == [
        "gather",
        "scatter",
        "scatter",
    ]


# -- training

TRAINED = (
    *SMALL,
    *FLOAT32,
    "train.steps=80",
    "train.batch_size=4",
    "checkpoint.every=80",
    "optimizer.lr=1e-3",
    "dataset.resolution=96",
)
IN_FP8 = "train.gradient_exchange=fp8"

COUNTED = """
import torch.distributed
def counting(name, tensor_of, share):
    real = getattr(torch.distributed, name)
    def counted(*given, **more):
        tensor = tensor_of(given)
        note("wire", name, str(tensor.dtype), tensor.nbytes * share)
        return real(*given, **more)
    setattr(torch.distributed, name, counted)
counting("all_reduce", lambda given: given[0], 1)  # of two: half to the other, and half of the sum
counting("all_gather", lambda given: given[1], 1)
counting("all_to_all_single", lambda given: given[1], 0.5)
counting("send", lambda given: given[0], 1)
"""


def start(job: settings.Job, folder: Path, *more: str, planted: str = "") -> list[forked.Process]:
    """train_lora.py in two processes that note what they do; `planted` is run before."""
    config_file = write(job, folder)
    script = folder / "recording.py"
    script.write_text(RECORDING, encoding="utf-8")
    args = [str(script), "--config", str(config_file), "--json", *more]
    return forked.start_group(args, 2, cwd=folder, env={"SHARES": str(folder), "PLANTED": planted})


def end(processes: list[forked.Process]) -> tuple[list[int | None], str]:
    """Wait for all. Returns their exit codes, and what they said on stderr."""
    try:
        errors = [process.communicate(timeout=LONG_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(errors)[-3000:]


@pytest.fixture(scope="module")
def trained(make_job, tmp_path_factory):
    """The same job with two processes that exchange in float32 and in fp8: {kind: (job, folder)}."""
    root, found = tmp_path_factory.mktemp("trained"), {}
    for kind in ("fp32", "fp8"):
        job = make_job(root / kind, *TRAINED, f"train.gradient_exchange={kind}")
        codes, errors = end(start(job, root / kind, planted=COUNTED))
        assert codes == [0, 0], errors
        found[kind] = job, root / kind
    return found


def wire(folder: Path, rank: int) -> list[list]:
    return noted(folder, rank, "wire")


def test_bar_i_at_most_three_tenths_of_the_bytes(trained):
    for rank in range(2):
        plain, packed = (wire(trained[kind][1], rank) for kind in ("fp32", "fp8"))
        # Checkpoints included: they bring the residual to the main process, in float32.
        ratio = sum(n for *_, n in packed) / sum(n for *_, n in plain)
        print(f"\nprocess {rank}: {ratio:.4f} of the bytes")
        assert ratio <= 0.3
        assert [(name, dtype) for name, dtype, _ in plain] == [("all_reduce", "torch.float32")] * 80
        steps = [n for name, dtype, n in packed if (name, dtype) == ("all_gather", "torch.uint8")]
        assert len(steps) == 80 and len(packed) == 80 + rank
    for kind, of_fp32 in (("fp32", 1.0), ("fp8", sum(steps) / sum(n for *_, n in plain))):
        job, folder = trained[kind]
        events = [event for event in Run.open(folder_of(job)).read_events() if event["event"] == "exchange"]
        assert len(events) == 1 and events[0]["kind"] == kind
        assert events[0]["bytes_per_step"] == wire(folder, 0)[0][2]
        assert events[0]["of_fp32"] == pytest.approx(of_fp32, abs=1e-3)


def test_bar_i_the_loss_ends_where_that_of_float32_does(trained):
    plain, packed = (losses(trained[kind][0]) for kind in ("fp32", "fp8"))
    ends = [sum(each[-20:]) / 20 for each in (plain, packed)]
    last = Path("checkpoints") / "step-000080" / "adapter.safetensors"
    one, other = (load_file(folder_of(trained[kind][0]) / last) for kind in ("fp32", "fp8"))
    gap = sum(float((other[name] - one[name]).norm()) ** 2 for name in one) ** 0.5
    gap /= sum(float(tensor.norm()) ** 2 for tensor in one.values()) ** 0.5
    print(f"\nmean loss of the last 20 steps {ends[0]:.5f} and {ends[1]:.5f}; adapters differ by {100 * gap:.2f} %")
    assert len(plain) == len(packed) == 80 and plain != packed
    assert ends[0] < 0.95 * sum(plain[:20]) / 20  # there was something to learn
    assert abs(ends[1] - ends[0]) < 0.005 * ends[0]
    assert 0 < gap < 0.02


def test_both_processes_hold_the_same_weights_after_every_step(trained):
    first, second = (noted(trained["fp8"][1], rank, "weights") for rank in (0, 1))
    assert len(first) == 80 and first == second and first[0] != first[-1]


def test_stopped_and_resumed_ends_with_the_bytes_of_one_that_was_not(make_job, tmp_path, trained, tree_hash):
    job = make_job(tmp_path, *TRAINED, IN_FP8)
    processes = start(job, tmp_path)
    wait_for_step(processes[0], 2)
    Run(folder_of(job)).request("stop")
    codes, errors = end(processes)
    assert codes == [75, 0], errors  # the main process alone says how it ended
    at = json.loads(Run(folder_of(job)).status_file.read_text(encoding="utf-8"))
    assert at["state"] == "stopped" and 2 < at["step"] < 80
    saved = load_file(folder_of(job) / "checkpoints" / f"step-{at['step']:06d}" / "optimizer.safetensors")
    assert all(saved[f"residual.{rank}"].any() for rank in range(2))
    assert not torch.equal(saved["residual.0"], saved["residual.1"])
    codes, errors = end(start(job, tmp_path, "--resume"))
    assert codes == [0, 0], errors
    assert kept(job, tree_hash) == kept(trained["fp8"][0], tree_hash)
    assert len(kept(job, tree_hash)) == 2 + 4


def test_a_loss_that_is_not_finite_on_one_stops_all_with_its_file(make_job, tmp_path):
    job = make_job(tmp_path, *SMALL, IN_FP8, "train.steps=10", "train.batch_size=2")  # four batches are an epoch
    planted = """
real_take = loader.Loader.take_batch
def take_batch(self, step, *more):
    batch = real_take(self, step, *more)
    if os.environ["RANK"] == "1" and step >= 3 and batch is not None:
        batch.latents_BCHW.fill_(float('nan'))
    return batch
loader.Loader.take_batch = take_batch
"""
    codes, errors = end(start(job, tmp_path, planted=planted))
    assert codes == [3, 0], errors
    last = Run.open(folder_of(job)).read_events()[-1]
    assert last["event"] == "error" and ": loss nan is not finite; files: " in last["text"], errors
    assert ".png" in last["text"] or ".jpg" in last["text"]


def test_alone_the_setting_changes_nothing_and_says_so(make_job, tmp_path, tree_hash):
    hashes = []
    for kind in ("fp32", "fp8"):
        job = make_job(tmp_path / kind, "train.steps=2", f"train.gradient_exchange={kind}")
        done = train.run(job, progress=False).run
        texts = [event["text"] for event in done.read_events() if event["event"] == "warning"]
        assert [text for text in texts if "gradient_exchange" in text] == (
            ["train.gradient_exchange has no effect: the job runs in one process"] * (kind == "fp8")
        )
        assert "exchange" not in [event["event"] for event in done.read_events()]
        bundle = tree_hash(done.checkpoints / "step-000002")
        hashes.append({name: bundle[name] for name in ("adapter.safetensors", "optimizer.safetensors")})
    assert hashes[0] == hashes[1]


def test_the_setting_is_checked():
    with pytest.raises(UserError, match=r"train\.gradient_exchange: expected fp32 \| fp8"):
        config.loads(
            "model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}",
            ["train.gradient_exchange=bf16"],
        )
