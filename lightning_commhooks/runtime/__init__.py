"""Hooks at work on buckets, wherever they come from."""
