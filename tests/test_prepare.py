"""The cache stage: shared out over the processes, stopped when asked, and what it tells."""

from pathlib import Path

import pytest

from lora_fp8.data.cache import FillReport
from lora_fp8.errors import RunFailure, Stopped
from lora_fp8.plan import plan as planning
from lora_fp8.run import Run
from lora_fp8.stages import cache
from lora_fp8.stages.session import Session


class Told:
    """A run that remembers its events and wants to stop, or not. Its preview prompts were not changed."""

    previews_file = Path("there is none")

    def __init__(self, stop: bool = False):
        self.events, self.stop = {}, stop

    def log_event(self, event: str, **fields) -> None:
        self.events.setdefault(event, []).append(fields)

    def take_request(self, what: str) -> bool:
        return self.stop and what == "stop"


class Rank:
    """One of two processes; the other one's report is known."""

    def __init__(self, rank: int, other: FillReport | None = None):
        self.rank, self.world, self.is_main, self.other = rank, 2, rank == 0, other

    def select_share(self, items):
        return items[self.rank :: self.world]

    def gather(self, mine):
        self.mine = mine
        return [mine, self.other if isinstance(self.other, type(mine)) else mine]


def cached(job, run, processes):
    return cache.cache(Session(planning.make(job), run, processes))


def test_two_processes_encode_half_each_and_tell_the_sum(job, tmp_path: Path):
    own = f"dataset.cache_dir='{tmp_path / 'cache'}'"  # not the one that all tests share
    mine, run = job("train.batch_size=2", "preview.prompts=['a cat']", own), Told()
    second = Rank(1)
    with pytest.raises(RunFailure, match="no longer in the cache"):  # the other one's share, who never came
        cached(mine, Told(), second)
    first = Rank(0, second.mine)
    data = cached(mine, run, first)
    whole = first.mine.encoded + second.mine.encoded
    assert abs(first.mine.encoded - second.mine.encoded) <= 2 and min(first.mine.encoded, second.mine.encoded) > 1
    assert run.events["cache"] == [{"encoded": whole, "reused": 0, "bytes": first.mine.bytes + second.mine.bytes}]
    again = Told()
    cached(mine, again, Rank(0))
    assert again.events["cache"][0]["encoded"] == 0
    assert data.loader.samples_per_epoch > 0 and len(data.previews.conds) == 1


def test_a_stop_is_heard_while_caching(job, tmp_path: Path):
    class Alone(Rank):
        def select_share(self, items):
            return items

    with pytest.raises(Stopped, match="cached images and captions are kept"):
        cached(job("train.batch_size=2", f"dataset.cache_dir='{tmp_path / 'cache'}'"), Told(stop=True), Alone(0))
    assert hasattr(Run, "take_request")  # what Told stands for
