"""The exported folder, loaded by transformers, computes what Megatron-core's model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc import checkpoints
from optimus_cc.config import RunConfig
from optimus_cc.training.tokenizer import Tokenizer
from tests.configurations import SEQUENCE, tiny
from tests.evaluation.scores import save, whole_logits
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["what is written here", "and what was written there"], 300)


def _with_large_weights(config: RunConfig, folder: Path) -> None:
    """A checkpoint in which every parameter counts: biases and norms too are random."""
    from megatron.core import parallel_state

    from optimus_cc.training import loop
    from optimus_cc.training.checkpoint import Checkpoints
    from tests.training_runs import backend_in_world

    backend = backend_in_world(config)
    trainer = loop.Trainer.build(config, backend, 1024)
    generator = torch.Generator().manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    with torch.no_grad():
        for chunk in trainer.model:
            for name, parameter in chunk.named_parameters():
                if "word_embeddings" not in name:  # which two stages share
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    Checkpoints(config, folder, backend).save(trainer, {})


def _exported(config: RunConfig, checkpoint_folder: Path, tokenizer: Tokenizer, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from optimus_cc.evaluation import export

    found = checkpoints.newest(checkpoint_folder)
    assert found is not None
    model = export.huggingface_model(config.model, export.read_weights(found), tokenizer)
    folder.mkdir()
    export._write(model, tokenizer, config, folder)
    return AutoModelForCausalLM.from_pretrained(folder).double()


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("single", {}),
        ("pp2_v2_overlap", {}),
        ("single", {"position_embedding": "rope", "ffn_hidden_size": 48}),
        ("single", {"tied_embeddings": False}),
        ("single", {"position_embedding": "rope", "tied_embeddings": False}),
    ],
)
def test_logits_agree(
    ranks: RankPool, tmp_path: Path, tokenizer: Tokenizer, layout: str, settings: dict[str, Any]
) -> None:
    config = tiny(layout, model=settings)
    ranks.run(config.parallel.world_size, _with_large_weights, config, tmp_path / "checkpoints")
    rows = torch.randint(tokenizer.vocabulary_size, (2, SEQUENCE), generator=torch.Generator().manual_seed(1)).tolist()
    (ours,) = ranks.run(1, whole_logits, tiny("single", model=settings), tmp_path / "checkpoints", rows)
    model = _exported(config, tmp_path / "checkpoints", tokenizer, tmp_path / "exported")
    with torch.no_grad():
        theirs = model(torch.tensor(rows)).logits
    assert theirs.shape[-1] == tokenizer.vocabulary_size
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[:, : tokenizer.vocabulary_size].std() > 0.05, "nothing to compare"
        torch.testing.assert_close(other, mine[:, : tokenizer.vocabulary_size], atol=1e-5, rtol=0)


def test_bf16_stays_bf16(ranks: RankPool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    from optimus_cc.evaluation import export

    config = tiny("single", precision="bf16")
    ranks.run(1, save, config, tmp_path)
    found = checkpoints.newest(tmp_path)
    assert found is not None
    weights = export.read_weights(found)
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert export.huggingface_model(config.model, weights, tokenizer).dtype == torch.bfloat16


def test_the_tokenizer_and_generation_settings_travel_along(
    ranks: RankPool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    config = tiny("single")
    ranks.run(1, save, config, tmp_path / "checkpoints")
    _exported(config, tmp_path / "checkpoints", tokenizer, tmp_path / "exported")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "what was\n written  héré <|endoftext"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_of_document
    assert theirs.model_max_length == SEQUENCE
    assert GenerationConfig.from_pretrained(tmp_path / "exported").eos_token_id == tokenizer.end_of_document


def test_a_damaged_checkpoint_is_not_exported(ranks: RankPool, tmp_path: Path) -> None:
    from optimus_cc.evaluation import export
    from optimus_cc.runs import RunFailed

    ranks.run(1, save, tiny("single"), tmp_path)
    found = checkpoints.newest(tmp_path)
    assert found is not None
    part = next(found.path.glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(RunFailed, match=f"{part.name} is damaged"):
        export.read_weights(found)
