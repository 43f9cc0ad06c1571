"""``supervise``: ranks live and die together. The protocol is described in docs/supervisor.md."""
