"""Measure the start-up time and memory of the page, and its response times with fifty open browsers.

    python scripts/bench_page.py --clients 50 --seconds 60 --output benchmarks/page.json

Each client does what an open start page does: a tick every 1.5 s. Each also submits one job, whose base model is
missing so that it ends at once, and asks for one to be stopped. A tick's time is from the request to the complete
answer.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """
name = "bench-NUMBER"
[model]
family = "sd15"
path = "demo"
[[dataset.folders]]
path = "datasets/none"
"""


def start(home: Path) -> tuple[subprocess.Popen[str], str, float]:
    """Start a page. Returns it, its address, and the seconds until it answered."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_fp8", "ui", "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LORA_FP8_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if found := re.search(r"(http://\S+)/ ", line):
            httpx.get(f"{found[1]}/en/").raise_for_status()
            return process, found[1], time.perf_counter() - began
    raise SystemExit("the page did not start")


def end(process: subprocess.Popen[str], home: Path) -> None:
    """Stop the page and its worker."""
    from lora_fp8 import jobs

    process.send_signal(signal.SIGINT)
    process.wait(20)
    if (worker := jobs.find_worker(home)) and worker.pid:
        os.kill(worker.pid, signal.SIGTERM)


def find_tick_request(address: str) -> dict[str, Any]:
    """Return the request that the start page's timer makes."""
    config = httpx.get(f"{address}/en/config").json()
    values = {component["id"]: component["props"].get("value") for component in config["components"]}
    timers = {component["id"] for component in config["components"] if component["type"] == "timer"}
    for one in config["dependencies"]:
        if any(target in timers for target, _ in one["targets"]):
            return {"fn_index": one["id"], "data": [values.get(number) for number in one["inputs"]]}
    raise SystemExit("the start page has no timer")


class Clients:
    """Clients that each behave like one open page."""

    def __init__(self, address: str, count: int, seconds: float):
        self.address, self.count, self.until = address, count, time.monotonic() + seconds
        self.ticks: list[float] = []
        self.stops: list[float] = []
        self.errors: list[str] = []
        self.request = find_tick_request(address)

    def run(self) -> None:
        """Run all clients and wait for them."""
        threads = [threading.Thread(target=self._run_client, args=(number,)) for number in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_client(self, number: int) -> None:
        time.sleep(1.5 * number / self.count)
        with httpx.Client(base_url=self.address, timeout=60) as client:
            rounds = 0
            while time.monotonic() < self.until:
                began = time.perf_counter()
                answer = client.post(
                    "/en/gradio_api/run/predict", json={**self.request, "session_hash": f"client{number}"}
                )
                took = time.perf_counter() - began
                self.ticks.append(took)
                if answer.status_code != 200:
                    self.errors.append(f"tick: {answer.status_code} {answer.text[:200]}")
                rounds += 1
                if rounds == 3:
                    self._submit_and_stop(client, number)
                time.sleep(max(0.0, 1.5 - took))

    def _submit_and_stop(self, client: httpx.Client, number: int) -> None:
        text = CONFIG.replace("NUMBER", str(number))
        try:
            id = self._call(client, "submit", [text, 0, ""])["id"]
            began = time.perf_counter()
            self._call(client, "stop", [str(id)])
            self.stops.append(time.perf_counter() - began)
        except (RuntimeError, httpx.HTTPError) as error:
            self.errors.append(f"submit or stop: {error}")

    def _call(self, client: httpx.Client, name: str, data: list[Any]) -> Any:
        event = client.post(f"/en/gradio_api/call/{name}", json={"data": data}).json()["event_id"]
        told = client.get(f"/en/gradio_api/call/{name}/{event}").text
        if "event: complete" not in told:
            raise RuntimeError(told[:300])
        return json.loads(told.partition("data: ")[2].splitlines()[0])[0]


def main() -> None:
    """Measure, print and save the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    found["load_before"] = os.getloadavg()[0]
    ready, processor = [], []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for i in range(given.starts):
            process, address, seconds = start(home)
            ready.append(round(seconds, 2))
            times = psutil.Process(process.pid).cpu_times()
            processor.append(round(times.user + times.system, 2))
            if i < given.starts - 1:
                end(process, home)
        page = psutil.Process(process.pid)
        clients = Clients(address, given.clients, given.seconds)
        before = page.memory_info().rss
        clients.run()
        time.sleep(2)
        after = page.memory_info().rss
        end(process, home)
    quantiles = statistics.quantiles(clients.ticks, n=100)
    found |= {
        "ready_s": ready,
        "ready_cpu_s": processor,
        "resident_mb": round(before / 1e6, 1),
        "clients": given.clients,
        "ticks": len(clients.ticks),
        "tick_p50_s": round(quantiles[49], 4),
        "tick_p95_s": round(quantiles[94], 4),
        "tick_max_s": round(max(clients.ticks), 4),
        "stop_max_s": round(max(clients.stops), 3) if clients.stops else None,
        "stops": len(clients.stops),
        "growth_mb": round((after - before) / 1e6, 1),
        "errors": clients.errors[:5],
        "num_errors": len(clients.errors),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
