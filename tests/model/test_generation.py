from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.errors import StartupError
from server.model.generation import GenerationConfig, read_generation_config
from server.request import SamplingDefaults


def read(folder: Path | None, **options: Any) -> GenerationConfig:
    settings: dict[str, Any] = {"source": "auto", "override": None, "config": {}}
    return read_generation_config(folder, **{**settings, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As MiMo-V2.5 publishes it: sampling with a contradictory do_sample, several end ids."""
    published = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "do_sample": False, "eos_token_id": [7, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    return tmp_path


def test_the_models_own_recommendation_is_the_default(folder: Path) -> None:
    found = read(folder)
    assert found.sampling == SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20)
    assert found.end_token_ids == {7, 9}


def test_a_model_without_one_gets_the_defaults_of_openai(tmp_path: Path) -> None:
    assert read(tmp_path).sampling == read(None).sampling == SamplingDefaults()


@pytest.mark.parametrize("source", ["none", "vllm"])
def test_recommendations_can_be_turned_off_but_end_ids_stay(folder: Path, source: str) -> None:
    found = read(folder, source=source, config={"eos_token_id": 3})
    assert found.sampling == SamplingDefaults()
    assert found.end_token_ids == {3, 7, 9}


def test_another_folder_and_an_override_win_in_this_order(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text('{"temperature": 0.3, "min_p": 0.1}')
    found = read(folder, source=str(other), override='{"temperature": 0.7}')
    assert found.sampling == SamplingDefaults(temperature=0.7, min_p=0.1)


def test_top_k_of_minus_1_is_no_limit(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": -1}')
    assert read(folder).sampling.top_k == 0
    assert read(folder, override='{"top_k": 3}').sampling.top_k == 3
    assert read(folder, override='{"top_k": -1}').sampling.top_k == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"source": "no/such/folder"}, "neither auto, none, vllm nor a folder"),
        ({"override": "{"}, "is not JSON"),
        ({"override": "[]"}, "must be a JSON object"),
        ({"override": '{"temprature": 1}'}, "temprature cannot be set"),
        ({"override": '{"temperature": 9}'}, "temperature is 9"),
        ({"override": '{"temperature": "hot"}'}, "temperature is 'hot'"),
        ({"override": '{"top_p": true}'}, "top_p is True"),
        ({"override": '{"top_k": 2.5}'}, "top_k is 2.5"),
        ({"override": '{"top_k": -2}'}, "top_k is -2"),
        ({"override": '{"temperature": -1}'}, "temperature is -1"),
        ({"override": '{"temperature": NaN}'}, "temperature is nan"),
        ({"override": '{"top_k": Infinity}'}, "top_k is inf"),
    ],
)
def test_what_makes_no_sense_is_said(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        read(folder, **options)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"generation_config\.json cannot be read"):
        read(tmp_path)


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(StartupError, match=r"generation_config\.json is not a JSON object"):
        read(tmp_path)
