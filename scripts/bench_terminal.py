"""Measure the CPU seconds of the commands that answer a question, and what they import.

    python scripts/bench_terminal.py --against OLD_CHECKOUT --output benchmarks/terminal

Each command runs in a process of its own on the bundled base of the demo and its images. CPU seconds are user + system,
which other work on the machine hardly changes; the least of the repetitions is taken. Outputs are compared: a faster
command must print the same.
"""

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("--help", "check", "estimate")
BARS = {"check": 2.0, "estimate": 4.0}
"""CPU seconds to reach."""
IMPORTS = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "tokenizers", "sympy")
JOB = """
name = "bench"
preset = ["demo_sd15"]
[model]
family = "sd15"
path = "demo"
[[dataset.folders]]
path = "{images}"
"""


def run(checkout: Path, folder: Path, words: list[str], *flags: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a command of a checkout. Returns its CPU seconds, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(
        [sys.executable, *flags, "-m", "lora_fp8", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(checkout), "LORA_FP8_LANG": "en"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, answer


def measure(checkout: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure each command of a checkout."""
    (folder / "job.toml").write_text(JOB.format(images=ROOT / "lora_fp8/demo/dataset"), encoding="utf-8")
    measured: dict[str, Any] = {}
    for command in COMMANDS:
        words = [command] if command.startswith("-") else [command, "job.toml"]
        profile = run(checkout, folder, words, "-X", "importtime")[1].stderr  # first, as it also compiles the files
        times, outputs = zip(*(run(checkout, folder, words) for _ in range(repeats)), strict=True)
        measured[command] = {
            "cpu_s": round(min(times), 2),
            "all_cpu_s": [round(seconds, 2) for seconds in times],
            "imports_s": sum_imports(profile),
            "output": outputs[0].stdout,
        }
    return measured


def sum_imports(profile: str) -> dict[str, float]:
    """Return the seconds that the modules of each package took by themselves, from `python -X importtime`.

    They are wall time, and the profile itself slows them: read them as shares.
    """
    totals: dict[str, int] = {}
    for own, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)", profile):
        package = name.split(".")[0]
        totals[package] = totals.get(package, 0) + int(own)
    everything = sum(totals.values())
    return {name: round(totals[name] / 1e6, 2) for name in IMPORTS if name in totals} | {
        "all": round(everything / 1e6, 2)
    }


def to_markdown(results: dict[str, Any]) -> str:
    """Return the results as a page."""
    names = list(results["measured"])
    lines = ["# CPU seconds of the commands", "", results["machine"], "", results["command"], ""]
    lines += [f"| command | {' | '.join(names)} | bar |", f"|---|{'---|' * len(names)}---|"]
    for command in COMMANDS:
        seconds = " | ".join(f"{results['measured'][name][command]['cpu_s']:.2f}" for name in names)
        lines.append(f"| `{command}` | {seconds} | {BARS.get(command, '')} |")
    lines += ["", "Seconds of imports by package (`-X importtime`: wall time, slowed by the profile itself):", ""]
    lines += [f"| command | | {' | '.join([*IMPORTS, 'all'])} |", f"|---|---|{'---|' * (len(IMPORTS) + 1)}"]
    for command in COMMANDS:
        for name in names:
            imports = results["measured"][name][command]["imports_s"]
            row = " | ".join(f"{imports[package]:.2f}" if package in imports else "" for package in (*IMPORTS, "all"))
            lines.append(f"| `{command}` | {name} | {row} |")
    same = "The outputs are the same." if results["same_output"] else "THE OUTPUTS DIFFER."
    return "\n".join([*lines, "", same if len(names) > 1 else "", ""])


def main() -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="checkout of another version, to measure beside this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file name without ending, for .md and .json")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.against:
            measured["before"] = measure(options.against.resolve(), Path(folder), options.repeats)
        measured["now"] = measure(ROOT, Path(folder), options.repeats)
    outputs = {command: {measured[name][command].pop("output") for name in measured} for command in COMMANDS}
    results = {
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}, "
        f"Python {platform.python_version()}, no GPU; the least of {options.repeats} runs, while other work ran",
        "command": "`python scripts/bench_terminal.py`: the demo's base of sd15, 16 images",
        "measured": measured,
        "same_output": all(len(texts) == 1 for command, texts in outputs.items() if command != "--help"),
    }
    page = to_markdown(results)
    print(page)
    if options.output:
        options.output.with_suffix(".md").write_text(page, encoding="utf-8")
        options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if results["same_output"] else 1


if __name__ == "__main__":
    sys.exit(main())
