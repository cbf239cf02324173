"""Human grades: the files, the split, and the agreement figures against scipy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.judgments import (
    Judgments,
    Kind,
    false_negative_auroc,
    grade_agreement,
    kendall_tau,
    read_judgments,
    spearman,
)

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
FLICKR8K = SHARED / "data" / "flickr8k"
EXPERT = "image\tcaption_image\tcaption_index\trating_1\trating_2\trating_3\n"
CROWD = "image\tcaption_image\tcaption_index\tyes_share\tyes\tno\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "judgments.tsv"
    path.write_text(text, encoding="utf-8")
    return path


def test_expert_file(tmp_path: Path) -> None:
    read = read_judgments(write(tmp_path, EXPERT + 'a"b.webp\tb.webp\t2\t1\t1\t2\nb.webp\tb.webp\t0\t4\t4\t4\n'))
    assert read.kind == "expert"
    assert read.image_ids == ('a"b.webp', "b.webp")
    assert read.caption_ids == ("b.webp#2", "b.webp#0")
    np.testing.assert_allclose(read.grades, [4 / 3, 4])
    assert read.ratings is not None
    assert read.ratings.tolist() == [[1, 1, 2], [4, 4, 4]]
    assert read.same_image.tolist() == [False, True]


def test_crowd_file(tmp_path: Path) -> None:
    read = read_judgments(write(tmp_path, CROWD + "a\tb\t0\t0.75\t3\t1\n"))
    assert (read.kind, read.grades.tolist(), read.ratings, len(read)) == ("crowd", [0.75], None, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (EXPERT, "no judgments"),
        ("image\tcaption_image\tcaption_index\n", "rating_1, rating_2, rating_3 missing"),
        (CROWD.replace("caption_index", "index"), "caption_index missing.*rename"),
        (EXPERT + "a\tb\t0\t1\tmany\t1\n", "line 2: rating_2 is 'many', expected a number"),
        (EXPERT + "a\tb\t0\t1\t1\t1\na\tb\t0\t1\t1\n", "line 3: rating_3 is None"),
        (EXPERT + "a\tb\t0\t1\tnan\t1\n", "rating_2 is 'nan'"),
        (CROWD + "a\tb\t-1\t1\t3\t0\n", "caption_index is '-1'"),
        (CROWD + "a\t\t0\t1\t3\t0\n", "no image name"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_judgments(write(tmp_path, text))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_judgments(tmp_path / "absent.tsv")
    (tmp_path / "binary.tsv").write_bytes(b"image\t\xff\xfe\n")
    with pytest.raises(DataError, match="UTF-8"):
        read_judgments(tmp_path / "binary.tsv")


def test_split_is_the_parity_of_the_hash(tmp_path: Path) -> None:
    names = [f"{number}.webp" for number in range(50)]
    even = [name for name in names if int(hashlib.sha1(name.encode()).hexdigest()[:2], 16) % 2 == 0]
    read = read_judgments(write(tmp_path, EXPERT + "".join(f"{name}\tx\t0\t1\t2\t3\n" for name in names)))
    dev, test = read.subset("judged-dev"), read.subset("judged-test")
    assert list(dev.image_ids) == even
    assert len(dev) + len(test) == len(read.subset("all")) == 50
    assert dev.ratings is not None
    assert dev.ratings.shape == (len(even), 3)
    with pytest.raises(UsageError, match="judged-dev, judged-test, all"):
        read.subset("test")  # type: ignore[arg-type]


def test_take_keeps_columns_aligned() -> None:
    judged = random_judgments("expert", 9)
    taken, nothing = judged.take([7, 2]), judged.take([])
    assert taken.ratings is not None
    np.testing.assert_allclose(taken.ratings.mean(1), taken.grades)
    np.testing.assert_array_equal(taken.same_image, judged.same_image[[7, 2]])
    assert len(nothing) == 0
    assert np.isnan(grade_agreement([], nothing)).all()
    assert np.isnan(false_negative_auroc([], nothing))


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(2, 60), levels=st.tuples(st.integers(1, 80), st.integers(1, 80)), seed=st.integers(0, 2**32 - 1)
)
@pytest.mark.parametrize("variant", ["b", "c"])
def test_kendall_and_spearman_equal_scipy(variant: str, size: int, levels: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, levels[0], size), rng.integers(0, levels[1], size)
    expected = stats.kendalltau(x, y, variant=variant).statistic
    assert kendall_tau(x, y, variant=variant) == pytest.approx(expected, nan_ok=True)  # type: ignore[arg-type]
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    else:
        assert np.isnan(spearman(x, y))


def test_kendall_counts_pairs_plainly() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, 50), rng.integers(0, 4, 50)
    pairs = [(i, j) for i in range(50) for j in range(i)]
    surplus = sum(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs)
    untied_x, untied_y = sum(x[i] != x[j] for i, j in pairs), sum(y[i] != y[j] for i, j in pairs)
    assert kendall_tau(x, y) == pytest.approx(surplus / np.sqrt(untied_x * untied_y))
    assert kendall_tau(x, y, variant="c") == pytest.approx(2 * surplus / (50**2 * 3 / 4))


def random_judgments(kind: Kind, size: int = 200) -> Judgments:
    rng = np.random.default_rng(5)
    ratings = rng.integers(1, 5, (size, 3)).astype(np.float64)
    expert = kind == "expert"
    return Judgments(
        kind=kind,
        image_ids=tuple("i" * size),
        caption_ids=tuple("c" * size),
        grades=ratings.mean(1) if expert else (ratings.mean(1) - 1) / 3,
        ratings=ratings if expert else None,
        same_image=rng.random(size) < 0.2,
    )


def test_expert_agreement_leaves_out_and_repeats() -> None:
    judged = random_judgments("expert")
    assert judged.ratings is not None
    scores = judged.grades + np.random.default_rng(6).normal(size=200)
    result = grade_agreement(scores, judged)
    rows = [
        (score, rating)
        for score, ratings, same in zip(scores, judged.ratings, judged.same_image, strict=True)
        if not same
        for rating in ratings
    ]
    assert result.tau == pytest.approx(100 * stats.kendalltau(scores, judged.grades, variant="c").statistic)
    assert result.published == pytest.approx(100 * stats.kendalltau(*zip(*rows, strict=True), variant="c").statistic)
    assert result.spearman == pytest.approx(100 * stats.spearmanr(scores, judged.grades).statistic)


def test_crowd_agreement_leaves_out_same_image() -> None:
    judged = random_judgments("crowd")
    scores = judged.grades + np.random.default_rng(6).normal(size=200)
    result, across = grade_agreement(scores, judged), ~judged.same_image
    assert result.tau == pytest.approx(100 * stats.kendalltau(scores, judged.grades).statistic)
    assert result.published == pytest.approx(100 * stats.kendalltau(scores[across], judged.grades[across]).statistic)


def test_false_negatives_are_well_graded_pairs_across_images() -> None:
    judged = random_judgments("expert")
    values = np.random.default_rng(7).integers(0, 20, 200).astype(float)
    rows = list(zip(values, judged.grades, judged.same_image, strict=True))
    false = [value for value, grade, same in rows if not same and grade >= 3]
    true = [value for value, grade, same in rows if not same and grade < 3]
    wins = [(p > n) + 0.5 * (p == n) for p in false for n in true]
    assert false_negative_auroc(values, judged) == pytest.approx(np.mean(wins))
    assert np.isnan(false_negative_auroc(values, judged, threshold=5))
    assert np.isnan(false_negative_auroc(values, judged, threshold=0))


def test_bad_requests_are_refused() -> None:
    judged = random_judgments("crowd")
    with pytest.raises(DataError, match="read the file of the experts"):
        false_negative_auroc(judged.grades, judged)
    with pytest.raises(ShapeMismatch, match="3 values against 200"):
        grade_agreement([1, 2, 3], judged)
    with pytest.raises(UsageError, match="variant='a'"):
        kendall_tau([1, 2], [1, 2], variant="a")  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch, match="aligned columns"):
        Judgments("crowd", ("a",), (), np.zeros(1), None, np.zeros(1, dtype=bool))
    with pytest.raises(DataError, match="without ratings"):
        Judgments("expert", ("a",), ("b#0",), np.zeros(1), None, np.zeros(1, dtype=bool))


@pytest.mark.shared
@pytest.mark.skipif(not FLICKR8K.is_dir(), reason="the Flickr8k judgments lie in ../shared, which is absent")
@pytest.mark.parametrize(
    ("name", "kind", "pairs", "same_image"), [("expert", "expert", 1508, 81), ("crowd", "crowd", 11992, 364)]
)
def test_real_files(name: str, kind: Kind, pairs: int, same_image: int) -> None:
    read = read_judgments(FLICKR8K / f"judgments-{name}.tsv")
    assert (read.kind, len(read), int(read.same_image.sum())) == (kind, pairs, same_image)
    low, high = (1, 4) if kind == "expert" else (0, 1)
    assert read.grades.min() >= low
    assert read.grades.max() <= high
    assert len(read.subset("judged-dev")) + len(read.subset("judged-test")) == pairs
    scores = np.random.default_rng(0).random(pairs)
    expected = stats.kendalltau(scores, read.grades, variant="c" if kind == "expert" else "b").statistic
    assert grade_agreement(scores, read).tau == pytest.approx(100 * expected)
