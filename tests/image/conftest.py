from __future__ import annotations

import pytest

pytest.importorskip("installer", reason="needs the image extra: installer")
pytest.importorskip("debian.debfile", reason="needs the image extra: python-debian")
pytest.importorskip("elftools", reason="needs the image extra: pyelftools")
pytest.importorskip("cyclonedx", reason="needs the image extra: cyclonedx-python-lib")
