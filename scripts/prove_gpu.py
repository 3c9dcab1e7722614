"""Answer every open question about a GPU in ten minutes, on a fresh machine with one card and no internet.

    python scripts/prove_gpu.py --minutes 9              every stage, most important first
    python scripts/prove_gpu.py --toy --minutes 9        small shapes; runs on a CPU too, to try the script itself
    python scripts/prove_gpu.py --stages numerics demo   only these
    python scripts/prove_gpu.py --stages numerics models --questions compile "^flux 1024: fp8"
                                                         only questions in whose name a regular expression is found
    python scripts/prove_gpu.py --report FOLDER          draw the table and the plot of results that are there; of
                                                         several runs in results.jsonl, the newest row of each question

| stage | question |
|---|---|
| numerics | does every CUDA function agree with float64 and with the CPU? |
| rates | how fast are the GEMMs and the passes around them, at the shapes of the large models? |
| models | how long is a training step and how much memory does it take, mode by mode, beside what was predicted? |
| peers | the same step with kohya's cast and with torchao |
| demo | does a whole job run on the GPU, and end with the same bytes after a stop and a resume? |
| processes | do two processes on two GPUs train together? |

Each stage is a process of its own with a time limit. Its rows are appended to `results.jsonl` as they come, so a stage
that hangs, crashes or is killed loses nothing but the rest of its own rows. Stages that measure no time run together,
the others alone; what ends early leaves its time to the next. `predict` runs beside the others on the CPU and
calculates the memory that `models` is compared with.

Writes benchmarks/gpu_<name>/: results.jsonl, README.md (tables) and step.svg (a plot). Exit code 0 if nothing was
wrong, 1 if a row is wrong or a stage did not end by itself.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

PHASES = ((("numerics", "demo", "processes"), 0.25), (("rates",), 0.08), (("models",), 0.52), (("peers",), 0.15))
"""Stages that run together, and the share of all minutes that they may take. Time that was not used is added."""
STAGES = tuple(stage for stages, _ in PHASES for stage in stages)
LEAST = 20.0
"""Minimum seconds of a stage: less would not even import torch."""
GRACE = 15.0
"""Seconds beyond its limit after which a stage is killed. It checks its deadline itself between two rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages and write the report. Return the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.report:
        return write_report(args.report)
    if args.stage:
        return run_stage(args)
    out = (args.out or ROOT / "benchmarks" / f"gpu_{get_device_name(args)}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    results.unlink(missing_ok=True)
    begin = time.monotonic()
    end = begin + 60 * args.minutes
    write_facts(results, args)
    predict = start("predict", args, out, 60 * args.minutes) if "models" in args.stages else None
    phases = [([one for one in stages if one in args.stages], share) for stages, share in PHASES]
    phases = [phase for phase in phases if phase[0]]
    for number, (stages, share) in enumerate(phases):
        unused = sum(later for _, later in phases[number:])
        limit = max(LEAST, (end - time.monotonic()) * share / unused)
        until = time.monotonic() + limit
        for stage, process in [(stage, start(stage, args, out, limit)) for stage in stages]:
            wait_for(process, stage, max(0.1, until - time.monotonic()), results)
    if predict is not None:
        # Nothing is left to measure, so what is not calculated by now is left out.
        wait_for(predict, "predict", max(1.0, end - time.monotonic()), results)
    return write_report(out)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything (default: %(default)s)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--questions", nargs="+", default=[], metavar="REGEX", help="only these of numerics, rates, models"
    )
    parser.add_argument("--toy", action="store_true", help="small shapes and few repeats; runs on a CPU too")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/gpu_<name>)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only draw the report of this folder again")
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # a child process: this one stage, here
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.stages = [stage for stage in STAGES if stage in args.stages]  # in order of importance
    return args


def start(stage: str, args: argparse.Namespace, out: Path, limit: float) -> subprocess.Popen[bytes]:
    """Start a stage in a process group of its own, with its output in a log file."""
    command = [sys.executable, __file__, "--stage", stage, "--limit", str(limit), "--out", str(out)]
    command += ["--questions", *args.questions] if args.questions else []
    command += ["--toy"] * args.toy + (["--device", args.device] if args.device else [])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if stage == "predict":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # leaves the GPU and the cores to others
    else:
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic kernels; read once
    with open(out / f"{stage}.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    print(f"{stage}: process {process.pid}, {limit:.0f} s at most", flush=True)
    return process


def wait_for(process: subprocess.Popen[bytes], stage: str, limit: float, results: Path) -> None:
    """Wait for a stage. At its limit kill it and all its children. Write a row if it did not end by itself."""
    from gpu_proof.record import Record

    log = results.with_name(f"{stage}.log")
    try:
        code = process.wait(limit + GRACE)
        if code != 0:
            words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            Record(results, stage).write("the stage itself", False, note=f"{how}: {''.join(words)[:300]}")
    except subprocess.TimeoutExpired:
        Record(results, stage).write("the stage itself", False, note=f"not done after {limit:.0f} s, ended")
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group is gone already, as it should be
        process.wait()


def run_stage(args: argparse.Namespace) -> int:
    """Run one stage in this process."""
    import torch
    from gpu_proof.record import Context, Record

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() and args.stage != "predict" else "cpu"))
    module = importlib.import_module(f"gpu_proof.{'models' if args.stage == 'predict' else args.stage}")
    context = Context(device, args.toy, time.monotonic() + args.limit, args.out, args.questions)
    record = Record(args.out / "results.jsonl", args.stage)
    (module.predict if args.stage == "predict" else module.run)(record, context)
    return 0


def get_device_name(args: argparse.Namespace) -> str:
    """Return a name for the results' folder: "nvidia-h200", "cpu"."""
    import torch
    from bench_step import make_slug

    if args.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return make_slug(torch.cuda.get_device_name())


def write_facts(results: Path, args: argparse.Namespace) -> None:
    """Write the first row: machine, date, versions, command."""
    import torch
    from bench_step import format_today, get_machine_name, list_versions
    from gpu_proof.record import Record

    device = torch.device("cpu" if args.device == "cpu" or not torch.cuda.is_available() else "cuda")
    facts = {"machine": get_machine_name(device), "date": format_today(), "versions": list_versions(), "toy": args.toy}
    facts |= {"cores": os.cpu_count(), "minutes": args.minutes, "stages": args.stages}
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        facts |= {"capability": f"{of.major}.{of.minor}", "memory_gib": round(of.total_memory / 2**30, 1)}
        facts |= {"gpus": torch.cuda.device_count(), "cuda": torch.version.cuda, "hip": torch.version.hip}
        facts["gpu_arch"] = getattr(of, "gcnArchName", "")
    Record(results, "facts").write("machine", None, note=json.dumps(facts), facts=facts)


def write_report(out: Path) -> int:
    """Draw the tables and the plot. Return 1 if a row is wrong, else 0."""
    from gpu_proof import report
    from gpu_proof.record import read_rows, select_newest

    rows = select_newest(read_rows(out / "results.jsonl"))
    (out / "README.md").write_text(report.render_tables(rows), encoding="utf-8")
    (out / "step.svg").write_text(report.plot(rows), encoding="utf-8")
    wrong = [row for row in rows if row["ok"] is False]
    print(f"{len(rows)} rows, {len(wrong)} wrong; see {out / 'README.md'}")
    for row in wrong:
        print(f"  {row['stage']}: {row['name']}: {row.get('note', '')}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
