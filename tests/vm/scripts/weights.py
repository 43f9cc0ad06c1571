# ruff: noqa: F821 - the driver gives the machines and functions
# The head exports the checkpoint to the workers' rails; nobody else gets it.

MODEL = "/models/stand-in"
INDEX = f"{MODEL}/model.safetensors.index.json"

start_all()
spark1.wait_for_unit("nfs-server.service")
for worker in (spark2, spark3):
    worker.wait_for_unit("spark-fabric.service")

with subtest("a worker mounts at the first look, and reads the same bytes"):
    wanted = spark1.succeed(f"sha256sum < {INDEX}")
    for worker in (spark2, spark3):
        worker.wait_until_succeeds(f"test -r {INDEX}", timeout=300)
        assert worker.succeed(f"sha256sum < {INDEX}") == wanted
        options = worker.succeed(f"findmnt --noheadings -u --output OPTIONS --types nfs4 {MODEL}")
        for option in ("ro", "vers=4.2", "hard", "nconnect=8", "proto=tcp"):
            assert option in options.strip().split(","), options

with subtest("it is read-only, and root on a worker is nobody on the head"):
    spark2.fail(f"touch {MODEL}/new")
    spark1.succeed(f"install -m 0600 /dev/null {MODEL}/private")
    spark2.fail(f"cat {MODEL}/private")
    spark1.succeed(f"rm {MODEL}/private")

with subtest("32 threads serve"):
    assert int(spark1.succeed("cat /proc/fs/nfsd/threads")) == 32

with subtest("a stranger gets nothing"):
    stranger.wait_for_unit("multi-user.target")
    stranger.fail("timeout 30 mount -t nfs4 -o soft,timeo=50,retrans=1 192.168.1.11:/ /mnt")
    exports = spark1.succeed("exportfs -v")
    assert "*" not in exports and "<world>" not in exports, exports

with subtest("a reader survives a restart of the server"):
    spark1.succeed(f"dd if=/dev/urandom of={MODEL}/large bs=1M count=64 status=none")
    wanted = spark1.succeed(f"sha256sum < {MODEL}/large").split()[0]
    spark2.succeed(
        f"systemd-run -q -u reader sh -c 'dd if={MODEL}/large bs=256k | sha256sum > /tmp/sum'"
    )
    spark1.succeed("systemctl restart nfs-server.service")
    spark2.wait_until_succeeds("test -s /tmp/sum", timeout=600)
    assert wanted in spark2.succeed("cat /tmp/sum")

with subtest("a worker boots while the head is down"):
    spark1.crash()
    spark2.crash()
    spark2.start()
    spark2.wait_for_unit("multi-user.target")

with subtest("and mounts once the head is back"):
    spark1.start()
    spark1.wait_for_unit("nfs-server.service")
    spark2.wait_until_succeeds(f"timeout 60 test -r {INDEX}", timeout=900)
