"""Few-shot metrics against torchmetrics, plain loops and the paper's own table."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from vacsr.errors import DataError, ShapeMismatch
from vacsr.evaluate.fewshot import (
    answers,
    calibration_error,
    fewshot_result,
    join_answers,
    selective,
)

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


def drawn(seed: int, *, photos: int = 300, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(photos, classes, generator=generator)
    return logits, torch.randint(classes, (photos,), generator=generator)


def test_accuracy_and_calibration_are_those_of_torchmetrics() -> None:
    logits, _ = drawn(0)  # labels as likely as they are said to be: else one bin would do
    labels = torch.multinomial(logits.softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    result = fewshot_result("base", answers(logits, labels), classes=7)
    accuracy = multiclass_accuracy(logits, labels, num_classes=7, average="micro")
    ece = multiclass_calibration_error(logits.softmax(1), labels, num_classes=7, n_bins=15, norm="l1")
    assert result["accuracy"] == pytest.approx(100 * float(accuracy))
    assert result["ece"] == pytest.approx(100 * float(ece), abs=1e-4)
    assert (result["split"], result["samples"], result["classes"]) == ("base", 300, 7)


def test_batches_join_to_the_same_answers() -> None:
    logits, labels = drawn(1)
    sigma = logits.square()
    whole = answers(logits, labels, uncertainty=sigma, graded=True)
    cuts = [slice(0, 100), slice(100, 101), slice(101, 300)]
    parts = [answers(logits[cut], labels[cut], uncertainty=sigma[cut], graded=True) for cut in cuts]
    for one, other in zip(whole, join_answers(parts), strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_grade_and_uncertainty_are_of_the_predicted_class() -> None:
    assert answers(torch.zeros(3, 5), torch.tensor([0, 1, 4])).correct.tolist() == [True, False, False]
    logits, labels = drawn(2, photos=20)
    sigma = torch.rand(20, 7, generator=torch.Generator().manual_seed(3))
    got = answers(logits, labels, uncertainty=sigma, graded=True)
    assert got.uncertainty is not None
    assert got.grade is not None
    for row in range(20):
        best = max(range(7), key=lambda column: float(logits[row, column]))
        assert int(got.predicted[row]) == best
        assert bool(got.correct[row]) == (best == int(labels[row]))
        assert float(got.uncertainty[row]) == pytest.approx(float(sigma[row, best]))
        assert float(got.grade[row]) == pytest.approx(1 / (1 + math.exp(-float(logits[row, best]))))


def test_bad_logits_are_refused() -> None:
    with pytest.raises(DataError, match="not finite"):
        answers(torch.tensor([[0.0, torch.nan]]), torch.tensor([0]))
    with pytest.raises(ShapeMismatch, match="one label per row"):
        answers(torch.zeros(2, 3), torch.tensor([0]))


@PROPERTY
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.sampled_from([1, 2, 3, 10, 15]))
def test_calibration_by_a_plain_loop(given_answers: list[tuple[float, bool]], bins: int) -> None:
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        inside = [pair for pair in given_answers if low < pair[0] <= high or (number == 0 and pair[0] == 0)]
        if inside:
            total += abs(sum(hit for _, hit in inside) - sum(sure for sure, _ in inside))
    got = calibration_error([sure for sure, _ in given_answers], [float(hit) for _, hit in given_answers], bins=bins)
    assert got == pytest.approx(total / len(given_answers), abs=1e-9)


def test_an_edge_belongs_to_the_bin_below() -> None:
    assert calibration_error([0.5, 1.0], [1, 0], bins=2) == 0.75


def test_selective_accuracy_by_a_plain_sort() -> None:
    logits, labels = drawn(4)
    got = answers(logits, labels)
    sigma = torch.rand(300, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = selective(
        sigma, got.correct, coverages=(0.1, 0.333, 0.55, 1.0)
    )  # 0.55 · 300 is a little more than 165 in floats
    ranked = [bool(got.correct[row]) for row in sorted(range(300), key=lambda row: float(sigma[row]))]
    expected = [100 * sum(ranked[:count]) / count for count in (30, 100, 165, 300)]
    assert found["accuracy"] == pytest.approx(expected)
    risks = [1 - sum(ranked[:count]) / count for count in range(1, 301)]
    assert found["aurc"] == pytest.approx(100 * sum(risks) / 300)


def test_a_result_has_curves_for_what_there_is() -> None:
    logits, labels = drawn(6)
    plain = fewshot_result("new", answers(logits, labels), classes=7, coverages=(0.5, 1.0))
    assert list(plain["selective"]) == ["confidence"]
    assert "ece_grade" not in plain
    assert plain["selective"]["confidence"]["accuracy"][-1] == pytest.approx(plain["accuracy"])
    graded = fewshot_result("new", answers(logits, labels, uncertainty=logits.abs(), graded=True), classes=7)
    assert list(graded["selective"]) == ["confidence", "uncertainty"]
    got = answers(logits, labels)
    signals = {"confidence": -got.confidence, "uncertainty": logits.abs()[range(300), got.predicted].double()}
    assert graded["selective"] == {name: selective(signal, got.correct) for name, signal in signals.items()}
    assert graded["ece_grade"] != graded["ece"]
