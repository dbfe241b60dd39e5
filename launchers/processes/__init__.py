"""How processes are started: by executing Python, or by forking a parent that has imported what they need."""
