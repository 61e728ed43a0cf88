"""Collectives, and their costs."""
