"""Read datasets in the forms that others publish or other trainers keep them in.

| form | what it is |
|---|---|
| metadata | `metadata.jsonl` or `.csv` beside images, a row each with `file_name` and a caption (Hugging Face) |
| parquet | tables with images and captions (Hugging Face); a table with `file_name` and no images is metadata |
| tar | shards of webdataset: `key.jpg` with `key.txt` or `key.json` in one tar file |
| kohya | one JSON object, path of an image -> {"caption": ..., "tags": ...} (sd-scripts' `in_json`) |
| json | `name.json` beside `name.jpg` |
| plain | `name.txt` beside `name.jpg`: our own form, for images that are written into another folder |

Nothing in such a dataset is trusted: not the names, and not the sizes.
"""

from __future__ import annotations

import csv
import io
import os
import posixpath
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..common.json_files import parse_json, read_json
from ..common.reading import MOST_TEXT, open_regular, read_bytes
from ..common.text import is_utf8
from ..errors import Message, UserError, cannot_read, first_few, looked_for
from . import caption_text
from .caption_operations import require_caption
from .decoding import EXTENSIONS, MOST_IMAGE
from .image_files import METADATA, TARS, walk

PATHS = ("file_name", "image_path", "file", "path", "filename")
"""Columns with the path of an image, the first one that there is."""
CAPTIONS = ("caption", "text", "captions", "prompt", "description", "tag_string", "tags")
"""Columns with the caption, the first one that there is."""
FORMS = ("metadata", "parquet", "tar", "json", "kohya", "plain")
"""Forms of a folder. The first one that a folder has files of is taken."""
NO_OBJECT = Message("the record is not a JSON object")
NOT_UTF8 = Message("the text is not UTF-8; save the file as UTF-8")
TAGS = ("tags", "tag_string")
"""Columns whose lists are the tags of one caption; other lists are captions, a line each."""


@dataclass(frozen=True)
class Record:
    """An image and its caption.

    Attributes:
        name: for people, and to name the image's file by; not safe as a path.
        image: the bytes of its file, or where the file is: a path inside of the source's folder.
        caption: "" if it has none.
        where: its place in the file that lists it.
    """

    name: str
    image: bytes | Path
    caption: str
    where: object = ""

    def read(self) -> bytes:
        """Return the bytes of the image file. Raises OSError."""
        return self.image if isinstance(self.image, bytes) else read_bytes(self.image, MOST_IMAGE)


@dataclass
class Source:
    """A dataset that can be read.

    Attributes:
        form: see the top of this file.
        files: its files: metadata, tables, shards, or images for the form json.
        root: the folder that paths in it are relative to.
        column: the column with the captions; "" chooses.
        problems: one line each for records and files that could not be read; filled by `read_records`.
        caption_problems: one line each for records whose captions could not be used; filled by `read_records`.
        images: the column of a table that has the images; "" if it has their paths.
        columns: number of records that have each column, without those of images and paths; filled by `read_records`.
    """

    form: str
    files: list[Path]
    root: Path
    column: str = ""
    problems: list[str] = field(default_factory=list)
    caption_problems: list[str] = field(default_factory=list)
    images: str = ""
    columns: Counter[str] = field(default_factory=Counter)

    def read_records(self) -> Iterator[Record]:
        """Read the records, one after another.

        Of records that name the same image, the first one is taken. A file that is damaged, or that cannot be read, is
        a problem, and the others are read.

        Raises:
            UserError: a package that reads this form is not installed.
        """
        read = {
            "metadata": self._read_metadata,
            "parquet": self._read_parquet,
            "tar": self._read_tar,
            "kohya": self._read_kohya,
        }
        read |= {"plain": self._read_plain}
        taken: dict[Path, str] = {}
        for path in self.files:
            try:
                for record in read.get(self.form, self._read_sidecar)(path):
                    if not isinstance(record.image, Path):
                        yield record
                    elif record.image not in taken:
                        taken[record.image] = record.caption
                        yield record
                    elif taken[record.image] != record.caption:
                        line = Message(
                            "{name} is listed again with another caption; the first caption is used", name=record.name
                        )
                        self._add_problem(path, record.where, line)
            except OSError as error:
                self.problems.append(str(cannot_read(path, error)))
            except _DamagedFile as error:
                self.problems.append(error.args[0])

    def _add_problem(self, path: Path, where: object, line: object) -> None:
        self.problems.append(Message("{path}, {where}: {line}", path=path, where=where, line=line))

    def _add_caption_problem(self, path: Path, where: object, error: ValueError) -> None:
        """Note that a caption cannot be used; its image can."""
        line = error.args[0] if isinstance(error.args[0], Message) else error
        self.caption_problems.append(Message("{path}, {where}: {line}", path=path, where=where, line=line))

    def _find_caption(self, fields: Mapping[str, Any], path: Path, where: object) -> str:
        """Return the caption among the fields of a record; "" if there is none, or if it is no text, which is noted."""
        self.columns.update(name for name in fields if name not in PATHS)
        names = (self.column,) if self.column else CAPTIONS
        name = next((name for name in names if fields.get(name)), "")
        try:
            caption = _as_text(name, fields[name]) if name else ""
            if self.form == "kohya" and name == "caption" and not self.column and fields.get("tags"):
                caption = f"{caption}, {_as_text('tags', fields['tags'])}"  # as sd-scripts joins them
            require_caption(caption)
        except ValueError as error:
            self._add_caption_problem(path, where, error)
            return ""
        return caption

    def _make_path_record(self, table: Path, fields: Mapping[str, Any], where: object) -> Record:
        """Make the record of a row that names a file. Raises ValueError with what is wrong with the row."""
        given = next((fields[name] for name in PATHS if isinstance(fields.get(name), str)), "")
        if not given:
            raise ValueError(Message("the record names no image ({names})", names=" | ".join(PATHS)))
        real, root = os.path.realpath(table.parent / given), Path(os.path.realpath(self.root))
        if "\\" in given and not os.path.isfile(real):  # written on Windows
            real = os.path.realpath(table.parent / given.replace("\\", "/"))
        if not Path(real).is_relative_to(root):
            raise ValueError(Message("the record names a file outside of {folder}", folder=self.root))
        if not os.path.isfile(real):  # False also for a name that no file can have
            raise ValueError(Message("{path} does not exist", path=given[:200]))
        return Record(given, self.root / Path(real).relative_to(root), self._find_caption(fields, table, where), where)

    # ------------------------------------------------------------------------------------------------ one file each

    def _read_metadata(self, path: Path) -> Iterator[Record]:
        rows = _read_csv(path) if path.suffix.lower() == ".csv" else _read_lines(path)
        for number, row in rows:
            where = Message("line {number}", number=number)
            try:
                if not isinstance(row, Mapping):
                    raise ValueError(row if isinstance(row, Message) else NO_OBJECT)
                record = self._make_path_record(path, row, where)
            except ValueError as error:
                self._add_problem(path, where, error.args[0])
            else:
                yield record

    def _read_parquet(self, path: Path) -> Iterator[Record]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(
                Message("{path}: parquet files need pyarrow; install it: pip install 'lora-fp8[parquet]'", path=path)
            ) from None
        number = 0
        try:
            with open_regular(path) as file, pyarrow.parquet.ParquetFile(file) as table:
                self.images = _find_images(table.schema_arrow)
                # Few rows at a time: each has an image.
                for batch in table.iter_batches(batch_size=16):
                    for row in _list_rows(batch):
                        number += 1
                        where = Message("row {number}", number=number)
                        make = self._make_row_record if self.images else self._make_path_record
                        try:
                            record = make(path, row, where)
                        except ValueError as error:
                            self._add_problem(path, where, error.args[0])
                        else:
                            yield record
        except pyarrow.ArrowException as error:
            line = Message("{path}: this is not a parquet file, or it is damaged ({why})", path=path, why=error)
            if number:
                line = _describe_damage(path, Message("row {number}", number=number + 1), error)
            raise _DamagedFile(line) from None
        except _NoImages as error:
            raise _DamagedFile(
                Message(
                    "{path}: the file contains no images; its columns are {names}",
                    path=path,
                    names=", ".join(error.columns),
                )
            ) from None

    def _make_row_record(self, path: Path, row: dict[str, Any], where: object) -> Record:
        column = self.images
        image = row.pop(column)
        raw = image.get("bytes") if isinstance(image, dict) else image
        given = (image.get("path") if isinstance(image, dict) else "") or ""
        if not isinstance(raw, bytes) or not raw:
            raise ValueError(Message("the record has no image in column {column}", column=column))
        return Record(given or path.stem, raw, self._find_caption(row, path, where))

    def _read_tar(self, path: Path) -> Iterator[Record]:
        key, damage = "", ""
        parts: dict[str, bytes] = {}
        try:
            with (
                open_regular(path) as file,
                tarfile.open(fileobj=file, mode="r|*", encoding="utf-8", tarinfo=_Member) as archive,
            ):
                for member in archive:
                    file_name = posixpath.basename(member.name)
                    if not member.isreg() or file_name.startswith("."):  # macOS puts ._1.jpg beside 1.jpg
                        continue
                    name = posixpath.join(posixpath.dirname(member.name), file_name.split(".")[0])
                    kind = member.name[len(name) + 1 :].lower()
                    if name != key:
                        yield from self._make_sample_records(path, key, parts)
                        key, parts = name, {}
                    image = f".{kind.rpartition('.')[2]}" in EXTENSIONS
                    if not image and kind not in ("json", *CAPTIONS, "txt"):
                        continue
                    if member.size > (MOST_IMAGE if image else MOST_TEXT):
                        self._add_problem(path, member.name, Message("the file is too large"))
                    elif extracted := archive.extractfile(member):
                        parts[kind] = extracted.read()
        except tarfile.TarError as error:
            line = Message("{path}: this is not a tar file, or it is damaged ({why})", path=path, why=error)
            damage = _describe_damage(path, key, error) if key else line
            if not any(kind in ("json", "txt", *CAPTIONS) for kind in parts):
                parts = {}  # an image whose caption is lost
        yield from self._make_sample_records(path, key, parts)
        if damage:
            raise _DamagedFile(damage)

    def _make_sample_records(self, path: Path, key: str, parts: Mapping[str, bytes]) -> Iterator[Record]:
        images = [kind for kind in parts if f".{kind.rpartition('.')[2]}" in EXTENSIONS]
        if not parts:
            return
        if not images:
            self._add_problem(path, key, Message("the record has no image"))
            return
        fields: dict[str, Any] = {}
        try:
            if "json" in parts:
                fields |= _as_object(parse_json(parts["json"]))
            texts = {kind: raw for kind, raw in parts.items() if kind != "json" and kind not in images}
            fields |= {"caption" if kind == "txt" else kind: raw.decode() for kind, raw in texts.items()}
        except ValueError as error:
            self._add_caption_problem(path, key, error)
        yield Record(key, parts[images[0]], self._find_caption(fields, path, key))

    def _read_kohya(self, path: Path) -> Iterator[Record]:
        try:
            table = _as_object(read_json(path))
        except ValueError as error:
            raise _DamagedFile(
                Message("{path}: this is not JSON in the form of sd-scripts ({why})", path=path, why=error)
            ) from None
        files = _list_images(self.root)
        by_stem = Counter(os.path.splitext(posixpath.basename(name))[0] for name in files)
        stems = {os.path.splitext(posixpath.basename(name))[0]: name for name in files}
        without = {os.path.splitext(name)[0]: name for name in sorted(files, reverse=True)}  # of a.jpg and a.png, a.jpg
        for key, fields in table.items():
            # The paths are those of the machine that the file was made on, with or without the extension.
            plain = key.replace("\\", "/")
            stem = posixpath.basename(plain)
            stem = os.path.splitext(stem)[0] if os.path.splitext(stem)[1].lower() in EXTENSIONS else stem
            name = plain if plain in files else without.get(plain) or (stems.get(stem) if by_stem[stem] == 1 else None)
            if name is None or not isinstance(fields, Mapping):
                self._add_problem(path, key, Message("there is no image of this name, or several"))
                continue
            yield Record(name, self.root / name, self._find_caption(fields, path, key), key)

    def _read_sidecar(self, path: Path) -> Iterator[Record]:
        file = path.with_suffix(".json")
        try:
            fields = _as_object(read_json(file, MOST_TEXT))
        except ValueError as error:
            self._add_problem(file, "JSON", error.args[0] if isinstance(error.args[0], Message) else error)
            return
        yield Record(path.relative_to(self.root).as_posix(), path, self._find_caption(fields, file, "JSON"))

    def _read_plain(self, path: Path) -> Iterator[Record]:
        caption, texts = "", [path.with_suffix(suffix) for suffix in caption_text.CAPTIONS]
        if file := next((text for text in texts if text.is_file()), None):
            try:
                caption = "\n".join(caption_text.read_lines(file))
                require_caption(caption)
            except ValueError as error:
                caption = ""
                self._add_caption_problem(file, "TXT", error)
        yield Record(path.relative_to(self.root).as_posix(), path, caption)


def find_source(given: Path, column: str = "", plain: bool = False) -> Source:
    """Find out which form a file or folder has.

    Args:
        given: the file or folder.
        column: the column with the captions; "" chooses.
        plain: take images with .txt files beside them, or none, where there is no other form.

    Raises:
        UserError: it does not exist, or has none of the forms.
    """
    path = given.expanduser()
    if not path.exists():
        raise UserError(looked_for(given, Message("{path}: there is no such file or folder", path=given)))
    if path.is_file():
        form = _detect_form(path)
        if not form:
            raise _make_no_dataset_error(path)
        return Source(form, [path], path.parent, column)
    files_by_form: dict[str, list[Path]] = {form: [] for form in FORMS}
    try:
        for folder, names in walk(path):
            siblings = set(names)
            for name in names:
                if form := _detect_form_in_folder(folder / name, siblings):
                    files_by_form[form].append(folder / name)
                if plain and Path(name).suffix.lower() in EXTENSIONS:
                    files_by_form["plain"].append(folder / name)
    except OSError as error:
        raise cannot_read(path, error) from None
    for form, files in files_by_form.items():
        if files:
            return Source(form, files, path, column)
    raise _make_no_dataset_error(path)


def _detect_form_in_folder(file: Path, siblings: set[str]) -> str:
    """Return the form of a file of a folder, "" if it has none; `siblings` are all names in the folder."""
    if file.suffix.lower() in EXTENSIONS and f"{file.stem}.json" in siblings:
        return "json"
    if file.name in METADATA:
        return "metadata"
    form = _detect_form(file)
    if form in ("parquet", "tar") or (form == "kohya" and file.name.startswith("meta")):
        return form
    return ""  # other .jsonl, .csv and .json files may be about something else


def _make_no_dataset_error(path: Path) -> UserError:
    return UserError(
        Message("{path}: this is not a dataset that can be read; accepted: {names}", path=path, names=ACCEPTED)
    )


ACCEPTED = "metadata.jsonl, metadata.csv, .parquet, .tar, meta*.json, NAME.json"


def _detect_form(path: Path) -> str:
    name = path.name.lower()
    if name.endswith(TARS):
        return "tar"
    return {".parquet": "parquet", ".jsonl": "metadata", ".csv": "metadata", ".json": "kohya"}.get(
        path.suffix.lower(), ""
    )


class _DamagedFile(Exception):
    """A file that cannot be read, or not to its end; its argument is the line for people."""


def _describe_damage(path: Path, where: object, why: Exception) -> Message:
    return Message(
        "{path}: the file is damaged near {where} ({why}); the part before it was read", path=path, where=where, why=why
    )


class _Member(tarfile.TarInfo):
    """A file of a tar archive. tarfile takes a damaged header for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Read the next header. Raises ReadError if it is damaged."""
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from None


class _NoImages(Exception):
    def __init__(self, columns: Sequence[str]) -> None:
        super().__init__()
        self.columns = columns


def _find_images(schema: Any) -> str:
    """Return the column of a table that has images; "" if it has their paths."""
    import pyarrow

    names = schema.names
    for name in names:
        kind = schema.field(name).type
        if pyarrow.types.is_struct(kind) and "bytes" in [kind.field(i).name for i in range(kind.num_fields)]:
            return str(name)
    for name in names:
        kind = schema.field(name).type
        if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
            return str(name)
    if not set(PATHS) & set(names):
        raise _NoImages(names)
    return ""


def _list_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch of pyarrow. Text that is not UTF-8, which it does not check, stays bytes."""
    for number in range(batch.num_rows):
        row: dict[str, Any] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                row[name] = column[number].as_py()
            except UnicodeDecodeError as error:
                row[name] = error.object
        yield row


def _as_text(name: str, value: Any) -> str:
    """Return a caption as text. Raises ValueError if it is none."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) and is_utf8(part) for part in parts):
        raise ValueError(Message("column {name} contains no text", name=name))
    return (", " if name in TAGS else "\n").join(part.strip() for part in parts if part.strip())


def _as_object(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(NO_OBJECT)
    return content


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, JSON) of each line that is not empty; a Message in place of what is no JSON."""
    with open_regular(path) as file:
        number = 0
        while raw := file.readline(MOST_TEXT + 1):
            number += 1
            if len(raw) > MOST_TEXT:
                raise _DamagedFile(Message("{path}, line {number}: the line is too long", path=path, number=number))
            if raw.strip():
                try:
                    yield number, parse_json(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
                except ValueError:
                    yield number, Message("the line is not JSON")


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number of its last line, row); a Message in place of a row that is not UTF-8."""
    # What is not UTF-8 is noticed in its row, as a decoder reads ahead and knows no line.
    with (
        open_regular(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        rows = csv.DictReader(file)
        try:
            if not all(is_utf8(name) and "\0" not in name for name in rows.fieldnames or ()):
                where = Message("line {number}", number=1)
                raise _DamagedFile(Message("{path}, {where}: {line}", path=path, where=where, line=NOT_UTF8))
            for row in rows:
                texts = {name: value for name, value in row.items() if isinstance(name, str)}
                is_text = all(is_utf8(value) for value in texts.values() if isinstance(value, str))
                yield rows.line_num, texts if is_text else NOT_UTF8
        except csv.Error as error:
            raise _DamagedFile(
                Message(
                    "{path}, line {number}: the line is not CSV ({why})",
                    path=path,
                    number=rows.reader.line_num,
                    why=error,
                )
            ) from None


def _list_images(root: Path) -> set[str]:
    return {
        (folder / name).relative_to(root).as_posix()
        for folder, names in walk(root)
        for name in names
        if os.path.splitext(name)[1].lower() in EXTENSIONS
    }


def list_columns(source: Source) -> Message:
    """List the columns of the records that were read, the most frequent first."""
    return first_few([name for name, _ in source.columns.most_common()], 12)
