"""A YAML file, or one value, with the line of every key and value; everything unusual is refused by line.

No tag is followed, a key stands once, an alias cannot grow the file, and a scalar keeps its own spelling:
`revision: 0123` is the text 0123 to whoever wants text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from kvortex.errors import ConfigError, Place
from kvortex.sizes import MOST_BITS

MAX_FILE_BYTES: Final = 2**20
_MAX_DEPTH: Final = 32
_MAX_ENTRIES: Final = 10_000
_MINIMAL_FILE: Final = "a minimal file is one line: model: meta-llama/Llama-3.3-70B-Instruct"


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, and where it stands.

    Attributes:
        value: plain Python: None, bool, int, float, str, list or dict.
        line: of its key, or of itself where it has none.
        text: a scalar as spelled, without quotes; None for a list or a mapping.
        items: texts of a list of scalars; None for everything else.
        children: entries of a mapping; None for everything else.
    """

    value: Any
    line: int
    text: str | None = None
    items: tuple[str, ...] | None = None
    children: Mapping[str, Entry] | None = None


class _Loader(yaml.SafeLoader):
    """SafeLoader that leaves dates as text and refuses tags and depth while it composes."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - a class attribute of yaml's own
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            raise _RefusedError(event.start_mark.line, f"the tag {event.tag!r} is not allowed; write a plain value")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _RefusedError(event.start_mark.line, f"nested more than {_MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _RefusedError(Exception):
    """Refused at a line, counted from zero as yaml counts."""

    def __init__(self, line: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.message = message
        self.hint = hint


def load_yaml_file(path: str) -> Mapping[str, Entry]:
    """The entries of a file, in its order, keys as written.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping of plain values; with its line.
    """
    text = _read_text(path)
    try:
        root = _compose(text)
        if root is None:
            raise ConfigError(Place(path, 1), "the file is empty", hint=_MINIMAL_FILE)
        entry = _EntryMaker().entry(root, root.start_mark.line)
    except _RefusedError as refused:
        raise ConfigError(Place(path, refused.line + 1), refused.message, hint=refused.hint) from None
    if entry.value is None:
        raise ConfigError(Place(path, 1), "the file is empty", hint=_MINIMAL_FILE)
    if entry.children is None:
        kind = "a list" if isinstance(entry.value, list) else "a single value"
        raise ConfigError(Place(path, entry.line), f"the file is {kind}, not keys and values", hint=_MINIMAL_FILE)
    return entry.children


def parse_yaml_value(text: str, place: Place) -> Entry:
    """One value from the command line or the environment, read as YAML; empty text stays empty, not null."""
    if text == "":
        return Entry(value="", line=0, text="")
    try:
        root = _compose(text)
        return _EntryMaker().entry(root, 0) if root is not None else Entry(value=None, line=0, text=text)
    except _RefusedError as refused:
        raise ConfigError(place, f"{text!r} is not one YAML value: {refused.message}", hint=refused.hint) from None


def _read_text(path: str) -> str:
    place = Place(path)
    if path == "":
        raise ConfigError(Place("--config"), "no file is named", hint="name a YAML file, or leave --config out")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(place, "there is no such file", hint="`kvortex init MODEL` writes one") from None
    except IsADirectoryError:
        raise ConfigError(place, "is a directory, not a YAML file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(place, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(place, f"is larger than {MAX_FILE_BYTES} bytes, which no configuration is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(Place(path, line), "is not UTF-8 text", hint="save the file as UTF-8") from None


def _compose(text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        raise _RefusedError(line, f"the character {chr(int(error.character))!r} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        raise _refusal(error, text) from None


def _refusal(error: yaml.MarkedYAMLError, text: str) -> _RefusedError:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark is not None else 0
    lines = text.splitlines()
    written = lines[line] if line < len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())] or "'\\t'" in (error.problem or ""):
        return _RefusedError(line, "a tab where YAML needs blanks", hint="indent with blanks")
    said = ", ".join(part for part in (error.context, error.problem) if part)
    return _RefusedError(line, f"bad YAML: {said}")


@dataclass(slots=True)
class _EntryMaker:
    """Turns yaml's nodes into entries, counting them: an alias counts as often as it is used."""

    num_entries: int = 0
    top_line: int = 0
    being_made: set[int] = field(default_factory=set)
    scalars: yaml.constructor.SafeConstructor = field(default_factory=yaml.constructor.SafeConstructor)

    def entry(self, node: yaml.Node, line: int) -> Entry:
        self.num_entries += 1
        if self.num_entries > _MAX_ENTRIES:
            # At the key that uses the aliases, not where their values stand.
            raise _RefusedError(self.top_line, f"more than {_MAX_ENTRIES} values once its aliases are followed")
        if id(node) in self.being_made:
            raise _RefusedError(line, "an alias that contains itself")
        self.being_made.add(id(node))
        try:
            return self._entry(node, line)
        finally:
            self.being_made.remove(id(node))

    def _entry(self, node: yaml.Node, line: int) -> Entry:
        if isinstance(node, yaml.MappingNode):
            children = dict(self._children(node))
            return Entry({key: child.value for key, child in children.items()}, line + 1, children=children)
        if isinstance(node, yaml.SequenceNode):
            entries = [self.entry(item, item.start_mark.line) for item in node.value]
            texts = tuple(entry.text for entry in entries if entry.text is not None)
            items = texts if len(texts) == len(entries) else None
            return Entry([entry.value for entry in entries], line + 1, items=items)
        try:
            value = self.scalars.construct_object(node)
        except (ValueError, yaml.YAMLError):
            raise _RefusedError(line, f"{node.value!r} cannot be read", hint="put text in quotes") from None
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise _RefusedError(line, f"a number of more than {MOST_BITS} bits", hint="put text in quotes")
        return Entry(value, line + 1, text=node.value)

    def _children(self, node: yaml.MappingNode) -> Iterator[tuple[str, Entry]]:
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line
            if not isinstance(key_node, yaml.ScalarNode):
                raise _RefusedError(line, "a key has to be a plain name")
            key = key_node.value
            if key_node.tag.endswith(":merge"):
                raise _RefusedError(line, "merging with << is not supported; write the keys out")
            if key in lines:
                message = f'"{key}" is there twice: line {lines[key] + 1} and line {line + 1}'
                raise _RefusedError(line, message, hint="keep one of the two")
            lines[key] = line
            if len(self.being_made) == 1:
                self.top_line = line
            yield key, self.entry(value_node, line)
