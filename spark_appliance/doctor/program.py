"""The text that travels to a node: modules of a package, loadable without any file there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

LAUNCHER = (
    # NixOS has no /usr/bin/python3; sudo's own PATH is often short
    "PATH=$PATH:/run/current-system/sw/bin:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin; "
    "export PATH; "
    "py=$(command -v python3) || { echo 'python3: not found' >&2; exit 127; }; "
    'if [ "$(id -u)" != 0 ] && command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; '
    'then exec sudo -n env "PATH=$PATH" "$py" -I -; fi; exec "$py" -I -'
)
"""Shell line that runs the program on standard input; as root where sudo asks for no password."""

PROBE_MODULES = ("core", "host", "network", "rdma", "gpu", "storage", "engine", "main")
DEEP_MODULES = ("core", "cuda", "measure", "deepmain")

_PACKAGES = ("spark_appliance", "spark_appliance.doctor", "spark_appliance.doctor.probe")

_LOADER = """\
import sys, types
for name in {packages!r}:
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = []
for name, text in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, leaf = name.rpartition('.')
    setattr(sys.modules[parent], leaf, module)
    exec(compile(text, name + '.py', 'exec'), module.__dict__)
import json
sys.modules[{last!r}].main(json.loads({request!r}))
"""


def program(modules: Sequence[str], request: Mapping[str, Any]) -> str:
    """Return a Python program that loads ``modules`` of the probe in order.

    The last one's ``main`` is called with the request.
    """
    folder = resources.files("spark_appliance.doctor.probe")
    package = _PACKAGES[-1]
    texts = [
        (f"{package}.{name}", folder.joinpath(f"{name}.py").read_text(encoding="utf-8"))
        for name in modules
    ]
    return _LOADER.format(
        packages=_PACKAGES,
        modules=texts,
        last=f"{package}.{modules[-1]}",
        request=json.dumps(request),
    )
