"""What a packet filter does with a new connection from a netdev to any port."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from spark_appliance.doctor.document import View

_DEPTH: Final = 16
"""Jumps that are followed; the kernel's own limit for nftables."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: for these netdevs only (None: all), with further conditions, and its verdict.

    ``verdict`` is accept, drop, return, jump, goto, or None for rules that decide nothing.
    """

    netdevs: frozenset[str] | None
    conditional: bool
    verdict: str | None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain; ``policy`` is None where packets come by a jump only."""

    rules: Sequence[Rule]
    policy: str | None = None


def drops(chains: Mapping[str, Chain], start: str, netdev: str) -> bool:
    """Say whether a new connection from a netdev to an arbitrary port ends in a drop.

    Rules with other conditions (ports, addresses, connection state) do not apply to it.
    """
    verdict = _walk(chains, start, netdev, 0)
    chain = chains.get(start)
    policy = chain.policy if chain is not None else None
    return (verdict or policy) == "drop"


def _walk(chains: Mapping[str, Chain], name: str, netdev: str, depth: int) -> str | None:
    chain = chains.get(name)
    if chain is None or depth > _DEPTH:
        return None
    for rule in chain.rules:
        if rule.conditional or (rule.netdevs is not None and netdev not in rule.netdevs):
            continue
        if rule.verdict in ("accept", "drop"):
            return rule.verdict
        if rule.verdict == "return":
            return None
        if rule.verdict in ("jump", "goto") and rule.target is not None:
            verdict = _walk(chains, rule.target, netdev, depth + 1)
            if verdict is not None or rule.verdict == "goto":
                return verdict
    return None


def from_nft(told: View) -> dict[str, dict[str, Chain]]:
    """Return the chains of each table with an input hook, by the table's name.

    Raises:
        Missing: when the probe did not tell.
    """
    rules: dict[tuple[str, str], list[Rule]] = {}
    for entry in told.at("rules").items():
        place = (_table(entry), entry.at("chain").optional() or "")
        netdevs = entry.at("netdevs")
        conditional = entry.at("conditional").data is not False
        rules.setdefault(place, []).append(
            Rule(
                frozenset(netdevs.texts()) if netdevs.present else None,
                conditional,
                entry.at("verdict").optional(),
                entry.at("target").optional(),
            )
        )
    tables: dict[str, dict[str, Chain]] = {}
    hooked: set[str] = set()
    for entry in told.at("chains").items():
        table, name = _table(entry), entry.at("name").optional() or ""
        policy = entry.at("policy").optional()
        tables.setdefault(table, {})[name] = Chain(rules.get((table, name), ()), policy)
        if entry.at("hook").optional() == "input":
            hooked.add(table)
            # one name for the entry, whatever the chain is called
            tables[table][INPUT] = tables[table][name]
    return {table: chains for table, chains in tables.items() if table in hooked}


def _table(entry: View) -> str:
    return f"{entry.at('family').optional()} {entry.at('table').optional()}"


INPUT: Final = "INPUT"
"""Where incoming packets enter: iptables' own name, and ours for nftables."""


def from_iptables(lines: Sequence[str]) -> dict[str, Chain]:
    """Return the chains that ``iptables -S`` printed."""
    rules: dict[str, list[Rule]] = {}
    policies: dict[str, str] = {}
    for line in lines:
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        if len(words) >= 3 and words[0] == "-P":
            policies[words[1]] = words[2].lower()
            rules.setdefault(words[1], [])
        elif len(words) == 2 and words[0] == "-N":
            rules.setdefault(words[1], [])
        elif len(words) >= 2 and words[0] == "-A":
            rules.setdefault(words[1], []).append(_iptables_rule(words[2:]))
    return {name: Chain(entries, policies.get(name)) for name, entries in rules.items()}


_FINAL: Final = {"ACCEPT": "accept", "DROP": "drop", "REJECT": "drop", "RETURN": "return"}
_SILENT: Final = ("LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS")


def _iptables_rule(words: Sequence[str]) -> Rule:
    netdevs: frozenset[str] | None = None
    conditional = False
    verdict = target = None
    position = 0
    while position < len(words):
        word = words[position]
        value = words[position + 1] if position + 1 < len(words) else ""
        if word == "-i":
            netdevs = frozenset({value})
        elif word in ("-j", "-g"):
            verdict = _FINAL.get(value) or (None if value in _SILENT else "jump")
            target = value if verdict == "jump" else None
            if word == "-g" and verdict == "jump":
                verdict = "goto"
            break  # what follows belongs to the target
        elif (word, value) == ("-m", "comment"):
            pass
        elif word != "--comment":
            conditional = True
        position += 2
    return Rule(netdevs, conditional, verdict, target)
