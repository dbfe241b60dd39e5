"""Measurements that a training takes of itself, on some of its steps. They change nothing of what it computes.

Off, a step costs one look at the configuration. On, what is measured reaches the metrics as records of the kind
``probe``, and one step can be written as a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from optimus_cc.communication.gradient_sync import replace
from optimus_cc.phases import PHASES
from optimus_cc.training.probes import error_independence
from optimus_cc.training.probes.error_independence import ErrorIndependence
from optimus_cc.training.probes.memory import MemoryMeter, held_by_training
from optimus_cc.training.probes.place import Place
from optimus_cc.training.probes.spans import MegatronTimers, SpanRecorder, phase_times
from optimus_cc.training.probes.trace import ClockOffset, rank_events, write_trace

if TYPE_CHECKING:
    from optimus_cc.training.history import History
    from optimus_cc.training.loop import Trainer

Record = dict[str, Any]
T = TypeVar("T")


class Probes:
    """The probes of one training, as ``training.probes`` says.

    Args:
        trace_path: where rank 0 writes the trace.
    """

    def __init__(self, trainer: Trainer, trace_path: Path | None = None) -> None:
        self._trainer = trainer
        self._config = trainer.config.training.probes
        self._trace_path = trace_path

    @contextmanager
    def step(self, history: History, record: Callable[[Record], None]) -> Iterator[None]:
        """Around the trainer's next step. What is done before and after it does not count as training.

        Args:
            record: takes each record; called on every rank with the same values.
        """
        step = self._trainer.step + 1
        if self._config.measures_memory(step):
            measured = self._memory(step, history)
        elif self._config.measures_time(step) or self._config.measures_errors(step):
            measured = self._time_and_errors(step, history)
        else:
            yield
            return
        with measured as records:
            yield
        for values in records:
            record(values)
        history.resume()

    @contextmanager
    def _memory(self, step: int, history: History) -> Iterator[list[Record]]:
        trainer, records = self._trainer, list[Record]()
        history.pause()
        meter = MemoryMeter(trainer.backend, self._kept, held_by_training(trainer.model, trainer.optimizer))
        history.resume()
        with self._listening(spans=meter), meter.watching():
            yield records
            meter.finish()
        history.pause()
        for place, values in self._everyone(meter.result()):
            records.append({"kind": "probe", "probe": "memory", "step": step, **asdict(place), **values})

    @contextmanager
    def _time_and_errors(self, step: int, history: History) -> Iterator[list[Record]]:
        trainer, records = self._trainer, list[Record]()
        probe = trainer.attachment.probe
        recorder = errors = offset = None
        history.pause()
        if self._config.measures_errors(step):
            errors = ErrorIndependence(probe)
        if self._config.measures_time(step):
            recorder = SpanRecorder(trainer.backend)
        if step == self._config.trace_step:
            offset = ClockOffset.measure(trainer.backend)
        history.resume()
        with self._listening(spans=recorder, errors=errors):
            if recorder is not None:
                recorder.begin()
            yield records
            if recorder is not None:
                recorder.finish()
        history.pause()
        if recorder is not None:
            if self._config.measures_phases(step):
                records += self._phase_records(step, recorder)
            if offset is not None:
                self._write_trace(step, recorder, offset)
        if errors is not None:
            parallel = trainer.config.parallel
            shared_out = parallel.sequence_parallel or parallel.split_over_tensor_parallel
            records += error_independence.records(step, self._everyone(errors.sums()), shared_out)

    @contextmanager
    def _listening(
        self, spans: SpanRecorder | MemoryMeter | None = None, errors: ErrorIndependence | None = None
    ) -> Iterator[None]:
        """Let the plan, and for a recorder Megatron-core too, report to these."""
        trainer = self._trainer
        probe, transformer = trainer.attachment.probe, trainer.model[0].config
        with ExitStack() as restores:
            restores.callback(replace(probe, "spans", spans))
            restores.callback(replace(probe, "messages", errors))
            if isinstance(spans, SpanRecorder):
                restores.callback(replace(transformer, "timers", MegatronTimers(spans, trainer.config.schedule)))
                restores.callback(replace(trainer.optimizer, "get_grad_norm", self._grad_norm_in_a_span()))
            yield

    def _grad_norm_in_a_span(self) -> Callable[[], Any]:
        grad_norm, probe = self._trainer.optimizer.get_grad_norm, self._trainer.attachment.probe

        def get_grad_norm() -> Any:
            with probe.span("gradient_norm", "gradient norm"):
                return grad_norm()

        return get_grad_norm

    def _phase_records(self, step: int, recorder: SpanRecorder) -> list[Record]:
        times = phase_times(recorder.spans())
        records = []
        for place, seconds in self._everyone(times):
            step_time = sum(seconds.values())
            fractions = {phase: seconds[phase] / step_time for phase in PHASES}
            records.append(
                {
                    "kind": "probe",
                    "probe": "phases",
                    "step": step,
                    **asdict(place),
                    "step_time_s": step_time,
                    "fraction_of_step": fractions,
                }
            )
        return records

    def _write_trace(self, step: int, recorder: SpanRecorder, offset: ClockOffset) -> None:
        backend = self._trainer.backend
        mine = rank_events(Place.of_this_rank(), recorder.spans(), recorder.began + offset.seconds), offset.spread_s
        rows: list[Any] | None = [None] * backend.world_size if backend.rank == 0 else None
        dist.gather_object(mine, rows, dst=0, group=backend.control_group)
        if rows is not None and self._trace_path is not None:
            write_trace(self._trace_path, step, rows)

    def _kept(self) -> Iterator[torch.Tensor]:
        """Error memories and queries; counters are not worth a word."""
        state = self._trainer.attachment.state_dict()
        return (tensor for tensor in state.values() if tensor.is_floating_point())

    def _everyone(self, mine: T) -> list[tuple[Place, T]]:
        """What every rank gave, by rank; every rank must call."""
        return self._trainer.backend.everyone((Place.of_this_rank(), mine))
