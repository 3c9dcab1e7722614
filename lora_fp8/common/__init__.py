"""Small helpers that many packages need; they import nothing of ours but errors."""
