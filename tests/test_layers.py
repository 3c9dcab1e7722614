"""The architecture: imports go down only, heavy libraries stay in their rooms, and no code runs from files."""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "errors",
    "common settings",  # up to here and in run, config and jobs: no torch
    "objectives precision run",
    "adapters data",
    "lora_files",
    "families",
    "config training",
    "distributed importing jobs plan verify",
    "stages",
    "tools train",
    "demo",
    "cli",
    "__main__",
)
"""Rooms (folders of lora_fp8, and its two files) from the ground up. A room imports rooms of the layers below it."""
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms.split()}
MOST_ROOMS = 22
MOST_LAYERS = 14
MOST_IMPORTERS = 30
MOST_LINES = 80
MAY_IMPORT_TRAIN = {"cli.training", "demo.show", "train_lora", "scripts"}
LIBRARIES = {
    "peft": {"adapters"},
    "bitsandbytes": {"training.optimizers", "precision.formats"},
    "torchao": {"precision.backend_torchao", "scripts"},
    "transformer_engine": {"precision.backend_te"},
    "triton": {"precision.kernels"},
    "accelerate": {"distributed.processes", "stages.tracking", "scripts"},
    "transformers": {"families", "tools.captioner", "training.optimizers", "stages.preview_scores", "scripts"},
    "onnxruntime": {"tools.wd_tagger"},
    "pyarrow": {"data.foreign_datasets"},
    "pillow_heif": {"data.decoding"},
    "diffusers": {"families", "objectives", "verify", "lora_files.export", "demo.show", "scripts"},
    "typer": {"cli"},
    "tomlkit": {"config", "cli", "lora_files.export_metadata", "importing", "jobs", "scripts"},
    "yaml": {"importing", "jobs.remote.script"},
    "pydantic": {"settings", "config", "jobs"},
}
"""Heavy library: the rooms or files that may import it."""
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
    if path.relative_to(ROOT).parts[0] == "scripts":
        return "scripts"
    if path.parent == ROOT:
        return path.stem
    parts = path.relative_to(ROOT / "lora_fp8").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "lora_fp8"


LIBRARY = {module_name(path): path for path in sorted((ROOT / "lora_fp8").rglob("*.py"))}
OUTSIDE = [ROOT / "train_lora.py", *sorted((ROOT / "scripts").rglob("*.py"))]
CODE = [*LIBRARY.values(), *OUTSIDE]
PAGES = sorted((ROOT / "webui").rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports(path: Path) -> list[tuple[str, bool, int]]:
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

    return list(visit(tree(path), True))


def own(name: str) -> str | None:
    """The name inside the library of an imported module, or None for somebody else's."""
    if name == "lora_fp8":
        return "lora_fp8"
    inner = name.removeprefix("lora_fp8.") if name.startswith("lora_fp8.") else None
    assert inner is None or inner in LIBRARY, f"{name}: no such module"
    return inner


def room_of(name: str) -> str:
    """Return the room of a module; "" for the package itself, which has nothing but the version."""
    return "" if name == "lora_fp8" else name.split(".")[0]


GRAPH = {
    name: {target for imported, *_ in imports(path) if (target := own(imported)) not in (None, name)}
    for name, path in LIBRARY.items()
}
"""Module -> the modules that it imports, also those that it imports inside functions."""


def test_every_room_has_a_layer() -> None:
    rooms = set(map(room_of, LIBRARY)) - {""}
    assert rooms == LAYER.keys()
    assert len(rooms - {"__main__"}) <= MOST_ROOMS
    assert len(LAYERS) <= MOST_LAYERS


def test_imports_go_down_only() -> None:
    """Importing inside a function makes a start faster; the dependency stays, and is counted."""
    arrows: dict[str, set[str]] = {room: set() for room in LAYER}
    wrong = []
    for name, targets in GRAPH.items():
        for target in targets:
            above, below = room_of(name), room_of(target)
            if above == below or "" in (above, below):
                continue
            arrows[above].add(below)
            if LAYER[below] >= LAYER[above]:
                wrong.append(f"{name} imports {target}")
    for number, rooms in enumerate(LAYERS):  # pytest -s shows the table
        for room in rooms.split():
            print(f"{number:2} {room:12} {' '.join(sorted(arrows[room]))}")
    assert not wrong


def test_there_are_no_circles() -> None:
    list(TopologicalSorter(GRAPH).static_order())  # raises CycleError, which names the circle
    assert sum(map(len, GRAPH.values())) > 60


def test_few_files_are_imported_everywhere() -> None:
    """What everybody needs is the errors or a room's face; any other file would be a second hall."""
    counted = {target: sum(target in targets for targets in GRAPH.values()) for target in LIBRARY}
    # Each family file is made of this one, so there it counts who else needs it.
    counted["families.base"] -= sum(
        "families.base" in targets for name, targets in GRAPH.items() if room_of(name) == "families"
    )
    faces = {name for name, path in LIBRARY.items() if path.name == "__init__.py"}
    assert {name for name, count in counted.items() if count > MOST_IMPORTERS} <= {"errors"} | faces


def test_functions_fit_on_a_screen() -> None:
    """What is in one function is read together."""
    functions = [
        (f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for path in (*CODE, *PAGES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 2500
    assert [(name, lines) for name, lines in functions if lines > MOST_LINES] == []


VAGUE = {"found", "told", "one", "said", "shown", "nobody"}
"""Words that say that a value came from somewhere, and not what it holds."""


def named(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each name that a file gives to a variable, parameter, attribute, function or class, with its line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield getattr(node, "id", "") or getattr(node, "attr", ""), node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, getattr(node, "lineno", 0)


def test_names_say_what_they_hold() -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in (*LIBRARY.values(), *PAGES)
        for name, line in named(path)
        if name.strip("_").lower() in VAGUE
    ]
    assert vague == []
    assert sum(1 for path in PAGES for _ in named(path)) > 2000, "it looks at the names"


def test_properties_are_described_by_a_verb() -> None:
    """The linter's D401 leaves properties out."""
    other = []
    for path in (*CODE, *PAGES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                kinds = {ast.unparse(decorator) for decorator in node.decorator_list}
                text = ast.get_docstring(node) or "Return"
                if kinds & {"property", "cached_property"} and not re.match("(Return|Begin|Tell)", text):
                    other.append(f"{path.relative_to(ROOT)}: {node.name}: {text.splitlines()[0]}")
    assert other == []


TAKES_THE_JOB = {"config", "plan", "stages", "train", "training", "data", "tools"}
"""Rooms of a training in which a function may take the whole job. All others take the sections that they need."""


def test_the_job_goes_into_the_plan_and_no_further() -> None:
    """The story gives the job to the plan, which reads it once; each stage takes the Session, which has the Plan."""
    story = tree(ROOT / "lora_fp8/train.py")
    given = {
        ast.unparse(node.func)
        for node in ast.walk(story)
        if isinstance(node, ast.Call) and any(ast.unparse(argument) == "job" for argument in node.args)
    }
    assert given == {"planning.make"}
    takers: dict[str, list[str]] = {}
    for name, path in LIBRARY.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                types = [ast.unparse(one.annotation) for one in node.args.args if one.annotation]
                if {"Job", "settings.Job"} & set(types):
                    takers.setdefault(room_of(name), []).append(f"{name}.{node.name}")
    ways_in = {"cli", "demo", "importing", "jobs"}  # they make a job, or write one
    assert takers.keys() - ways_in <= TAKES_THE_JOB, takers
    few = {room: names for room, names in takers.items() if room not in ways_in | {"config", "plan", "train"}}
    assert sum(map(len, few.values())) <= 12, few


def test_nothing_imports_train_but_the_ways_in() -> None:
    importers = {module_name(path) for path in CODE for name, *_ in imports(path) if name == "lora_fp8.train"}
    assert importers <= MAY_IMPORT_TRAIN and "cli.training" in importers, importers - MAY_IMPORT_TRAIN


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for path in CODE:
        name = module_name(path)
        for imported, _, line in imports(path):
            room = LIBRARIES.get(imported.split(".")[0])
            allowed = room is None or name in room or name.split(".")[0] in room
            assert allowed, f"{path}:{line}: {name} imports {imported}, which belongs into {sorted(room or ())}"
    # What the test looks at is real: each room does use its library.
    names = [(imported.split(".")[0], module_name(path)) for path in CODE for imported, *_ in imports(path)]
    used = {(library, place) for library, name in names for place in (name, name.split(".")[0])}
    for library in ("peft", "bitsandbytes", "accelerate", "typer"):
        assert {(library, place) for place in LIBRARIES[library]} <= used


def test_the_library_knows_nothing_of_the_tests() -> None:
    """Neither their modules nor the random models that they train: these are made in tests/miniatures."""
    of_tests = {path.stem for path in (ROOT / "tests").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {"miniatures", "conftest"} <= of_tests
    for path in LIBRARY.values():
        offenders = [f"{name}:{line}" for name, _, line in imports(path) if name.split(".")[0] in of_tests | {"tests"}]
        assert not offenders, f"{path}: {offenders}"
    for path in sorted((ROOT / "lora_fp8/families").glob("*.py")):
        names = {getattr(node, kind, "") for node in ast.walk(tree(path)) for kind in ("name", "id", "attr", "arg")}
        assert not [name for name in names if re.search(r"(^|_)(tiny|miniature)", name or "", re.IGNORECASE)], path


def test_no_list_of_families_stands_outside_of_their_folder() -> None:
    """A new family is a file. The importers are left out: their tables are of the names that other trainers use."""
    names = {path.stem for path in (ROOT / "lora_fp8/families").glob("[!_]*.py")} - {"base"}
    looked_at = [path for name, path in LIBRARY.items() if room_of(name) not in ("families", "importing")]
    looked_at += PAGES
    lists_of_names = []
    for path in looked_at:
        for node in ast.walk(tree(path)):
            texts: list[str] = []
            most = 2
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                texts = [one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            elif isinstance(node, ast.Dict):
                texts = [one.value for one in node.keys if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                most = 3  # "such as sd15, sdxl or flux"
                lists = re.findall(r"\w+(?:, \w+)+(?: and \w+)?", node.value)
                texts = max((re.findall(r"\w+", one) for one in lists), key=lambda one: len(names & {*one}), default=[])
            if len(names & set(texts)) > most:
                lists_of_names.append(f"{path}:{node.lineno}: {sorted(names & set(texts))}")
    assert not lists_of_names, "\n".join(lists_of_names)


WITHOUT_TORCH = [
    "lora_fp8.errors",
    "lora_fp8.common.text",
    "lora_fp8.settings",
    "lora_fp8.config",
    "lora_fp8.run",
    "lora_fp8.families",
    "lora_fp8.data.images",
    "lora_fp8.data.captions",
    "lora_fp8.data.doctor",
    "lora_fp8.importing",
    "lora_fp8.jobs",
    "lora_fp8.cli",
]


def test_the_lowest_layer_loads_no_torch() -> None:
    """One process imports all of them, one after the other, and names those that load a heavy library."""
    code = f"""if True:
        import importlib, sys
        HEAVY = ("torch", "diffusers", "transformers", "peft")
        seen = set()
        for module in {WITHOUT_TORCH}:
            importlib.import_module(module)
            for library in HEAVY:
                if library in sys.modules and library not in seen:
                    seen.add(library)
                    print(f"{{module}} loads {{library}}")
        from lora_fp8 import families
        print(families.list_families(), "torch" in sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", env=environment, check=True
    )
    files = sorted(path.stem for path in (ROOT / "lora_fp8/families").glob("[!_]*.py") if path.stem != "base")
    assert done.stdout.strip() == f"{files} False"


WITHOUT_PEFT = [
    "lora_fp8.plan.check",
    "lora_fp8.plan.plan",
    "lora_fp8.lora_files.export",
    "lora_fp8.tools.files",
    "lora_fp8.tools.resize",
    "lora_fp8.tools.merge",
]


def test_checking_a_job_and_reading_a_lora_load_no_peft() -> None:
    """Its import takes longer than what these commands do."""
    code = f"""if True:
        import importlib, sys
        for module in {WITHOUT_PEFT}:
            importlib.import_module(module)
            assert "peft" not in sys.modules, module
    """
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


UNSAFE_SWITCHES = ("shell", "trust_remote_code", "allow_pickle")


def test_nothing_runs_code_from_files() -> None:
    offenders = []
    for path in CODE:
        offenders += [
            f"{path}:{line}: {imported}" for imported, _, line in imports(path) if {*imported.split(".")} & FORBIDDEN
        ]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                if called in ("eval", "exec", "__import__", "os.system") or (called == "torch.load" and not safe):
                    offenders.append(f"{path}:{node.lineno}: {called}(")
                unsafe = [k.arg for k in node.keywords if k.arg in UNSAFE_SWITCHES]
                offenders += [f"{path}:{node.lineno}: {called}(... {name}=...)" for name in unsafe]
    assert not offenders, "\n".join(offenders)


def test_text_files_have_an_encoding() -> None:
    """Without one, the same file reads differently on a Chinese Windows."""
    offenders = []
    for path in CODE:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or any(k.arg in ("encoding", None) for k in node.keywords):
                continue
            called = ast.unparse(node.func)
            method = called.rsplit(".", 1)[-1]
            if method in ("read_text", "write_text"):
                offenders.append(f"{path}:{node.lineno}: {called} without encoding")
            if method != "open" or called in (
                "Image.open",
                "av.open",
                "os.open",
                "Run.open",
                "run.Run.open",
                "opener.open",
            ):
                continue
            modes = [*(node.args[1:2] if called == "open" else node.args[:1])]
            modes += [k.value for k in node.keywords if k.arg == "mode"]
            mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "r"
            if "b" not in str(mode):
                offenders.append(f"{path}:{node.lineno}: {called} without encoding")
    assert not offenders, "\n".join(offenders)


def test_every_test_file_belongs_to_one_room_and_every_room_has_some():
    folder = ROOT / "tests"
    rooms = tomllib.loads((folder / "rooms.toml").read_text(encoding="utf-8"))
    there = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("test_*.py")]
    assert sorted(name for names in rooms.values() for name in names) == sorted(there)
    assert len({Path(name).name for name in there}) == len(there), (
        "pytest takes two files of one name for the same module"
    )
    assert {path.parent.name for path in (ROOT / "lora_fp8").glob("*/__init__.py")} <= rooms.keys()


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_takes_from_the_library_exists(path: Path) -> None:
    """Half of these lines run on a GPU only, where nobody would see a name that is gone before the day it is needed."""
    modules, gone = {}, []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("lora_fp8", "webui"):
            package = importlib.import_module(node.module)
            for alias in node.names:
                there = getattr(package, alias.name, None)
                if there is None:
                    there = importlib.import_module(f"{node.module}.{alias.name}")
                if isinstance(there, ModuleType):
                    modules[alias.asname or alias.name] = there
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            if not hasattr(modules[node.value.id], node.attr):
                gone.append(f"line {node.lineno}: {node.value.id}.{node.attr}")
    assert gone == []
