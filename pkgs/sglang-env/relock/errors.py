"""The one exception that the programs turn into a line on stderr."""


class RelockError(Exception):
    """A lock cannot be made or is not right; the text says where and what to do."""
