"""The Debian closure, resolved by apt itself in a private, unprivileged configuration.

apt works on a foreign architecture from lists, state and cache folders of its own. Denied
dependencies are entered into its status file as installed, so that apt takes every decision and
nothing here knows how Debian dependencies work.
"""

from __future__ import annotations

import email.utils
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from debian.deb822 import Deb822, Packages

from spark_appliance import process
from spark_appliance.image.errors import ImageError
from spark_appliance.image.recipe import Recipe

_TIMEOUT_S = 900.0
SECURITY = "debian-security"
MAIN = "debian"


@dataclass(frozen=True, slots=True)
class Mirrors:
    """Base addresses of this machine's own apt configuration, each ending in a slash."""

    main: str
    security: str
    keyring: str

    def base(self, archive: str) -> str:
        """Return the base address of "debian" or "debian-security"."""
        return self.security if archive == SECURITY else self.main


def mirrors(keyring_folder: Path = Path("/usr/share/keyrings")) -> Mirrors:
    """Ask apt which Debian mirrors this machine uses.

    Raises:
        ImageError: apt is missing, or has no Debian source with downloaded lists.
    """
    try:
        answer = process.run(["apt-get", "indextargets"], timeout=60, env={"LC_ALL": "C"}).stdout
    except process.ProgramMissingError:
        raise ImageError(
            "apt-get is missing: Debian packages are fetched from the mirrors apt is set up with\n"
            "    remedy: run this on a Debian or Ubuntu machine, or give the files with --files"
        ) from None
    found: dict[str, str] = {}
    for target in Deb822.iter_paragraphs(answer, use_apt_pkg=False):
        label = target.get("Label", "")
        if target.get("Created-By") == "Packages" and label in {"Debian", "Debian-Security"}:
            found.setdefault(label, target["Repo-URI"])
    if "Debian" not in found or "Debian-Security" not in found:
        raise ImageError(
            "apt on this machine has no lists of Debian and Debian-Security\n"
            "    remedy: run apt-get update, or give the files with --files"
        )
    keyring = keyring_folder / "debian-archive-keyring.gpg"
    return Mirrors(found["Debian"], found["Debian-Security"], str(keyring))


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the Packages index says of one package; ``depends`` are the names it asks for."""

    name: str
    version: str
    architecture: str
    source: str
    pool: str
    sha256: str
    size: int
    installed_kib: int
    provides: frozenset[str]
    depends: frozenset[str]


def parse(stanzas: str) -> dict[str, Candidate]:
    """Read the output of ``apt-cache show``; the first stanza of a name wins."""
    found: dict[str, Candidate] = {}
    for entry in Packages.iter_paragraphs(stanzas, use_apt_pkg=False):
        relations = entry.relations
        wanted = {
            option["name"]
            for field in ("depends", "pre-depends")
            for group in relations.get(field, [])
            for option in group
        }
        provides = {option["name"] for group in relations.get("provides", []) for option in group}
        source = entry.get("Source", entry["Package"]).split(" ")[0]
        found.setdefault(
            entry["Package"],
            Candidate(
                name=entry["Package"],
                version=entry["Version"],
                architecture=entry["Architecture"],
                source=source,
                pool=entry["Filename"],
                sha256=entry["SHA256"],
                size=int(entry["Size"]),
                installed_kib=int(entry.get("Installed-Size", "0")),
                provides=frozenset(provides),
                depends=frozenset(wanted),
            ),
        )
    return found


def installed_status(stanzas: str) -> str:
    """Return a dpkg status file that calls every package of the stanzas installed.

    Dependencies are left away, names, versions and what is provided stay, so that versioned
    dependencies on a denied package are met exactly as the archive would meet them.
    """
    blocks = []
    for entry in Packages.iter_paragraphs(stanzas, use_apt_pkg=False):
        lines = [f"Package: {entry['Package']}", "Status: install ok installed"]
        lines += [
            f"{field}: {entry[field]}"
            for field in ("Architecture", "Multi-Arch", "Version", "Provides")
            if field in entry
        ]
        lines += ["Maintainer: nobody", "Description: denied by the recipe"]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


class PrivateApt:
    """apt with its own folders, for one foreign architecture."""

    def __init__(self, folder: Path, recipe: Recipe, sources: Mirrors) -> None:
        self._folder = folder
        target = recipe.target
        for name in ("state/lists/partial", "cache/archives/partial", "etc/parts", "log"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._status = folder / "state/status"
        self._status.write_text("")
        (folder / "etc/sources.list").write_text(
            "".join(
                f"deb [arch={target.architecture} signed-by={sources.keyring}] {base} {suite} "
                f"{' '.join(target.components)}\n"
                for base, suites in (
                    (sources.main, target.suites),
                    (sources.security, target.security_suites),
                )
                for suite in suites
            )
        )
        self._config = folder / "apt.conf"
        self._config.write_text(
            "\n".join(
                [
                    f'Dir::State "{folder}/state/";',
                    f'Dir::State::status "{self._status}";',
                    f'Dir::Cache "{folder}/cache/";',
                    f'Dir::Log "{folder}/log/";',
                    f'Dir::Etc::sourcelist "{folder}/etc/sources.list";',
                    # empty: nothing of this machine's
                    f'Dir::Etc::sourceparts "{folder}/etc/parts/";',
                    f'Dir::Etc::preferences "{folder}/etc/preferences";',
                    f'Dir::Etc::preferencesparts "{folder}/etc/parts/";',
                    f'APT::Architecture "{target.architecture}";',
                    f'APT::Architectures {{ "{target.architecture}"; }};',
                    'APT::Install-Recommends "false";',
                    'APT::Install-Suggests "false";',
                    # else a denied package is "upgraded" with its siblings of one source
                    'APT::Get::Upgrade-By-Source-Package "false";',
                    'APT::Sandbox::User "";',
                    'Acquire::Languages "none";',
                    'Debug::NoLocking "true";',
                    "",
                ]
            )
        )

    def _run(self, *argv: str) -> str:
        # APT_CONFIG is read after the machine's own files: proxies and certificates stay.
        return process.run(
            argv, timeout=_TIMEOUT_S, env={"APT_CONFIG": str(self._config), "LC_ALL": "C"}
        ).stdout

    def update(self) -> None:
        """Download the lists; apt checks their signatures."""
        self._run("apt-get", "-q", "-o", "APT::Update::Error-Mode=any", "update")

    def releases(self) -> dict[str, str]:
        """Return suite -> Date of its signed Release file, as YYYYMMDDTHHMMSSZ."""
        dates = {}
        for path in sorted((self._folder / "state/lists").glob("*_InRelease")):
            entry = Deb822(
                line
                for line in path.read_text(encoding="utf-8").splitlines()
                if not line.startswith(("-----", "Hash:"))
            )
            date = email.utils.parsedate_to_datetime(entry["Date"]).astimezone(UTC)
            dates[path.name.rpartition("_dists_")[2].removesuffix("_InRelease")] = stamp(date)
        return dates

    def show(self, names: Iterable[str]) -> str:
        """Return the index stanzas of the candidates of packages.

        Raises:
            ImageError: a package does not exist in the suites.
        """
        wanted = sorted(set(names))
        if not wanted:
            return ""
        try:
            answer = self._run("apt-cache", "show", "--no-all-versions", *wanted)
        except process.FailedError as error:
            # this when all are unknown; with one that is known apt says nothing of the others
            if "No packages found" not in error.completed.stderr:
                raise
            answer = ""
        known = {entry["Package"] for entry in Deb822.iter_paragraphs(answer, use_apt_pkg=False)}
        if missing := [name for name in wanted if name not in known]:
            raise ImageError(
                f"no suite of the recipe has: {', '.join(missing)}\n"
                "    remedy: correct the names in recipe.toml, or its suites"
            )
        return answer

    def deny(self, stanzas: str) -> None:
        """Call the packages of these stanzas installed."""
        self._status.write_text(installed_status(stanzas))

    def closure(self, roots: Sequence[str]) -> tuple[str, ...]:
        """Return the names of what apt would install for these roots, sorted.

        Raises:
            ImageError: apt finds no solution.
        """
        try:
            answer = self._run("apt-get", "-q", "-y", "--print-uris", "install", *sorted(roots))
        except process.FailedError as error:
            raise ImageError(
                f"apt finds no solution for the roots of the recipe:\n"
                f"{error.completed.stdout.strip()}\n{error.completed.stderr.strip()}"
            ) from None
        # 'URI' name_version_arch.deb size hash; without -qq, which hides the reason of a failure,
        # other lines too
        uris = [line for line in answer.splitlines() if line.startswith("'")]
        return tuple(sorted(line.split()[1].split("_")[0] for line in uris))


def stamp(date: datetime) -> str:
    """Format a time as the Debian snapshot archive does."""
    return date.strftime("%Y%m%dT%H%M%SZ")


def wanted_by(candidates: Mapping[str, Candidate], name: str, provides: Iterable[str]) -> list[str]:
    """Return which of the candidates depend on a package or on what it provides, sorted."""
    names = {name, *provides}
    return sorted(
        other.name for other in candidates.values() if other.name != name and names & other.depends
    )


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for PrivateApt; readable by apt's own programs."""
    folder = tempfile.TemporaryDirectory(prefix="spark-image-apt-")
    os.chmod(folder.name, 0o755)  # noqa: S103, PTH101 - lists of a public archive, no secrets
    return folder
