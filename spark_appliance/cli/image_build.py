"""``image lock|build|check|digests``: the container image. Needs the extra ``image``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from spark_appliance import lockfile
from spark_appliance.cli.output import print_problems
from spark_appliance.errors import InputError, OperationError

try:
    from spark_appliance.image import (
        apt,
        native,
        plugins,
        publish,
        relock,
        reproduce,
        sbom,
        sources,
    )
    from spark_appliance.image import build as builder
    from spark_appliance.image import check as checks
    from spark_appliance.image import lock as locks
    from spark_appliance.image import recipe as recipes
    from spark_appliance.image.store import Download, Store, default_folder
except ModuleNotFoundError as error:
    raise OperationError(
        f"the commands of the container image need {error.name}\n"
        "    remedy: run them from a checkout: pip install -e '.[image]'"
    ) from None

PACKAGES = Path(__file__).parents[2] / "pkgs"
if not PACKAGES.is_dir():
    raise OperationError(
        f"the container image is made of files of the repository, and {PACKAGES} is not there\n"
        "    remedy: run the command from a checkout: pip install -e '.[image]'"
    )
_FOLDER = PACKAGES / "oci-image"

_recipe_option = click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    default=_FOLDER / "recipe.toml",
    help="What goes into the image (default: pkgs/oci-image/recipe.toml).",
)
_lock_option = click.option(
    "--lock",
    "lock_path",
    type=click.Path(path_type=Path),
    default=_FOLDER / "image.lock.json",
    help="The lock (default: pkgs/oci-image/image.lock.json).",
)
_cache_option = click.option(
    "--cache", type=click.Path(path_type=Path), help="Folder of downloaded files."
)
_files_option = click.option(
    "--files",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with files that were fetched otherwise. May be given several times.",
)
_mirror_options = (
    click.option("--debian-mirror", metavar="URL", help="Instead of apt's own Debian mirror."),
    click.option("--security-mirror", metavar="URL", help="The same for debian-security."),
)


def _mirrors(debian: str | None, security: str | None) -> apt.Mirrors:
    if debian and security:
        return apt.Mirrors(debian, security, "/usr/share/keyrings/debian-archive-keyring.gpg")
    found = apt.mirrors()
    return apt.Mirrors(debian or found.main, security or found.security, found.keyring)


class _Counter:
    """Shows how much has been downloaded, one line a 64 MiB."""

    def __init__(self) -> None:
        self._bytes = 0

    def __call__(self, name: str, size: int) -> None:
        before, self._bytes = self._bytes, self._bytes + size
        if before >> 26 != self._bytes >> 26:
            click.echo(f"{self._bytes >> 20} MiB downloaded, now {name}", err=True)


@click.command()
@_recipe_option
@_lock_option
@_cache_option
@_mirror_options[0]
@_mirror_options[1]
def lock(
    recipe: Path,
    lock_path: Path,
    cache: Path | None,
    debian_mirror: str | None,
    security_mirror: str | None,
) -> None:
    """Resolve the Debian packages of the recipe with apt and pin them."""
    wanted = recipes.load(recipe)
    sources_ = _mirrors(debian_mirror, security_mirror)
    store = Store(cache or default_folder())

    def fetch(packages: list[locks.DebPackage]) -> dict[str, Path]:
        store.fetch(sources.debian(packages, sources_), _Counter())
        return {package.sha256: store.verified(package) for package in packages}

    resolved = relock.resolve(wanted, sources_, fetch)
    try:
        lockfile.write(lock_path, locks.dump(resolved))
    except OSError as error:
        raise OperationError(f"{lock_path}: cannot write: {error.strerror}") from None
    click.echo(f"wrote {lock_path}: {len(resolved.debian.packages)} packages", err=True)


@click.command()
@click.option("--profile", default="full", help="A profile of the recipe: full, tools, smoke.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR")
@_recipe_option
@_lock_option
@_cache_option
@_files_option
@_mirror_options[0]
@_mirror_options[1]
@click.option("--offline", is_flag=True, help="Download nothing.")
@click.option("--jobs", type=click.IntRange(1), default=2, help="Layers written at a time.")
@click.option(
    "--plugin-library",
    multiple=True,
    metavar="NAME=FILE",
    help="Native library of one of our plugins for aarch64 (default: compile it).",
)
@click.option("--without", multiple=True, metavar="NAME", help="Leave one of our plugins out.")
@click.option(
    "--reproduce",
    "digest",
    metavar="DIGEST",
    help="Build every layer again; fail unless manifest or image id has this digest.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="With --reproduce: the image to compare with, file by file.",
)
def build(
    profile: str,
    output: Path,
    recipe: Path,
    lock_path: Path,
    cache: Path | None,
    files: Sequence[Path],
    debian_mirror: str | None,
    security_mirror: str | None,
    offline: bool,
    jobs: int,
    plugin_library: Sequence[str],
    without: Sequence[str],
    digest: str | None,
    against: Path | None,
) -> None:
    """Build the image as an OCI layout in DIR."""
    wanted = recipes.load(recipe)
    pinned = locks.load(lock_path)
    wheel_lock = recipe.parent / wanted.wheels
    selection = locks.select(wanted, profile, pinned, locks.load_wheels(wheel_lock))
    store = Store(cache or default_folder(), files)
    chosen = [name for name in wanted.profiles[profile].plugins if name not in without]
    libraries = _pairs(plugin_library, wanted)
    compilers = {
        name: native.compiler(name, wanted.native[name])
        for name in chosen
        if name in wanted.native and name not in libraries
    }
    needed = [*selection.debs, *(p for name in compilers for p in native.packages(pinned, name))]
    if not offline:
        _fetch(store, wanted, needed, selection.wheels, debian_mirror, security_mirror)
        for compiler in compilers.values():
            if store.locate(compiler) is None:
                store.fetch(sources.compiler(compiler, wanted.target), _Counter())
    for name, compiler in compilers.items():
        libraries[name] = native.build(
            wanted.native[name], compiler, PACKAGES / name, native.packages(pinned, name), store
        )
    request = builder.Request(
        recipe=wanted,
        lock=pinned,
        selection=selection,
        plugins=tuple(
            plugins.load(PACKAGES / name, wanted.native.get(name), libraries.get(name))
            for name in chosen
        ),
        licences=sbom.read_licences(wheel_lock),
    )
    built = builder.build(
        request,
        store,
        output,
        workers=jobs,
        fresh=digest is not None,
        report=lambda line: click.echo(line, err=True),
    )
    click.echo(f"image    {built.reference}")
    click.echo(f"manifest {built.image.manifest}")
    click.echo(f"id       {built.image.config}")
    if digest is not None:
        _compare(built, digest, output, against)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def check(folder: Path) -> None:
    """Examine the image in FOLDER: rights, secrets, and every library that its files need."""
    root = checks.read(folder)
    found = checks.problems(root, checks.expected_libraries(PACKAGES / "sglang-env"))
    print_problems(found)
    if found:
        raise OperationError(f"{len(found)} problems in {folder}")
    click.echo(
        f"{len(root.modes)} files and folders, {len(root.links)} links, "
        f"{len(root.libraries)} ELF files: no problem"
    )


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="FOLDER...",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@click.option(
    "--write",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Put the tables into this page (docs/digests.md).",
)
def digests(folders: Sequence[Path], page: Path | None) -> None:
    """Print digests and layers of built images, as docs/digests.md has them."""
    images = [publish.read(folder) for folder in folders]
    if page is None:
        click.echo(publish.tables(images), nl=False)
    else:
        publish.write(page, images)


def _fetch(
    store: Store,
    recipe: recipes.Recipe,
    packages: Sequence[locks.DebPackage],
    wheels: Sequence[locks.Wheel],
    debian_mirror: str | None,
    security_mirror: str | None,
) -> None:
    debs = [package for package in packages if store.locate(package) is None]
    downloads: list[Download] = []
    if debs:
        downloads += sources.debian(debs, _mirrors(debian_mirror, security_mirror))
    missing = [wheel for wheel in wheels if store.locate(wheel) is None]
    downloads += sources.wheels(missing, recipe.target)
    store.fetch(downloads, _Counter())


def _pairs(words: Sequence[str], recipe: recipes.Recipe) -> dict[str, Path]:
    pairs = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or name not in recipe.native:
            raise InputError.one(
                "image.plugin-library",
                f"--plugin-library {word}: not NAME=FILE",
                f"NAME is one of: {', '.join(recipe.native)}",
            )
        pairs[name] = Path(path)
    return pairs


def _compare(built: builder.Built, digest: str, output: Path, against: Path | None) -> None:
    if digest in (built.image.manifest, built.image.config):
        click.echo(f"reproduced {digest}")
        return
    message = f"not reproduced: wanted {digest}, built {built.image.manifest}"
    if against is None:
        raise OperationError(
            f"{message}\n    remedy: give the other image with --against DIR to see where"
        )
    difference = reproduce.first_difference(against, output)
    raise OperationError(f"{message}\n{difference or 'both folders hold the same image'}")
