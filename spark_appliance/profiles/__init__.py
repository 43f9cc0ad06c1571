"""The bundled profiles and how a profile is found by name or by path."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from spark_appliance.errors import InputError
from spark_appliance.files import read_bounded
from spark_appliance.model.facts import MODELS, ModelFacts
from spark_appliance.model.profile import Profile, read_profile
from spark_appliance.model.yamlfile import MAX_BYTES, Document, parse


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """A profile, the sizes of its model and the sha256 of its content (not of its comments).

    ``document`` is where its values stand; None for a bundled one, which nobody edits.
    """

    profile: Profile
    facts: ModelFacts
    sha256: str
    document: Document | None


def bundled_names() -> list[str]:
    """Return the names of the bundled profiles, sorted."""
    folder = resources.files(__name__) / "data"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_profile(name: str, base: Path) -> LoadedProfile:
    """Load a bundled profile by name, or a file by path (any name with a '/').

    ``base`` is the folder that a relative path starts from: the cluster file's.

    Raises:
        InputError: for an unknown name, an unreadable file or a bad profile.
    """
    if "/" in name:
        path = base / name
        document = parse(str(path), read_bounded(path, MAX_BYTES))
    else:
        if name not in bundled_names():
            raise InputError.one(
                "profile.unknown",
                f"there is no profile {name!r}",
                f"use one of {', '.join(bundled_names())}, or a path such as ./my-profile.yaml",
            )
        raw = (resources.files(__name__) / "data" / f"{name}.yaml").read_bytes()
        return replace(_resolve(parse(f"profile {name}", raw)), document=None)
    loaded = _resolve(document)
    if loaded.profile.name in bundled_names():
        raise InputError.one(
            "profile.name-taken",
            f"{loaded.profile.name} is the name of a bundled profile",
            "give your profile a name of its own",
            document.locate(("name",)),
        )
    return loaded


def _resolve(document: Document) -> LoadedProfile:
    profile, findings = read_profile(document.data)
    if profile is None:
        raise InputError([document.problem(finding) for finding in findings])
    if isinstance(profile.model, str):
        if profile.model not in MODELS:
            raise InputError.one(
                "profile.unknown-model",
                f"the sizes of model {profile.model!r} are not known",
                f"use one of {', '.join(sorted(MODELS))}, or give its sizes (see the profile "
                "single-dev)",
                document.locate(("model",)),
            )
        facts = MODELS[profile.model]
    else:
        plain = profile.model
        facts = ModelFacts(
            name=plain.name,
            heads=plain.heads,
            max_context=plain.max_context,
            dense_bytes=plain.weights_bytes,
            kv_bytes_per_token=float(plain.kv_bytes_per_token),
            kv_sharded=True,
        )
    canonical = json.dumps(profile.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return LoadedProfile(profile, facts, hashlib.sha256(canonical.encode()).hexdigest(), document)


__all__ = ["LoadedProfile", "bundled_names", "load_profile"]
