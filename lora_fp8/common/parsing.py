"""What the parsers of JSON, TOML and YAML say of a text that is wrong, as messages that can be translated."""

import ast
import json
import re

from ..errors import Message, Template
from .text import quote

_PLACE = re.compile(r"(?P<why>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", re.DOTALL)
_FIXED = (
    # json
    Message("Expecting value"),
    Message("Expecting property name enclosed in double quotes"),
    Message("Expecting ':' delimiter"),
    Message("Expecting ',' delimiter"),
    Message("Extra data"),
    Message("Unterminated string starting at"),
    Message("Invalid control character at"),
    Message("Invalid \\escape"),
    Message("Invalid \\uXXXX escape"),
    Message("Illegal trailing comma before end of object"),
    Message("Illegal trailing comma before end of array"),
    # tomllib
    Message("Invalid statement"),
    Message("Expected newline or end of document after a statement"),
    Message("Expected '=' after a key in a key/value pair"),
    Message("Expected ']' at the end of a table declaration"),
    Message("Expected ']]' at the end of an array declaration"),
    Message("Cannot overwrite a value"),
    Message("Invalid initial character for a key part"),
    Message("Unclosed array"),
    Message("Unclosed inline table"),
    Message("Unescaped '\\' in a string"),
    Message("Invalid hex value"),
    Message("Escaped character is not a Unicode scalar value"),
    Message("Unterminated string"),
    Message("Invalid date or datetime"),
    Message("Invalid value"),
    # PyYAML
    Message("mapping values are not allowed here"),
    Message("sequence entries are not allowed here"),
    Message("could not find expected ':'"),
    Message("found unexpected end of stream"),
)
_KNOWN = {str(text): text for text in _FIXED}
_WITH_NAME = {
    r"Cannot declare (.+) twice": Template("Cannot declare {name} twice"),
    r"Cannot mutate immutable namespace (.+)": Template("Cannot mutate immutable namespace {name}"),
    r"Cannot redefine namespace (.+)": Template("Cannot redefine namespace {name}"),
    r"Duplicate inline table key (.+)": Template("Duplicate inline table key {name}"),
    r"Found invalid character (.+)": Template("Found invalid character {name}"),
    r"Illegal character (.+)": Template("Illegal character {name}"),
    r"Expected (.+)": Template("Expected {name}"),
    r"found character (.+) that cannot start any token": Template("found character {name} that cannot start any token"),
    r"expected <block end>, but found (.+)": Template("expected the end of the block, but found {name}"),
    r"expected the node content, but found (.+)": Template("expected a value, but found {name}"),
    r"expected ',' or '[]}]', but got (.+)": Template("expected a comma or the closing bracket, but found {name}"),
    r"found undefined alias (.+)": Template("found undefined alias {name}"),
}


def describe_parser_error(error: ValueError, text: str = "") -> str:
    """Return what the parser of JSON or TOML, or the decoder of UTF-8, says of a text, with the place first.

    Args:
        error: of the parser.
        text: the TOML text, to quote the line; "" quotes nothing, for files that may hold secrets.
    """
    if isinstance(error, UnicodeDecodeError):
        return Message("the text is not UTF-8 (byte {byte})", byte=error.start)
    if isinstance(error, json.JSONDecodeError):
        return add_place(error.lineno, error.colno, find_message(error.msg))
    if match := _PLACE.fullmatch(str(error)):
        why = find_message(match["why"])
        if match["line"]:
            where = add_place(int(match["line"]), int(match["column"]), why)
            line = text.replace("\r\n", "\n").split("\n")[int(match["line"]) - 1] if text else ""
            return Message("{why}, in {line}", why=where, line=quote(line.strip())) if line.strip() else where
        return Message("at the end: {why}", why=why)
    return str(error)


def add_place(line: int, column: int, why: str) -> Message:
    """Return a message with its place in a text in front."""
    return Message("line {line_number}, column {column}: {why}", line_number=line, column=column, why=why)


def find_message(text: str) -> str:
    """Return the message of a parser's sentence without a place; the sentence itself if it is not known."""
    if text in _KNOWN:
        return _KNOWN[text]
    for pattern, template in _WITH_NAME.items():
        if match := re.fullmatch(pattern, text, re.DOTALL):
            return template(name=_join_dotted_key(match[1]))
    return text


def _join_dotted_key(name: str) -> str:
    """Return a key that tomllib shows as a tuple, such as "('a', 'b')", as it is written: a.b; other text as it is."""
    try:
        parts = ast.literal_eval(name)
    except (ValueError, SyntaxError):
        return name
    return ".".join(map(str, parts)) if isinstance(parts, tuple) else name
