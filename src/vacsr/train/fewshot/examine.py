"""A trained method's answers to a test set."""

from __future__ import annotations

import torch

from vacsr.backbones.inputs import PhotoReader, Progress
from vacsr.backbones.preprocess import PhotoTransform
from vacsr.data.fewshot import LabelledPhotos
from vacsr.evaluate.fewshot import Answers, answers, join_answers
from vacsr.methods.fewshot import ClassSet, FewshotMethod
from vacsr.train.precision import matmul_precision


@torch.no_grad()
def examine(
    method: FewshotMethod,
    photos: LabelledPhotos,
    classes: ClassSet,
    *,
    transform: PhotoTransform,
    batch_size: int = 100,
    workers: int = 0,
    progress: Progress | None = None,
) -> Answers:
    """Every photo against these classes, in float32: figures are compared across runs, however these were trained."""
    device = next(method.parameters()).device
    reader = PhotoReader(photos.photos, transform, workers=workers)
    batches = [range(start, min(start + batch_size, len(photos))) for start in range(0, len(photos), batch_size)]
    parts: list[Answers] = []
    with matmul_precision("fp32"):
        prepared = method.prepared(classes)
        for rows, pixels in zip(batches, reader.stream(batches), strict=True):
            normal = transform.normalize(pixels.to(device))
            logits, sigma = method.scored(normal, prepared)
            labels = photos.labels[rows.start : rows.stop]
            parts.append(answers(logits, labels, uncertainty=sigma, graded=sigma is not None))
            if progress is not None:
                progress(rows.stop, len(photos))
    return join_answers(parts)
