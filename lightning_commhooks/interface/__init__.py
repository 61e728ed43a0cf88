"""The interface of hooks."""
