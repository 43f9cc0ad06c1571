"""Turn pydantic's errors into findings that name the key, what it should be and a remedy."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from spark_appliance.model.findings import Finding, Path


def findings_of(error: ValidationError, root: type[BaseModel]) -> list[Finding]:
    """Return one finding for each place that ``error`` names, in the order of the file's schema."""
    findings: dict[tuple[Path, str], Finding] = {}
    for detail in error.errors():
        finding = _finding(detail, root)
        # a union reports every member; the first says enough for one place
        findings.setdefault((finding.path, finding.rule), finding)
    return list(findings.values())


def _finding(detail: Any, root: type[BaseModel]) -> Finding:
    path, is_key = _clean(detail["loc"])
    kind = detail["type"]
    name = _name(path)
    value = detail["input"]
    if kind == "extra_forbidden":
        known = _known_keys(root, path[:-1])
        close = difflib.get_close_matches(str(path[-1]), known, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return Finding("schema.unknown-key", path, f"unknown key {name}", remedy)
    if kind == "missing":
        return Finding("schema.missing", path, f"{name} is missing", f"add {name}")
    if value is None and kind in {"model_type", "model_attributes_type", "dict_type", "list_type"}:
        remedy = "remove the line, or indent keys below it"
        return Finding("schema.type", path, f"{name} is empty", remedy)
    if kind.endswith("_type") or kind in {"bool_parsing", "int_parsing", "int_from_float"}:
        message = f"{name} is {_kind(value)}; {_lower(detail['msg'])}"
        remedy = "give a value of that type"
        if isinstance(value, list | dict) and len(path) < len(detail["loc"]):
            message = f"{name} is {_kind(value)}; it should be text, a number, true or false"
        elif kind == "string_type" and not isinstance(value, list | dict):
            remedy = "put it in quotes" if value is not None else f"give {name} a value"
        return Finding("schema.type", path, message, remedy)
    shown = "" if isinstance(value, dict | list) else f" {value!r}"
    subject = "the name" if is_key else name
    message = f"{subject}{shown}: {_lower(detail['msg'].removeprefix('Value error, '))}"
    return Finding("schema.value", path, message, _remedy(detail))


def _clean(loc: tuple[str | int, ...]) -> tuple[Path, bool]:
    """Drop the parts that pydantic adds for keys and for members of a union."""
    is_key = bool(loc) and loc[-1] == "[key]"
    parts = list(loc[:-1] if is_key else loc)
    while (
        len(parts) > 1
        and isinstance(parts[-1], str)
        and parts[-1] in {"str", "int", "float", "bool", "constrained-str", "none"}
        and not is_key
    ):
        parts.pop()
    while parts and isinstance(parts[-1], str) and parts[-1].startswith("function-"):
        parts.pop()
    return tuple(parts), is_key


def _known_keys(model: type[BaseModel], path: Path) -> list[str]:
    current: type[BaseModel] | None = model
    for part in path:
        if current is None:
            return []
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        current = _model_in(field.annotation) if field else None
    return sorted(current.model_fields) if current else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found:
            return found
    return None


def _name(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def _kind(value: Any) -> str:
    names = {bool: "true/false", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "a mapping", type(None): "empty"}
    return names.get(type(value), type(value).__name__)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _remedy(detail: Any) -> str:
    context = detail.get("ctx", {})
    if "expected" in context:
        return f"use one of {context['expected']}"
    if "pattern" in context:
        return f"match the pattern {context['pattern']}"
    limits = [f"{sign} {context[key]}" for key, sign in _LIMITS if key in context]
    return f"give a value {' and '.join(limits)}" if limits else "see: spark-appliance schema"


_LIMITS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
