"""The DGX OS adapter: a plan and a node become files, and nothing is decided here."""
