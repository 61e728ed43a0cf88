"""Hooks: what they are asked and told."""
