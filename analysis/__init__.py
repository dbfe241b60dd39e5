"""From run folders to tables."""
