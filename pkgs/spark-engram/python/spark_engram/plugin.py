"""Entry point of the SGLang plugin (group ``sglang.srt.plugins``, name ``spark_engram``).

Without ``SPARK_ENGRAM_DIR`` it does nothing. With it, SGLang's ``EngramEmbedding`` is replaced
by one that reads packed files. SGLang logs a plugin's exception and starts without it, so the
first thing done here is to make the original class refuse: whatever goes wrong afterwards, the
engine cannot come up with the tables in memory.
"""

from __future__ import annotations

import logging
import os

from spark_engram.check import FOLDER_VARIABLE
from spark_engram.errors import EngramError

logger = logging.getLogger(__name__)

_ENGINE = "sglang.srt.layers.engram"


def register() -> None:
    """Install the hooks if ``SPARK_ENGRAM_DIR`` is set."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder:
        logger.info("%s is not set: Engram tables stay where SGLang puts them", FOLDER_VARIABLE)
        return
    from sglang.srt.layers import engram

    _refuse_original(engram.EngramEmbedding)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from spark_engram.engine.embedding import PackedEngramEmbedding
    from spark_engram.engine.prefetch import note_hash_index, start_after_hash

    HookRegistry.register(f"{_ENGINE}.EngramEmbedding", PackedEngramEmbedding, HookType.REPLACE)
    HookRegistry.register(f"{_ENGINE}.Engram.__init__", note_hash_index, HookType.AFTER)
    HookRegistry.register(f"{_ENGINE}.EngramHasher.forward", start_after_hash, HookType.AFTER)
    logger.info("Engram tables will be read from %s", folder)


def _refuse_original(original: type) -> None:
    def refuse(self: object, *_arguments: object, **_named: object) -> None:
        raise EngramError(
            f"{FOLDER_VARIABLE} is set but {type(self).__name__} was not replaced by the "
            "spark_engram plugin; look for the plugin's error earlier in this log"
        )

    original.__init__ = refuse  # type: ignore[misc]
