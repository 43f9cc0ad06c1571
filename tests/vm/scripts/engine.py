# ruff: noqa: F821 - the driver gives the machines and functions
# The stand-in engine judges argv, environment and key; the ranks live and die together.
import json

spark = [spark1, spark2, spark3]
API = "http://127.0.0.1:8888"
KEY = "not-a-secret-in-a-test"


def ask(machine, path, key=KEY, body=None):
    """Return status and answer of a request on the machine itself."""
    words = ["curl", "--silent", "--max-time", "60", "--write-out", "'\\n%{http_code}'"]
    if key:
        words += ["--header", f"'Authorization: Bearer {key}'"]
    if body is not None:
        words += ["--header", "'Content-Type: application/json'", "--data", f"'{json.dumps(body)}'"]
    answer = machine.succeed(" ".join([*words, f"'{API}{path}'"]))
    text, _, status = answer.rpartition("\n")
    return int(status), text


def wait_for_ready():
    spark1.wait_until_succeeds("test -e /run/spark/ready", timeout=900)


start_all()

with subtest("workers start first, the head last, and a real generation makes it ready"):
    wait_for_ready()
    for machine in spark:
        machine.wait_for_unit("spark-engine.service")
    log_text = spark1.succeed("journalctl --unit spark-engine.service --output cat")
    assert "rank 1 is here" in log_text and "rank 2 is here" in log_text, log_text

with subtest("the guard is armed before the engine runs"):
    for machine in spark:
        started = [
            int(
                machine.succeed(
                    f"systemctl show --property ActiveEnterTimestampMonotonic --value {unit}"
                )
            )
            for unit in ("spark-guard.service", "spark-engine.service")
        ]
        assert started[0] < started[1], started

with subtest("the API wants its key, and the key is nowhere else"):
    question = {"model": "stand-in", "messages": [{"role": "user", "content": "19 + 23?"}]}
    status, text = ask(spark1, "/v1/chat/completions", body=question)
    assert status == 200 and "42" in text, (status, text)
    assert ask(spark1, "/v1/chat/completions", key="wrong", body=question)[0] == 401
    assert ask(spark1, "/v1/models", key=None)[0] == 401
    pid = engine_process(spark1)
    spark1.fail(f"cat /proc/{pid}/cmdline /proc/{pid}/environ | grep -a {KEY}")
    spark1.fail(f"grep -r {KEY} /etc/spark/plan.json /etc/systemd/system")
    # the engine prints its arguments, the key among them; the unit's LogFilterPatterns= drops them
    spark1.fail(f"journalctl --output cat --unit 'spark-*' | grep {KEY}")
    assert spark1.succeed("stat -c '%a %U' /run/spark-engine/config.yaml").split() == [
        "600",
        "spark",
    ]

with subtest("limits and user are the plan's"):
    for machine in spark:
        limits = machine.succeed(f"cat /proc/{engine_process(machine)}/limits")
        assert "Max locked memory         unlimited" in limits, limits
        owner = machine.succeed(f"stat -c %U /proc/{engine_process(machine)}")
        assert owner.strip() == "spark", owner

with subtest("a killed rank takes all down, and all come back"):
    before = [engine_process(machine) for machine in spark]
    spark3.succeed("systemctl kill --signal=KILL spark-engine.service")
    for machine, pid in zip(spark, before, strict=True):
        machine.wait_until_fails(f"test -e /proc/{pid}", timeout=300)
    spark1.wait_until_fails("test -e /run/spark/ready", timeout=300)
    wait_for_ready()
    after = [engine_process(machine) for machine in spark]
    assert all(old != new for old, new in zip(before, after, strict=True)), (before, after)

with subtest("the guard kills the engine before memory is gone, and says so"):
    victim = engine_process(spark1)
    free = int(spark1.succeed("awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo"))
    spark1.execute(
        f"curl --silent --max-time 60 --header 'Authorization: Bearer {KEY}' "
        f"'{API}/stand-in/allocate?mib={free - 400}'"
    )
    spark1.wait_until_fails(f"test -e /proc/{victim}", timeout=120)
    spark1.wait_until_fails("test -e /run/spark/ready", timeout=300)
    said = spark1.succeed("journalctl --unit spark-guard.service --output cat")
    assert "kill" in said.lower(), said
    wait_for_ready()

with subtest("stop leaves the export and the mounts up"):
    for machine in spark:
        machine.succeed("systemctl stop spark.target")
        machine.wait_until_fails("systemctl is-active spark-engine.service", timeout=120)
    spark1.succeed("systemctl is-active nfs-server.service")
    spark2.succeed("test -r /models/stand-in/config.json")
