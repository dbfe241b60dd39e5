"""Where a rank is in the layout, as records of it say."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class Place:
    rank: int
    stage: int
    data_parallel_rank: int
    tensor_parallel_rank: int

    @classmethod
    def of_this_rank(cls) -> Place:
        return cls(
            rank=dist.get_rank(),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        )

    @property
    def sort_index(self) -> int:
        """Puts the stages of one replica below each other."""
        tensor_parallel_size: int = parallel_state.get_tensor_model_parallel_world_size()
        stages: int = parallel_state.get_pipeline_model_parallel_world_size()
        return (self.data_parallel_rank * tensor_parallel_size + self.tensor_parallel_rank) * stages + self.stage
