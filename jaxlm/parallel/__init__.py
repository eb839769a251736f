"""Meshes, the table of sharding rules, and the start of several processes."""
