"""From a cluster and its profile to the plan. Pure: no files, no clock, no environment."""

from spark_appliance.render.plan import Rendering, render

__all__ = ["Rendering", "render"]
