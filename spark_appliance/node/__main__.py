"""``python -m spark_appliance.node`` is the console script ``spark-node``."""

from spark_appliance.node.cli import main

main()
