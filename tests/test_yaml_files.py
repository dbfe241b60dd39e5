"""What is written as YAML is read back as it was, by whoever reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from optimus_cc.claims import write_origin
from optimus_cc.config import RunConfig, of_run
from optimus_cc.provenance import CodeVersion
from optimus_cc.runs import RunFolder
from optimus_cc.training import corpus
from optimus_cc.yaml_files import from_yaml, read_yaml, to_yaml, unreferring
from tests.config.command_line import one

TEXTS = st.one_of(
    st.text(),
    st.text(alphabet="0123456789eE+-._:oxXinfNa~ ", max_size=8),
    st.text(alphabet="\\${}x.:'\" a", max_size=9),
    st.sampled_from(["695e0514", "1e3", "0x10", "0o17", "null", "NA", "yes", "${x}", "\\${x}", "<<", "2020-01-01"]),
)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_a_text_is_the_same_to_every_reader(text: str) -> None:
    written = to_yaml({"a": {"b": text, text: 1e-5}})
    expected = {"a": {"b": text, text: 1e-5}}
    assert from_yaml(written) == expected
    assert yaml.safe_load(written) == expected
    composed = OmegaConf.create(to_yaml(unreferring({"a": {"b": text}})))
    assert OmegaConf.to_container(composed, resolve=True) == {"a": {"b": text}}


def test_what_was_typed_is_what_every_reader_of_a_run_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    file.touch()
    typed = one(
        f"data=jsonl data.path={file} 'data.label=\"695e0514\"' 'data.text_key=\"\\${{x}}\"' runs_dir={tmp_path}"
    )
    assert (getattr(typed.data, "label", ""), getattr(typed.data, "text_key", "")) == ("695e0514", "${x}")
    folder = RunFolder(tmp_path / typed.run_id)
    folder.path.mkdir()
    write_origin(folder, typed, CodeVersion(commit=None, dirty=False, diff=""))
    prepared: list[RunConfig] = []

    def prepare(config: RunConfig, report: Any) -> None:
        prepared.append(config)

    monkeypatch.setattr(corpus, "prepare", prepare)
    assert corpus.main([str(folder.config_path)]) == 0
    assert prepared == [typed]
    assert folder.run_config() == typed
    assert folder.run_config().run_id == typed.run_id
    asked = {"run": typed.run_id, "runs_dir": str(tmp_path), "task": {"name": "evaluate"}}
    assert of_run.applied(asked, [])["data"] == typed.to_mapping()["data"]


def test_what_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
        for before, name in zip("abcdefg", "bcdefgh", strict=True)
    )
    for content in ("a: [", "[1]", "a: &a [*a]", bomb, "a: {<<: {b: 1}}", "[" * 20_000):
        path.write_text(content)
        with pytest.raises(ValueError, match=r".+"):
            read_yaml(path)
        assert RunFolder(tmp_path).config() is None
    path.unlink()
    os.mkfifo(path)
    assert RunFolder(tmp_path).config() is None
