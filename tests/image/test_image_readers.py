"""Programs of others read what ``image build`` writes: skopeo, podman, and a registry.

Each test runs with the small image of ``image_inputs``, and as a slow one with the profile smoke.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_download as real
import image_inputs as inputs
import pytest
from click.testing import CliRunner

from spark_appliance.cli import cli
from spark_appliance.image import build, oci, publish
from spark_appliance.image.store import Store


@pytest.fixture(scope="module", params=["small", pytest.param("smoke", marks=pytest.mark.slow)])
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "image"
    if request.param == "small":
        argv = inputs.write(folder.parent / "inputs").argv(folder)
        assert CliRunner().invoke(cli, argv, catch_exceptions=False).exit_code == 0
    else:
        store: Store = request.getfixturevalue("downloaded")
        build.build(real.request("smoke", store), store, folder)
    return folder


def run(*argv: object, **options: Any) -> str:
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def skopeo(*argv: object) -> str:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    return run("skopeo", *argv)


def named(layout: Path) -> str:
    """Return the image as skopeo's manual names it: oci:FOLDER:REFERENCE."""
    return f"oci:{layout}:{publish.read(layout).reference}"


def config(layout: Path) -> dict[str, Any]:
    found: dict[str, Any] = oci.Layout(layout).json(oci.read_image(layout).config)
    return found


def sbom(layout: Path) -> str:
    """Return the digest of the manifest that holds the bill of materials."""
    digest: str = oci.read_index(layout)["manifests"][1]["digest"]
    return digest


def only_sbom(layout: Path, folder: Path) -> Path:
    """Make the view of docs/image.md: the same blobs, and an index of the SBOM alone."""
    folder.mkdir()
    shutil.copy(layout / "oci-layout", folder)
    (folder / "blobs").symlink_to(layout / "blobs")
    index = oci.read_index(layout)
    (folder / "index.json").write_text(json.dumps({**index, "manifests": index["manifests"][1:]}))
    return folder


# ---- skopeo ------------------------------------------------------------------------------------


def test_skopeo_copies_the_same_manifest_config_and_layers(layout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    skopeo("copy", "--quiet", "--preserve-digests", named(layout), f"dir:{out}")
    image = oci.read_image(layout)
    assert f"sha256:{inputs.sha256(out / 'manifest.json')}" == image.manifest
    blobs = {path.name for path in out.iterdir()} - {"manifest.json", "version"}
    assert {f"sha256:{name}" for name in blobs} == {image.config, *image.layers}
    assert all(inputs.sha256(out / name) == name for name in blobs)


def test_skopeo_shows_labels_and_platform(layout: Path) -> None:
    found = json.loads(skopeo("inspect", named(layout)))
    image = oci.read_image(layout)
    settings = config(layout)["config"]
    assert found["Digest"] == image.manifest
    assert (found["Os"], found["Architecture"]) == ("linux", "arm64")
    assert found["Layers"] == list(image.layers)
    assert found["Labels"] == settings["Labels"]
    assert found["Env"] == settings["Env"]


def test_the_sbom_is_copied_by_itself(layout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    view = only_sbom(layout, tmp_path / "view")
    skopeo("copy", "--quiet", "--preserve-digests", f"oci:{view}", f"dir:{out}")
    assert f"sha256:{inputs.sha256(out / 'manifest.json')}" == sbom(layout)


def test_the_sbom_is_the_second_of_the_layout(layout: Path, tmp_path: Path) -> None:
    version = skopeo("--version").split()[2]
    if tuple(int(word) for word in version.split(".")[:2]) < (1, 14):
        pytest.skip(f"skopeo {version} cannot choose by number (1.14 can)")
    skopeo("copy", "--quiet", "--preserve-digests", f"oci:{layout}:@1", f"dir:{tmp_path / 'out'}")
    assert f"sha256:{inputs.sha256(tmp_path / 'out' / 'manifest.json')}" == sbom(layout)


# ---- a registry --------------------------------------------------------------------------------

REGISTRY = """\
version: 0.1
log: {{level: info, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: "{folder}"}}}}
http: {{addr: "127.0.0.1:0"}}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A registry on a free port of the loopback interface; its address without scheme."""
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed")
    settings = tmp_path / "registry.yml"
    settings.write_text(REGISTRY.format(folder=tmp_path / "registry"))
    server = subprocess.Popen(
        ["docker-registry", "serve", settings], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert server.stderr is not None
    said = []
    try:
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"listening on ([\d.]+:\d+)", line):
                # the pipe must not fill up
                threading.Thread(target=server.stderr.read, daemon=True).start()
                yield found[1]
                break
        else:
            pytest.fail("the registry did not start:\n" + "".join(said))
    finally:
        server.terminate()
        server.wait()


def stored(registry: str, name: str) -> dict[str, Any]:
    """Return what ``skopeo inspect`` says of a name in the registry, read as raw manifest."""
    place = f"docker://{registry}/spark-appliance{name}"
    found: dict[str, Any] = json.loads(skopeo("inspect", "--raw", "--tls-verify=false", place))
    return found


def push(source: str, registry: str, name: str, *options: str) -> None:
    place = f"docker://{registry}/spark-appliance{name}"
    skopeo("copy", "--quiet", *options, "--dest-tls-verify=false", source, place)


def test_a_registry_keeps_the_manifest(layout: Path, registry: str) -> None:
    push(named(layout), registry, ":1", "--preserve-digests")
    image = oci.read_image(layout)
    # by digest: the registry has it under the name that the cluster file gives
    found = stored(registry, f"@{image.manifest}")
    assert found == stored(registry, ":1") == oci.Layout(layout).json(image.manifest)


def test_a_registry_has_another_manifest_without_preserve_digests(
    layout: Path, registry: str
) -> None:
    push(named(layout), registry, ":1")
    manifest = stored(registry, ":1")
    image = oci.read_image(layout)
    assert manifest["config"]["digest"] == image.config
    assert {layer["digest"] for layer in manifest["layers"]}.isdisjoint(image.layers)


def test_the_sbom_follows_under_a_tag_and_names_the_image(
    layout: Path, registry: str, tmp_path: Path
) -> None:
    push(named(layout), registry, ":1", "--preserve-digests")
    view = only_sbom(layout, tmp_path / "view")
    with pytest.raises(AssertionError, match="manifest unknown"):
        stored(registry, f"@{sbom(layout)}")  # the copy of a tag leaves it behind
    push(f"oci:{view}", registry, ":1-sbom", "--preserve-digests")
    found = stored(registry, f"@{sbom(layout)}")
    assert found == stored(registry, ":1-sbom")
    assert found["artifactType"] == oci.SBOM_TYPE
    assert found["subject"]["digest"] == oci.read_image(layout).manifest


# ---- podman ------------------------------------------------------------------------------------


class Podman:
    """podman with a storage of its own below a folder."""

    def __init__(self, folder: Path, run_folder: str) -> None:
        if shutil.which("podman") is None:
            pytest.skip("podman is not installed")
        self._argv = [
            "podman", "--root", str(folder), "--runroot", run_folder,
            "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none",
        ]  # fmt: skip
        info = subprocess.run([*self._argv, "info"], capture_output=True, text=True, check=False)
        if info.returncode:
            pytest.skip(f"podman cannot run here: {info.stderr.strip()}")

    def run(self, *argv: object, **options: Any) -> str:
        return run(*self._argv, *argv, **options)

    def inspect(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self.run("image", "inspect", name))
        assert isinstance(found, dict)
        return found


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[Podman]:
    with tempfile.TemporaryDirectory() as folder:  # podman takes no run root over 50 characters
        yield Podman(tmp_path / "podman", folder)


def test_podman_loads_the_folder_as_a_tar(layout: Path, podman: Podman, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    run("tar", "-C", layout, "-cf", archive, ".")
    with archive.open("rb") as file:
        podman.run("load", stdin=file)
    published = publish.read(layout)
    found = podman.inspect(published.reference)
    assert f"sha256:{found['Id']}" == published.image.config
    assert found["RootFS"]["Layers"] == list(published.image.layers)
    assert (found["Os"], found["Architecture"]) == ("linux", "arm64")
    assert found["Labels"] == config(layout)["config"]["Labels"]
    # install looks by the digest of the cluster file, which is this id
    assert podman.inspect(published.image.config) == found


def test_podman_pulls_the_folder_with_its_manifest(layout: Path, podman: Podman) -> None:
    podman.run("pull", "--quiet", named(layout))
    image = oci.read_image(layout)
    found = podman.inspect(image.config)
    assert f"sha256:{found['Id']}" == image.config
    assert found["Digest"] == image.manifest
    assert found["ManifestType"] == oci.MANIFEST_TYPE
