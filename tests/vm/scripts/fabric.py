# ruff: noqa: F821 - the driver gives the machines and functions
# Three machines, each pair joined by one cable of two rails, RDMA in software.
import json

spark = [spark1, spark2, spark3]

start_all()

with subtest("every rail comes up and every peer answers"):
    for machine in spark:
        machine.wait_for_unit("spark-fabric.service")
    nodes = {}
    for machine in spark:
        own = json.loads(machine.succeed("cat /etc/spark/plan.json"))["nodes"]
        nodes[machine.name] = next(node for node in own if node["name"] == machine.name)

with subtest("addresses, MTU and names are the plan's"):
    for machine in spark:
        for rail in nodes[machine.name]["rails"]:
            shown = json.loads(machine.succeed(f"ip -json addr show {rail['netdev']}"))[0]
            assert shown["mtu"] == rail["mtu"], shown
            local = [f"{a['local']}/{a['prefixlen']}" for a in shown["addr_info"]]
            assert local == [rail["address"]], local
            machine.succeed(f"test -e /sys/class/infiniband/{rail['rdma']}")

with subtest("the GID index is resolved from sysfs: RoCE v2, IPv4, this netdev"):
    for machine in spark:
        written = machine.succeed("cat /run/spark/fabric.env")
        indices = set()
        for rail in nodes[machine.name]["rails"]:
            port = f"/sys/class/infiniband/{rail['rdma']}/ports/1"
            octets = rail["address"].split("/")[0].split(".")
            tail = "{:02x}{:02x}:{:02x}{:02x}".format(*map(int, octets))
            # one grep for all: a table has up to 1024 entries
            found = machine.succeed(
                f"cd {port}; for i in $(grep -l 'ffff:{tail}$' gids/* | cut -d/ -f2); do "
                "grep -qx 'RoCE v2' gid_attrs/types/$i && echo $i; done; true"
            ).split()
            assert len(found) == 1, (rail["rdma"], found)
            indices.add(found[0])
        lines = [line for line in written.splitlines() if line.startswith("NCCL_IB_GID_INDEX")]
        if len(indices) == 1:
            assert lines == [f"NCCL_IB_GID_INDEX={indices.pop()}"], written
        else:
            assert lines == [], written

with subtest("only the rails and the other Sparks pass the firewall"):
    ruleset = spark1.succeed("nft list ruleset")
    for rail in nodes["spark1"]["rails"]:
        assert rail["netdev"] in ruleset
    assert "192.168.1.12" in ruleset and "192.168.1.13" in ruleset

with subtest("RDMA works over a rail"):
    rail = nodes["spark1"]["rails"][0]
    peer = rail["peers"][0]
    other = next(machine for machine in spark if machine.name == peer["node"])
    other.succeed(f"systemd-run -q -u rping -p LimitMEMLOCK=infinity rping -s -a {peer['address']}")
    spark1.wait_until_succeeds(f"rping -c -a {peer['address']} -C 5", timeout=120)

with subtest("a cut link stops the start, with its name"):
    for machine in spark:
        machine.succeed("systemctl stop spark.target")
    netdev = nodes["spark1"]["rails"][0]["netdev"]
    cut(spark1, netdev)
    spark1.wait_until_succeeds(f"ip link show {netdev} | grep NO-CARRIER", timeout=60)
    status, output = spark1.execute(
        "spark-node --plan /etc/spark/plan.json --node spark1 fabric --deadline 5 2>&1"
    )
    assert status != 0 and netdev in output, output
    spark1.fail("test -e /run/spark/fabric.env")

with subtest("and the start works again once the link is back"):
    join(spark1, netdev)
    spark1.wait_until_succeeds("systemctl start spark-fabric.service", timeout=300)
    spark1.succeed("test -e /run/spark/fabric.env")
