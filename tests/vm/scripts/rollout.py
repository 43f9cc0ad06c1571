# ruff: noqa: F821 - the driver gives the machines and functions
# Switch all machines to another configuration; a bad one goes back.

spark = [spark1, spark2, spark3]
WORKERS_FIRST = [spark2, spark3, spark1]
HEAD_FIRST = [spark1, spark2, spark3]


def switch(machine, version):
    """Activate a configuration that is already on the machine."""
    base = "/nix/var/nix/profiles/system-base"
    name = f"/specialisation/{version}" if version else ""
    machine.succeed(f"{base}{name}/bin/switch-to-configuration test")


def release(machine):
    return machine.succeed("cat /etc/spark/release").strip()


def process_of(machine):
    return machine.succeed("systemctl show --property MainPID --value spark-engine.service").strip()


def restart_cluster():
    for machine in HEAD_FIRST:
        machine.succeed("systemctl stop spark.target")
    for machine in WORKERS_FIRST:
        machine.succeed("systemctl reset-failed; systemctl start --no-block spark.target")


start_all()
spark1.wait_until_succeeds("test -e /run/spark/ready", timeout=900)
for machine in spark:
    machine.succeed("ln -sfn $(readlink -f /run/current-system) /nix/var/nix/profiles/system-base")

with subtest("a switch does not touch running ranks"):
    before = [process_of(machine) for machine in spark]
    for machine in WORKERS_FIRST:
        switch(machine, "next")
        assert release(machine) == "next"
    assert [process_of(machine) for machine in spark] == before
    spark1.succeed("test -e /run/spark/ready")

with subtest("the restarted cluster passes the health gate"):
    restart_cluster()
    spark1.wait_until_succeeds("test -e /run/spark/ready", timeout=900)
    assert [process_of(machine) for machine in spark] != before

with subtest("a configuration that cannot serve never becomes ready"):
    for machine in WORKERS_FIRST:
        switch(machine, "broken")
    restart_cluster()
    # the supervisor gives up after its limit of restarts
    spark1.wait_until_succeeds("systemctl is-failed spark-supervisor.service", timeout=900)
    spark1.fail("test -e /run/spark/ready")

with subtest("and the previous one serves again"):
    for machine in WORKERS_FIRST:
        switch(machine, "next")
        assert release(machine) == "next"
    restart_cluster()
    spark1.wait_until_succeeds("test -e /run/spark/ready", timeout=900)
