"""Real text from this machine, cut to a length in tokens that the endpoint itself counts.

Filler text overstates prefill (repeated rows and experts); so long prompts are made of files.
Nothing is downloaded. Files are taken in sorted order, each content once, so the same folder
always gives the same text, and its sha256 identifies it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_appliance.bench.result import PromptKind
from spark_appliance.errors import InputError

_SUFFIXES: dict[PromptKind, frozenset[str]] = {
    "code": frozenset(
        {".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".js", ".ts"}
        | {".java", ".sh", ".nix", ".pl", ".rb", ".lua"}
    ),
    "prose": frozenset({".txt", ".md", ".rst", ".adoc", ".tex"}),
    "structured": frozenset(
        {".csv", ".tsv", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".html", ".svg"}
    ),
    "json": frozenset({".json", ".jsonl", ".ipynb"}),
}
_PROSE_NAMES = frozenset({"README", "NEWS", "changelog", "copyright", "AUTHORS", "HISTORY"})
_SKIP_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_MIN_FILE = 200  # characters; smaller files are mostly headers
_MAX_FILE = 2_000_000  # bytes; larger ones are mostly generated tables

# Deterministic room for one token of text. Real text has 2..5 characters a token; a slice that
# started where the previous one may still reach would repeat text.
CHARS_PER_TOKEN_ROOM = 6


def default_folders(kind: PromptKind) -> tuple[Path, ...]:
    """Return where text of a kind is found on most machines."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    if kind == "code":
        return (stdlib,)
    return (Path("/usr/share/doc"), stdlib, Path("/usr/share"))


@dataclass(frozen=True, slots=True)
class Corpus:
    """A piece of real text and where it came from."""

    kind: PromptKind
    folders: tuple[str, ...]
    files: int
    text: str = field(repr=False)

    @property
    def sha256(self) -> str:
        """Digest of the whole text (UTF-8)."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def cut(self, offset: int, length: int) -> str:
        """Return ``length`` characters from ``offset``; past the end it begins again."""
        size = len(self.text)
        offset %= size
        piece = self.text[offset : offset + length]
        while len(piece) < length:
            piece += self.text[: length - len(piece)]
        return piece


def load(kind: PromptKind, folders: Sequence[Path], characters: int) -> Corpus:
    """Read files of a kind until there are ``characters`` of text.

    Raises InputError when a folder does not exist or all of them hold less than a tenth of it:
    text that repeats is what this module is there to avoid.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError.one(
                "bench.text-dir", f"{folder} is not a folder", "name a folder with --text-dir"
            )
    parts: list[str] = []
    size = 0
    seen: set[bytes] = set()
    for folder, path in _files(kind, folders):
        text = _read(path)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        parts.append(f"=== {path.relative_to(folder)} ===\n{text}\n")
        size += len(parts[-1])
        if size >= characters:
            break
    if size * 10 < characters or not parts:
        names = ", ".join(map(str, folders))
        raise InputError.one(
            "bench.text-short",
            f"only {size} characters of {kind} text in {names}, {characters} are needed",
            f"name a larger folder with --text-dir; {kind} text is read from "
            + " ".join(sorted(_SUFFIXES[kind])),
        )
    return Corpus(kind, tuple(map(str, folders)), len(parts), "".join(parts)[:characters])


def _files(kind: PromptKind, folders: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    wanted = _SUFFIXES[kind]
    for folder in folders:
        for root, names, files in os.walk(folder):
            names[:] = sorted(n for n in names if n not in _SKIP_FOLDERS and n[0] != ".")
            for name in sorted(files):
                path = Path(root, name)
                if path.suffix in wanted or (kind == "prose" and name in _PROSE_NAMES):
                    yield folder, path


def _read(path: Path) -> str | None:
    """Return a file's text, or None for one that is unreadable, binary or of a useless size."""
    try:
        if path.stat().st_size > _MAX_FILE:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) >= _MIN_FILE and "\0" not in text else None


class Ruler:
    """Characters per token, as the endpoint counts, sharpened by every answer."""

    def __init__(self) -> None:
        self._ratio: float | None = None

    @property
    def known(self) -> bool:
        """Whether anything was measured yet."""
        return self._ratio is not None

    def learn(self, characters: int, tokens: int) -> None:
        """Note that a prompt of so many characters had so many tokens."""
        if characters > 0 and tokens > 0:
            self._ratio = characters / tokens

    def characters(self, tokens: int) -> int:
        """Return how many characters make about ``tokens``. Raises ValueError before ``learn``."""
        if self._ratio is None:
            raise ValueError("nothing was measured yet")
        return max(1, round(tokens * self._ratio))
