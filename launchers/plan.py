"""What running some configurations would mean, read from the folders that are there. Writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launchers.slurm import view
from optimus_cc import checkpoints
from optimus_cc.claims import check_same_experiment, folder_of
from optimus_cc.config import RunConfig
from optimus_cc.runs import RunConflict, RunFolder

Action = Literal["start", "resume", "finished", "elsewhere", "twice", "refused"]

_SAID = {
    "start": "{} start",
    "resume": "{} go on from a checkpoint",
    "finished": "{} finished already",
    "elsewhere": "{} run elsewhere",
    "twice": "{} asked for twice",
    "refused": "{} can't run",
}


@dataclass(frozen=True)
class Planned:
    """One run of a submission, and what would happen to it now."""

    config: RunConfig
    folder: RunFolder
    action: Action
    step: int = 0
    """That of the checkpoint from which it goes on."""
    remark: str = ""

    @property
    def runs(self) -> bool:
        """Whether this submission computes it."""
        return self.action in ("start", "resume")

    @property
    def what(self) -> str:
        return f"resume from step {self.step}" if self.action == "resume" else self.action

    @property
    def remaining_steps(self) -> int:
        return max(0, self.config.training.steps - self.step) if self.runs else 0

    def __str__(self) -> str:
        remark = f"  ({self.remark})" if self.remark else ""
        return f"{self.what:<9}  {self.folder.run_id}{remark}"


def plan(configs: Sequence[RunConfig]) -> list[Planned]:
    """What would happen to each of ``configs`` if they were run now, in their order."""
    found: list[Planned] = []
    first: dict[Path, int] = {}
    folders = [folder_of(config) for config in configs]
    over = view.over(folders)
    for number, (config, folder) in enumerate(zip(configs, folders, strict=True), start=1):
        earlier = first.setdefault(folder.path, number)
        if earlier != number:
            found.append(Planned(config, folder, "twice", remark=f"it is the same run as number {earlier}"))
        else:
            found.append(_planned(config, folder, over.get(folder.path)))
    return found


def count(planned: Sequence[Planned]) -> str:
    """``2 start, 1 finished already``."""
    counts: Counter[str] = Counter(one.action for one in planned)
    return ", ".join(text.format(counts[action]) for action, text in _SAID.items() if counts[action])


def _planned(config: RunConfig, folder: RunFolder, over: str | None) -> Planned:
    """``over``: why nobody runs it or is going to, if its folder says otherwise."""
    try:
        check_same_experiment(folder, config)
    except RunConflict as conflict:
        return Planned(config, folder, "refused", remark=conflict.cause)
    status = folder.status()
    if status is not None and status.state == "finished":
        if not config.force:
            return Planned(config, folder, "finished")
        return Planned(config, folder, "start", remark="force=true: the results that are there are kept in previous/")
    if status is not None and status.state == "running" and not status.abandoned and over is None:
        return Planned(config, folder, "elsewhere", remark=status.owner)
    remark = ""
    if over is not None and status is not None and status.state in ("running", "queued"):
        remark = over
    elif status is not None and status.waits_for_another:
        remark = f"queued by {status.owner} too; whoever comes first runs it"
    elif status is not None and status.state != "queued" and not status.never_began:
        remark = status.how_it_ended
    last = checkpoints.newest(folder.checkpoints)
    if last is not None:
        return Planned(config, folder, "resume", last.step, remark)
    return Planned(config, folder, "start", remark=remark)
