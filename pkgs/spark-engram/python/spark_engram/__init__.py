"""Engram tables of DeepSeek-V4.1 on local NVMe.

`layout` and `format` need nothing but Python; `pack` and `store` need the native core and
numpy; `plugin` needs the SGLang engine.
"""
