"""Paths, names and text that come from a browser: a table of what attackers type, and what people type."""

import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lora_fp8.errors import UserError
from webui import context, sanitize
from webui.context import Place, Ui


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A root with a picture in it, a folder beside it whose name begins alike, a secret outside, and links."""
    root = tmp_path / "data"
    (root / "cats").mkdir(parents=True)
    (root / "cats/a b ü 猫.png").touch()
    (root / ".hidden").mkdir()
    (root / ".hidden/x.png").touch()
    for name in ("data-evil", "secret"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key.txt").write_text("secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "file_link.png").symlink_to("../secret/key.txt")
    (root / "inner").symlink_to("cats")
    (root / "hidden_link").symlink_to(".hidden")
    (root / "circle").symlink_to("circle")
    home = tmp_path / "home"
    (home / "datasets/pets").mkdir(parents=True)
    (home / "queue.db").touch()
    return Place(home, [root])


# {0} is the root, {1} the folder around it, {2} the page's home
OUTSIDE = """
/etc/passwd
/etc/shadow
/
/.
/./
/root
/proc/self/environ
/proc/self/root/etc/passwd
/proc/self/cwd
/dev/null
/dev/stdin
/sys
/tmp
~
~/
~/.ssh/id_rsa
~/.bashrc
~root/.ssh/id_rsa
~nobody
$HOME
$HOME/.ssh
${{HOME}}
%HOME%
%USERPROFILE%\\x
{1}
{1}/
{1}/secret/key.txt
{1}/data-evil/key.txt
{1}/data-evil
{1}/dat
{1}/DATA/cats
{0}-evil/key.txt
{0}.png
{0}/..
{0}/../secret/key.txt
{0}/../data/cats
{0}/cats/../../secret/key.txt
{0}/cats/../../../../../../../../etc/passwd
{0}/./../secret
{0}//..//secret
{0}/..//..//etc/passwd
{0}/link
{0}/link/key.txt
{0}/inner/../link/key.txt
{0}/file_link.png
{0}/circle
{0}/circle/x
{0}/.hidden
{0}/.hidden/x.png
{0}/hidden_link/x.png
{0}/.git/config
{0}/cats/.env
{2}
{2}/queue.db
{2}/settings.toml
{2}/session.key
{2}/datasets-evil/x
{2}/datasets/../queue.db
..
../
../../etc/passwd
..\\..\\etc\\passwd
.\\x
\\etc\\passwd
\\\\server\\share\\x
//server/share/x
//{0}/cats
///etc/passwd
C:
C:\\Windows\\win.ini
C:/Windows/win.ini
c:cats
/C:/Windows
\\\\?\\C:\\Windows
\\\\.\\pipe\\x
{0}\\..\\secret
{0}/cats\\..\\..\\secret
cats
cats/a.png
./cats
file:///etc/passwd
file://{0}/cats
http://127.0.0.1/x
https://example.com/x.png
data:image/png;base64,xx
javascript:alert(1)
%2e%2e/%2e%2e/etc/passwd
%2fetc%2fpasswd
..%2f..%2fetc%2fpasswd
..%252f..%252fetc
%c0%ae%c0%ae/etc
..;/etc/passwd
....//....//etc/passwd
-rf
--config=/etc/passwd
; cat /etc/passwd
| cat /etc/passwd
`cat /etc/passwd`
$(cat /etc/passwd)
/etc/passwd;{0}/cats
*
?
""".strip().splitlines()
UNSEEN = [
    "{0}/cats/a.png\0",
    "{0}/cats/\0/../../x",
    "/etc/passwd\0{0}/cats",
    "{0}/ca\nts",
    "{0}/ca\rts",
    "{0}/ca\tts",
    "{0}/\x1b[2Jcats",
    "{0}/\x7fcats",
    "{0}/\u202egnp.exe",
    "{0}/\u2066x",
    "{0}/\u2028x",
    "{0}/\x85x",
    "{0}/\ud800x",
    "{0}/" + "x" * 256,
    "{0}/" + "猫" * 100,
    "{0}/" + "x/" * 2500,
    "",
    "   ",
    "\n",
    "\0",
]


@pytest.mark.parametrize("payload", OUTSIDE + UNSEEN)
def test_what_lies_outside_is_refused_in_one_line(place: Place, payload: str) -> None:
    root = place.given[0]
    with pytest.raises(UserError) as refused:
        place.resolve(payload.format(root, root.parent, place.home))
    told = str(refused.value)
    assert "\n" not in told and "\x1b" not in told and "\u202e" not in told and len(told) < 300


def test_the_table_is_long_enough() -> None:
    assert len(set(OUTSIDE + UNSEEN)) >= 110


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("{0}", ""),
        ("{0}/", ""),
        ("  {0}/cats  ", "cats"),
        ("{0}//cats/./", "cats"),
        ("{0}/cats/a b ü 猫.png", "cats/a b ü 猫.png"),
        ("{0}/inner", "cats"),  # a link that stays inside leads to where it leads
        ("{0}/new/folder", "new/folder"),  # need not exist
        ("{0}/..x/...", "..x/..."),
        ("{0}/%2e%2e/x", "%2e%2e/x"),  # a name like any other: nothing is decoded twice
        ("{0}/$(id)", "$(id)"),
        ("{0}/C:", "C:"),
    ],
)
def test_what_lies_inside_is_found(place: Place, given: str, meant: str) -> None:
    root = place.given[0]
    if meant.startswith("."):  # hidden by our rule, though no step upwards
        with pytest.raises(UserError, match="hidden"):
            place.resolve(given.format(root))
        return
    assert place.resolve(given.format(root)) == root / meant
    assert Ui("en", place).resolve_path(given.format(root)) == root / meant


def test_a_root_around_the_home_opens_only_what_is_the_persons(place: Place) -> None:
    """Somebody names their home folder as the root, and the page's own folder lies in it."""
    wide = Place(place.home, [place.home.parent])
    assert wide.resolve(str(place.home.parent / "secret/key.txt"))
    assert wide.resolve(str(place.home / "datasets/pets"))
    for name in ("", "queue.db", "settings.toml", "drafts/x"):
        with pytest.raises(UserError, match="the page may not use"):
            wide.resolve(str(place.home / name))


def test_the_home_folder_of_the_person_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pictures").mkdir()
    assert Place(tmp_path / "h", [tmp_path / "pictures"]).resolve("~/pictures/a.png") == tmp_path / "pictures/a.png"


@pytest.mark.parametrize("kind", ["root", "models"])
def test_roots_are_added_and_taken_back(place: Place, kind: str) -> None:
    """A folder for base models is one too."""
    outside = place.home.parent / "secret"
    with pytest.raises(UserError, match="the page may not use"):
        place.resolve(str(outside / "key.txt"))
    assert getattr(place, f"add_{kind}")(str(outside)) == outside
    assert place.resolve(str(outside / "key.txt")) == outside / "key.txt"
    # Another process (a second page) sees it too, and other settings stay.
    other = Place(place.home)
    other.write_settings(theme="dark")
    assert (other.added if kind == "root" else other.models) == (outside,) and place.read_settings()["theme"] == "dark"
    getattr(place, f"remove_{kind}")(str(outside))
    with pytest.raises(UserError, match="the page may not use"):
        place.resolve(str(outside / "key.txt"))
    assert outside.joinpath("key.txt").read_text() == "secret"


@pytest.mark.parametrize(
    "given", ["/", "/etc", "/etc/ssl", "/proc", "/dev/shm", "{0}/nowhere", "{0}/cats/a b ü 猫.png", "cats", "{1}", ""]
)
def test_roots_that_are_no_folder_of_a_person_are_refused(place: Place, given: str) -> None:
    for add in (place.add_root, place.add_models):
        with pytest.raises(UserError):
            add(given.format(place.given[0], place.home))
    assert place.added == place.models == ()


def test_a_folder_in_memory_is_a_persons(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "SYSTEM", (tmp_path,))
    monkeypatch.setattr(context, "IN_MEMORY", tmp_path / "shm")
    (tmp_path / "shm/cats").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    assert place.add_root(str(tmp_path / "shm/cats")) in place.roots
    for refused in ("shm", "other", ""):
        with pytest.raises(UserError, match="system folder"):
            place.add_root(str(tmp_path / refused))


def test_a_page_for_other_machines_adds_no_roots(place: Place) -> None:
    fixed = Place(place.home, place.given, fixed=True)
    for add in (fixed.add_root, fixed.add_models):
        with pytest.raises(UserError, match="--root"):
            add(str(place.home.parent / "secret"))
    assert fixed.add_models(str(place.given[0])) == place.given[0] == fixed.models[0], "it may be read already"


def test_settings_that_another_page_wrote_in_the_same_tick_of_the_clock_are_read(place: Place) -> None:
    """The second write has the time of the first, and another inode or size."""
    place.write_settings(theme="dark")
    first = place.settings_file.stat()
    assert place.read_settings()["theme"] == "dark"
    for theme in ("pale", "light"):  # of the same size, and of another
        Place(place.home).write_settings(theme=theme)
        os.utime(place.settings_file, ns=(first.st_atime_ns, first.st_mtime_ns))
        assert place.settings_file.stat().st_mtime_ns == first.st_mtime_ns
        assert place.read_settings()["theme"] == theme


def test_a_broken_settings_file_is_told(place: Place) -> None:
    place.settings_file.write_text("roots = [", encoding="utf-8")
    with pytest.raises(UserError, match="settings.toml.*repair it"):
        place.roots  # noqa: B018


@pytest.mark.parametrize("given", ["cat", "my LoRA 2", "猫娘_v1", "a.b", "x-1", "ü" * 60])
def test_names_for_new_files(given: str, tmp_path: Path) -> None:
    (tmp_path / sanitize.check_name(f" {given} ")).touch()
    assert os.listdir(tmp_path) == [given]


@pytest.mark.parametrize(
    "given",
    ["", " ", ".", "..", "../x", "a/b", "/a", "a\\b", "C:", "a:b", ".hidden", "-rf", "--x", "~x", "a*", "a?", 'a"']
    + [
        "<b>",
        "a|b",
        "a.",
        "con",
        "NUL",
        "nul.txt",
        "COM1",
        "lpt9.png",
        "a\0b",
        "a\nb",
        "\u202eb",
        "x" * 121,
        "猫" * 41,
    ],
)
def test_names_that_are_none(given: str) -> None:
    with pytest.raises(UserError):
        sanitize.check_name(given)


@pytest.mark.parametrize(
    "text",
    ["<img src=x onerror=alert(1)>", "\"'><script>alert(1)</script>", "&lt;b&gt;", "\u202egnp.exe", "a\x1b[31mred\x00"]
    + ["</textarea><svg/onload=x>", "javascript:alert(1)", "{{constructor}}", "\ud800", "猫 & dog"],
)
def test_shown_text_is_text(text: str) -> None:
    """Judged by the HTML parser: no tag opens, and what is read back is the text without what cannot be seen."""
    tags, read = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append((tag, attrs))

        def handle_data(self, data):
            read.append(data)

    reader = Reader()
    reader.feed(f'<p title="{sanitize.escape(text)}">{sanitize.escape(text)}</p>')
    reader.close()
    assert tags == [("p", [("title", sanitize.strip_unseen(text))])] and "".join(read) == sanitize.strip_unseen(text)
    assert not set("\u202e\x1b\x00\ud800") & set("".join(read))
