"""torch.compile of the repeated blocks: one graph each, the eager results, few compilations, nothing decoded kept.

The backend is "aot_eager": everything of torch.compile but the code generation, so it is fast and needs no compiler.
Its norms and activations are taken apart into simpler operations and round otherwise, so whole blocks are compared in
float32; what this project adds, the frozen layers with their adapters, is compared to the bit in bf16.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from lora_fp8 import adapters, families, precision, train
from lora_fp8.errors import RunFailure, UserError, UserErrors
from lora_fp8.precision import blocks
from lora_fp8.settings import Adapter, Memory, Model, Quantize
from lora_fp8.training import memory

WIDTH = 128
SHORT = ("train.steps=1", "export.verify=false", "adapter.rank=4")
MODES = [
    ("fp8 row", "upcast", "current"),
    ("fp8 tensor", "upcast", "current"),
    ("fp8 1x64", "upcast", "current"),
    ("fp8 128x128", "upcast", "current"),
    ("int8 1x128", "upcast", "current"),
    ("nf4 64", "upcast", "current"),
    ("fp8 row", "fp8", "current"),
    ("fp8 tensor", "fp8", "current"),
    ("fp8 row", "fp8_forward", "current"),
    ("fp8 128x128", "fp8", "block"),
]
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "sd15": lambda: BasicTransformerBlock(WIDTH, 2, 64, cross_attention_dim=WIDTH),
    "sdxl": lambda: BasicTransformerBlock(WIDTH, 1, 128, cross_attention_dim=2 * WIDTH),
    "flux double": lambda: FluxTransformerBlock(WIDTH, 2, 64),
    "flux single": lambda: FluxSingleTransformerBlock(WIDTH, 2, 64),
}
TARGETS = {
    "sd15": ["attn1.to_q", "attn1.to_out.0", "attn2.to_k", "ff.net.0.proj", "ff.net.2"],
    "flux double": ["attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.net.0.proj", "ff_context.net.2"],
    "flux single": ["attn.to_q", "attn.to_v", "proj_mlp", "proj_out"],
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No code compiled before, and none left behind."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.config.recompile_limit = limit


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """`torch.compile` without code generation; the list holds what it was asked for."""
    asked: list[dict] = []
    real = torch.compile

    def compile_(function: Callable, **settings: object) -> Callable:
        asked.append(settings)
        return real(function, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", compile_)
    return asked


class Holder(nn.Module):
    """A denoiser of one block, as far as `memory.apply_` looks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._repeated_blocks = [type(block).__name__]


def frozen(model: nn.Module, form: str, compute: str, recipe: str, dtype: torch.dtype, targets: list[str]) -> nn.Module:
    storage, scale = form.split()
    scale = "auto" if storage == "nf4" else scale
    section = Quantize(storage=storage, scale=scale, compute=compute, recipe=recipe, fp8_min_features=0)
    plan = precision.quantize_(model, section, (), dtype)
    assert {layer.compute for layer in plan.layers} == {compute}
    adapters.inject(model, Adapter(rank=4, alpha=4, dtype="bf16" if dtype == torch.bfloat16 else "fp32"), targets, 0)
    for name, parameter in adapters.list_trained_parameters(model):
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model.train()


def holder(kind: str, form: str, compute: str, recipe: str) -> Holder:
    torch.manual_seed(0)
    targets = TARGETS["sd15" if kind == "sdxl" else kind]
    return frozen(Holder(BLOCKS[kind]()), form, compute, recipe, torch.float32, targets)


def step(model: Holder, kind: str, tokens: int) -> list[Tensor]:
    """Forward and backward with this many image tokens: the answers and every gradient."""
    torch.manual_seed(tokens)
    x_BSD = torch.randn(1, tokens, WIDTH, requires_grad=True)
    model.zero_grad()
    if kind.startswith("flux"):
        text_BSD, temb_BD = torch.randn(1, 8, WIDTH), torch.randn(1, WIDTH)  # as in the first block: without gradient
        rope = (torch.randn(tokens + 8, 64), torch.randn(tokens + 8, 64))
        answers = model.block(x_BSD, text_BSD, temb_BD, image_rotary_emb=rope)
    else:
        answers = (model.block(x_BSD, encoder_hidden_states=torch.randn(1, 7, WIDTH * (1 + (kind == "sdxl")))),)
    sum(answer.square().mean() for answer in answers).backward()
    gradients = [parameter.grad for _, parameter in adapters.list_trained_parameters(model)]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    return [*(answer.detach() for answer in answers), x_BSD.grad, *gradients]


def apart(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True))


# -- one block -------------------------------------------------------------------------------------------------------


# What a block does around its layers is the same however these are held, and each way to hold them is compiled below.
@pytest.mark.parametrize(
    ("kind", "form", "compute", "recipe"),
    [
        ("sd15", "fp8 row", "upcast", "current"),
        ("sdxl", "nf4 64", "upcast", "current"),
        ("flux double", "fp8 row", "fp8", "current"),
        ("flux single", "fp8 128x128", "fp8", "block"),
    ],
)
def test_a_block_is_one_graph_and_answers_as_eager(kind, form, compute, recipe, aot_eager):
    model = holder(kind, form, compute, recipe)
    expected = step(model, kind, 24)
    memory.apply_(model, Memory(gradient_checkpointing=False, compile="blocks"))
    got = step(model, kind, 24)
    assert aot_eager == [{"fullgraph": True}]
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    # A last bit before a cast to e4m3 may round to the next of its few values.
    assert apart(got, expected) < (1e-5 if compute == "upcast" else 1e-2)


@pytest.mark.parametrize(("kind", "compute"), [("sd15", "upcast"), ("flux double", "fp8"), ("flux single", "upcast")])
def test_at_most_one_compilation_per_bucket(kind, compute, aot_eager):
    model = holder(kind, "fp8 row", compute, "current")
    shapes = (16, 24, 40)
    expected = [step(model, kind, tokens) for tokens in shapes]
    memory.apply_(model, Memory(gradient_checkpointing=False, compile="blocks"))
    compiled = []
    for tokens, eager in [*zip(shapes, expected, strict=True)] * 2:
        before = counters["stats"]["unique_graphs"]
        assert apart(step(model, kind, tokens), eager) < (1e-5 if compute == "upcast" else 1e-2)
        compiled.append(counters["stats"]["unique_graphs"] - before)
    assert compiled[0] == 1 and max(compiled) == 1 and compiled[3:] == [0, 0, 0]
    assert not counters["graph_break"]


# -- the frozen layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "compute", "recipe"), MODES)
def test_frozen_layers_give_the_same_bits_and_keep_no_decoded_weight(form, compute, recipe):
    """Compiled alone, forward and backward would share one decoding, and keep it between (see hide_from_compiler)."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256))
    model = frozen(layers, form, compute, recipe, torch.bfloat16, ["0", "2"])
    owned = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

    def run(called: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        kept = []
        x = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
            y = called(x)
        model.zero_grad()
        y.float().square().sum().backward()
        large = [one for one in kept if one.untyped_storage().data_ptr() not in owned and one.numel() >= 256 * 128]
        return large, [
            y.detach(),
            x.grad,
            *(parameter.grad for _, parameter in adapters.list_trained_parameters(model)),
        ]

    kept, expected = run(model)
    assert not kept
    kept, got = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert [(one.shape, one.dtype) for one in kept] == []
    assert all(map(torch.equal, got, expected))


# -- a whole denoiser ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [0.0, 0.5], ids=["all on the device", "half offloaded"])
def test_a_job_trains_compiled_as_it_does_eager(job, aot_eager, monkeypatch, offload):
    """With gradient checkpointing, and buckets of several shapes; and with weights that are offloaded."""
    family = "sd15"
    monkeypatch.setattr(memory, "find_problem", lambda *_: "")  # offloading on a CPU
    losses = {}
    modes = ("blocks", "offloaded") if offload else ("off", "blocks")
    for name in modes:
        more = (f"memory.offload={offload}",) if name == "offloaded" else ()
        seen: list[dict] = []
        settings = ("model.dtype=fp32", "adapter.dtype=fp32", "train.steps=2", "memory.gradient_checkpointing=true")
        compiled = f"memory.compile={'off' if name == 'off' else 'blocks'}"
        counters.clear()
        train.run(job(*settings, f"name={name}", compiled, *more, family=family), progress=False, echo=seen.append)
        losses[name] = [event["loss"] for event in seen if event["event"] == "step"]
        lines = next(event["memory"] for event in seen if event["event"] == "model")
        assert any("TransformerBlock" in line for line in lines) == (name != "off")
        assert (counters["stats"]["unique_graphs"] > 0) == (name != "off")
    assert len(losses["blocks"]) == 2 and len({*losses["blocks"]}) == 2
    if offload:
        assert losses["offloaded"] == losses["blocks"] and "offloaded to RAM" in " ".join(lines)
    else:
        assert losses["blocks"] == pytest.approx(losses["off"], rel=1e-4)
    assert not counters["graph_break"]


def flux() -> nn.Module:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=64, joint_attention_dim=64,
        pooled_projection_dim=32, in_channels=16, axes_dims_rope=(16, 24, 24), guidance_embeds=False,
    )  # fmt: skip
    return frozen(model, "fp8 row", "upcast", "current", torch.float32, ["attn.to_q", "attn.to_out.0", "proj_mlp"])


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Count(TorchDispatchMode):
    """Counts the attention that is computed; compiled code cannot run under it."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is ATTENTION.default
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module) -> list[Tensor]:
    """Gradients of one step."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    tokens = {"hidden_states": (1, 36, 16), "encoder_hidden_states": (1, 8, 64), "pooled_projections": (1, 32)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in tokens.items()}
    inputs |= {"timestep": torch.tensor([0.5]), "img_ids": torch.ones(36, 3), "txt_ids": torch.zeros(8, 3)}
    model(**inputs, return_dict=False)[0].square().mean().backward()
    return [parameter.grad for _, parameter in adapters.list_trained_parameters(model)]


def kept_bytes(model: nn.Module) -> int:
    """Bytes that are kept for the backward pass, beside the model's own."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients(model)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


ATTENTIONS = 4
"""In the blocks of `flux`."""


def test_recomputed_blocks_keep_what_they_must(aot_eager):
    """Compiled by torch 2.11 without a policy, they kept half of what a step without recomputation keeps."""
    expected, model = gradients(flux()), flux()
    memory.apply_(model, Memory(gradient_checkpointing=False))
    everything = kept_bytes(model)
    kept = {}
    for keeps in (False, True):
        model, runs = flux(), ATTENTIONS * (1 if keeps else 2)
        assert (
            "attention results kept" in memory.apply_(model, Memory(keep_attention=keeps)).format_lines()[0]
        ) == keeps
        with Count() as count:
            got = gradients(model)
        assert all(map(torch.equal, got, expected)) and count.num == runs
        if not keeps:
            kept["eager"] = kept_bytes(model)

        torch._dynamo.reset()
        counters.clear()
        model = flux()
        memory.apply_(model, Memory(keep_attention=keeps, compile="blocks"))
        kept[keeps] = kept_bytes(model)
        assert apart(gradients(model), expected) < 1e-5
        assert counters["stats"]["unique_graphs"] == 4  # the first block of a kind has inputs that need no gradient
        assert not counters["graph_break"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            gradients(model)
        assert sum(one.name == str(ATTENTION).replace(".", "::") for one in seen.events()) == runs
    assert kept["eager"] < kept[False] < 1.7 * kept["eager"]
    assert kept[False] < kept[True] < 2.5 * kept["eager"] < everything / 2


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize(
    "section",
    [
        Memory(gradient_checkpointing=False, compile="blocks"),
        Memory(gradient_checkpointing=True, compile="blocks"),
        Memory(gradient_checkpointing=True, keep_attention=True, compile="blocks"),
    ],
    ids=["kept", "recomputed", "attention kept"],
)
def test_offloaded_weights_of_compiled_blocks_are_fetched_together(aot_eager, monkeypatch, section, share):
    """Each block's from its place, before the forward and before the backward; the bits are those without offloading.

    The rest of the model fetches its own. Alike blocks have the same offloaded layers, or each would be compiled anew.
    """
    given: list[int] = []
    real = blocks._set_weights

    def set_weights(layers: list, weights: list[Tensor]) -> None:
        given.extend(weight.untyped_storage().data_ptr() for weight in weights)
        real(layers, weights)

    monkeypatch.setattr(blocks, "_set_weights", set_weights)
    results, graphs = [], []
    for part in (0.0, share):
        torch._dynamo.reset()
        counters.clear()
        model = flux()
        precision.offload_(model, part, precision.find_blocks(model))
        own = {layer.qweight.untyped_storage().data_ptr() for layer in precision.find_frozen_layers(model).values()}
        memory.apply_(model, section)
        results.append([gradient.clone() for _ in range(4) for gradient in gradients(model)])
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    assert graphs[0] == graphs[1]
    weights = next(iter(precision.find_blocks(model).values()))._compiled_call_impl.weights
    places = {place.bytes.data_ptr() for place in weights._places}
    assert len(places) == 2 and places < set(given) < places | own
    # Once the order is known, all copies are begun before. The first and last block have their weights at the turns.
    num = len(precision.find_blocks(model))
    assert weights.late + weights.early == 1 + 4 * (2 * num - 2) and weights.late < 2 * num
    with memory.uncompiled(model):
        assert apart(gradients(model), results[0][: len(results[0]) // 4]) < 1e-5


def test_only_training_is_compiled(aot_eager):
    model = holder("sd15", "fp8 row", "upcast", "current")
    memory.apply_(model, Memory(gradient_checkpointing=False, compile="blocks"))
    model.eval()
    step(model, "sd15", 16)
    assert counters["stats"]["unique_graphs"] == 0
    model.train()
    step(model, "sd15", 16)
    assert counters["stats"]["unique_graphs"] == 1


def test_every_family_names_its_repeated_blocks(aot_eager, tiny):
    for name in families.list_families():
        denoiser = families.get(name)(
            Model(family=name, path=str(tiny(name))), device=torch.device("cpu"), dtype=torch.float32
        ).make_empty_denoiser()
        aot_eager.clear()
        lines = memory.apply_(denoiser, Memory(compile="blocks")).format_lines()
        assert aot_eager and lines[1].startswith("compiled: ")


class Doubled(torch.autograd.Function):
    """The input, with twice its gradient: what a broken kernel may do, while every loss is right."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_compiled_blocks_with_another_gradient_are_refused_before_training(job, aot_eager, monkeypatch):
    """As compiled attention of cuDNN did on an H100: the losses were right."""
    real = memory._Compiled.__call__

    def broken(compiled, *args, **kwargs):
        answer = real(compiled, *args, **kwargs)
        return Doubled.apply(answer) if compiled.block.training else answer

    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(memory._Compiled, "__call__", broken)
        with pytest.raises(RunFailure, match="memory.compile = 'blocks': on this machine, it changes the gradient"):
            train.run(job(*SHORT, "memory.compile=blocks"), progress=False, echo=seen.append)
    assert not any(event["event"] == "step" for event in seen)
    train.run(job(*SHORT, "memory.compile=blocks", "name=right"), progress=False, echo=seen.append)
    (found,) = [event["gradient_off"] for event in seen if event["event"] == "preflight"]
    assert 0 <= found < 0.05


def test_training_does_without_attention_of_cudnn(job):
    torch.backends.cuda.enable_cudnn_sdp(True)
    train.run(job(*SHORT), progress=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


# -- what cannot be --------------------------------------------------------------------------------------------------


def test_a_denoiser_without_repeated_blocks_is_refused():
    with pytest.raises(UserError, match="Linear has no list of repeated blocks; use memory.compile = 'off'"):
        memory.apply_(nn.Linear(2, 2), Memory(gradient_checkpointing=False, compile="blocks"))


def test_what_this_machine_cannot_do_is_told(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    graphs = Memory(cuda_graphs=True)
    assert "a cpu has no CUDA graphs" in memory.find_problem(graphs, cpu)
    blocks = Memory(compile="blocks")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "needs no-such-compiler, which is missing" in memory.find_problem(blocks, cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs triton, which is missing" in memory.find_problem(blocks, gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    # Triton's own first kernel would say so after the caching.
    assert "needs a C compiler" in memory.find_problem(blocks, gpu)
    kernels = Quantize(compute="fp8", kernels="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs a C compiler" in precision.find_problem(kernels, gpu)
    assert memory.find_problem(Memory(), cpu) == memory.find_problem(Memory(), gpu) == ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("memory.compile=blocks", "quantize.compute=fp8", "quantize.recipe=delayed"), "quantize.recipe = 'current'"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(overrides, told, job):
    with pytest.raises(UserErrors) as caught:
        job(*overrides)
    assert told in str(caught.value) and len(caught.value.problems) == 1
