"""Kill the page, the worker and jobs, and check with a real Chromium that an open page shows the truth.

    python scripts/soak_page.py [--times 50] [--only SCENARIO]... [--output benchmarks/soak_page.json]

Each scenario runs `--times` times. Each time something happens to a training that a tab shows, and the time is measured
until the tab, by itself, shows it (at most 3 s are allowed). Then Stop and Resume are pressed in the tab: no process of
the job may be left, and the job must train again. Exits with 1 if a check failed.

Page, worker and queue are those of `lora-fp8 ui`. Only launcher and trainer are the stand-ins of soak_jobs.py, which
write a run folder like the real ones and learn nothing. With --output, figures of scenarios that did not run this time
stay in the file.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, sync_playwright

from lora_fp8 import cli, jobs
from lora_fp8.jobs import ENDED, procs
from lora_fp8.run import Run

sys.path.insert(0, str(Path(__file__).parent))  # a worker is started with a safe path
import soak_jobs

ROOT = Path(__file__).resolve().parent.parent
PLAN = {"cache": 0.05, "load": 0.05, "step": 0.15, "export": 0.1}
STEPS = 100_000
GIVEN_UP_S = 60
LOOK = """() => {
  const text = selector => document.querySelector(selector)?.innerText ?? '';
  return {
    state: document.querySelector('#head .state')?.classList[1] ?? '',
    figures: text('#head .figures'), said: text('#head .said'), lost: text('#lost'),
    board: Object.fromEntries([...document.querySelectorAll('#cards [data-job]')].map(
      one => [one.dataset.job, one.querySelector('.state')?.classList[1] ?? ''])),
  };
}"""


@dataclass
class Look:
    """What a tab shows now: state of the run, newest step, attempt, and whether the page is lost."""

    state: str = ""
    step: int = -1
    attempt: int = 1
    lost: bool = False
    board: dict[str, str] | None = None


class House:
    """A home with the page, its worker and one training, and a tab that shows it.

    Attributes:
        id: the training, which has more steps than anybody waits for.
        tab: shows its run page.
        times: seconds until the tab showed what was so, by what had happened.
        late: what took longer than is allowed, in this round.
    """

    def __init__(self, home: Path, browser: Browser):
        self.field = soak_jobs.Field(home)
        self.home, self.queue = self.field.home, self.field.queue
        self.browser = browser.new_context(locale="en-US")
        self.times: dict[str, list[float]] = defaultdict(list)
        self.late: list[str] = []
        self.port = "0"
        (home / "runs").mkdir()
        self.start_page()
        try:
            self.id = self.field.submit(STEPS, **PLAN)
            jobs.ensure_worker(home)
            self.tab = self.visit(f"run?run={self.id}")
            self.wait_for_step(self.id)
            warm = self.visit(f"run?run={self.id}", "zh-CN")  # a browser that was here before has the scripts
            warm.wait_for_selector("#head .state", timeout=GIVEN_UP_S * 1000)
            warm.close()
        except BaseException:
            self.close()
            raise

    # -- its processes

    def start_page(self) -> None:
        """Start the page, and return when it answers."""
        self.page = subprocess.Popen(
            [sys.executable, __file__, "ui", "--port", self.port, "--root", str(self.home / "runs")],
            env={**os.environ, "LORA_FP8_HOME": str(self.home), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        lines = []
        for line in self.page.stdout:
            lines.append(line)
            if found := re.search(r"(http://\S+:(\d+))/ ", line):
                self.address, self.port = found[1], found[2]
                return
        raise AssertionError(f"the page did not start: {''.join(lines)}")

    def kill_page(self) -> None:
        """Kill the page's process."""
        self.page.kill()
        self.page.wait()

    def find_worker(self) -> int:
        """Return the process id of the worker; 0 if none runs."""
        found = jobs.find_worker(self.home)
        return found.pid if found else 0

    def kill_worker(self) -> int:
        """Send SIGKILL to the worker. Returns its process id."""
        self.wait_until(lambda: self.find_worker() > 0, "a worker")
        pid = self.find_worker()
        os.kill(pid, signal.SIGKILL)
        return pid

    def list_others(self) -> list[int]:
        """List processes of this home other than the page, its worker, and what the page starts for itself."""
        own, found = {self.page.pid, self.find_worker(), os.getpid()}, []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"LORA_FP8_HOME={self.home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone, or not ours
                continue
        return [pid for pid in found if pid not in own and procs.find_parent(pid) not in own and procs.identify(pid)]

    def close(self) -> None:
        """End everything."""
        self.browser.close()
        self.kill_page()
        if pid := self.find_worker():
            os.kill(pid, signal.SIGKILL)
        self.field.close()

    # -- what is looked at

    def visit(self, path: str, language: str = "en") -> Page:
        """Open a new tab."""
        page = self.browser.new_page()
        page.goto(f"{self.address}/{language}/{path}", wait_until="commit")
        return page

    def look(self, tab: Page | None = None) -> Look:
        """Return what a tab shows of the run; an empty look while it is loading."""
        try:
            told = (tab or self.tab).evaluate(LOOK)
        except Error:  # it is just being loaded anew
            return Look()
        step = re.search(r"(\d+) / \d+", told["figures"])
        attempt = re.search(r"(?:attempt|尝试)\D*(\d+)", told["figures"])
        return Look(
            told["state"],
            int(step[1]) if step else -1,
            int(attempt[1]) if attempt else 1,
            bool(told["lost"]),
            told["board"],
        )

    def wait_until(self, fulfilled: Callable[[], Any], what: str) -> None:
        """Wait until a condition holds."""
        self.field.wait_until(fulfilled, GIVEN_UP_S, what)

    def wait_and_time(self, what: str, begun: float, shows: Callable[[Look], Any], tab: Page | None = None) -> None:
        """Wait until the tab shows it, and record how long after `begun` that was."""
        while not shows(seen := self.look(tab)):
            if time.monotonic() - begun > GIVEN_UP_S:
                raise AssertionError(f"{what}: not within {GIVEN_UP_S} s: {seen}")
            time.sleep(0.03)
        took = time.monotonic() - begun
        self.times[what].append(took)
        if took > soak_jobs.TRUE_WITHIN_S:
            self.late.append(f"{what}: after {took:.2f} s")

    def read_step(self) -> int:
        """Return the step that the queue knows of."""
        return self.queue.get_job(self.id).step or 0

    def wait_for_step(self, id: int) -> None:
        """Wait until the training has made another step."""
        self.wait_until(lambda: self.queue.get_job(id).state == "running", f"job {id} runs")
        before = self.queue.get_job(id).step or 0
        self.wait_until(lambda: (self.queue.get_job(id).step or 0) > before, f"job {id} trains")

    def wait_for_tab(self, what: str, begun: float, tab: Page | None = None, beyond: int | None = None) -> None:
        """Wait until the tab shows that the training runs, and a step after the present one."""
        step = self.read_step() if beyond is None else beyond
        self.wait_and_time(
            what, begun, lambda seen: seen.state == "running" and seen.step >= step and not seen.lost, tab
        )

    def stop_and_resume(self) -> None:
        """Stop and resume with the tab's buttons. Nothing is left in between, and it trains again."""
        begun = time.monotonic()
        self.tab.click("#head [data-do=stop]")
        self.wait_and_time("stop pressed", begun, lambda seen: seen.state in ("stopping", "stopped"))
        self.wait_until(lambda: self.queue.get_job(self.id).state in ENDED, "it stops")
        begun = time.monotonic()
        assert not self.field.list_members(self.id), f"left over: {self.field.list_members(self.id)}"
        self.wait_and_time("it has stopped", begun, lambda seen: seen.state == "stopped")
        self.wait_until(lambda: not self.list_others(), "no process is left")
        begun = time.monotonic()
        self.tab.click("#head [data-do=resume]")
        self.wait_and_time("resume pressed", begun, lambda seen: seen.state in ("queued", "starting", "running"))
        self.wait_for_step(self.id)


# ---------------------------------------------------------------------------------------------------------------------
# scenarios: each finds a training that a tab shows, and leaves it so


def reload(house: House) -> None:
    """Reload the tab in the middle of a run."""
    step, begun = house.read_step(), time.monotonic()
    house.tab.reload(wait_until="commit")
    house.wait_for_tab("reloaded", begun, beyond=step)


def second_tab(house: House) -> None:
    """Open the run in another tab in the other language; both keep updating."""
    step, begun = house.read_step(), time.monotonic()
    other = house.visit(f"run?run={house.id}", "zh-CN")
    house.wait_for_tab("opened", begun, other, step)
    for tab in (other, house.tab):
        house.wait_for_tab("goes on", time.monotonic(), tab)
    other.close()


def page_killed(house: House) -> None:
    """Kill the page and start it again: the tab reconnects by itself, and the job is unaffected."""
    token = house.field.read_token(house.id)
    house.kill_page()
    house.wait_and_time("says that the page is lost", time.monotonic(), lambda seen: seen.lost)
    house.start_page()
    house.wait_for_tab("found back", time.monotonic())
    assert house.field.read_token(house.id) == token, "the job was started again"


def worker_killed(house: House) -> None:
    """Kill the worker: the page starts another, the job continues, and a waiting job gets its turn."""
    board, token = house.visit(""), house.field.read_token(house.id)
    house.wait_until(lambda: (house.look(board).board or {}).get(str(house.id)) == "running", "the board")
    waits = house.field.submit(STEPS, **PLAN)
    house.wait_and_time(
        "submitted", time.monotonic(), lambda seen: (seen.board or {}).get(str(waits)) == "queued", board
    )
    pid, begun = house.kill_worker(), time.monotonic()
    house.wait_for_tab("goes on", begun)
    house.wait_until(lambda: house.find_worker() not in (0, pid), "another worker")
    house.times["another worker (not a matter of 3 s)"].append(time.monotonic() - begun)
    assert house.field.read_token(house.id) == token, "the job was started again"
    house.tab.click("#head [data-do=stop]")
    house.wait_until(lambda: house.queue.get_job(waits).state == "running", "who waits gets its turn")
    house.wait_and_time("its turn", time.monotonic(), lambda seen: seen.board[str(waits)] == "running", board)
    house.queue.stop(waits)
    house.wait_until(lambda: house.queue.get_job(waits).state in ENDED, "it stops")
    house.wait_and_time("its end", time.monotonic(), lambda seen: seen.board[str(waits)] == "stopped", board)
    board.close()
    house.wait_until(lambda: house.look().state == "stopped", "stopped")
    house.tab.click("#head [data-do=resume]")
    house.wait_for_step(house.id)


def both_killed(house: House) -> None:
    """Kill page and worker: the job continues alone until both are back."""
    token = house.field.read_token(house.id)
    house.kill_page()
    pid = house.kill_worker()
    house.wait_and_time("says that the page is lost", time.monotonic(), lambda seen: seen.lost)
    house.start_page()
    house.wait_for_tab("found back", time.monotonic())
    house.wait_until(lambda: house.find_worker() not in (0, pid), "another worker")
    assert house.field.read_token(house.id) == token, "the job was started again"


def job_killed(house: House) -> None:
    """Kill all processes of the job, or its trainer: the tab shows it, and the job continues from its checkpoint."""
    attempt = house.queue.get_job(house.id).attempts
    victims = house.field.list_members(house.id)
    if random.random() < 0.5:
        victims = [house.field.find_roles(house.id)["trainer"]]
    procs.send(victims, signal.SIGKILL)
    _check_after_death(house, time.monotonic(), attempt)


def rebooted(house: House) -> None:
    """Kill everything and reuse the recorded process ids; then open the page."""
    attempt, pids = house.queue.get_job(house.id).attempts, house.field.list_members(house.id)
    house.kill_page()
    house.kill_worker()
    procs.send(pids, signal.SIGKILL)
    house.wait_until(lambda: not house.field.list_members(house.id), "all are gone")
    stranger = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"]})
    try:
        who = procs.identify(stranger.pid)
        assert who is not None
        boot = "another" if random.random() < 0.5 else who.boot
        house.queue.store.update(house.id, pid=who.pid, start=who.start if boot == "another" else 1, boot=boot)
        noted = json.loads((house.home / "worker.json").read_bytes())
        (house.home / "worker.json").write_text(json.dumps(noted | {"pid": who.pid}), encoding="utf-8")
        lock = Run(house.queue.get_job(house.id).folder).lock_file
        lock.write_text(re.sub(r"\d+$", str(who.pid), lock.read_text(encoding="utf-8")), encoding="utf-8")
        house.start_page()
        house.tab.close()
        begun = time.monotonic()
        house.tab = house.visit(f"run?run={house.id}")
        _check_after_death(house, begun, attempt)
        assert stranger.poll() is None, "a stranger was killed"
    finally:
        stranger.kill()
        stranger.wait()


def _check_after_death(house: House, begun: float, attempt: int) -> None:
    """Check that the tab no longer shows the killed attempt as running, and then shows the next one."""
    house.wait_and_time(
        "told", begun, lambda seen: seen.state and (seen.state not in ("running", "stopping") or seen.attempt > attempt)
    )
    house.wait_for_step(house.id)
    house.wait_for_tab("goes on", time.monotonic())
    assert house.queue.get_job(house.id).attempts == attempt + 1


SCENARIOS = {
    one.__name__: one for one in (reload, second_tab, page_killed, worker_killed, both_killed, job_killed, rebooted)
}


def soak(name: str, times: int, home: Path, browser: Browser) -> tuple[dict[str, list[float]], list[str]]:
    """Run one scenario several times in one home. Returns (seconds by event, what was wrong)."""
    house, wrong = House(home, browser), []
    try:
        for number in range(times):
            try:
                SCENARIOS[name](house)
                house.stop_and_resume()
                late, house.late = house.late, []
                if late:
                    wrong.append(f"{name} {number}: {'; '.join(late)}")
            except (AssertionError, Error) as error:  # the next rounds still tell something
                house.late.clear()
                house.tab.screenshot(path=home / f"wrong-{number}.png")
                wrong.append(f"{name} {number}: {type(error).__name__}: {error}")
                if house.page.poll() is not None:
                    house.start_page()
                house.tab.reload(wait_until="commit")
                if house.queue.get_job(house.id).state in ENDED:
                    house.queue.requeue(house.id)
                    jobs.ensure_worker(home)
                house.wait_for_step(house.id)
    finally:
        house.close()
    return house.times, wrong


def run_stand_in() -> None:
    """Run `lora-fp8 ui` or `lora-fp8 worker` with the trainings of soak_jobs.py."""
    jobs.worker.PROGRAM = (__file__,)
    jobs.Worker = soak_jobs.StandIn
    cli.main()


def main() -> None:
    """Run the scenarios, or play the part that the first argument names."""
    if sys.argv[1:2] in (["ui"], ["worker"]):
        return run_stand_in()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="one scenario; may be repeated")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    jobs.worker.PROGRAM = (__file__,)
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("Chromium is needed: scripts/install_browser.sh installs it")
    root, failed = Path(tempfile.mkdtemp(prefix="soak-page-")), False
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in given.only or SCENARIOS:
            load, begun = os.getloadavg()[0], time.monotonic()
            times, wrong = soak(name, given.times, root / name, browser)
            failed |= bool(wrong)
            row = {
                "right": given.times - len(wrong),
                "rounds": given.times,
                "minutes": round((time.monotonic() - begun) / 60, 1),
                "load_before": round(load, 1),
                "seconds": {
                    what: {"median": round(statistics.median(all_), 2), "slowest": round(max(all_), 2)}
                    for what, all_ in times.items()
                },
                "wrong": wrong[:5],
            }
            print(name, json.dumps(row, indent=1), flush=True)
            if given.output:
                save_figures(given.output, name, row)
        browser.close()
    if failed:
        sys.exit(f"what happened is in {root}")
    shutil.rmtree(root)


def save_figures(path: Path, name: str, row: dict[str, Any]) -> None:
    """Write the figures of a scenario to the file."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"scenarios": {}}
    found["scenarios"][name] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": f"python scripts/soak_page.py --times {row['rounds']} --only {name}",
        **row,
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
