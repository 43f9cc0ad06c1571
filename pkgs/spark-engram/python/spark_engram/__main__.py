"""``python -m spark_engram``."""

import sys

from spark_engram.cli import main

sys.exit(main())
