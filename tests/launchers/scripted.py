"""``python -m tests.launchers.scripted SCRIPT``: a rank that runs a script, executed or forked."""

import sys

if __name__ == "__main__":
    exec(compile(sys.argv[1], "<script>", "exec"), {"__name__": "__main__"})
