# ruff: noqa: F821 - the driver gives the machines and functions
# An empty NVMe disk gets a file system, the tables are packed onto it, damage is found.
import json

FOLDER = "/var/lib/spark/engram"
USED = "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_used0"

machine.start()
machine.wait_for_unit("multi-user.target")

with subtest("the empty disk has a file system and is mounted by its serial"):
    machine.wait_for_unit("var-lib-spark-engram.mount")
    source = machine.succeed(f"findmnt --noheadings --output SOURCE {FOLDER}").strip()
    wanted = machine.succeed("readlink -f /dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_engram0").strip()
    assert source == wanted, source
    assert "ext4" in machine.succeed(f"findmnt --noheadings --output FSTYPE {FOLDER}")

with subtest("a disk that holds something is left alone"):
    start = machine.succeed(
        "systemctl show --property ExecStart --value spark-engram-format.service"
    )
    program = start.split("path=")[1].split(" ;")[0]
    before = machine.succeed(f"dd if={USED} bs=1M count=4 status=none | sha256sum")
    status, output = machine.execute(f"{program} ext4 {USED} 2>&1")
    assert status == 1 and "nothing was changed" in output, output
    assert machine.succeed(f"dd if={USED} bs=1M count=4 status=none | sha256sum") == before

with subtest("scheduler and read-ahead are set"):
    name = wanted.removeprefix("/dev/")
    assert "[none]" in machine.succeed(f"cat /sys/block/{name}/queue/scheduler")
    assert machine.succeed(f"cat /sys/block/{name}/queue/read_ahead_kb").strip() == "128"

with subtest("a killed pack goes on where it stopped"):
    machine.succeed("spark-engram fake-checkpoint /models/small --rows-per-column 200000")
    machine.succeed("systemctl start --no-block spark-engram-pack.service")
    machine.wait_until_succeeds(f"ls {FOLDER}/*.partial", timeout=120)
    machine.succeed("systemctl kill --signal=KILL spark-engram-pack.service")
    machine.wait_until_fails("systemctl is-active spark-engram-pack.service")
    machine.succeed("systemctl reset-failed spark-engram-pack.service")
    machine.succeed("systemctl start spark-engram-pack.service")
    events = [
        json.loads(line)
        for line in machine.succeed(
            "journalctl --unit spark-engram-pack.service --output cat"
        ).splitlines()
        if line.startswith("{")
    ]
    assert any(event["event"] == "progress" for event in events), "no progress in the journal"
    assert any(
        event["event"] == "file" and event["state"] in ("resume", "kept") for event in events
    ), events

with subtest("receipts are there and the files verify"):
    files = machine.succeed(f"ls {FOLDER}/engram-l*-r0of1.bin").split()
    assert len(files) == 2, files
    for file in files:
        machine.succeed(f"test -s {file}.receipt.json")
        machine.succeed(f"spark-engram verify {file} --checkpoint /models/small")

with subtest("a damaged file is refused"):
    machine.succeed(f"printf damage | dd of={files[0]} bs=1 seek=8192 conv=notrunc status=none")
    status, output = machine.execute(f"spark-engram verify {files[0]} 2>&1")
    assert status == 3, (status, output)
    status, output = machine.execute(
        f"SPARK_ENGRAM_DIR={FOLDER} spark-engram info {files[0]} 2>&1; "
        f"truncate -s -4096 {files[1]}; spark-engram info {files[1]} 2>&1"
    )
    assert status == 3, (status, output)
