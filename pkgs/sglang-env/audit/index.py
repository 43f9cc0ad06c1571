"""Ask a package index for the locked files: are they there, with the locked hash, not yanked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedContentTypeError
from requests import RequestException

from audit.errors import AuditError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from audit.wheels import LockedWheel


@dataclass(frozen=True)
class IndexFile:
    """A locked file as the index lists it; `size` in bytes; None where it does not say."""

    wheel: LockedWheel
    listed: bool
    sha256: str | None
    size: int | None
    yanked: bool


def ask(index: str, wheels: list[LockedWheel]) -> Iterator[IndexFile]:
    """Yield every locked file as `index` (address of a simple index) lists it.

    Raises:
        AuditError: the index cannot be reached or does not speak the simple API.
    """
    with PyPISimple(endpoint=index) as client:
        for wheel in wheels:
            yield _ask(client, wheel)


def judge(files: list[IndexFile]) -> dict[str, Any]:
    """Return the result: sizes, and as `problems` whatever differs from the lock."""
    problems = []
    for file in files:
        name = f"{file.wheel.name}: {file.wheel.file}"
        if not file.listed:
            problems.append(f"{name}: not on the index")
        elif file.sha256 != file.wheel.sha256:
            problems.append(f"{name}: the index says sha256 {file.sha256}")
        elif file.yanked:
            problems.append(f"{name}: yanked")
    return {
        "packages": len(files),
        "bytes": sum(file.size or 0 for file in files),
        "files": {file.wheel.file: {"size": file.size} for file in files},
        "problems": sorted(problems),
    }


def download(index: str, wheels: list[LockedWheel], folder: Path) -> Iterator[tuple[str, int]]:
    """Fetch what `folder` lacks; yield (file name, wheels left). Hashes are verified.

    An interrupted call leaves whole files only; the next call goes on from there.

    Raises:
        AuditError: the index fails or a file has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [wheel for wheel in wheels if not (folder / wheel.file).exists()]
    with PyPISimple(endpoint=index) as client:
        for done, wheel in enumerate(missing, start=1):
            try:
                page = client.get_project_page(wheel.name)
                [package] = [one for one in page.packages if one.filename == wheel.file]
                if package.digests.get("sha256") != wheel.sha256:
                    raise AuditError(f"{wheel.file}: the index has another hash than the lock")
                partial = folder / f"{wheel.file}.partial"
                client.download_package(package, partial, verify=True)
                partial.replace(folder / wheel.file)
            except (NoSuchProjectError, ValueError) as error:
                raise AuditError(f"{wheel.file}: not on the index") from error
            except (RequestException, UnsupportedContentTypeError) as error:
                raise AuditError(f"{wheel.file}: {error}") from error
            yield wheel.file, len(missing) - done


def _ask(client: PyPISimple, wheel: LockedWheel) -> IndexFile:
    try:
        page = client.get_project_page(wheel.name)
    except NoSuchProjectError:
        return IndexFile(wheel, listed=False, sha256=None, size=None, yanked=False)
    except (RequestException, UnsupportedContentTypeError) as error:
        raise AuditError(f"index, {wheel.name}: {error}") from error
    for package in page.packages:
        if package.filename == wheel.file:
            return IndexFile(
                wheel,
                listed=True,
                sha256=package.digests.get("sha256"),
                size=package.size,
                yanked=package.is_yanked,
            )
    return IndexFile(wheel, listed=False, sha256=None, size=None, yanked=False)
