"""Agreement with human grades, against scipy and plain loops."""

import hashlib
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vacsr.errors import DataError, ShapeMismatch
from vacsr.evaluate.agreement import Judgments, Kind, false_negative_auroc, grade_agreement, read_judgments

FLICKR8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "flickr8k"
EXPERT = "image\tcaption_image\tcaption_index\trating_1\trating_2\trating_3\n"
CROWD = "image\tcaption_image\tcaption_index\tyes_share\tyes\tno\n"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "judgments.tsv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_files_of_experts_and_of_the_crowd(tmp_path: Path) -> None:
    text = EXPERT + 'a"b.webp\tb.webp\t2\t1\t1\t2\r\nb.webp\tb.webp\t0\t4\t4\t4\n'
    expert = read_judgments(write(tmp_path, text))
    assert (expert.kind, len(expert)) == ("expert", 2)
    assert expert.image_ids == ('a"b.webp', "b.webp")
    assert expert.caption_ids == ("b.webp#2", "b.webp#0")
    assert expert.ratings.tolist() == [[1, 1, 2], [4, 4, 4]]
    np.testing.assert_allclose(expert.grades, [4 / 3, 4])
    assert expert.same_image.tolist() == [False, True]
    crowd = read_judgments(write(tmp_path, CROWD + "a\tb\t0\t0.75\t3\t1\n"))
    assert (crowd.kind, crowd.grades.tolist()) == ("crowd", [0.75])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rename the columns"),
        (EXPERT, "no rows"),
        ("image\tcaption_image\tcaption_index\n", "no rows"),
        ("image\tcaption_image\tcaption_index\na\tb\t0\n", "no column grade, rating_1"),
        ("image\tgrade\na\t1\n", "no column caption_id or caption"),
        (CROWD.replace("caption_index", "index") + "a\tb\t0\t1\t3\t0\n", "no column caption_index"),
        (EXPERT + "a\tb\t0\t1\tmany\t1\n", "line 2.*rating_2"),
        (EXPERT + "a\tb\t0\t1\t1\t1\na\tb\t0\t1\t1\n", "line 3"),
        (EXPERT + "a\tb\t0\t1\tnan\t1\n", "line 2"),
        (CROWD + "a\tb\t-1\t1\t3\t0\n", "caption index from 0"),
        (CROWD + "a\t\t0\t1\t3\t0\n", "not blank"),
        (b"image\t\xff\xfe\n", "UTF-8"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"judgments\.tsv.*{message}"):
        read_judgments(write(tmp_path, text))


def test_split_is_the_parity_of_the_hash(tmp_path: Path) -> None:
    names = [f"{number}.webp" for number in range(50)]
    even = [name for name in names if int(hashlib.sha1(name.encode()).hexdigest()[:2], 16) % 2 == 0]
    judged = read_judgments(write(tmp_path, EXPERT + "".join(f"{name}\tx\t0\t1\t2\t3\n" for name in names)))
    dev, test = judged.subset("judged-dev"), judged.subset("judged-test")
    assert list(dev.image_ids) == even
    assert len(dev) + len(test) == 50
    assert dev.ratings.shape == (len(even), 3)


def random_judgments(kind: Kind, size: int = 200) -> Judgments:
    rng = np.random.default_rng(5)
    ratings = rng.integers(1, 5, (size, 3)).astype(np.float64)
    ratings = ratings if kind == "expert" else (ratings.mean(1, keepdims=True) - 1) / 3
    return Judgments(kind, tuple("i" * size), tuple("c" * size), ratings, rng.random(size) < 0.2)


@pytest.mark.parametrize(("kind", "variant"), [("expert", "c"), ("crowd", "b")])
def test_agreement_is_scipys(kind: Kind, variant: str) -> None:
    """The published form leaves out same-image pairs and repeats a score for each rating."""
    judged = random_judgments(kind)
    scores = judged.grades + np.random.default_rng(6).normal(size=200)
    rows = [
        (score, rating)
        for score, ratings, same in zip(scores, judged.ratings, judged.same_image, strict=True)
        for rating in ratings
        if not same
    ]
    tau = stats.kendalltau(scores, judged.grades, variant=variant).statistic
    published = stats.kendalltau(*zip(*rows, strict=True), variant=variant).statistic
    assert grade_agreement(scores, judged) == pytest.approx({
        f"{kind}_tau_{variant}": 100 * tau,
        f"{kind}_tau_{variant}_published": 100 * published,
        f"{kind}_spearman": 100 * stats.spearmanr(scores, judged.grades).statistic,
        f"{kind}_pairs": 200,
    })  # fmt: skip
    with pytest.raises(ShapeMismatch, match="3 values against 200"):
        grade_agreement([1, 2, 3], judged)


def test_of_too_few_pairs_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = random_judgments("expert", 9).take([0])
        tau, published, spearman, pairs = grade_agreement([1.0], few).values()
    assert (pairs, np.isnan([tau, published, spearman]).all()) == (1, True)


def test_false_negatives_are_well_graded_pairs_across_images() -> None:
    judged = random_judgments("expert")
    values = np.random.default_rng(7).integers(0, 20, 200).astype(float)
    rows = list(zip(values, judged.grades, judged.same_image, strict=True))
    false = [value for value, grade, same in rows if not same and grade >= 3]
    true = [value for value, grade, same in rows if not same and grade < 3]
    wins = [(p > n) + 0.5 * (p == n) for p in false for n in true]
    assert false_negative_auroc(values, judged) == pytest.approx(100 * np.mean(wins))
    assert np.isnan(false_negative_auroc([], judged.take([])))


@pytest.mark.shared
@pytest.mark.skipif(not FLICKR8K.is_dir(), reason="the Flickr8k judgments are in ../shared, which is absent")
@pytest.mark.parametrize(("kind", "pairs", "same_image"), [("expert", 1508, 81), ("crowd", 11992, 364)])
def test_real_files(kind: Kind, pairs: int, same_image: int) -> None:
    judged = read_judgments(FLICKR8K / f"judgments-{kind}.tsv")
    assert (judged.kind, len(judged), int(judged.same_image.sum())) == (kind, pairs, same_image)
    low, high = (1, 4) if kind == "expert" else (0, 1)
    assert low <= judged.grades.min() <= judged.grades.max() <= high
