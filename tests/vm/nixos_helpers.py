# ruff: noqa: F821 - the driver gives the machines
# In front of each script on NixOS: what differs between the guests' systems.
import json as _json


def engine_process(machine):
    """Return the process ID of the engine itself: on NixOS nothing stands around it."""
    return machine.succeed("systemctl show --property MainPID --value spark-engine.service").strip()


def _set_link(machine, netdev, state):
    """Switch a virtual network card's link at this machine and at the other end.

    The driver numbers virtual networks in the order of the rails' subnets, after the management
    network (cluster.nix), and names QEMU's cards after them.
    """
    plan = _json.loads(machine.succeed("cat /etc/spark/plan.json"))
    rails = [rail for node in plan["nodes"] for rail in node["rails"]]
    subnets = []
    for rail in rails:
        subnet = rail["address"].rsplit(".", 1)[0]
        if subnet not in subnets:
            subnets.append(subnet)
    own = next(node for node in plan["nodes"] if node["name"] == machine.name)
    wanted = next(r["address"] for r in own["rails"] if r["netdev"] == netdev).rsplit(".", 1)[0]
    ends = {
        node["name"]
        for node in plan["nodes"]
        if any(rail["address"].rsplit(".", 1)[0] == wanted for rail in node["rails"])
    }
    for end in machines:
        if end.name in ends:
            end.send_monitor_command(f"set_link vlan{2 + subnets.index(wanted)} {state}")


def cut(machine, netdev):
    """Pull the cable out of a network card, at both ends."""
    _set_link(machine, netdev, "off")


def join(machine, netdev):
    """Put the cable in again."""
    _set_link(machine, netdev, "on")
