"""One cluster file in, one checked plan for every DGX Spark out."""

__version__ = "0.1.0"
