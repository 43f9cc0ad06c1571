"""Read YAML text into plain data and remember where every key and value stood.

PyYAML alone silently keeps the last of two equal keys, expands aliases without bound and
forgets positions; a file that people edit by hand needs better.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from spark_appliance.errors import InputError, Location, Problem
from spark_appliance.model.findings import Finding, Path

MAX_BYTES = 1 << 20
"""Largest file accepted, bytes. A cluster of eight Sparks with comments needs about 10 kB."""

MAX_DEPTH = 32
"""Deepest nesting accepted; the schema needs 5."""

MAX_VALUES = 50_000
"""Most values after aliases are expanded: what stops a YAML bomb."""

_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})")

# libyaml's parser is ten times faster; a PyYAML built without it still works.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def lines_sha256(raw: bytes) -> str:
    """Return a hash of a file's lines that comments and blank lines do not change, as hex.

    ``lib/cluster-lines.nix`` computes the same, so it only knows lines: a comment at the end of a
    line ends with the line, and one with a quote in it counts as content.
    """
    kept = []
    for line in raw.split(b"\n"):
        comment = _TRAILING_COMMENT.fullmatch(line)
        text = (line if comment is None else comment[1]).rstrip(b" \t\r")
        if text and not text.lstrip(b" \t\r").startswith(b"#"):
            kept.append(text + b"\n")
    return hashlib.sha256(b"".join(kept)).hexdigest()


_TRAILING_COMMENT = re.compile(rb"""([^#]*[^ \t\r#])[ \t\r]+#[^"']*""")


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data (dicts, lists, scalars) and the place of every path in it.

    ``places`` maps a path to the value's (line, column), both counted from 1; ``key_places``
    maps a path to the place of the key that leads to it.
    """

    name: str
    data: Any
    places: Mapping[Path, tuple[int, int]]
    key_places: Mapping[Path, tuple[int, int]]

    def locate(self, path: Path, *, key: bool = False) -> Location:
        """Return the place of ``path``, or of its nearest parent that exists in the file."""
        if key and path in self.key_places:
            return Location(self.name, *self.key_places[path])
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return Location(self.name, *self.places[path[:length]])
        return Location(self.name, 1, 1)

    def problem(self, finding: Finding, absent: Path = ()) -> Problem:
        """Give a finding its place in this file.

        ``absent`` is the path to point at when the finding is about a key that the file leaves
        out, such as a value that comes from the profile.
        """
        missing = bool(finding.path) and finding.path[:1] not in self.places
        where = self.locate(absent if missing else finding.path)
        return Problem(finding.rule, finding.message, finding.remedy, where, finding.severity)


def parse(name: str, raw: bytes) -> Document:
    """Parse the bytes of one YAML file.

    ``name`` is what messages call the file.

    Raises:
        InputError: for anything that is not one plain, bounded, duplicate-free YAML document.
    """
    text = _decode(name, raw)
    try:
        _check_shape(name, text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise InputError.one(
                    "yaml.empty",
                    "the file is empty",
                    "write one with: spark-appliance init --topology triangle --nodes 3",
                    Location(name, 1, 1),
                )
            return _Builder(name, loader).build(root)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        raise InputError.one(
            "yaml.character",
            f"character U+{_code_point(error.character):04X} is not allowed in YAML",
            "remove the character",
            Location(name, line, column),
        ) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(name, text, error) from None


def _decode(name: str, raw: bytes) -> str:
    if len(raw) > MAX_BYTES:
        raise InputError.one(
            "yaml.too-large",
            f"the file has {len(raw):,} bytes; a cluster file has at most {MAX_BYTES:,}",
            "give the cluster file, not another file",
            Location(name, 1, 1),
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise InputError.one(
            "yaml.not-utf8",
            f"byte 0x{raw[error.start]:02x} is not UTF-8",
            "save the file as UTF-8",
            Location(name, line, column),
        ) from None


def _check_shape(name: str, text: str) -> None:
    """Walk the event stream, which needs no recursion, before anything recursive sees the text."""
    depth = 0
    documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise InputError.one(
                    "yaml.two-documents",
                    "a second document starts here",
                    "keep one cluster a file; remove everything from '---' on",
                    _mark(name, event.start_mark),
                )
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise InputError.one(
                    "yaml.too-deep",
                    f"values are nested deeper than {MAX_DEPTH} levels",
                    "flatten the file; see: spark-appliance schema",
                    _mark(name, event.start_mark),
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Builder:
    """Turns composed nodes into data; scalars are resolved by PyYAML's safe constructor."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader
        self._places: dict[Path, tuple[int, int]] = {}
        self._key_places: dict[Path, tuple[int, int]] = {}
        self._count = 0
        self._open: set[int] = set()
        self._problems: list[Problem] = []

    def build(self, root: yaml.Node) -> Document:
        data = self._value(root, ())
        if self._problems:
            raise InputError(self._problems)
        return Document(self._name, data, self._places, self._key_places)

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._count += 1
        if self._count > MAX_VALUES or len(path) > MAX_DEPTH or id(node) in self._open:
            raise InputError.one(
                "yaml.bomb",
                "aliases expand without bound",
                "write the values out instead of using '&' and '*'",
                _mark(self._name, node.start_mark),
            )
        self._places[path] = _position(node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if not node.tag.endswith((":map", ":seq")):
            self._problems.append(
                Problem(
                    "yaml.tag",
                    f"tag {node.tag!r} does not fit a list or mapping",
                    "write plain strings, numbers, true, false, lists and mappings",
                    _mark(self._name, node.start_mark),
                )
            )
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag.endswith(":timestamp"):
            return node.value  # a date here is a string somebody forgot to quote
        if node.tag.endswith(":int") and not _DECIMAL.fullmatch(node.value):
            # YAML 1.1 reads 010 as 8 and 2:30 as 150
            self._problems.append(
                Problem(
                    "yaml.number",
                    f"{node.value[:40]} is no plain decimal number of at most 18 digits",
                    "write a decimal number, or quote it if it is text",
                    _mark(self._name, node.start_mark),
                )
            )
            return None
        if node.tag.endswith((":map", ":seq", ":set", ":omap", ":pairs")):
            node.tag = "tag:yaml.org,2002:mismatch"
        try:
            return self._loader.construct_object(node)
        except (yaml.constructor.ConstructorError, ValueError, KeyError):
            self._problems.append(
                Problem(
                    "yaml.tag",
                    f"tag {node.tag!r} does not fit the value {node.value!r}",
                    "write plain strings, numbers, true, false, lists and mappings",
                    _mark(self._name, node.start_mark),
                )
            )
            return None

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = _mark(self._name, key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                self._problems.append(
                    Problem("yaml.key", "a key must be a plain word", "write 'name: value'", where)
                )
                continue
            key = key_node.value
            if key in result:
                line, _ = self._key_places[(*path, key)]
                self._problems.append(
                    Problem(
                        "yaml.duplicate-key",
                        f"key {key!r} is given twice; the first stands in line {line}",
                        "remove one of the two",
                        where,
                    )
                )
                continue
            self._key_places[(*path, key)] = _position(key_node.start_mark)
            result[key] = self._value(value_node, (*path, key))
        return result


def _syntax_error(name: str, text: str, error: yaml.MarkedYAMLError) -> InputError:
    mark = error.problem_mark or error.context_mark
    where = _mark(name, mark)
    lines = text.splitlines()
    line = lines[where.line - 1] if where.line and where.line <= len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent:
        return InputError.one(
            "yaml.tab",
            "a tab is used for indentation",
            "indent with spaces",
            Location(name, where.line, indent.index("\t") + 1),
        )
    detail = ", ".join(part for part in (error.context, error.problem) if part)
    return InputError.one(
        "yaml.syntax",
        f"not valid YAML: {detail}",
        "check indentation, colons and quotes near this place",
        where,
    )


def _position(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _mark(name: str, mark: Any) -> Location:
    return Location(name, 1, 1) if mark is None else Location(name, *_position(mark))


def _code_point(character: object) -> int:
    if isinstance(character, int):
        return character
    return ord(character[0]) if isinstance(character, str) and character else 0
