"""What makes a written disk image the owner's: SSH keys, plan and node name on its ESP."""

from __future__ import annotations

import base64
import binascii
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_appliance import lockfile, process
from spark_appliance.errors import InputError, Location
from spark_appliance.files import read_bounded
from spark_appliance.image import partitions
from spark_appliance.image.errors import ImageError
from spark_appliance.names import ESP_KEYS, ESP_NODE, ESP_PLAN

_KEYS_LIMIT: Final = 1 << 20
_TIMEOUT_S: Final = 60.0
_ENVIRONMENT: Final = {"MTOOLSRC": "/dev/null", "MTOOLS_SKIP_CHECK": "1"}
_FIELDS: Final = {
    "ssh-ed25519": 2,
    "ssh-rsa": 3,
    "ecdsa-sha2-nistp256": 3,
    "ecdsa-sha2-nistp384": 3,
    "ecdsa-sha2-nistp521": 3,
    "sk-ssh-ed25519@openssh.com": 3,
    "sk-ecdsa-sha2-nistp256@openssh.com": 4,
}
"""Key types and how many strings a key has, its type included: RFC 4253 6.6, RFC 5656 3.1,
RFC 8709 4, OpenSSH's PROTOCOL.u2f."""

_OPTION: Final = (
    r"(?:(?:no-)?(?:agent-forwarding|port-forwarding|pty|user-rc|X11-forwarding)|cert-authority"
    r"|no-touch-required|restrict|verify-required"
    r"|(?:command|environment|expiry-time|from|permitlisten|permitopen|principals|tunnel)"
    r'="(?:\\"|[^"\\]|\\(?!"))*")'
)
_KEY: Final = re.compile(
    rf"(?:(?i:{_OPTION}(?:,{_OPTION})*)[ \t]+)?"
    rf"(?P<type>{'|'.join(map(re.escape, _FIELDS))})[ \t]+(?P<key>[A-Za-z0-9+/]+=*)(?:[ \t].*)?"
)
"""A line of sshd(8), AUTHORIZED_KEYS FILE FORMAT, with the options that it has; sshd ignores a line
with any other."""

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class EspFile:
    """A file for the ESP; ``path`` there."""

    path: str
    content: bytes


def collect(keys: Path | None, plan: Path | None, node: str | None) -> tuple[EspFile, ...]:
    """Read and judge what is to be put on the ESP.

    Raises:
        InputError: a file cannot be read, is something else, or the plan has no such node.
    """
    files = []
    if keys is not None:
        files.append(EspFile(ESP_KEYS, _authorized_keys(keys)))
    names = None
    if plan is not None:
        loaded = lockfile.load(plan)
        names = [entry.name for entry in loaded.nodes]
        files.append(EspFile(ESP_PLAN, lockfile.dump(loaded).encode()))
    if node is not None:
        if not _NAME.fullmatch(node):
            raise InputError.one(
                "image.node-name", f"{node!r} is no node name", "give it as in the cluster file"
            )
        if names is not None and node not in names:
            raise InputError.one(
                "image.node-name",
                f"{plan} has no node {node}",
                f"it has {', '.join(names)}",
            )
        files.append(EspFile(ESP_NODE, f"{node}\n".encode()))
    return tuple(files)


def _authorized_keys(path: Path) -> bytes:
    content = read_bounded(path, _KEYS_LIMIT)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    # sshd ends a line at \n only
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    where = Location(str(path))
    if "PRIVATE KEY" in text:
        raise InputError.one(
            "image.private-key",
            "this is a private key; everybody who holds the disk could read it",
            "give the public key beside it (.pub)",
            where,
        )
    lines = [(number, line.strip(" \t")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise InputError.one(
            "image.no-key", "no key", "give a public key, for example ~/.ssh/id_ed25519.pub", where
        )
    for number, line in lines:
        if not _is_key(line):
            raise InputError.one(
                "image.public-key",
                "no public SSH key, or a part of one",
                "give lines such as 'ssh-ed25519 AAAA... you@laptop'",
                Location(str(path), number, 1),
            )
    return text.encode()


def _is_key(line: str) -> bool:
    found = _KEY.fullmatch(line)
    if found is None:
        return False
    try:
        rest = base64.b64decode(found["key"], validate=True)
    except binascii.Error:
        return False
    fields = []
    while len(rest) >= 4:
        end = 4 + int.from_bytes(rest[:4], "big")
        if end > len(rest):
            return False
        fields.append(rest[4:end])
        rest = rest[end:]
    kind = found["type"]
    if rest or len(fields) != _FIELDS[kind] or fields[0] != kind.encode():
        return False
    # RFC 8709: its one length
    return "ssh-ed25519" not in kind or len(fields[1]) == 32


def require_tools() -> None:
    """Start mtools once, so that a missing program is told before a disk is written.

    Raises:
        ImageError: when it is not there.
    """
    try:
        process.run(["mcopy", "--version"], timeout=_TIMEOUT_S, check=False)
    except process.ProgramMissingError:
        raise ImageError(
            "mcopy is not there, which writes files to the ESP\n    remedy: install mtools, or "
            "leave the options out and copy the files to the folder spark of the ESP by hand"
        ) from None


def put(disk: Path, files: Sequence[EspFile]) -> None:
    """Write files to the ESP of a disk (or of a raw image) and read them back.

    Raises:
        ImageError: there is no ESP, it is full, or it returns other bytes.
    """
    target = f"{disk}@@{partitions.esp(disk).start}"
    with tempfile.TemporaryDirectory() as folder:
        source, back = Path(folder, "source"), Path(folder, "back")
        for file in files:
            source.write_bytes(file.content)
            parent = file.path.rpartition("/")[0]
            # -D s: a folder that is there stays as it is
            _mtools(disk, "mmd", "-D", "s", "-i", target, f"::/{parent}", check=False)
            _mtools(disk, "mcopy", "-o", "-i", target, str(source), f"::/{file.path}")
            back.unlink(missing_ok=True)
            _mtools(disk, "mcopy", "-n", "-i", target, f"::/{file.path}", str(back))
            if back.read_bytes() != file.content:
                raise ImageError(
                    f"{disk}: {file.path} reads back other bytes than were written\n"
                    "    remedy: the disk or its cable is faulty, take another"
                )


def _mtools(disk: Path, *argv: str, check: bool = True) -> None:
    done = process.run(argv, timeout=_TIMEOUT_S, env=_ENVIRONMENT, check=False)
    if check and done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise ImageError(
            f"{disk}: {argv[0]}: {lines[0]}\n"
            "    remedy: the image itself is complete; copy the files to the folder spark of the "
            "ESP by hand"
        )
