"""Reduce a lock to what one target installs: one entry and one wheel a package.

Why: poetry2nix ignores the `markers` of a locked package (two entries of one name silently become
one), treats every extra as switched on, cannot read some wheel names of other systems, and takes a
package that the lock lacks from nixpkgs without a word. A pruned lock leaves nothing to guess:
whatever it holds applies to the target, and every entry says just that as its marker. Poetry
writes the terms of a marker in changing order, so the markers of dependencies are written anew.
Pruning a pruned lock changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from relock.errors import RelockError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from relock.target import Target

Entry = dict[str, Any]


def prune(lock: Mapping[str, Any], pyproject: Mapping[str, Any], target: Target) -> Entry:
    """Return the part of `lock` that `target` needs for the dependencies of `pyproject`.

    Args:
        lock: a parsed lock of version 2.
        pyproject: the parsed pyproject.toml with `[tool.poetry.dependencies]` and, optionally,
            `[tool.relock.exclude]`.
        target: the machine.

    Raises:
        RelockError: a needed package is missing, locked twice, or has no wheel that the target and
            poetry2nix can both use.
    """
    excluded = excluded_names(pyproject)
    entries = _index(lock, target, excluded)
    extras = _reach(entries, roots(pyproject), target, excluded)
    packages = [_prune_entry(entries[name], extras, target, excluded) for name in sorted(extras)]
    return {"package": packages, "metadata": dict(lock["metadata"])}


def roots(pyproject: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Names in `[tool.poetry.dependencies]` (without python) and the extras asked for."""
    table = pyproject["tool"]["poetry"]["dependencies"]
    return {
        canonicalize_name(name): _extras(spec) for name, spec in table.items() if name != "python"
    }


def excluded_names(pyproject: Mapping[str, Any]) -> frozenset[str]:
    """Names in `[tool.relock.exclude]`: required by a package, left out on purpose."""
    table = pyproject.get("tool", {}).get("relock", {}).get("exclude", {})
    return frozenset(canonicalize_name(name) for name in table)


def best_wheel(entry: Mapping[str, Any], target: Target) -> dict[str, str]:
    """Return the `{file, hash}` of the one wheel that `target` prefers.

    Raises:
        RelockError: there is none, poetry2nix could not read it, or its hash is not SHA-256.
    """
    label = f"{entry['name']} {entry['version']}"
    ranked = sorted(
        (key, file["file"], file["hash"])
        for file in entry["files"]
        if file["file"].endswith(".whl") and (key := target.wheel_key(file["file"])) is not None
    )
    if not ranked:
        raise RelockError(
            f"{label}: no wheel for CPython {target.python[0]}.{target.python[1]} on "
            f"{target.machine} with glibc {target.glibc[0]}.{target.glibc[1]}; constrain it to a "
            "version that has one, or list it under [tool.relock.exclude] with the reason"
        )
    _, name, digest = ranked[0]
    abi = name.removesuffix(".whl").split("-")[-2]
    if "." in abi:
        raise RelockError(
            f"{label}: {name} has the compressed ABI tag {abi}, which poetry2nix cannot read; "
            "constrain it to an older version"
        )
    if not digest.startswith("sha256:"):
        raise RelockError(f"{label}: {name} is locked by {digest.split(':')[0]}, want sha256")
    return {"file": name, "hash": digest}


def _extras(spec: Any) -> frozenset[str]:
    if not isinstance(spec, dict):
        return frozenset()
    return frozenset(canonicalize_name(extra) for extra in spec.get("extras", ()))


def _index(lock: Mapping[str, Any], target: Target, excluded: frozenset[str]) -> dict[str, Entry]:
    """Entries whose own marker holds on the target, by name, each name once."""
    found: dict[str, Entry] = {}
    twice: list[str] = []
    for entry in lock["package"]:
        name = canonicalize_name(entry["name"])
        markers = entry.get("markers", "*")
        by_group = markers.values() if isinstance(markers, dict) else (markers,)
        if name in excluded or not any(target.marker_holds(marker) for marker in by_group):
            continue
        if name in found:
            twice.append(f"{name} ({found[name]['version']} and {entry['version']})")
        found[name] = entry
    if twice:
        raise RelockError(
            f"locked twice, and both apply: {', '.join(twice)}; constrain in "
            "[tool.poetry.dependencies] until one is left"
        )
    return found


def _live(spec: Any, extras: Iterable[str], target: Target) -> list[dict[str, Any]]:
    """Those alternatives of one locked dependency that hold on the target."""
    alternatives = spec if isinstance(spec, list) else [spec]
    return [
        one
        for one in ({"version": one} if isinstance(one, str) else one for one in alternatives)
        if target.marker_holds(one.get("markers", ""), extras)
    ]


def _reach(
    entries: Mapping[str, Entry],
    wanted: Mapping[str, frozenset[str]],
    target: Target,
    excluded: frozenset[str],
) -> dict[str, frozenset[str]]:
    """Every package the roots pull in, with the extras that somebody asked of it."""
    extras: dict[str, frozenset[str]] = {}
    queue = [(name, asked, "pyproject.toml") for name, asked in wanted.items()]
    while queue:
        name, asked, by = queue.pop()
        if name not in entries:
            raise RelockError(f"{name}, required by {by}, is not in the lock; run relock again")
        if name in extras and asked <= extras[name]:
            continue
        extras[name] = extras.get(name, frozenset()) | asked
        for dependency, spec in entries[name].get("dependencies", {}).items():
            child = canonicalize_name(dependency)
            if child in excluded:
                continue
            queue += [(child, _extras(one), name) for one in _live(spec, extras[name], target)]
    return extras


def _prune_entry(
    entry: Entry,
    extras: Mapping[str, frozenset[str]],
    target: Target,
    excluded: frozenset[str],
) -> Entry:
    own = extras[canonicalize_name(entry["name"])]
    kept: Entry = {
        key: value
        for key, value in entry.items()
        if key not in {"markers", "files", "dependencies", "extras", "source"}
    }
    kept["markers"] = target.marker
    kept["files"] = [best_wheel(entry, target)]
    dependencies = {}
    for name, spec in sorted(entry.get("dependencies", {}).items()):
        live = _live(spec, own, target)
        if live and canonicalize_name(name) not in excluded:
            dependencies[name] = _plain(live, own, target)
    if dependencies:
        kept["dependencies"] = dependencies
    active = {
        extra: required
        for extra, requirements in sorted(entry.get("extras", {}).items())
        if canonicalize_name(extra) in own
        and (required := _requirements(requirements, own, target, excluded))
    }
    if active:
        kept["extras"] = active
    return kept


def _requirements(
    lines: Iterable[str], own: frozenset[str], target: Target, excluded: frozenset[str]
) -> list[str]:
    """Return those lines of `[package.extras]` (`name[extra] (spec) ; marker`) that apply here.

    Without their markers: they hold.
    """
    split = [
        (head.strip(), marker.strip()) for head, _, marker in (s.partition(";") for s in lines)
    ]
    return sorted(
        {
            head
            for head, marker in split
            if canonicalize_name(Requirement(head).name) not in excluded
            and target.marker_holds(marker, own)
        }
    )


def _plain(live: list[dict[str, Any]], own: frozenset[str], target: Target) -> Any:
    """Return the alternatives that hold as Poetry writes them, one without a list.

    A marker that holds anyway is dropped; else it becomes the extras that make it hold.
    """
    specs: list[Any] = []
    for one in live:
        marker = one.get("markers", "")
        table = {key: value for key, value in one.items() if key not in {"markers", "optional"}}
        if not target.marker_holds(marker):
            asked = [extra for extra in sorted(own) if target.marker_holds(marker, (extra,))]
            table |= {
                "optional": True,
                "markers": " or ".join(f'extra == "{extra}"' for extra in asked),
            }
        spec = table["version"] if set(table) == {"version"} else table
        if spec not in specs:
            specs.append(spec)
    return specs[0] if len(specs) == 1 else specs
