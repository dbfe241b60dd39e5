"""A predicted step as a figure: a bar for all that each stage does."""

from __future__ import annotations

from pathlib import Path

from optimus_cc.config.errors import ConfigError, Problem
from optimus_cc.figures import own_style
from optimus_cc.simulation.step import StepTime
from optimus_cc.simulation.trace import COMPUTES

_COLOURS = {
    "forward": "#4c72b0",
    "backward": "#55a868",
    "send_forward": "#dd8452",
    "send_backward": "#c44e52",
    "encode": "#8172b3",
    "decode": "#8172b3",
    "codec": "#8172b3",
    "data_parallel": "#937860",
    "embedding": "#da8bc3",
    "optimizer": "#8c8c8c",
    "parameter_gather": "#64b5cd",
    "overhead": "#cccccc",
}
_LABELS = {
    "send_forward": "activations",
    "send_backward": "activation gradients",
    "encode": "codec",
    "decode": "codec",
    "data_parallel": "reduction of gradients",
    "embedding": "embedding synchronisation",
    "parameter_gather": "gather of parameters",
    "overhead": "other",
}
_HEIGHT = 0.4


def draw(path: Path, time: StepTime) -> None:
    """Draw ``time``, the same bytes whenever it is drawn: for each stage computation above and communication below,
    with dark edges on the critical path.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        with own_style():
            _draw(path, time)
    except ImportError:
        raise ConfigError(
            Problem("simulation.gantt", str(path), "null where matplotlib is missing", "pip install matplotlib")
        ) from None


def _draw(path: Path, time: StepTime) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    config = time.plan.config
    stages = config.parallel.pipeline_parallel_size
    figure = Figure(figsize=(12, 1.2 + 0.7 * stages))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars: dict[tuple[int, str, bool], list[tuple[float, float]]] = {}
    for event in time.events():
        if event.end_s > event.begin_s:
            key = (event.rank, event.kind, event.exposed)
            bars.setdefault(key, []).append((event.begin_s, event.end_s - event.begin_s))
    for (rank, kind, exposed), spans in bars.items():
        bottom = rank - _HEIGHT if kind in COMPUTES else rank
        axes.broken_barh(
            spans,
            (bottom, _HEIGHT),
            facecolors=_COLOURS[kind],
            edgecolors="black" if exposed else "white",
            linewidth=0.8 if exposed else 0.2,
            zorder=3 if exposed else 2,
        )
    axes.set_yticks(range(stages), [f"stage {rank}" for rank in range(stages)])
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_xlim(0, time.total_s)
    axes.set_xlabel("predicted time in the step (s)")
    title = f"{config.model.name}, {config.parallel.label}, {config.technique.label} on {config.cluster.name}"
    axes.set_title(f"{title}: {time.total_s:.2f} s a step, predicted")
    there = {_LABELS.get(kind, kind): _COLOURS[kind] for _, kind, _ in bars}
    handles = [Patch(color=colour, label=label) for label, colour in there.items()]
    handles.append(Patch(facecolor="white", edgecolor="black", label="critical path"))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.6 / (0.3 + 0.7 * stages)), ncols=6, fontsize=8
    )
    # Nothing of when or by which version it was drawn.
    metadata = (
        {"CreationDate": None, "Producer": None, "Creator": None} if path.suffix == ".pdf" else {"Software": None}
    )
    figure.savefig(path, bbox_inches="tight", dpi=150, metadata=metadata)
