"""The last line of the program that measures."""

from __future__ import annotations

import json
import sys
from typing import Any, Mapping

from spark_appliance.doctor.probe import measure
from spark_appliance.doctor.probe.core import Machine, answer


def main(request: Mapping[str, Any]) -> None:
    """Measure, and print the document on one line."""
    sections = [("dfping", measure.dfping, 90.0), ("gpu_load", measure.gpu_load, 60.0)]
    document = answer(Machine(request.get("root", "/")), request, sections, 90.0)
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
