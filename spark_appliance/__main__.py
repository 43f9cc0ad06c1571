"""``python -m spark_appliance`` is the console script."""

from spark_appliance.cli import main

main()
