"""Take the API key out of what the engine prints.

sglang 0.5.23 logs its whole configuration at the start, the key in clear text included
(srt/entrypoints/engine.py:1185), and returns it from /server_info.
"""

from __future__ import annotations

import re

# a closing quote or bracket may be cut off
_STRING = r"""'(?:[^'\\\n]|\\.)*'?|"(?:[^"\\\n]|\\.)*"?"""
_LIST = rf"""\[(?:{_STRING}|[^\]'"])*\]?"""
_NAMED = re.compile(
    r"""((?:admin_)?api[_-]?keys?['"]?\s*[:=]\s*(?:Some\(\s*)?)"""
    rf"""(?:{_STRING}|{_LIST}|(?!None\b)(?:[^\s,'"}})\\]|\\.)+)"""
)
_OPTION = re.compile(
    rf"""(--(?:admin-)?api-key(?:['"]?\s*,\s*|[=\s]+))"""
    rf"""(?:{_STRING}|(?!None\b)(?:[^\s'",\\]|\\.)+)"""
)
_BEARER = re.compile(r"(Bearer\s+)[A-Za-z0-9._~+/=-]+")


def redact(text: str) -> str:
    """Return text with the values of keys replaced by ``***``."""
    text = _NAMED.sub(r"\1***", text)
    text = _OPTION.sub(r"\1***", text)
    return _BEARER.sub(r"\1***", text)
