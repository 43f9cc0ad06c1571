"""Errors of the image builder."""

from __future__ import annotations

from pathlib import Path

from spark_appliance.errors import OperationError


class ImageError(OperationError):
    """The image cannot be built, locked or compared; the text says why and what to do."""


class HashMismatchError(ImageError):
    """A file does not have the bytes that the lock names."""

    def __init__(self, path: Path, wanted: str, found: str) -> None:
        self.path, self.wanted, self.found = path, wanted, found
        super().__init__(
            f"{path}: sha256 is {found}, the lock says {wanted}\n"
            "    remedy: remove the file and run the command again; if it comes back, the source "
            "serves other bytes than those that were locked: use another mirror"
        )

    def __reduce__(self) -> tuple[type[HashMismatchError], tuple[Path, str, str]]:
        # it comes out of the process of a layer; the default rebuilds it from the message
        return type(self), (self.path, self.wanted, self.found)


class DownloadError(ImageError):
    """A file could not be fetched; what had arrived is kept and continued from next time."""


def write_failure(path: Path, error: OSError) -> ImageError:
    """Describe a failed write (full disk, no permission) in one line with its remedy."""
    reason = error.strerror or str(error)
    return ImageError(
        f"{path}: cannot write: {reason}\n"
        "    remedy: free space or choose another folder; nothing unfinished is ever used"
    )
