"""Log in to Hugging Face with an access token, as `hf auth login` does.

The token is checked by the hub and kept by huggingface_hub, in its own file. It is in no file, log or argument of ours.
"""

import os
import re
import threading
from dataclasses import dataclass
from typing import Literal

from lora_fp8.families.sources import hosts, parse

TOKEN = re.compile(r"[A-Za-z0-9_.-]{8,400}")
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables whose token huggingface_hub prefers to the one that was saved."""


@dataclass(frozen=True)
class Login:
    """What became of a token.

    Attributes:
        state: "wrong": the hub does not accept it; "malformed": it is no token; "environment": a variable comes first;
            "away": the hub cannot be asked.
        name: of the account, for "saved"; of the variable, for "environment".
        why: for "away", for people.
    """

    state: Literal["", "checking", "saved", "wrong", "malformed", "environment", "away"] = ""
    name: str = ""
    why: str = ""


class HubLogin:
    """Logs in, on a thread, as the hub may be slow.

    Attributes:
        login: what became of the last token.
    """

    def __init__(self) -> None:
        self.login, self._is_new = Login(), False
        self._lock = threading.Lock()

    def save(self, token: str) -> None:
        """Check a token and keep it; `login` says how far that is."""
        given = token.strip()
        with self._lock:
            if self.login.state == "checking":
                return
            if variable := next((name for name in VARIABLES if os.environ.get(name)), ""):
                self.login = Login("environment", variable)
            elif not TOKEN.fullmatch(given) or given.startswith("api_org"):
                self.login = Login("malformed")
            else:
                self.login = Login("checking")
                threading.Thread(target=self._run, args=(given,), daemon=True, name="login").start()

    def is_new(self) -> bool:
        """Return True once after each successful login."""
        with self._lock:
            is_new, self._is_new = self._is_new, False
            return is_new

    def forget(self) -> None:
        """Forget what became of the last token."""
        with self._lock:
            if self.login.state != "checking":
                self.login = Login()

    def _run(self, token: str) -> None:
        login = Login("away")
        try:
            login = _log_in(token)
        finally:  # an unexpected error is in the log of the thread
            with self._lock:
                self.login, self._is_new = login, login.state == "saved"


def _log_in(token: str) -> Login:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        name = str(huggingface_hub.HfApi().whoami(token)["name"])
        huggingface_hub.login(token)
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            return Login("wrong")
        return Login("away", why=_explain(error))
    except OSError as error:  # its folder cannot be written
        return Login("away", why=f"{error.filename}: {error.strerror}" if error.filename else _explain(error))
    except Exception as error:
        return Login("away", why=_explain(error))
    return Login("saved", name)


def _explain(error: Exception) -> str:
    """Return why the hub cannot be asked; the token is in none of these sentences."""
    explained = hosts.make_host(parse("owner/name")).explain(error)
    return str(explained) if isinstance(explained, hosts.NoAnswer) else type(error).__name__
