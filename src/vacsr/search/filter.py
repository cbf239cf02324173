"""A cleaned data set: without the captions that an audit suspects most."""

import csv
import io
import os
from pathlib import Path

import torch
from torch import Tensor

from vacsr.data import PairSet, PhotoSet, write_shards
from vacsr.data.archives import FilePhoto, StoredPhotos
from vacsr.data.arrow import write_parquet
from vacsr.data.features import write_features
from vacsr.errors import DataError, UsageError
from vacsr.files import write_text
from vacsr.search.audit import AuditRows

_TABLES = (".csv", ".parquet")


def parse_share(option: str, text: str) -> float:
    """
    >>> parse_share("--max-wrong", "5%"), parse_share("--max-wrong", "0.05")
    (0.05, 0.05)
    """
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"{option} {text} is no share — write 5% or 0.05") from error


def check_share(keep: float | None, max_wrong: float | None) -> None:
    if (keep is None) == (max_wrong is None) or not 0 < (keep or max_wrong or 0.0) <= 1:
        given = keep if max_wrong is None else max_wrong if keep is None else f"{keep} and {max_wrong}"
        message = f"expected one share above 0 and at most 1, not {given}"
        raise UsageError(f"{message} — write --keep 0.3 to keep 30%, or --max-wrong 5%")


def choose_captions(rows: AuditRows, *, keep: float | None = None, max_wrong: float | None = None) -> Tensor:
    """The least suspected captions, in their order. -> [K] int64

    ``keep``: this share of all. ``max_wrong``: as many as possible while at most this share of them is wrong, by the
    estimate of :class:`AuditRows`.
    """
    check_share(keep, max_wrong)
    order = rows.suspicion.argsort(stable=True)
    if max_wrong is None:
        count = round((keep or 0.0) * len(order))
    elif rows.wrong_probability.isnan().any():
        raise DataError(
            "one image has no other to compare with, so nothing says how many captions are wrong — use keep"
        )
    else:
        wrong = rows.wrong_probability[order].double().cumsum(0) / torch.arange(1, len(order) + 1)
        fitting = (wrong <= max_wrong).nonzero()  # over the parts of a data set the mean need not rise
        count = int(fitting[-1]) + 1 if len(fitting) else 0
    if not count:
        raise DataError(f"no caption is left of {len(order):,} — ask for more with keep or max_wrong")
    return order[:count].sort().values


def check_target(pairs: PairSet | PhotoSet, out: Path) -> None:
    """Refuse an output that cannot hold the data, before the work."""
    kind = out.suffix.lower()
    if isinstance(pairs, PairSet) != (kind == ".safetensors") or kind not in ("", *_TABLES, ".safetensors"):
        raise UsageError(
            f"--out {out} cannot hold these data — name FILE.csv, FILE.parquet or a folder; "
            "for embeddings, FILE.safetensors"
        )
    if kind == ".csv" and isinstance(pairs, PhotoSet) and not _are_files(pairs):
        raise UsageError(
            f"--out {out}: these photos are no files of their own — name FILE.parquet, or a folder for shards"
        )


def _are_files(pairs: PhotoSet) -> bool:
    return isinstance(pairs.photos, StoredPhotos) and all(isinstance(item, FilePhoto) for item in pairs.photos.items)


def write_pairs(pairs: PairSet | PhotoSet, out: Path) -> str:
    """Write a data set, and return the SPEC that reads it.

    Photos go to a ``.csv`` file, which names their files relative to itself, to a ``.parquet`` file, which holds them,
    or to a folder of webdataset shards.
    Embeddings go to a ``.safetensors`` file, with their ids and captions in a ``.csv`` file beside it.
    """
    check_target(pairs, out)
    if isinstance(pairs, PairSet):
        table = out.with_suffix(".csv")
        write_features(
            out, image=pairs.images, text=pairs.texts, caption_image=pairs.caption_image, provenance=pairs.provenance
        )
        write_text(table, _table(pairs, pairs.image_ids))
        return f"features:{out},captions={table}"
    if out.suffix.lower() == ".csv":
        root = out.resolve().parent
        write_text(
            out,
            _table(
                pairs,
                [os.path.relpath(Path(pairs.photos.name(n)).resolve(), root) for n in range(len(pairs.image_ids))],
            ),
        )
        return f"csv:{out}"
    if out.suffix.lower() == ".parquet":
        write_parquet(pairs, out)
        return f"parquet:{out}"
    write_shards(pairs, out)
    return f"shards:{out}/*.tar"


def _table(pairs: PairSet | PhotoSet, files: list[str] | tuple[str, ...]) -> str:
    """One line per caption, as ``csv:`` and ``captions=`` read them; cells stay as they are, for they are data."""
    head, text = ["image", "image_id", "caption_id"], io.StringIO(newline="")
    head = ["image", "image_row", "caption_id"] if isinstance(pairs, PairSet) else head
    head += ["caption"] * (pairs.captions is not None) + ["split"] * (pairs.split != "all")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for col, row in enumerate(pairs.caption_image.tolist()):
        line = [files[row], row if isinstance(pairs, PairSet) else pairs.image_ids[row], pairs.caption_ids[col]]
        line += [] if pairs.captions is None else [pairs.captions[col]]
        writer.writerow([*line, *([pairs.split] * (pairs.split != "all"))])
    return text.getvalue()
