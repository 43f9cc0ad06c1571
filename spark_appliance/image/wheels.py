"""Wheels into a tree, by the binary distribution format; the ``installer`` library reads them.

What the standard leaves to the installer is fixed here, because the digest depends on it: the
text of console scripts, the order of RECORD, the modes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import posixpath
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from installer import install
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, RecordEntry
from installer.sources import WheelFile
from installer.utils import Scheme, fix_shebang

from spark_appliance.image.errors import ImageError
from spark_appliance.image.tree import Tree, ZipMember

INSTALLER = "spark-appliance"
_SCRIPT = """\
#!{python}
import sys
from {module} import {top}
if __name__ == "__main__":
    sys.argv[0] = sys.argv[0].removesuffix(".exe")
    sys.exit({call}())
"""


class Layout:
    """Where things go: the virtual environment and its site-packages, without leading slash."""

    def __init__(self, python: str, prefix: str = "opt/sglang") -> None:
        self.python = python
        self.prefix = prefix
        self.site = f"{prefix}/lib/python{python}/site-packages"
        self.interpreter = f"/{prefix}/bin/python3"

    def scheme(self, name: str, distribution: str) -> str:
        """Return the folder of an installation scheme (purelib, scripts, ...)."""
        return {
            "purelib": self.site,
            "platlib": self.site,
            "scripts": f"{self.prefix}/bin",
            "data": self.prefix,
            "headers": f"{self.prefix}/include/site/python{self.python}/{distribution}",
        }[name]


def console_script(layout: Layout, module: str, attribute: str) -> bytes:
    """Return the text of a console script."""
    return _SCRIPT.format(
        python=layout.interpreter, module=module, top=attribute.split(".")[0], call=attribute
    ).encode()


def record_hash(content: bytes) -> Hash:
    """Return a hash as RECORD writes it: urlsafe base64 without padding."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return Hash("sha256", digest)


class _TreeDestination(WheelDestination):
    """Receives what ``installer`` unpacks; large contents stay in the wheel."""

    def __init__(
        self, tree: Tree, layout: Layout, path: Path, wheel: WheelFile, dropped: Sequence[str]
    ) -> None:
        self._tree = tree
        self._layout = layout
        self._path = path
        self._name = wheel.distribution
        self._rules = [re.compile(rule) for rule in dropped]
        self._sizes = {info.filename: info.file_size for info in wheel._zipfile.infolist()}
        rows = csv.reader(io.StringIO(wheel.read_dist_info("RECORD")))
        self._records = {row[0]: row for row in rows if row}

    def write_script(self, name: str, module: str, attr: str, section: str) -> RecordEntry:  # noqa: ARG002
        """Add a console script."""
        content = console_script(self._layout, module, attr)
        self._tree.file(f"{self._layout.scheme('scripts', self._name)}/{name}", content, 0o755)
        return RecordEntry(name, record_hash(content), len(content))

    def write_file(
        self, scheme: Scheme, path: str | object, stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        """Add a file of the wheel, or one that ``installer`` made."""
        where = str(path)
        target = f"{self._layout.scheme(scheme, self._name)}/{where}"
        member = getattr(stream, "name", None)
        if any(rule.search(where) for rule in self._rules):
            return RecordEntry("", None, None)
        content: bytes | ZipMember
        if member is None:
            content = stream.read()
        elif scheme == "scripts":
            with fix_shebang(stream, self._layout.interpreter) as fixed:
                content = fixed.read()
        else:
            content = ZipMember(self._path, member, self._sizes[member])
        mode = 0o755 if is_executable or scheme == "scripts" else 0o644
        self._tree.file(target, content, mode)
        if isinstance(content, bytes):
            return RecordEntry(where, record_hash(content), len(content))
        row = self._records.get(content.name, ["", "", ""])
        return RecordEntry.from_elements(where, row[1], row[2])

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        """Write RECORD, sorted."""
        site = self._layout.scheme(scheme, self._name)
        rows = sorted(
            (
                posixpath.relpath(f"{self._layout.scheme(where, self._name)}/{entry.path}", site),
                *entry.to_row()[1:],
            )
            for where, entry in records
            if entry.path
        )
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._tree.file(f"{site}/{record_file_path}", text.getvalue())


def add(tree: Tree, path: Path, layout: Layout, dropped: Sequence[str] = ()) -> None:
    """Install one wheel into a tree.

    Args:
        tree: where to.
        path: the wheel, under its real file name.
        layout: where things go.
        dropped: regular expressions of paths in the wheel that are left out.

    Raises:
        ImageError: it is no wheel, or brings a path that another one has brought.
    """
    try:
        with WheelFile.open(path) as wheel:
            destination = _TreeDestination(tree, layout, path, wheel, dropped)
            install(wheel, destination, {"INSTALLER": f"{INSTALLER}\n".encode()})
    except (InstallerError, zipfile.BadZipFile, KeyError, ValueError, AssertionError) as error:
        raise ImageError(f"{path}: not an installable wheel: {error}") from None
    except OSError as error:
        raise ImageError(f"{path}: cannot read: {error.strerror}") from None
    except ImageError as error:
        raise ImageError(f"{path.name}: {error}") from None
