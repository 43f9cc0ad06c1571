"""kill -9, a full drive and a vanished mount, with real processes and file systems."""

import os
import random
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REVISION, make_model
from spark_engram import pack
from spark_engram.errors import SourceError, SpaceError
from spark_engram.fake import FakeSpec

pytestmark = pytest.mark.slow
POINTS = 50

# Kills itself without warning at the n-th system call that matters to the files.
PACKER = """
import os, signal, sys
from pathlib import Path
from spark_engram import pack

checkpoint, output, revision, point = sys.argv[1:]
left = int(point)

def deadly(function):
    def wrapper(*arguments, **named):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return wrapper

for name in ("pwrite", "write", "fdatasync", "fsync", "ftruncate", "open", "preadv", "close"):
    setattr(os, name, deadly(getattr(os, name)))
for name in ("rename", "unlink"):
    setattr(Path, name, deadly(getattr(Path, name)))
pack.pack(pack.PackOptions(checkpoint=Path(checkpoint), output=Path(output), tp=2, rank=1,
                           revision=revision, segment_pages=8))
print("calls", int(point) - left)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("kill") / "ckpt", FakeSpec(rows_per_column=100))


def run_packer(model, output, point):
    return subprocess.run(
        [sys.executable, "-c", PACKER, str(model.folder), str(output), REVISION, str(point)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_kill_9_at_50_random_points_then_resume_gives_the_same_bytes(model, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    done = run_packer(model, whole, 10**9)
    assert done.returncode == 0, done.stderr
    calls = int(done.stdout.split()[1])
    expected = contents(whole)
    assert len(expected) == 4
    generator = random.Random(20260930)
    killed = 0
    output = tmp_path / "cut"
    for _ in range(POINTS):
        output.mkdir()
        done = run_packer(model, output, generator.randrange(1, calls + 1))
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        # A second death while resuming, then to the end in this process.
        run_packer(model, output, generator.randrange(1, calls + 1))
        model.pack(output, tp=2, rank=1, segment_pages=8)
        assert contents(output) == expected
        shutil.rmtree(output)
    assert killed == POINTS


def test_sigterm_from_outside_is_resumable(model, tmp_path):
    argv = [
        sys.executable, "-m", "spark_engram", "pack", "--checkpoint", str(model.folder),
        "--output", str(tmp_path), "--tp", "2", "--rank", "0", "--revision", REVISION,
        "--json-progress",
    ]  # fmt: skip
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0]
    process.send_signal(signal.SIGTERM)  # at the first event, the plan
    process.communicate(timeout=60)
    assert process.returncode in (0, 143)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def succeeds(argv):
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_drive(tmp_path):
    """A small ext4 on a loop device; a small tmpfs where loop mounting is impossible."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "drive"
    mount.mkdir()
    image = tmp_path / "image"
    with image.open("wb") as stream:
        stream.truncate(8 * 2**20)
    steps = [
        ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)],
        ["mount", "-o", "loop", str(image), str(mount)],
    ]
    if not all(shutil.which(argv[0]) and succeeds(argv) for argv in steps):
        argv = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
        if not succeeds(argv):
            pytest.skip("this container may mount neither a loop device nor a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Take all space but ``leave`` bytes."""
    blocker = folder / "blocker"
    state = os.statvfs(folder)
    with blocker.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, max(1, state.f_bavail * state.f_frsize - leave))
    return blocker


@pytest.mark.parametrize("preallocate", [True, False])
def test_a_real_full_drive_is_explained_and_resumable(model, small_drive, preallocate):
    options = {"tp": 1, "rank": 0, "layers": (1,), "segment_pages": 16, "preallocate": preallocate}
    blocker = fill(small_drive, 400_000)  # the file needs about 750,000
    with pytest.raises(SpaceError, match=r"packing needs \d+ bytes"):
        model.pack(small_drive, **options)
    with pytest.raises(SpaceError, match="No space left on device; make room"):
        model.pack(small_drive, check_space=False, **options)
    blocker.unlink()
    (job,) = model.pack(small_drive, verify=True, **options)
    assert job.path.exists()
    assert not job.partial.exists()


def test_a_source_that_vanishes_is_explained_and_resumable(model, tmp_path):
    """A checkpoint whose mount goes away, as with an NFS server that is turned off."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = tmp_path / "mnt"
    mount.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)]
    if not succeeds(argv):
        pytest.skip("this container may not mount a tmpfs")
    try:
        shutil.copytree(model.folder, mount / "ckpt")
        options = pack.PackOptions(
            checkpoint=mount / "ckpt", output=tmp_path, tp=1, rank=0, layers=(1,),
            revision=REVISION, segment_pages=16,
        )  # fmt: skip
        made = pack.jobs(options)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    with pytest.raises(SourceError, match="No such file or directory; check the file or the NFS"):
        pack._pack_file(made[0], options, pack.SilentReporter())
    (job,) = model.pack(tmp_path, tp=1, rank=0, layers=(1,), verify=True)
    assert job.path.exists()
