"""Start-up and render time of the command line, as ratios against a bare interpreter.

    python benchmarks/cli.py [--runs N]

Every figure is the median over interleaved runs of whole processes; the reference, ``python -c
pass`` of the same interpreter, runs in the same loop, so the ratio holds on a loaded machine.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = ROOT / "examples" / "four-spark-ring" / "cluster.yaml"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        shutil.copy(LARGEST, cluster)
        script = Path(sys.executable).with_name("spark-appliance")
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "--help": [str(script), "--help"],
            "check": [str(script), "check", "--quiet", str(cluster)],
            "render": [str(script), "render", str(cluster)],
        }
        samples: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(runs + 1):
            for name, command in commands.items():
                begin = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                if number:  # the first round warms the file cache
                    samples[name].append(time.perf_counter() - begin)
    reference = statistics.median(samples["python -c pass"])
    print(f"{'command':<16}{'median ms':>10}{'min':>8}{'max':>8}{'ratio':>8}")
    for name, values in samples.items():
        median = statistics.median(values)
        print(
            f"{name:<16}{median * 1e3:>10.0f}{min(values) * 1e3:>8.0f}{max(values) * 1e3:>8.0f}"
            f"{median / reference:>8.1f}"
        )


if __name__ == "__main__":
    main()
