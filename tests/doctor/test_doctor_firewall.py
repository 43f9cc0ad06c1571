"""The filter's verdict on a new connection from a netdev to any port."""

from __future__ import annotations

import pytest

from spark_appliance.doctor.document import View
from spark_appliance.doctor.firewall import INPUT, drops, from_iptables, from_nft

RULES = {
    "policy accept": (["-P INPUT ACCEPT"], False),
    "policy drop": (["-P INPUT DROP"], True),
    "rail accepted": (["-P INPUT DROP", "-A INPUT -i rail -j ACCEPT"], False),
    "other netdev accepted": (["-P INPUT DROP", "-A INPUT -i eth0 -j ACCEPT"], True),
    "everything accepted": (["-P INPUT DROP", "-A INPUT -j ACCEPT"], False),
    "only a port accepted": (
        ["-P INPUT DROP", "-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT"],
        True,
    ),
    "only established": (
        ["-P INPUT DROP", "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"],
        True,
    ),
    "negated netdev": (["-P INPUT DROP", "-A INPUT ! -i eth0 -j ACCEPT"], True),
    "last rule rejects": (
        ["-P INPUT ACCEPT", "-A INPUT -j REJECT --reject-with icmp-host-prohibited"],
        True,
    ),
    "a port is rejected": (["-P INPUT ACCEPT", "-A INPUT -p tcp --dport 1 -j REJECT"], False),
    "chain accepts": (
        ["-P INPUT DROP", "-N rails", "-A INPUT -j rails", "-A rails -i rail -j ACCEPT"],
        False,
    ),
    "chain returns": (
        [
            "-P INPUT DROP",
            "-N rails",
            "-A INPUT -j rails",
            "-A rails -j RETURN",
            "-A rails -j ACCEPT",
        ],
        True,
    ),
    "goto ends the walk": (
        [
            "-P INPUT DROP",
            "-N x",
            "-A INPUT -g x",
            "-A INPUT -i rail -j ACCEPT",
            "-A x -i lo -j DROP",
        ],
        True,
    ),
    "logging decides nothing": (
        ["-P INPUT ACCEPT", '-A INPUT -j LOG --log-prefix "dropped: "'],
        False,
    ),
    "a comment is no condition": (
        ["-P INPUT DROP", '-A INPUT -i rail -m comment --comment "the rail" -j ACCEPT'],
        False,
    ),
    "a loop ends": (["-P INPUT DROP", "-N a", "-A INPUT -j a", "-A a -j a"], True),
    "rubbish": (['-A INPUT -j "', "-P", "-A"], False),
}


@pytest.mark.parametrize("name", RULES)
def test_iptables(name: str):
    lines, dropped = RULES[name]
    assert drops(from_iptables(lines), INPUT, "rail") is dropped


def nft(*rules: dict[str, object], policy: str = "drop") -> bool:
    chains = [
        {"family": "inet", "table": "fw", "name": "in", "hook": "input", "policy": policy},
        {"family": "inet", "table": "fw", "name": "allow", "hook": None, "policy": None},
        {"family": "inet", "table": "other", "name": "out", "hook": "output", "policy": "drop"},
    ]
    place = {"family": "inet", "table": "fw", "netdevs": None, "conditional": False, "target": None}
    told = View(
        {"chains": chains, "rules": [{**place, "chain": "in", **rule} for rule in rules]}, ""
    )
    tables = from_nft(told)
    assert set(tables) == {"inet fw"}
    return drops(tables["inet fw"], INPUT, "rail")


def test_nftables():
    accept = {"netdevs": ["lo", "rail"], "verdict": "accept"}
    assert nft() is True
    assert nft(policy="accept") is False
    assert nft(accept) is False
    assert nft({**accept, "netdevs": ["lo"]}) is True
    assert nft({**accept, "conditional": True}) is True
    assert nft({"verdict": "jump", "target": "allow"}, {**accept, "chain": "allow"}) is False
    assert nft({"verdict": "drop"}, policy="accept") is True
