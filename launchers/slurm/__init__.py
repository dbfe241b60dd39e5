"""Runs as jobs of SLURM.

``submit`` puts them into the queue, ``job`` is what a job runs on its first node, ``node`` what it runs on each of its
nodes, ``view`` how jobs stand for ``python -m launchers``.
"""
