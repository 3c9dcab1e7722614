"""Prints the events of a run, as text or as JSON lines."""

import json
import sys
from typing import Any

from ..common.messages import get_language, translate
from ..common.numbers import format_digits
from ..errors import Joined, Message, Plural, Template

COUNTED = ("cache", "load")
"""Stages whose progress is printed. Other progress is short, or would break into the bar of the steps."""


def print_json_line(event: dict[str, Any]) -> None:
    """Print an event of the run as one line of JSON."""
    print(json.dumps(event, ensure_ascii=False), flush=True)


def print_event(event: dict[str, Any]) -> None:
    """Print an event of the run as text; the progress bar shows the steps."""
    from tqdm import tqdm

    kind = event["event"]
    if kind == "progress" and event.get("stage") not in COUNTED:
        return
    text = {
        "stage": lambda e: Message("== {stage}", stage=e["stage"]),
        "warning": lambda e: Message("warning: {line}", line=e["text"]),
        "progress": lambda e: Message("  {done} of {total}", done=e["done"], total=e["total"]),
        "memory": lambda e: Joined("\n", e["lines"]),
        "cache": lambda e: Message("cache: {count} encoded, {kept} reused", count=e["encoded"], kept=e["reused"]),
        "data": _describe_data,
        "model": lambda e: Joined(
            "\n",
            (
                Message("base: {base}, {storage}", base=e["base"], storage=e["storage"]),
                Message(
                    "adapters: {count} modules, {parameters} parameters",
                    count=e["adapters"],
                    parameters=f"{e['trainable']:,}",
                ),
                Message(
                    "learning rate: {rate} x {factor} = {product}",
                    rate=f"{e['lr']:g}",
                    factor=f"{e['lr_factor']:g}",
                    product=f"{e['lr_effective']:g}",
                ),
            ),
        ),
        "compute": lambda e: Message(
            "compute: {chosen}, the fastest of {times}",
            chosen=e["chosen"],
            times=", ".join(f"{mode} {seconds:.3g} s" for mode, seconds in e["seconds"].items()),
        ),
        "sensitivity": lambda e: Joined(
            "\n  ",
            (
                Message(
                    "sensitivity: {count} of {total} layers moved to a higher precision, {size} MB more; largest "
                    "error of a layer: {before} before, {now} after (bound {bound})",
                    count=len(e["moved"]),
                    total=e["layers"],
                    size=f"{e['added_bytes'] / 1e6:.2f}",
                    before=f"{e['worst_before']:.3g}",
                    now=f"{e['worst']:.3g}",
                    bound=f"{e['bound']:g}",
                ),
                *e["moved"],
            ),
        ),
        "preflight": _describe_preflight,
        "exchange": lambda e: Message(
            "gradients are sent as {kind}: {size} MB per process and step, {share} of float32",
            kind=e["kind"],
            size=f"{e['bytes_per_step'] / 1e6:.3g}",
            share=f"{e['of_fp32']:.3g}",
        ),
        "validation": lambda e: Message(
            "held-out loss at step {step}: {loss} ({bands})",
            step=e["step"],
            loss=f"{e['loss']:.4g}",
            bands=", ".join(f"{band}: {loss:.4g}" for band, loss in e["bands"].items()),
        ),
        "score": _describe_scores,
        "verdict": lambda e: e["text"],
        "patience": lambda e: e["text"],
        "resume": lambda e: Message("resuming from {checkpoint}", checkpoint=e["checkpoint"]),
        "captioner": lambda e: Message("captioning model: {model}, on {device}", model=e["model"], device=e["device"]),
        "caption": lambda e: Message(
            "{done} of {total} {file}: {caption}", done=e["done"], total=e["total"], file=e["file"], caption=e["text"]
        ),
        "verify": _describe_verify,
    }.get(kind)
    if text is not None:
        tqdm.write(translate(get_language(), text(event)), file=sys.stdout)


def _describe_scores(event: dict[str, Any]) -> Message:
    templates = {"likeness": Template("image similarity {score}"), "prompt_fit": Template("prompt match {score}")}
    scores = [template(score=f"{event[name]:.3f}") for name, template in templates.items() if name in event]
    return Message("scores of the previews at step {step}: {scores}", step=event["step"], scores=Joined(", ", scores))


def _describe_data(event: dict[str, Any]) -> Message:
    images = Plural("{count} image", "{count} images")(count=event["images"])
    if event["masked"]:
        text = Plural("{count} image, {masked} of them with a mask", "{count} images, {masked} of them with a mask")
        images = text(count=event["images"], masked=event["masked"])
    return Message(
        "data: {images}, {samples} samples and {steps} steps per epoch; buckets {buckets}",
        images=images,
        samples=format_digits(event["samples_per_epoch"]),
        steps=format_digits(event["steps_per_epoch"]),
        buckets=", ".join(f"{size}: {n}" for size, n in event["buckets"].items()),
    )


def _describe_preflight(event: dict[str, Any]) -> Message:
    line = Message("preflight: peak memory {peak} GiB", peak=f"{event['peak_gib']:.2f}")
    if "fused" in event:
        line = Message("{line}; {count} adapters computed together with their layer", line=line, count=event["fused"])
    if "gradient_off" in event:
        percent = f"{100 * event['gradient_off']:.1f}"
        line = Message("{line}; compiling or recording changes the gradient by {percent} %", line=line, percent=percent)
    return line


def _describe_verify(event: dict[str, Any]) -> Message:
    file, lines = event["file"], [Message("  {line}", line=line) for line in event["lines"]]
    outcome = (
        Message("verify {file}: passed", file=file) if event["ok"] else Message("verify {file}: FAILED", file=file)
    )
    return Joined("\n", (outcome, *lines))


def escape(text: str) -> str:
    """Replace bytes of file names that are no UTF-8, which neither JSON nor a page can show."""
    return text.encode("utf-8", "backslashreplace").decode()
