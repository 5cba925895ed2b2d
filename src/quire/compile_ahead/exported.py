"""Exported kernels: what `quire warmup --export` compiled, in a folder from which servers load it.

The folder has one for each version of Triton and each target, such as `triton-3.9.0-sm90`. In there are the files that
Triton's cache has of each kernel, without intermediate code, and the libraries that Triton builds to launch kernels,
each compressed. `manifest.json` says for what they were made, and has their hashes.

To load them is to put them into Triton's cache. Triton finds a kernel there by a hash of all that it was compiled from,
so it never takes another one. A library has Python's ABI in its name, and is left out where that differs.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import sysconfig
import tempfile
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from quire.compile_ahead.processes import target_of
from quire.dispatch.device import COMPILER_OPTIONS, interprets
from quire.errors import describe
from quire.version import __version__

VARIABLE = "QUIRE_KERNELS"  # names the folder that a warm-up loads
MANIFEST = "manifest.json"
UNFIT = OSError, ValueError, EOFError, zlib.error  # what `load_for` raises
KEPT = ".cubin", ".hsaco", ".json", ".so"
PLACE = re.compile(r"[A-Z2-7]+/\w[\w.-]*")  # of a file in Triton's cache
EXPORT = "export the kernels with `quire warmup --export`, with the server's Triton and its environment"


def folder_of(kernels: Any) -> Path | None:
    """Return the folder that a user names, in a call or by the environment; None if there is none."""
    if kernels is None:
        return Path(named) if (named := os.environ.get(VARIABLE)) else None
    if not isinstance(kernels, str | os.PathLike):
        raise TypeError(f"kernels must be a path, got {describe(kernels)}; pass what `quire warmup --export` was given")
    return Path(kernels)


def load(folder: Path | None, device: Any) -> None:
    """Load the kernels for a device before a warm-up. If they are not fit, warn: a server must start without them."""
    if folder is not None and not interprets():
        try:
            load_for(folder, target_of(device))
        except UNFIT as error:
            warnings.warn(f"{error}. Until then, the warm-up compiles them.", stacklevel=3)


def load_for(folder: Path, target: Any) -> dict[str, Any]:
    """Put a target's kernels into Triton's cache, but for those that it has; return the manifest.

    Raises:
        ValueError: there are none for this Triton, Quire and target, or a file is not the one that was exported.
        OSError: a file cannot be read, or the cache cannot be written.
    """
    from quire.triton_internals import is_cached, put_into_cache

    here = folder / name_for(target)
    manifest = read_manifest(here)
    for name, value in facts(target).items():
        if (found := manifest.get(name)) != value:
            raise ValueError(f"{here} must be made with {name} {shown(value)}, got {shown(found)}; {EXPORT}")
    new: dict[str, dict[str, bytes]] = {}
    for place, digest in manifest["files"].items():
        if not PLACE.fullmatch(place):
            raise ValueError(f"{here / MANIFEST} must name files of Triton's cache, got {place!r}; {EXPORT}")
        key, name = place.split("/")
        is_foreign = name.endswith(".so") and not name.endswith(str(sysconfig.get_config_var("EXT_SUFFIX")))
        if is_foreign or is_cached(key, name):
            continue
        packed = (here / f"{place}.gz").read_bytes()
        if hashlib.sha256(packed).hexdigest() != digest:
            raise ValueError(f"{here / place}.gz must have the hash in {MANIFEST}, got another file; {EXPORT}")
        new.setdefault(key, {})[name] = gzip.decompress(packed)
    for key, files in new.items():
        put_into_cache(key, files)
    return manifest


def read_manifest(here: Path) -> dict[str, Any]:
    """Read the manifest of a target's kernels."""
    if not (here / MANIFEST).is_file():
        others = ", ".join(sorted(path.parent.name for path in here.parent.glob(f"*/{MANIFEST}")))
        raise ValueError(f"{here.parent} must have kernels in {here.name}, got {others or 'none'}; {EXPORT}")
    manifest = json.loads((here / MANIFEST).read_text())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{here / MANIFEST} must list files, got something else; {EXPORT}")
    return manifest


def write(folder: Path, target: Any, made_for: list[str]) -> tuple[Path, int, int]:
    """Export all that Triton's cache has; return the folder, and how many kernels and bytes are in it.

    Args:
        folder: into which `name_for(target)` is written. One that is there is replaced.
        target: of the kernels in the cache.
        made_for: the warm-ups in words, for who reads the manifest.
    """
    from quire.triton_internals import cache_folder

    files: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made, here = Path(temporary) / "made", folder / name_for(target)
        made.mkdir()
        for path in sorted(cache_folder().glob("*/*")):
            place = path.relative_to(cache_folder()).as_posix()
            if path.suffix in KEPT and not path.name.startswith("__grp__"):
                packed = gzip.compress(path.read_bytes(), mtime=0)
                files[place] = hashlib.sha256(packed).hexdigest()
                (made / place).parent.mkdir(exist_ok=True)
                (made / f"{place}.gz").write_bytes(packed)
        manifest = facts(target) | {"made for": made_for, "files": files}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        if here.exists():
            shutil.rmtree(here)
        made.rename(here)
    return here, sum(place.endswith(".json") for place in files), size


def name_for(target: Any) -> str:
    """Return the name of the folder for this Triton and a target."""
    import triton

    return f"triton-{triton.__version__}-{f'sm{target.arch}' if target.backend == 'cuda' else target.arch}"


def facts(target: Any) -> dict[str, Any]:
    """Return by name what must be the same where kernels are exported and loaded."""
    from quire.triton_internals import compiler_facts

    return compiler_facts(target, COMPILER_OPTIONS) | {"Quire": __version__, "Quire's kernels": hash_of_kernels()}


@cache
def hash_of_kernels() -> str:
    """Return a hash of the sources of Quire's kernels."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[1] / "kernels"
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def shown(value: Any) -> str:
    """Return a fact in a few words."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}…"
