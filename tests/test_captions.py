"""Caption edits: what each operation makes of a caption, bytes before and after, undo after crashes and strangers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lora_fp8.data import caption_journal, caption_operations, caption_text
from lora_fp8.data import captions as room
from lora_fp8.errors import UserError

CAPTIONS = {
    "a.txt": b"a girl, red hair, girl, smile",
    "b.txt": b"\xef\xbb\xbfred hair,smile ,  a girl\r\nsecond line, girl\r\n",
    "c.caption": "女孩, 红发".encode("utf-16"),
    "deep/d.txt": b"a photo of a girl in the snow\n",
    "deep/e.txt": b"\xff\xfe" + "smile, girl\r".encode("utf-16-le"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures, five captions in five encodings and line ends; f.png has none."""
    root = tmp_path / "set"
    for name in (*CAPTIONS, "f.txt"):
        picture = (root / name).with_suffix(".png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(picture)
    for name, raw in CAPTIONS.items():
        (root / name).write_bytes(raw)
    return root


def raws(folder: Path) -> dict[str, bytes]:
    """Every file but the journal."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != room.JOURNAL
    }


def edited(folder: Path, *operations: caption_operations.Operation, only: list[str] | None = None) -> room.Entry:
    return room.apply(folder, room.preview(folder, operations, only))


@pytest.mark.parametrize(
    ("operation", "before", "after"),
    [
        (caption_operations.SetText("new\nlines"), "old\r\ntext", "new\r\nlines"),
        (caption_operations.SetText("same\ntext\n"), "same\r\ntext", "same\r\ntext"),
        (caption_operations.Replace("cat", "dog"), "cat, catalogue", "dog, dogalogue"),
        (caption_operations.Replace("(", "\\1"), "a (b", "a \\1b"),
        (caption_operations.AddTag("x"), "a,b", "a,b, x"),
        (caption_operations.AddTag("x"), "a, b, ", "a, b, x"),
        (caption_operations.AddTag("x", first=True), "a,b", "x, a,b"),
        (caption_operations.AddTag("x", first=True), "", "x"),
        (caption_operations.AddTag("b"), "a\nb, c", "a\nb, c"),
        (caption_operations.AddTag("x", separator="|"), "a|b", "a|b| x"),
        (caption_operations.RemoveTag("b"), "a,  b,c", "a,c"),
        (caption_operations.RemoveTag("a"), "a, b,  c", "b,  c"),
        (caption_operations.RemoveTag("b"), "ab, a b, bb", "ab, a b, bb"),
        (caption_operations.RemoveTag("a"), "a\r\nb, a", "\r\nb"),
        (caption_operations.RenameTag("a", "z"), " a ,b,  a", " z ,b"),
        (caption_operations.RenameTag("a", "b"), "a, b, c", "b, c"),
        (caption_operations.RenameTag("a", "b"), "aa, c", "aa, c"),
        (caption_operations.RenameTag("b", "b"), "a, b, c", "a, b, c"),
        (caption_operations.Prepend("x "), "a", "x a"),
        (caption_operations.Append("."), "a", "a."),
        (caption_operations.Trigger("zibo"), "a zibot", "zibo, a zibot"),
        (caption_operations.Trigger("zibo"), "the zibo sits", "the zibo sits"),
        (caption_operations.SortTags(), "b,A, c", "A, b, c"),
        (caption_operations.SortTags(), "a ,b", "a ,b"),
        (caption_operations.SortTags(keep=1), "z, c, b", "z, b, c"),
        (caption_operations.DedupeTags(), "a, b, a\nb, c", "a, b\nc"),
        (caption_operations.DedupeTags(), "a ,  b", "a ,  b"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.make_title(),
)
def test_what_an_operation_makes_of_a_caption(operation, before, after) -> None:
    assert operation(before) == after
    assert operation(after) == after or isinstance(operation, caption_operations.Prepend | caption_operations.Append)


def test_a_trigger_is_put_where_training_puts_it(folder: Path) -> None:
    trained = {name: caption_text.with_trigger(caption_text.read_caption(folder / name), "girl") for name in CAPTIONS}
    edited(folder, caption_operations.Trigger("girl"))
    assert {name: caption_text.read_caption(folder / name) for name in CAPTIONS} == trained
    assert (folder / "f.txt").read_bytes() == b"girl"


def test_encodings_marks_line_ends_and_pictures_stay(folder: Path) -> None:
    before = raws(folder)
    entry = edited(folder, caption_operations.RenameTag("girl", "woman"))
    assert entry.files == 3 and entry.done
    assert raws(folder) == before | {
        "a.txt": b"a girl, red hair, woman, smile",
        "b.txt": b"\xef\xbb\xbfred hair,smile ,  a girl\r\nsecond line, woman\r\n",
        "deep/e.txt": b"\xff\xfe" + "smile, woman\r".encode("utf-16-le"),
    }


def test_undo_and_redo_give_every_byte_back(folder: Path) -> None:
    states = [raws(folder)]
    for operations in (
        [caption_operations.AddTag("zibo", first=True)],
        [
            caption_operations.Replace("red hair", "红发"),
            caption_operations.SortTags(),
            caption_operations.DedupeTags(),
        ],
        [caption_operations.SetText("everything else")],
        [caption_operations.ReplacePattern(r"(\w+) (\w+)", r"\2 \1")],
    ):
        edited(folder, *operations)
        states.append(raws(folder))
    assert len({json.dumps(sorted(map(repr, state.items()))) for state in states}) == 5
    for state in reversed(states[:-1]):
        assert not room.undo(folder).done
        assert raws(folder) == state
    with pytest.raises(UserError, match="no caption edit to undo"):
        room.undo(folder)
    for state in states[1:]:
        assert room.redo(folder).done
        assert raws(folder) == state
    with pytest.raises(UserError, match="no caption edit to redo"):
        room.redo(folder)
    room.undo(folder)
    edited(folder, caption_operations.Append("!"))
    with pytest.raises(UserError, match="no caption edit to redo"):
        room.redo(folder)
    assert [entry.done for entry in room.read_history(folder)] == [True] * 4


def test_a_preview_writes_nothing_and_tells_all(folder: Path) -> None:
    before = raws(folder)
    (folder / "g.txt").write_bytes("红发".encode("gb18030"))
    Image.new("RGB", (8, 8)).save(folder / "g.png")
    edit = room.preview(folder, [caption_operations.AddTag("x")], only=["a.png", "f.png", "g.png"])
    assert [(change.file, *change.decode_texts()) for change in edit.changes] == [
        ("a.txt", "a girl, red hair, girl, smile", "a girl, red hair, girl, smile, x"),
        ("f.txt", "", "x"),
    ]
    assert edit.problems == ["g.txt: the text is not UTF-8 at byte 0 (0xba); save it as UTF-8"]
    assert {name: raw for name, raw in raws(folder).items() if name[0] != "g"} == before
    assert not (folder / room.JOURNAL).exists()


def test_other_encodings_become_utf8_when_named(folder: Path) -> None:
    (folder / "a.txt").write_bytes("红发, 女孩\r\n".encode("gb18030"))
    edit = room.preview(folder, [caption_operations.Recode("gb18030")])
    assert [change.file for change in edit.changes] == ["a.txt"] and not edit.problems
    room.apply(folder, edit)
    assert (folder / "a.txt").read_bytes() == "红发, 女孩\r\n".encode()
    room.undo(folder)
    assert (folder / "a.txt").read_bytes() == "红发, 女孩\r\n".encode("gb18030")


def test_what_somebody_else_changed_is_never_overwritten(folder: Path) -> None:
    edit = room.preview(folder, [caption_operations.Append("!")])
    (folder / "a.txt").write_bytes(b"mine")
    before = raws(folder)
    with pytest.raises(UserError, match="a.txt was changed by another program since the preview"):
        room.apply(folder, edit)
    assert raws(folder) == before
    edited(folder, caption_operations.Append("!"))
    (folder / "deep/d.txt").unlink()
    (folder / "f.txt").write_bytes(b"also mine")
    before = raws(folder)
    with pytest.raises(UserError) as refused:
        room.undo(folder)
    assert "2 problems" in str(refused.value) and "deep/d.txt" in str(refused.value) and "f.txt" in str(refused.value)
    assert raws(folder) == before


def test_a_torn_journal_line_is_an_edit_that_never_began(folder: Path) -> None:
    before = raws(folder)
    edited(folder, caption_operations.Append("!"))
    with open(folder / room.JOURNAL, "ab") as file:
        file.write(b'{"edit": 2, "title": "half')
    edited(folder, caption_operations.Append("?"))
    room.undo(folder)
    room.undo(folder)
    assert raws(folder) == before


def test_an_impossible_time_in_a_journal_is_none() -> None:
    times = [10**400, -1, float("inf"), float("nan"), True, "1", None]
    assert [caption_journal.Record.read(1, {"t": time}).t for time in times] == [0.0] * len(times)
    assert caption_journal.Record.read(1, {"t": 5}).t == 5.0


def test_the_journal_stays_small_and_undoes_the_newest(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(caption_journal, "JOURNAL_BYTES", 4000)
    for number in range(30):
        before = raws(folder)
        edited(folder, caption_operations.SetText(f"caption {number}"))
        assert (folder / room.JOURNAL).stat().st_size <= 4000
    room.undo(folder)
    assert raws(folder) == before
    last = before
    for number in range(60):  # marks of undo and redo are lines, too
        last = raws(folder)
        (room.redo if number % 2 == 0 else room.undo)(folder)
        assert (folder / room.JOURNAL).stat().st_size <= 4000
    room.redo(folder)
    assert raws(folder) == last
    assert 1 < len(room.read_history(folder)) < 30


def test_edits_of_a_group_are_undone_together(folder: Path) -> None:
    before = raws(folder)
    edited(folder, caption_operations.Append("!"), only=["a.png"])
    middle = raws(folder)
    for name in ("b.png", "c.png", "f.png"):
        room.apply(
            folder, room.preview(folder, [caption_operations.SetText(f"of {name}")], [name]), group="captioning 1"
        )
    after = raws(folder)
    assert [(entry.files, entry.done) for entry in room.read_history(folder)] == [(1, True), (3, True)]
    room.undo(folder)
    assert raws(folder) == middle
    assert [(entry.files, entry.done) for entry in room.read_history(folder)] == [(1, True), (3, False)]
    room.redo(folder)
    assert raws(folder) == after
    room.undo(folder)
    room.undo(folder)
    assert raws(folder) == before


def test_nothing_outside_of_the_folder_is_read_or_written(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_bytes(b"secret")
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to(outside)
    edit = room.preview(folder, [caption_operations.AddTag("x")])
    assert edit.problems == ["a.txt: this link leads out of the folder; edit the file that it points to"]
    assert "a.txt" not in [change.file for change in edit.changes]
    # A journal may come with a dataset from anywhere.
    for name in ("../outside.txt", str(outside), "a.txt", "../../etc/passwd", "b.png"):
        hostile = caption_journal.pack([room.Change(name, b"owned", b"secret")])
        (folder / room.JOURNAL).write_text(json.dumps({"edit": 1, "changes": hostile}) + "\n", encoding="utf-8")
        with pytest.raises(UserError):
            room.undo(folder)
    assert outside.read_bytes() == b"secret"
    (folder / room.JOURNAL).unlink()
    (folder / room.JOURNAL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        edited(folder, caption_operations.AddTag("x"), only=["b.png"])
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_inside_is_followed_and_modes_stay(folder: Path) -> None:
    (folder / "f.txt").symlink_to("a.txt")
    (folder / "a.txt").chmod(0o640)
    edited(folder, caption_operations.Append("!"), only=["f.png"])
    assert (folder / "f.txt").is_symlink() and (folder / "a.txt").read_bytes().endswith(b"smile!")
    assert (folder / "a.txt").stat().st_mode & 0o777 == 0o640


def test_two_names_of_one_file_are_one_caption(folder: Path) -> None:
    """f.txt is a link to a.txt: written twice, it could not be undone."""
    (folder / "f.txt").symlink_to("a.txt")
    before = raws(folder)
    assert edited(folder, caption_operations.AddTag("x"), only=["a.png", "f.png"]).files == 1
    assert (folder / "f.txt").is_symlink() and (folder / "a.txt").read_bytes() == CAPTIONS["a.txt"] + b", x"
    room.undo(folder)
    assert raws(folder) == before
    with pytest.raises(UserError, match="f.txt and a.txt are the same file"):
        room.apply(folder, room.assign(folder, {"a.txt": "one", "f.txt": "other"}, "two captions"))
    assert raws(folder) == before


def test_a_pipe_is_no_caption_to_wait_for(folder: Path) -> None:
    os.mkfifo(folder / "f.txt")
    assert room.preview(folder, [caption_operations.AddTag("x")]).problems == ["f.txt: this is not a regular file"]
    (folder / room.JOURNAL).unlink(missing_ok=True)
    os.mkfifo(folder / room.JOURNAL)
    with pytest.raises(UserError, match="this is not a journal of caption edits"):
        room.read_history(folder)


def test_patterns_have_limits(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"a" * 40 + b"!")
    monkey = caption_operations.REGEX_SECONDS
    try:
        caption_operations.REGEX_SECONDS = 1
        with pytest.raises(UserError, match="did not finish within 1 s"):
            room.preview(folder, [caption_operations.ReplacePattern(r"(a+)+$", "b")])
    finally:
        caption_operations.REGEX_SECONDS = monkey
    for find, by, why in (("(", "", "unterminated"), ("a", r"\7", "group"), ("a", "b" * 9999, "the limit is 65,536")):
        with pytest.raises(UserError, match=why):
            room.preview(folder, [caption_operations.ReplacePattern(find, by)])
    with pytest.raises(UserError, match="the limit is 300"):
        room.preview(folder, [caption_operations.ReplacePattern("a" * 301, "")])
    edit = room.preview(
        folder, [caption_operations.ReplacePattern(r"^(a)\1+", r"\1"), caption_operations.Append("é")], ["a.png"]
    )
    assert edit.changes[0].after == "a!é".encode()


@pytest.mark.parametrize(
    "operation",
    [
        caption_operations.AddTag("a, b"),
        caption_operations.AddTag(" "),
        caption_operations.AddTag("two\nlines"),
        caption_operations.RenameTag("a", ""),
        caption_operations.Replace("", "x"),
        caption_operations.Trigger(""),
        caption_operations.Recode("klingon"),
        caption_operations.Recode("base64"),
        caption_operations.SetText("\0"),
        caption_operations.RemoveTag("a", separator=""),
    ],
)
def test_what_means_nothing_is_refused(folder: Path, operation: caption_operations.Operation) -> None:
    with pytest.raises(UserError):
        room.preview(folder, [operation])


def test_selections(folder: Path) -> None:
    assert room.select(folder, having=["girl"]) == ["a.png", "b.png", "deep/e.png"]
    assert room.select(folder, having=["girl"], lacking=["red hair"]) == ["deep/e.png"]
    assert room.select(folder, glob="deep/*") == ["deep/d.png", "deep/e.png"]
    with pytest.raises(UserError, match="the images 'z.png' and 0 more are not in this folder"):
        room.preview(folder, [caption_operations.AddTag("x")], only=["z.png"])
    with pytest.raises(UserError, match="does not exist"):
        room.list_caption_files(folder / "none")


EDITOR = """
import sys
from pathlib import Path
from lora_fp8.data import caption_operations, captions
folder, word = Path(sys.argv[1]), sys.argv[2]
for number in range(10):
    try:
        captions.apply(folder, captions.preview(folder, [caption_operations.AddTag(f"{word}{number}")]))
    except captions.UserError as error:
        assert "since the preview" in str(error), error
"""


def test_two_editors_at_once_lose_nothing(folder: Path) -> None:
    """Each edit is there in whole, or was refused; and the journal leads back to the first byte."""
    before = raws(folder)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    both = [subprocess.Popen([sys.executable, "-c", EDITOR, str(folder), word], env=environment) for word in "xy"]
    assert [process.wait() for process in both] == [0, 0]
    made = [entry.title for entry in room.read_history(folder)]
    assert len(made) >= 10
    for name in CAPTIONS:
        tags = caption_operations.split_tags(caption_text.read_caption(folder / name))
        assert [tag for tag in tags if tag[0] in "xy" and tag[1:].isdigit()] == [title.split("'")[1] for title in made]
    for _ in made:
        room.undo(folder)
    assert raws(folder) == before
