"""Where embeddings come from, so that a model never meets those of other towers unnoticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from vacsr.errors import ProvenanceMismatch


@dataclass(frozen=True)
class Provenance:
    """Where embeddings come from; "" means unknown."""

    backbone: str = ""  # the towers
    preprocessing: str = ""  # how pixels and words became tensors
    revision: str = ""  # the version of the weights
    encoder: str = ""  # JSON: what loads the towers again, see vacsr.backbones.base.FeatureEncoder

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Provenance:
        """Read it from a file's metadata; what is not there is unknown."""
        return cls(**{field.name: metadata.get(field.name, "") for field in fields(cls)})

    def as_metadata(self) -> dict[str, str]:
        """The known fields, as a file's metadata holds them."""
        return {name: value for name, value in asdict(self).items() if value}

    def check(self, other: Provenance) -> None:
        """Raise when ``other`` comes from elsewhere; call it on what the model expects. Unknown matches anything."""
        for name, expected in asdict(self).items():
            actual = getattr(other, name)
            if name != "encoder" and expected and actual and expected != actual:
                message = f"the model expects embeddings with {name} {expected!r}, these have {actual!r}"
                raise ProvenanceMismatch(f"{message} — embed the data as the model's were, or train a model on these")


UNKNOWN = Provenance()  # nothing is known: fits everything
