"""The canonical prompts: fixed text, identified by its sha256.

A changed letter is another prompt with another digest, and results are then not comparable;
tests pin the digests. Every prompt asks for more than 1024 tokens, so that a run ends by
``max_tokens`` and not by the model's taste.
"""

from __future__ import annotations

import secrets
from importlib import resources
from pathlib import Path
from typing import cast, get_args

from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.result import PromptKind
from spark_appliance.errors import InputError, Location, read_failure

CANONICAL: tuple[PromptKind, ...] = cast(
    tuple[PromptKind, ...], tuple(kind for kind in get_args(PromptKind) if kind != "file")
)


def canonical(kind: PromptKind) -> Prompt:
    """Return the fixed prompt of a kind (prose, code, structured or json)."""
    text = resources.files(__name__).joinpath(f"{kind}.txt").read_text(encoding="utf-8")
    return Prompt(text.strip())


def from_file(path: Path) -> Prompt:
    """Return a user's prompt, byte for byte as in the file (UTF-8). Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise read_failure(path, error) from None
    except UnicodeDecodeError as error:
        raise InputError.one(
            "bench.prompt-file",
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}",
            "convert it to UTF-8",
            Location(str(path)),
        ) from None
    if not text.strip():
        raise InputError.one(
            "bench.prompt-file", f"{path} is empty", "write a prompt into it", Location(str(path))
        )
    return Prompt(text)


def new_nonce() -> str:
    """Return 32 random hex digits. It is the prompt's first line, so no prefix can be cached."""
    return secrets.token_hex(16)


def with_nonce(nonce: str, text: str) -> str:
    """Return what is sent: the nonce line, an empty line, the prompt."""
    return f"{nonce}\n\n{text}"
