"""Anybody's scores from files: good ones give the metrics of the matrix, bad ones name what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vacsr.data import load_pairs
from vacsr.evaluate.report import evaluate_scores
from vacsr.evaluate.score_files import MatrixIds, MatrixScores, read_ids, read_scores

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


def result(vacsr: Command, files: Files, *options: object) -> dict[str, Any]:
    out = files.folder / "out.json"
    answer = vacsr("evaluate", *options, "--json", out)
    assert (answer.code, answer.err) == (0, "")
    (found,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert f"| {found['rsum']:.1f} |" in answer.out
    return dict(found)


def test_the_metrics_of_the_matrix(vacsr: Command, files: Files) -> None:
    options = files.write()
    expected = files.expected()
    found = result(vacsr, files, *options, "--uncertainty", files.folder / "u.npy")
    assert found == json.loads(json.dumps(expected))
    assert found["split"] == "all"
    plain = result(vacsr, files, *options, "--split", "test")
    assert (plain["uncertainty"], plain["split"], plain["i2t"]) == (None, "test", expected["i2t"])


def test_the_report_does_not_replace_its_inputs(vacsr: Command, files: Files) -> None:
    options = [*files.write(), "--uncertainty", str(files.folder / "u.npy")]
    before = {path.name: path.read_bytes() for path in files.folder.iterdir()}
    for name in ("m.npy", "u.npy", "ids.json"):
        assert vacsr("evaluate", *options, "--json", files.folder / name).refused(2, "name another file")
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == before


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<f2", ">f8"])
def test_other_precisions_and_orders(vacsr: Command, files: Files, dtype: str) -> None:
    files.score = files.score.astype(np.float16).astype(np.float32)
    expected = files.expected()
    for stored in (files.score.astype(dtype), np.asfortranarray(files.score.astype(dtype))):
        files.score = stored
        assert result(vacsr, files, *files.write())["i2t"] == pytest.approx(expected["i2t"])


@pytest.mark.parametrize("names", [["scores", "other"], ["anything"]])
def test_safetensors(vacsr: Command, files: Files, names: list[str]) -> None:
    options = files.write()
    options[1] = str(files.folder / "m.safetensors")
    save_file({name: torch.from_numpy(files.score) * (1 + n) for n, name in enumerate(names)}, options[1])
    assert result(vacsr, files, *options)["i2t"] == files.expected()["i2t"]


def test_the_file_is_mapped_not_read(files: Files) -> None:
    files.write()
    ids = read_ids(files.folder / "ids.json")
    owner = torch.arange(IMAGES).repeat_interleave(EACH)
    scores = read_scores(files.folder / "m.npy", MatrixIds(ids["images"], ids["captions"], owner))
    raw = np.load(files.folder / "m.npy", mmap_mode="r+")
    raw[3, 4] = 42
    raw.flush()
    assert float(scores.score[3, 4]) == 42, "a page that is not written to is the file's"


def test_labels_from_other_data(vacsr: Command, files: Files) -> None:
    spec = "synthetic:images=12,per_image=2"
    pairs = load_pairs(spec, split="train")
    files.ids = {"images": list(pairs.image_ids), "captions": list(reversed(pairs.caption_ids))}
    found = result(vacsr, files, *files.write(), "--pairs", spec, "--split", "train")
    files.score = np.ascontiguousarray(files.score[:, ::-1])
    files.ids["captions"] = list(pairs.caption_ids)
    assert found["i2t"]["map_at_r"] == pytest.approx(files.expected()["i2t"]["map_at_r"])
    files.ids["captions"][5] = "elsewhere"
    answer = vacsr("evaluate", *files.write(), "--pairs", spec, "--split", "train")
    assert answer.refused(4, "'elsewhere'", "check ids and split")


def scores(change: Callable[[Any], Any]) -> Callable[[Files], None]:
    def breakage(files: Files) -> None:
        files.score = change(files.score)

    return breakage


def at(row: int, col: int, value: float) -> Callable[[Files], None]:
    return lambda files: files.score.__setitem__((row, col), value)


def ids(key: str, change: Callable[[list[Any]], Any]) -> Callable[[Files], None]:
    return lambda files: files.ids.__setitem__(key, change(files.ids[key]))


BROKEN: dict[str, tuple[Callable[[Files], None], tuple[str, ...]]] = {
    "nan": (at(3, 7, np.nan), ("nan for image '103' and caption 'c7'",)),
    "infinite": (at(11, 0, -np.inf), ("-inf for image '111' and caption 'c0'",)),
    "transposed": (scores(lambda m: np.ascontiguousarray(m.T)), ("shape [24, 12]", "[images, captions], [12, 24]")),
    "image unscored": (scores(lambda m: m[:9]), ("shape [9, 24]", "12 images and 24 captions")),
    "whole numbers": (scores(lambda m: (100 * m).astype(np.int32)), ("int32", "save the negative")),
    "objects": (scores(lambda m: m.astype(object)), ("m.npy",)),
    "image unnamed": (ids("images", lambda names: names[:4] + names[5:]), ("caption 'c8'", "image '104'")),
    "image repeated": (ids("images", lambda names: [*names, "102"]), ("image id '102'",)),
    "caption repeated": (ids("captions", lambda names: [*names[:-1], "c3"]), ("caption id 'c3'",)),
    "no captions": (lambda files: files.ids.pop("captions"), ("lists images and captions",)),
    "empty": (ids("images", lambda names: []), ("images is not a list of ids",)),
    "an id for a list": (ids("caption_image", lambda names: names[0]), ("caption_image is not a list of ids",)),
    "no labels": (lambda files: files.ids.pop("caption_image"), ("add caption_image",)),
    "rows for ids": (ids("caption_image", lambda names: [name - 100 for name in names]), ("not row numbers",)),
    "short labels": (ids("caption_image", lambda names: names[:-1]), ("23 entries for 24 captions",)),
    "odd id": (ids("images", lambda names: [*names[:2], 1.5, *names[3:]]), ("images[2] is 1.5",)),
    "a list": (lambda files: setattr(files, "ids", [1, 2]), ("an object with lists",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_bad_files_are_data_errors(vacsr: Command, files: Files, name: str) -> None:
    breakage, words = BROKEN[name]
    breakage(files)
    answer = vacsr("evaluate", *files.write(), "--json", files.folder / "out.json")
    assert answer.refused(4, *words)
    assert "pickle" not in answer.err
    assert not (files.folder / "out.json").exists()


def test_bad_uncertainties(vacsr: Command, files: Files) -> None:
    files.sigma[2, 2] = np.nan
    options = [*files.write(), "--uncertainty", files.folder / "u.npy"]
    assert vacsr("evaluate", *options).refused(4, "u.npy holds nan for image '102' and caption 'c2'")
    files.sigma = files.sigma[:, :3]
    files.write()
    assert vacsr("evaluate", *options).refused(4, "u.npy has shape [12, 3]")


def test_an_image_without_captions_is_no_query(vacsr: Command, files: Files) -> None:
    """It is still an answer: the metrics are those of the positives by hand."""
    files.ids["caption_image"][:EACH] = [101] * EACH
    out = files.folder / "out.json"
    answer = vacsr("evaluate", *files.write(), "--json", out)
    assert answer.code == 0
    assert "warning: 1 of 12 images have no caption, first '100'" in answer.err
    (found,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    owner = [int(name) - 100 for name in files.ids["caption_image"]]
    firsts = [owner[int(files.score[row].argmax())] == row for row in range(1, IMAGES)]
    assert found["i2t"]["r1"] == pytest.approx(100 * sum(firsts) / len(firsts))


def test_unreadable_files(vacsr: Command, files: Files) -> None:
    options = files.write()
    matrix, names = files.folder / "m.npy", files.folder / "ids.json"
    endless = b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + b" " * 100
    for content in (matrix.read_bytes()[:-8], b"1.0 2.0\n", b"PK\x03\x04", b"", endless):
        matrix.write_bytes(content)
        assert vacsr("evaluate", *options).refused(4, "m.npy")
    matrix.unlink()
    assert vacsr("evaluate", *options).refused(4, "no such file", "m.npy")
    assert vacsr("evaluate", "--scores", files.folder / "m.txt", *options[2:]).refused(4, "numpy.save")
    options = files.write()
    for text in ("{", "[" * 100_000, '{"images":' * 100_000, f'{{"images": [1], {json.dumps(files.ids)[1:]}'):
        names.write_text(text, encoding="utf-8")
        assert vacsr("evaluate", *options).refused(4, "ids.json")
    options = files.write()
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, files.folder / "two.safetensors")
    assert vacsr("evaluate", "--scores", files.folder / "two.safetensors", *options[2:]).refused(4, "a, b")
    save_file({"scores": torch.ones(12, 24, dtype=torch.int64)}, files.folder / "whole.safetensors")
    answer = vacsr("evaluate", "--scores", files.folder / "whole.safetensors", *options[2:])
    assert answer.refused(4, "torch.int64", "save the negative")


def test_what_does_not_go_together(vacsr: Command, files: Files) -> None:
    options = files.write()
    assert vacsr("evaluate").refused(2, "--scores with --ids")
    assert vacsr("evaluate", *options[:2]).refused(2, "--scores with --ids")
    assert vacsr("evaluate", files.folder, *options).refused(2, "--scores with --ids")
    assert vacsr("evaluate", files.folder, *options[2:]).refused(2, "--scores with --ids")
    assert vacsr("evaluate", *options, "--posthoc", "cosine").refused(2, "--uncertainty FILE")
    assert vacsr("evaluate", *options, "--protocol", "coco-9k").refused(2, "unknown protocol 'coco-9k'")


def test_coco_protocols_need_coco(vacsr: Command, files: Files) -> None:
    pytest.importorskip("eccv_caption")
    assert vacsr("evaluate", *files.write(), "--protocol", "coco-5k").refused(4, "first '391895'")
    del files.ids["caption_image"]
    assert vacsr("evaluate", *files.write(), "--protocol", "eccv").refused(4, "caption 'c0'")
