"""The committed recipe and lock, and what is made of them."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest
from debian.deb822 import Deb822

from spark_appliance.image import apt, build, lock, native, plugins, sources
from spark_appliance.image.recipe import Native, load
from spark_appliance.image.tree import Tree
from spark_appliance.image.wheels import Layout

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pkgs" / "oci-image"
RECIPE = load(FOLDER / "recipe.toml")
LOCK = lock.load(FOLDER / "image.lock.json")
WHEELS = lock.load_wheels(FOLDER / RECIPE.wheels)
FULL = lock.select(RECIPE, "full", LOCK, WHEELS)


def test_the_lock_is_written_in_one_way() -> None:
    assert lock.dump(LOCK) == (FOLDER / "image.lock.json").read_text()
    names = [package.name for package in LOCK.debian.packages]
    assert names == sorted(set(names))


def test_no_host_is_named() -> None:
    for path in FOLDER.iterdir():
        assert not re.search(r"https?://", path.read_text()), path


def test_every_profile_has_its_roots_and_no_denied_package() -> None:
    for name, profile in RECIPE.profiles.items():
        if profile.refused:
            continue
        chosen = {package.name for package in lock.select(RECIPE, name, LOCK, WHEELS).debs}
        assert set(RECIPE.roots(name)) <= chosen
        assert not chosen & set(RECIPE.debian.denied)
        assert chosen.isdisjoint({"systemd", "udev", "dpkg", "perl-base"})


def test_every_denied_package_was_wanted_and_has_its_reason() -> None:
    assert {d.name: d.reason for d in LOCK.debian.denied} == RECIPE.debian.denied
    # dpkg and perl-base are asked for by denied packages too, so not all have a dependant left
    assert sum(bool(denied.wanted_by) for denied in LOCK.debian.denied) > 15


def test_every_file_name_is_safe() -> None:
    for item in (*FULL.debs, *FULL.wheels):
        assert lock.safe_file_name(item.file), item.file
    assert not lock.safe_file_name("../x.whl")


def test_each_wheel_is_in_one_layer() -> None:
    jobs = build.jobs(build.Request(RECIPE, LOCK, FULL, (), {}))
    assert [job.name for job in jobs] == ["base", "cuda", "torch", "rest"]
    files = [wheel.file for job in jobs for wheel in job.wheels]
    assert sorted(files) == [wheel.file for wheel in WHEELS]
    cuda = {wheel.name for wheel in jobs[1].wheels}
    assert {"nvidia-cublas", "nvidia-nccl-cu13"} <= cuda
    assert {wheel.name for wheel in jobs[2].wheels} == {
        "torch", "torchaudio", "torchvision", "triton"
    }  # fmt: skip


def test_cuda_parts_are_of_one_release() -> None:
    versions = {wheel.name: wheel.version for wheel in WHEELS}
    for name in ("nvcc", "crt", "cccl", "nvrtc", "runtime"):
        assert versions[f"nvidia-cuda-{name}"].startswith("13.0."), name
    assert versions["nvidia-nvvm"].startswith("13.0.")
    assert versions["nvidia-nvjitlink"].startswith("13.0.")


def test_dropped_wheels_exist() -> None:
    assert {drop.wheel for drop in RECIPE.wheels_drop} <= {wheel.name for wheel in WHEELS}


def test_the_selection_digest_depends_on_every_pin() -> None:
    first = FULL.debs[0].model_copy(update={"sha256": "0" * 64})
    other = FULL.model_copy(update={"debs": (first, *FULL.debs[1:])})
    assert other.digest != FULL.digest


def test_labels_name_everything_that_decides_the_image(tmp_path: Path) -> None:
    (tmp_path / "src" / "small").mkdir(parents=True)
    source = tmp_path / "src" / "small" / "__init__.py"
    source.write_text("x = 1\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "small"\nversion = "1.2"\ndescription = "d"\nlicense = "MIT"\n'
        'requires-python = ">=3.11"\n[tool.hatch.build.targets.wheel]\npackages = ["src/small"]\n'
    )
    plugin = plugins.load(tmp_path)
    labels = build.labels(build.Request(RECIPE, LOCK, FULL, (plugin,), {}))
    pins = [[d.name, d.version, d.sha256] for d in FULL.debs]
    pins += [[w.name, w.version, w.sha256] for w in FULL.wheels]
    (sglang,) = [wheel.version for wheel in WHEELS if wheel.name == "sglang"]
    assert labels == {
        "org.opencontainers.image.title": "spark-appliance",
        "org.opencontainers.image.version": sglang,
        "dev.spark-appliance.debian-snapshot": LOCK.debian.snapshot,
        # over what is pinned, not over the files, which may be formatted otherwise
        "dev.spark-appliance.lock": f"sha256:{sha256(json.dumps(pins).encode()).hexdigest()}",
        "dev.spark-appliance.plugin.small": f"1.2 sha256:{plugin.digest}",
        "dev.spark-appliance.profile": "full",
    }
    source.write_text("x = 2\n")
    again = build.labels(build.Request(RECIPE, LOCK, FULL, (plugins.load(tmp_path),), {}))
    changed = {name for name, value in again.items() if value != labels[name]}
    assert changed == {"dev.spark-appliance.plugin.small"}


def test_the_label_of_a_plugin_is_the_hash_of_what_is_installed() -> None:
    plugin = plugins.load(ROOT / "pkgs" / "spark-tp-pad")
    tree = Tree()
    plugins.install(tree, plugin, Layout("0"))
    total = sha256()
    for path, entry in sorted(tree.entries.items()):
        content = entry.content if isinstance(entry.content, bytes) else b""
        total.update(f"{path}\0{entry.mode:o}\0{len(content)}\0".encode() + content)
    assert plugin.digest == total.hexdigest()
    site = Layout("0").site
    for path in plugin.package.rglob("*.py"):
        name = f"{site}/{path.relative_to(plugin.package.parent).as_posix()}"
        assert tree[name].content == path.read_bytes()


def test_addresses_come_from_the_mirrors() -> None:
    mirrors = apt.Mirrors("http://main/debian/", "http://sec/debian-security", "/k")
    urls = {d.file: d.url for d in sources.debian(FULL.debs, mirrors)}
    for package in FULL.debs:
        base = "http://sec/debian-security/" if package.archive == apt.SECURITY else (
            "http://main/debian/"
        )  # fmt: skip
        assert urls[package.file].startswith(base + "pool/")


def test_a_denied_package_counts_as_installed_in_its_version() -> None:
    stanza = (
        "Package: debconf\nVersion: 1.5\nArchitecture: all\nMulti-Arch: foreign\n"
        "Depends: perl-base\nProvides: debconf-2.0\nFilename: pool/main/d/debconf/d.deb\n"
        "SHA256: 00\nSize: 1\nDescription: x\n"
    )
    (entry,) = Deb822.iter_paragraphs(apt.installed_status(stanza), use_apt_pkg=False)
    assert entry["Status"] == "install ok installed"
    assert (entry["Version"], entry["Provides"]) == ("1.5", "debconf-2.0")
    assert "Depends" not in entry
    candidate = apt.parse(stanza)["debconf"]
    assert candidate.depends == {"perl-base"}
    asks = apt.parse(stanza.replace("debconf", "other").replace("perl-base", "debconf-2.0 | x"))
    assert apt.wanted_by(asks, "debconf", candidate.provides) == ["other"]


def test_pip_is_asked_for_the_target() -> None:
    argv = sources.report_argv(RECIPE.target, Path("r.txt"), Path("none"))
    assert argv[1:6] == ["-m", "pip", "install", "--dry-run", "--ignore-installed"]
    assert argv[argv.index("--python-version") + 1] == "3.13"
    assert "manylinux_2_41_aarch64" in argv
    assert "manylinux_2_42_aarch64" not in argv


def test_plugins_install_as_their_metadata_says() -> None:
    tree = Tree()
    plugin = plugins.load(ROOT / "pkgs" / "spark-tp-pad")
    layout = Layout("3.13")
    plugins.install(tree, plugin, layout)
    info = f"{layout.site}/spark_tp_pad-{plugin.version}.dist-info"
    points = tree[f"{info}/entry_points.txt"].content
    assert b"[sglang.srt.plugins]\nspark_tp_pad = spark_tp_pad.plugin:register\n" in points  # type: ignore[operator]
    assert f"{layout.site}/spark_tp_pad/plugin.py" in tree
    assert not [path for path in tree.entries if "pycache" in path]


def test_a_plugin_library_for_another_machine_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "libspark_engram.so"
    wrong.write_bytes(b"\x7fELF" + b"\0" * 100)
    folder = ROOT / "pkgs" / "spark-engram"
    with pytest.raises(Exception, match="not a shared library for aarch64"):
        plugins.load(folder, RECIPE.native["spark-engram"], wrong)
    with pytest.raises(Exception, match="needs its native library"):
        plugins.load(folder, RECIPE.native["spark-engram"])


def test_a_machine_without_a_pinned_compiler_is_refused() -> None:
    with pytest.raises(Exception, match=r"pins for aarch64, x86_64; this machine is riscv64"):
        native.compiler("spark-engram", RECIPE.native["spark-engram"], "riscv64")


def test_the_compilers_are_one_version_for_two_kinds_of_machine() -> None:
    settings = RECIPE.native["spark-engram"]
    for machine in ("x86_64", "aarch64"):
        found = native.compiler("spark-engram", settings, machine)
        assert found.requirement == settings.compiler
        assert any(
            tag.endswith(f"manylinux_2_12_{machine}") or tag.endswith(f"manylinux_2_17_{machine}")
            for tag in found.platforms
        )
        argv = sources.report_argv(RECIPE.target, Path("r"), Path("n"), found.platforms)
        assert argv[argv.index("--platform") + 1] == found.platforms[0]


def test_a_compiler_of_another_version_is_no_recipe(tmp_path: Path) -> None:
    text = (FOLDER / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text.replace('"ziglang==0.17.1"', '"ziglang==0.17.0"'))
    with pytest.raises(Exception, match=r"ziglang-0\.17\.1-.*\.whl is not ziglang==0\.17\.0"):
        load(tmp_path / "recipe.toml")


def test_the_compiler_command_names_the_target() -> None:
    settings: Native = RECIPE.native["spark-engram"]
    argv = native.argv(settings, [Path("/s/src/a.cc")], Path("/w"))
    assert argv[:2] == ["/w/compiler/ziglang/zig", "c++"]
    assert argv[2:4] == ["-target", "aarch64-linux-gnu.2.34"]
    assert "-ffile-prefix-map=/s/src=src" in argv
    assert argv[-2:] == ["-o", "/w/libspark_engram.so"]
    assert "/w/root/usr/lib/aarch64-linux-gnu/liburing.a" in argv


def test_the_engine_image_takes_whole_command_lines() -> None:
    # node/container.py runs `IMAGE ARGV...` without --entrypoint
    assert RECIPE.profiles["full"].entrypoint == ()
