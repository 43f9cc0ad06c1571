"""``image lock`` with the real apt, against a small signed archive in a folder of this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import image_inputs as inputs
import pytest
from click.testing import CliRunner

from spark_appliance.cli import cli
from spark_appliance.errors import OperationError
from spark_appliance.image import apt, lock, recipe, relock
from spark_appliance.image.errors import ImageError
from spark_appliance.image.lock import DebPackage

PROFILES = """\
[profiles.small]
why = "one root"
debian = ["tiny"]
wheels = []
[profiles.runtime]
"""
NATIVE = """\
[native.plugin]
compiler = "zig==1"
compilers = []
command = ["zig"]
target = "aarch64-linux-gnu"
sources = ["src"]
flags = []
exports = []
library = "lib.so"
debian = ["libdev"]
archives = []
"""
RECIPE = (
    inputs.RECIPE.replace("[profiles.runtime]\n", PROFILES)
    .replace('hello = "for the test"', 'app = "the program"\ntiny = "the other one"')
    .replace("[debian.denied]", '[debian.denied]\ndebconf = "only for scripts"')
    .replace("[[layers]]", NATIVE + "[[layers]]", 1)
)
DEP5 = """\
Format: copyright-format/1.0

Files: *
Copyright: nobody
License: MIT

Files: debian/*
Copyright: nobody
License: GPL-2+
"""


@dataclass(frozen=True)
class Package:
    """A package of the archive; ``fields`` are more lines of its control file."""

    name: str
    version: str = "1.0"
    architecture: str = "arm64"
    fields: Mapping[str, str] = field(default_factory=dict)
    copyright: str = "free text\n"
    pool: str = "pool/main"


MAIN = [
    Package(
        "app", "1:1.0-1",
        fields={"Depends": "libfoo (>= 1), debconf (>= 1.5) | debconf-2.0, one | two, virtual",
                "Recommends": "extra", "Source": "appsource (1.0-1)"},
        copyright=DEP5,
    ),
    Package("app", "9.0", "amd64"),  # newer, but for another machine
    Package("libfoo", "1.0"),
    Package("debconf", "1.5", "all", {"Depends": "perl-base", "Provides": "debconf-2.0"}),
    Package("perl-base", "5"),
    Package("one"),
    Package("two"),
    Package("really", fields={"Provides": "virtual"}),
    Package("extra"),
    Package("tiny", "2.0", "all", {"Pre-Depends": "dash"}),
    Package("dash"),  # which this machine has too
    Package("libdev", fields={"Depends": "never (>= 3)"}),
]  # fmt: skip
SECURITY = [Package("libfoo", "1.0+deb13u1", pool="pool/updates/main")]
MAIN_DATE = "Fri, 02 Jan 2026 03:04:05 UTC"
SECURITY_DATE = "Tue, 03 Feb 2026 04:05:06 UTC"


class Keys:
    """A signing key of its own, and the keyring that apt checks with."""

    def __init__(self, home: str) -> None:
        self._argv = ["gpg", "--homedir", home, "--batch", "--quiet", "--no-tty"]
        self._gpg("--pinentry-mode", "loopback", "--passphrase", "", "--quick-generate-key",
                  "archive@example.invalid", "rsa2048", "sign", "never")  # fmt: skip

    def _gpg(self, *argv: str | Path) -> None:
        subprocess.run([*self._argv, *argv], check=True, capture_output=True)

    def export(self, path: Path) -> Path:
        self._gpg("--output", path, "--export")
        return path

    def sign(self, release: Path) -> None:
        path = release.with_name("InRelease")
        path.unlink(missing_ok=True)
        self._gpg("--output", path, "--clear-sign", release)


@pytest.fixture(scope="module")
def keys() -> Iterator[Keys]:
    for program in ("gpg", "apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (gnupg, apt, dpkg)")
    with tempfile.TemporaryDirectory() as home:  # short: the agent's socket lies in it
        yield Keys(home)
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False)


class Archive:
    """Two archives, as Debian's and its security's, below a folder."""

    def __init__(self, folder: Path, keys: Keys, main: list[Package]) -> None:
        self.folder = folder
        self.mirrors = apt.Mirrors(
            f"file:{folder}/debian/",
            f"file:{folder}/debian-security/",
            str(keys.export(folder / "keyring.gpg")),
        )
        self.debs: dict[str, Path] = {}
        self._publish("debian", "trixie", MAIN_DATE, main, keys)
        self._publish("debian-security", "trixie-security", SECURITY_DATE, SECURITY, keys)

    def _publish(
        self, archive: str, suite: str, date: str, packages: list[Package], keys: Keys
    ) -> None:
        base = self.folder / archive
        indexes: dict[str, str] = {"arm64": "", "amd64": ""}
        for package in packages:
            path, stanza = self._build(base, package)
            self.debs[inputs.sha256(path)] = path
            for machine in indexes:
                if package.architecture in (machine, "all"):
                    indexes[machine] += stanza + "\n"
        release = base / "dists" / suite / "Release"
        lines = [f"Suite: {suite}", f"Codename: {suite}", "Label: Debian", f"Date: {date}",
                 "Architectures: amd64 arm64", "Components: main", "SHA256:"]  # fmt: skip
        for machine, text in indexes.items():
            index = release.with_name("main") / f"binary-{machine}" / "Packages"
            index.parent.mkdir(parents=True)
            index.write_text(text)
            name = index.relative_to(release.parent)
            lines.append(f" {inputs.sha256(index)} {index.stat().st_size} {name}")
        release.write_text("\n".join(lines) + "\n")
        keys.sign(release)

    def _build(self, base: Path, package: Package) -> tuple[Path, str]:
        """Make a package with dpkg-deb; returns it and its stanza of the index."""
        root = self.folder / "root"
        doc = root / "usr/share/doc" / package.name
        doc.mkdir(parents=True)
        (doc / "copyright").write_text(package.copyright)
        (root / "DEBIAN").mkdir()
        control = {
            "Package": package.name, "Version": package.version,
            "Architecture": package.architecture, "Maintainer": "nobody <n@example.invalid>",
            "Installed-Size": "12", "Multi-Arch": "foreign", **package.fields,
            "Description": "for the test",
        }  # fmt: skip
        text = "".join(f"{name}: {value}\n" for name, value in control.items())
        (root / "DEBIAN" / "control").write_text(text)
        version = package.version.partition(":")[2] or package.version
        file = f"{package.name}_{version}_{package.architecture}.deb"
        path = base / package.pool / package.name[0] / package.name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "--build", root, path],
            check=True, capture_output=True,
        )  # fmt: skip
        shutil.rmtree(root)
        place = path.relative_to(base).as_posix()
        size = path.stat().st_size
        return path, f"{text}Filename: {place}\nSize: {size}\nSHA256: {inputs.sha256(path)}\n"

    def fetch(self, packages: list[DebPackage]) -> Mapping[str, Path]:
        return {package.sha256: self.debs[package.sha256] for package in packages}


def wanted(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@pytest.fixture
def archive(tmp_path: Path, keys: Keys) -> Archive:
    return Archive(tmp_path, keys, MAIN)


def resolved(archive: Archive, text: str = RECIPE) -> lock.ImageLock:
    loaded = recipe.load(wanted(archive.folder, text))
    return relock.resolve(loaded, archive.mirrors, archive.fetch)


def test_apt_resolves_every_profile(archive: Archive) -> None:
    made = resolved(archive)
    found = {package.name: package for package in made.debian.packages}
    # no amd64 version, no recommendation, no denied package and what only that needs; dash is not
    # left out because this machine has it; libdev is taken without what it depends on
    assert {name: package.profiles for name, package in found.items()} == {
        "app": ("full",),
        "dash": ("full", "small"),
        "libdev": ("plugin:plugin",),
        "libfoo": ("full",),
        "one": ("full",),
        "really": ("full",),
        "tiny": ("full", "small"),
    }
    assert {name: package.why for name, package in found.items()} == {
        "app": "the program",
        "dash": "needed by tiny",
        "libdev": "plugin:plugin",
        "libfoo": "needed by app",
        "one": "needed by app",
        "really": "needed by app",
        "tiny": "the other one",
    }
    app = found["app"]
    assert (app.version, app.architecture, app.source) == ("1:1.0-1", "arm64", "appsource")
    assert app.pool == "pool/main/a/app/app_1.0-1_arm64.deb"
    path = archive.folder / "debian" / app.pool
    assert app.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (app.size, app.installed_kib) == (path.stat().st_size, 12)
    assert (app.archive, app.licences) == ("debian", ("GPL-2+", "MIT"))
    assert found["tiny"].architecture == "all"
    assert found["one"].licences == ()


def test_security_comes_first_and_is_named(archive: Archive) -> None:
    (libfoo,) = [p for p in resolved(archive).debian.packages if p.name == "libfoo"]
    assert (libfoo.version, libfoo.archive) == ("1.0+deb13u1", "debian-security")
    assert libfoo.pool == "pool/updates/main/l/libfoo/libfoo_1.0+deb13u1_arm64.deb"


def test_dates_and_denied_packages_are_noted(archive: Archive) -> None:
    made = resolved(archive).debian
    assert made.releases == {"trixie": "20260102T030405Z", "trixie-security": "20260203T040506Z"}
    assert made.snapshot == "20260203T040506Z"
    (denied,) = made.denied
    assert (denied.name, denied.reason) == ("debconf", "only for scripts")
    assert denied.wanted_by == ("app",)


def test_without_the_denial_the_package_and_its_needs_come_in(archive: Archive) -> None:
    made = resolved(archive, RECIPE.replace('debconf = "only for scripts"', "")).debian
    names = {package.name for package in made.packages}
    assert {"debconf", "perl-base"} <= names
    assert made.denied == ()


def test_the_command_writes_a_lock_that_reads_back(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolved(archive)
    cache = archive.folder / "cache"
    for package in made.debian.packages:  # as if fetched before
        path = cache / "sha256" / package.sha256 / package.file
        path.parent.mkdir(parents=True)
        shutil.copyfile(archive.debs[package.sha256], path)
    monkeypatch.setattr(apt, "mirrors", lambda: archive.mirrors)
    path = archive.folder / "image.lock.json"
    argv = ["image", "lock", "--recipe", str(archive.folder / "recipe.toml"), "--lock", str(path)]
    for _ in range(2):  # the same bytes again
        done = CliRunner().invoke(cli, [*argv, "--cache", str(cache)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert f"wrote {path}: 7 packages" in done.stderr
        assert path.read_text() == lock.dump(made)
        assert lock.load(path) == made
    assert str(archive.folder) not in json.dumps(json.loads(path.read_text()))


def test_roots_that_cannot_be_installed_give_apts_reason(tmp_path: Path, keys: Keys) -> None:
    broken = [p for p in MAIN if p.name != "dash"]
    archive = Archive(tmp_path, keys, broken)
    with pytest.raises(
        ImageError, match=r"no solution for the roots(.|\n)*tiny : PreDepends: dash but it is not"
    ):
        resolved(archive)


def test_a_denied_package_that_is_in_no_suite_is_named(archive: Archive) -> None:
    text = RECIPE.replace('debconf = "only', 'one = "x"\ndebconv = "only')
    with pytest.raises(ImageError, match="no suite of the recipe has: debconv"):
        resolved(archive, text)


def test_a_changed_list_is_refused(archive: Archive) -> None:
    release = archive.folder / "debian/dists/trixie/InRelease"
    release.write_text(release.read_text().replace("Suite: trixie", "Suite: trixia"))
    with pytest.raises(OperationError, match="update: exit status 100"):
        resolved(archive)


def test_an_archive_with_another_key_is_refused(archive: Archive) -> None:
    with tempfile.TemporaryDirectory() as home:
        other = Keys(home).export(archive.folder / "other.gpg")
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False)
    mirrors = apt.Mirrors(archive.mirrors.main, archive.mirrors.security, str(other))
    with pytest.raises(OperationError, match="NO_PUBKEY"):
        relock.resolve(recipe.load(wanted(archive.folder)), mirrors, archive.fetch)
