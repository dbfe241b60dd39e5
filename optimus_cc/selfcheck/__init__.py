"""``task=selfcheck``: whether what the numbers stand on holds on this machine, with this backend and layout."""
