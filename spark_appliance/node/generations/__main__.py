"""``python3 -m spark_appliance.node.generations COMMAND``: what the control machine calls."""

from spark_appliance.node.generations.cli import main

main()
