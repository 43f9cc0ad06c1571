"""Build ``spark-node.pyz``: the node programs as one file for systems that only have a Python.

The file is the same, byte for byte, for the same sources: sorted entries, fixed times and modes,
no compression (whose output depends on the zlib version).
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Final

import spark_appliance

INTERPRETER: Final = "/usr/bin/env python3"
"""First line of the file. DGX OS 7 (Ubuntu 24.04) has Python 3.12."""

_TIME: Final = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold."""

_MAIN: Final = "from spark_appliance.node.cli import main\n\nmain()\n"


def sources() -> dict[str, Path]:
    """Return what goes in, by name in the archive: the node programs and the names they share."""
    package = Path(spark_appliance.__file__).parent
    node = package / "node"
    files = [package / "__init__.py", package / "names.py", *node.rglob("*.py")]
    files += node.rglob("*.json")
    return {f"spark_appliance/{file.relative_to(package).as_posix()}": file for file in files}


def build() -> bytes:
    """Return the content of ``spark-node.pyz``; write it with mode 0755."""
    entries = {name: file.read_bytes() for name, file in sources().items()}
    entries["__main__.py"] = _MAIN.encode()
    buffer = io.BytesIO()
    buffer.write(f"#!{INTERPRETER}\n".encode())
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for name in sorted(entries):
            info = zipfile.ZipInfo(name, _TIME)
            info.create_system = 3  # Unix, wherever it is built
            info.external_attr = 0o100644 << 16
            archive.writestr(info, entries[name])
    return buffer.getvalue()
