"""Random trials of what a user, a machine or a disk may do to runs and to the command line: ``make soak``."""
