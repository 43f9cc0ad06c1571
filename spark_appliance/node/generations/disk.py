"""Files that survive a power cut: written aside, flushed, renamed, the folder flushed."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spark_appliance.node.errors import NodeError

Kind = Literal["file", "link"]


@dataclass(frozen=True, slots=True)
class Found:
    """What lies at a path: a file or a link (``content`` is its target), never a folder."""

    kind: Kind
    content: bytes
    mode: int
    uid: int
    gid: int

    @property
    def sha256(self) -> str:
        """Hash of the content."""
        return digest(self.content)


def digest(content: bytes) -> str:
    """Return a sha256 as hex."""
    return hashlib.sha256(content).hexdigest()


def look(path: Path) -> Found | None:
    """Return what is at a path, None when nothing is.

    Raises:
        NodeError: for a folder, a device, or something that cannot be read.
    """
    try:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            return Found("link", os.fsencode(path.readlink()), 0o777, info.st_uid, info.st_gid)
        if stat.S_ISREG(info.st_mode):
            mode = stat.S_IMODE(info.st_mode)
            return Found("file", path.read_bytes(), mode, info.st_uid, info.st_gid)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NodeError(f"cannot read {path}: {error.strerror}") from None
    raise NodeError(f"{path} is no file: move it away, then try again")


def put(
    path: Path,
    kind: Kind,
    content: bytes,
    mode: int,
    owner: tuple[int, int] | None,
    *,
    flush: bool = True,
) -> None:
    """Replace a file or link in one step; after a power cut it is the old or the new one.

    ``owner`` is (uid, gid); None leaves it to be the caller's. Without ``flush`` the caller
    flushes the folder: until then a power cut may bring the old file back.

    Raises:
        NodeError: when it cannot be written.
    """
    temporary: Path | None = None
    try:
        if kind == "link":
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            link = temporary / "link"
            link.symlink_to(os.fsdecode(content))
            link.replace(path)
        else:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                os.fchmod(file.fileno(), mode)
                if owner is not None:
                    os.fchown(file.fileno(), *owner)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            temporary = None
        if flush:
            flush_folder(path.parent)
    except OSError as error:
        raise NodeError(f"cannot write {path}: {error.strerror}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                if temporary.is_dir():
                    (temporary / "link").unlink(missing_ok=True)
                    temporary.rmdir()
                else:
                    temporary.unlink()


def remove(path: Path) -> None:
    """Remove a file that may not be there; the caller flushes the folder.

    Raises:
        NodeError: when it stays.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise NodeError(f"cannot remove {path}: {error.strerror}") from None


def make_folders(path: Path, root: Path) -> list[Path]:
    """Make the folders that lead to ``path``; return those that were missing, outermost first.

    Raises:
        NodeError: when one cannot be made.
    """
    missing: list[Path] = []
    folder = path.parent
    while folder != root and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    made = list(reversed(missing))
    for new in made:
        try:
            new.mkdir(mode=0o755, exist_ok=True)
            new.chmod(0o755)
            flush_folder(new.parent)
        except OSError as error:
            raise NodeError(f"cannot make {new}: {error.strerror}") from None
    return made


def flush_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def owner_ids(user: str, group: str) -> tuple[int, int] | None:
    """Return (uid, gid); None when this process may not give files away.

    Raises:
        NodeError: for a user or group that does not exist.
    """
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise NodeError(f"no such user or group: {error}") from None
