"""The one exception that the programs turn into a line on stderr."""


class AuditError(Exception):
    """An audit cannot run; the text says where and what to do."""
