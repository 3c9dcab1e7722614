"""Everything known before a weight is loaded."""
