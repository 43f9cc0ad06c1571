"""The engine side: needs torch, Triton and SGLang. Imported by `spark_engram.plugin` only."""
