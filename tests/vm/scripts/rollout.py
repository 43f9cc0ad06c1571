# ruff: noqa: F821 - the driver gives the machines and functions
# Switch all machines to another configuration with the steps of `spark-appliance rollout`; a bad
# one goes back, and so does a machine that nobody confirms. NixOS only: DGX OS has generations.

import shlex

from spark_appliance.fleet.nixossteps import (  # type: ignore
    PROFILE,
    TIMER,
    activate,
    arm,
    keep,
)

spark = [spark1, spark2, spark3]
WORKERS_FIRST = [spark2, spark3, spark1]
HEAD_FIRST = [spark1, spark2, spark3]
HOUR = 3600


def run(machine, script):
    """Run a script as the command line does over SSH."""
    return machine.succeed(f"printf %s {shlex.quote(script)} | sh -s")


def put(machine, name, hold=HOUR):
    """On trial: the timer first, then the new version."""
    run(machine, arm(hold))
    machine.succeed(shlex.join(activate(systems[machine.name][name])))
    assert release(machine) == name


def confirm(machine, name):
    run(machine, keep(systems[machine.name][name]))
    machine.fail(f"systemctl is-active {TIMER}.timer")
    assert boots(machine) == systems[machine.name][name]


def boots(machine):
    return machine.succeed(f"readlink -f {PROFILE}").strip()


def release(machine):
    return machine.succeed("cat /etc/spark/release").strip()


def process_of(machine):
    return machine.succeed("systemctl show --property MainPID --value spark-engine.service").strip()


def stop_cluster():
    for machine in HEAD_FIRST:
        machine.succeed("systemctl stop spark.target")
    spark1.wait_until_fails("test -e /run/spark/ready", timeout=300)


def start_cluster():
    for machine in WORKERS_FIRST:
        machine.succeed("systemctl reset-failed; systemctl start --no-block spark.target")


def wait_until_ready():
    spark1.wait_until_succeeds("test -e /run/spark/ready", timeout=900)


start_all()
wait_until_ready()
systems = {}
for machine in spark:
    base = machine.succeed("readlink -f /run/current-system").strip()
    systems[machine.name] = {
        "first": base,
        "next": machine.succeed(f"readlink -f {base}/specialisation/next").strip(),
        "broken": machine.succeed(f"readlink -f {base}/specialisation/broken").strip(),
    }
    run(machine, keep(base))

with subtest("a switch does not touch running ranks"):
    before = [process_of(machine) for machine in spark]
    for machine in WORKERS_FIRST:
        put(machine, "next")
    assert [process_of(machine) for machine in spark] == before
    spark1.succeed("test -e /run/spark/ready")

with subtest("the restarted cluster passes the health gate and is confirmed"):
    stop_cluster()
    start_cluster()
    wait_until_ready()
    assert [process_of(machine) for machine in spark] != before
    for machine in spark:
        machine.succeed(f"systemctl is-active {TIMER}.timer")
        assert boots(machine) == systems[machine.name]["first"]
        confirm(machine, "next")

with subtest("a configuration that cannot serve never becomes ready"):
    stop_cluster()
    for machine in WORKERS_FIRST:
        put(machine, "broken")
    start_cluster()
    # the supervisor gives up after its limit of restarts
    spark1.wait_until_succeeds("systemctl is-failed spark-supervisor.service", timeout=900)
    spark1.fail("test -e /run/spark/ready")

with subtest("and the previous one serves again"):
    stop_cluster()
    for machine in WORKERS_FIRST:
        machine.succeed(shlex.join(activate(systems[machine.name]["next"])))
        confirm(machine, "next")
        assert release(machine) == "next"
    start_cluster()
    wait_until_ready()

with subtest("machines that nobody confirms return by themselves and serve"):
    stop_cluster()
    for machine in WORKERS_FIRST:
        put(machine, "first", hold=120)
    # from here on nobody touches them
    for machine in spark:
        machine.wait_until_succeeds("grep -qx next /etc/spark/release", timeout=900)
        assert boots(machine) == systems[machine.name]["next"]
    wait_until_ready()

with subtest("a timer that is wound up lasts as long as the new one"):
    put(spark3, "first", hold=30)
    run(spark3, arm(HOUR))
    unit = f"/org/freedesktop/systemd1/unit/{TIMER.replace('-', '_2d')}_2etimer"
    answer = spark3.succeed(
        "busctl get-property org.freedesktop.systemd1 "
        f"{unit} org.freedesktop.systemd1.Timer NextElapseUSecMonotonic"
    )
    now = float(spark3.succeed("cut -d ' ' -f 1 /proc/uptime"))
    assert int(answer.split()[1]) / 1e6 - now > HOUR / 2
    spark3.succeed(shlex.join(activate(systems["spark3"]["next"])))
    confirm(spark3, "next")
