"""The cluster file and the plan as typed data. Nothing here reads or writes files."""
