"""Which server, which model, which key."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from spark_appliance.errors import InputError, Location, read_failure

KEY_VARIABLE = "SPARK_API_KEY"


@dataclass(frozen=True, slots=True)
class Address:
    """An endpoint's two prefixes, neither with a trailing slash.

    ``root`` has the engine's own routes (/server_info, /metrics), ``api`` the OpenAI ones (/v1).
    """

    root: str
    api: str
    host: str
    port: int


def parse_url(text: str) -> Address:
    """Read ``http://host:port`` with or without ``/v1``.

    Raises InputError for anything else, and for a URL that carries a user name or a key.
    """
    bad = "write it as http://HOST:PORT or http://HOST:PORT/v1"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InputError.one("bench.url", f"{text!r} is not a URL: {error}", bad) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError.one("bench.url", f"{text!r} is not an http or https URL", bad)
    if parts.username is not None or parts.password is not None:
        raise InputError.one(
            "bench.url-credential",
            "the URL carries a credential, which every user of this machine can read",
            f"leave it out; give the key with --api-key-file or {KEY_VARIABLE}",
        )
    if parts.query or parts.fragment:
        raise InputError.one("bench.url", f"{text!r} has a query or a fragment", bad)
    path = parts.path.rstrip("/")
    for tail in ("/chat/completions", "/models"):
        path = path.removesuffix(tail)
    origin = f"{parts.scheme}://{parts.netloc}"
    root = origin + path.removesuffix("/v1")
    return Address(
        root=root,
        api=root + "/v1",
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
    )


def load_key(
    file: Path | None, environ: Mapping[str, str], plan_file: Path | None = None
) -> tuple[SecretStr | None, list[str]]:
    """Return the API key and warnings about how it is kept.

    The first of these wins: ``file``, the variable ``SPARK_API_KEY``, ``plan_file`` (used only
    where it exists: a plan names a file on the serving node). Raises InputError for a file that
    cannot be read or does not hold exactly one word.
    """
    if file is None and environ.get(KEY_VARIABLE):
        return SecretStr(_one_word(environ[KEY_VARIABLE], KEY_VARIABLE, None)), []
    if file is None and plan_file is not None and plan_file.is_file():
        file = plan_file
    if file is None:
        return None, []
    try:
        text = file.read_text(encoding="utf-8")
        mode = file.stat().st_mode
    except OSError as error:
        raise read_failure(file, error) from None
    except UnicodeDecodeError:
        raise InputError.one(
            "bench.key", f"{file} is not text", "put the key alone into the file"
        ) from None
    key = _one_word(text, str(file), Location(str(file)))
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return SecretStr(key), [f"{file} can be read by others: chmod 600 {file}"]
    return SecretStr(key), []


def _one_word(text: str, name: str, where: Location | None) -> str:
    words = text.split()
    if len(words) != 1 or not words[0].isascii() or not words[0].isprintable():
        raise InputError.one(
            "bench.key",
            f"{name} does not hold one key (a single ASCII word)",
            "put the key alone into it, without quotes",
            where,
        )
    return words[0]
