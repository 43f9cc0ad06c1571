from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import image_inputs as inputs
import pytest
from click.testing import CliRunner

from spark_appliance.cli import cli
from spark_appliance.image import oci, reproduce


def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-m", "spark_appliance", *argv],
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> inputs.Inputs:
    return inputs.write(tmp_path / "inputs")


def members(folder: Path) -> dict[str, tarfile.TarInfo]:
    found: dict[str, tarfile.TarInfo] = {}
    for digest in oci.read_image(folder).layers:
        with tarfile.open(oci.Layout(folder).path(digest)) as archive:
            found |= {member.name: member for member in archive}
    return found


def text(folder: Path, name: str) -> str:
    for digest in oci.read_image(folder).layers:
        with tarfile.open(oci.Layout(folder).path(digest)) as archive:
            if name in archive.getnames():
                file = archive.extractfile(name)
                assert file is not None
                return file.read().decode(errors="replace")
    raise AssertionError(name)


def test_the_same_bytes_whatever_the_surroundings(made: inputs.Inputs, tmp_path: Path) -> None:
    first = run(made.argv(tmp_path / "a"), env={**os.environ, "TZ": "UTC", "PYTHONHASHSEED": "1"})
    assert first.returncode == 0, first.stderr
    other = tmp_path / "a deep folder" / "inputs"
    moved = inputs.Inputs(other / "recipe.toml", other / "image.lock.json", other / "files")
    other.mkdir(parents=True)
    for path in sorted(made.recipe.parent.rglob("*"), reverse=True):  # another order on disc
        target = other / path.relative_to(made.recipe.parent)
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            os.utime(target, (1, 1))
    second = run(
        moved.argv(tmp_path / "b", "--jobs", "1"),
        env={**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "4242"},
        umask=0o077,
    )
    assert second.returncode == 0, second.stderr
    assert first.stdout == second.stdout
    a = {p.relative_to(tmp_path / "a"): p.read_bytes() for p in (tmp_path / "a").rglob("*.json")}
    b = {p.relative_to(tmp_path / "b"): p.read_bytes() for p in (tmp_path / "b").rglob("*.json")}
    assert a == b
    assert reproduce.first_difference(tmp_path / "a", tmp_path / "b") is None


def test_what_the_image_holds(made: inputs.Inputs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(cli, made.argv(out), catch_exceptions=False)
    assert result.exit_code == 0
    found = members(out)
    assert found["usr/bin/hello"].mode == 0o755  # set-uid is gone
    assert found["usr/bin/hello2"].isreg()
    assert "usr/lib/aarch64-linux-gnu/libhello.so.1" in found
    assert not [name for name in found if name.startswith("usr/share/man")]
    writable = {name for name, m in found.items() if not m.issym() and m.mode & 0o002}
    assert writable == {"tmp", "var/tmp", "run/lock"}
    assert all(found[name].mode & 0o1000 for name in writable)
    assert not [name for name, m in found.items() if m.mode & 0o6000]
    assert not [name for name in found if name.endswith(".pyc")]
    assert "spark:*:10001:10001::/cache:" in text(out, "etc/passwd")
    assert "rdma:*:101:spark" in text(out, "etc/group")
    assert (found["cache"].uid, found["cache"].gid) == (10001, 10001)
    assert text(out, "etc/ssl/certs/ca-certificates.crt") == "AAA\nBBB\n"
    assert text(out, "var/lib/dpkg/status.d/hello").startswith("Package: hello\n")
    cache = "/opt/sglang/lib/python3.13/site-packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0"
    assert cache in text(out, "etc/ld.so.cache")
    config = oci.Layout(out).json(oci.read_image(out).config)
    assert config["config"]["User"] == "10001:10001"
    assert config["config"]["Entrypoint"] == ["/usr/bin/hello"]
    assert config["created"] == "2026-01-01T00:00:00Z"
    assert config["config"]["Labels"]["org.opencontainers.image.version"] == "1.0"
    assert [entry["created_by"].split()[-1] for entry in config["history"]] == [
        "base", "cuda", "rest", "glue"
    ]  # fmt: skip


def test_every_blob_is_what_its_name_says_and_the_sbom_is_attached(
    made: inputs.Inputs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert CliRunner().invoke(cli, made.argv(out)).exit_code == 0
    for path in (out / "blobs/sha256").iterdir():
        assert inputs.sha256(path) == path.name
    index = json.loads((out / "index.json").read_text())
    image, artefact = index["manifests"]
    assert image["annotations"][oci.REF_NAME] == "small:1.0-full"
    manifest = oci.Layout(out).json(artefact["digest"])
    assert manifest["subject"]["digest"] == image["digest"]
    bom = oci.Layout(out).json(manifest["layers"][0]["digest"])
    assert bom["specVersion"] == "1.6"
    purls = {component["purl"] for component in bom["components"]}
    assert "pkg:deb/debian/hello@1.0?arch=arm64&distro=trixie" in purls
    assert "pkg:pypi/tool@1.0" in purls
    (docker,) = json.loads((out / "manifest.json").read_text())
    assert all((out / path).is_file() for path in (docker["Config"], *docker["Layers"]))


def test_layers_are_taken_over_when_their_inputs_are_the_same(
    made: inputs.Inputs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = CliRunner().invoke(cli, made.argv(out))
    image = oci.read_image(out)
    layout = oci.Layout(out)
    inode = layout.path(image.layers[0]).stat().st_ino
    layout.path(image.layers[1]).write_bytes(b"rotten")
    second = CliRunner().invoke(cli, made.argv(out))
    assert second.stdout == first.stdout
    assert oci.read_image(out) == image
    assert "base: taken over" in second.stderr
    assert layout.path(image.layers[0]).stat().st_ino == inode
    assert "cuda: taken over" not in second.stderr  # its blob had other bytes
    assert inputs.sha256(layout.path(image.layers[1])) == image.layers[1].removeprefix("sha256:")


def test_reproduce_names_layer_file_and_bytes(made: inputs.Inputs, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert CliRunner().invoke(cli, made.argv(a)).exit_code == 0
    image = oci.read_image(a)
    same = CliRunner().invoke(cli, made.argv(b, "--reproduce", image.config))
    assert f"reproduced {image.config}" in same.stdout
    blob = oci.Layout(a).path(image.layers[0])
    data = blob.read_bytes().replace(b"AAA\nBBB\n", b"AXA\nBYB\n")
    assert data != blob.read_bytes()
    oci.Layout(a).put(data)
    manifest = oci.Layout(a).json(image.manifest)
    changed = oci.Layout(a).put(data)
    manifest["layers"][0]["digest"] = changed.digest
    index = json.loads((a / "index.json").read_text())
    index["manifests"][0]["digest"] = oci.Layout(a).put(oci.canonical(manifest)).digest
    (a / "index.json").write_text(json.dumps(index))
    wanted = oci.read_image(a).manifest
    result = run(made.argv(b, "--reproduce", wanted, "--against", str(a)))
    assert result.returncode == 1
    assert "layer 0, etc/ssl/certs/ca-certificates.crt, bytes 1 to 6: content" in result.stderr
    assert "Traceback" not in result.stderr


def test_another_file_or_mode_is_named(tmp_path: Path) -> None:
    def layer(name: str, files: dict[str, int]) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w") as archive:
            for file, mode in files.items():
                item = tarfile.TarInfo(file)
                item.mode = mode
                archive.addfile(item)
        return path

    a = layer("a", {"x": 0o644, "y": 0o644})
    assert "y: only in the first image" in str(
        reproduce.compare_layers(2, a, layer("b", {"x": 0o644}))
    )
    assert "layer 2, x: mode 0644 and 0755" in str(
        reproduce.compare_layers(2, a, layer("c", {"x": 0o755, "y": 0o644}))
    )


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda m: (m.files / "tool-1.0-py3-none-any.whl").write_bytes(b"x"), "the lock says"),
        (lambda m: (m.files / "hello_1.0_arm64.deb").unlink(), "run image build without --offline"),
        (lambda m: m.lock.write_text("{"), "Expecting property name"),
        (lambda m: m.lock.write_text('{"format": 1}'), "debian: Field required"),
        (lambda m: m.lock.unlink(), "cannot read"),
        (lambda m: m.recipe.write_text("version = "), "Invalid value"),
        (lambda m: (m.recipe.parent / "poetry.lock").write_text(
            '[[package]]\nname = "tool"\nversion = "1"\nfiles = []\n'), "0 files, want one wheel"),
    ],
)  # fmt: skip
def test_faults_give_one_message_and_leave_nothing(
    break_it: object, message: str, made: inputs.Inputs, tmp_path: Path
) -> None:
    assert callable(break_it)
    break_it(made)
    out = tmp_path / "outputs" / "out"
    result = run(made.argv(out))
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()
    if out.parent.exists():
        assert [path.name for path in out.parent.iterdir()] == [".out.lock"]


def test_a_disc_that_is_full_leaves_the_former_image(made: inputs.Inputs, tmp_path: Path) -> None:
    out = tmp_path / "outputs" / "out"
    assert run(made.argv(out)).returncode == 0
    before = oci.read_image(out)
    result = run(
        made.argv(out, "--reproduce", before.manifest),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert result.returncode == 1
    assert "cannot write: File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert oci.read_image(out) == before
    assert sorted(path.name for path in out.parent.iterdir()) == [".out.lock", "out"]


def test_two_builds_to_one_place(made: inputs.Inputs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (tmp_path / ".out.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = run(made.argv(out))
    assert result.returncode == 1
    assert "another build is writing here" in result.stderr
    assert not out.exists()
    assert run(made.argv(out)).returncode == 0


def test_the_rest_of_a_killed_build_goes_away(made: inputs.Inputs, tmp_path: Path) -> None:
    (tmp_path / ".out.building-x").mkdir()
    (tmp_path / ".out.building-x" / "blob").write_bytes(b"half")
    assert run(made.argv(tmp_path / "out")).returncode == 0
    assert not (tmp_path / ".out.building-x").exists()


def test_a_folder_that_is_no_image_is_not_replaced(made: inputs.Inputs, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("")
    result = run(made.argv(tmp_path / "home"))
    assert result.returncode == 1
    assert "not empty and no image" in result.stderr
    assert (tmp_path / "home" / "thesis").exists()


@pytest.mark.parametrize(
    ("profile", "message"),
    [("runtime", "cannot be built: compiles at run time"), ("tiny", "choose one of: full\n")],
)
def test_profiles_that_cannot_be_built(
    profile: str, message: str, made: inputs.Inputs, tmp_path: Path
) -> None:
    result = run(made.argv(tmp_path / "out", "--profile", profile))
    assert result.returncode == 2
    assert message in result.stderr
