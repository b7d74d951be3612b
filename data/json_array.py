"""A JSON file that holds an array of rows, read row by row: any size, in constant memory."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

BLOCK = 1 << 20  # bytes that are read at a time
FIRST_BLOCK = 1 << 12  # the same, to find the first character
SPACE = re.compile("[\ufeff \t\r\n]*")  # a byte order mark, too
QUOTED = 20  # characters of what is wrong, in a message
# An error of the JSON parser so close to the end of what was read may only mean that more follows.
LONGEST_TOKEN = 16  # characters, strings aside
decoder = json.JSONDecoder()


class Element(NamedTuple):
    """A row of an array, or what is wrong in its place."""

    number: int  # from 1
    line: int  # on which it begins, or is wrong, as an editor counts
    byte: int  # one past its last
    value: Any
    problem: str | None = None  # the array cannot be read beyond it


def holds_array(file: IO[bytes]) -> bool:
    """Whether the first character of a file is that of an array. Reads from its beginning."""
    for block in iter(lambda: file.read(FIRST_BLOCK), b""):
        text = block.removeprefix(codecs.BOM_UTF8).lstrip()
        if text:
            return text.startswith(b"[")
    return False


def elements(file: IO[bytes], longest: int, number: int = 0, byte: int = 0) -> Iterator[Element]:
    """Yields the rows after the first `number`, which end at this byte of the file, whose position
    is its beginning. longest: bytes that a row may have."""
    array = Array(file, byte)
    try:
        if not number:
            array.begin()
        while array.goes_on(is_first=not number):
            line = array.line
            value = array.take_value(longest)
            number += 1
            yield Element(number, line, array.byte, value)
    except Malformed as error:
        yield Element(number + 1, error.line, array.byte, None, str(error))


class Malformed(Exception):
    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


class Array:
    """The text of an array, and a position in it that moves on."""

    def __init__(self, file: IO[bytes], byte: int):
        """Begins at a byte of the file, whose position is its beginning."""
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.has_ended = False  # the file
        self.text = ""  # what was read, from some row on
        self.position = 0  # in the text
        # of the position in the file
        self.line = 1 + skip(file, byte)
        self.byte = byte

    def read(self, size: int = BLOCK) -> None:
        """Reads so many bytes more, and drops the text before the position. Raises Malformed."""
        block = self.file.read(size)
        self.has_ended = not block
        self.text = self.text[self.position :]
        self.position = 0
        try:
            self.text += self.decode(block, final=self.has_ended)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n") + block.count(b"\n", 0, error.start)
            raise Malformed(line, f"is not UTF-8: {error.reason}") from None

    def move(self, position: int) -> None:
        passed = self.text[self.position : position]
        self.line += passed.count("\n")
        self.byte += len(passed.encode())
        self.position = position

    def next_character(self) -> str:
        """Moves on to the next character that is no white space; "" at the end of the file."""
        while True:
            match = SPACE.match(self.text, self.position)
            assert match
            self.move(match.end())
            if self.position < len(self.text) or self.has_ended:
                return self.text[self.position : self.position + 1]
            self.read()

    def begin(self) -> None:
        """Moves behind the bracket that begins the array."""
        assert self.next_character() == "["
        self.move(self.position + 1)

    def goes_on(self, is_first: bool) -> bool:
        """Moves on to the next row. Returns False if the array has ended."""
        character = self.next_character()
        if character == "]":
            self.move(self.position + 1)
            if self.next_character():
                raise Malformed(self.line, "stands behind the end of the array")
            return False
        if is_first:
            return True
        if not character:
            raise Malformed(self.line, "is missing: the file ends, and the array does not")
        if character != ",":
            raise Malformed(self.line, f"needs a comma before it, not {character}")
        self.move(self.position + 1)
        self.next_character()
        return True

    def take_value(self, longest: int) -> Any:
        """The value at the position, of at most so many bytes; moves behind it. Raises
        Malformed."""
        too_long = Malformed(self.line, f"is longer than {longest >> 20} MiB; split it")
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                if self.has_ended or not may_only_be_cut(error, self.text):
                    line = self.line + self.text.count("\n", self.position, error.pos)
                    raise Malformed(line, f"is not valid JSON: {problem_of(error)}") from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits
                raise Malformed(self.line, f"is not valid JSON: {error}") from None
            else:
                if end - self.position > longest:
                    raise too_long
                # a number may go on in the next block
                if end < len(self.text) or self.has_ended:
                    self.move(end)
                    return value
            size = len(self.text) - self.position
            if size > longest:
                raise too_long
            self.read(max(BLOCK, size))


def may_only_be_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether more text could mend an error."""
    is_in_a_string = error.msg.startswith("Unterminated string")
    return is_in_a_string or error.pos >= len(text) - LONGEST_TOKEN


def problem_of(error: json.JSONDecodeError) -> str:
    """What is wrong, and before which text. The line is the caller's to say."""
    rest = error.doc[error.pos : error.pos + QUOTED]
    return f"{error.msg}, before {rest!r}" if rest else error.msg


def skip(file: IO[bytes], size: int) -> int:
    """Reads so many bytes, and returns how many lines end in them."""
    lines = 0
    while size:
        block = file.read(min(BLOCK, size))
        if not block:
            return lines
        lines += block.count(b"\n")
        size -= len(block)
    return lines
