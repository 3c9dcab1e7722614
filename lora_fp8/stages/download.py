"""The stage before the cache: download what is missing of a base model on a hub.

Whatever can be found out without the weights has been by now: the Plan is made from configs and headers.
"""

from ..errors import Message
from ..families.sources.download import Progress
from .progress import DownloadProgress
from .session import Session


def download(session: Session) -> None:
    """Download the missing weights of the base model, each file verified; the others wait for the main process.

    Raises:
        UserError, RunFailure: see `ModelFamily.fetch_weights`.
        Stopped: a stop was requested; the next start continues the download.
    """
    family, processes = session.family, session.processes
    if not any(processes.gather(family.count_missing_bytes())):
        return
    before, session.stop.at_once = (
        session.stop.at_once,
        Message("the download was stopped; the downloaded part is kept"),
    )
    if processes.is_main:
        _fetch(session)
    processes.wait()
    family.fetch_weights(is_cancelled=lambda: session.run.take_request("stop"))  # on a machine with another disk
    session.stop.at_once = before


def _fetch(session: Session) -> None:
    """Download with events in the run's log, and a progress bar."""
    family, run = session.family, session.run
    run.log_event("stage", stage="download", total=family.count_missing_bytes())

    def report(progress: Progress) -> None:
        run.log_event("download", **progress.to_json())

    with DownloadProgress(session.job.model.path, is_shown=session.shows_progress, report=report) as bar:
        family.fetch_weights(bar.update, is_cancelled=lambda: run.take_request("stop"))
