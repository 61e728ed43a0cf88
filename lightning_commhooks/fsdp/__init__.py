"""Hooks at work on models that FSDP shards."""
