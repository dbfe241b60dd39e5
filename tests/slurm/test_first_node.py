"""The death of the node on which a job's own process runs: nobody is left who could put the run back into the queue."""

from __future__ import annotations

from optimus_cc.runs import RunFolder
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Sweeps, ranks_of, state, until


def test_the_first_node_dies(sweeps: Sweeps, cluster: Cluster) -> None:
    config = sweeps.config(1, {"steps": 600, "step_s": 0.1})
    follower = sweeps.start(config)
    folder = sweeps.folder(config)
    until(lambda: (status := folder.status()) is not None and status.state == "running" and status.step, "it trains")
    first = folder.status()
    assert first is not None
    assert first.host is not None
    cluster.kill_node(first.host)
    until(lambda: (status := folder.status()) is not None and status.restarts == 1, "it goes on elsewhere")
    until(lambda: state(folder) == "running" and len(ranks_of(folder.logs)) == 2, "its ranks run")
    assert first.host not in {rank["host"] for rank in ranks_of(folder.logs)}
    lost = RunFolder(folder.path / "attempts" / "1").status()
    assert lost is not None
    assert lost.state == "running"  # as it was left
    cluster.start_node(first.host)
    cluster.run("scancel", "--user=root")
    assert follower.wait() == 130
