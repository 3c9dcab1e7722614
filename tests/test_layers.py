"""The architecture, held by tests: imports go down only, heavy libraries stay in their rooms, no code runs from files.

5    cli  train_lora.py  scripts
4.5  demo.show            4    train            3.5  prepare  finish  (resume, measure above them)
3    memory sample checkpoint export verify text_encoders processes exchange writes data.cache data.loader
2    families/*             1.5  importing.*
1    objectives precision adapters kinds optim layouts data.{images,decoding,colour,buckets,captions,...}
     demo.pictures demo.measure
0    settings rules wording config locks run disk jobs, the list of families and their files
     (standard library, pydantic, tomlkit: no torch)
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    0.0: "lora_fp8 settings rules wording config locks run disk families families._files demo "
    "jobs jobs.procs jobs.store jobs.truth jobs.worker jobs.keeper",
    1.0: "naming objectives adapters kinds optim layouts precision precision.formats precision.quantized "
    "precision.matmul precision.kernels precision.stream "
    "precision.linear precision.plan precision.convert precision.choose precision.report precision.names "
    "precision.backends precision.backend_torchao precision.backend_te "
    "data data.images data.decoding data.clips data.colour data.buckets data.captions data.pattern data.doctor "
    "demo.pictures demo.measure",
    1.5: "importing importing.base importing.words importing.render importing.kohya_table importing.kohya_data "
    "importing.kohya_training importing.kohya_blocks importing.kohya_previews importing.sd_scripts importing.kohya_ss "
    "importing.lora_scripts importing.musubi "
    "importing.diffusion_pipe importing.ai_toolkit importing.onetrainer importing.simpletuner",
    2.0: " ".join(f"families.{path.stem}" for path in (ROOT / "lora_fp8/families").glob("[!_]*.py"))
    + "".join(
        f" families.{path.stem}" for path in (ROOT / "lora_fp8/families").glob("_[!_]*.py") if path.stem != "_files"
    ),
    3.0: "dry memory sample checkpoint export verify text_encoders processes exchange data.cache data.loader writes",
    3.25: "captioner tools tools.pairs tools.files tools.resize tools.merge tools.extract kit",
    3.5: "prepare finish",
    3.625: "resume validate",
    3.75: "measure estimate tools.average",
    4.0: "train",
    4.5: "demo.show",
    4.75: "cli_options cli_dataset cli_jobs",
    5.0: "cli",
    5.5: "__main__",
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names.split()}
MAY_IMPORT_TRAIN = {"cli", "demo.show", "train_lora", "scripts"}
ROOMS = {
    "peft": {"adapters"},
    "bitsandbytes": {"optim", "precision.formats"},
    "torchao": {"precision.backend_torchao", "scripts"},
    "transformer_engine": {"precision.backend_te"},
    "triton": {"precision.kernels"},
    "accelerate": {"processes", "scripts"},
    "transformers": {"families", "captioner", "scripts"},
    "diffusers": {"families", "objectives", "verify", "export", "demo.show", "scripts"},
    "typer": {"cli", "cli_options", "cli_dataset", "cli_jobs"},
    "tomlkit": {"config", "cli", "export", "families", "importing", "jobs"},
    "yaml": {"importing"},
    "pydantic": {"settings", "config", "jobs"},
}
FORBIDDEN = {
    "torchvision",
    "timm",
    "open_clip",
    "toml",
    "quanto",
    "optimum",
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
}


def module_name(path: Path) -> str:
    """ "data.cache" for lora_fp8/data/cache.py; "scripts" and "train_lora" for what lies outside the library."""
    if path.parent.name == "scripts":
        return "scripts"
    if path.parent == ROOT:
        return path.stem
    parts = path.relative_to(ROOT / "lora_fp8").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "lora_fp8"


LIBRARY = {module_name(path): path for path in sorted((ROOT / "lora_fp8").rglob("*.py"))}
OUTSIDE = [ROOT / "train_lora.py", *sorted((ROOT / "scripts").glob("*.py"))]
CODE = [*LIBRARY.values(), *OUTSIDE]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(imported module in full, whether at the top level, line); what only type checkers see is left out."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]

    def visit(node: ast.AST, top: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, top, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:  # "from .data import images" imports a module, "from .run import Run" does not
                inner = f"{module}.{alias.name}".removeprefix("lora_fp8.")
                yield (
                    (f"lora_fp8.{inner}" if inner in LIBRARY and module.startswith("lora_fp8") else module),
                    top,
                    node.lineno,
                )
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, top and not inside)

    yield from visit(tree(path), True)


def own(name: str) -> str | None:
    """The name inside the library of an imported module, or None for somebody else's."""
    if name == "lora_fp8":
        return "lora_fp8"
    inner = name.removeprefix("lora_fp8.") if name.startswith("lora_fp8.") else None
    assert inner is None or inner in LIBRARY, f"{name}: no such module"
    return inner


def test_every_module_has_a_layer() -> None:
    assert not LIBRARY.keys() - LAYER.keys(), f"give these a layer: {sorted(LIBRARY.keys() - LAYER.keys())}"
    assert not LAYER.keys() - LIBRARY.keys(), f"these are gone: {sorted(LAYER.keys() - LIBRARY.keys())}"


@pytest.mark.parametrize("name", LIBRARY)
def test_imports_go_down_only(name: str) -> None:
    """Also those inside functions: importing late makes a start faster, but not a dependency go away."""
    for imported, _, line in imports(LIBRARY[name]):
        target = own(imported)
        if target is not None:
            assert LAYER[target] <= LAYER[name], f"{LIBRARY[name]}:{line}: {name} ({LAYER[name]}) imports {target}"


def test_there_are_no_circles() -> None:
    graph = {
        name: {target for imported, top, _ in imports(path) if top and (target := own(imported)) not in (None, name)}
        for name, path in LIBRARY.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert sum(map(len, graph.values())) > 60


def test_nothing_imports_train_but_the_ways_in() -> None:
    importers = {module_name(path) for path in CODE for name, *_ in imports(path) if name == "lora_fp8.train"}
    assert importers <= MAY_IMPORT_TRAIN and "cli" in importers, importers - MAY_IMPORT_TRAIN


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for path in CODE:
        name = module_name(path)
        for imported, _, line in imports(path):
            room = ROOMS.get(imported.split(".")[0])
            allowed = room is None or name in room or name.split(".")[0] in room
            assert allowed, f"{path}:{line}: {name} imports {imported}, which belongs into {sorted(room or ())}"
    # What the test looks at is real: each room does use its library.
    used = {(imported.split(".")[0], module_name(path)) for path in CODE for imported, *_ in imports(path)}
    for library in ("peft", "bitsandbytes", "accelerate", "typer"):
        assert {(library, room) for room in ROOMS[library]} <= used


@pytest.mark.parametrize(
    "module",
    [
        "lora_fp8.config",
        "lora_fp8.run",
        "lora_fp8.families",
        "lora_fp8.cli",
        "lora_fp8.data.images",
        "lora_fp8.data.captions",
        "lora_fp8.data.doctor",
        "lora_fp8.importing",
        "lora_fp8.jobs",
    ],
)
def test_the_lowest_layer_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'diffusers', 'transformers', 'peft'}} & set(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert answer.stdout.strip() == "[]"


def test_listing_the_families_loads_no_torch() -> None:
    code = "import sys; from lora_fp8 import families; print(families.available(), 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    files = sorted(path.stem for path in (ROOT / "lora_fp8/families").glob("[!_]*.py") if path.stem != "base")
    assert done.stdout.decode().strip() == f"{files} False"


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_code_from_files(path: Path) -> None:
    for imported, _, line in imports(path):
        assert not set(imported.split(".")) & FORBIDDEN, f"{path}:{line}: {imported}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            forbidden = called in ("eval", "exec", "__import__", "os.system") or (called == "torch.load" and not safe)
            assert not forbidden, f"{path}:{node.lineno}: {called}("
            unsafe = [k for k in node.keywords if k.arg in ("shell", "trust_remote_code", "allow_pickle")]
            assert not unsafe, f"{path}:{node.lineno}: {called}(... {unsafe[0].arg}=...)"


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_text_files_have_an_encoding(path: Path) -> None:
    """Without one, the same file reads differently on a Chinese Windows."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call) or any(k.arg in ("encoding", None) for k in node.keywords):
            continue
        called = ast.unparse(node.func)
        method = called.rsplit(".", 1)[-1]
        if method in ("read_text", "write_text"):
            raise AssertionError(f"{path}:{node.lineno}: {called} without encoding")
        if method != "open" or called in ("Image.open", "av.open", "os.open", "Run.open", "run.Run.open"):
            continue
        modes = [*(node.args[1:2] if called == "open" else node.args[:1])]
        modes += [k.value for k in node.keywords if k.arg == "mode"]
        mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "r"
        assert "b" in str(mode), f"{path}:{node.lineno}: {called} without encoding"
