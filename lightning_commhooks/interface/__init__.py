"""What a hook is."""
