"""What ranks send, and what it costs."""
