"""From nodes and cables to rails: which netdev has which address and whom it reaches."""

from spark_appliance.topology.addressing import Fabric, Rail
from spark_appliance.topology.build import build_fabric
from spark_appliance.topology.cabling import Cable, End

__all__ = ["Cable", "End", "Fabric", "Rail", "build_fabric"]
