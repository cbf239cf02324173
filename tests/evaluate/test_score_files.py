"""Anybody's scores from files: good ones give the figures of the matrix, bad ones name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vacsr.data import load_pairs
from vacsr.evaluate.retrieval import evaluate_scores
from vacsr.evaluate.score_files import MatrixIds, read_ids, read_scores
from vacsr.evaluate.scored import MatrixScores

IMAGES, EACH = 12, 2
Command = Callable[..., Any]


class Files:
    """A matrix and its ids, which a test may break before they are written."""

    def __init__(self, folder: Path) -> None:
        draw = np.random.default_rng(0)
        self.folder = folder
        self.score = draw.normal(size=(IMAGES, IMAGES * EACH)).astype(np.float32)
        self.sigma = draw.random(size=self.score.shape).astype(np.float32)
        self.ids: Any = {
            "images": list(range(100, 100 + IMAGES)),
            "captions": [f"c{n}" for n in range(IMAGES * EACH)],
            "caption_image": [100 + n // EACH for n in range(IMAGES * EACH)],
        }

    def write(self) -> list[str]:
        """The command line's options."""
        np.save(self.folder / "m.npy", self.score)
        np.save(self.folder / "u.npy", self.sigma)
        (self.folder / "ids.json").write_text(json.dumps(self.ids), encoding="utf-8")
        return ["--scores", str(self.folder / "m.npy"), "--ids", str(self.folder / "ids.json")]

    def expected(self) -> dict[str, Any]:
        """The result of the matrix itself."""
        owner = torch.arange(IMAGES).repeat_interleave(EACH)
        pairs = MatrixIds(tuple(map(str, self.ids["images"])), tuple(self.ids["captions"]), owner)
        scores = MatrixScores(torch.from_numpy(self.score).clone(), torch.from_numpy(self.sigma).clone())
        return evaluate_scores(scores, pairs).results[0]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_report_does_not_replace_what_was_judged(vacsr: Command, files: Files) -> None:
    options = [*files.write(), "--uncertainty", str(files.folder / "u.npy")]
    before = {path.name: path.read_bytes() for path in files.folder.iterdir()}
    for name in ("m.npy", "u.npy", "ids.json"):
        assert vacsr("evaluate", *options, "--json", files.folder / name).refused(2, f"{name} would replace what")
    assert vacsr("evaluate", *options, "--json", files.folder).refused(2, "is a folder — name a file in it")
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == before


def result(vacsr: Command, files: Files, *options: object) -> dict[str, Any]:
    out = files.folder / "out.json"
    answer = vacsr("evaluate", *options, "--json", out)
    assert (answer.code, answer.err) == (0, "")
    (found,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert f"| {found['rsum']:.1f} |" in answer.out
    return dict(found)


def test_the_figures_of_the_matrix(vacsr: Command, files: Files) -> None:
    options = files.write()
    expected = files.expected()
    found = result(vacsr, files, *options, "--uncertainty", files.folder / "u.npy")
    assert found == json.loads(json.dumps(expected))
    assert (found["split"], found["uncertainty"].keys()) == ("all", expected["uncertainty"].keys())
    plain = result(vacsr, files, *options, "--split", "test")
    assert (plain["uncertainty"], plain["split"], plain["i2t"]) == (None, "test", expected["i2t"])


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<f2"])
def test_other_precisions_and_orders(vacsr: Command, files: Files, dtype: str) -> None:
    files.score = files.score.astype(np.float16).astype(np.float32)
    expected = files.expected()
    files.score = np.asfortranarray(files.score.astype(dtype))
    found = result(vacsr, files, *files.write())
    assert found["i2t"] == pytest.approx(expected["i2t"])
    assert found["t2i"] == pytest.approx(expected["t2i"])


@pytest.mark.parametrize("names", [["scores", "other"], ["anything"]])
def test_safetensors(vacsr: Command, files: Files, names: list[str]) -> None:
    options = files.write()
    save_file({name: torch.from_numpy(files.score) * (1 + n) for n, name in enumerate(names)}, files.folder / "m.st")
    (files.folder / "m.st").rename(files.folder / "m.safetensors")
    options[1] = str(files.folder / "m.safetensors")
    assert result(vacsr, files, *options)["i2t"] == files.expected()["i2t"]


def test_the_file_is_mapped_not_read(files: Files) -> None:
    files.write()
    ids = read_ids(files.folder / "ids.json")
    scores = read_scores(files.folder / "m.npy", ids)
    raw = np.load(files.folder / "m.npy", mmap_mode="r+")
    raw[3, 4] = 42
    raw.flush()
    assert float(scores.score[3, 4]) == 42, "a page that is not written to is the file's"


def test_labels_from_other_data(vacsr: Command, files: Files) -> None:
    spec = "synthetic:images=12,per_image=2"
    pairs = load_pairs(spec, split="train")
    turned = list(reversed(pairs.caption_ids))
    files.ids = {"images": list(pairs.image_ids), "captions": turned}
    options = files.write()
    found = result(vacsr, files, *options, "--pairs", spec, "--split", "train")
    files.score = np.ascontiguousarray(files.score[:, ::-1])
    files.ids["captions"] = list(pairs.caption_ids)
    assert found["i2t"]["map_at_r"] == pytest.approx(files.expected()["i2t"]["map_at_r"])
    files.ids["captions"][5] = "elsewhere"
    answer = vacsr("evaluate", *files.write(), "--pairs", spec, "--split", "train")
    assert answer.refused(4, "caption 'elsewhere'", "is not in the data of --pairs")


def nan(files: Files) -> None:
    files.score[3, 7] = np.nan


def infinite(files: Files) -> None:
    files.score[11, 0] = -np.inf


def transposed(files: Files) -> None:
    files.score = np.ascontiguousarray(files.score.T)


def image_unscored(files: Files) -> None:
    files.score = files.score[:9]


def captions_unscored(files: Files) -> None:
    files.score = files.score[:, :20]


def rows_unnamed(files: Files) -> None:
    files.score = np.vstack((files.score, files.score))


def flat(files: Files) -> None:
    files.score = files.score.ravel()


def whole_numbers(files: Files) -> None:
    files.score = (100 * files.score).astype(np.int32)


def image_missing(files: Files) -> None:
    files.ids["images"].pop(4)


def image_repeated(files: Files) -> None:
    files.ids["images"][4] = 102


def caption_repeated(files: Files) -> None:
    files.ids["captions"][9] = "c3"


def number_and_word(files: Files) -> None:
    files.ids["images"][4] = "102"


def no_captions(files: Files) -> None:
    del files.ids["captions"]


def no_labels(files: Files) -> None:
    del files.ids["caption_image"]


def rows_for_ids(files: Files) -> None:
    files.ids["caption_image"] = [n // EACH for n in range(IMAGES * EACH)]


def short_labels(files: Files) -> None:
    files.ids["caption_image"].pop()


def long_labels(files: Files) -> None:
    files.ids["caption_image"] += [103, 104]


def odd_id(files: Files) -> None:
    files.ids["images"][2] = 1.5


def nothing(files: Files) -> None:
    files.ids["images"] = []


def a_list(files: Files) -> None:
    files.ids = [1, 2]


BROKEN: dict[Callable[[Files], None], list[str]] = {
    nan: ["holds nan for image '103' and caption 'c7'"],
    infinite: ["holds -inf for image '111' and caption 'c0'"],
    transposed: [
        "has shape [24, 12]",
        "first caption without a column: 'c12'",
        "save it as [images, captions], [12, 24]",
    ],
    image_unscored: ["has shape [9, 24]", "12 images and 24 captions; first image without a row: '109' —"],
    captions_unscored: ["has shape [12, 20]", "first caption without a column: 'c20' —"],
    rows_unnamed: ["has shape [24, 24]", "first row without image id: 12, counted from 0 —"],
    flat: ["has shape [288]", "12 images and 24 captions —"],
    whole_numbers: ["int32, expected floats — where more is better", "ranks and distances are the reverse"],
    image_missing: ["caption 'c8' belongs to image '104', which", "does not list"],
    image_repeated: ["image id '102' is given 2 times"],
    caption_repeated: ["caption id 'c3' is given 2 times"],
    number_and_word: ["image id '102' is given 2 times"],
    no_captions: ["no list 'captions'"],
    no_labels: ["does not say which image a caption belongs to — add caption_image"],
    rows_for_ids: ["caption 'c0' belongs to image '0'", "not row numbers"],
    short_labels: ["caption_image has 23 entries for 24 captions, first without one 'c23'"],
    long_labels: ["caption_image has 26 entries for 24 captions, first too many '103'"],
    odd_id: ["images[2] is 1.5, expected an id"],
    nothing: ["names no images"],
    a_list: ["holds a list"],
}


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda function: function.__name__)
def test_bad_files_are_data_errors(vacsr: Command, files: Files, breakage: Callable[[Files], None]) -> None:
    breakage(files)
    answer = vacsr("evaluate", *files.write(), "--json", files.folder / "out.json")
    assert answer.refused(4, *BROKEN[breakage])
    assert not (files.folder / "out.json").exists()


def test_an_image_too_few_where_labels_do_not_tell(vacsr: Command, files: Files) -> None:
    """The shape is what is left to notice it by."""
    files.ids["images"].append(999)
    assert vacsr("evaluate", *files.write()).refused(4, "has shape [12, 24]", "names 13 images")


def test_bad_uncertainties(vacsr: Command, files: Files) -> None:
    files.sigma[2, 2] = np.nan
    options = [*files.write(), "--uncertainty", files.folder / "u.npy"]
    assert vacsr("evaluate", *options).refused(4, "u.npy holds nan for image '102' and caption 'c2'")
    files.sigma = files.sigma[:, :3]
    files.write()
    assert vacsr("evaluate", *options).refused(4, "u.npy has shape [12, 3]")


def test_an_image_without_captions_is_told_of(vacsr: Command, files: Files) -> None:
    """It asks nothing, but stands among the answers: the figures are those of the positives by hand."""
    files.ids["caption_image"][:EACH] = [101] * EACH
    out = files.folder / "out.json"
    answer = vacsr("evaluate", *files.write(), "--json", out)
    assert answer.code == 0
    assert "warning: 1 of 12 images have no caption, first '100'" in answer.err
    (found,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    owner = [int(name) - 100 for name in files.ids["caption_image"]]
    firsts = [owner[int(files.score[row].argmax())] == row for row in range(1, IMAGES)]
    assert found["i2t"]["r1"] == pytest.approx(100 * sum(firsts) / len(firsts))


def test_half_precision_and_columns_first(vacsr: Command, files: Files) -> None:
    files.score = files.score.astype(np.float16).astype(np.float32)
    options = files.write()
    expected = result(vacsr, files, *options)
    for stored in (files.score.astype(np.float16), np.asfortranarray(files.score), files.score.astype(">f8")):
        np.save(files.folder / "m.npy", stored)
        assert result(vacsr, files, *options) == expected


def test_unreadable_files(vacsr: Command, files: Files) -> None:
    options = files.write()
    whole = (files.folder / "m.npy").read_bytes()
    (files.folder / "m.npy").write_bytes(whole[:-8])
    assert vacsr("evaluate", *options).refused(4, "m.npy is not a whole .npy array")
    for begin in (b"1.0 2.0\n", b"PK\x03\x04", b""):  # text, an archive, nothing
        (files.folder / "m.npy").write_bytes(begin)
        answer = vacsr("evaluate", *options)
        assert answer.refused(4, f"m.npy begins with {begin[:6]!r}", "write the matrix with numpy.save")
        assert "pickle" not in answer.err
    np.save(files.folder / "m.npy", files.score.astype(object))
    answer = vacsr("evaluate", *options)
    assert answer.refused(4, "m.npy")
    assert "pickle" not in answer.err
    (files.folder / "m.npy").unlink()
    assert vacsr("evaluate", *options).refused(4, "no such file", "m.npy")
    assert vacsr("evaluate", "--scores", files.folder / "m.txt", *options[2:]).refused(4, "no .npy or .safetensors")
    for text in ("{", "[" * 100_000, '{"images":' * 100_000):
        (files.folder / "ids.json").write_text(text, encoding="utf-8")
        assert vacsr("evaluate", *options).refused(4, "ids.json is not JSON")
    assert vacsr("evaluate", *options[:3], files.folder / "none.json").refused(4, "no such file")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, files.folder / "two.safetensors")
    files.write()
    assert vacsr("evaluate", "--scores", files.folder / "two.safetensors", *options[2:]).refused(4, "a, b")
    save_file({"scores": torch.ones(12, 24, dtype=torch.int64)}, files.folder / "whole.safetensors")
    answer = vacsr("evaluate", "--scores", files.folder / "whole.safetensors", *options[2:])
    assert answer.refused(4, "torch.int64, expected floats", "ranks and distances are the reverse")


@pytest.mark.parametrize("key", ["images", "captions", "caption_image"])
def test_a_list_of_ids_stands_once(vacsr: Command, files: Files, key: str) -> None:
    """Either of the two may be the one that is meant."""
    options = files.write()
    text = (files.folder / "ids.json").read_text(encoding="utf-8")
    (files.folder / "ids.json").write_text(f'{{"{key}": [1], {text[1:]}', encoding="utf-8")
    answer = vacsr("evaluate", *options, "--json", files.folder / "out.json")
    assert answer.refused(4, f"ids.json: duplicate key '{key}' — keep one of them")
    assert not (files.folder / "out.json").exists()


def test_what_does_not_go_together(vacsr: Command, files: Files) -> None:
    options = files.write()
    assert vacsr("evaluate").refused(2, "takes a RUN alone, or --scores with --ids")
    assert vacsr("evaluate", *options[:2]).refused(2, "needs --ids")
    assert vacsr("evaluate", files.folder, *options).refused(2, "stands for a RUN")
    assert vacsr("evaluate", files.folder, *options[2:]).refused(2, "takes a RUN alone, or --scores with --ids")
    assert vacsr("evaluate", *options, "--protocol", "coco-9k").refused(2, "unknown protocol 'coco-9k'")


def test_coco_protocols_need_coco(vacsr: Command, files: Files) -> None:
    pytest.importorskip("eccv_caption")
    options = files.write()
    assert vacsr("evaluate", *options, "--protocol", "coco-5k").refused(4, "first image '391895'")
    no_labels(files)
    answer = vacsr("evaluate", *files.write(), "--protocol", "eccv")
    assert answer.refused(4, "caption 'c0' is not one of COCO's test captions")


def test_masked_scores_are_judged(vacsr: Command, files: Files) -> None:
    """The lowest number of float64 leaves the range of float32, and nothing to be seen of the other scores' range."""
    options = files.write()
    masked = files.score.astype(np.float64)
    masked[0, 1] = np.finfo(np.float64).min
    np.save(files.folder / "m.npy", masked)
    found = result(vacsr, files, *options)["scores"]["score"]["all_stats"]
    assert found["median"] == np.median(masked)
    assert np.isfinite(list(found.values())).all()
