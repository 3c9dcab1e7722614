"""What fails while the page answers: one sentence in the page's language, one line in the log, and nothing that was
typed is lost."""

import errno
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from test_page_uploads import HEADER, META, Site, functions, send, site  # noqa: F401 - a fixture

from webui import error_boundary, file_routes, translations
from webui.draft import Draft

FAILURES = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), "site.full"),
    "broken": (RuntimeError("a mistake of ours"), "site.failed"),
}
VALUES = {"dataframe": {"headers": [], "data": []}, "slider": 0.5, "checkboxgroup": []}
"""Of components that do not take None."""
KEPT = {"en": "Your input is kept", "zh-CN": "已填写的内容都还在"}


@pytest.fixture(autouse=True)
def logged() -> None:
    error_boundary._logged.clear()


@pytest.mark.parametrize("language", ["zh-CN"])
def test_whatever_any_function_fails_at_is_one_sentence(
    site: Site,  # noqa: F811
    language: str,
    some: Callable[..., list[Any]],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pages, count = site.pages[language], 0
    for fn in (asked := some(functions(pages), 0, of=3)):
        error, key = list(FAILURES.values())[count % 2]
        original, count = fn.fn, count + 1

        @functools.wraps(original)
        def fails(*given: Any, error: Exception = error, **named: Any) -> Any:
            raise error

        fn.fn = fails
        caplog.clear()
        try:
            # Called as the routes do, but for the reading of values, which is another test's.
            data = [VALUES.get(part.get_block_name()) for part in fn.inputs]
            body = {"fn_index": fn._id, "data": data, "session_hash": "b"}
            answer = site.client.post(f"/{language}/gradio_api/run/x", json=body)
        finally:
            fn.fn = original
        expected = translations.say(language, key, what="RuntimeError: a mistake of ours")
        if fn.api_visibility == "public":
            assert answer.status_code == 500 and answer.json()["error"] == expected
        else:
            told = answer.json()
            assert answer.status_code == 200 and told["problem"] == expected, (fn.name, answer.text[:300])
            assert told["data"] == [{"__type__": "update"}] * len(fn.outputs), "nothing on the page changes"
        assert KEPT[language] in expected
    assert count == len(asked) > 50
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def test_a_failure_is_told_by_the_queue_too_and_logged_once(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (fn,) = [
        one for one in functions(site.pages["en"]) if any(part.elem_id == "new-start" for part, _ in targets(site, one))
    ]

    def fails(*_: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Draft, "load_text", fails)
    data = [VALUES.get(part.get_block_name()) for part in fn.inputs]
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            told = send(site, "en", fn, data, "queue", f"q{number}")
            (line,) = [json.loads(part[5:]) for part in told.split("\n\n") if "process_completed" in part]
            assert line["success"] and "a mistake of ours" in line["output"]["problem"]
    (record,) = [one for one in caplog.records if one.name == "lora_fp8.page"]
    assert "new-start.click: RuntimeError: a mistake of ours (at handlers.py:" in record.getMessage()
    assert "\n" not in record.getMessage()


def targets(site: Site, fn: Any) -> list[tuple[Any, str]]:  # noqa: F811
    return [(site.pages["en"].blocks[id], event) for id, event in fn.targets if id in site.pages["en"].blocks]


def test_what_is_typed_on_a_full_disk_is_kept_and_written_when_there_is_room(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = site.pages["zh-CN"]
    (typed,) = [
        fn
        for fn in functions(pages)
        if [pages.blocks[id].elem_id for id, event in fn.targets if event == "input"] == ["new-name"]
    ]
    (tick,) = [
        fn
        for fn in functions(pages)
        if "tick" in str(fn.targets) and "new-seen" in [part.elem_id for part in fn.inputs]
    ]

    def call(fn: Any, *data: Any) -> dict[str, Any]:
        body = {"fn_index": fn._id, "data": list(data), "session_hash": "d"}
        return site.client.post("/zh-CN/gradio_api/run/x", json=body).raise_for_status().json()

    draft = Draft(site.place.home)
    draft.put("model.path", "demo")
    before = draft.file.read_text(encoding="utf-8")
    with monkeypatch.context() as full:

        def no_room(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr("webui.draft.atomic_write", no_room)
        assert call(typed, "my-own-name", False)["problem"] == translations.say("zh-CN", "site.full")
        assert call(tick, "", False)["problem"] == translations.say("zh-CN", "site.full"), "as long as it lasts"
        assert draft.file.read_text(encoding="utf-8") == before
        assert "my-own-name" in Draft(site.place.home).load_text(), "another window and a reload show it"
        with pytest.raises(OSError):
            draft.replace("[model]\n")
        assert "my-own-name" in draft.load_text(), "what was not done is not half done"
    assert "problem" not in call(tick, "", False)
    assert 'name = "my-own-name"' in draft.file.read_text(encoding="utf-8")


@pytest.mark.parametrize("failure", FAILURES)
def test_routes_of_our_own_answer_in_one_sentence(
    site: Site,  # noqa: F811
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    error, key = FAILURES[failure]

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    picture = site.folder / "data/set/a.png"
    monkeypatch.setattr(type(site.place), "resolve", fails)
    for route in ("picture", "download"):
        answer = site.client.get(f"/{route}", params={"path": str(picture)}, headers={"accept-language": "zh-CN"})
        assert answer.status_code == (507 if failure == "full" else 500)
        assert answer.json()["error"] == translations.say("zh-CN", key, what="RuntimeError: a mistake of ours")
        assert answer.headers["x-content-type-options"] == "nosniff"
    monkeypatch.setattr("gradio.route_utils.GradioMultiPartParser.parse", fails)
    answer = site.client.post("/en/gradio_api/upload", files=[("files", ("a.txt", b"a caption"))])
    assert answer.status_code == (507 if failure == "full" else 400) and KEPT["en"] in answer.json()["error"]
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def test_a_picture_is_sent_although_it_cannot_be_kept(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_routes.system, "replace", no_room)
    answer = site.client.get("/picture", params={"path": str(site.folder / "data/set/a.png"), "width": "96"})
    assert answer.status_code == 200 and answer.content[:4] == b"RIFF"


def test_a_refusal_is_in_the_pages_language(site: Site) -> None:  # noqa: F811
    (fn,) = [fn for fn in functions(site.pages["zh-CN"]) if any(part.elem_id == "new-import" for part in fn.inputs)]
    data = [[{"path": "/etc/passwd.txt", "meta": META}]] + [None] * (len(fn.inputs) - 1)
    body = {"fn_index": fn._id, "data": data, "session_hash": "z"}
    answer = site.client.post("/zh-CN/gradio_api/run/x", json=body, headers={HEADER: "a"})
    assert "不是在此窗口上传的文件" in answer.json()["error"]
