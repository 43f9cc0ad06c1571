"""The programs that run on every Spark: ``spark-node --plan FILE --node NAME COMMAND``.

Standard library only, Python 3.11 or newer: DGX OS brings a Python but none of our dependencies.
Nothing here may import another part of ``spark_appliance`` except ``spark_appliance.names``.
"""
