"""How a run reaches processes: on this machine."""
