"""Distributions written by hand, so that nothing has to be fetched or built."""

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def wheel(
    folder: Path,
    name: str,
    version: str,
    code: str = "",
    files: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
) -> Path:
    """A wheel with the module `name`, and `files` beside it; packages it `requires`."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    path.write_bytes(wheel_bytes(name, version, {f"{name}.py": code, **(files or {})}, requires))
    return path


def wheel_bytes(
    name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()
) -> bytes:
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return held.getvalue()


def source(folder: Path, name: str, version: str, code: str) -> Path:
    """A source distribution whose own build backend runs `code`, then gives an empty package."""
    built = base64.b64encode(wheel_bytes(name, version, {f"{name}.py": ""})).decode()
    backend = f"""
import base64
{code}
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    file = "{name}-{version}-py3-none-any.whl"
    with open(wheel_directory + "/" + file, "wb") as out:
        out.write(base64.b64decode("{built}"))
    return file
"""
    texts = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n',
        "backend.py": backend,
        "setup.py": code,
    }
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in texts.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path
