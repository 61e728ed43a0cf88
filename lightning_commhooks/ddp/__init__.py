"""Hooks at work on `DistributedDataParallel`."""
